"""A replica as a machine, without kernel and cluster: each handler a claim, every pair tried."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from emu.errors import UnexpectedEvent
from emu.kernel.clock import AGAIN, AT_DUE, NOW, PARK
from emu.latency.base import BatchShape
from emu.replica import actions as act
from emu.replica import events as ev
from emu.replica.events import Event, Kind
from emu.replica.flight.base import IDLE, Flight, Sort
from emu.replica.flight.measured import Measured
from emu.replica.flight.step import Step
from emu.replica.flight.table import FLIES, may_fly
from emu.replica.relay_board import RelayBoard
from emu.replica.states import DRAINING, LOADING, ReplicaState
from emu.replica.table import EXPECTED
from emu.request import Status
from emu.scheduling.base import Batch, Progress
from emu.testing import STEP_NS, Bench, request

pytestmark = pytest.mark.doubles
S = ReplicaState
ASKED = ev.Asked("migrator", 0)


def kinds(actions: list[act.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def samples() -> dict[Kind, Event]:
    """One event of each kind."""
    one = request(7)
    return {
        Kind.SUBMITTED: ev.Submitted(request(8)),
        Kind.UNRESERVED: ev.Unreserved(requests=[one]),
        Kind.RELEASED: ev.Released(requests=[one]),
        Kind.STOP_UNDONE: ev.StopUndone(request=one),
        Kind.LIVE_MOVES: ev.LiveMoves(change=1),
        Kind.PREREQUISITE_MET: ev.PrerequisiteMet(life=99),
        Kind.TIER_LOST: ev.TierLost(tier=0),
        Kind.SEGMENT_ARRIVED: ev.SegmentArrived(count=2),
        Kind.WEIGHTS_ARRIVED: ev.WeightsArrived(to=S.PREFILL),
        Kind.LOAD_GIVEN_UP: ev.LoadGivenUp(cause="test"),
        Kind.COMMANDED: ev.Commanded(to=S.FAILED, writer="fault", cause="test"),
        Kind.LOCK_GRANTED: ev.LockGranted(),
        Kind.PAUSED: ev.Paused(),
        Kind.UNPAUSED: ev.Unpaused(life=0, since_ns=0),
        Kind.CRASHED: ev.Crashed(lost=[]),
        Kind.RESTARTED: ev.Restarted(life=0),
        Kind.SLOWDOWN_SET: ev.SlowdownSet(factor=2.0),
        Kind.MEASURED: ev.Measured(life=0, cost_ns=5),
        Kind.ACTIVATION_ARRIVED: ev.ActivationArrived(life=0),
        Kind.LOOKED: ev.Looked(what="capacity"),
        Kind.CANCELLED: ev.Cancelled(request=one, status=Status.CANCELLED, reason="left"),
        Kind.STOP_ASKED: ev.StopAsked(request=one, asked=ASKED),
        Kind.KV_DELIVERED: ev.KvDelivered(requests=[]),
        Kind.KV_SHRUNK: ev.KvShrunk(part=0.5, loss=0, asked=ASKED),
        Kind.KV_RESTORED: ev.KvRestored(loss=0, asked=ASKED),
        Kind.DRAIN_EXPIRED: ev.DrainExpired(),
        Kind.CANCELS_APPLIED: ev.CANCELS_APPLIED,
    }


def bench(state: ReplicaState, **options: Any) -> Bench:
    made = Bench(state, **options)
    made.scheduler.detached.append(request(7))
    return made


# --- the table ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("state", "kind"), list(product(S, [k for k in Kind if k is not Kind.BOUNDARY]))
)
def test_every_pair_is_handled_or_raises(state: ReplicaState, kind: Kind) -> None:
    """A pair that is not in the table raises with the replica's history; no other pair does."""
    made, event = bench(state), samples()[kind]
    made.replica.history.append("what happened before")
    if kind is Kind.STOP_UNDONE:
        made.scheduler.detached = [event.request]  # type: ignore[attr-defined]
    if (state, kind) in EXPECTED:
        made.tell(event)
    else:
        with pytest.raises(UnexpectedEvent, match="what happened before"):
            made.tell(event)


def flying(made: Bench, sort: Sort) -> Flight:
    """Something of this sort, with a batch."""
    books, batch = made.replica.books, Batch(1, BatchShape(decode_count=1), [])
    if sort is Sort.STEP:
        return Step(books, batch, 0, STEP_NS)
    return Measured(books, lambda cost_ns: IDLE, IDLE, 0)


@pytest.mark.parametrize(("state", "sort"), list(product(S, (Sort.IDLE, Sort.STEP, Sort.MEASURED))))
def test_what_may_not_be_in_flight_in_a_state_raises_when_the_state_comes(
    state: ReplicaState, sort: Sort
) -> None:
    made = bench(S.DECODE)
    if sort is not Sort.IDLE:
        made.replica.flight = flying(made, sort)
    made.replica.state = state
    if state in FLIES[sort]:
        made.replica.note_state()
    else:
        with pytest.raises(UnexpectedEvent, match=sort.name.lower()):
            made.replica.note_state()


