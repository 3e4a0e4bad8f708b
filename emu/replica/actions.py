"""What a replica wants done outside itself: actions, applied in their order by its actor.

A handler changes the replica and adds actions to `Replica.out`; the actor (`actor.py`) applies them
when the handler has returned, before the next handler runs.
"""

from __future__ import annotations

import msgspec

from emu.latency.base import BatchShape
from emu.replica.events import Asked
from emu.replica.relay_board import Relayed
from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState, Writer
from emu.request import Request, Status


class Action(msgspec.Struct, frozen=True, gc=False):
    """Base of all actions."""


class End(Action, frozen=True, gc=False):
    """The request's one terminal event."""

    request: Request
    status: Status
    reason: str = ""


class FreeCapacity(Action, frozen=True, gc=False):
    """Blocks or the lock have become free: others may be waiting."""


class HandOff(Action, frozen=True, gc=False):
    """These requests have their first token; their KV is to leave."""

    requests: list[Request]
    prefill_ns: int


class HandOffFirst(Action, frozen=True, gc=False):
    """KV of the first layers of a batch that a helper goes on with."""

    split: SplitBatch


class HandOffSecond(Action, frozen=True, gc=False):
    """KV of the other layers, of those that go on."""

    split: SplitBatch
    survivors: list[Request]


class Requeue(Action, frozen=True, gc=False):
    """Waiting requests that are not served here go back to the router."""

    requests: list[Request]


class Lose(Action, frozen=True, gc=False):
    """The KV of these requests is gone: they start again elsewhere, or fail."""

    requests: list[Request]
    reason: str


class ExpireDrain(Action, frozen=True, gc=False):
    """The replica's time to drain is over: these are lost, and what waits to leave."""

    requests: list[Request]


class ForwardCancel(Action, frozen=True, gc=False):
    """The request that is to be cancelled has moved on."""

    request: Request


class Drain(Action, frozen=True, gc=False):
    """A replica that shuts down has work that may be moved."""


class Reply(Action, frozen=True, gc=False):
    """Answer the actor that has asked, with a number where the event says so."""

    asked: Asked
    value: int = 0


class Move(Action, frozen=True, gc=False):
    """Change the state, if it still is what the handler believes."""

    expected: ReplicaState
    to: ReplicaState
    cause: str
    writer: Writer = "loop"


class CloseLock(Action, frozen=True, gc=False):
    """Take the own lock as soon as it can be had: inbound KV goes elsewhere."""


class OpenLock(Action, frozen=True, gc=False):
    """Give the own lock back: inbound KV may come."""


class Measure(Action, frozen=True, gc=False):
    """Ask the backend outside simulated time for a cost; `Measured` is the answer."""

    shape: BatchShape


class SendActivation(Action, frozen=True, gc=False):
    """The activation of a relayed batch goes to its helper."""

    relayed: Relayed
    helper_id: int
    size_bytes: int


class ReportRelayed(Action, frozen=True, gc=False):
    """A batch was handed to a helper after so many layers."""

    helper_id: int
    requests: list[Request]
    start_layer: int


class ReleaseHelper(Action, frozen=True, gc=False):
    """This new replica needs its helper no longer."""


class WakeElder(Action, frozen=True, gc=False):
    """Another new replica has an older batch to give: it answers first."""

    replica_id: int
