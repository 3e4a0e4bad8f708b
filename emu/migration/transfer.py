"""What a migration is, and what it needs of the network.

The handoff of a request's KV is explicit: *hold* (the source keeps the blocks), *reserve* (the
destination charges them), *transfer* (bytes on the links), *activate* (the destination decodes),
*release* (the source frees). `MigratingBatch` carries the requests through these steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from emu.network.placement import Grid
from emu.request import Request
from emu.units import ceil_div

if TYPE_CHECKING:
    from emu.migration.watcher import Watcher
    from emu.replica.replica import Replica


class MigratingBatch(msgspec.Struct, eq=False):
    """Requests whose prompts ended in the same iteration, on their way to a decode replica."""

    batch_id: int
    requests: list[Request]
    prefill_ns: int
    """Time that the iteration took (a layer-wise transfer overlaps with it)."""
    queued_ns: int
    started_ns: int = -1
    kv_bytes: int = 0
    attempts: int = 0
    """Transfers of it that have failed."""

    def is_ready(self, now_ns: int) -> bool:
        """It may leave: a decode replica that an outside router names has been named."""
        first = self.requests[0]
        return first.handoff_after_ns < 0 or first.arrival_ns + first.handoff_after_ns <= now_ns


class SplitBatch(msgspec.Struct, eq=False):
    """A batch whose first layers one replica computed and another the rest (live scaling).

    Its KV travels in two halves to one destination; see `emu/migration/partial.py`.
    """

    batch_id: int
    requests: list[Request]
    """As handed over."""
    start_layer: int
    """The first replica computed layers [0, start_layer)."""
    layers: int
    queued_ns: int
    first_watcher: Watcher | None = None
    second_watcher: Watcher | None = None
    destination: Replica | None = None
    destination_incarnation: int = 0
    reserved: list[Request] = msgspec.field(default_factory=list)
    """Requests with blocks at the destination."""
    survivors: list[Request] | None = None
    """Those that go on after their first token; None = not computed yet."""
    is_first_done: bool = False
    is_second_done: bool = False
    attempts: int = 0
    """How often all destinations refused it."""
    is_dropped: bool = False
    """Nobody goes on, or a part of its KV is lost."""


class Transfer(Protocol):
    """Bytes on their way."""

    def cancel(self) -> None:
        """Stop; `on_done` will not be called."""
        ...


class Network(Protocol):
    """The links, as a migration sees them."""

    def send(
        self,
        source: Grid,
        destination: Grid,
        size_bytes: int,
        *,
        kind: str,
        on_done: Callable[[], None],
        overlapped_ns: int = 0,
        pieces: int = 1,
        pair: tuple[int, int] | None = None,
        on_failed: Callable[[str], None] | None = None,
        setup_ns: int = 0,
    ) -> Transfer:
        """Move `size_bytes` in all, GPU by GPU in parallel; `on_done` when the last byte is there.

        Or `on_failed(reason)`, never both; a fault may call `on_done` a second time.

        `overlapped_ns` > 0: the sender produced the data in `pieces` equal parts over so long,
        and sent each as it became ready; only what is left is still to be moved. `pair` names the
        two replicas, for partitions between them. `setup_ns`: what the connector takes besides.
        """
        ...


def kv_bytes(requests: list[Request], block_size: int, kv_bytes_per_token: int) -> int:
    """KV that moves with these requests: whole pages of prompt + 1 tokens (BlitzScale 1.4).

    A request that had to be computed again moves all that it has reached.
    """
    blocks = sum([kv_blocks(request, block_size) for request in requests])
    return blocks * block_size * kv_bytes_per_token


def kv_blocks(request: Request, block_size: int) -> int:
    """Pages of a request that moves."""
    return ceil_div(request.prompt_tokens + (request.generated_tokens or 1), block_size)


def prompt_tokens(requests: list[Request]) -> int:
    """Of all of them (mostly one: a loop is shorter than a list)."""
    tokens = 0
    for request in requests:
        tokens += request.prompt_tokens
    return tokens
