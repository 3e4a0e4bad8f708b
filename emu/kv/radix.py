"""A radix tree over the content of blocks: which block holds what, found and forgotten by runs.

Owns the tree, and for each block the node that its content belongs to. A request's content is a
`Chain` of units: hash ids of a trace that stand for several blocks each, or the key of each block.
A path from a root spells units; a node is a run of them that nothing has branched off yet, with
the block that holds each position, -1 where none does. Walking, adding and forgetting cost a step
for each run and unit, and only a list access for each block.

Rules, those of an index key -> block: a position has one block, the newest; the older one keeps
its content, unseen, until it is taken for something else. A block whose parents are forgotten
stays, and is found again when they come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

from emu.kv.hashing import block_keys, with_adapter, with_images
from emu.request import Prefix, Request

NONE: Final = -1


@final
class Chain:
    """The full blocks of a request as units; equal units in a row mean equal tokens."""

    root: str
    """Chains of different roots have nothing in common."""
    units: Sequence[int]
    per: int
    """Blocks of one unit."""
    blocks: int
    """Full blocks whose content is known; the last unit may be cut short."""

    __slots__ = ("blocks", "per", "root", "units")

    def __init__(self, root: str, units: Sequence[int], per: int, blocks: int) -> None:
        self.root = root
        self.units = units
        self.per = per
        self.blocks = blocks


def chain_of(request: Request, block_size: int) -> Chain:
    """The content of a request's full blocks, computed once for a block size."""
    chain: Chain | None = request.chain
    if chain is not None and request.chain_block_size == block_size:
        return chain
    prefix = request.prefix
    hashed = prefix is not None and prefix.token_ids is None and len(prefix.hash_ids) > 0
    if (
        hashed
        and not request.images
        and prefix is not None
        and prefix.hash_block_tokens % block_size == 0
    ):
        tokens = prefix.hash_block_tokens
        known = min(request.prompt_tokens, len(prefix.hash_ids) * tokens) // block_size
        root = f"{tokens} {request.adapter}"
        chain = Chain(root, prefix.hash_ids, tokens // block_size, known)
    else:
        keys = keys_of(request, block_size)
        chain = Chain("", keys, 1, len(keys))
    request.chain = chain
    request.chain_block_size = block_size
    request.known_blocks = chain.blocks
    return chain


def keys_of(request: Request, block_size: int) -> list[int]:
    """A key for each of the request's full blocks: of its tokens the start, images, adapter."""
    keys = block_keys(request.prefix, block_size, request.prompt_tokens)
    if request.images:
        keys = with_images(keys, request.images, block_size)
    # KV of one adapter is of no use to another.
    return with_adapter(keys, request.adapter) if request.adapter else keys


@final
class Node:
    """A run of units, and what holds them."""

    parent: Node | None
    start: int
    """Blocks on the path before it."""
    per: int
    units: list[int]
    blocks: list[int]
    present: int
    """Positions with a block."""
    shadowed: list[int]
    """Positions of blocks that newer ones have replaced, once for each."""
    children: dict[int, Node]

    __slots__ = ("blocks", "children", "parent", "per", "present", "shadowed", "start", "units")

    def __init__(self, parent: Node | None, start: int, per: int, units: list[int]) -> None:
        self.parent = parent
        self.start = start
        self.per = per
        self.units = units
        self.blocks = []
        self.present = 0
        self.shadowed = []
        self.children = {}


def _same(left: Sequence[int], at: int, right: Sequence[int], begin: int) -> int:
    """How many units are equal from `at` and `begin` on."""
    count = min(len(left) - at, len(right) - begin)
    for index in range(count):
        if left[at + index] != right[begin + index]:
            return index
    return count


@final
class RadixIndex:
    """Content -> block."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self._home: list[Node | None] = []
        """By block: the node of its content (or one below it, which has been cut since)."""
        self._place: list[int] = []
        """By block: its position on the path."""

    def reach(self, blocks: int) -> None:
        """Blocks below this id may come."""
        more = blocks - len(self._home)
        if more > 0:
            self._home.extend([None] * more)
            self._place.extend([0] * more)

    def clear(self) -> None:
        """Nothing can be found."""
        self._roots.clear()
        self._home.clear()
        self._place.clear()

    def find(self, chain: Chain, limit: int) -> list[int]:
        """Blocks of the first `limit` positions, up to the first that has none."""
        found: list[int] = []
        node = self._roots.get(chain.root)
        units, per, at = chain.units, chain.per, 0
        limit = min(limit, chain.blocks)
        while node is not None and at < limit:
            node = node.children.get(units[at // per])
            if node is None:
                break
            same = _same(node.units, 0, units, at // per)
            part = node.blocks[: min(limit - at, same * per)]
            if node.present < len(node.blocks) and NONE in part:
                found += part[: part.index(NONE)]
                break
            found += part
            at += len(part)
            if len(part) < len(node.units) * per:
                break
        return found

    def add(self, chain: Chain, held: list[int], first: int, last: int) -> None:
        """`held[first:last]` hold these positions of a chain from now on."""
        per, units, at = chain.per, chain.units, first
        node = self._start(chain, held, first)
        while at < last:
            inside = at - node.start
            if inside == len(node.units) * per:
                node = self._below(node, chain, at, last)
                inside = at - node.start
            number = inside // per
            same = _same(node.units, number, units, at // per)
            if same:
                end = min(last, node.start + (number + same) * per)
                self._store(node, held, at, end)
                at = end
                number += same
            if at < last and number < len(node.units):
                node = self._cut(node, number)

    def forget(self, taken: Sequence[int]) -> int:
        """These blocks will hold something else; how many of them could be found."""
        home, index, gone = self._home, 0, 0
        while index < len(taken):
            block = taken[index]
            node = home[block]
            if node is None:
                index += 1
                continue
            node = _at(node, self._place[block])
            inside = self._place[block] - node.start
            blocks, run = node.blocks, 0
            # A run is freed from its end: the next block stands before this one.
            longest = min(len(taken) - index, inside + 1)
            mine = blocks[inside + 1 - longest : inside + 1]
            mine.reverse()
            for block, held in zip(taken[index : index + longest], mine, strict=True):
                if block != held:
                    break
                home[block] = None
                run += 1
            if run:
                blocks[inside - run + 1 : inside + 1] = [NONE] * run
                node.present -= run
                gone += run
                index += run
            else:
                node.shadowed.remove(inside)
                home[taken[index]] = None
                index += 1
            _shrink(node)
        return gone

    # --- inside -----------------------------------------------------------------------------
    def _start(self, chain: Chain, held: list[int], first: int) -> Node:
        """The node that ends where position `first` begins, or has it."""
        if first:
            before = held[first - 1]
            home = self._home[before]
            if home is not None and self._place[before] == first - 1:
                return _at(home, first - 1)
        node = self._roots.get(chain.root)
        if node is None:
            node = self._roots[chain.root] = Node(None, 0, chain.per, [])
        at = 0
        while at < first:  # what stands before is not here: a path without blocks leads there
            if at - node.start == len(node.units) * node.per:
                node = self._below(node, chain, at, first)
            number = (at - node.start) // node.per
            same = _same(node.units, number, chain.units, at // node.per)
            at = min(first, node.start + (number + same) * node.per)
            missing = at - node.start - len(node.blocks)
            if missing > 0:
                node.blocks.extend([NONE] * missing)
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
        more = list(chain.units[begin : -(-last // per)])
        if node.parent is None or node.children:
            child = node.children[more[0]] = Node(node, at, per, more)
            return child
        node.units += more
        return node

    def _cut(self, node: Node, units: int) -> Node:
        """Cut a node after so many units; the upper part, which is a new node."""
        parent, start = node.parent, node.start
        assert parent is not None
        cut = units * node.per
        upper = Node(parent, start, node.per, node.units[:units])
        upper.blocks = node.blocks[:cut]
        upper.present = cut - upper.blocks.count(NONE)
        upper.shadowed = [place for place in node.shadowed if place < cut]
        parent.children[upper.units[0]] = upper
        node.units = node.units[units:]
        node.blocks = node.blocks[cut:]
        node.present -= upper.present
        node.shadowed = [place - cut for place in node.shadowed if place >= cut]
        node.start = start + cut
        node.parent = upper
        if node.present or node.shadowed or node.children:
            upper.children[node.units[0]] = node
        return upper

    def _store(self, node: Node, held: list[int], first: int, last: int) -> None:
        home, place, blocks = self._home, self._place, node.blocks
        inside = first - node.start
        if inside > len(blocks):
            blocks.extend([NONE] * (inside - len(blocks)))
        if inside == len(blocks):
            new = held[first:last]
            if not any(map(home.__getitem__, new)):
                for block in new:
                    home[block] = node
                    place[block] = first
                    first += 1
                blocks.extend(new)
                node.present += len(new)
                return
        for position in range(first, last):
            block, inside = held[position], position - node.start
            if home[block] is not None:  # it holds this already, and may have been replaced
                old = _at(home[block], place[block])
                if old.blocks[place[block] - old.start] == block:
                    continue
                old.shadowed.remove(place[block] - old.start)
            home[block] = node
            place[block] = position
            if inside == len(blocks):
                blocks.append(block)
                node.present += 1
                continue
            if blocks[inside] == NONE:
                node.present += 1
            else:
                node.shadowed.append(inside)
            blocks[inside] = block

    # --- seeing -----------------------------------------------------------------------------
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
        """Of all that can be found, the key of each block."""
        found: set[int] = set()
        for root, path, node in self.nodes():
            keys = path
            if root:
                tokens, _, adapter = root.partition(" ")
                prefix = Prefix(hash_ids=tuple(path), hash_block_tokens=int(tokens))
                keys = block_keys(prefix, block_size, len(path) * int(tokens))
                keys = with_adapter(keys, adapter) if adapter else keys
            found |= {keys[node.start + i] for i, block in enumerate(node.blocks) if block != NONE}
        return frozenset(found)

    def problems(self) -> list[str]:
        """Where the tree contradicts itself."""
        found = []
        carried = 0
        for _, _, node in self.nodes():
            carried += node.present + len(node.shadowed)
            present = 0
            for inside, block in enumerate(node.blocks):
                if block == NONE:
                    continue
                present += 1
                home = self._home[block]
                if home is None or self._place[block] != node.start + inside:
                    found.append(f"block {block} is found where it does not stand")
                elif _at(home, node.start + inside) is not node:
                    found.append(f"block {block} is found in a node that is not its home")
            if present != node.present:
                found.append(f"a node counts {node.present} blocks and has {present}")
            if node.parent is not None and not (present or node.shadowed or node.children):
                found.append("a node without blocks is left")
        if carried != sum(home is not None for home in self._home):
            found.append("blocks with content and those in the tree differ in number")
        return found


def _at(node: Node | None, position: int) -> Node:
    """The node that a position stands in, from one at or below it."""
    assert node is not None
    while position < node.start:
        node = node.parent
        assert node is not None
    return node


def _shrink(node: Node) -> None:
    """Positions at the end of a path that nothing stands in go, and nodes without any."""
    while node.parent is not None and not node.children and not node.shadowed:
        blocks = node.blocks
        if node.present:
            end = len(blocks)
            while blocks[end - 1] == NONE:
                end -= 1
            if end < len(blocks):
                del blocks[end:]
                del node.units[-(-end // node.per) :]
            return
        parent = node.parent
        del parent.children[node.units[0]]
        node = parent
