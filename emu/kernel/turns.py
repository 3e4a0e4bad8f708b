"""A loop of plain calls, for runs that wait for nothing but emulated time.

What a kernel asks of asyncio's loop, without sockets, threads and the 30 modules that they need: a
queue of calls, and one coroutine that waits for a mark. Calls from signal handlers are safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Mark:
    """Something that one coroutine waits for."""

    def __init__(self) -> None:
        self._is_set = False

    def done(self) -> bool:
        """It has happened."""
        return self._is_set

    def set_result(self, result: None) -> None:
        """It happens now."""
        self._is_set = True

    def __await__(self) -> Generator[Mark, None, None]:
        while not self._is_set:
            yield self


class Turns:
    """The loop."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def call_soon(self, call: Callable[..., object], *arguments: Any) -> None:
        """Make this call after those that wait already."""
        self._calls.append((call, arguments))

    def call_soon_threadsafe(self, call: Callable[..., object], *arguments: Any) -> None:
        """The same from a signal handler."""
        self._calls.append((call, arguments))

    def create_future(self) -> Mark:
        """What a coroutine can wait for."""
        return Mark()

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, which waits for marks only, to its end; its result."""
        calls = self._calls
        try:
            while True:
                try:
                    waited = main.send(None)
                except StopIteration as end:
                    return end.value
                while not waited.done():
                    call, arguments = calls.popleft()
                    call(*arguments)
        finally:
            main.close()
