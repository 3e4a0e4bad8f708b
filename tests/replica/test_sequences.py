"""Random sequences of events on one replica with its real scheduler: what must hold after each.

No kernel, no cluster. Every sequence is run with leaps and without: what ends, when it ends and what
was computed must be the same, and schedulers must count what a recount counts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emu.engines.registry import engine_named
from emu.latency.front_end import OutputStream
from emu.latency.jitter import Jitter
from emu.replica import events as ev
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.replica.wave import WaveGroup
from emu.request import Request, Status
from tests.replica.stage import US, Stage

pytestmark = pytest.mark.doubles
S = ReplicaState
few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
pauses = st.integers(min_value=0, max_value=80)
"""Microseconds until the next event; often 0: the same instant."""
tokens = st.integers(min_value=1, max_value=30)
STAGES = st.sampled_from((1, 2, 4))
"""Of a pipeline: with several, what leaps is a rotation of batches."""


def figures(stage: Stage) -> list[tuple[Any, ...]]:
    """What must not depend on leaps."""
    return [
        (
            r.state,
            r.counters.prefill_tokens,
            r.counters.decode_tokens,
            r.counters.iterations,
            r.counters.busy_ns,
            r.incarnation,
            r.scheduler.blocks_used,
            r.busy_times,
        )
        for r in stage.replicas
    ]


WRITTEN = [
    name
    for name, kind in Request.__annotations__.items()
    if kind == "int" and name not in ("taken_ns", "block_keys_size")
]


def written(requests: list[Request]) -> list[list[int]]:
    """Everything that is counted for requests."""
    return [[getattr(request, name) for name in WRITTEN] for request in requests]


class Serving:
    """A colocated replica, and what the world does to it."""

    def __init__(
        self,
        *,
        leap: bool,
        stages: int = 1,
        blocks: int = 64,
        prepare: Callable[[Replica], None] = lambda replica: None,
    ) -> None:
        self.stage = Stage(S.COLOCATED, leap=leap, stages=stages, blocks=blocks)
        self.replica, self.actor = self.stage.replicas[0], self.stage.actors[0]
        prepare(self.replica)
        self.seen: list[tuple[int, int]] = []
        """Tokens computed, as an observer reads them between two events."""
        self.requests: list[Request] = []
        self.lost: list[int] = []
        self.paused_ns = -1
        self.losses = 0

    def act(self, what: str, number: int, size: int) -> None:
        """One thing happens, if it can happen now."""
        stage, actor, state = self.stage, self.actor, self.replica.state
        if what == "submit" and state is S.COLOCATED:
            self.requests.append(stage.submit(len(self.requests), size, 1 + number))
        elif what == "cancel" and self.requests:
            left = self.requests[number % len(self.requests)]
            actor.post(ev.Cancelled(request=left, status=Status.CANCELLED, reason="left"))
        elif what == "pause" and state is not S.FAILED and not self.replica.is_paused:
            actor.tell(ev.Paused())
            self.paused_ns = self.replica.paused_ns
        elif what == "unpause":
            life = self.replica.incarnation
            actor.tell(ev.Unpaused(life=life, since_ns=self.paused_ns))
        elif what == "slow":
            actor.tell(ev.SlowdownSet(factor=1.0 + number / 10))
        elif what == "crash" and state is not S.FAILED:
            self.lost += [r.request_id for r in stage.crash(0)]
            self.requests = []
        elif what == "restart" and state is S.FAILED:
            actor.tell(ev.Restarted(life=self.replica.incarnation))
            stage.command(0, S.COLOCATED, weights=True)
        elif what == "shrink" and state is S.COLOCATED:
            part, loss = min(0.9, number / 40), self.losses
            self.losses += 1
            actor.post(ev.KvShrunk(part=part, loss=loss, asked=stage.ask()))
            actor.post(ev.KvRestored(loss=loss, asked=stage.ask()))
        elif what == "look":
            actor.look()


WORLD = st.lists(
    st.tuples(
        pauses,
        st.sampled_from(
            ["submit"] * 6
            + ["cancel", "cancel", "pause", "unpause", "slow", "look", "crash", "restart"]
        ),
        tokens,
        tokens,
    ),
    max_size=24,
)


def play(made: Serving | Receiving, sequence: list[tuple[int, str, int, int]]) -> None:
    """Each thing happens so long after the one before, and the books add up after each."""
    kernel, at_ns = made.stage.kernel, 0
    for pause_us, what, number, size in sequence:
        at_ns += pause_us * US
        kernel.run(at_ns)
        made.act(what, number, size)
        kernel.rest()
        assert made.stage.problems() == []
        made.seen.append(made.replica.tokens_produced)
    if made.replica.is_paused:
        made.act("unpause", 0, 0)
    kernel.run()


def run_serving(sequence: list[tuple[int, str, int, int]], **options: Any) -> Serving:
    made = Serving(**options)
    play(made, sequence)
    return made


@few
@given(WORLD, STAGES)
def test_leaps_change_nothing_whatever_happens(
    sequence: list[tuple[int, str, int, int]], stages: int
) -> None:
    leaping, stepping = (run_serving(sequence, leap=leap, stages=stages) for leap in (True, False))
    assert leaping.stage.ends == stepping.stage.ends
    assert leaping.lost == stepping.lost
    assert figures(leaping.stage) == figures(stepping.stage)
    assert leaping.stage.gaps.count == stepping.stage.gaps.count
    assert written(leaping.requests) == written(stepping.requests)


@few
@given(WORLD, STAGES)
def test_what_observers_read_in_the_middle_of_a_leap_is_what_stepping_has(
    sequence: list[tuple[int, str, int, int]], stages: int
) -> None:
    leaping, stepping = (run_serving(sequence, leap=leap, stages=stages) for leap in (True, False))
    assert leaping.seen == stepping.seen


def metered(replica: Replica) -> None:
    """A model of power reads what iterations computed, and how long rests were."""
    replica.meter()
    replica.counters.standby_limit_ns = 40 * US


@few
@given(WORLD, STAGES)
def test_work_and_rests_for_the_model_of_power_do_not_depend_on_leaps(
    sequence: list[tuple[int, str, int, int]], stages: int
) -> None:
    leaping, stepping = (
        run_serving(sequence, leap=leap, stages=stages, prepare=metered) for leap in (True, False)
    )
    end_ns = max(leaping.stage.kernel.now_ns, stepping.stage.kernel.now_ns) + 50 * US
    one, other = leaping.replica.counters, stepping.replica.counters
    assert one.prompts_run == other.prompts_run
    assert one.decodes_run == other.decodes_run
    assert one.decode_context_run == other.decode_context_run
    assert one.tokens_run == other.tokens_run
    assert one.standby_time_ns(end_ns) == other.standby_time_ns(end_ns)


def with_front_end(replica: Replica) -> None:
    """Tokens pass the engine's output queue on their way to clients."""
    replica.books.stream = OutputStream(engine_named("vllm").model)


