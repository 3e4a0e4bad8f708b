"""Each flight by itself, without a replica: how it begins, what it tells, how it ends or is lost."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest

from emu.kernel.clock import PARK
from emu.latency.base import BatchShape
from emu.replica import actions as act
from emu.replica import events as ev
from emu.replica.books import DUMMY_ID, Books
from emu.replica.counters import Counters
from emu.replica.flight.awaiting import Awaiting
from emu.replica.flight.base import APPLY, IDLE, Flight, Sort
from emu.replica.flight.launchers import Single
from emu.replica.flight.layered import (
    ENDED,
    FINISH,
    GIVE,
    INSTANT,
    LAYER,
    LOOK,
    UNTIL_END_OF_INSTANT,
    Layered,
)
from emu.replica.flight.measured import Measured
from emu.replica.flight.member import OVER, Member
from emu.replica.flight.relay import Relay
from emu.replica.flight.run import Run
from emu.replica.flight.staged import Staged
from emu.replica.flight.step import Step
from emu.replica.layer_scheduler import LayerScheduler
from emu.replica.mailbox import Mailbox
from emu.replica.pace import Pace
from emu.replica.prerequisites import Prerequisites
from emu.replica.relay_board import Relayed
from emu.replica.watch import Watch
from emu.scheduling.base import Batch
from emu.testing import (
    STEP_NS,
    FakeClock,
    FakeLatency,
    FakeObservers,
    FakeScheduler,
    request,
)

pytestmark = pytest.mark.doubles


class Alone:
    """The books of one replica, and batches for them."""

    def __init__(self, stages: int = 1) -> None:
        self.clock = FakeClock()
        self.scheduler = FakeScheduler(stages=stages)
        pace = Pace(FakeLatency(), stages)
        clock, scheduler = cast(Any, self.clock), cast(Any, self.scheduler)
        watch = Watch(0, clock, scheduler, cast(Any, FakeObservers()))
        self.books = Books(0, clock, scheduler, pace, watch, Counters(), [])
        self.mailbox = Mailbox(deque())

    def batch(self, *, output: int = 3) -> Batch:
        """A prompt that is admitted now."""
        self.scheduler.queue.append(request(self.scheduler.ids + 1, prompt=4, output=output))
        batch = self.scheduler.schedule(self.clock.now_ns)
        assert batch is not None
        return batch

    def at(self, now_ns: int) -> None:
        self.clock.now_ns = now_ns

    @property
    def done(self) -> tuple[int, int]:
        """Iterations that have ended, and time in which they ran, ns."""
        return self.books.counters.iterations, self.books.counters.busy_ns


class Waits(Prerequisites):
    """So many things are missing, of which a tier may have lost some."""

    def __init__(self, left: int) -> None:
        super().__init__(0)
        self.left = left
        self.dropped = False

    def lose_recalls(self, tier: int) -> int:
        self.left -= 1
        return 9

    def drop(self) -> None:
        self.dropped = True


# --- a batch that waits for KV --------------------------------------------------------------------
def awaiting(left: int) -> tuple[Alone, Awaiting, Waits]:
    alone, needs = Alone(), Waits(left)
    single = Single(alone.books, IDLE, runs_on=False)
    return alone, Awaiting(alone.books, alone.batch(), 0, needs, single), needs


def test_a_batch_begins_with_the_last_thing_that_it_awaits() -> None:
    alone, flight, _ = awaiting(2)
    assert (flight.due_ns, flight.holds_batch()) == (PARK, True)
    assert flight.tells(0) == "batch 1 of 1 request waits for KV, 2 to come"
    alone.at(700)
    assert (flight.met(-1), flight.end()) == (0, flight)
    assert flight.met(-1) == ev.INTERRUPT
    begun = flight.end()
    assert isinstance(begun, Step)
    assert (begun.due_ns, begun.waited_ns) == (700 + STEP_NS, 700)
    alone.at(begun.due_ns)
    assert begun.end() is IDLE
    assert alone.done == (1, STEP_NS), "the wait is no work"


def test_a_batch_whose_tier_has_lost_its_kv_computes_it() -> None:
    _, flight, _ = awaiting(2)
    assert flight.lose_recalls(0) == (9, 0)
    assert flight.lose_recalls(0) == (9, ev.INTERRUPT)
    assert isinstance(flight.end(), Step)


def test_a_batch_that_awaits_kv_does_not_begin_in_a_pause() -> None:
    alone, flight, _ = awaiting(1)
    assert flight.pause() is flight
    flight.met(-1)
    assert flight.end() is flight
    alone.at(5_000)
    flight.resume(0)
    assert isinstance(flight.end(), Step)


def test_a_batch_that_is_lost_wants_nothing_more() -> None:
    alone, flight, needs = awaiting(1)
    alone.at(300)
    assert flight.lose() is IDLE
    assert needs.dropped
    assert alone.done == (0, 0)


# --- a cost from outside --------------------------------------------------------------------------
def test_a_batch_tells_that_its_cost_is_asked_for() -> None:
    alone = Alone()
    flight = Measured(alone.books, lambda cost_ns: IDLE, IDLE, 0)
    assert flight.tells(0) == "a batch waits for its cost"
    flight.learn(5)
    flight.pause()
    assert flight.tells(0) == "a batch has its cost, and its process stands still"


# --- stages ---------------------------------------------------------------------------------------
def staged() -> tuple[Alone, Staged]:
    alone = Alone(stages=2)
    return alone, Staged(alone.books, 2, alone.mailbox)


def put(alone: Alone, flight: Staged) -> None:
    flight.hold(alone.batch(output=1), Prerequisites(0))
    assert flight.launch() is flight


def test_batches_leave_the_stages_in_their_order() -> None:
    alone, flight = staged()
    stage_ns = FakeLatency().stage_ns(BatchShape())[0]
    assert (flight.is_open, flight.holds_batch()) == (True, False)
    put(alone, flight)
    put(alone, flight)
    flight.wait()
    assert [b.batch_id for b in flight.batches()] == [1, 2]
    assert (flight.due_ns, flight.is_open) == (2 * stage_ns, False)
    assert flight.tells(0).startswith("2 batches on 2 stages, batch 1 of 1 request ends in ")
    alone.at(flight.due_ns)
    assert flight.end() is flight
    assert ([b.batch_id for b in flight.batches()], flight.is_open) == ([2], True)
    flight.wait()
    alone.at(flight.due_ns)
    flight.end()
    assert (flight.holds_batch(), alone.done[0]) == (False, 2)
    assert flight.tells(0) == "nothing is on its 2 stages"


def test_a_held_batch_enters_the_stages_with_the_last_thing_that_it_lacks() -> None:
    alone, flight = staged()
    flight.hold(alone.batch(), Waits(2))
    assert (flight.is_holding, flight.holds_batch()) == (True, True)
    assert "waits, 2 to come" in flight.tells(0)
    assert flight.met(-1) == 0
    assert (flight.met(40), flight.is_holding) == (ev.LOOK, False)
    assert flight.wave_wait_ns == 40


def test_a_pause_makes_everything_on_the_stages_end_later() -> None:
    alone, flight = staged()
    put(alone, flight)
    due_ns = flight.wait().due_ns
    alone.at(10)
    assert flight.pause() is flight
    assert "stands still" in flight.tells(10)
    alone.at(1_010)
    flight.resume(10)
    assert flight.wait().due_ns == due_ns + 1_000


def test_stages_that_are_lost_are_empty_and_free() -> None:
    alone, flight = staged()
    put(alone, flight)
    needs = Waits(1)
    flight.hold(alone.batch(), needs)
    flight.wait()
    alone.at(20)
    assert flight.lose() is flight
    assert (flight.holds_batch(), flight.is_open, flight.due_ns) == (False, True, PARK)
    assert (needs.dropped, alone.done[0]) == (True, 0)
    assert max(flight.pipeline.free_ns) <= 20


# --- a member of a group --------------------------------------------------------------------------
class Promised:
    """Waves that a test ends."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.calls: list[str] = []
        self.next_ns = OVER

    def begin(self) -> int:
        self.calls.append("begin")
        return 5 * STEP_NS

    def go_on(self) -> int:
        self.calls.append("go on")
        return self.next_ns

    def settle(self) -> None:
        self.calls.append("settle")

    def unroll(self) -> None:
        self.calls.append("unroll")
        self.member.set_promise(None)


