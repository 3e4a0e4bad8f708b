"""Everything that can happen to a replica: frozen events, each with the number of its table row.

Two ways of coming (`emu/kernel/clock.py`). *Told* events act at once: they change books or the
state, and perhaps when the replica looks up next. *Posted* events wait in the mailbox for the
next boundary, when nothing is in flight; there they are applied in the order of `order`: stops,
KV that has arrived, cancellations, then what faults do to the memory.

Events are data: an actor that waits for an answer puts a number of its own into the event
(`Asked`), and the replica's `Reply` carries it back. `to_plain` writes any of them down.

That what is in flight ends (an iteration, a layer) is no event: it is two thirds of all that
happens, carries nothing, and concerns nothing but the flight itself (`flight/`).
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final, Literal, TypeAlias

import msgspec

from emu.replica.states import ReplicaState, Writer
from emu.request import Request, Status


class Kind(enum.IntEnum):
    """Row of the table of handlers."""

    # nothing is in flight beside which something could begin
    BOUNDARY = 0
    # told
    SUBMITTED = 1
    UNRESERVED = 2
    RELEASED = 3
    STOP_UNDONE = 4
    LIVE_MOVES = 5
    PREREQUISITE_MET = 6
    TIER_LOST = 7
    SEGMENT_ARRIVED = 8
    WEIGHTS_ARRIVED = 9
    LOAD_GIVEN_UP = 10
    COMMANDED = 11
    LOCK_GRANTED = 12
    PAUSED = 13
    UNPAUSED = 14
    CRASHED = 15
    RESTARTED = 16
    SLOWDOWN_SET = 17
    MEASURED = 18
    ACTIVATION_ARRIVED = 19
    LOOKED = 20
    # posted
    CANCELLED = 21
    STOP_ASKED = 22
    KV_DELIVERED = 23
    KV_SHRUNK = 24
    KV_RESTORED = 25
    DRAIN_EXPIRED = 26
    CANCELS_APPLIED = 27


Asker: TypeAlias = Literal["migrator", "injector"]
"""Actors that wait for answers: live migrations, and faults."""


class Asked(msgspec.Struct, frozen=True, gc=False):
    """The actor that waits for an answer, and the number by which it knows what it has asked."""

    by: Asker
    number: int


class Event(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Base of all events."""

    kind: ClassVar[int]
    order: ClassVar[int] = 0


class Submitted(Event, frozen=True, kw_only=False, eq=False, gc=False):
    """A routed request joins the waiting queue."""

    kind: ClassVar[int] = int(Kind.SUBMITTED)
    request: Request


class Unreserved(Event, frozen=True, eq=False, gc=False):
    """A reservation for inbound KV is given back (in any life of the replica: by name)."""

    kind: ClassVar[int] = int(Kind.UNRESERVED)
    requests: list[Request]


class Released(Event, frozen=True, eq=False, gc=False):
    """The KV of detached requests has left."""

    kind: ClassVar[int] = int(Kind.RELEASED)
    requests: list[Request]


class StopUndone(Event, frozen=True, eq=False, gc=False):
    """A request that was stopped to move goes on here."""

    kind: ClassVar[int] = int(Kind.STOP_UNDONE)
    request: Request


class LiveMoves(Event, frozen=True, eq=False, gc=False):
    """One more live migration (or one less) from or to here holds blocks."""

    kind: ClassVar[int] = int(Kind.LIVE_MOVES)
    change: int


class PrerequisiteMet(Event, frozen=True, eq=False, gc=False):
    """The batch that waits got one of the things that it waits for."""

    kind: ClassVar[int] = int(Kind.PREREQUISITE_MET)
    life: int
    wait_ns: int = -1
    """Wave: what its iteration waits for other members inside its layers."""


class TierLost(Event, frozen=True, eq=False, gc=False):
    """A tier of KV has lost everything."""

    kind: ClassVar[int] = int(Kind.TIER_LOST)
    tier: int


class SegmentArrived(Event, frozen=True, eq=False, gc=False):
    """So many segments of the weights are there: embedding, layers, head."""

    kind: ClassVar[int] = int(Kind.SEGMENT_ARRIVED)
    count: int


class WeightsArrived(Event, frozen=True, eq=False, gc=False):
    """All weights are there."""

    kind: ClassVar[int] = int(Kind.WEIGHTS_ARRIVED)
    to: ReplicaState | None
    """The state in which it serves now; None = it serves already (live)."""


class LoadGivenUp(Event, frozen=True, eq=False, gc=False):
    """The weights will not come."""

    kind: ClassVar[int] = int(Kind.LOAD_GIVEN_UP)
    cause: str


