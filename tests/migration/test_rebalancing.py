"""Which running request moves where: the rule, its timer, draining, policies of a user's own.

No kernel and no cluster: replicas are machines with a scheduler of a page, time is set by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.config.schema import MigrationTable
from emu.errors import PluginError
from emu.kernel.clock import PARK
from emu.migration import live
from emu.migration.destinations import Choosing, Destinations
from emu.migration.live import LiveMigrator, Use, choose_pair
from emu.policy.own import OwnMigration, OwnPlacement
from emu.policy.views import ReplicaView
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.request import Request
from tests.migration.fakes import FakeWorld

pytestmark = pytest.mark.doubles
S = ReplicaState
PERIOD_NS = 100_000_000


def view(replica: Replica) -> ReplicaView:
    scheduler = replica.scheduler
    return ReplicaView(
        replica_id=replica.replica_id,
        state=replica.state.value,
        machine=0,
        gpus=1,
        waiting=0,
        running=scheduler.running_count,
        waiting_tokens=0,
        blocks_used=scheduler.blocks_used,
        blocks_total=scheduler.blocks_total,
        max_num_seqs=8,
    )


class Balanced:
    """Decode replicas, and the actor that evens them out."""

    def __init__(self, *states: ReplicaState, own: Any = None, **table: Any) -> None:
        self.world = FakeWorld(*(states or (S.DECODE, S.DECODE)))
        self.migrator = LiveMigrator(
            self.world,  # type: ignore[arg-type]
            MigrationTable(rebalance=True, **table),
            block_size=4,
            kv_bytes_per_token=10,
            own=None if own is None else OwnMigration(own, "mine:Policy"),
            see=None if own is None else view,
        )
        assert self.migrator.tick() == PARK  # its first step, before anything has changed

    def running(self, index: int, *ids: int, prompt: int = 12) -> list[Request]:
        return self.world.benches[index].running(*ids, prompt=prompt, output=50)

    def period(self) -> int:
        """Something has changed, and the next multiple of the period comes."""
        at_ns = self.migrator.tick()
        assert at_ns > self.world.kernel.now_ns
        self.world.kernel.now_ns = at_ns
        return self.migrator.tick()

    @property
    def moves(self) -> dict[int, int]:
        """Request on its way, by source."""
        return {at: request.request_id for at, request in self.migrator.moving.items()}


# --- the rule -----------------------------------------------------------------------------------
def test_the_fullest_gives_to_the_emptiest_and_ties_go_to_the_lowest_id() -> None:
    uses = [Use(0, 0.5), Use(1, 0.9), Use(2, 0.1), Use(3, 0.9), Use(4, 0.1)]
    assert choose_pair(uses, 0.3) == (1, 2)


def test_a_gap_that_is_not_exceeded_moves_nothing() -> None:
    assert choose_pair([Use(0, 0.6), Use(1, 0.3)], 0.3) is None
    assert choose_pair([Use(0, 0.9)], 0.0) is None
    assert choose_pair([], 0.0) is None


parts = st.lists(st.floats(min_value=0, max_value=1), min_size=2, max_size=6)


@given(parts, st.floats(min_value=0, max_value=1))
def test_a_pair_is_two_replicas_that_differ_by_more_than_the_gap(
    uses: list[float], gap: float
) -> None:
    pair = choose_pair([Use(i, part) for i, part in enumerate(uses)], gap)
    if pair is None:
        assert max(uses) - min(uses) <= gap
    else:
        source, destination = pair
        assert uses[source] - uses[destination] > gap
        assert (uses[source], uses[destination]) == (max(uses), min(uses))


def test_the_request_admitted_last_moves_first() -> None:
    made = Balanced()
    made.running(0, 1, 2, 3)
    made.period()
    assert made.moves == {0: 3}


def test_one_that_would_only_swap_the_load_stays() -> None:
    """The fuller of both must be less full afterwards."""
    made = Balanced()
    made.running(0, 1, prompt=60)
    made.period()
    assert made.moves == {}
    made.running(0, 2, prompt=20)
    made.period()
    assert made.moves == {0: 2}


def test_a_prompt_that_is_not_done_does_not_move() -> None:
    made = Balanced()
    made.running(0, 1, 2)
    last = made.running(0, 3, prompt=20)[0]
    last.generated_tokens = 0
    made.period()
    assert made.moves == {0: 2}


def test_only_replicas_that_decode_take_part() -> None:
    made = Balanced(S.DECODE, S.SHUTTING_DECODE, S.PREFILL)
    made.running(0, 1, 2, 3)
    made.period()
    assert made.moves == {}


# --- its timer ------------------------------------------------------------------------------------
def test_a_change_is_looked_at_at_the_next_multiple_of_the_period_once() -> None:
    made = Balanced()
    made.world.kernel.now_ns = PERIOD_NS + 5
    assert made.migrator.tick() == 2 * PERIOD_NS
    made.world.kernel.woken.clear()
    made.migrator.look()
    assert made.world.kernel.woken == []  # it is due already
    made.world.kernel.now_ns = 2 * PERIOD_NS
    assert made.migrator.tick() == PARK
    made.migrator.look()
    assert made.world.kernel.woken == ["rebalancer"]


def test_a_change_at_a_multiple_means_the_next_one() -> None:
    made = Balanced()
    made.world.kernel.now_ns = PERIOD_NS
    assert made.migrator.tick() == 2 * PERIOD_NS


def test_without_rebalancing_it_is_never_woken() -> None:
    made = Balanced(rebalance_gap=0.3)
    made.migrator._table = MigrationTable()
    made.world.kernel.woken.clear()
    made.migrator.look()
    assert made.world.kernel.woken == []


def test_what_has_moved_without_a_token_since_is_waited_for_but_not_for_ever() -> None:
    made = Balanced()
    one, two = made.running(0, 1, 2, prompt=20)
    for each in (one, two):
        made.migrator._moved[each.row] = (each.generated_tokens, 1)
    for _ in range(2):  # a change begins the count anew
        waits = 0
        due_ns = made.period()
        while due_ns != PARK and waits < 50:
            waits += 1
            made.world.kernel.now_ns = due_ns
            due_ns = made.migrator.tick()
        assert (waits, made.moves) == (live.WAITS_MAX, {})
    one.generated_tokens += 1
    made.period()
    assert made.moves == {0: 1}


def test_one_request_is_moved_so_often_at_most() -> None:
    made = Balanced()
    one, _ = made.running(0, 1, 2, prompt=20)
    for row in (1, 2):
        made.migrator._moved[row] = (0, live.MOVES_MAX)
    made.period()
    assert made.moves == {}
    made.migrator.drain(made.world.replicas[0])  # draining is no rule: it may
    assert made.moves == {0: 2}
    assert one.generated_tokens == 1


# --- draining -------------------------------------------------------------------------------------
def test_a_replica_that_shuts_down_gives_to_the_emptiest_open_one() -> None:
    made = Balanced(S.SHUTTING_DECODE, S.DECODE, S.DECODE, S.SHUTTING_NULL)
    made.running(0, 1, 2)
    made.running(1, 3)
    made.migrator.drain(made.world.replicas[0])
    assert made.moves == {0: 2}
    assert made.migrator.moves[0].destination.replica_id == 2


def test_where_none_is_open_it_decodes_to_the_end() -> None:
    made = Balanced(S.SHUTTING_DECODE, S.SHUTTING_DECODE, S.PREFILL)
    made.running(0, 1)
    made.migrator.drain(made.world.replicas[0])
    assert made.moves == {}


def test_one_move_at_a_time_and_a_pause_after_one_that_failed() -> None:
    made = Balanced(S.SHUTTING_DECODE, S.DECODE)
    made.running(0, 1, 2, prompt=40)
    source = made.world.replicas[0]
    made.migrator.drain(source)
    made.migrator.drain(source)
    assert made.moves == {0: 2}
    made.world.kernel.rest()
    made.world.sent[-1].on_failed("broken")
    made.world.kernel.rest()
    assert made.moves == {}
    made.migrator.drain(source)
    assert made.moves == {}  # it has just failed
    made.world.kernel.now_ns += live.RETRY_NS
    made.migrator.drain(source)
    assert made.moves == {0: 2}


# --- policies of a user's own ---------------------------------------------------------------------
class Answers:
    """A policy that answers what the test says."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.seen: list[Sequence[ReplicaView]] = []

    def choose(self, *arguments: Any) -> Any:
        self.seen.append(arguments[-1])
        return self.answer


