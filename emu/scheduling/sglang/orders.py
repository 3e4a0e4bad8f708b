"""In which order SGLang looks at waiting requests (`scheduler.schedule_policy`).

The queue is a list: new and retracted requests join at its end. `fcfs` leaves it so; the others
sort it anew for each prefill batch, keeping the order of equals:

* `lpm`: longest cached prefix first. Of requests with (nearly) none that share a prefix only the
  first keeps its place; the rest go last, because they will find it cached a batch later. A long
  queue (more than 128) stays as it is.
* `dfs-weight`: down the tree of cached prefixes, the branch with most waiting requests first.
* `lof`: longest output first. `random`.

Without a prefix cache the first two are `fcfs`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final, final

from emu.kv.prefix_tree import Node, PrefixTree, content_of
from emu.kv.tree_pool import TreePool
from emu.request import Request
from emu.scheduling.queues import WaitingQueue

_SORTED_MAX: Final = 128
"""Waiting requests up to which `lpm` sorts."""
_SHORT_TOKENS: Final = 32
"""A cached prefix up to this counts as none."""
_SHARED_TOKENS: Final = 32
"""A prefix that waiting requests share counts from this length on."""


@final
class ListQueue(WaitingQueue):
    """Requests in the order in which they came here, or were sorted last."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: dict[int, Request] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._requests

    def append(self, request: Request) -> None:
        self.prompt_tokens += request.prompt_tokens
        self.count += 1
        self._requests[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """A request that was retracted goes to the end, like any other."""
        self.append(request)

    def head(self) -> Request:
        return self._requests[next(iter(self._requests))]

    def remove(self, request: Request) -> bool:
        if self._requests.pop(request.request_id, None) is None:
            return False
        self.prompt_tokens -= request.prompt_tokens
        self.count -= 1
        return True

    def sort(self, requests: Sequence[Request]) -> None:
        """The same requests in another order."""
        self._requests = {request.request_id: request for request in requests}


@final
class Order:
    """How the queue is sorted before a prefill batch is formed."""

    def __init__(self, policy: str, pool: TreePool, seed: int = 0) -> None:
        is_aware = policy in ("lpm", "dfs-weight")
        self.policy = "fcfs" if is_aware and not pool.caches else policy
        self._pool = pool
        self._random = random.Random(seed)

    def apply(self, queue: ListQueue) -> None:
        """Sort the queue."""
        policy = self.policy
        if policy == "fcfs" or (policy == "lpm" and queue.count > _SORTED_MAX):
            return
        waiting = list(queue)
        if policy == "lof":
            waiting.sort(key=_longest_output)
        elif policy == "random":
            self._random.shuffle(waiting)
        else:
            nodes, repeated = self._prefixes(waiting)
            if policy == "lpm":
                ranks = {
                    one.request_id: 1 if one.request_id in repeated else -node.end
                    for one, node in zip(waiting, nodes, strict=True)
                }
                waiting.sort(key=lambda one: ranks[one.request_id])
            else:
                waiting = _down_the_tree(self._pool.tree, waiting, nodes)
        queue.sort(waiting)

    def _prefixes(self, waiting: Sequence[Request]) -> tuple[list[Node], set[int]]:
        """Where the cached prefix of each ends, and those that repeat one ahead of them."""
        nodes: list[Node] = []
        repeated: set[int] = set()
        queued = PrefixTree()
        for request in waiting:
            reached = request.reached_tokens
            node = self._pool.find(request, reached)
            nodes.append(node)
            if node.end > _SHORT_TOKENS:
                continue
            content = content_of(request)
            if queued.match(content, reached).end >= _SHARED_TOKENS:
                repeated.add(request.request_id)
            else:
                queued.insert(content, reached)
        return nodes, repeated


def _longest_output(request: Request) -> int:
    return -request.max_output_tokens


def _down_the_tree(
    tree: PrefixTree, waiting: Sequence[Request], nodes: Sequence[Node]
) -> list[Request]:
    """Requests below a node before those that end there, heavy branches first."""
    at: dict[Node, list[Request]] = {}
    for request, node in zip(waiting, nodes, strict=True):
        at.setdefault(node, []).append(request)
    weights: dict[Node, int] = {}
    below = tree.nodes()
    for node in reversed(below):  # children first
        weight = len(at.get(node, ())) + sum(weights[child] for child in node.children.values())
        weights[node] = weight
    found: list[Request] = []
    stack: list[tuple[Node, bool]] = [(tree.root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            found += at.get(node, ())
            continue
        stack.append((node, True))
        children = sorted(node.children.values(), key=lambda child: -weights[child])
        stack += [(child, False) for child in reversed(children)]
    return found