def test_every_flight_has_its_states_and_an_empty_one_may_be_anywhere() -> None:
    assert set(FLIES) == set(Sort)
    for sort in (Sort.STAGED, Sort.MEMBER):
        assert all(may_fly(sort, state, holds_batch=False) for state in S)
        batches = {state for state in S if may_fly(sort, state, holds_batch=True)}
        assert batches == FLIES[Sort.STEP]


def test_every_state_has_a_boundary() -> None:
    assert all((state, Kind.BOUNDARY) in EXPECTED for state in S)


def test_requests_are_routed_to_prefill_and_colocated_only() -> None:
    assert {s for s in S if (s, Kind.SUBMITTED) in EXPECTED} == {S.PREFILL, S.COLOCATED}


def test_kv_arrives_where_decodes_run_only() -> None:
    states = {s for s in S if (s, Kind.KV_DELIVERED) in EXPECTED}
    assert states == {S.DECODE, S.SHUTTING_DECODE, S.AUS_DECODE}


def test_a_replica_that_is_down_cannot_crash_or_pause() -> None:
    assert (S.FAILED, Kind.CRASHED) not in EXPECTED
    assert (S.FAILED, Kind.PAUSED) not in EXPECTED


def test_weights_arrive_only_where_they_are_awaited() -> None:
    states = {s for s in S if (s, Kind.WEIGHTS_ARRIVED) in EXPECTED}
    assert states == LOADING | {S.NEW_PREFILL}


# --- requests ---------------------------------------------------------------------------------------
def test_a_submitted_request_waits_and_wakes_a_resting_replica() -> None:
    made = Bench(S.COLOCATED)
    one = request()
    assert made.tell(ev.Submitted(one)) == []
    assert (one.status, one.holder_id, made.scheduler.queue) == (Status.QUEUED, 0, [one])
    assert made.replica.look == ev.LOOK
    assert made.replica.align(0) == NOW


def test_a_request_that_can_never_be_held_is_rejected_at_once() -> None:
    made = Bench(S.COLOCATED)
    made.scheduler.never = "too long"
    one = request()
    assert made.tell(ev.Submitted(one)) == [act.End(one, Status.REJECTED, "too long")]
    assert made.scheduler.queue == []


def test_its_engine_looks_at_a_request_when_the_iteration_in_flight_ends() -> None:
    made = Bench(S.COLOCATED)
    made.running(1)
    made.step()
    one = request(2)
    made.clock.now_ns = 300
    made.tell(ev.Submitted(one))
    assert one.taken_ns == STEP_NS
    assert made.replica.align(300) == AT_DUE


def test_a_prompt_then_decodes_then_its_end() -> None:
    made = Bench(S.COLOCATED)
    one = request(output=3)
    made.tell(ev.Submitted(one))
    assert made.step() == []
    assert (made.due_ns, made.flies) == (STEP_NS, Sort.STEP)
    found = made.run_until(3 * STEP_NS)
    assert found == [act.End(one, Status.COMPLETED), act.FreeCapacity()]
    assert (made.due_ns, made.flies) == (PARK, Sort.IDLE)
    assert made.replica.counters.busy_ns == 3 * STEP_NS
    assert one.decode_replica_id == 0


def test_a_leap_gives_what_its_steps_give() -> None:
    found = []
    for leap in (1, 8):
        made = Bench(S.COLOCATED, leap=leap)
        made.tell(ev.Submitted(request(output=6)))
        made.step()
        ended = made.run_until(10 * STEP_NS)
        its = made.replica.counters
        found.append((kinds(ended), its.busy_ns, its.iterations, its.decode_tokens))
    assert found[0] == found[1]


def test_a_leap_that_no_longer_holds_ends_with_the_iteration_in_flight() -> None:
    made = Bench(S.COLOCATED, leap=8)
    made.running(1, output=9)
    made.step()
    assert made.due_ns == 8 * STEP_NS
    made.scheduler.holds = False
    made.clock.now_ns = 2_500
    made.tell(ev.Submitted(request(2)))
    assert made.replica.look == ev.LOOK
    assert made.replica.align(2_500) == 3_000


def test_at_the_very_end_of_a_step_the_priority_says_whether_it_has_ended() -> None:
    made = Bench(S.COLOCATED, leap=8)
    made.running(1, output=9)
    made.step()
    made.clock.now_ns = 2 * STEP_NS
    made.clock.priority_reached = 0
    assert made.replica.settle() == 1
    made.clock.priority_reached = made.replica.priority + 1
    assert made.replica.settle() == 2


def test_a_cancelled_request_leaves_at_the_boundary() -> None:
    made = Bench(S.COLOCATED)
    (one,) = made.running(1, output=9)
    made.step()
    made.post(ev.Cancelled(request=one, status=Status.CANCELLED, reason="client_left"))
    found = made.run_until(STEP_NS)
    assert found[:2] == [act.End(one, Status.CANCELLED, "client_left"), act.FreeCapacity()]
    assert made.scheduler.running == []


