"""A leap in the making: how long it is, what cuts it, what others read in its middle."""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import Any

import pytest

from emu.engines.registry import engine_named
from emu.kernel.clock import AT_DUE, NOW, PARK
from emu.kv.grouped import GroupedPool
from emu.latency.base import BatchShape
from emu.latency.ends import Ends
from emu.latency.jitter import Jitter
from emu.replica import actions as act
from emu.replica import events as ev
from emu.replica.books import Books
from emu.replica.counters import Counters
from emu.replica.flight.base import IDLE, Flight, Sort
from emu.replica.flight.layered import Layered
from emu.replica.flight.measured import Measured
from emu.replica.flight.run import Run
from emu.replica.flight.staged import Staged
from emu.replica.flight.starters import Plain
from emu.replica.inbound import reserve
from emu.replica.layer_scheduler import LayerScheduler
from emu.replica.pace import Pace
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.replica.watch import Watch
from emu.request import Request, Status
from emu.scheduling.base import Batch, Progress, RunOn
from emu.testing import (
    STEP_NS,
    Bench,
    FakeClock,
    FakeLatency,
    FakeObservers,
    FakeScheduler,
    request,
)
from tests.replica.stage import US, Stage

pytestmark = pytest.mark.doubles
S = ReplicaState
ASKED = ev.Asked("migrator", 0)


def leaping(output: int = 9, steps: int = 8, state: ReplicaState = S.COLOCATED) -> Bench:
    """A replica in the middle of a leap of so many steps, which began at 0."""
    made = Bench(state, leap=steps)
    made.running(1, output=output)
    made.step()
    assert (made.flies, made.due_ns) == (Sort.RUN, steps * STEP_NS)
    return made


def run_of(made: Bench) -> Run:
    """The leap in flight."""
    flight = made.replica.flight
    assert isinstance(flight, Run)
    return flight


# --- what cuts it ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("after_ns", "steps", "ends"), [(500, 3, 3), (2_500, 5, 5), (500, 8, 8)])
def test_a_request_that_would_be_seen_so_late_leaves_it_the_steps_until_then(
    after_ns: int, steps: int, ends: int
) -> None:
    made = leaping()
    made.scheduler.sees_in = lambda batch, done, start_ns: steps  # type: ignore[method-assign]
    made.clock.now_ns = after_ns
    made.tell(ev.Submitted(request(2)))
    run = run_of(made)
    assert (len(run.ends), run.due_ns) == (ends, ends * STEP_NS)
    assert run.is_cut == (ends != 8)
    assert made.replica.look == 0, "it need not look before"


def test_what_the_scheduler_is_asked_is_the_step_in_flight_and_its_start() -> None:
    asked: list[tuple[int, int]] = []

    def sees_in(batch: Batch, step: int, start_ns: int) -> int:
        asked.append((step, start_ns))
        return 0

    for now_ns in (500, 2_500):
        made = leaping()
        made.scheduler.sees_in = sees_in  # type: ignore[method-assign]
        made.clock.now_ns = now_ns
        made.tell(ev.Submitted(request(2)))
    assert asked == [(1, 0), (3, 2 * STEP_NS)]


def test_a_reservation_leaves_it_the_steps_for_which_there_is_memory() -> None:
    made = leaping(state=S.DECODE)

    def leap_holds(batch: Batch) -> bool:
        batch.max_steps = 4
        return True

    made.scheduler.leap_holds = leap_holds  # type: ignore[method-assign]
    made.clock.now_ns = 1_500
    assert reserve(made.replica, [request(2)])
    assert (run_of(made).due_ns, run_of(made).is_cut, made.replica.look) == (4 * STEP_NS, True, 0)


def test_a_reservation_that_is_refused_cuts_nothing() -> None:
    made = leaping(state=S.DECODE)
    made.scheduler.holds = False
    assert not reserve(made.replica, [request(2, prompt=1000)])
    assert (run_of(made).is_cut, made.replica.look) == (False, 0)


@pytest.mark.parametrize("holds", [True, False])
def test_kv_that_leaves_or_is_given_back_cuts_it_only_if_it_no_longer_holds(holds: bool) -> None:
    for event in (ev.Unreserved(requests=[]), ev.Released(requests=[])):
        made = leaping(state=S.DECODE)
        made.scheduler.holds = holds
        made.clock.now_ns = 1_500
        made.tell(event)
        assert made.replica.look == (0 if holds else ev.LOOK)


