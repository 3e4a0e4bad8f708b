"""Handlers of what comes to a replica from outside: requests, KV, cancellations, faults' jobs.

Told events change books at once: they are settled first, and cut a leap that no longer holds.
Posted events change the running set, and so take effect between two iterations.
"""

from __future__ import annotations

from typing import Final

from emu.kernel.clock import PARK
from emu.replica.actions import (
    CloseLock,
    Drain,
    End,
    ExpireDrain,
    ForwardCancel,
    FreeCapacity,
    Lose,
    Move,
    OpenLock,
    Reply,
)
from emu.replica.events import (
    LOOK,
    ActivationArrived,
    Cancelled,
    Commanded,
    DrainExpired,
    Event,
    KvDelivered,
    KvRestored,
    KvShrunk,
    LiveMoves,
    LoadGivenUp,
    LockGranted,
    Looked,
    Released,
    Restarted,
    SegmentArrived,
    SlowdownSet,
    StopAsked,
    StopUndone,
    Submitted,
    Unreserved,
    WeightsArrived,
)
from emu.replica.replica import Replica
from emu.replica.states import DECODING, DRAINING, ReplicaState
from emu.request import Request, Status
from emu.scheduling.base import members_of

S = ReplicaState
_QUEUED: Final = Status.QUEUED


def ignore(replica: Replica, event: Event) -> int:
    """The event means nothing in this state, and legally comes."""
    return PARK


def look_again(replica: Replica, event: Looked) -> int:
    """The boundary that the event has brought is all that it asks for."""
    return PARK


# --- told: requests and KV -----------------------------------------------------------------------
def submitted(replica: Replica, event: Submitted) -> int:
    """A routed request joins the waiting queue, or is rejected if it could never be held."""
    request = event.request
    reason = replica.scheduler.can_ever_hold(request)
    if reason:
        replica.out.append(End(request, Status.REJECTED, reason))
        return PARK
    flight, watch, now_ns = replica.flight, replica.watch, replica.clock.now_ns
    is_leap, done = flight.is_leap, 0
    if is_leap:
        done = flight.steps_ended() if watch.signals is None else flight.settle()
    request.status = _QUEUED
    request.holder_id = replica.replica_id
    if request.taken_ns < 0:
        request.taken_ns = now_ns if flight.is_open else max(now_ns, flight.boundary_ns(done))
    replica.scheduler.enqueue(request, now_ns)
    if watch.steps_history is not None:
        watch.steps_history.add(now_ns, "queued", row=request.row, replica=replica.replica_id)
    if not watch.is_touched:
        watch.touch()
    if watch.signals is not None:
        replica.changed(done)
        watch.note_signal()
    elif not is_leap:
        replica.look = replica.look or LOOK
    elif not flight.puts_off(done):
        flight.settle()
        replica.changed(done)
    return PARK


def reserve(replica: Replica, requests: list[Request]) -> bool:
    """Reserve blocks for inbound KV, all or nothing: a question, answered now."""
    flight = replica.flight
    done = flight.settle() if flight.is_leap else 0
    if not replica.scheduler.reserve(requests):
        return False
    if flight.is_leap:
        replica.changed(done)
    return True


def unreserved(replica: Replica, event: Unreserved) -> int:
    """A reservation is given back."""
    done = replica.flight.settle()
    replica.scheduler.unreserve(event.requests)
    replica.changed(done)
    return PARK


def released(replica: Replica, event: Released) -> int:
    """The KV of detached requests has left: their blocks are free."""
    flight, scheduler = replica.flight, replica.scheduler
    done = flight.settle() if flight.is_leap else 0
    for request in event.requests:
        scheduler.release(request)
    if flight.is_leap or not replica.waits_here_only or scheduler.waiting_count:
        replica.changed(done)
    return PARK


def stop_undone(replica: Replica, event: StopUndone) -> int:
    """A stopped request runs on here, unless the grace of a drain is over."""
    replica.scheduler.adopt([event.request], replica.clock.now_ns)
    replica.watch.touch()
    event.request.status = Status.RUNNING
    if replica.has_drained_enough:
        _lose_late(replica, [event.request])
    replica.look = LOOK
    return PARK


def live_moves(replica: Replica, event: LiveMoves) -> int:
    """Count live migrations; a replica that drains may wait for the last of them."""
    replica.live_moves += event.change
    if event.change < 0:
        replica.look = LOOK
    return PARK


# --- told: weights and state ---------------------------------------------------------------------
def segment_arrived(replica: Replica, event: SegmentArrived) -> int:
    """Count the segments that are there."""
    replica.weights.arrive(event.count)
    return PARK


def segment_arrived_live(replica: Replica, event: SegmentArrived) -> int:
    """A layer that is there can run."""
    replica.weights.arrive(event.count)
    replica.look = LOOK
    return PARK


def weights_arrived(replica: Replica, event: WeightsArrived) -> int:
    """All weights are there: begin to serve."""
    assert event.to is not None
    replica.weights.complete()
    replica.out.append(Move(replica.state, event.to, "weights complete", "transfer"))
    return PARK


def weights_arrived_live(replica: Replica, event: WeightsArrived) -> int:
    """All weights are there; the next pass sees it."""
    replica.weights.complete()
    replica.look = LOOK
    return PARK


def load_given_up(replica: Replica, event: LoadGivenUp) -> int:
    """The weights will not come: the replica is inactive again."""
    replica.out.append(Move(replica.state, S.INACTIVE, event.cause, "transfer"))
    return PARK