def test_a_cancellation_follows_a_request_that_has_moved_on() -> None:
    made = Bench(S.PREFILL)
    one = request()
    one.status, one.holder_id = Status.MIGRATING, 0
    made.post(ev.Cancelled(request=one, status=Status.CANCELLED, reason="client_left"))
    assert made.step()[0] == act.ForwardCancel(one)
    one.status, one.holder_id = Status.RUNNING, 3
    made.post(ev.Cancelled(request=one, status=Status.CANCELLED, reason="client_left"))
    assert made.step()[0] == act.ForwardCancel(one)


def test_a_cancellation_of_a_request_that_has_ended_does_nothing() -> None:
    made = Bench(S.COLOCATED)
    one = request()
    one.status = Status.COMPLETED
    made.post(ev.Cancelled(request=one, status=Status.CANCELLED, reason="client_left"))
    assert made.step() == [act.FreeCapacity()]


def test_posted_events_are_applied_in_order_stops_then_kv_then_cancels() -> None:
    made = Bench(S.DECODE)
    (one,) = made.running(1, output=9)
    two = request(2)
    made.scheduler.reserve([two])
    made.post(ev.Cancelled(request=two, status=Status.CANCELLED, reason="left"))
    made.post(ev.KvDelivered(requests=[two]))
    made.post(ev.StopAsked(request=one, asked=ASKED))
    assert kinds(made.step()) == ["Reply", "End", "FreeCapacity"]
    assert (made.scheduler.running, made.scheduler.detached) == ([], [one])


def test_what_is_posted_while_the_boundary_is_applied_waits_for_the_next() -> None:
    made = Bench(S.DECODE)
    (one,) = made.running(1, output=9)
    made.post(ev.StopAsked(request=request(5), asked=ASKED))
    made.replica.mailbox.begin_applying()
    made.post(ev.Cancelled(request=one, status=Status.CANCELLED, reason="left"))
    assert kinds(made.step()) == ["Reply"]
    assert made.scheduler.running == [one]
    assert len(made.replica.mailbox.posted) == 1


def test_delivered_requests_run_and_belong_to_this_replica() -> None:
    made = Bench(S.DECODE)
    one, gone = request(1), request(2)
    gone.status = Status.CANCELLED
    made.scheduler.reserve([one])
    made.post(ev.KvDelivered(requests=[one, gone]))
    made.step()
    assert (one.status, one.holder_id, made.scheduler.running) == (Status.RUNNING, 0, [one])


def test_kv_that_comes_late_may_be_moved_on() -> None:
    made = Bench(S.SHUTTING_DECODE)
    made.lock.try_acquire("replica 0")
    one = request(1)
    made.scheduler.reserve([one])
    made.post(ev.KvDelivered(requests=[one]))
    assert made.step()[0] == act.Drain()


def test_a_stop_is_answered_also_if_the_request_is_not_here() -> None:
    made = Bench(S.DECODE)
    one = request(1)
    made.post(ev.StopAsked(request=one, asked=ASKED))
    assert kinds(made.step()) == ["Reply"]
    assert one.status is Status.CREATED


def test_a_stopped_request_is_detached_and_goes_on_when_the_stop_is_undone() -> None:
    made = Bench(S.DECODE)
    (one,) = made.running(1)
    made.post(ev.StopAsked(request=one, asked=ASKED))
    made.step()
    assert (one.status, made.scheduler.detached) == (Status.MIGRATING, [one])
    made.tell(ev.StopUndone(request=one))
    assert (one.status, made.scheduler.running) == (Status.RUNNING, [one])


def test_a_request_stops_when_its_batch_has_left_the_pipeline() -> None:
    """It was detached at once, and the token under way computed again where it was."""
    made = Bench(S.DECODE, stages=2)
    one, two = request(1), request(2)
    for each in (one, two):
        each.generated_tokens = 1
        made.scheduler.running.append(each)
    made.step()
    assert len(made.replica.flight.batches()) == 1
    made.post(ev.StopAsked(request=one, asked=ASKED))
    assert kinds(made.step()) == []
    assert (one.generated_tokens, made.scheduler.detached) == (1, [])
    assert "Reply" in kinds(made.run_until(2 * STEP_NS))
    assert (one.generated_tokens, made.scheduler.detached) == (2, [one])


def test_a_reservation_is_all_or_nothing() -> None:
    from emu.replica.inbound import reserve

    made = Bench(S.DECODE, blocks=10)
    assert not reserve(made.replica, [request(1, 6), request(2, 6)])
    assert made.scheduler.blocks_used == 0
    assert reserve(made.replica, [request(1, 6)])
    assert made.scheduler.blocks_used == 6


def test_a_reservation_that_is_given_back_frees_its_blocks_and_wakes() -> None:
    made = Bench(S.DECODE)
    one = request()
    made.scheduler.reserve([one])
    made.tell(ev.Unreserved(requests=[one]))
    assert (made.scheduler.blocks_used, made.replica.look) == (0, ev.LOOK)


def test_kv_that_has_left_frees_its_blocks_and_wakes_those_that_wait_here() -> None:
    made = Bench(S.PREFILL)
    one = request()
    made.scheduler.detached.append(one)
    made.tell(ev.Released(requests=[one]))
    assert (made.scheduler.blocks_used, made.replica.look) == (0, 0)
    made.scheduler.queue.append(request(2))
    made.tell(ev.Released(requests=[]))
    assert made.replica.look == ev.LOOK


