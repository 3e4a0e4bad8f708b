"""Mutual exclusion in simulated time, first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Lock:
    """`holder` says which actor has it (for stories and checks); empty = none."""

    def __init__(self, soon: Callable[[Callable[[], None]], None], name: str) -> None:
        """`soon` runs a function at the end of the queue of this instant."""
        self.name = name
        self.holder = ""
        self._soon = soon
        self._waiters: deque[tuple[str, Callable[[], None]]] = deque()

    @property
    def is_held(self) -> bool:
        """Some actor has it."""
        return bool(self.holder)

    def try_acquire(self, holder: str) -> bool:
        """Take it if it is free and no other actor waits for it."""
        if self.holder or self._waiters:
            return False
        self.holder = holder
        return True

    def request(self, holder: str, granted: Callable[[], None]) -> bool:
        """Take it now (True), or later: then `granted` is called in the queue of that instant."""
        if self.try_acquire(holder):
            return True
        self._waiters.append((holder, granted))
        return False

    def release(self, holder: str) -> None:
        """Give it back; the actor that has waited longest has it then."""
        assert self.holder == holder, f"{self.name}: {holder} releases, {self.holder} holds"
        self.holder = ""
        if self._waiters:
            self.holder, granted = self._waiters.popleft()
            self._soon(granted)

    def is_waited_for(self) -> bool:
        """Some actor waits for it."""
        return bool(self._waiters)

    def describe(self) -> str:
        """One line for a story."""
        names = ", ".join(name for name, _ in self._waiters)
        return f"{names} wait for lock {self.name}, which {self.holder} holds"
