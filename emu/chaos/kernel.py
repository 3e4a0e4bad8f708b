"""A kernel that has the world checked while it runs: between two timers, when nothing moves."""

from __future__ import annotations

from collections.abc import Callable

from emu.errors import InvariantViolation
from emu.kernel.clock import Kernel


class CheckingKernel(Kernel):
    """Calls `check` before every `every`-th timer; what it finds ends the run."""

    def __init__(self, *, every: int, events_per_instant_max: int = 100_000) -> None:
        super().__init__(events_per_instant_max=events_per_instant_max)
        self.check: Callable[[], list[str]] = list
        self.is_quiet = False
        """The next timer is later than now: this instant is over."""
        self.checks = 0
        self._every = every
        self._left = every

    def _move_to(self, due_ns: int, rank: int) -> bool:
        self._left -= 1
        if self._left <= 0:
            self._left = self._every
            self.checks += 1
            self.is_quiet = due_ns > self.now_ns
            problems = self.check()
            if problems:
                story = [*problems[1:], *self.story()]
                self.fail(InvariantViolation(problems[0], at_ns=self.now_ns, story=story))
                return False
        return super()._move_to(due_ns, rank)
