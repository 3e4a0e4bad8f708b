"""The doors of a replica: how requests come in and go out, and its lock against inbound KV.

Functions of a replica (its methods, under the same names). They append to its queues and poke its
actor; what changes the running set takes effect between two iterations (`apply_requests`). What is
changed at once, books or waiting queue, is settled first, and cuts a leap that no longer holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from emu.replica.outcome import note_signal
from emu.replica.states import DECODING, ReplicaState
from emu.request import Request, Status

if TYPE_CHECKING:
    from emu.replica.replica import Replica

S = ReplicaState
_QUEUED: Final = Status.QUEUED


def submit(replica: Replica, request: Request) -> None:
    """A routed request joins the waiting queue."""
    reason = replica.scheduler.can_ever_hold(request)
    if reason:
        replica.world.terminal(request, Status.REJECTED, reason)
        return
    ends = replica._ends if replica.signals is None else None
    done = replica.settle() if ends is None else replica._steps_ended(ends)
    request.status = _QUEUED
    request.holder_id = replica.replica_id
    if request.taken_ns < 0:
        request.taken_ns = replica._iteration_end_ns(done)
    replica.scheduler.enqueue(request, replica.kernel.now_ns)
    if not replica.is_touched:
        replica.touch()
    if ends is None or not replica._puts_off(done):
        replica.settle()
        replica._changed(done)
    if replica.signals is not None:
        note_signal(replica)


def cancel(replica: Replica, request: Request, status: Status, reason: str) -> None:
    """Remove a request that waits or runs here, after the iteration in flight."""
    replica.cancels.append((request, status, reason))
    replica.inbox.poke()


def stop(replica: Replica, request: Request, on_stopped: Callable[[], None]) -> None:
    """Detach a running request at the end of the iteration in flight (live migration).

    `on_stopped` is called in any case; the request's status tells whether it stopped.
    """
    replica.stops.append((request, on_stopped))
    replica.inbox.poke()


def resume(replica: Replica, request: Request) -> None:
    """A stopped request goes on here."""
    replica.scheduler.adopt([request], replica.kernel.now_ns)
    replica.touch()
    request.status = Status.RUNNING
    replica.inbox.poke()


def deliver(replica: Replica, requests: list[Request]) -> None:
    """The KV of these requests has arrived; their blocks are reserved here."""
    replica.arrived.append(requests)
    replica.inbox.poke()


def reserve(replica: Replica, requests: list[Request]) -> bool:
    """Reserve blocks for inbound KV, all or nothing."""
    done = replica.settle()
    if not replica.scheduler.reserve(requests):
        return False
    if replica._ends is not None:
        replica._changed(done)
    return True


def unreserve(replica: Replica, requests: list[Request]) -> None:
    """Give back a reservation."""
    done = replica.settle()
    replica.scheduler.unreserve(requests)
    replica._changed(done)


def release(replica: Replica, requests: list[Request]) -> None:
    """The KV of detached requests has left."""
    done = replica.settle()
    for request in requests:
        replica.scheduler.release(request)
    if replica.scheduler.waiting_count or replica._ends is not None or not replica._waits_here_only:
        replica._changed(done)


def take_waiting(replica: Replica) -> list[Request]:
    """Remove all waiting requests, head first."""
    requests = list(replica.scheduler.waiting())
    for request in requests:
        replica.scheduler.cancel(request)
    replica.touch()
    return requests


def apply_requests(replica: Replica) -> None:
    """Between two iterations: migrated batches, then cancellations."""
    now_ns = replica.kernel.now_ns
    if replica.stops:
        stops, replica.stops = replica.stops, []
        for request, on_stopped in stops:
            if any(resident is request for resident in replica.scheduler.residents()):
                replica.scheduler.detach(request)
                replica.touch()
                request.status = Status.MIGRATING
            on_stopped()
    while replica.arrived:
        requests = [r for r in replica.arrived.popleft() if not r.status.is_terminal]
        replica.scheduler.activate(requests, now_ns)
        replica.touch()
        for request in requests:
            request.status = Status.RUNNING
            request.holder_id = replica.replica_id
        if replica.state is S.SHUTTING_DECODE:
            replica.world.on_draining(replica)
    if replica.cancels:
        cancels, replica.cancels = replica.cancels, []
        for request, status, reason in cancels:
            if request.status.is_terminal:
                continue
            if replica.scheduler.cancel(request):
                replica.touch()
                replica.world.terminal(request, status, reason)
            elif request.status is Status.MIGRATING or request.holder_id != replica.replica_id:
                replica.world.cancel(request)  # it moved on in the iteration that was in flight
        replica.world.on_capacity(replica)
        if replica.signals is not None:
            note_signal(replica)
    if replica.jobs:
        jobs, replica.jobs = replica.jobs, []
        for job in jobs:
            job()


# --- the lock against inbound KV --------------------------------------------------------------
def start_closing(replica: Replica) -> None:
    """Take the own lock as soon as it can be had (inbound KV then goes elsewhere)."""
    if replica.lock.holder == replica.name or replica._is_closing:
        return
    if replica.lock.try_acquire(replica.name):
        return
    replica._is_closing = True
    replica.kernel.spawn(_close(replica), name=f"closing of {replica.name}")


async def _close(replica: Replica) -> None:
    await replica.lock.acquire(replica.name)
    replica._is_closing = False
    if replica.state in DECODING and replica.state is not S.SHUTTING_DECODE:
        replica.open()  # revived in the meantime
    replica.inbox.poke()


def open(replica: Replica) -> None:
    """Give the own lock back: inbound KV may come."""
    if replica.lock.holder == replica.name:
        replica.lock.release(replica.name)
        replica.world.on_capacity(replica)
