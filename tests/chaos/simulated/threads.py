"""Threads, and processes beside each other, one at a time in an order that a seed draws.

Each runs until a line of the watched files; there the seed says which one goes on. A lock that another
one holds lets others go on, too. So a race that needs a loaded machine is an order among others.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any


class Turns:
    """Which one goes on."""

    def __init__(self, rng: random.Random, watched: Sequence[ModuleType]) -> None:
        self._rng = rng
        self._files = {module.__file__ for module in watched}
        self._changed = threading.Condition()
        self._alive: list[int] = []
        self._turn = -1
        self._held: dict[int, object] = {}
        self.errors: list[BaseException] = []

    def run(self, calls: Sequence[Callable[[], object]]) -> None:
        """All of these to their ends; what they raised is in `errors`."""
        self._alive = list(range(len(calls)))
        threads = [
            threading.Thread(target=self._one, args=(index, call), daemon=True)
            for index, call in enumerate(calls)
        ]
        for thread in threads:
            thread.start()
        with self._changed:
            self._turn = self._rng.choice(self._alive)
            self._changed.notify_all()
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                self.errors.append(TimeoutError("a thread has no end"))
                return

    def _one(self, index: int, call: Callable[[], object]) -> None:
        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in self._files:
                return None
            if event == "line" and self._rng.random() < 0.3:
                self.let_others(index)
            return trace

        with self._changed:
            while self._turn != index:
                self._changed.wait()
        sys.settrace(trace)
        try:
            call()
        except BaseException as error:
            self.errors.append(error)
        finally:
            sys.settrace(None)
            with self._changed:
                self._alive.remove(index)
                if self._alive:
                    self._turn = self._rng.choice(self._alive)
                self._changed.notify_all()

    def let_others(self, index: int) -> None:
        """Perhaps another one goes on now, and this one later."""
        with self._changed:
            self._turn = self._rng.choice(self._alive)
            self._changed.notify_all()
            while self._turn != index:
                self._changed.wait()

    def lock(self) -> Lock:
        """A lock for code that is watched."""
        return Lock(self)

    @property
    def current(self) -> int:
        """Whose turn it is."""
        return self._turn


class Lock(contextlib.AbstractContextManager["Lock"]):
    """Waits by letting others go on."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_held = False

    def __enter__(self) -> Lock:
        while self._is_held:
            self._turns.let_others(self._turns.current)
        self._is_held = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_held = False
