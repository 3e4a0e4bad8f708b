"""A tree of token prefixes with locks and eviction from its leaves: SGLang's, and TensorRT-LLM's.

Owns which tokens are cached, in nodes of any length, how often they are held, and which go
first. Counts tokens; does not know which slots they stand in, nor what is free (`tree_pool.py`).

Rules. Lengths are cut to whole pages. A match or an insertion refreshes every node on its path, and
cuts the last one where it ends inside. A lock holds a node and all above it; what is not locked can
be evicted, leaf by leaf, each as a whole; a node becomes a leaf when its last child goes.

By page (`by_page`, TensorRT-LLM's blocks): leaves are evicted page by page from their end. The page
that a content has begun is kept too, as a leaf of its own (`add_tail`), and a content that goes on
with the first tokens of a page below a node finds how many they are (`part`).

With states (`keeps_states`, SGLang's `MambaRadixCache`): a node may have the state of its last
token, and is found as far as one stands (`match`); what lies behind is neither used nor held. A
leaf always has one. States are evicted from any node that nothing holds, the one used longest ago
first: an inner node goes on without, a leaf goes as a whole, and so do nodes above it that are left
without state and child. A node that is cut keeps its state at its end. Holding a node holds the KV
of all above it, but no other state.

What a request's tokens are is a `Content`: token ids, or the hashes of long blocks of a trace, and
behind them tokens that only the request itself has. A node refers to the content that it was made
of, so that its length costs nothing.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final, final

from emu.kv.keys import root_of
from emu.request import Prefix, Request

Key = tuple[str, tuple[int, ...]]
"""What tells children of a node apart: their first page."""
Head = tuple[str, int]
"""The first unit of a page."""
_OWN: Final = "own"
_TAIL: Final = "tail"
POLICIES: Final = ("lru", "lfu", "fifo", "mru", "filo", "priority")
"""Orders of eviction. Nothing counts hits here or in the original, so that lfu is lru."""
_FALLS: Final = ("mru", "filo")
"""Orders in which a node that is used again goes sooner, not later."""


@final
class Content:
    """The tokens of one request, prompt and output."""

    root: str
    """Contents of different roots have nothing in common."""
    units: list[int]
    """Token ids, or ids of blocks of `per` tokens."""
    per: int
    known: int
    """Tokens that `units` tell; those behind are the request's own."""
    owner: int
    """The request."""

    __slots__ = ("known", "owner", "per", "root", "units")

    def __init__(self, root: str, units: list[int], per: int, known: int, owner: int) -> None:
        """Each unit stands for `per` tokens; the first `known` tokens count."""
        self.root = root
        self.units = units
        self.per = per
        self.known = known
        self.owner = owner

    def key(self, at: int, page: int) -> Key:
        """The page that begins at token `at`, as a child's key."""
        if at + page > self.known:
            return _OWN, (self.owner,)
        per = self.per
        return self.root, tuple(self.units[at // per : (at + page - 1) // per + 1])

    def head(self, at: int) -> Head:
        """The unit that token `at` is in: pages that begin alike have the same."""
        if at >= self.known:
            return _OWN, self.owner
        return self.root, self.units[at // self.per]

    def common(self, other: Content, start: int, end: int) -> int:
        """Tokens from `start` to `end` that both have; those before are the same."""
        if self.owner == other.owner:
            return end - start
        if self.root != other.root:
            return 0
        known = min(end, self.known, other.known)
        if known <= start:
            return 0
        per = self.per
        first, last = start // per, (known - 1) // per + 1
        mine, theirs = self.units, other.units
        if mine[first:last] == theirs[first:last]:
            return known - start
        while mine[first] == theirs[first]:
            first += 1
        return max(0, first * per - start)


def content_of(request: Request) -> Content:
    """The tokens of a request, worked out once."""
    found = request.chain
    if isinstance(found, Content):
        return found
    content = _content(request.prefix, request)
    request.chain = content
    request.chain_block_size = 0  # no pool of blocks takes it for its own
    return content


def _content(prefix: Prefix | None, request: Request) -> Content:
    owner = request.request_id
    if prefix is not None and prefix.token_ids is not None:
        units: list[int] = prefix.token_ids.tolist()
        return Content(root_of(request, 1), units, 1, len(units), owner)
    if prefix is not None and prefix.hash_ids:
        per = prefix.hash_block_tokens
        known = min(request.prompt_tokens, len(prefix.hash_ids) * per)
        return Content(root_of(request, per), list(prefix.hash_ids), per, known, owner)
    return Content(_OWN, [], 1, 0, owner)


@final
class Node:
    """A run of tokens that nothing has branched off yet."""

    parent: Node | None
    content: Content
    start: int
    """Tokens on the path before it."""
    end: int
    children: dict[Key, Node]
    locks: int
    """Holders of this node or of one below."""
    used: int
    """When it was used last, on the tree's own clock."""
    made: int
    priority: int
    is_listed: bool
    """It stands in the list of leaves."""
    filled: int
    """Tokens on the path up to the last one that is there: less than `end` in a tail."""
    heads: dict[Head, dict[Key, Node]]
    """Children by the first unit of their first page (`by_page`)."""
    has_state: bool
    """The state of its last token stands here (`keeps_states`)."""
    state_locks: int
    """Holders of it."""

    __slots__ = (
        "children",
        "content",
        "end",
        "filled",
        "has_state",
        "heads",
        "is_listed",
        "locks",
        "made",
        "parent",
        "priority",
        "start",
        "state_locks",
        "used",
    )

    def __init__(
        self, parent: Node | None, content: Content, start: int, end: int, now: int
    ) -> None:
        """Tokens `start` to `end` of a content; `now` on the clock of the tree."""
        self.parent = parent
        self.content = content
        self.start = start
        self.end = end
        self.children = {}
        self.locks = 0
        self.used = now
        self.made = now
        self.priority = 0
        self.is_listed = False
        self.filled = end
        self.heads = {}
        self.has_state = False
        self.state_locks = 0


_NO_NODES: Final[dict[Key, Node]] = {}


def _tail_key(leaf: Node) -> Key:
    """No page has it: a tail is never matched as a whole."""
    return _TAIL, (leaf.content.owner,)


@final
class PrefixTree:
    """Cached prefixes, in tokens."""

    def __init__(
        self,
        page_tokens: int = 1,
        policy: str = "lru",
        *,
        by_page: bool = False,
        keeps_states: bool = False,
    ) -> None:
        """`by_page`: leaves are evicted page by page, and pages are found in part."""
        assert policy in POLICIES
        assert policy == "lru" or not keeps_states
        self.page_tokens = page_tokens
        self.policy = policy
        self.by_page = by_page
        self.keeps_states = keeps_states
        self.clear()

    def clear(self) -> None:
        """Nothing is cached."""
        self._clock = 0
        self._serial = 0
        self.root = Node(None, Content(_OWN, [], 1, 0, -1), 0, 0, 0)
        self.root.locks = 1
        self.root.priority = -(1 << 62)
        self.evictable = 0
        """Tokens that are not held."""
        self.locked = 0
        """Tokens that are held."""
        self._leaves: list[tuple[int, int, int, Node]] = []
        """A heap of leaves that are not held: when each goes, as known when it was put in."""
        self.states = 0
        """Nodes with a state."""
        self._stated: list[tuple[int, int, int, Node]] = []
        """A heap of nodes whose state is not held, or was not when they were put in."""

    # Finding.
    def match(self, content: Content, tokens: int) -> Node:
        """The node where the longest cached prefix of the first `tokens` ends; they are used."""
        length = tokens - tokens % self.page_tokens
        if self.keeps_states:
            return self._match_state(content, length)
        node, at = self.root, 0
        now = self._tick()
        while at < length:
            child = node.children.get(content.key(at, self.page_tokens))
            if child is None:
                break
            child.used = now
            end = child.start + self._common(child, content, length)
            if end < child.end:
                return self._cut(child, end)
            node, at = child, end
        return node

    def _match_state(self, content: Content, length: int) -> Node:
        """The last node on the way that has a state; it and those above it are used."""
        node = best = self.root
        while node.end < length:
            child = node.children.get(content.key(node.end, self.page_tokens))
            if child is None:
                break
            end = child.start + self._common(child, content, length)
            if end < child.end:
                self._cut(child, end)
                child.used = self._tick()  # both parts of what is cut are
                break
            node = child
            if node.has_state:
                best = node
        now, used = self._tick(), best
        while used.parent is not None:
            used.used = now
            used = used.parent
        return best

    def peek(self, content: Content, tokens: int) -> int:
        """Tokens of the longest cached prefix; nothing is used or cut."""
        length = tokens - tokens % self.page_tokens
        node, at, stated = self.root, 0, 0
        while at < length:
            child = node.children.get(content.key(at, self.page_tokens))
            if child is None:
                break
            at = child.start + self._common(child, content, length)
            if at < child.end:
                break
            node = child
            if node.has_state:
                stated = at
        return stated if self.keeps_states else at

    def part(self, node: Node, content: Content, tokens: int) -> tuple[int, Node | None]:
        """The tokens of the page behind a node that some child begins with, up to `tokens` on the
        path, and the child that has most of them."""
        most, best = 0, None
        end = min(tokens, node.end + self.page_tokens)
        for child in node.heads.get(content.head(node.end), _NO_NODES).values():
            reach = min(end, child.filled)
            common = content.common(child.content, node.end, reach) if reach > node.end else 0
            if common > most:
                most, best = common, child
        return most, best

    # Adding.
    def insert(self, content: Content, tokens: int, priority: int = 0) -> int:
        """Cache the first `tokens`, whole pages; how many of them were there already."""
        return self._insert(content, tokens, priority)[0]

    def insert_state(self, content: Content, tokens: int, priority: int = 0) -> tuple[int, bool]:
        """The same with the state of the last of them: how many were there, whether it is kept
        (one that stands there already is)."""
        had, node = self._insert(content, tokens, priority)
        if node.has_state or node is self.root:
            return had, False
        node.has_state = True
        self.states += 1
        self._list_state(node)
        return had, True

    def _insert(self, content: Content, tokens: int, priority: int) -> tuple[int, Node]:
        """How many were there, and where they end."""
        length = tokens - tokens % self.page_tokens
        node, at = self.root, 0
        now = self._tick()
        node.priority = max(node.priority, priority)
        while at < length:
            child = node.children.get(content.key(at, self.page_tokens))
            if child is None:
                break
            child.used = now
            at = child.start + self._common(child, content, length)
            node = self._cut(child, at) if at < child.end else child
            node.priority = max(node.priority, priority)
        if at < length:
            leaf = Node(node, content, at, length, self._tick())
            leaf.priority = priority
            self._hang(node, content.key(at, self.page_tokens), leaf)
            self.evictable += length - at
            self._list(leaf)
            node = leaf
        return at, node

    def add_tail(self, node: Node, content: Content, tokens: int) -> bool:
        """Keep the page that a content has begun behind a node, up to `tokens` of its tokens.

        False: as much of it is there already."""
        matched, found = self.part(node, content, tokens)
        if node.end + matched >= tokens:
            return False
        leaf = Node(node, content, node.end, node.end + self.page_tokens, self._tick())
        if found is not None and found.filled < found.end and found.content is content:
            found.filled, found.used = tokens, leaf.used  # its own, which has grown
            return False
        leaf.filled = tokens
        self._hang(node, _tail_key(leaf), leaf)
        self.evictable += self.page_tokens
        self._list(leaf)
        return True

    # Holding.
    def lock(self, node: Node) -> None:
        """Hold a node and all above it."""
        if node.has_state:
            node.state_locks += 1
        while node.parent is not None:
            if not node.locks:
                self.evictable -= node.end - node.start
                self.locked += node.end - node.start
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Let go of a node and all above it."""
        if node.state_locks:
            node.state_locks -= 1
            if not node.state_locks:
                self._list_state(node)
        while node.parent is not None:
            node.locks -= 1
            assert node.locks >= 0
            if not node.locks:
                self.evictable += node.end - node.start
                self.locked -= node.end - node.start
                if not node.children:
                    self._list(node)
            node = node.parent

    # Taking.
    def evict(self, tokens: int) -> int:
        """Drop leaves that are not held until so many tokens have gone; how many have."""
        if self.policy in _FALLS:
            self._leaves = [
                (*self._rank(leaf), serial, leaf)
                for _, _, serial, leaf in self._leaves
                if leaf.is_listed
            ]
            heapify(self._leaves)
        gone = 0
        leaves = self._leaves
        while gone < tokens and leaves:
            first, second, _, leaf = heappop(leaves)
            leaf.is_listed = False
            parent = leaf.parent
            if leaf.locks or leaf.children or parent is None:
                continue  # it is listed again when that has changed
            if (first, second) != self._rank(leaf):
                self._list(leaf)
                continue
            size = leaf.end - leaf.start
            kept = size - (tokens - gone)
            kept -= kept % self.page_tokens
            if self.by_page and kept > 0:
                leaf.end = leaf.filled = leaf.start + kept
                self.evictable -= size - kept
                self._list(leaf)
                return gone + size - kept
            gone += size
            self.drop(leaf)
            if self.keeps_states:
                gone += self._drop_bare(parent)
        return gone

    def evict_states(self, count: int) -> int:
        """Drop states that are not held until so many have gone; how many have."""
        gone = 0
        while gone < count and self._stated:
            used, _, _, node = heappop(self._stated)
            if node.parent is None or not node.has_state or node.state_locks:
                continue  # it is listed again when nothing holds it
            if used != node.used:
                self._list_state(node)
                continue
            gone += 1
            if node.children:
                node.has_state = False
                self.states -= 1
            else:
                above = node.parent
                self.drop(node)
                self._drop_bare(above)
        return gone

    def _drop_bare(self, node: Node) -> int:
        """Drop a node that has become a leaf without state, and those above that do; tokens."""
        gone = 0
        while node.parent is not None and not (node.children or node.has_state or node.locks):
            above = node.parent
            gone += node.end - node.start
            self.drop(node)
            node = above
        return gone

    def drop(self, leaf: Node) -> None:
        """A leaf that is not held goes as a whole."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.locks
        assert not leaf.children
        self.evictable -= leaf.end - leaf.start
        self._unhang(parent, leaf)
        leaf.parent = None
        if leaf.has_state:
            leaf.has_state = False
            self.states -= 1
        if not parent.children and not parent.locks:
            self._list(parent)

    # Inside.
    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _common(self, node: Node, content: Content, length: int) -> int:
        """Tokens of a node, whole pages, that the content has too."""
        end = node.end if node.end < length else length
        common = node.content.common(content, node.start, end)
        return common - common % self.page_tokens

    def _cut(self, node: Node, at: int) -> Node:
        """Cut a node at a position; the part before it, which is a new node."""
        parent = node.parent
        assert parent is not None
        page = self.page_tokens
        upper = Node(parent, node.content, node.start, at, self._tick())
        upper.priority = node.priority
        upper.locks = node.locks
        self._hang(parent, node.content.key(node.start, page), upper)
        self._hang(upper, node.content.key(at, page), node, at)
        node.start = at
        node.parent = upper
        return upper

    def _hang(self, parent: Node, key: Key, child: Node, at: int = -1) -> None:
        """Put a child below a node; `at`: where it begins from now on, if not where it did."""
        parent.children[key] = child
        if self.by_page:
            head = child.content.head(child.start if at < 0 else at)
            parent.heads.setdefault(head, {})[key] = child

    def _unhang(self, parent: Node, child: Node) -> None:
        is_tail = child.filled < child.end
        key = _tail_key(child) if is_tail else child.content.key(child.start, self.page_tokens)
        del parent.children[key]
        if self.by_page:
            head = child.content.head(child.start)
            alike = parent.heads[head]
            del alike[key]
            if not alike:
                del parent.heads[head]

    def _rank(self, node: Node) -> tuple[int, int]:
        """What leaves are dropped by, the least first."""
        policy = self.policy
        if policy in ("lru", "lfu"):
            return node.used, 0
        if policy == "fifo":
            return node.made, 0
        if policy == "mru":
            return -node.used, 0
        if policy == "filo":
            return -node.made, 0
        return node.priority, node.used

    def _list(self, leaf: Node) -> None:
        if leaf.is_listed:
            return
        leaf.is_listed = True
        self._serial += 1
        first, second = self._rank(leaf)
        heappush(self._leaves, (first, second, self._serial, leaf))

    def _list_state(self, node: Node) -> None:
        """Its state may be evicted; of nodes used at once the nearest to the root goes first."""
        self._serial += 1
        heappush(self._stated, (node.used, node.end, self._serial, node))

    # Seeing.
    def nodes(self) -> list[Node]:
        """All nodes but the root, parents first."""
        found: list[Node] = []
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting += node.children.values()
        return found

    def problems(self) -> list[str]:
        """Where the tree contradicts itself."""
        found: list[str] = []
        held = idle = 0
        for node in self.nodes():
            tokens = node.end - node.start
            if tokens <= 0 or tokens % self.page_tokens:
                found.append(f"a node of {tokens} tokens")
            if node.locks:
                held += tokens
            else:
                idle += tokens
            parent = node.parent
            if parent is None or parent.end != node.start:
                found.append("a node does not go on where its parent ends")
            elif parent is not self.root and parent.locks < node.locks:
                found.append("a node is held more often than its parent")
            if not node.locks and not node.children and not node.is_listed:
                found.append("a leaf that is not held cannot be evicted")
            if self.keeps_states and not (node.children or node.has_state):
                found.append("a leaf has no state")
            if node.state_locks > node.locks or (node.state_locks and not node.has_state):
                found.append("a state is held that is not there")
        if sum(node.has_state for node in self.nodes()) != self.states:
            found.append(f"{self.states} states do not add up")
        if (held, idle) != (self.locked, self.evictable):
            found.append(f"{self.locked} tokens held, {self.evictable} not: {held}, {idle}")
        return found