def test_a_policy_says_which_request_moves_where_whatever_the_rule() -> None:
    policy = Answers((1, 0, 5))
    made = Balanced(own=policy)
    made.running(1, 4, 5, 6)
    made.period()
    assert made.moves == {1: 5}
    assert [one.blocks_used for one in policy.seen[0]] == [0, 36]


def test_a_policy_may_move_nothing_or_name_one_that_is_not_there() -> None:
    for answer in (None, (0, 1, 99)):
        made = Balanced(own=Answers(answer))
        made.running(0, 1)
        assert made.period() == PARK
        assert made.moves == {}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((0, 0), "moves from 0 to 0"),
        ((0, 7), "these decode: 0, 1"),
        (3, "expected None or"),
        ((0, 1, "x"), "expected None or"),
    ],
)
def test_an_answer_that_means_nothing_is_the_policys_fault(answer: Any, problem: str) -> None:
    made = Balanced(own=Answers(answer))
    with pytest.raises(PluginError, match=problem):
        made.period()


class Chosen:
    """A search for destinations that a user's policy orders."""

    def __init__(self, answer: int) -> None:
        self.world = FakeWorld(S.PREFILL, S.DECODE, S.DECODE, S.DECODE)
        self.policy = Answers(answer)
        self.search = Destinations(
            self.world.replicas[0],
            self.world,  # type: ignore[arg-type]
            Choosing("mine:Policy", OwnPlacement(self.policy, "mine:Policy", None), view),
            holder="watcher 0",
            are_alike=False,
        )

    def take(self, prompt: int = 10) -> int:
        return self.search.take(self.world.held(0, 1, prompt=prompt))


def test_kv_goes_where_the_policy_says_among_those_with_room() -> None:
    made = Chosen(1)
    made.world.replicas[1].lock.try_acquire("another")
    assert made.take() == 3
    assert [one.replica_id for one in made.policy.seen[0]] == [2, 3]
    assert made.world.replicas[3].lock.holder == "watcher 0"


def test_a_policy_may_wait_and_takes_nothing_then() -> None:
    made = Chosen(-1)
    assert made.take() == -1
    assert all(not replica.lock.is_held for replica in made.world.replicas[1:])


def test_after_a_refusal_the_policy_is_asked_about_the_rest() -> None:
    made = Chosen(0)
    made.world.refusing = True
    assert made.take() == -1
    assert [len(seen) for seen in made.policy.seen] == [3, 2, 1]
    assert made.search.was_refused


def test_replicas_without_room_are_not_shown() -> None:
    made = Chosen(0)
    made.world.benches[1].scheduler.blocks_total = 5
    assert made.take() == 2