def test_a_prefill_replica_hands_off_what_has_its_first_token() -> None:
    made = Bench(S.PREFILL)
    one = request(output=3)
    made.tell(ev.Submitted(one))
    made.step()
    assert made.run_until(STEP_NS) == [act.HandOff([one], STEP_NS)]
    assert (one.status, made.scheduler.detached) == (Status.MIGRATING, [one])


def test_a_request_of_one_token_ends_and_is_not_handed_off() -> None:
    made = Bench(S.PREFILL)
    one = request(output=1)
    made.tell(ev.Submitted(one))
    made.step()
    assert made.run_until(STEP_NS) == [act.End(one, Status.COMPLETED), act.FreeCapacity()]


def test_what_can_never_be_scheduled_fails_with_its_reason() -> None:
    made = Bench(S.COLOCATED, blocks=2)
    one = request()
    made.tell(ev.Submitted(one))
    made.scheduler.unschedulable = [(one, "does not fit")]
    assert made.step() == [act.End(one, Status.FAILED, "does not fit"), act.FreeCapacity()]


# --- states -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", sorted(LOADING | {S.INACTIVE, S.FAILED}, key=lambda s: s.value))
def test_a_replica_without_weights_rests(state: ReplicaState) -> None:
    made = Bench(state)
    assert made.step() == []
    assert made.due_ns == PARK


def test_a_spare_that_is_to_prefill_closes_first() -> None:
    made = Bench(S.AUS_PREFILL)
    made.lock.release("replica 0")
    made.replica.gate.is_closing = False
    assert made.replica.go_on() == -5
    assert made.replica.take_out() == [act.CloseLock()]
    made.lock.try_acquire("replica 0")
    assert act.Move(S.AUS_PREFILL, S.PREFILL, "closed") in made.step()


def test_a_spare_that_is_to_decode_opens_first() -> None:
    made = Bench(S.AUS_DECODE)
    assert made.step()[:2] == [act.OpenLock(), act.Move(S.AUS_DECODE, S.DECODE, "opened")]


def test_a_mutating_replica_gives_its_queue_back_and_keeps_its_prompts() -> None:
    made = Bench(S.MUTATING_TO_DECODE)
    waiting, held = request(1), request(2)
    made.scheduler.queue.append(waiting)
    made.scheduler.detached.append(held)
    made.outbox.batches = [[held]]
    found = made.step()
    assert found[0] == act.Requeue([waiting])
    assert found[1:3] == [act.OpenLock(), act.Move(S.MUTATING_TO_DECODE, S.DECODE, "flushed")]
    assert (held.status, made.scheduler.running) == (Status.RUNNING, [held])


@pytest.mark.parametrize(
    "state", [S.MUTATING_TO_DECODE, S.SHUTTING_PREFILL, S.SHUTTING_COLOCATED, S.OLD_PREFILL]
)
def test_a_queue_is_given_back_head_first(state: ReplicaState) -> None:
    """Requests that have waited longest are routed first."""
    made = Bench(state)
    made.replica.relaying.board = RelayBoard(lambda one: None, lambda: 1)
    queue = [request(number) for number in (3, 1, 2)]
    made.scheduler.queue += queue
    assert made.step()[0] == act.Requeue(queue)
    assert made.scheduler.queue == []


def test_prompts_that_stay_run_on_in_the_order_in_which_they_were_done() -> None:
    made = Bench(S.MUTATING_TO_DECODE)
    batches = [[request(3), request(1)], [request(2)]]
    made.scheduler.detached += [one for batch in batches for one in batch]
    made.outbox.batches = batches
    made.step()
    assert [one.request_id for one in made.scheduler.running] == [3, 1, 2]


def test_prompts_leave_in_the_order_of_their_batch_and_those_that_ended_do_not() -> None:
    made = Bench(S.PREFILL)
    requests = [request(3), request(1, output=1), request(2)]
    batch = Batch(1, BatchShape(), [], max_steps=1, formed_ns=0)
    progress = Progress()
    progress.first_tokens += requests
    progress.finished.append(requests[1])
    made.scheduler.running += [requests[0], requests[2]]
    made.scheduler.complete = lambda *rest: progress  # type: ignore[method-assign]
    made.clock.now_ns = STEP_NS
    made.replica.books.complete(batch, 1, 0, None, STEP_NS)
    found = made.replica.take_out()
    assert found[0] == act.End(requests[1], Status.COMPLETED)
    assert found[-1] == act.HandOff([requests[0], requests[2]], STEP_NS)
    assert made.scheduler.detached == [requests[0], requests[2]]
    assert [one.status for one in made.scheduler.detached] == [Status.MIGRATING] * 2


def test_a_shutting_prefill_waits_for_its_outbound_kv() -> None:
    made = Bench(S.SHUTTING_PREFILL)
    made.outbox.unfinished = 1
    assert made.step() == []
    made.outbox.unfinished = 0
    assert made.step()[0] == act.Move(S.SHUTTING_PREFILL, S.SHUTTING_NULL, "drained")


