"""A radix tree over the content of blocks: which run of blocks holds what.

Owns the tree, and of each run of blocks its positions, its references and where its content
stands. Does not know which blocks are free (`blocks.py`). A request's content is a `Chain` of
units: hash ids of a trace that stand for several blocks each, or the key of each block. A path from
a root spells units; a node is a run of them that nothing has branched off yet, with the runs of
blocks that hold its positions. Finding, adding and forgetting cost a step for each run and nothing
for each block.

Rules, those of an index key -> block: a position has one block, the newest; the older one keeps
its content, unseen, until it is taken for something else. A block whose parents are forgotten
stays, and is found again when they come back.

A run is cut where only a part of it changes: where a chain branches off, where a hit ends, where
a newer block replaces an older one. What holds the whole of it finds the other part by `rest`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from emu.kv.keys import Chain, keys_of_units

UNNAMED: Final = -1


@final
class Run:
    """Blocks at positions in a row that share one fate: held by the same, or free in a row."""

    start: int
    """First position."""
    end: int
    """Position behind the last."""
    references: int
    """Requests that hold all of it; 0 = it is free."""
    node: Node | None
    """Where its content can be found; None = nowhere."""
    rest: Run | None
    """What has been cut off its end since the oldest of its holders got it."""
    base: int
    """The name of a block is `base` + its position, for what watches the pool."""
    serial: int
    """Its last keeping (`FreeList.keep`)."""
    before: Run | None
    """In the free list."""
    after: Run | None

    __slots__ = (
        "after",
        "base",
        "before",
        "end",
        "node",
        "references",
        "rest",
        "serial",
        "start",
    )

    def __init__(self, start: int, end: int, references: int, base: int = UNNAMED) -> None:
        self.start = start
        self.end = end
        self.references = references
        self.node = None
        self.rest = None
        self.base = base
        self.serial = 0
        self.before = None
        self.after = None

    def split(self, position: int) -> Run:
        """Cut here; the part from `position` on, which is a new run. Both are what it was."""
        upper = Run(position, self.end, self.references, self.base)
        self.end = position
        upper.serial = self.serial
        if self.references:
            upper.rest = self.rest
            self.rest = upper
        ahead = self.before
        if ahead is not None:  # free: the last block is taken first
            upper.before = ahead
            upper.after = self
            ahead.after = upper
            self.before = upper
        node = self.node
        if node is not None:
            upper.node = node
            node.runs.insert(node.runs.index(self) + 1, upper)
        return upper


@final
class Held:
    """The blocks of a request that have content, from position 0 on."""

    runs: list[Run]
    """As they were when the request got them; since then they may have been cut."""
    blocks: int

    __slots__ = ("blocks", "runs")

    def __init__(self) -> None:
        self.runs = []
        self.blocks = 0

    def last(self) -> Run | None:
        """The last run as it is now."""
        if not self.runs:
            return None
        run = self.runs[-1]
        while run.end < self.blocks:
            part = run.rest
            assert part is not None
            run = part
        return run

    def parts(self) -> list[Run]:
        """The runs as they are now."""
        found: list[Run] = []
        at = 0
        for run in self.runs:
            # What was cut off stands between this run and the next one.
            while at < run.start:
                part = found[-1].rest
                assert part is not None
                found.append(part)
                at = part.end
            found.append(run)
            at = run.end
        while at < self.blocks:
            part = found[-1].rest
            assert part is not None
            found.append(part)
            at = part.end
        return found


@final
class Node:
    """A run of units, and what holds them."""

    parent: Node | None
    start: int
    """Blocks on the path before it."""
    per: int
    """Blocks of one unit."""
    units: list[int]
    runs: list[Run]
    """Runs of blocks that can be found here, by position."""
    children: dict[int, Node]

    __slots__ = ("children", "parent", "per", "runs", "start", "units")

    def __init__(self, parent: Node | None, start: int, per: int, units: list[int]) -> None:
        self.parent = parent
        self.start = start
        self.per = per
        self.units = units
        self.runs = []
        self.children = {}


def _same(left: list[int], at: int, right: list[int], begin: int) -> int:
    """How many units are equal from `at` and `begin` on."""
    count = min(len(left) - at, len(right) - begin)
    if left[at : at + count] == right[begin : begin + count]:
        return count
    index = 0
    while left[at + index] == right[begin + index]:
        index += 1
    return index


@final
class RadixIndex:
    """Content -> runs of blocks."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}

    def clear(self) -> None:
        """Nothing can be found."""
        self._roots.clear()

    def find(self, chain: Chain, limit: int, found: list[Run]) -> int:
        """Blocks that hold the first `limit` positions, up to the first that has none; how many.

        Their runs are put into `found`; the last one may be longer.
        """
        node = self._roots.get(chain.root)
        units, per, at = chain.units, chain.per, 0
        if limit > chain.blocks:
            limit = chain.blocks
        while node is not None and at < limit:
            begin = at // per
            node = node.children.get(units[begin])
            if node is None:
                break
            same = _same(node.units, 0, units, begin)
            end = at + same * per
            is_whole = same == len(node.units)
            if end > limit:
                end, is_whole = limit, False
            for run in node.runs:
                if run.start != at:
                    return at  # a hole
                found.append(run)
                at = run.end
                if at >= end:
                    break
            if at > end:
                at = end
            if at < end or not is_whole:
                break
        return at

    def add(self, chain: Chain, run: Run, before: Run | None) -> bool:
        """The run holds its positions of a chain from now on; `before` those ahead of it.

        True if the first of it has become a part of `before`, and the rest what is cut off that.
        """
        per, units, last = chain.per, chain.units, run.end
        at = run.start
        node = None if before is None or before.end != at else before.node
        if node is None:
            node = self._path(chain, at)
            before = None
        joined = False
        while at < last:
            inside = at - node.start
            if inside == len(node.units) * per:
                node = self._below(node, chain, at, last)
                inside = at - node.start
            number = inside // per
            same = _same(node.units, number, units, at // per)
            if same:
                number += same
                end = node.start + number * per
                upper = run.split(end) if end < last else run
                if (
                    before is not None
                    and before.node is node
                    and before.references == 1
                    and before.base == run.base
                    and before is node.runs[-1]
                ):  # held by the same request alone
                    before.end = run.end
                    before.rest = run.rest
                    joined = True
                else:
                    _put(node, run)
                before = None
                run = upper
                at = end
            if at < last and number < len(node.units):
                node = self._cut(node, number)
        return joined

    def forget(self, run: Run, blocks: int) -> None:
        """The last `blocks` of a free run will hold something else."""
        node = run.node
        assert node is not None
        run.end -= blocks
        if run.end == run.start:
            run.node = None
            node.runs.remove(run)
        # Positions at the end of a path that nothing stands in go, and nodes without any.
        while node.parent is not None and not node.children:
            if node.runs:
                stand = -(-(node.runs[-1].end - node.start) // node.per)
                if stand < len(node.units):
                    del node.units[stand:]
                return
            parent = node.parent
            del parent.children[node.units[0]]
            node = parent

    def _path(self, chain: Chain, first: int) -> Node:
        """The node that ends where position `first` begins, or has it."""
        node = self._roots.get(chain.root)
        if node is None:
            node = self._roots[chain.root] = Node(None, 0, chain.per, [])
        at = 0
        while at < first:  # what stands before may not be here: a path without blocks leads there
            if at - node.start == len(node.units) * node.per:
                node = self._below(node, chain, at, first)
            number = (at - node.start) // node.per
            same = _same(node.units, number, chain.units, at // node.per)
            at = min(first, node.start + (number + same) * node.per)
            if at < first and number + same < len(node.units):
                node = self._cut(node, number + same)
        return node

    def _below(self, node: Node, chain: Chain, at: int, last: int) -> Node:
        """The node where a chain goes on after a full one: a child, a new one, or itself."""
        per = chain.per
        begin = at // per
        child = node.children.get(chain.units[begin])
        if child is not None:
            return child
        more = chain.units[begin : -(-last // per)]
        if node.parent is None or node.children:
            child = node.children[more[0]] = Node(node, at, per, more)
            return child
        node.units += more
        return node

    def _cut(self, node: Node, units: int) -> Node:
        """Cut a node after so many units; the upper part, which is a new node."""
        parent = node.parent
        assert parent is not None
        position = node.start + units * node.per
        upper = Node(parent, node.start, node.per, node.units[:units])
        below: list[Run] = []
        for run in list(node.runs):
            if run.start < position < run.end:
                below.append(run.split(position))
            if run.start < position:
                upper.runs.append(run)
                run.node = upper
            else:
                below.append(run)
        node.runs = below
        parent.children[upper.units[0]] = upper
        node.units = node.units[units:]
        node.start = position
        node.parent = upper
        if below or node.children:
            upper.children[node.units[0]] = node
        return upper

    def nodes(self) -> Iterator[tuple[str, list[int], Node]]:
        """Each node with its root and the units on the path to its end."""
        waiting: list[tuple[str, list[int], Node]]
        waiting = [(root, [], node) for root, node in self._roots.items()]
        while waiting:
            root, before, node = waiting.pop()
            path = before + node.units
            yield root, path, node
            waiting += [(root, path, child) for child in node.children.values()]

    def keys(self, block_size: int) -> frozenset[int]:
        """Keys of all blocks that can be found."""
        found: set[int] = set()
        for root, path, node in self.nodes():
            keys = keys_of_units(root, path, block_size)
            for run in node.runs:
                found.update(keys[run.start : run.end])
        return frozenset(found)

    def problems(self) -> list[str]:
        """Where the tree contradicts itself."""
        found = []
        for _, _, node in self.nodes():
            at = node.start
            for run in node.runs:
                if run.node is not node:
                    found.append("a run is found in a node that is not its own")
                if not at <= run.start < run.end:
                    found.append("the runs of a node are not in a row")
                at = run.end
            if at > node.start + len(node.units) * node.per:
                found.append("a run stands beyond its node")
            if node.parent is not None and not (node.runs or node.children):
                found.append("a node without blocks is left")
        return found


def _put(node: Node, run: Run) -> None:
    """The run can be found in the node; what stood at its positions can be found no more."""
    runs = node.runs
    run.node = node
    if not runs or runs[-1].end <= run.start:
        runs.append(run)
        return
    index = 0
    while runs[index].end <= run.start:
        index += 1
    while index < len(runs) and runs[index].start < run.end:
        old = runs[index]
        if old.start < run.start:
            old.split(run.start)
            index += 1
            continue
        if old.end > run.end:
            old.split(run.end)
        old.node = None
        del runs[index]
    runs.insert(index, run)