@few
@given(WORLD, STAGES)
def test_clients_have_their_tokens_at_the_same_time_with_leaps(
    sequence: list[tuple[int, str, int, int]], stages: int
) -> None:
    leaping, stepping = (
        run_serving(sequence, leap=leap, stages=stages, prepare=with_front_end)
        for leap in (True, False)
    )
    assert [(r.first_out_ns, r.last_out_ns) for r in leaping.requests] == [
        (r.first_out_ns, r.last_out_ns) for r in stepping.requests
    ]


def with_late_signals(replica: Replica) -> None:
    """A router that sees the load of some time ago."""
    replica.keep_signals(10**12, with_blocks=True)


@few
@given(WORLD, st.sampled_from((metered, with_front_end, with_late_signals)))
def test_what_looks_on_changes_nothing(
    sequence: list[tuple[int, str, int, int]], prepare: Callable[[Replica], None]
) -> None:
    """An iteration that nothing watches takes a shorter way through the same rules."""
    alone = run_serving(sequence, leap=True)
    watched = run_serving(sequence, leap=True, prepare=prepare)
    assert not alone.replica.watch.is_watched
    assert alone.stage.ends == watched.stage.ends
    assert alone.lost == watched.lost
    assert figures(alone.stage) == figures(watched.stage)
    assert alone.stage.gaps.count == watched.stage.gaps.count


