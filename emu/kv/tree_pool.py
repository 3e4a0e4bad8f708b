"""The KV pool of a server whose prefix cache is a tree of tokens (SGLang, TensorRT-LLM).

Owns how many pages are free and which of a request's pages are its own. The others of its pages
stand in the tree (`prefix_tree.py`), which keeps them while the request holds its place there.
`blocks_free` counts cached pages that are not held as free, like all pools do; they are evicted
when something is allocated and truly free pages are fewer: then so many tokens as were asked for
are evicted, not only those that lack.

A request's prompt is cached when its prefill has ended or a chunk of it goes on (`cache`), prompt
and output when it leaves (`release`). What stood in the tree already takes the place of the
request's own copy, which is freed. A request that is retracted caches nothing.

By page (TensorRT-LLM's blocks): what lacks is evicted and no more, as soon as it is taken
(`keep_room`); the page that a request has begun is cached too when it leaves; and a request that
goes on inside a page copies it (`take_part`).

With states (`states_total`, SGLang's `MambaRadixCache` without buffer): a request has a state of
its own from the moment on in which a prefix is found for it or it joins a batch; what is cached of
a request that goes on is a copy, what is cached of one that leaves is its own. A batch wants three
states free for each of its requests (`make_state_room`); those of the tree are evicted for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from emu.kv.counting import CountingPool
from emu.kv.prefix_tree import Content, Node, PrefixTree, content_of
from emu.request import Request


@final
class Place:
    """Where a request stands in the tree."""

    content: Content
    node: Node
    """The last node that it holds."""
    tokens: int
    """Of its tokens, those that the tree keeps for it."""
    priority: int

    __slots__ = ("content", "node", "priority", "tokens")

    def __init__(self, content: Content, node: Node, tokens: int, priority: int) -> None:
        self.content = content
        self.node = node
        self.tokens = tokens
        self.priority = priority


@final
class TreePool(CountingPool):
    """Pages of KV, and the cache of prefixes in them."""

    has_identities = True

    def __init__(
        self,
        blocks_total: int,
        block_size: int,
        *,
        caches: bool = True,
        eviction: str = "lru",
        by_page: bool = False,
        states_total: int = 0,
    ) -> None:
        """`caches` False: a page is free as soon as no request has it. `by_page`: pages are evicted
        one by one, and found in part. `states_total`: of layers with states; 0 = none are kept."""
        super().__init__(blocks_total, block_size)
        self.caches = caches
        self.states_total = states_total
        self.tree = PrefixTree(block_size, eviction, by_page=by_page, keeps_states=states_total > 0)
        self._stateful: dict[int, bool] = {}
        """Requests that have a state of their own."""

    @property
    def evictable_blocks(self) -> int:
        """Cached pages that are not held."""
        return self.tree.evictable // self.block_size

    @property
    def tokens_free(self) -> int:
        """Tokens that can be had, cached ones included."""
        return self.blocks_free * self.block_size

    # Finding.
    def find(self, request: Request, tokens: int) -> Node:
        """Where the longest cached prefix of its first `tokens` tokens ends."""
        if not self.caches:
            return self.tree.root
        return self.tree.match(content_of(request), tokens)

    def match(self, request: Request) -> int:
        """Prompt tokens of a request from outside that are cached now."""
        if not self.caches:
            return 0
        return self.tree.peek(content_of(request), request.prompt_tokens - 1)

    def take_part(self, request: Request, node: Node, tokens: int, *, copies: bool) -> int:
        """Tokens of the page behind a node that a request need not compute, up to `tokens` on the
        path. The page is copied; one that nothing holds or follows is taken itself, the only way if
        not `copies`."""
        if not self.caches:
            return 0
        matched, child = self.tree.part(node, content_of(request), tokens)
        if child is None:
            return 0
        is_idle = not (child.locks or child.children)
        if is_idle and child.end - child.start == self.block_size:
            self.tree.drop(child)  # it is free now, and one of those that the request takes
            return matched
        return matched if copies else 0

    # States.
    @property
    def states_free(self) -> int:
        """Neither a request's nor the tree's."""
        return self.states_total - len(self._stateful) - self.tree.states

    def make_state_room(self, count: int) -> None:
        """So many states are about to be taken: evict what is lacking."""
        if self.states_total and self.states_free < count:
            self.tree.evict_states(count - self.states_free)

    def take_state(self, request: Request, node: Node) -> None:
        """The request gets a state of its own, a copy of that of a node, if it has none.

        Where none can be had it waits without one (SGLang would stop there).
        """
        if not self.states_total or request.request_id in self._stateful:
            return
        if self.states_free < 1:
            self.lock(node)
            self.tree.evict_states(1)
            self.unlock(node)
        if self.states_free > 0:
            self._stateful[request.request_id] = True

    def drop_state(self, request: Request) -> None:
        """The request has no state of its own any more."""
        self._stateful.pop(request.request_id, None)

    # Holding.
    def lock(self, node: Node) -> None:
        """Hold a node: it can be evicted no more."""
        before = self.tree.evictable
        self.tree.lock(node)
        self.blocks_free -= (before - self.tree.evictable) // self.block_size

    def unlock(self, node: Node) -> None:
        """Let go of a node."""
        before = self.tree.evictable
        self.tree.unlock(node)
        self.blocks_free += (self.tree.evictable - before) // self.block_size

    def begin(self, request: Request, node: Node) -> None:
        """The request runs, with a prefix that is found up to this node."""
        assert not request.kv_blocks
        self.lock(node)
        place = Place(content_of(request), node, node.end, request.priority)
        request.held = place
        request.kv_blocks = node.end // self.block_size

    def make_room(self, tokens: int) -> None:
        """So many tokens are about to be taken: evict as many if fewer are truly free."""
        if (self.blocks_free - self.evictable_blocks) * self.block_size < tokens:
            self.tree.evict(tokens)

    def keep_room(self) -> None:
        """Pages have been taken: those that were cached in them are no more."""
        lacking = self.evictable_blocks - self.blocks_free
        if lacking > 0:
            self.tree.evict(lacking * self.block_size)

    def cache(self, request: Request, tokens: int) -> None:
        """Others can find the first `tokens` tokens of a request that goes on."""
        place: Place | None = request.held
        if place is None or not self.caches:
            return
        tree, size = self.tree, self.block_size
        before = tree.evictable
        if not self.states_total:
            had = tree.insert(place.content, tokens, place.priority)
        else:
            self.make_state_room(1)
            if self.states_free < 1:
                return
            had, _ = tree.insert_state(place.content, tokens, place.priority)
        node = tree.match(place.content, tokens)
        assert node.end == tokens - tokens % size
        twice = had - place.tokens
        tree.unlock(place.node)
        tree.lock(node)
        place.node = node
        place.tokens = node.end
        self.blocks_free += (twice + tree.evictable - before) // size

    # Giving back.
    def release(self, request: Request) -> None:
        """The request leaves; what it has computed is cached."""
        self.leave(request, request.computed_tokens)

    def leave(self, request: Request, tokens: int) -> None:
        """The request leaves, its first `tokens` tokens are cached. None of them: it starts over,
        and what only it has is just free."""
        place: Place | None = request.held
        blocks = request.kv_blocks
        request.kv_blocks = 0
        request.held = None
        self._give_back(request.request_id, blocks, place, tokens)

    def _give_back(self, request_id: int, blocks: int, place: Place | None, tokens: int) -> None:
        """Pages of a request that has gone, of which the first `tokens` tokens are cached."""
        has_state = self._stateful.pop(request_id, False)
        if place is None:
            self.blocks_free += blocks
        else:
            tree, size = self.tree, self.block_size
            before = tree.evictable
            own = blocks - place.tokens // size
            assert own >= 0
            if self.states_total and not has_state:
                tokens = 0
            if self.caches and tokens:
                if self.states_total:  # its own becomes the tree's
                    had, _ = tree.insert_state(place.content, tokens, place.priority)
                else:
                    had = tree.insert(place.content, tokens, place.priority)
                own -= max(0, tokens // size - had // size)
                if tree.by_page and tokens % size:
                    node = tree.match(place.content, tokens)
                    own -= tree.add_tail(node, place.content, tokens)
            tree.unlock(place.node)
            self.blocks_free += own + (tree.evictable - before) // size
        assert self.blocks_free <= self.blocks_total

    # Taking.
    def take(self, count: int) -> list[Any]:
        """Pages for a request that is not here yet."""
        if self.tree.by_page:
            taken = super().take(count)
            self.keep_room()
            return taken
        self.make_room(count * self.block_size)
        return super().take(count)

    def hand_over(self, request: Request, count: int, held: Any) -> None:
        """The request owns pages that were taken."""
        request.kv_blocks = count
        request.held = Place(content_of(request), self.tree.root, 0, request.priority)

    def put_back_held(self, request_id: int, count: int, held: Any) -> None:
        """Return the pages of a request that left with its KV."""
        self._give_back(request_id, count, held, 0)

    def clear(self) -> None:
        """Forget everything; all pages are free."""
        super().clear()
        self.tree.clear()
        self._stateful.clear()

    # Seeing.
    def recount(self, holders: Sequence[tuple[int, Any]]) -> list[str]:
        """Problems found by counting all pages from scratch.

        `holders`: of each, how many pages it has, and its `Place`.
        """
        tree, size = self.tree, self.block_size
        problems = tree.problems()
        own = 0
        for blocks, held in holders:
            shared = held.tokens // size if isinstance(held, Place) else 0
            if shared > blocks:
                problems.append(f"{blocks} pages held, {shared} of them in the tree")
            own += blocks - shared
        used = own + tree.locked // size
        if self.blocks_free != self.blocks_total - used:
            problems.append(f"{self.blocks_free} of {self.blocks_total} pages free, {used} used")
        if self.states_total and self.states_free < 0:
            problems.append(f"{-self.states_free} states more than there are")
        if self.blocks_free < self.evictable_blocks:
            problems.append(f"{self.blocks_free} pages free, {self.evictable_blocks} are cached")
        return problems
