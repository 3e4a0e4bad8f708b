"""What a replica is told of requests and KV: handled at once, after the books are settled.

A change of the books cuts a leap that no longer holds. What is told of weights, state and lock is
`orders.py`; what changes the running set is posted, and applied between two iterations
(`posted.py`).
"""

from __future__ import annotations

from typing import Final

from emu.kernel.clock import PARK
from emu.replica.actions import (
    End,
)
from emu.replica.events import (
    LOOK,
    Event,
    LiveMoves,
    Looked,
    Released,
    StopUndone,
    Submitted,
    Unreserved,
)
from emu.replica.posted import lose_late
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.request import Request, Status

S = ReplicaState
_QUEUED: Final = Status.QUEUED


def ignore(replica: Replica, event: Event) -> int:
    """The event means nothing in this state, and legally comes."""
    return PARK


def look_again(replica: Replica, event: Looked) -> int:
    """The boundary that the event has brought is all that it asks for."""
    return PARK


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
        lose_late(replica, [event.request])
    replica.look = LOOK
    return PARK


def live_moves(replica: Replica, event: LiveMoves) -> int:
    """Count live migrations; a replica that drains may wait for the last of them."""
    replica.live_moves += event.change
    if event.change < 0:
        replica.look = LOOK
    return PARK
