"""A batch whose first layers one replica computed and another the rest (live scaling)."""

from __future__ import annotations

import msgspec

from emu.request import Request


class SplitBatch(msgspec.Struct, eq=False):
    """Its KV travels in two halves to one destination; see `emu/migration/outbound.py`.

    Owned by the outbound KV of the replica that computed the first layers: only that writes to it.
    """

    batch_id: int
    requests: list[Request]
    """As handed over."""
    start_layer: int
    """The first replica computed layers [0, start_layer)."""
    layers: int
    queued_ns: int
    first_id: int = -1
    """The replica that computed the first layers, once it has queued them."""
    second_id: int = -1
    """The replica that computed the others, once it has."""
    destination_id: int = -1
    reserved: list[Request] = msgspec.field(default_factory=list)
    """Requests with blocks at the destination."""
    survivors: list[Request] | None = None
    """Those that go on after their first token; None = not computed yet."""
    is_first_done: bool = False
    is_second_done: bool = False
    is_pinned: bool = False
    """The destination is open for others while the second half is awaited."""
    attempts: int = 0
    """How often all destinations refused it."""
    is_dropped: bool = False
    """No request goes on, or a part of its KV is lost."""