class Commanded(Event, frozen=True, eq=False, gc=False):
    """Another actor decides on the state."""

    kind: ClassVar[int] = int(Kind.COMMANDED)
    to: ReplicaState
    writer: Writer
    cause: str
    weights: bool | None = None
    """A manual command: the weights appear (True) or are dropped (False)."""


class LockGranted(Event, frozen=True, eq=False, gc=False):
    """Its own lock, for which it has waited, is its own now."""

    kind: ClassVar[int] = int(Kind.LOCK_GRANTED)


class Paused(Event, frozen=True, eq=False, gc=False):
    """The process stands still."""

    kind: ClassVar[int] = int(Kind.PAUSED)


class Unpaused(Event, frozen=True, eq=False, gc=False):
    """The process goes on, if it still is the pause that began then."""

    kind: ClassVar[int] = int(Kind.UNPAUSED)
    life: int
    since_ns: int


class Crashed(Event, frozen=True, eq=False, gc=False):
    """The process is gone, with all that it held. `lost` is filled with its requests."""

    kind: ClassVar[int] = int(Kind.CRASHED)
    lost: list[Request]


class Restarted(Event, frozen=True, eq=False, gc=False):
    """A process is there again, without weights."""

    kind: ClassVar[int] = int(Kind.RESTARTED)
    life: int


class SlowdownSet(Event, frozen=True, eq=False, gc=False):
    """From the next iteration on, each takes so many times longer."""

    kind: ClassVar[int] = int(Kind.SLOWDOWN_SET)
    factor: float


class Measured(Event, frozen=True, eq=False, gc=False):
    """What a backend outside simulated time says that the batch costs."""

    kind: ClassVar[int] = int(Kind.MEASURED)
    life: int
    cost_ns: int


class ActivationArrived(Event, frozen=True, eq=False, gc=False):
    """The activation of a relayed batch is here."""

    kind: ClassVar[int] = int(Kind.ACTIVATION_ARRIVED)
    life: int


class Looked(Event, frozen=True, eq=False, gc=False):
    """Something that the replica looks at has changed: the global queue, the relay, a wave."""

    kind: ClassVar[int] = int(Kind.LOOKED)
    what: Literal["helper", "relay", "wave", "memory", "capacity", "moved"]


class StopAsked(Event, frozen=True, eq=False, gc=False):
    """Detach a running request (live migration). It is answered in any case."""

    kind: ClassVar[int] = int(Kind.STOP_ASKED)
    order: ClassVar[int] = 0
    request: Request
    asked: Asked


class KvDelivered(Event, frozen=True, eq=False, gc=False):
    """The KV of these requests has arrived; their blocks are reserved here."""

    kind: ClassVar[int] = int(Kind.KV_DELIVERED)
    order: ClassVar[int] = 1
    requests: list[Request]


class Cancelled(Event, frozen=True, eq=False, gc=False):
    """Remove a request that waits or runs here."""

    kind: ClassVar[int] = int(Kind.CANCELLED)
    order: ClassVar[int] = 2
    request: Request
    status: Status
    reason: str


class CancelsApplied(Event, frozen=True, eq=False, gc=False):
    """The replica to itself: all cancellations of this boundary have been looked at."""

    kind: ClassVar[int] = int(Kind.CANCELS_APPLIED)
    order: ClassVar[int] = 3


class KvShrunk(Event, frozen=True, eq=False, gc=False):
    """A part of the KV memory is gone. The answer is how many blocks that is.

    The answer is -1 if a crash was faster: the memory of the next process is whole.
    """

    kind: ClassVar[int] = int(Kind.KV_SHRUNK)
    order: ClassVar[int] = 4
    part: float
    loss: int
    asked: Asked


class KvRestored(Event, frozen=True, eq=False, gc=False):
    """The memory of one loss is back. It is answered in any case."""

    kind: ClassVar[int] = int(Kind.KV_RESTORED)
    order: ClassVar[int] = 4
    loss: int
    asked: Asked


class DrainExpired(Event, frozen=True, eq=False, gc=False):
    """A replica that drains has had its time."""

    kind: ClassVar[int] = int(Kind.DRAIN_EXPIRED)
    order: ClassVar[int] = 4


def to_plain(event: Event) -> dict[str, object]:
    """The event as JSON could hold it: its name as `event`, its fields, requests by their id."""
    fields: dict[str, object] = msgspec.to_builtins(event, enc_hook=_name_of)
    return {"event": Kind(event.kind).name.lower(), **fields}


def _name_of(value: object) -> int:
    if isinstance(value, Request):
        return value.request_id
    raise NotImplementedError(f"an event holds data, not {value!r}")


CANCELS_APPLIED: Final = CancelsApplied()
LOOK: Final = 1
"""`Replica.look`: the replica looks up when it may."""
INTERRUPT: Final = 2
"""`Replica.look`: it looks up now, whatever is in flight."""