@few
@given(WORLD)
def test_late_signals_tell_the_load_of_each_instant(
    sequence: list[tuple[int, str, int, int]],
) -> None:
    leaping, stepping = (
        run_serving(sequence, leap=leap, prepare=with_late_signals) for leap in (True, False)
    )

    def changes(made: Serving) -> list[tuple[int, tuple[int, ...]]]:
        """What was known from when on; the last word of an instant counts."""
        assert made.replica.watch.signals is not None
        known = {at_ns: tuple(load) for at_ns, *load in made.replica.watch.signals}
        rows = list(known.items())
        return [rows[0], *(row for before, row in pairwise(rows) if row[1] != before[1])]

    assert changes(leaping) == changes(stepping)
    assert leaping.stage.ends == stepping.stage.ends


def with_first_uses(replica: Replica) -> None:
    """A fresh process: its first three iterations are longer."""
    replica.pace.first_uses.extend([7 * US, 5 * US, 3 * US])
    replica.choose_starter()


@few
@given(WORLD, STAGES)
def test_first_uses_are_paid_once_whatever_the_leaps(
    sequence: list[tuple[int, str, int, int]], stages: int
) -> None:
    leaping, stepping = (
        run_serving(sequence, leap=leap, stages=stages, prepare=with_first_uses)
        for leap in (True, False)
    )
    assert leaping.stage.ends == stepping.stage.ends
    assert list(leaping.replica.pace.first_uses) == list(stepping.replica.pace.first_uses)


def with_jitter(replica: Replica) -> None:
    """Steps vary, by the number of the step."""
    replica.pace.set_jitter(Jitter(engine_named("vllm").model, 7, replica.replica_id))


@few
@given(WORLD, STAGES)
def test_steps_that_vary_vary_alike_in_a_leap(
    sequence: list[tuple[int, str, int, int]], stages: int
) -> None:
    leaping, stepping = (
        run_serving(sequence, leap=leap, stages=stages, prepare=with_jitter)
        for leap in (True, False)
    )
    assert leaping.stage.ends == stepping.stage.ends
    assert figures(leaping.stage) == figures(stepping.stage)


@few
@given(WORLD)
def test_every_request_ends_once_or_is_lost_with_its_replica(
    sequence: list[tuple[int, str, int, int]],
) -> None:
    made = run_serving(sequence, leap=True)
    ended = [one for one, *_ in made.stage.ends]
    assert made.replica.scheduler.blocks_used == 0
    assert made.replica.is_idle
    assert {r.request_id for r in made.requests} <= {*ended, *made.lost}
    # Ids begin anew after a crash, so an id may have ended in one life and be lost in another.
    assert len(ended) + len(made.lost) == sum(
        what == "submit" and was
        for (_, what, *_), was in zip(sequence, taken(sequence), strict=True)
    )


def taken(sequence: list[tuple[int, str, int, int]]) -> list[bool]:
    """Whether the replica served when each thing happened."""
    serves, found = True, []
    for _, what, *_ in sequence:
        found.append(serves)
        serves = (serves and what != "crash") or (not serves and what == "restart")
    return found


@few
@given(WORLD)
def test_pipelined_batches_leave_in_order_whatever_happens(
    sequence: list[tuple[int, str, int, int]],
) -> None:
    made = run_serving(sequence, leap=True, stages=2)
    assert made.replica.scheduler.blocks_used == 0
    assert not made.replica.flight.holds_batch()
    firsts = [r for r in made.requests if r.first_token_ns >= 0 and not r.preemptions]
    order = sorted(firsts, key=lambda r: r.first_scheduled_ns)
    assert [r.first_token_ns for r in order] == sorted(r.first_token_ns for r in order)


