"""What can happen to the outbound KV of a replica, and what its machine wants done about it.

Events are frozen and carry the number of their row in the table of handlers (`outbound.py`). A
question is an event with an empty list that its handler fills: the sender goes on with the answer.
Actions name replicas by id: the machine knows none of them. Its watcher (`watcher.py`) applies
actions in their order, each carried out before the next.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from emu.migration.transfer import MigratingBatch
from emu.replica.split_batch import SplitBatch
from emu.request import Request, Status


class Kind(enum.IntEnum):
    """Row of the table of handlers."""

    # batches whose prompts ended here
    PROMPTS_DONE = 0
    LOOKED = 1
    OFFERED = 2
    PAUSE_ENDED = 3
    TRANSFER_DONE = 4
    TRANSFER_FAILED = 5
    CANCELLED = 6
    FLUSHED = 7
    DESTINATION_LOST = 8
    SOURCE_LOST = 9
    LEASE_ENDED = 10
    # halves of batches that two replicas computed
    HALVES_OFFERED = 11
    FIRST_COMPUTED = 12
    SECOND_COMPUTED = 13
    SECOND_KNOWN = 14
    HALF_DONE = 15
    HALF_FAILED = 16
    SECOND_ARRIVED = 17
    SPLIT_LOST = 18
    HALF_FORGOTTEN = 19


class Event(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Base of all events."""

    kind: ClassVar[int]


class PromptsDone(Event, frozen=True, eq=False, gc=False):
    """Requests have their first token; their KV waits here for a decode replica."""

    kind: ClassVar[int] = int(Kind.PROMPTS_DONE)
    requests: list[Request]
    prefill_ns: int
    """Time of their last iteration (a layer-wise transfer overlaps with it)."""


class Looked(Event, frozen=True, eq=False, gc=False):
    """Something that a waiting batch may need has changed."""

    kind: ClassVar[int] = int(Kind.LOOKED)


class Offered(Event, frozen=True, eq=False, gc=False):
    """The actions before it are applied: the head of the queue may look for a destination."""

    kind: ClassVar[int] = int(Kind.OFFERED)


class PauseEnded(Event, frozen=True, eq=False, gc=False):
    """Destinations that refused everything are asked again."""

    kind: ClassVar[int] = int(Kind.PAUSE_ENDED)


class TransferDone(Event, frozen=True, eq=False, gc=False):
    """A full batch has arrived. The notice may come twice, or late: the number tells."""

    kind: ClassVar[int] = int(Kind.TRANSFER_DONE)
    number: int


class TransferFailed(Event, frozen=True, eq=False, gc=False):
    """A full batch did not arrive; its KV is still here."""

    kind: ClassVar[int] = int(Kind.TRANSFER_FAILED)
    number: int
    reason: str


class Cancelled(Event, frozen=True, eq=False, gc=False):
    """The client has gone. Question: is its KV on its way out from here?"""

    kind: ClassVar[int] = int(Kind.CANCELLED)
    request: Request
    found: list[Request]


class Flushed(Event, frozen=True, eq=False, gc=False):
    """The source decodes what is queued itself. Question: which batches?"""

    kind: ClassVar[int] = int(Kind.FLUSHED)
    batches: list[list[Request]]


class DestinationLost(Event, frozen=True, eq=False, gc=False):
    """Another replica has crashed, with all KV that had arrived there."""

    kind: ClassVar[int] = int(Kind.DESTINATION_LOST)
    replica_id: int


class SourceLost(Event, frozen=True, eq=False, gc=False):
    """All KV that waits here or leaves from here is gone. Question: of which requests?"""

    kind: ClassVar[int] = int(Kind.SOURCE_LOST)
    lost: list[Request]


class LeaseEnded(Event, frozen=True, eq=False, gc=False):
    """The oldest KV that waits here has waited for its whole lease."""

    kind: ClassVar[int] = int(Kind.LEASE_ENDED)


class HalvesOffered(Event, frozen=True, eq=False, gc=False):
    """The actions before it are applied: the next half may leave."""

    kind: ClassVar[int] = int(Kind.HALVES_OFFERED)


class FirstComputed(Event, frozen=True, eq=False, gc=False):
    """The source holds the first layers' KV of a batch that another replica goes on with."""

    kind: ClassVar[int] = int(Kind.FIRST_COMPUTED)
    split: SplitBatch


class SecondComputed(Event, frozen=True, eq=False, gc=False):
    """The source holds the other layers' KV of those that go on."""

    kind: ClassVar[int] = int(Kind.SECOND_COMPUTED)
    split: SplitBatch
    survivors: list[Request]


