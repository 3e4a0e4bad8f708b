"""Mutual exclusion in simulated time, first come, first served.

A holder can turn its hold into a *pin*: others may take the lock, but an actor that waits for it
(to close what it guards) has it only when no pin is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Lock:
    """`holder` says which actor has it (for stories and checks); empty = none."""

    def __init__(self, soon: Callable[[Callable[[], None]], None], name: str) -> None:
        """`soon` runs a function at the end of the queue of this instant."""
        self.name = name
        self.holder = ""
        self.pins = 0
        self._soon = soon
        self._waiters: deque[tuple[str, Callable[[], None]]] = deque()

    @property
    def is_held(self) -> bool:
        """Some actor has it."""
        return bool(self.holder)

    @property
    def is_free(self) -> bool:
        """No actor has it or has pinned it."""
        return not self.holder and not self.pins

    def try_acquire(self, holder: str) -> bool:
        """Take it, pinned or not, if no actor has it or waits for it."""
        if self.holder or self._waiters:
            return False
        self.holder = holder
        return True

    def request(self, holder: str, granted: Callable[[], None]) -> bool:
        """Take it now (True), or later: then `granted` is called in the queue of that instant."""
        if not self.pins and self.try_acquire(holder):
            return True
        self._waiters.append((holder, granted))
        return False

    def release(self, holder: str) -> None:
        """Give it back; the actor that has waited longest has it then."""
        assert self.holder == holder, f"{self.name}: {holder} releases, {self.holder} holds"
        self.holder = ""
        self._grant()

    def pin(self, holder: str) -> None:
        """Give it back to others that take it at once, not to those that wait for it."""
        self.pins += 1
        self.release(holder)

    def unpin(self) -> None:
        """Remove one pin; without any, the actor that has waited longest has it."""
        assert self.pins > 0, f"{self.name} has no pin"
        self.pins -= 1
        self._grant()

    def _grant(self) -> None:
        if self._waiters and self.is_free:
            self.holder, granted = self._waiters.popleft()
            self._soon(granted)

    def is_waited_for(self) -> bool:
        """Some actor waits for it."""
        return bool(self._waiters)

    def describe(self) -> str:
        """One line for a story."""
        names = ", ".join(name for name, _ in self._waiters)
        return f"{names} wait for lock {self.name}, which {self.holder} holds"