def member() -> tuple[Alone, Member]:
    alone = Alone()
    return alone, Member(alone.books, cast(Any, None), cast(Any, None), alone.mailbox)


def test_a_member_waits_for_its_wave_then_runs_as_long_as_the_slowest() -> None:
    alone, flight = member()
    assert (flight.is_open, flight.boundary_ns(0), flight.holds_batch()) == (True, -1, False)
    flight.hold(alone.batch(), 0, Waits(1))
    assert (flight.is_open, flight.due_ns) == (False, PARK)
    assert "waits for its wave or KV, 1 to come" in flight.tells(0)
    alone.at(200)
    assert flight.met(30) == ev.INTERRUPT
    assert flight.end() is flight
    assert flight.due_ns == 200 + STEP_NS + 30
    assert flight.tells(200) == "batch 1 of 1 request: its wave ends in 0.001 ms"
    alone.at(flight.due_ns)
    assert flight.end() is flight
    assert (flight.is_open, flight.holds_batch()) == (True, False)
    assert alone.done == (1, STEP_NS + 30)


def test_a_member_that_keeps_pace_counts_an_iteration_and_no_token() -> None:
    alone, flight = member()
    dummy = Batch(DUMMY_ID, BatchShape(decode_count=1, sequences=1), [], formed_ns=0)
    flight.hold(dummy, 0, Waits(0))
    flight.begin(0)
    assert flight.tells(0).startswith("a batch that keeps pace: ")
    alone.at(flight.due_ns)
    flight.end()
    assert alone.done == (1, STEP_NS)
    assert alone.books.counters.decode_tokens == 0