def commanded(replica: Replica, event: Commanded) -> int:
    """Another actor has decided; the table of transitions says whether it may."""
    if event.weights is not None:
        replica.weights.are_loaded = event.weights
    replica.out.append(Move(replica.state, event.to, event.cause, event.writer))
    is_open_spare = event.to is S.PREFILL and replica.state is S.SHUTTING_NULL
    if event.to is S.FAILED or (is_open_spare and not replica.gate.is_closed):
        close(replica)  # a spare that was paused before it had closed must not prefill open for KV
    return PARK


def restarted(replica: Replica, event: Restarted) -> int:
    """A process is there again, without weights."""
    if event.life == replica.incarnation:
        replica.out.append(Move(S.FAILED, S.INACTIVE, "restarted", "recovery"))
    return PARK


def lock_granted(replica: Replica, event: LockGranted) -> int:
    """Its own lock is its own: it is closed for inbound KV."""
    replica.gate.closed()
    replica.look = LOOK
    return PARK


def lock_granted_late(replica: Replica, event: LockGranted) -> int:
    """It came back to decoding while it waited: the lock is given back at once."""
    assert replica.state in DECODING
    replica.gate.closed()
    replica.out.append(OpenLock())
    replica.look = LOOK
    return PARK


def slowdown_set(replica: Replica, event: SlowdownSet) -> int:
    """The next iteration costs so much more; a leap at the old cost is cut."""
    replica.pace.slow_down(event.factor)
    replica.look = LOOK
    return PARK


def activation_arrived(replica: Replica, event: ActivationArrived) -> int:
    """What it was given can be computed."""
    if event.life == replica.incarnation:
        replica.look = LOOK
    return PARK


# --- posted: applied between two iterations -------------------------------------------------------
def stop_asked(replica: Replica, event: StopAsked) -> int:
    """A running request is detached, so that the rest of its KV can move; answered in any case.

    On a pipeline it first leaves the last stage: the token under way is its own.
    """
    request = event.request
    # Not `in`: a compiled generator has no `__contains__`, and nothing falls back to a walk.
    if any(one is request for batch in replica.flight.batches() for one in members_of(batch)):
        replica.mailbox.posted.append(event)
        return PARK
    if any(resident is request for resident in replica.scheduler.residents()):
        replica.scheduler.detach(request)
        replica.watch.touch()
        request.status = Status.MIGRATING
    replica.out.append(Reply(event.asked))
    return PARK


def kv_delivered(replica: Replica, event: KvDelivered) -> int:
    """Migrated requests join the running set."""
    _activate(replica, event.requests)
    return PARK


def kv_delivered_late(replica: Replica, event: KvDelivered) -> int:
    """The replica shuts down: what has come may be moved on, or is lost after its grace."""
    _activate(replica, event.requests)
    if replica.has_drained_enough:
        _lose_late(replica, event.requests)
    else:
        replica.out.append(Drain())
    return PARK


def _activate(replica: Replica, arrived: list[Request]) -> None:
    requests = [request for request in arrived if not request.status.is_terminal]
    replica.scheduler.activate(requests, replica.clock.now_ns)
    if not replica.watch.is_touched:
        replica.watch.touch()
    for request in requests:
        request.status = Status.RUNNING
        request.holder_id = replica.replica_id


def cancelled(replica: Replica, event: Cancelled) -> int:
    """A request leaves; one that has moved on in the iteration before is followed."""
    request = event.request
    if request.status.is_terminal:
        return PARK
    if replica.scheduler.cancel(request):
        replica.watch.touch()
        replica.out.append(End(request, event.status, event.reason))
    elif request.status is Status.MIGRATING or request.holder_id != replica.replica_id:
        replica.out.append(ForwardCancel(request))
    return PARK


def cancels_applied(replica: Replica, event: Event) -> int:
    """Blocks may have become free."""
    replica.out.append(FreeCapacity())
    replica.watch.note_signal()
    return PARK


def kv_shrunk(replica: Replica, event: KvShrunk) -> int:
    """Memory is lost; requests that stand in the way go, the one admitted last first."""
    scheduler = replica.scheduler
    wanted = int(scheduler.blocks_total * event.part)
    lost: list[Request] = []
    for victim in reversed(list(scheduler.residents())):
        if scheduler.blocks_total - scheduler.blocks_used >= wanted:
            break
        victim.recomputed_tokens += victim.computed_tokens
        scheduler.cancel(victim)
        lost.append(victim)
    taken = scheduler.ledger.lose(event.loss, wanted)
    replica.out += [Reply(event.asked, taken), Lose(lost, "kv_lost"), FreeCapacity()]
    return PARK


def kv_restored(replica: Replica, event: KvRestored) -> int:
    """What one loss has taken is free again."""
    replica.scheduler.ledger.restore(event.loss)
    replica.out += [Reply(event.asked), FreeCapacity()]
    return PARK


def drain_expired(replica: Replica, event: DrainExpired) -> int:
    """What the replica still holds is lost, and in this drain what is under way to it."""
    assert replica.state in DRAINING
    scheduler = replica.scheduler
    replica.has_drained_enough = True
    lost = [*scheduler.waiting(), *scheduler.residents()]
    _drop(replica, lost)
    replica.out += [ExpireDrain(lost), FreeCapacity()]
    return PARK


def _lose_late(replica: Replica, requests: list[Request]) -> None:
    """These have come after the grace: nothing more is decoded here."""
    lost = [request for request in requests if not request.status.is_terminal]
    _drop(replica, lost)
    replica.out += [Lose(lost, "drain_expired"), FreeCapacity()]


def _drop(replica: Replica, requests: list[Request]) -> None:
    for request in requests:
        request.recomputed_tokens += request.computed_tokens
        replica.scheduler.cancel(request)


def close(replica: Replica) -> None:
    """Take the own lock as soon as it can be had, unless that is under way."""
    if replica.gate.is_to_close:
        replica.out.append(CloseLock())
