"""Leases: how long a source keeps KV that is not fetched.

A prefill replica holds the KV of a finished prompt until its transfer has ended. With a lease
(`recovery.lease_ms`), what has waited for so long without a transfer under way is given up: its
blocks are free, its requests start again or fail. One timer for each source, for its oldest batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.kernel.priorities import PRIORITY_WORLD

if TYPE_CHECKING:
    from emu.migration.watcher import Watcher


class Leases:
    """Leases of the KV that waits at one source."""

    def __init__(self, watcher: Watcher, lease_ns: int) -> None:
        self._watcher = watcher
        self._lease_ns = lease_ns
        self._is_armed = False

    def watch(self) -> None:
        """Something may have begun to wait: look again when its lease ends."""
        if not self._lease_ns or self._is_armed:
            return
        watcher = self._watcher
        since_ns = [batch.queued_ns for batch in watcher.queue]
        since_ns += [split.queued_ns for split in watcher.halves.firsts]
        if since_ns:
            self._is_armed = True
            kernel = watcher.world.kernel
            due_ns = max(kernel.now_ns, min(since_ns) + self._lease_ns)
            kernel.call_at(due_ns, PRIORITY_WORLD, self._end)

    def _end(self) -> None:
        self._is_armed = False
        watcher = self._watcher
        lost = watcher.lose_old(watcher.world.kernel.now_ns - self._lease_ns)
        watcher.world.lost(lost, "lease_expired")
        watcher.look()
        self.watch()
