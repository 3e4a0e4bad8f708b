"""What is posted to a replica, and applied between two iterations, after all that was told."""

from __future__ import annotations

from emu.kernel.clock import PARK
from emu.replica.actions import (
    Drain,
    End,
    ExpireDrain,
    ForwardCancel,
    FreeCapacity,
    Lose,
    Reply,
)
from emu.replica.events import (
    Cancelled,
    DrainExpired,
    Event,
    KvDelivered,
    KvRestored,
    KvShrunk,
    StopAsked,
)
from emu.replica.replica import Replica
from emu.replica.states import DRAINING
from emu.request import Request, Status
from emu.scheduling.base import members_of


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
        lose_late(replica, event.requests)
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


def lose_late(replica: Replica, requests: list[Request]) -> None:
    """These have come after the grace: nothing more is decoded here."""
    lost = [request for request in requests if not request.status.is_terminal]
    _drop(replica, lost)
    replica.out += [Lose(lost, "drain_expired"), FreeCapacity()]


def _drop(replica: Replica, requests: list[Request]) -> None:
    for request in requests:
        request.recomputed_tokens += request.computed_tokens
        replica.scheduler.cancel(request)