def test_a_shutting_prefill_finishes_the_batch_on_its_stages() -> None:
    """It was drained with a batch in flight once, which then counted as busy for seconds."""
    made = Bench(S.SHUTTING_PREFILL, stages=2)
    made.scheduler.queue.append(request(1))
    made.replica.state = S.PREFILL
    made.replica.note_state()
    made.step()
    assert made.replica.flight.holds_batch()
    made.replica.state = S.SHUTTING_PREFILL
    made.replica.note_state()
    made.scheduler.cancel(made.scheduler.running[0])
    assert made.step() == []
    assert made.replica.state is S.SHUTTING_PREFILL


def test_a_shutting_decode_drains_and_closes() -> None:
    made = Bench(S.SHUTTING_DECODE)
    assert made.replica.go_on() == -5
    assert made.replica.take_out() == [act.CloseLock()]
    made.lock.try_acquire("replica 0")
    assert made.step()[0] == act.Move(S.SHUTTING_DECODE, S.SHUTTING_NULL, "drained and closed")


def test_a_shutting_decode_waits_for_live_moves() -> None:
    made = Bench(S.SHUTTING_DECODE)
    made.lock.try_acquire("replica 0")
    made.tell(ev.LiveMoves(change=1))
    assert made.step() == []
    made.tell(ev.LiveMoves(change=-1))
    assert kinds(made.step()) == ["Move"]


def test_a_spare_that_is_open_closes() -> None:
    made = Bench(S.SHUTTING_NULL)
    assert made.replica.go_on() == -5
    assert made.replica.take_out() == [act.CloseLock()]


def test_a_shutting_colocated_replica_finishes_and_drops_its_weights() -> None:
    made = Bench(S.SHUTTING_COLOCATED)
    waiting = request(1)
    made.scheduler.queue.append(waiting)
    (one,) = made.running(2, output=2)
    found = made.step() + made.run_until(STEP_NS)
    assert found[0] == act.Requeue([waiting])
    assert made.due_ns == AGAIN or made.replica.state is S.INACTIVE
    found += made.step()
    assert act.End(one, Status.COMPLETED) in found
    assert made.replica.state is S.INACTIVE
    assert not made.replica.model_loaded


def test_a_state_that_is_left_in_the_middle_of_an_iteration_ends_it_first() -> None:
    made = Bench(S.DECODE)
    (one,) = made.running(1, output=2)
    made.step()
    made.replica.state = S.SHUTTING_DECODE
    made.replica.note_state()
    assert act.End(one, Status.COMPLETED) in made.run_until(STEP_NS)
    assert made.due_ns == AGAIN


# --- weights, commands, the lock ----------------------------------------------------------------------
def test_weights_that_have_arrived_make_it_serve() -> None:
    made = Bench(S.LOADING_PREFILL)
    found = made.tell(ev.WeightsArrived(to=S.PREFILL))
    assert found == [act.Move(S.LOADING_PREFILL, S.PREFILL, "weights complete", "transfer")]
    assert made.replica.model_loaded


def test_live_weights_are_seen_by_the_next_pass() -> None:
    made = Bench(S.NEW_PREFILL)
    made.tell(ev.SegmentArrived(count=3))
    assert (made.replica.weights.segments_ready, made.replica.look) == (3, ev.LOOK)
    assert made.tell(ev.WeightsArrived(to=None)) == []
    assert made.replica.model_loaded


def test_segments_are_counted_and_forgotten_with_the_load() -> None:
    made = Bench(S.LOADING_DECODE)
    made.tell(ev.SegmentArrived(count=3))
    assert made.replica.weights.segments_ready == 3
    assert kinds(made.tell(ev.LoadGivenUp(cause="late"))) == ["Move"]
    made.replica.state = S.INACTIVE
    made.replica.note_state()
    assert made.replica.weights.segments_ready == 0


@pytest.mark.parametrize("weights", [True, False, None])
def test_a_command_moves_it_and_says_what_becomes_of_the_weights(weights: bool | None) -> None:
    made = Bench(S.INACTIVE)
    before = made.replica.model_loaded
    order = ev.Commanded(to=S.PREFILL, writer="command", cause="by hand", weights=weights)
    assert made.tell(order) == [act.Move(S.INACTIVE, S.PREFILL, "by hand", "command")]
    assert made.replica.model_loaded is (before if weights is None else weights)


def test_a_replica_that_fails_closes_its_lock() -> None:
    made = Bench(S.DECODE)
    order = ev.Commanded(to=S.FAILED, writer="fault", cause="crash")
    assert kinds(made.tell(order)) == ["Move", "CloseLock"]


def test_a_lock_granted_late_is_given_back() -> None:
    made = Bench(S.DECODE)
    made.replica.gate.is_closing = True
    assert made.tell(ev.LockGranted()) == [act.OpenLock()]
    assert not made.replica.is_closing


def test_a_lock_granted_to_a_spare_is_kept() -> None:
    made = Bench(S.SHUTTING_NULL)
    made.replica.gate.is_closing = True
    assert made.tell(ev.LockGranted()) == []
    assert (made.replica.is_closing, made.replica.look) == (False, ev.LOOK)