@few
@given(
    st.lists(
        st.tuples(pauses, st.sampled_from(["submit", "submit", "shrink"]), tokens, tokens),
        max_size=16,
    )
)
def test_lost_memory_loses_requests_and_no_count(
    sequence: list[tuple[int, str, int, int]],
) -> None:
    made = run_serving(sequence, leap=True, blocks=24)
    lost = [one for ids, reason in made.stage.losses for one in ids if reason == "kv_lost"]
    ended = [one for one, *_ in made.stage.ends]
    assert sorted(lost + ended) == sorted(r.request_id for r in made.requests)
    asked = range(1, 2 * made.losses + 1)  # that memory is lost, and that it is back
    assert sorted(number for number, _ in made.stage.replies) == list(asked)
    assert made.replica.scheduler.ledger.pool.blocks_total == 24


# --- a data-parallel group: what leaps is all of its members' waves ------------------------------
RANKS = 3
GROUP = st.lists(
    st.tuples(
        pauses,
        st.sampled_from(
            ["submit"] * 6 + ["cancel", "pause", "unpause", "slow", "look", "crash", "restart"]
        ),
        tokens,
        tokens,
        st.integers(min_value=0, max_value=RANKS - 1),
    ),
    max_size=24,
)


class Group:
    """Ranks whose iterations begin together, and what the world does to each."""

    def __init__(self, *, leap: bool, shares_experts: bool, varies: bool) -> None:
        self.stage = Stage(*[S.COLOCATED] * RANKS, leap=leap)
        wave = WaveGroup("ranks", shares_experts=shares_experts)
        for replica in self.stage.replicas:
            wave.join(replica)
            if varies:
                with_jitter(replica)
        self.requests: list[list[Request]] = [[] for _ in range(RANKS)]
        self.ids = 0
        self.seen: list[list[tuple[int, int]]] = []
        self.lost: list[int] = []

    def act(self, what: str, number: int, size: int, rank: int) -> None:
        """One thing happens to a rank, if it can happen now."""
        stage, replica, actor = self.stage, self.stage.replicas[rank], self.stage.actors[rank]
        mine = self.requests[rank]
        if what == "submit" and replica.state is S.COLOCATED:
            self.ids += 1
            mine.append(stage.submit(self.ids, size, 1 + number, rank))
        elif what == "cancel" and mine:
            left = mine[number % len(mine)]
            actor.post(ev.Cancelled(request=left, status=Status.CANCELLED, reason="left"))
        elif what == "pause" and replica.state is not S.FAILED and not replica.is_paused:
            actor.tell(ev.Paused())
        elif what == "unpause":
            actor.tell(ev.Unpaused(life=replica.incarnation, since_ns=replica.paused_ns))
        elif what == "slow":
            actor.tell(ev.SlowdownSet(factor=1.0 + number / 10))
        elif what == "crash" and replica.state is not S.FAILED:
            self.lost += [r.request_id for r in stage.crash(rank)]
            self.requests[rank] = []
        elif what == "restart" and replica.state is S.FAILED:
            actor.tell(ev.Restarted(life=replica.incarnation))
            stage.command(rank, S.COLOCATED, weights=True)
        elif what == "look":
            actor.look()


def run_group(sequence: list[tuple[int, str, int, int, int]], **options: Any) -> Group:
    made = Group(**options)
    at_ns = 0
    for pause_us, what, number, size, rank in sequence:
        at_ns += pause_us * US
        made.stage.kernel.run(at_ns)
        made.act(what, number, size, rank)
        made.stage.kernel.rest()
        assert made.stage.problems() == []
        made.seen.append([replica.tokens_produced for replica in made.stage.replicas])
    for rank, replica in enumerate(made.stage.replicas):
        if replica.is_paused:
            made.act("unpause", 0, 0, rank)
    made.stage.kernel.run()
    return made


