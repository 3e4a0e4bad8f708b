"""Whether a replica takes KV from others.

A sender of KV holds the lock of its destination for the transfer. A replica that is to take none
holds its own lock: it is closed. It cannot take the lock from a sender, so it asks once, and is
closed when the lock is granted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from emu.kernel.lock import Lock


@final
class Gate:
    """The lock of one replica, as the replica itself uses it."""

    lock: Lock
    name: str
    """In whose name the replica holds its own lock."""
    is_closing: bool
    """It waits for its own lock: asked for, and not granted yet."""

    __slots__ = ("is_closing", "lock", "name")

    def __init__(self, lock: Lock, name: str, *, is_closed: bool) -> None:
        self.lock = lock
        self.name = name
        self.is_closing = False
        if is_closed:
            lock.try_acquire(name)

    @property
    def is_closed(self) -> bool:
        """It holds its own lock."""
        return self.lock.holder == self.name

    @property
    def is_to_close(self) -> bool:
        """It is open, and has not asked for its lock yet."""
        return self.lock.holder != self.name and not self.is_closing

    def close(self, granted: Callable[[], None]) -> None:
        """Take the lock, or ask for it: `granted` is called when it is there."""
        if not self.lock.request(self.name, granted):
            self.is_closing = True

    def closed(self) -> None:
        """The lock that it has waited for is granted."""
        self.is_closing = False

    def open(self) -> bool:
        """Give the own lock back; False if another holds it."""
        if not self.is_closed:
            return False
        self.lock.release(self.name)
        return True
