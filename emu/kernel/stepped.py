"""Simulated time that stands still at instants of one's choice: for looking into a run.

The actors, their order and the digest are those of a run without such stops.
"""

from __future__ import annotations

from typing import Final

from emu.kernel.clock import NEVER, Kernel
from emu.kernel.life import TURN
from emu.kernel.priorities import PRIORITY_CONTROL

_ALL_PRIORITIES: Final = PRIORITY_CONTROL << 1
"""Above that of every timer: all that is due by now has happened."""


class SteppedKernel(Kernel):
    """`hold` says where time stands still; then `run` gives control back, until `send(None)`."""

    def __init__(self, *, events_per_instant_max: int = 100_000, start_ns: int = 0) -> None:
        self._hold_ns = NEVER
        self._plain_notice_ns = NEVER
        self._stands = False
        super().__init__(events_per_instant_max=events_per_instant_max, start_ns=start_ns)

    def hold(self, at_ns: int = NEVER) -> None:
        """Stand still when all that is due by this instant has happened; `NEVER`: go on."""
        self._hold_ns = at_ns
        self._stands = False
        self._set_notice()

    async def run(self, *, limit_ns: int | None = None) -> None:
        """Let the actors live as `Kernel.run` does, and give control back where time is held."""
        self._begin(limit_ns)
        while not self._is_over:
            self._advance()
            self._look_outside()
            if self._stands and not self._is_over:
                await TURN
        self._end()

    def _set_notice(self) -> None:
        super()._set_notice()
        self._plain_notice_ns = self._notice_ns
        self._notice_ns = min(self._notice_ns, self._hold_ns)

    def _notice(self, due_ns: int) -> bool:
        hold_ns = self._hold_ns
        if due_ns <= hold_ns:
            return super()._notice(due_ns)
        if hold_ns > self._plain_notice_ns and not super()._notice(hold_ns):
            return False
        self.now_ns = max(self.now_ns, hold_ns)
        self.priority_reached = _ALL_PRIORITIES
        self._stands = True
        return False
