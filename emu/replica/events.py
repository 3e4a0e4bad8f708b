"""Everything that can happen to a replica: frozen events, each with the number of its table row.

Two ways of coming (`emu/kernel/clock.py`). *Told* events act at once: they change books or the
state, and perhaps when the replica looks up next. *Posted* events wait in the mailbox for the
next boundary, when nothing is in flight; there they are applied in the order of `order`: stops,
KV that has arrived, cancellations, then what faults do to the memory.

The replica's own timers (an iteration's end, a layer's) have numbers too, and a row in the table,
but no object: they are two thirds of all that happens, and carry nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import ClassVar, Final, Literal

import msgspec

from emu.replica.states import ReplicaState, Writer
from emu.request import Request, Status


class Kind(enum.IntEnum):
    """Row of the table of handlers."""

    # its own timers
    BOUNDARY = 0
    ITERATION_ENDED = 1
    PREREQUISITES_LOOK = 2
    STAGE_LEFT = 3
    INSTANT_ENDED = 4
    LAYER_ENDED = 5
    RELAYED_ENDED = 6
    # told
    SUBMITTED = 7
    UNRESERVED = 8
    RELEASED = 9
    STOP_UNDONE = 10
    LIVE_MOVES = 11
    PREREQUISITE_MET = 12
    TIER_LOST = 13
    SEGMENT_ARRIVED = 14
    WEIGHTS_ARRIVED = 15
    LOAD_GIVEN_UP = 16
    COMMANDED = 17
    LOCK_GRANTED = 18
    PAUSED = 19
    UNPAUSED = 20
    CRASHED = 21
    RESTARTED = 22
    SLOWDOWN_SET = 23
    MEASURED = 24
    ACTIVATION_ARRIVED = 25
    LOOKED = 26
    # posted
    CANCELLED = 27
    STOP_ASKED = 28
    KV_DELIVERED = 29
    KV_SHRUNK = 30
    KV_RESTORED = 31
    DRAIN_EXPIRED = 32
    CANCELS_APPLIED = 33
    # its own, when a backend outside simulated time has answered
    COST_KNOWN = 34


class Event(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Base of all events."""

    kind: ClassVar[int]
    order: ClassVar[int] = 0


# --- told ---------------------------------------------------------------------------------------
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


# --- posted -------------------------------------------------------------------------------------
class StopAsked(Event, frozen=True, eq=False, gc=False):
    """Detach a running request (live migration). `reply` is called in any case."""

    kind: ClassVar[int] = int(Kind.STOP_ASKED)
    order: ClassVar[int] = 0
    request: Request
    reply: Callable[[], None]


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
    """A part of the KV memory is gone; `struck` is told how many blocks that is.

    `struck` is told -1 if a crash was faster: the memory of the next process is whole.
    """

    kind: ClassVar[int] = int(Kind.KV_SHRUNK)
    order: ClassVar[int] = 4
    part: float
    loss: int
    struck: Callable[[int], None]


class KvRestored(Event, frozen=True, eq=False, gc=False):
    """The memory of one loss is back."""

    kind: ClassVar[int] = int(Kind.KV_RESTORED)
    order: ClassVar[int] = 4
    loss: int
    over: Callable[[], None]


class DrainExpired(Event, frozen=True, eq=False, gc=False):
    """A replica that drains has had its time."""

    kind: ClassVar[int] = int(Kind.DRAIN_EXPIRED)
    order: ClassVar[int] = 4


CANCELS_APPLIED: Final = CancelsApplied()
LOOK: Final = 1
"""`Replica.look`: the replica looks up when it may."""
INTERRUPT: Final = 2
"""`Replica.look`: it looks up now, whatever is in flight."""