@settings(few, max_examples=60)
@given(GROUP, st.booleans(), st.booleans())
def test_waves_that_leap_change_nothing_whatever_happens_to_a_rank(
    sequence: list[tuple[int, str, int, int, int]], shares_experts: bool, varies: bool
) -> None:
    leaping, stepping = (
        run_group(sequence, leap=leap, shares_experts=shares_experts, varies=varies)
        for leap in (True, False)
    )
    assert sorted(leaping.stage.ends) == sorted(stepping.stage.ends)
    assert leaping.lost == stepping.lost
    assert leaping.seen == stepping.seen
    assert figures(leaping.stage) == figures(stepping.stage)
    assert leaping.stage.gaps.count == stepping.stage.gaps.count
    for one, other in zip(leaping.requests, stepping.requests, strict=True):
        assert written(one) == written(other)


# --- a decode replica: KV that comes and goes -----------------------------------------------------
class Receiving:
    """A decode replica, and watchers that bring it KV or take requests away."""

    def __init__(self, *, leap: bool) -> None:
        self.stage = Stage(S.DECODE, leap=leap, blocks=40)
        self.replica, self.actor = self.stage.replicas[0], self.stage.actors[0]
        self.seen: list[tuple[int, int]] = []
        """Tokens computed, as an observer reads them between two events."""
        self.stage.on_answer = self.answered
        self.asked: dict[int, Request] = {}
        """What is to stop, by the number of the question."""
        self.coming: list[Request] = []
        self.here: list[Request] = []
        self.stopped: list[Request] = []
        self.refused = 0
        self.ids = 0

    def act(self, what: str, number: int, size: int) -> None:
        """One thing happens, if it can."""
        if what == "reserve":
            self.ids += 1
            made = self.stage.made(self.ids, size, 2 + number)
            made.status, made.generated_tokens, made.first_token_ns = Status.MIGRATING, 1, 0
            made.computed_tokens = size
            if self.actor.reserve([made]):
                self.coming.append(made)
            else:
                self.refused += 1
        elif what == "deliver" and self.coming:
            made = self.coming.pop(0)
            made.last_token_ns = self.stage.kernel.now_ns
            self.here.append(made)
            self.actor.post(ev.KvDelivered(requests=[made]))
        elif what == "unreserve" and self.coming:
            self.actor.tell(ev.Unreserved(requests=[self.coming.pop(number % len(self.coming))]))
        elif what == "cancel" and self.here:
            left = self.here[number % len(self.here)]
            self.actor.post(ev.Cancelled(request=left, status=Status.CANCELLED, reason="left"))
        elif what == "stop" and self.here:
            asked = self.here[number % len(self.here)]
            question = self.stage.ask()
            self.asked[question.number] = asked
            self.actor.post(ev.StopAsked(request=asked, asked=question))
        elif what == "undo" and self.stopped:
            self.actor.tell(ev.StopUndone(request=self.stopped.pop(0)))
        elif what == "release" and self.stopped:
            self.actor.tell(ev.Released(requests=[self.stopped.pop(0)]))

    def answered(self, number: int, value: int) -> None:
        """The replica has looked at a stop: the request is detached, or it had ended."""
        asked = self.asked.pop(number)
        if asked.status is Status.MIGRATING and asked not in self.stopped:
            self.stopped.append(asked)


KV = st.lists(
    st.tuples(
        pauses,
        st.sampled_from(
            ["reserve"] * 4 + ["deliver"] * 4 + ["unreserve", "cancel", "stop", "undo", "release"]
        ),
        tokens,
        tokens,
    ),
    max_size=30,
)


def run_receiving(sequence: list[tuple[int, str, int, int]], *, leap: bool) -> Receiving:
    made = Receiving(leap=leap)
    play(made, sequence)
    return made