# --- pause, slowdown ------------------------------------------------------------------------------------
def test_a_pause_puts_the_end_of_the_iteration_off() -> None:
    made = Bench(S.COLOCATED)
    made.running(1, output=9)
    made.step()
    made.clock.now_ns = 400
    made.tell(ev.Paused())
    assert made.replica.look == ev.INTERRUPT
    made.step()
    assert made.due_ns == PARK
    assert made.replica.align(400) == AT_DUE
    made.clock.now_ns = 5_000
    made.tell(ev.Unpaused(life=0, since_ns=400))
    made.step()
    assert made.due_ns == STEP_NS + 4_600


def test_a_pause_completes_the_steps_of_a_leap_that_have_ended() -> None:
    made = Bench(S.COLOCATED, leap=8)
    made.running(1, output=9)
    made.step()
    made.clock.now_ns = 2_500
    made.tell(ev.Paused())
    replica = made.replica
    flight = replica.flight
    assert isinstance(flight, Step)
    assert (replica.counters.iterations, flight.boundary_ns(0)) == (2, 3_000)
    assert flight.batch.max_steps == 1


def test_a_pause_of_an_earlier_life_or_an_earlier_one_does_not_end_this_one() -> None:
    made = Bench(S.COLOCATED)
    made.clock.now_ns = 100
    made.tell(ev.Paused())
    made.tell(ev.Unpaused(life=1, since_ns=100))
    made.tell(ev.Unpaused(life=0, since_ns=50))
    assert made.replica.is_paused
    made.tell(ev.Unpaused(life=0, since_ns=100))
    assert not made.replica.is_paused


def test_a_pause_shifts_the_spans_on_the_stages_that_have_not_ended() -> None:
    made = Bench(S.COLOCATED, stages=2)
    made.tell(ev.Submitted(request(1)))
    made.step()
    made.clock.now_ns = 500
    made.tell(ev.Paused())
    made.clock.now_ns = 800
    made.tell(ev.Unpaused(life=0, since_ns=500))
    assert made.replica.staged is not None
    spans = made.replica.staged.on_stages[0][0]
    assert [(s.start_ns, s.end_ns) for s in spans] == [(0, 1_300), (1_300, 2_300)]


def test_a_paused_replica_that_rests_begins_nothing() -> None:
    made = Bench(S.COLOCATED)
    made.tell(ev.Paused())
    made.tell(ev.Submitted(request(1)))
    assert made.step() == []
    assert made.due_ns == PARK


def test_the_next_iteration_of_a_straggler_takes_longer() -> None:
    made = Bench(S.COLOCATED)
    made.running(1, output=9)
    made.step()
    made.tell(ev.SlowdownSet(factor=3.0))
    assert made.replica.look == ev.LOOK
    made.run_until(STEP_NS)
    assert made.due_ns == 4 * STEP_NS


def test_a_new_process_pays_for_first_uses_once() -> None:
    made = Bench(S.COLOCATED)
    made.replica.latency.first_use_ns = (700,)  # type: ignore[attr-defined]
    made.replica.start_process()
    made.running(1, output=9)
    made.step()
    assert made.due_ns == STEP_NS + 700
    made.run_until(made.due_ns)
    assert made.due_ns == 2 * STEP_NS + 700


# --- crash ------------------------------------------------------------------------------------------------
def crash(made: Bench) -> tuple[list[act.Action], list[Any]]:
    lost: list[Any] = []
    found = made.tell(ev.Crashed(lost=lost))
    return found, lost


def test_a_crash_loses_what_waits_runs_and_has_arrived_in_this_order() -> None:
    made = Bench(S.DECODE)
    waiting, arrived = request(1), request(3)
    made.scheduler.queue.append(waiting)
    (running,) = made.running(2)
    running.computed_tokens, arrived.generated_tokens = 5, 1
    made.post(ev.KvDelivered(requests=[arrived]))
    found, lost = crash(made)
    assert lost == [waiting, running, arrived]
    assert (running.recomputed_tokens, arrived.recomputed_tokens) == (5, 5)
    assert found == []
    assert made.scheduler.blocks_used == 0


def test_a_crash_forgets_what_was_in_flight_and_begins_another_life() -> None:
    made = Bench(S.COLOCATED)
    made.running(1)
    made.step()
    made.clock.now_ns = 300
    crash(made)
    replica = made.replica
    assert (replica.incarnation, replica.flight) == (1, IDLE)
    assert replica.counters.busy_ns == 300
    assert (replica.model_loaded, replica.look) == (False, ev.INTERRUPT)


def test_a_crash_settles_cancellations_first() -> None:
    made = Bench(S.COLOCATED)
    (one,) = made.running(1)
    moved = request(2)
    moved.status, moved.holder_id = Status.RUNNING, 4
    for each in (one, moved):
        made.post(ev.Cancelled(request=each, status=Status.CANCELLED, reason="left"))
    found, lost = crash(made)
    assert found == [act.End(one, Status.CANCELLED, "left"), act.ForwardCancel(moved)]
    assert lost == []