class SecondKnown(Event, frozen=True, eq=False, gc=False):
    """For the owner of a split batch: its other layers are computed, and wait there."""

    kind: ClassVar[int] = int(Kind.SECOND_KNOWN)
    split: SplitBatch
    survivors: list[Request]
    source_id: int


class HalfDone(Event, frozen=True, eq=False, gc=False):
    """A half has arrived. The notice may come twice: the number tells."""

    kind: ClassVar[int] = int(Kind.HALF_DONE)
    number: int


class HalfFailed(Event, frozen=True, eq=False, gc=False):
    """A half did not arrive."""

    kind: ClassVar[int] = int(Kind.HALF_FAILED)
    number: int
    reason: str


class SecondArrived(Event, frozen=True, eq=False, gc=False):
    """For the owner of a split batch: its other layers are at the destination."""

    kind: ClassVar[int] = int(Kind.SECOND_ARRIVED)
    split: SplitBatch


class SplitLost(Event, frozen=True, eq=False, gc=False):
    """For the owner of a split batch: no request of it goes on, or a part of its KV is gone."""

    kind: ClassVar[int] = int(Kind.SPLIT_LOST)
    split: SplitBatch


class HalfForgotten(Event, frozen=True, eq=False, gc=False):
    """For the source of a second half: it does not leave, and its blocks are free."""

    kind: ClassVar[int] = int(Kind.HALF_FORGOTTEN)
    split: SplitBatch


class Action(msgspec.Struct, frozen=True, gc=False):
    """Base of all actions."""


class Release(Action, frozen=True, gc=False):
    """Free the source's blocks of these requests."""

    requests: list[Request]


class WakeSource(Action, frozen=True, gc=False):
    """A batch less waits here or leaves from here; the source may wait for the last one."""


class Unreserve(Action, frozen=True, gc=False):
    """Give blocks at the destination back."""

    destination_id: int
    requests: list[Request]


class Deliver(Action, frozen=True, gc=False):
    """These requests decode at the destination from now on."""

    destination_id: int
    requests: list[Request]


class Unlock(Action, frozen=True, gc=False):
    """Open the destination for others."""

    destination_id: int


class Pin(Action, frozen=True, gc=False):
    """Open the destination for others, but not for closing: the other half is still to come."""

    destination_id: int


class Unpin(Action, frozen=True, gc=False):
    """The other half has come, or never will."""

    destination_id: int


class FreeCapacity(Action, frozen=True, gc=False):
    """Blocks or the lock of the destination have become free: others may be waiting."""

    destination_id: int


class Send(Action, frozen=True, gc=False):
    """Start a transfer."""

    batch: MigratingBatch
    destination_id: int
    number: int
    is_half: bool = False
    overlapped_ns: int = 0
    setup_ns: int = 0


class CancelTransfer(Action, frozen=True, gc=False):
    """Stop the transfer of the full batch or of the half that is on its way."""

    is_half: bool = False


class Record(Action, frozen=True, gc=False):
    """A half has arrived."""

    batch: MigratingBatch
    destination_id: int


class HandOver(Action, frozen=True, gc=False):
    """A full batch has arrived, in this order: free the source, give back what is reserved for
    requests that ended meanwhile, deliver the others, open the destination, record.

    One action, because it is the one that every migration has. A source that is leaving its role
    looks whether this was the last one.
    """

    batch: MigratingBatch
    destination_id: int
    arrived: list[Request]
    ended: list[Request]


class Offer(Action, frozen=True, gc=False):
    """Look for the next destination, now that what came before is applied: halves, then batches."""


class OfferBatch(Action, frozen=True, gc=False):
    """The same for the head of the queue alone."""


class OfferHalves(Action, frozen=True, gc=False):
    """The same for halves alone."""


class Pause(Action, frozen=True, gc=False):
    """Offer nothing for so long, whatever changes."""

    delay_ns: int


class SetStuck(Action, frozen=True, gc=False):
    """Something waits here for a destination, or no longer."""

    is_stuck: bool


class WakeSelf(Action, frozen=True, gc=False):
    """Look again at the end of this instant's queue."""


class LookAt(Action, frozen=True, gc=False):
    """Look again at this instant (an outside router names a decode replica then)."""

    at_ns: int


class ArmLease(Action, frozen=True, gc=False):
    """The oldest lease ends at this instant."""

    at_ns: int


class End(Action, frozen=True, gc=False):
    """The request's one terminal event."""

    request: Request
    status: Status
    reason: str


class Lose(Action, frozen=True, gc=False):
    """The KV of these requests is gone: they start again elsewhere, or fail."""

    requests: list[Request]
    reason: str


class Tell(Action, frozen=True, gc=False):
    """An event for the outbound KV of another replica (or of this one)."""

    source_id: int
    event: Event