def test_promised_waves_are_a_leap_until_something_happens() -> None:
    alone, flight = member()
    promised = Promised(flight)
    flight.set_promise(promised)
    flight.hold(alone.batch(), 0, Waits(0))
    flight.begin(0)
    assert (flight.is_leap, flight.is_joint, flight.due_ns) == (True, True, 5 * STEP_NS)
    promised.next_ns = 9 * STEP_NS
    assert flight.end() is flight
    assert flight.due_ns == 9 * STEP_NS
    flight.settle()
    flight.unroll()
    assert promised.calls == ["begin", "go on", "settle", "unroll"]
    assert (flight.is_leap, flight.is_joint) == (False, False)


def test_a_promise_does_not_begin_before_what_is_posted_has_been_applied() -> None:
    alone, flight = member()
    promised = Promised(flight)
    flight.set_promise(promised)
    alone.mailbox.posted.append(ev.Looked(what="a test"))
    flight.hold(alone.batch(), 0, Waits(0))
    flight.begin(0)
    assert promised.calls == ["unroll"]
    assert flight.due_ns == STEP_NS


def test_a_member_with_several_steps_settles_them() -> None:
    alone, flight = member()
    alone.batch()
    alone.scheduler.in_flight.clear()
    alone.scheduler.leap = 3
    batch = alone.scheduler.schedule(0)
    assert batch is not None
    flight.hold(batch, 0, Waits(0))
    flight.fly(cast(Any, [STEP_NS, 2 * STEP_NS, 3 * STEP_NS]), 3 * STEP_NS)
    assert flight.is_leap
    alone.at(STEP_NS + 1)
    assert (flight.settle(), flight.steps_ended()) == (1, 1)
    assert flight.boundary_ns(1) == 2 * STEP_NS
    assert "wave 2 of 3" in flight.tells(STEP_NS + 1)


def test_a_pause_of_a_member_makes_its_batch_end_later() -> None:
    alone, flight = member()
    flight.hold(alone.batch(), 0, Waits(0))
    flight.begin(0)
    alone.at(400)
    flight.pause()
    assert (flight.due_ns, "stands still" in flight.tells(400)) == (PARK, True)
    assert flight.end() is flight
    alone.at(900)
    flight.resume(400)
    assert flight.due_ns == STEP_NS + 500
    assert flight.end() is flight, "the rest of it is waited for"
    alone.at(flight.due_ns)
    flight.end()
    assert not flight.holds_batch()


def test_a_member_that_is_lost_rests_in_its_next_life() -> None:
    alone, flight = member()
    needs = Waits(0)
    flight.set_promise(Promised(flight))
    flight.hold(alone.batch(), 0, needs)
    flight.begin(0)
    alone.at(300)
    assert flight.lose() is flight
    assert (flight.life, flight.is_open, flight.is_leap, flight.due_ns) == (1, True, False, PARK)
    assert (needs.dropped, flight.promise, flight.holds_batch()) == (True, None, False)
    assert alone.done == (0, 300)


# --- layer by layer -------------------------------------------------------------------------------
def layered() -> tuple[Alone, Layered]:
    alone = Alone()
    return alone, Layered(alone.books, LayerScheduler(4, 0))


def test_a_pass_goes_from_a_look_to_the_end_of_the_instant_to_the_next_layer() -> None:
    alone, flight = layered()
    task = flight.layers.admit(alone.batch())
    assert (flight.phase, flight.is_open, flight.holds_batch()) == (LOOK, True, False)
    flight.end_layer()
    assert (flight.phase, flight.due_ns, flight.is_open) == (INSTANT, UNTIL_END_OF_INSTANT, False)
    assert flight.end() is flight
    assert (flight.phase, flight.due_ns, flight.is_open) == (ENDED, APPLY, True)
    flight.see_weights(2)
    assert (flight.phase, flight.layers.layers_ready) == (FINISH, 1)
    flight.finish()
    assert flight.phase == GIVE
    flight.give()
    flight.start_layer(task, 70)
    assert (flight.wait().due_ns, flight.phase) == (70, LAYER)
    words = (
        "batch 1 of 1 request: layer 1, ends in 0.000 ms; batches begun: 1, layers there: 1 of 4"
    )
    assert flight.tells(0) == words
    alone.at(70)
    flight.end()
    flight.end_layer()
    assert (task.layers_done, flight.layers.running) == (1, None)
    assert alone.books.counters.busy_ns == 70