def test_a_crash_answers_those_that_wait_for_a_stop() -> None:
    made = Bench(S.DECODE)
    made.post(ev.StopAsked(request=request(1), asked=ASKED))
    assert kinds(crash(made)[0]) == ["Reply"]


def test_a_crash_counts_the_steps_of_a_leap_that_have_ended() -> None:
    made = Bench(S.COLOCATED, leap=8)
    (one,) = made.running(1, output=9)
    made.step()
    made.clock.now_ns = 2_500
    crash(made)
    assert (one.generated_tokens, made.replica.counters.iterations) == (3, 2)


def test_a_crash_during_a_pause_counts_no_time_of_the_pause() -> None:
    made = Bench(S.COLOCATED)
    made.running(1, output=9)
    made.step()
    made.clock.now_ns = 400
    made.tell(ev.Paused())
    made.clock.now_ns = 9_000
    crash(made)
    assert (made.replica.counters.busy_ns, made.replica.is_paused) == (0, False)


def test_replies_meant_for_an_earlier_life_are_dropped() -> None:
    made = Bench(S.COLOCATED)
    crash(made)
    made.replica.look = 0
    made.tell(ev.PrerequisiteMet(life=0))
    made.tell(ev.ActivationArrived(life=0))
    made.tell(ev.Measured(life=0, cost_ns=5))
    assert (made.replica.look, made.replica.flight) == (0, IDLE)
    asked = made.replica.flight = Measured(made.replica.books, lambda cost_ns: IDLE, IDLE, 0)
    made.tell(ev.Measured(life=0, cost_ns=5))
    assert (asked.cost_ns, made.replica.look) == (-1, 0)
    made.tell(ev.Measured(life=1, cost_ns=7))
    assert (asked.cost_ns, made.replica.look) == (7, ev.INTERRUPT)


def test_a_process_that_is_back_is_inactive_if_it_is_the_one_that_was_meant() -> None:
    made = Bench(S.FAILED)
    assert made.tell(ev.Restarted(life=1)) == []
    found = made.tell(ev.Restarted(life=0))
    assert found == [act.Move(S.FAILED, S.INACTIVE, "restarted", "recovery")]


@pytest.mark.parametrize("state", DRAINING)
def test_a_drain_that_expires_loses_all_that_is_left(state: ReplicaState) -> None:
    made = Bench(state)
    made.scheduler.queue.append(request(1))
    made.running(2)
    found = made.tell(ev.DrainExpired())
    assert kinds(found) == ["ExpireDrain", "FreeCapacity"]
    assert [r.request_id for r in found[0].requests] == [1, 2]  # type: ignore[attr-defined]
    assert made.scheduler.blocks_used == 0


def test_what_arrives_after_the_grace_of_a_drain_is_lost_unless_the_replica_came_back() -> None:
    made = Bench(S.SHUTTING_DECODE)
    one, two, three = request(1), request(2), request(3)
    made.scheduler.reserve([one, two])
    made.tell(ev.DrainExpired())
    found = made.tell(ev.KvDelivered(requests=[one]))
    assert found == [act.Lose([one], "drain_expired"), act.FreeCapacity()]
    made.replica.state = S.DECODE
    made.replica.note_state()
    made.tell(ev.KvDelivered(requests=[two]))
    assert list(made.scheduler.residents()) == [two]
    made.replica.state = S.SHUTTING_DECODE
    made.replica.note_state()
    made.scheduler.reserve([three])
    assert made.tell(ev.KvDelivered(requests=[three])) == [act.Drain()]


def test_a_move_undone_after_the_grace_of_a_drain_is_lost() -> None:
    made = Bench(S.SHUTTING_DECODE)
    (one,) = made.running(1)
    made.scheduler.detach(one)
    made.tell(ev.DrainExpired())
    found = made.tell(ev.StopUndone(request=one))
    assert found == [act.Lose([one], "drain_expired"), act.FreeCapacity()]
    assert made.scheduler.blocks_used == 0


# --- prerequisites ------------------------------------------------------------------------------------------
class FakeWave:
    """A group that leaves when it is told to."""

    shares_experts = False

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.withdrawn = 0

    def wants(self, replica: Any) -> bool:
        return False

    def enter(self, replica: Any, shape: Any, go: Any, steps: int = 1) -> None:
        self.entered.append(go)

    def cut(self) -> None:
        """Nothing leaps here."""

    def withdraw(self, replica: Any) -> None:
        self.withdrawn += 1


def test_a_batch_waits_for_its_wave_and_that_is_no_busy_time() -> None:
    made = Bench(S.COLOCATED)
    wave = FakeWave()
    made.replica.join(wave)  # type: ignore[arg-type]
    made.running(1, output=9)
    made.step()
    assert (made.due_ns, len(wave.entered)) == (PARK, 1)
    assert made.replica.align(0) == AT_DUE
    made.clock.now_ns = 600
    made.tell(ev.PrerequisiteMet(life=0, wait_ns=50))
    assert made.replica.look == ev.INTERRUPT
    made.step()
    assert made.due_ns == 600 + STEP_NS + 50
    made.run_until(made.due_ns)
    assert made.replica.counters.busy_ns == STEP_NS + 50


