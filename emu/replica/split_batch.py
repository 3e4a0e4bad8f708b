"""A batch whose first layers one replica computed and another the rest (live scaling)."""

from __future__ import annotations

from typing import Protocol

import msgspec

from emu.request import Request


class Half(Protocol):
    """The outbound side of one half, as the other half and the relay see it."""

    @property
    def name(self) -> str:
        """In whose name the destination's lock is held."""
        ...

    def pump(self) -> None:
        """Start the next half, if there is one that can leave."""
        ...

    def forget(self, split: SplitBatch, requests: list[Request]) -> None:
        """The half does not leave, and its blocks are free."""
        ...

    def drop_lost(self, split: SplitBatch) -> None:
        """A replica that was computing or receiving a part of the batch has crashed."""
        ...


class SplitBatch(msgspec.Struct, eq=False):
    """Its KV travels in two halves to one destination; see `emu/migration/halves.py`."""

    batch_id: int
    requests: list[Request]
    """As handed over."""
    start_layer: int
    """The first replica computed layers [0, start_layer)."""
    layers: int
    queued_ns: int
    first_half: Half | None = None
    second_half: Half | None = None
    destination_id: int = -1
    reserved: list[Request] = msgspec.field(default_factory=list)
    """Requests with blocks at the destination."""
    survivors: list[Request] | None = None
    """Those that go on after their first token; None = not computed yet."""
    is_first_done: bool = False
    is_second_done: bool = False
    attempts: int = 0
    """How often all destinations refused it."""
    is_dropped: bool = False
    """No request goes on, or a part of its KV is lost."""