def test_the_last_start_is_that_of_the_step_in_flight() -> None:
    """The scheduler counts the age of its requests from it."""
    for now_ns, start_ns in ((500, 0), (2_500, 2 * STEP_NS)):
        made = leaping(state=S.DECODE)
        made.clock.now_ns = now_ns
        made.tell(ev.Unreserved(requests=[]))
        assert run_of(made).batch.last_start_ns == start_ns


def test_a_cut_leap_ends_with_the_step_that_had_begun() -> None:
    made = leaping()
    made.scheduler.holds = False
    made.clock.now_ns = 2_500
    made.tell(ev.Submitted(request(2, prompt=200)))
    made.clock.now_ns = made.due_ns = made.replica.align(2_500)
    made.step()
    assert (made.replica.counters.iterations, made.replica.counters.decode_tokens) == (3, 0)
    assert made.replica.counters.busy_ns == 3 * STEP_NS


# --- a straggler, and steps that vary ----------------------------------------------------------------
def test_every_step_of_a_stragglers_leap_takes_longer() -> None:
    made = Bench(S.COLOCATED, leap=4)
    made.tell(ev.SlowdownSet(factor=2.5))
    made.running(1, output=9)
    made.step()
    assert list(run_of(made).ends) == [2_500, 5_000, 7_500, 10_000]


def test_a_straggler_that_is_as_before_takes_as_long_as_before() -> None:
    made = Bench(S.COLOCATED, leap=4)
    for factor in (3.0, 1.0):
        made.tell(ev.SlowdownSet(factor=factor))
        assert made.replica.look == ev.LOOK, "a leap at the old cost is cut"
        made.replica.look = 0
    made.running(1, output=9)
    made.step()
    assert made.due_ns == 4 * STEP_NS


def test_costs_are_those_of_the_slowdown_and_whole_nanoseconds() -> None:
    made = Bench(S.COLOCATED)
    assert made.replica.pace.cost_ns(BatchShape(decode_count=1)) == STEP_NS
    made.tell(ev.SlowdownSet(factor=1.0005))
    assert made.replica.pace.cost_ns(BatchShape(decode_count=1)) == int(STEP_NS * 1.0005)


def test_steps_that_vary_have_no_short_cuts() -> None:
    pace = Pace(Opening())  # type: ignore[arg-type]
    assert (pace.decode_ends is None, pace.is_monotone, pace.is_even) == (False, True, True)
    pace.set_jitter(Jitter(engine_named("vllm").model, 7, 0))
    assert (pace.decode_ends, pace.is_monotone, pace.is_even) == (None, False, False)


