"""The free list of a pool: first in, first out, with removal from the middle, in whole runs.

Blocks are freed and taken many at a time, so the list is a queue of runs (arrays of ids), and a run
is cut where a taker has enough. A block that is removed out of turn (a cache hit) stays in its run
as a dead entry; a walk that reaches the run leaves the dead out. A block's home is the run that
holds it alive: -1 = it is not free.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Ids: TypeAlias = "NDArray[np.int64]"


class _Run:
    """Blocks that were freed together, in order."""

    __slots__ = ("at", "dead", "ids", "serial")

    def __init__(self, serial: int, ids: Ids) -> None:
        self.serial = serial
        self.ids = ids
        self.at = 0
        self.dead = 0


class FreeList:
    """Blocks in the order in which they will be taken."""

    def __init__(self) -> None:
        import numpy as np

        self.count = 0
        self._home = np.full(64, -1, dtype=np.int64)
        self._runs: deque[_Run] = deque()
        self._by_serial: dict[int, _Run] = {}
        self._serial = 0

    def reach(self, blocks: int) -> None:
        """Ids up to `blocks` may come."""
        import numpy as np

        if blocks > len(self._home):
            more = np.full(max(blocks, 2 * len(self._home)) - len(self._home), -1, dtype=np.int64)
            self._home = np.concatenate((self._home, more))

    def append(self, ids: Ids) -> None:
        """Put blocks at the tail, in this order."""
        if len(ids) == 0:
            return
        run = _Run(self._serial, ids)
        self._home[ids] = self._serial
        self._runs.append(run)
        self._by_serial[self._serial] = run
        self._serial += 1
        self.count += len(ids)

    def remove(self, ids: Ids) -> None:
        """Take these blocks, wherever they stand."""
        import numpy as np

        homes = self._home[ids]
        self._home[ids] = -1
        self.count -= len(ids)
        for serial, dead in zip(*np.unique(homes, return_counts=True), strict=True):
            self._by_serial[int(serial)].dead += int(dead)

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """By block, whether it is in this list."""
        found: NDArray[np.bool_] = self._home[ids] >= 0
        return found

    def take(self, count: int) -> Ids:
        """Take blocks from the head."""
        import numpy as np

        assert count <= self.count
        parts: list[Ids] = []
        left = count
        while left:
            run = self._head()
            part = run.ids[run.at : run.at + left]
            run.at += len(part)
            left -= len(part)
            parts.append(part)
        self.count -= count
        taken = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._home[taken] = -1
        return taken

    def pop(self) -> int:
        """Take the block at the head."""
        run = self._head()
        block = int(run.ids[run.at])
        run.at += 1
        self.count -= 1
        self._home[block] = -1
        return block

    def clear(self) -> None:
        """Nothing is free."""
        self.count = 0
        self._home.fill(-1)
        self._runs.clear()
        self._by_serial.clear()

    def order(self) -> Ids:
        """All of it, from the head."""
        import numpy as np

        if not self._runs:
            return np.empty(0, dtype=np.int64)
        parts = [run.ids[run.at :] for run in self._runs]
        ids: Ids = np.concatenate(parts)
        serials = np.repeat([run.serial for run in self._runs], [len(part) for part in parts])
        alive: Ids = ids[self._home[ids] == serials]
        return alive

    def _head(self) -> _Run:
        """The first run with a block, without dead entries."""
        while True:
            run = self._runs[0]
            if run.dead:
                ids = run.ids[run.at :]
                run.ids = ids[self._home[ids] == run.serial]
                run.at = run.dead = 0
            if run.at < len(run.ids):
                return run
            self._runs.popleft()
            del self._by_serial[run.serial]


class RetainingFreeList:
    """A free list some of whose blocks are kept back for a time, and taken last.

    Blocks are kept by the priority of their request (a smaller number is more urgent). They are
    taken when no other is left: the least urgent first, within a priority those kept longest ago.
    One whose time is over goes to the tail of the others, as in TensorRT-LLM. All of them are free:
    keeping one refuses no request a block.
    """

    def __init__(self, ttl_ns: int) -> None:
        import numpy as np

        self.count = 0
        self._ttl_ns = ttl_ns
        self._now_ns = 0
        self._plain = FreeList()
        self._kept: dict[int, FreeList] = {}
        """By priority."""
        self._order: list[int] = []
        """Priorities, the least urgent first."""
        self._size = 64
        self._serial = 0
        self._kept_as = np.zeros(64, dtype=np.int64)
        """By block, the serial number of its last keeping."""
        self._expiries: deque[tuple[int, int, int, Ids]] = deque()
        """(until, serial number, priority, blocks), in order of time."""

    def reach(self, blocks: int) -> None:
        """Ids up to `blocks` may come."""
        import numpy as np

        for part in (self._plain, *self._kept.values()):
            part.reach(blocks)
        if blocks > self._size:
            more = max(blocks, 2 * self._size) - self._size
            self._kept_as = np.concatenate((self._kept_as, np.zeros(more, dtype=np.int64)))
            self._size += more

    def append(self, ids: Ids) -> None:
        """Put blocks at the tail, in this order."""
        self._plain.append(ids)
        self.count += len(ids)

    def keep(self, ids: Ids, priority: int) -> None:
        """Put blocks at the tail of those that are kept for requests of this priority."""
        if len(ids) == 0:
            return
        if priority not in self._kept:
            self._kept[priority] = FreeList()
            self._kept[priority].reach(self._size)
            self._order = sorted(self._kept, reverse=True)
        until_ns = self._now_ns + self._ttl_ns
        self._kept[priority].append(ids)
        self._serial += 1
        self._kept_as[ids] = self._serial
        self._expiries.append((until_ns, self._serial, priority, ids))
        self.count += len(ids)

    def expire(self, now_ns: int) -> None:
        """It is now so late: blocks whose time is over are like any other."""
        self._now_ns = now_ns
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, serial, priority, ids = self._expiries.popleft()
            kept = self._kept[priority]
            over = ids[kept.has(ids) & (self._kept_as[ids] == serial)]
            if len(over):
                kept.remove(over)
                self._plain.append(over)

    def remove(self, ids: Ids) -> None:
        """Take these blocks, wherever they stand."""
        self.count -= len(ids)
        for part in (self._plain, *self._kept.values()):
            here = ids[part.has(ids)]
            if len(here):
                part.remove(here)

    def take(self, count: int) -> Ids:
        """Take blocks from the head."""
        import numpy as np

        assert count <= self.count
        self.count -= count
        parts: list[Ids] = []
        for part in (self._plain, *[self._kept[priority] for priority in self._order]):
            now = min(count, part.count)
            if now:
                parts.append(part.take(now))
                count -= now
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def pop(self) -> int:
        """Take the block at the head."""
        return int(self.take(1)[0])

    def clear(self) -> None:
        """Nothing is free."""
        self.count = 0
        self._plain.clear()
        for kept in self._kept.values():
            kept.clear()
        self._expiries.clear()

    def order(self) -> Ids:
        """All of it, from the head."""
        import numpy as np

        kept = [self._kept[priority].order() for priority in self._order]
        order: Ids = np.concatenate([self._plain.order(), *kept])
        return order
