"""The double binary tree: one all-reduce of whole messages up a tree and down again.

Owns the tree and the instants at which its ranks are done. The tree hangs below a root with one
child; the rest is a full binary tree, numbered from left to right. Inner ranks reduce what comes
from each child, and again what comes from above, as ASTRA-Sim does; it sends the whole tensor
along every edge. Its second tree, mirrored, serves every other chunk: the ranks that were
leaves are inner ranks there. Source: ASTRA-Sim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def tree_neighbours(npus: int, *, mirrored: bool) -> list[tuple[int, tuple[int, ...]]]:
    """(parent, children) of each position; the root's parent is -1, leaves have no children."""
    parents = [-1] * npus
    children: list[tuple[int, ...]] = [()] * npus

    def hang(first: int, count: int, parent: int) -> int:
        top = first + count // 2
        parents[top] = parent
        if count > 1:
            children[top] = (
                hang(first, count // 2, top),
                hang(top + 1, count // 2, top),
            )
        return top

    children[npus - 1] = (hang(0, npus - 1, npus - 1),)
    if not mirrored:
        return list(zip(parents, children, strict=True))
    last = npus - 1
    return [
        (
            -1 if parents[last - at] < 0 else last - parents[last - at],
            tuple(last - child for child in reversed(children[last - at])),
        )
        for at in range(npus)
    ]


def tree_ends_ns(
    starts_ns: Sequence[int],
    net: Callable[[int, int], int],
    *,
    delay_ns: int,
    reduction_ns: int,
    mirrored: bool = False,
) -> list[int]:
    """When each rank is done; a power of two of them, 2 or more. `net`: time between positions."""
    npus = len(starts_ns)
    last = npus - 1
    if mirrored:
        starts_ns = starts_ns[::-1]

    def moved_ns(source: int, destination: int) -> int:
        return net(last - source, last - destination) if mirrored else net(source, destination)

    root = npus - 1
    ends = [0] * npus

    def up(first: int, count: int) -> tuple[int, int]:
        """The top of the subtree of `count` positions from `first`, and when it sends upwards."""
        top = first + count // 2
        if count == 1:
            return top, starts_ns[top] + delay_ns
        latest = starts_ns[top]
        for child_first in (first, top + 1):
            child, sent = up(child_first, count // 2)
            latest = max(latest, sent + moved_ns(child, top))
        return top, latest + delay_ns + reduction_ns

    def down(first: int, count: int, arrived: int) -> None:
        top = first + count // 2
        if count == 1:
            ends[top] = arrived + delay_ns
            return
        ends[top] = arrived + delay_ns + reduction_ns
        for child_first in (first, top + 1):
            child = child_first + count // 4
            down(child_first, count // 2, ends[top] + moved_ns(top, child))

    top, sent = up(0, npus - 1)
    ends[root] = max(starts_ns[root], sent + moved_ns(top, root)) + delay_ns + reduction_ns
    down(0, npus - 1, ends[root] + moved_ns(root, top))
    return ends[::-1] if mirrored else ends
