"""What a replica is in the middle of: the iteration in flight, as an object.

A flight is begun by a starter (`starters.py`) or by a handler of live scaling, and says when its
next step is due. It ends, goes on, or another flight follows it. In between it can be settled
(books up to now), cut (it ends earlier), paused and resumed, or lost with its process. It owns all
that has a meaning only while it lasts, and nothing else writes to it. What it brings about is
entered into `Books`; it knows no replica.

What events mean to each of them:

| flight | its time has come | pause | crash | any other event |
|---|---|---|---|---|
| `Idle` | - | - | - | the replica looks at once |
| `Step` | complete | the rest runs later | it ran for nothing | is seen when it ends |
| `Run` | complete, as far as it came | leaves a `Step` | as of that `Step` | may cut it |
| `Staged` | batches leave, or form again | all ends later | all is lost | is seen at once |
| `Member` | complete, or the next wave | the rest runs later | leaves its wave | ends its promise |
| `Layered` | the replica looks | the layer ends later | all is lost | is seen at once |
| `Relayed` | first tokens | the rest runs later | it ran for nothing | is seen when it ends |
| `Awaiting` | - | begins after it | gives up | the last thing awaited begins it |
| `Measured` | - | begins after it | gives up | the answer begins it |
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, final

from emu.kernel.clock import AT_DUE, NOW, PARK
from emu.units import NS_PER_MS

if TYPE_CHECKING:
    from emu.scheduling.base import Batch

APPLY: Final = -7
"""`Flight.due_ns`: what is posted is to be applied now, then the flight goes on at once."""


class Sort(enum.IntEnum):
    """Which flight it is: the row of the table of flights (`table.py`)."""

    IDLE = 0
    STEP = 1
    RUN = 2
    STAGED = 3
    MEMBER = 4
    LAYERED = 5
    RELAYED = 6
    AWAITING = 7
    MEASURED = 8


class Flight:
    """Base of all flights; the defaults are those of one that nothing but its end concerns."""

    is_open: bool
    """Something else may begin now: nothing is in flight, or there is room beside it."""
    is_joint: bool
    """It is planned together with others, in turn or in waves: any event ends that (`unroll`)."""
    is_leap: bool
    """Several iterations are under way: the books may lag behind (`settle`), and what others do to
    them may cut it. Else nothing need be settled, put off, or asked whether it holds."""
    is_cut: bool
    """It ends earlier than it had said, which its actor has not been told yet."""
    due_ns: int
    """When its next step comes; `PARK` = not before something else happens."""

    __slots__ = ("due_ns", "is_cut", "is_joint", "is_leap", "is_open")

    @property
    def sort(self) -> Sort:
        """Which flight it is."""
        raise NotImplementedError

    def end(self) -> Flight:
        """Its time has come, or something has interrupted it: what is in flight now."""
        raise NotImplementedError

    def settle(self) -> int:
        """Bring the books up to now; iterations of a leap that have ended."""
        return 0

    def steps_ended(self) -> int:
        """Iterations of a leap that have ended by now, without a look at the books."""
        return 0

    def boundary_ns(self, done: int) -> int:
        """When the iteration in flight ends, -1 if there is none; `done` of a leap have ended."""
        return -1

    def tokens_settled(self, done: int) -> tuple[int, int]:
        """(prefill, decode) tokens of the `done` iterations of a leap that have ended."""
        return 0, 0

    def align(self, now_ns: int) -> int:
        """When the replica looks at what comes now (see `Actor.align`)."""
        return AT_DUE

    def holds_batch(self) -> bool:
        """A batch is in flight, or about to be."""
        return True

    def batches(self) -> list[Batch]:
        """Those in flight at once that may have members of their own (a pipeline's)."""
        return []

    def puts_off(self, done: int) -> bool:
        """It ends before it would see the request that has just come, and is cut to that.

        False if that is not known without settled books.
        """
        return False

    def still_holds(self, done: int) -> bool:
        """The settled books have changed: it may go on to its end, or to an earlier one."""
        return False

    def unroll(self) -> None:
        """Something happens: what is in flight is there as stepping has it, and no more planned."""

    def tells(self, now_ns: int) -> str:
        """What it is and how far it has come, in a short phrase; changes nothing."""
        raise NotImplementedError

    def met(self, wait_ns: int) -> int:
        """One thing less to wait for: how urgently the replica looks at it.

        `wait_ns`: what the batch waits for its group inside its layers; -1 = that is not known.
        """
        return 0

    def lose_recalls(self, tier: int) -> tuple[int, int]:
        """A tier of KV is empty: (tokens to be computed instead, how urgently to look)."""
        return 0, 0

    def stale_tiers(self) -> list[int]:
        """Tiers from which KV is still read that they have lost: there must be none."""
        return []

    def learn(self, cost_ns: int) -> bool:
        """A backend outside simulated time has answered; False if nothing was asked here."""
        return False

    def pause(self) -> Flight:
        """The process stands still from now on: what is in flight then."""
        return self

    def resume(self, since_ns: int) -> None:
        """The process that has stood still since then goes on."""

    def lose(self) -> Flight:
        """The process is gone, and all of this with it: what is in flight now."""
        return IDLE


@final
class Idle(Flight):
    """Nothing is in flight."""

    __slots__ = ()

    def __init__(self) -> None:
        self.is_open = True
        self.is_joint = self.is_leap = self.is_cut = False
        self.due_ns = PARK

    @property
    def sort(self) -> Sort:
        """Which flight it is."""
        return Sort.IDLE

    def end(self) -> Flight:
        """Nothing ends."""
        return self

    def tells(self, now_ns: int) -> str:
        """That there is nothing."""
        return "nothing is in flight"

    def align(self, now_ns: int) -> int:
        """At once."""
        return NOW

    def holds_batch(self) -> bool:
        """None."""
        return False

    def pause(self) -> Flight:
        """No row of iterations goes on."""
        return IDLE


IDLE: Final = Idle()
BETWEEN: Final = Idle()
"""Nothing is in flight, and an iteration that needs nothing but scheduler and latency backend was:
the next follows it at once if there is work. Whatever ends such a row takes its place in the queue
of the instant before the replica goes on with it."""


def words_of(batch: Batch) -> str:
    """Which batch, and how many members it has."""
    shape = batch.shape
    members = shape.sequences or shape.decode_count + len(shape.prefill_new)
    return f"batch {batch.batch_id} of {members} request{'' if members == 1 else 's'}"


def until(due_ns: int, now_ns: int) -> str:
    """When something ends, as seen now, ms."""
    return f"ends in {(due_ns - now_ns) / NS_PER_MS:.3f} ms"