# --- a run that follows prompts ---------------------------------------------------------------------
class Opening(FakeLatency):
    """A backend with a short cut for runs that follow a step; it knows no stragglers."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def decode_ends(self, shape: BatchShape, steps: int, first_ns: int) -> Ends:
        self.asked.append((steps, first_ns))
        return array("q", [first_ns + step * STEP_NS for step in range(1 + steps)])


def running_on(slowdown: float) -> tuple[Run, Opening, FakeClock]:
    """A batch with a prompt that has begun at 100, and three decodes are certain to follow."""
    latency, clock, scheduler = Opening(), FakeClock(), FakeScheduler()
    pace: Any = Pace(latency)  # type: ignore[arg-type]
    pace.slow_down(slowdown)
    watch: Any = Watch(0, clock, scheduler, FakeObservers())  # type: ignore[arg-type]
    books = Books(0, clock, scheduler, pace, watch, Counters(), [])  # type: ignore[arg-type]
    scheduler.queue.append(request(1, prompt=4, output=4))
    clock.now_ns = 100

    def run_on(one: Batch) -> RunOn:
        one.max_steps = 4
        return RunOn(BatchShape(decode_count=1, sequences=1))

    scheduler.run_on = run_on  # type: ignore[method-assign,assignment]
    flight = Plain(books, frees=False, runs_on=True).start()
    assert isinstance(flight, Run)
    return flight, latency, clock


def test_the_decodes_that_follow_a_prompt_are_one_run_with_it() -> None:
    run, latency, _ = running_on(1.0)
    assert (latency.asked, run.due_ns) == ([(3, STEP_NS)], 100 + 4 * STEP_NS)
    assert run.batch.first_end_ns == 100 + STEP_NS


def test_the_decodes_that_follow_a_stragglers_prompt_are_slow_too() -> None:
    run, latency, _ = running_on(3.0)
    assert (latency.asked, run.due_ns) == ([], 100 + 4 * 3 * STEP_NS)
    assert list(run.ends) == [3_000, 6_000, 9_000, 12_000]


def test_with_late_signals_nothing_is_appended_to_a_prompt() -> None:
    found = []
    for is_late in (False, True):
        made = Bench(S.COLOCATED)
        if is_late:
            made.replica.keep_signals(10**12, with_blocks=True)

        def run_on(one: Batch) -> RunOn:
            one.max_steps = 3
            return RunOn(BatchShape(decode_count=1, sequences=1))

        made.scheduler.run_on = run_on  # type: ignore[method-assign,assignment]
        made.tell(ev.Submitted(request(1, output=9)))
        made.step()
        found.append((made.flies, made.due_ns))
    assert found == [(Sort.RUN, 3 * STEP_NS), (Sort.STEP, STEP_NS)]


def test_tokens_in_the_middle_of_a_run_are_those_of_its_opening_and_its_decodes() -> None:
    run, _, clock = running_on(1.0)
    opening = Progress()
    opening.prefill_tokens, opening.decode_tokens = 4, 2
    run.batch.run_on = RunOn(BatchShape(decode_count=5), opening)
    clock.now_ns = 100 + STEP_NS + 1
    assert run.tokens_settled(run.settle()) == (4, 2)
    clock.now_ns = 100 + 3 * STEP_NS + 1
    assert run.tokens_settled(run.settle()) == (4, 2 + 2 * 5)


# --- what others read in the middle -----------------------------------------------------------------
def test_tokens_count_when_their_step_has_ended() -> None:
    made = leaping()
    for now_ns, tokens in ((0, 0), (999, 0), (1_001, 1), (3_500, 3)):
        made.clock.now_ns = now_ns
        assert made.replica.tokens_produced == (0, tokens)


def test_books_are_settled_for_the_step_in_flight_and_never_twice() -> None:
    made = leaping()
    settled: list[int] = []
    plain = made.scheduler.settle
    made.scheduler.settle = lambda b, n: (settled.append(n), plain(b, n))  # type: ignore[method-assign,func-returns-value,assignment]
    for now_ns in (500, 600, 2_500, 2_600, 7_999):
        made.clock.now_ns = now_ns
        made.replica.settle()
    assert settled == [3, 8], "the first step is settled when the batch is formed"


def test_its_engine_looks_at_the_end_of_each_step_of_a_leap() -> None:
    made = leaping()
    for now_ns, end_ns in ((500, 1_000), (2_500, 3_000)):
        made.clock.now_ns = now_ns
        one = request(now_ns)
        made.tell(ev.Submitted(one))
        assert one.taken_ns == end_ns


def test_a_request_that_was_taken_in_before_keeps_that_time() -> None:
    made = Bench(S.COLOCATED)
    one = request()
    one.taken_ns = 3
    made.clock.now_ns = 50
    made.tell(ev.Submitted(one))
    assert one.taken_ns == 3


def staged_of(made: Bench) -> Flight:
    staged = made.replica.staged
    assert isinstance(staged, Staged)
    return staged.wait()


@pytest.mark.parametrize(
    ("flight", "looks"),
    [
        (lambda made: IDLE, NOW),
        (staged_of, NOW),
        (lambda made: Layered(made.replica.books, LayerScheduler(4, 0)).wait(), NOW),
        (lambda made: Measured(made.replica.books, lambda cost_ns: IDLE, IDLE), AT_DUE),
    ],
)
def test_when_it_looks_depends_on_what_it_does(flight: Any, looks: int) -> None:
    made = Bench(S.COLOCATED, stages=2)
    made.replica.flight = flight(made)
    assert made.replica.align(0) == looks


# --- routers that keep an order of loads, and those with late signals ---------------------------------
def test_a_change_of_the_queues_is_told_once_until_it_is_seen() -> None:
    made = Bench(S.COLOCATED)
    log: list[Replica] = []
    made.tell(ev.Submitted(request(1)))
    assert log == []
    made.replica.tell_touches(log)
    for number in (2, 3):
        made.tell(ev.Submitted(request(number)))
    assert log == [made.replica]
    made.replica.seen()
    made.step()  # a request is admitted
    assert log == [made.replica] * 2


@pytest.mark.parametrize("what", ["cancel", "deliver", "stop", "crash", "undo"])
def test_whatever_changes_the_queues_is_told(what: str) -> None:
    made = Bench(S.DECODE)
    (here,) = made.running(1)
    coming = request(2)
    log: list[Replica] = []
    made.replica.tell_touches(log)
    if what == "cancel":
        made.post(ev.Cancelled(request=here, status=Status.CANCELLED, reason="left"))
    elif what == "deliver":
        assert reserve(made.replica, [coming])
        made.post(ev.KvDelivered(requests=[coming]))
    elif what == "stop":
        made.post(ev.StopAsked(request=here, asked=ASKED))
    elif what == "crash":
        made.tell(ev.Crashed(lost=[]))
    else:
        made.scheduler.detach(here)
        made.tell(ev.StopUndone(request=here))
    if what not in ("crash", "undo"):
        made.replica.mailbox.begin_applying()
        for event in reversed(made.replica.mailbox.applying):
            made.replica.handle(event)
    assert log == [made.replica]


def test_late_signals_tell_when_what_was_where() -> None:
    made = Bench(S.COLOCATED)
    made.replica.keep_signals(10**12, with_blocks=True)
    made.clock.now_ns = 10
    made.tell(ev.Submitted(request(1, prompt=4)))
    made.step()
    assert made.replica.watch.signals is not None
    assert list(made.replica.watch.signals) == [
        (-1, 0, 0, 0, 0),
        (10, 1, 0, 4, 0),
        (10, 0, 1, 0, 4),
    ]


# --- lives ------------------------------------------------------------------------------------------
FORGOTTEN = (
    *("flight", "paused_ns", "live_moves"),
    *("mailbox.applying", "mailbox.has_applied", "weights.are_loaded", "weights.segments_ready"),
)
"""What belongs to a process, and must be as that of a new one after a crash."""


class Fresh(FakeLatency):
    """A fresh process pays for its first iteration."""

    first_use_ns = (7,)


def test_a_crash_leaves_nothing_of_the_life_before() -> None:
    new = Bench(S.INACTIVE)
    made = Bench(S.DECODE, leap=8, latency=Fresh())
    made.replica.pace.first_uses.clear()
    made.replica.choose_starter()
    made.running(1, 2)
    made.tell(ev.LiveMoves(change=1))
    made.step()
    made.clock.now_ns = 1_500
    made.tell(ev.Paused())
    assert reserve(made.replica, [request(3)])
    made.post(ev.KvDelivered(requests=[request(3)]))
    made.replica.weights.segments_ready = 3
    made.tell(ev.Crashed(lost=[]))
    for name in FORGOTTEN:
        its = attrgetter(name)
        assert its(made.replica) == its(new.replica), name
    assert not made.replica.mailbox.posted
    assert list(made.replica.pace.first_uses) == [7]
    assert made.scheduler.blocks_used == 0
    assert made.replica.incarnation == 1


def test_a_crash_keeps_the_accounts_of_the_run() -> None:
    made = leaping()
    made.clock.now_ns = 2_500
    made.tell(ev.Crashed(lost=[]))
    assert (made.replica.counters.iterations, made.replica.counters.busy_ns) == (2, 2_500)


def test_lives_are_numbered_and_late_news_of_an_earlier_one_change_nothing() -> None:
    made = Bench(S.COLOCATED)
    made.tell(ev.Crashed(lost=[]))
    made.replica.look = 0
    for event in (
        ev.PrerequisiteMet(life=0),
        ev.Measured(life=0, cost_ns=5),
        ev.ActivationArrived(life=0),
        ev.Unpaused(life=0, since_ns=-1),
    ):
        assert made.tell(event) == []
        assert (made.replica.look, made.replica.flight) == (0, IDLE)


def test_time_in_a_state_is_counted_to_its_last_nanosecond() -> None:
    made = Bench(S.INACTIVE)
    replica = made.replica
    moves: list[tuple[int, S, Any]] = [
        (10, S.LOADING_DECODE, "planner"),
        (25, S.AUS_DECODE, "transfer"),
        (65, S.DECODE, "loop"),
    ]
    for at_ns, to, writer in moves:
        made.clock.now_ns = at_ns
        (action, *_) = made.tell(ev.Commanded(to=to, writer=writer, cause="test"))
        assert isinstance(action, act.Move)
        made.move(action)
    assert replica.counters.state_ns == {S.INACTIVE: 10, S.LOADING_DECODE: 15, S.AUS_DECODE: 40}
    assert replica.counters.state_since_ns == 65


# --- with the real scheduler and actor ----------------------------------------------------------------
def receiving(stage: Stage, request_id: int, prompt: int, output: int) -> Request:
    made = stage.made(request_id, prompt, output)
    made.status, made.generated_tokens, made.computed_tokens = Status.MIGRATING, 1, prompt
    made.first_token_ns = made.last_token_ns = stage.kernel.now_ns
    return made


def test_a_reservation_arms_its_actor_for_the_end_of_the_shorter_leap() -> None:
    """No word to look up: the leap still holds, but not for so long."""
    stage = Stage(S.DECODE, blocks=12)
    one = receiving(stage, 1, 4, 40)
    assert stage.actors[0].reserve([one])
    stage.actors[0].post(ev.KvDelivered(requests=[one]))
    stage.kernel.run(12 * US)
    due_ns = stage.actors[0].due_ns
    replica = stage.replicas[0]

    def leap_holds(batch: Batch) -> bool:
        batch.max_steps = 7
        return True

    replica.scheduler.leap_holds = leap_holds  # type: ignore[method-assign]
    assert stage.actors[0].reserve([receiving(stage, 2, 20, 9)])
    run = replica.flight
    assert isinstance(run, Run)
    assert len(run.ends) == 7
    assert stage.actors[0].due_ns == run.due_ns < due_ns
    assert not stage.actors[0].is_ready
    stage.kernel.run(run.due_ns)
    assert stage.problems() == []


def test_a_parked_replica_is_woken_by_what_it_can_use_and_rests_else() -> None:
    stage = Stage(S.DECODE)
    stage.kernel.run()
    assert stage.actors[0].due_ns > 10**15
    before = len(stage.kernel.steps)
    one = receiving(stage, 1, 4, 3)
    assert stage.actors[0].reserve([one])
    stage.kernel.rest()
    assert len(stage.kernel.steps) == before, "blocks that are reserved are no work"
    stage.actors[0].post(ev.KvDelivered(requests=[one]))
    stage.kernel.run()
    assert [(one, how) for one, how, *_ in stage.ends] == [(1, "COMPLETED")]
    assert stage.replicas[0].flight.sort is Sort.IDLE
    assert stage.replicas[0].go_on() == PARK


@pytest.mark.parametrize(("given_back", "is_told"), [(1, True), (0, False), (-1, False)])
def test_a_decode_says_when_its_batch_gives_more_blocks_back_than_it_takes(
    given_back: int, is_told: bool
) -> None:
    pool = GroupedPool.__new__(GroupedPool)
    pool.blocks_free = 4
    clock, scheduler = FakeClock(), FakeScheduler()
    watch: Any = Watch(0, clock, scheduler, FakeObservers())  # type: ignore[arg-type]
    pace: Any = Pace(FakeLatency())
    books = Books(0, clock, scheduler, pace, watch, Counters(), [])  # type: ignore[arg-type]
    books.shedding = pool
    scheduler.queue.append(request(1, prompt=4, output=4))
    schedule = scheduler.schedule

    def sheds(now_ns: int) -> Batch | None:
        pool.blocks_free += given_back
        return schedule(now_ns)

    scheduler.schedule = sheds  # type: ignore[method-assign]
    Plain(books, frees=True, runs_on=False).start()
    assert [type(action) for action in books.out] == [act.FreeCapacity] * is_told
