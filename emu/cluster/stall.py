"""Ends a run in which simulated time goes on and no request gets anywhere.

Neither of the kernel's guards sees it: time moves (no Zeno) and something is always scheduled (no
deadlock). Progress is a token, an end, an arrival or weights that have been loaded. A long wait in
which next to nothing happens (a machine that is away for hours) is no stall.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from emu.cluster.audit import story
from emu.errors import Stalled

if TYPE_CHECKING:
    from emu.cluster.cluster import Cluster

LOOKS: Final = 4
"""So often in the bound is progress looked at."""
EVENTS_MIN: Final = 1_000
"""Fewer events without progress are a wait."""


class StallGuard:
    """Asked now and then (`Kernel.watch_every`)."""

    def __init__(self, cluster: Cluster, bound_ns: int) -> None:
        self._cluster = cluster
        self._bound_ns = bound_ns
        self._seen = self._progress()
        self._since_ns = cluster.kernel.now_ns
        self._events = cluster.kernel.events

    @property
    def period_ns(self) -> int:
        """How often it is to be asked."""
        return max(1, self._bound_ns // LOOKS)

    def look(self, at_ns: int) -> Stalled | None:
        """The error that ends the run, if it has stalled."""
        kernel = self._cluster.kernel
        progress = self._progress()
        if progress != self._seen or self._cluster.gateway.outstanding == 0:
            self._seen, self._since_ns, self._events = progress, at_ns, kernel.events
            return None
        events = kernel.events - self._events
        if at_ns - self._since_ns < self._bound_ns or events < EVENTS_MIN:
            return None
        lines = [
            f"{self._cluster.gateway.outstanding} requests are in the system, and none has got a "
            f"token or ended since {self._since_ns} ns ({events:,} events; limits.stalled_s)"
        ]
        return Stalled("\n  ".join([*lines, *story(self._cluster)]))

    def _progress(self) -> tuple[int, int, int, int]:
        cluster = self._cluster
        tokens = sum(sum(replica.tokens_produced) for replica in cluster.replicas)
        gateway = cluster.gateway
        weights = cluster.network.moved_bytes.get("weights", 0)
        return tokens, gateway.released - gateway.outstanding, gateway.released, weights
