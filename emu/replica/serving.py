"""What a replica does at a boundary, by state: nothing is in flight, posted events are applied.

Each handler begins the next thing and says when it ends, or that there is nothing to do.
BlitzScale's loops poll; here every change that a state depends on wakes the replica. The states of
live scaling (NewPrefill, RefractoryPrefill, OldPrefill) are in `live_scaling.py`.
"""

from __future__ import annotations

from emu.kernel.clock import PARK
from emu.replica.actions import Move, OpenLock, Requeue
from emu.replica.events import INTERRUPT, LOOK, Event, Measured, PrerequisiteMet, TierLost
from emu.replica.orders import close
from emu.replica.replica import LOOP, NOTHING, Replica
from emu.replica.states import ReplicaState
from emu.request import Request, Status

S = ReplicaState


def iterate(replica: Replica, event: Event | None = None) -> int:
    """Form the next batch and begin it, or rest: all that Prefill, Decode and Colocated do."""
    due_ns = replica.begin_next()
    return replica.rest() if due_ns == NOTHING else due_ns


def prerequisite_met(replica: Replica, event: PrerequisiteMet) -> int:
    """One thing less to wait for; with the last one the batch can run."""
    if event.life == replica.incarnation:
        replica.want(replica.flight.met(event.wait_ns))
    return PARK


def tier_lost(replica: Replica, event: TierLost) -> int:
    """A tier has lost everything: what was on its way from there is computed instead."""
    tokens, look = replica.flight.lose_recalls(event.tier)
    replica.counters.recall_tokens_lost = tokens
    replica.want(max(look, LOOK))
    return PARK


def measured(replica: Replica, event: Measured) -> int:
    """The answer is here, for this life of the replica or for an earlier one."""
    if event.life == replica.incarnation and replica.flight.learn(event.cost_ns):
        replica.want(INTERRUPT)
    return PARK


def idle(replica: Replica, event: Event) -> int:
    """Inactive, loading, failed: nothing to do until another actor changes the state."""
    return PARK


def aus_prefill(replica: Replica, event: Event) -> int:
    """Close for inbound KV, then prefill."""
    if replica.gate.is_closed:
        replica.out.append(Move(S.AUS_PREFILL, S.PREFILL, "closed"))
        return LOOP
    if replica.gate.is_closing:
        return PARK
    close(replica)
    return LOOP


def aus_decode(replica: Replica, event: Event) -> int:
    """Open for inbound KV, then decode."""
    replica.out += [OpenLock(), Move(S.AUS_DECODE, S.DECODE, "opened")]
    return LOOP


def mutate_to_decode(replica: Replica, event: Event) -> int:
    """Prompts that are done but not yet on their way become decodes here, without a transfer."""
    if replica.scheduler.waiting_count:
        replica.out.append(Requeue(take_waiting(replica)))
        return LOOP
    due_ns = replica.begin_next()  # a chunked prompt that had begun is finished first
    if due_ns != NOTHING:
        return due_ns
    if replica.flight.holds_batch():
        return replica.rest()
    if replica.outbox is not None:
        for requests in replica.outbox.flush():
            replica.scheduler.adopt(requests, replica.clock.now_ns)
            for request in requests:
                request.status = Status.RUNNING
    replica.out += [OpenLock(), Move(S.MUTATING_TO_DECODE, S.DECODE, "flushed")]
    return LOOP


def shut_prefill(replica: Replica, event: Event) -> int:
    """Take nothing new, finish prompts that have begun, wait for own migrations to end."""
    if replica.scheduler.waiting_count:
        replica.out.append(Requeue(take_waiting(replica)))
        return LOOP
    due_ns = replica.begin_next()
    if due_ns != NOTHING:
        return due_ns
    is_done = replica.scheduler.running_count == 0 and not replica.flight.holds_batch()
    if is_done and replica.unfinished_migrations == 0:
        replica.out.append(Move(S.SHUTTING_PREFILL, S.SHUTTING_NULL, "drained"))
        return LOOP
    return replica.rest()


def shut_decode(replica: Replica, event: Event) -> int:
    """Decode what is here and what is still arriving; close as soon as the lock can be had."""
    if replica.gate.is_to_close:
        close(replica)
        return LOOP
    due_ns = replica.begin_next()
    if due_ns != NOTHING:
        return due_ns
    if replica.is_idle and replica.gate.is_closed:
        replica.out.append(Move(S.SHUTTING_DECODE, S.SHUTTING_NULL, "drained and closed"))
        return LOOP
    return replica.rest()


def shut_null(replica: Replica, event: Event) -> int:
    """A warm spare: weights stay, nothing is served, closed for inbound KV."""
    if replica.gate.is_to_close:
        close(replica)
        return LOOP
    return PARK


def shut_colocated(replica: Replica, event: Event) -> int:
    """Waiting requests go elsewhere, running ones are finished; then the weights are dropped."""
    if replica.scheduler.waiting_count:
        replica.out.append(Requeue(take_waiting(replica)))
        return LOOP
    due_ns = replica.begin_next()
    if due_ns != NOTHING:
        return due_ns
    if replica.is_idle:
        close(replica)
        replica.out.append(Move(S.SHUTTING_COLOCATED, S.INACTIVE, "drained"))
        return LOOP
    return replica.rest()


def take_waiting(replica: Replica) -> list[Request]:
    """Remove all waiting requests, head first."""
    requests = list(replica.scheduler.waiting())
    for request in requests:
        replica.scheduler.cancel(request)
    replica.watch.touch()
    return requests