@few
@given(KV)
def test_a_leap_of_decodes_is_cut_by_kv_as_stepping_would_see_it(
    sequence: list[tuple[int, str, int, int]],
) -> None:
    leaping, stepping = (run_receiving(sequence, leap=leap) for leap in (True, False))
    assert leaping.stage.ends == stepping.stage.ends
    assert leaping.refused == stepping.refused
    assert leaping.seen == stepping.seen
    assert figures(leaping.stage) == figures(stepping.stage)


@few
@given(KV)
def test_blocks_are_those_of_what_is_reserved_runs_or_is_stopped(
    sequence: list[tuple[int, str, int, int]],
) -> None:
    made = run_receiving(sequence, leap=True)
    scheduler = made.replica.scheduler
    for request in made.coming:
        made.actor.tell(ev.Unreserved(requests=[request]))
    held = [r for r in made.stopped if r.status is Status.MIGRATING]
    assert scheduler.running_count == 0
    assert scheduler.blocks_used == sum(r.kv_blocks for r in held)
    for request in held:
        made.actor.tell(ev.Released(requests=[request]))
    assert scheduler.blocks_used == 0


@few
@given(KV, st.integers(min_value=0, max_value=29))
def test_a_crash_gives_back_all_that_was_here_and_nothing_that_was_only_reserved(
    sequence: list[tuple[int, str, int, int]], at: int
) -> None:
    made = run_receiving(sequence[:at], leap=True)
    for _, what, number, size in sequence[at:]:
        made.act(what, number, size)
    ended = {one for one, *_ in made.stage.ends}
    here = [r.request_id for r in made.here if r.status in (Status.RUNNING, Status.MIGRATING)]
    detached = {r.request_id for r in made.stopped}
    lost = {r.request_id for r in made.stage.crash(0)}
    ended = {one for one, *_ in made.stage.ends}
    assert lost == set(here) - detached - ended
    assert made.replica.scheduler.blocks_used == 0
    assert made.replica.lock.holder == made.replica.name


# --- the order of one instant ---------------------------------------------------------------------
@pytest.mark.parametrize("leap", [True, False])
def test_what_comes_at_the_very_end_of_an_iteration_waits_for_the_next(leap: bool) -> None:
    """Arrivals go before replicas: at the instant of its end the iteration is still in flight."""
    stage = Stage(S.COLOCATED, leap=leap)
    first = stage.submit(1, 8, 9)
    stage.kernel.run(0)
    end_ns = stage.replicas[0].flight.due_ns
    late: list[Request] = []
    stage.kernel.call_at(end_ns, 0, lambda: late.append(stage.submit(2, 4, 2)))
    stage.kernel.run()
    assert first.first_token_ns >= 0
    assert late[0].first_scheduled_ns == end_ns
    assert late[0].taken_ns == end_ns


@pytest.mark.parametrize("leap", [True, False])
def test_what_comes_after_its_turn_of_the_instant_is_seen_one_iteration_later(leap: bool) -> None:
    """Control loops go after replicas: the next iteration is under way."""
    stage = Stage(S.COLOCATED, leap=leap)
    stage.submit(1, 8, 9)
    stage.kernel.run(0)
    end_ns = stage.replicas[0].flight.due_ns if not leap else 18 * US
    late: list[Request] = []
    stage.kernel.call_at(end_ns, 1 << 40, lambda: late.append(stage.submit(2, 4, 2)))
    stage.kernel.run()
    assert late[0].first_scheduled_ns > end_ns


def test_posted_events_of_one_instant_are_applied_by_kind_not_by_arrival() -> None:
    """A client that leaves a request whose KV arrives at the same instant finds it running."""
    made = Receiving(leap=True)
    made.act("reserve", 5, 8)
    request = made.coming[0]
    made.actor.post(ev.Cancelled(request=request, status=Status.CANCELLED, reason="left"))
    made.act("deliver", 0, 0)
    made.stage.kernel.rest()
    assert made.stage.ends == [(1, "CANCELLED", "left", 0)]
    assert made.replica.scheduler.blocks_used == 0
