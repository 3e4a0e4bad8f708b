"""What a replica needs of the world around it, so that it need not know the floors above."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from emu.kernel.clock import Kernel
from emu.migration.transfer import SplitBatch
from emu.request import Request, Status
from emu.scheduling.base import Batch
from emu.scheduling.stages import StageSpan

if TYPE_CHECKING:
    from emu.migration.relay import RelayBoard
    from emu.replica.replica import Replica
    from emu.replica.states import ReplicaState, Writer


class GapSink(Protocol):
    """Statistics of gaps between tokens."""

    def add_run(
        self,
        cumulative_ends: NDArray[np.int64],
        count: int,
        start_ns: int = -1,
        first_count: int = -1,
    ) -> None:
        """`count` requests got a token at each of these instants (relative to `start_ns`).

        At the first of them `first_count` had a gap that counts here, if it is given.
        """
        ...

    def add_gap(self, ns: int, count: int = 1, at_ns: int = -1) -> None:
        """`count` gaps of this length that ended at `at_ns`."""
        ...

    def add_gaps(self, gaps_ns: Iterable[int], at_ns: int = -1) -> None:
        """Single gaps that ended at `at_ns`."""
        ...


class BatchSink(Protocol):
    """Whoever draws batches (the trace)."""

    def batch(
        self,
        replica: Replica,
        batch: Batch,
        start_ns: int,
        end_ns: int,
        steps: int,
        spans: list[StageSpan] | None = None,
    ) -> None:
        """A batch, or a leap of `steps` equal decode iterations, has ended.

        `spans`: where it was on each pipeline stage, if there are several.
        """
        ...


class TokenSink(Protocol):
    """Whoever keeps the history of the run."""

    def tokens(
        self,
        replica: int,
        receivers: Sequence[Request],
        start_ns: int,
        ends: NDArray[np.int64] | None,
        now_ns: int,
    ) -> None:
        """These requests received a token at each of `start_ns + ends`, or just one now."""
        ...


class Handoff(Protocol):
    """Where a prefill replica puts the requests whose prompts it has finished."""

    def append(self, requests: list[Request], prefill_ns: int) -> None:
        """These requests have their first token; their KV waits here for a decode replica.

        `prefill_ns` is the time that their last iteration took (layer-wise transfers overlap it).
        """
        ...

    def append_first(self, split: SplitBatch) -> None:
        """KV of the first layers of a batch that another replica goes on with (it is held here)."""
        ...

    def append_second(self, split: SplitBatch, survivors: list[Request]) -> None:
        """KV of the other layers; `survivors` have their first token and go on."""
        ...

    def flush(self) -> list[list[Request]]:
        """Take back all batches that are queued and not on their way."""
        ...


class World(Protocol):
    """The cluster, as a replica sees it."""

    kernel: Kernel

    @property
    def gaps(self) -> GapSink:
        """Where gaps between tokens go."""
        ...

    @property
    def batches(self) -> BatchSink | None:
        """Where batches are drawn, if anywhere."""
        ...

    @property
    def history(self) -> TokenSink | None:
        """Where every token is written down, if anywhere."""
        ...

    def terminal(self, request: Request, status: Status, reason: str = "") -> None:
        """The request's one terminal event."""
        ...

    def lost(self, requests: Sequence[Request], reason: str) -> None:
        """The KV of these requests is gone: they start again elsewhere, or fail."""
        ...

    def requeue(self, requests: list[Request]) -> None:
        """Waiting requests that this replica will not serve go back to the router."""
        ...

    @property
    def relay(self) -> RelayBoard:
        """Where helpers of live scaling ask for batches."""
        ...

    def next_batch_id(self) -> int:
        """Ids of migrating batches, in order of creation."""
        ...

    def on_relayed(
        self, source: Replica, old: Replica, requests: list[Request], start_layer: int
    ) -> None:
        """A batch was handed to a helper after `start_layer` layers."""
        ...

    def on_capacity(self, replica: Replica) -> None:
        """Blocks or the lock of a replica have become free (watchers may be waiting)."""
        ...

    streams: bool
    """Whether `on_tokens` is told of every token (live mode)."""

    def on_draining(self, replica: Replica) -> None:
        """A shutting decode replica has work left (it may be moved instead of waited for)."""
        ...

    def on_tokens(self, replica: Replica, receivers: Iterable[Request]) -> None:
        """These requests received a token now; those whose last it is end after this."""
        ...

    def cancel(self, request: Request) -> None:
        """The client has left, at whatever stage the request is."""
        ...

    def on_moved(
        self, replica: Replica, before: ReplicaState, writer: Writer, cause: str, at_ns: int
    ) -> None:
        """A replica changed its state."""
        ...
