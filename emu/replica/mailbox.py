"""What is posted to a replica, and in which order it is applied between two iterations.

What is posted waits until nothing is in flight. Then all of it is applied, in the order of the
events' ranks (`events.py`) and, within a rank, as it came; what is posted meanwhile waits for the
next boundary. So no event is applied twice, none is skipped, and a boundary ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, final

from emu.replica.events import CANCELS_APPLIED, Event, Kind

_CANCELLED: Final = int(Kind.CANCELLED)


@final
class Mailbox:
    """What waits for a boundary, and what the boundary of now has still to apply."""

    posted: deque[Event]
    """What has come since the last boundary began; the actor's inbox."""
    applying: list[Event]
    """Of the boundary that has begun, what is not applied yet, last first."""
    has_applied: bool
    """This boundary has begun to apply: what is posted from now on waits for the next."""

    __slots__ = ("applying", "has_applied", "posted")

    def __init__(self, posted: deque[Event]) -> None:
        self.posted = posted
        self.applying = []
        self.has_applied = False

    def begin_applying(self) -> None:
        """All that is posted now is applied at this boundary; what comes meanwhile at the next."""
        posted = list(self.posted)
        self.posted.clear()
        self.applying = posted
        self.has_applied = True
        if len(posted) == 1 and posted[0].kind != _CANCELLED:
            return
        posted.sort(key=_order)
        cancels = [index for index, event in enumerate(posted) if event.kind == _CANCELLED]
        if cancels:
            posted.insert(cancels[-1] + 1, CANCELS_APPLIED)
        posted.reverse()

    def go_past(self) -> None:
        """This boundary takes another step: what is posted waits for the next boundary."""
        self.has_applied = True

    def pending(self) -> Sequence[Event]:
        """Events that are not applied yet."""
        return [*reversed(self.applying), *self.posted] if self.applying else self.posted

    def empty(self) -> list[Event]:
        """The process is gone: what waited, of which nothing is applied any more."""
        waiting = list(self.pending())
        self.applying = []
        self.posted.clear()
        return waiting


def _order(event: Event) -> int:
    return event.order
