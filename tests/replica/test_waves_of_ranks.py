"""A data-parallel group of real replicas: instants of waves by hand, with leaps and without.

An iteration takes 10 us, 1 us for each of its tokens, and 0.01 us for each token of context. A
decode at a context of 100 tokens takes 12 us; one token that keeps pace takes 11.01 us.
"""

from __future__ import annotations

import pytest

from emu.replica import events as ev
from emu.replica.states import ReplicaState
from emu.replica.wave import WaveGroup
from emu.request import Status
from tests.replica.stage import US, Stage

pytestmark = [pytest.mark.doubles, pytest.mark.parametrize("leap", [True, False])]
S = ReplicaState


class Ranks:
    """Three ranks of one group. The first has a prompt of 100 tokens, the second one of 10."""

    def __init__(self, *, leap: bool, output: int = 3) -> None:
        self.stage = Stage(S.COLOCATED, S.COLOCATED, S.COLOCATED, leap=leap)
        self.group = WaveGroup("ranks", shares_experts=False)
        for replica in self.stage.replicas:
            self.group.join(replica)
        self.replicas, self.actors = self.stage.replicas, self.stage.actors
        self.slow = self.stage.submit(0, 100, output, to=0)
        self.fast = self.stage.submit(1, 10, output, to=1)
        self.stage.kernel.rest()

    def at_us(self, when: float) -> None:
        self.stage.kernel.run(round(when * US))

    def rest(self) -> None:
        self.stage.kernel.run()

    def end_us(self) -> dict[int, float]:
        """When each request ended."""
        return {one: at_ns / US for one, _, _, at_ns in self.stage.ends}

    def figures(self) -> list[tuple[int, float, int]]:
        """(iterations, microseconds of work, tokens of prompts and answers) of each rank."""
        for replica in self.replicas:
            replica.settle()
        return [
            (r.counters.iterations, r.counters.busy_ns / US, sum(r.tokens_produced))
            for r in self.replicas
        ]


def test_a_wave_lasts_as_long_as_its_slowest_rank(leap: bool) -> None:
    """Wave 2 begins at 110 us with the end of the long prompt, wave 3 at 122 us."""
    made = Ranks(leap=leap)
    made.rest()
    assert (made.slow.first_token_ns, made.fast.first_token_ns) == (110 * US, 20 * US)
    assert made.end_us() == {0: 134.01, 1: 133.11}
    assert made.group.waves == 3


def test_a_rank_works_while_its_own_batch_runs_and_no_longer(leap: bool) -> None:
    made = Ranks(leap=leap)
    made.rest()
    assert made.figures()[:2] == [(3, 110 + 12 + 12.01, 103), (3, 20 + 11.1 + 11.11, 13)]


def test_an_idle_rank_keeps_pace_and_makes_no_tokens(leap: bool) -> None:
    made = Ranks(leap=leap)
    made.rest()
    iterations, busy_us, tokens = made.figures()[2]
    assert (iterations, tokens) == (3, 0)
    assert busy_us == pytest.approx(3 * 11.01)
    assert not made.replicas[2].flight.holds_batch()


def test_what_is_read_between_two_waves_is_what_has_ended(leap: bool) -> None:
    """At 121.5 us the second rank's decode has ended, the first one's has not."""
    made = Ranks(leap=leap)
    made.at_us(121.5)
    computed = [tokens for _, _, tokens in made.figures()]
    assert computed == [100 + 1, 10 + 2, 0]


def test_a_crash_of_the_slowest_rank_lets_the_others_go_at_once(leap: bool) -> None:
    made = Ranks(leap=leap)
    made.at_us(50)
    assert [r.request_id for r in made.stage.crash(0)] == [0]
    assert 0 not in made.group.entered
    made.rest()
    assert made.end_us() == {1: 72.21}
    assert made.fast.first_token_ns == 20 * US


def test_a_rank_that_is_back_is_waited_for_again(leap: bool) -> None:
    made = Ranks(leap=leap, output=6)
    made.at_us(50)
    made.stage.crash(0)
    made.at_us(55)
    replica = made.replicas[0]
    made.actors[0].tell(ev.Restarted(life=replica.incarnation))
    made.stage.command(0, S.COLOCATED, weights=True)
    made.stage.submit(7, 100, 1, to=0)
    made.rest()
    assert made.end_us()[7] == pytest.approx(61.1 + 110)  # the wave of 50 us had left without it
    assert made.end_us()[1] == pytest.approx(61.1 + 110 + 11.12 + 11.13 + 11.14)


def test_a_paused_rank_holds_the_whole_group(leap: bool) -> None:
    """Its prompt, due at 20 us, ends 200 us later; the others wait for its next batch."""
    made = Ranks(leap=leap)
    made.at_us(5)
    replica = made.replicas[1]
    made.actors[1].tell(ev.Paused())
    made.at_us(205)
    made.actors[1].tell(ev.Unpaused(life=replica.incarnation, since_ns=replica.paused_ns))
    made.rest()
    assert made.fast.first_token_ns == 220 * US
    assert made.slow.first_token_ns == 110 * US
    assert made.end_us() == {0: 220 + 12 + 12.01, 1: 220 + 12 + 11.11}


def test_a_rank_that_stops_serving_is_not_waited_for(leap: bool) -> None:
    """It keeps pace in the wave under way and in none after it."""
    made = Ranks(leap=leap)
    made.at_us(115)
    made.stage.command(2, S.SHUTTING_COLOCATED)
    made.rest()
    assert made.replicas[2].state is S.INACTIVE
    assert made.figures()[2][0] == 2
    assert made.end_us() == {0: 134.01, 1: 133.11}


def test_a_request_for_a_rank_in_the_middle_of_a_wave_is_in_the_next(leap: bool) -> None:
    """At 115 us wave 2 is under way until 122 us; the prompt of 50 tokens is in wave 3."""
    made = Ranks(leap=leap, output=4)
    made.at_us(115)
    late = made.stage.submit(5, 50, 1, to=2)
    made.rest()
    assert late.first_token_ns == (122 + 60) * US
    assert made.end_us() == {0: 182 + 12.02, 1: 182 + 11.12, 5: 182.0}


def test_a_straggler_makes_every_later_wave_longer(leap: bool) -> None:
    made = Ranks(leap=leap)
    made.at_us(115)
    made.actors[1].tell(ev.SlowdownSet(factor=2.0))
    made.rest()
    assert made.end_us() == {0: 134.01, 1: pytest.approx(122 + 22.22)}


def test_a_client_that_leaves_shortens_no_wave_under_way(leap: bool) -> None:
    """The long request is cancelled at 115 us: its decode ends at 122 us all the same."""
    made = Ranks(leap=leap)
    made.at_us(115)
    made.actors[0].post(ev.Cancelled(request=made.slow, status=Status.CANCELLED, reason="left"))
    made.rest()
    assert made.end_us() == {0: 122.0, 1: 133.11}
    assert [status for one, status, _, _ in made.stage.ends if one == 0] == ["CANCELLED"]
