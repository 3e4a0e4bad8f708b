"""The network as those see it that send something: transfers with an end, nothing of links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from emu.network.grids import Grid


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