def test_a_layer_that_has_not_ended_goes_on_after_a_look() -> None:
    alone, flight = layered()
    task = flight.layers.admit(alone.batch())
    flight.see_weights(2)
    flight.start_layer(task, 70)
    alone.at(30)
    flight.end_layer()
    assert (task.layers_done, flight.layers.running) == (0, task)
    alone.at(40)
    flight.resume(30)
    assert flight.wait().due_ns == 80


def test_without_a_layer_that_can_run_a_pass_waits_for_what_happens() -> None:
    _, flight = layered()
    assert (flight.wait().due_ns, flight.is_open) == (PARK, False)
    assert (
        flight.tells(0) == "layer by layer: no layer runs, batches begun: 0, layers there: 0 of 4"
    )


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_replica_that_leaves_live_scaling_has_nothing_in_flight(is_lost: bool) -> None:
    _, flight = layered()
    flight.wait()
    if is_lost:
        assert flight.lose() is IDLE
    else:
        flight.dismiss()
        assert flight.end() is IDLE


# --- the rest of another's batch ------------------------------------------------------------------
class Board:
    """Only that a helper has finished is written down."""

    def __init__(self) -> None:
        self.finished_ids: list[int] = []

    def finished(self, old_id: int) -> None:
        self.finished_ids.append(old_id)


def relay() -> tuple[Alone, Board, Relay]:
    alone, board = Alone(), Board()
    relayed = Relayed(batch=alone.batch(), start_layer=3, split=None, source_id=5)
    return alone, board, Relay(alone.books, cast(Any, board), relayed, 90)


def test_first_tokens_of_a_relayed_batch_come_after_what_is_posted() -> None:
    alone, board, flight = relay()
    assert (flight.due_ns, flight.boundary_ns(0), flight.holds_batch()) == (90, 90, True)
    assert flight.tells(0).startswith("batch 1 of 1 request of replica 5: from layer 4, ends in ")
    alone.at(90)
    assert flight.end() is flight
    assert (flight.due_ns, flight.holds_batch(), board.finished_ids) == (APPLY, False, [0])
    assert alone.done == (0, 90)
    assert "all layers have run" in flight.tells(90)
    assert flight.end() is IDLE
    assert alone.done == (1, 90)


def test_a_pause_makes_a_relayed_batch_end_later() -> None:
    alone, _, flight = relay()
    alone.at(20)
    assert flight.pause().due_ns == PARK
    assert flight.end() is flight
    alone.at(50)
    flight.resume(20)
    assert flight.due_ns == 120
    assert flight.end() is flight, "the rest of it is waited for"
    alone.at(120)
    assert flight.end().due_ns == APPLY


@pytest.mark.parametrize(("is_paused", "busy_ns"), [(False, 40), (True, 0)])
def test_a_relayed_batch_that_is_lost_ran_for_nothing(is_paused: bool, busy_ns: int) -> None:
    alone, board, flight = relay()
    alone.at(40)
    if is_paused:
        flight.pause()
    assert flight.lose() is IDLE
    assert (alone.done, board.finished_ids) == ((0, busy_ns), [])


# --- words ----------------------------------------------------------------------------------------
def test_an_iteration_and_a_leap_tell_how_far_they_have_come() -> None:
    alone = Alone()
    step = Step(alone.books, alone.batch(), 0, 2_500_000)
    assert IDLE.tells(0) == "nothing is in flight"
    assert step.tells(500_000) == "batch 1 of 1 request: one iteration, ends in 2.000 ms"
    assert step.pause().tells(0) == "batch 1 of 1 request: one iteration, which stands still"
    ends = cast(Any, [1_000_000, 2_000_000, 3_000_000])
    run = Run(alone.books, step.batch, 0, ends)
    alone.at(1_500_000)
    assert run.tells(1_500_000) == (
        "batch 1 of 1 request: iteration 2 of 3, the last ends in 1.500 ms"
    )


def test_only_flights_of_several_iterations_are_leaps() -> None:
    alone = Alone()
    batch = alone.batch()
    found: list[Flight] = [
        IDLE,
        Step(alone.books, batch, 0, 5),
        Run(alone.books, batch, 0, cast(Any, [5, 10])),
        Staged(alone.books, 2, alone.mailbox),
        Awaiting(alone.books, batch, 0, Waits(1), Single(alone.books, IDLE, runs_on=False)),
        Measured(alone.books, lambda cost_ns: IDLE, IDLE, 0),
        Layered(alone.books, LayerScheduler(4, 0)),
        member()[1],
        relay()[2],
    ]
    assert [flight.sort for flight in found if flight.is_leap] == [Sort.RUN]
    assert not any(isinstance(one, act.Measure) for one in alone.books.out)
