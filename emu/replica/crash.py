"""Crash, pause and return of a replica: what a fault does to the iteration in flight.

A crash grows the replica's incarnation, so that whatever was under way for the earlier life is
dropped when it comes; its KV, queue and pipeline are gone. A pause keeps all of it: the iteration
in flight takes so much longer. Both first complete the iterations of a leap that have ended, as
stepping would have, so that results do not depend on leaps.

Does not decide what becomes of the requests: they are the answer in `Crashed.lost`.
"""

from __future__ import annotations

from emu.kernel.clock import PARK
from emu.replica.actions import End, ForwardCancel, Reply
from emu.replica.events import (
    INTERRUPT,
    Cancelled,
    Crashed,
    Event,
    KvDelivered,
    KvRestored,
    KvShrunk,
    Paused,
    StopAsked,
    Unpaused,
)
from emu.replica.replica import Replica
from emu.request import Request


def crashed(replica: Replica, event: Crashed) -> int:
    """Everything on the replica is lost; the requests that it held, waiting ones first.

    KV that was on its way out belongs to its watcher, which loses it too. The state changes
    later, when all owners of what was here have heard of it (`emu/faults/recovery.py`).
    """
    replica.flight = replica.flight.lose()
    replica.incarnation += 1
    replica.start_process()
    posted = replica.mailbox.empty()
    ended = _settle_cancels(replica, posted)
    lost = _lose_all(replica, posted)
    replica.live_moves = 0
    _answer_all(replica, posted)
    _forget_work(replica)
    event.lost.extend(r for r in lost if not r.status.is_terminal and r not in ended)
    replica.look = INTERRUPT
    return PARK


def _answer_all(replica: Replica, posted: list[Event]) -> None:
    """Senders that wait for an answer get it: nothing that they have asked for happens any more."""
    for event in posted:
        if isinstance(event, StopAsked | KvRestored):
            replica.out.append(Reply(event.asked))
        elif isinstance(event, KvShrunk):
            replica.out.append(Reply(event.asked, -1))


def _settle_cancels(replica: Replica, posted: list[Event]) -> list[Request]:
    """Cancellations that waited: requests that are here end, others are followed."""
    ended: list[Request] = []
    for event in posted:
        if not isinstance(event, Cancelled) or event.request.status.is_terminal:
            continue
        if event.request in ended:
            continue
        if replica.scheduler.cancel(event.request):
            replica.out.append(End(event.request, event.status, event.reason))
            ended.append(event.request)
        else:
            replica.out.append(ForwardCancel(event.request))
    return ended


def _lose_all(replica: Replica, posted: list[Event]) -> list[Request]:
    scheduler = replica.scheduler
    for request in scheduler.residents():
        request.recomputed_tokens += request.computed_tokens
    lost = scheduler.evacuate()
    replica.watch.touch()
    for event in posted:
        if isinstance(event, KvDelivered):
            for request in event.requests:
                request.recomputed_tokens += request.reached_tokens
                lost.append(request)
    return lost


def _forget_work(replica: Replica) -> None:
    if replica.wave is not None:
        replica.wave.withdraw(replica.replica_id)
    replica.paused_ns = -1
    replica.weights.drop()


def paused(replica: Replica, event: Paused) -> int:
    """Stop the world in this replica; `unpaused` goes on where it stopped."""
    assert not replica.is_paused
    replica.flight = replica.flight.pause()
    replica.paused_ns = replica.clock.now_ns
    replica.look = INTERRUPT
    return PARK


def unpaused(replica: Replica, event: Unpaused) -> int:
    """What was under way at the pause ends so much later."""
    is_same = replica.is_paused and replica.paused_ns == event.since_ns
    if not is_same or replica.incarnation != event.life:
        return PARK
    replica.paused_ns = -1
    replica.flight.resume(event.since_ns)
    replica.look = INTERRUPT
    return PARK