def test_a_member_that_crashes_leaves_its_wave_and_has_not_worked() -> None:
    made = Bench(S.COLOCATED)
    wave = FakeWave()
    made.replica.join(wave)  # type: ignore[arg-type]
    made.running(1, output=9)
    made.step()
    made.clock.now_ns = 300
    crash(made)
    assert (wave.withdrawn, made.replica.flight.holds_batch()) == (1, False)
    assert made.replica.counters.busy_ns == 0


def test_a_batch_on_stages_leaves_the_last_one_in_order() -> None:
    made = Bench(S.COLOCATED, stages=2)
    one, two = request(1, output=1), request(2, output=1)
    for each in (one, two):
        made.tell(ev.Submitted(each))
    made.step()
    assert (len(made.replica.flight.batches()), made.due_ns) == (2, 2 * STEP_NS)
    found = made.run_until(3 * STEP_NS)
    assert [a.request for a in found if isinstance(a, act.End)] == [one, two]
    assert made.replica.counters.busy_ns == 4 * STEP_NS


# --- memory ---------------------------------------------------------------------------------------------------
def test_lost_memory_drives_out_the_request_admitted_last() -> None:
    made = Bench(S.COLOCATED, blocks=10)
    first, last = made.running(1, 2, prompt=4)
    last.computed_tokens = 4
    made.post(ev.KvShrunk(part=0.5, loss=0, asked=ASKED))
    found = made.step()
    assert kinds(found)[:3] == ["Reply", "Lose", "FreeCapacity"]
    assert found[0] == act.Reply(ASKED, 5)
    assert (made.scheduler.running, made.scheduler.ledger.lost) == ([first], 5)
    assert last.recomputed_tokens == 4


def test_as_many_go_as_stand_in_the_way_the_last_one_first() -> None:
    made = Bench(S.COLOCATED, blocks=16)
    first, second, third = made.running(1, 2, 3, prompt=4)
    made.post(ev.KvShrunk(part=0.6, loss=0, asked=ASKED))
    found = made.step()
    assert found[:2] == [found[0], act.Lose([third, second], "kv_lost")]
    assert made.scheduler.running == [first]
    assert made.scheduler.blocks_total == 7


def test_memory_that_is_back_is_free_for_all() -> None:
    made = Bench(S.COLOCATED)
    made.scheduler.ledger.lose(7, 5)
    made.post(ev.KvRestored(loss=7, asked=ASKED))
    assert kinds(made.step()) == ["Reply", "FreeCapacity"]
    assert (made.scheduler.ledger.lost, made.scheduler.blocks_total) == (0, 100)


def test_each_of_two_losses_gives_back_its_own_memory() -> None:
    """The second takes its part of what the first has left."""
    made = Bench(S.COLOCATED, blocks=100)
    for loss, part in ((3, 0.5), (4, 0.2)):
        made.post(ev.KvShrunk(part=part, loss=loss, asked=ev.Asked("injector", loss)))
    answers = {a.asked.number: a.value for a in made.step() if isinstance(a, act.Reply)}
    assert (answers, made.scheduler.blocks_total) == ({3: 50, 4: 10}, 40)
    made.post(ev.KvRestored(loss=3, asked=ASKED))
    made.step()
    assert made.scheduler.blocks_total == 90
    made.post(ev.KvRestored(loss=4, asked=ASKED))
    made.step()
    assert made.scheduler.blocks_total == 100


def test_memory_that_cannot_be_had_is_not_said_to_be_lost() -> None:
    """Blocks of requests on their way out stay until their transfer has ended."""
    made = Bench(S.PREFILL, blocks=10)
    (leaving,) = made.running(1, prompt=8)
    made.scheduler.detach(leaving)
    made.post(ev.KvShrunk(part=0.5, loss=0, asked=ASKED))
    assert made.step()[0] == act.Reply(ASKED, 2)
    assert made.scheduler.blocks_total == 8


def test_a_crash_answers_faults_of_memory_that_it_was_faster_than() -> None:
    made = Bench(S.COLOCATED)
    struck, over = ev.Asked("injector", 1), ev.Asked("injector", 2)
    made.post(ev.KvShrunk(part=0.5, loss=1, asked=struck))
    made.post(ev.KvRestored(loss=0, asked=over))
    assert made.tell(ev.Crashed(lost=[])) == [act.Reply(struck, -1), act.Reply(over)]
    assert made.scheduler.ledger.lost == 0
    assert not made.replica.mailbox.posted


def test_a_spare_that_had_not_closed_closes_before_it_prefills() -> None:
    """A pause had kept it open: it must not serve prompts while KV may come."""
    made = Bench(S.SHUTTING_NULL)
    command = ev.Commanded(to=S.PREFILL, writer="command", cause="test", weights=True)
    assert kinds(made.tell(command)) == ["Move", "CloseLock"]
    closed = Bench(S.SHUTTING_NULL)
    closed.lock.try_acquire(closed.replica.name)
    assert kinds(closed.tell(command)) == ["Move"]
