"""The KV pool with identities: prefix caching with reference counts and LRU eviction.

Owns identities of blocks, reference counts, the free list (first in, first out: taken at the head,
freed blocks appended at the tail, a sequence's last block first, so that its head survives longest)
and the index content -> blocks (`radix.py`: one block per content, the newest wins). Books are
exact: `blocks_free + blocks_used = blocks_total`, where cached blocks without references are free.
Does not decide which request gets blocks: callers ask `need` first and take only what is free
(check, then act). `grow`, `release` and `index` keep `Request.kv_blocks` (and `held`) of the
request up to date. Pools without identities are in `counting.py`. Rules: LLMServingSim sections 6.1
to 6.4.

Blocks are told apart by what they hold: a run of them has one node of the index, one count of
references, one place in the free list. Those of a request without known content are a number.
Nothing is kept for a block, and no operation costs a step for each.

Invariants: a run is in the free list exactly when nothing refers to it; the index points only to
blocks that hold the content; a request's runs are referenced by it once each.

Ids of blocks taken in a row are interchangeable: a block that has been popped holds nothing, and
until it is indexed nothing distinguishes it. Therefore only the order of frees, touches and
indexing matters for results, not which of two requests got which fresh block. Blocks that have
never been used stand at the head of the free list; they are a number, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from emu.kv.counting import NO_HIT, Hit
from emu.kv.free_list import FreeList
from emu.kv.keys import chain_of, keys_of
from emu.kv.radix import UNNAMED, Held, RadixIndex, Run
from emu.kv.tiers import LowerTier, chunks_resident
from emu.request import Request


class PoolWatcher(Protocol):
    """Told of what can be found in a pool, at the moment at which it changes."""

    def stored(self, request: Request, keys: Sequence[int], first: int, blocks: list[int]) -> None:
        """`blocks` hold the request's blocks from `first` on, and can be found by their keys.

        `keys` are those of all full blocks of the request. The number of a block is its own until
        it is taken.
        """
        ...

    def taken(self, blocks: Sequence[int]) -> None:
        """These blocks will hold something else: their content is gone."""
        ...

    def cleared(self) -> None:
        """Nothing can be found any more."""
        ...


class BlockPool:
    """Blocks with identities, shared between requests with equal prefixes."""

    has_identities = True

    def __init__(
        self,
        blocks_total: int,
        block_size: int,
        tiers: Sequence[LowerTier] = (),
        retain_ns: int = 0,
    ) -> None:
        """`retain_ns`: for how long the blocks of a session between two turns are evicted last."""
        self.blocks_total = blocks_total
        self.blocks_free = blocks_total
        self.block_size = block_size
        self.tiers = tuple(tiers)
        self.evicted_blocks = 0
        self.written_bytes = 0
        """Bytes written through to lower tiers so far."""
        self.pending_writes = [0] * len(self.tiers)
        """Bytes written through to each tier that have not been carried there yet."""
        self._fresh = blocks_total
        """Blocks that have never been used."""
        self._retains = retain_ns > 0
        self._free = FreeList(retain_ns)
        self._index = RadixIndex()
        self._names = 0
        """Names given to blocks, where a watcher asks for them."""
        self.watcher: PoolWatcher | None = None

    def lookup(self, request: Request) -> Hit:
        """Walk the first (reached - 1) // block_size blocks to the first that is not here.

        At least one token is always left to compute, in the lower tiers too (the original can
        hit a whole prompt there and then waits forever).
        """
        chain = chain_of(request, self.block_size)
        if not chain.blocks:
            return NO_HIT
        usable_tokens = request.prompt_tokens + request.generated_tokens - 1
        runs: list[Run] = []
        found = self._index.find(chain, usable_tokens // self.block_size, runs)
        npu_tokens = found * self.block_size
        for number, tier in enumerate(self.tiers):
            chunk = tier.chunk_tokens
            limit = usable_tokens // chunk
            start = npu_tokens // chunk
            count = chunks_resident(tier, self.keys_of(request), self.block_size, start, limit)
            gained = chunk * (start + count) - npu_tokens
            if count and gained >= chunk:
                tokens = npu_tokens + gained
                recall_bytes = count * tier.chunk_bytes
                return Hit(tokens, npu_tokens, gained, runs, recall_bytes, number)
        if not found:
            return NO_HIT
        return Hit(npu_tokens, npu_tokens, 0, runs)

    def keys_of(self, request: Request) -> list[int]:
        """Keys of the request's full blocks, computed once."""
        keys = request.block_keys
        if keys is None or request.block_keys_size != self.block_size:
            chain = chain_of(request, self.block_size)
            # Without a root, its units are the keys.
            keys = keys_of(request, self.block_size) if chain.root else chain.units
            request.block_keys = keys
            request.block_keys_size = self.block_size
        return keys

    def match(self, request: Request) -> int:
        """Prompt tokens of a request that came from outside that the GPU pool holds now."""
        limit = (request.prompt_tokens - 1) // self.block_size
        return self._index.find(chain_of(request, self.block_size), limit, []) * self.block_size

    def keys_wanted(self, request: Request) -> dict[int, int]:
        """Keys by position that would cut the request's need if they were indexed.

        The first key that is missing would lengthen the hit; a key whose block is free (it costs
        one free block to touch) would then be found in a block that is in use.
        """
        keys = self.keys_of(request)
        usable_tokens = request.prompt_tokens + request.generated_tokens - 1
        limit = min(usable_tokens // self.block_size, len(keys))
        runs: list[Run] = []
        found = self._index.find(chain_of(request, self.block_size), limit, runs)
        wanted: dict[int, int] = {}
        for run in runs:
            if not run.references:
                for position in range(run.start, min(run.end, found)):
                    wanted[position] = keys[position]
        if found < limit:
            wanted[found] = keys[found]
        return wanted

    def need(self, request: Request, target_tokens: int, hit: Hit = NO_HIT) -> int:
        """Fresh blocks for the target, plus hit blocks that now leave the free list."""
        found = hit.npu_tokens // self.block_size
        missing = -(-target_tokens // self.block_size) - request.kv_blocks - found
        if missing < 0:
            missing = 0
        for run in hit.found:
            if not run.references:
                missing += min(run.end, found) - run.start
        return missing

    def grow(
        self,
        request: Request,
        had_tokens: int,
        target_tokens: int,
        hit: Hit = NO_HIT,
        ahead_tokens: int = 0,
    ) -> None:
        """Touch the hit blocks, take the rest, index what is full at the target length."""
        if hit is not NO_HIT:
            if hit.found:
                assert not request.kv_blocks
                self._touch(request, hit)
            had_tokens = hit.npu_tokens  # recalled blocks are fresh here: indexed like computed
        missing = -(-(target_tokens + ahead_tokens) // self.block_size) - request.kv_blocks
        if missing > 0:
            self.take(missing)
            request.kv_blocks += missing
        reached = request.prompt_tokens + request.generated_tokens
        self.index(request, had_tokens, min(target_tokens, reached))

    def index(self, request: Request, had_tokens: int, tokens: int) -> None:
        """Blocks that became full between the two lengths can be found from now on."""
        first = had_tokens // self.block_size
        last = min(tokens // self.block_size, chain_of(request, self.block_size).blocks)
        if first < last:
            self._add(request, first, last)

    def index_at(self, request: Request, position: int) -> None:
        """The block at `position` became full: `index` for a decode."""
        if position < request.known_blocks:  # the workload may know only a part of the output
            self._add(request, position, position + 1)

    def _add(self, request: Request, first: int, last: int) -> None:
        """Positions of a request can be found in its blocks from now on."""
        held: Held | None = request.held
        if held is None:
            held = request.held = Held()
        had = held.blocks
        chain = chain_of(request, self.block_size)
        if first < had:
            self._add_again(request, held, first, min(last, had))
        if had < last:
            if had < first:  # blocks ahead of these that nothing can find
                held.runs.append(Run(had, first, 1))
                had = first
            before = held.last()
            run = Run(had, last, 1)
            if self.watcher is not None:
                self._name(run)
            if not self._index.add(chain, run, before):
                held.runs.append(run)
            held.blocks = last
        if self.watcher is None and not self.tiers:
            return
        keys = self.keys_of(request)
        if self.watcher is not None:
            names: list[int] = []
            for run in held.parts():
                positions = range(max(run.start, first), min(run.end, last))
                names.extend([run.base + position for position in positions])
            self.watcher.stored(request, keys, first, names)
        for number in range(len(self.tiers)):
            self._write_through(number, keys, first, last)

    def _add_again(self, request: Request, held: Held, first: int, last: int) -> None:
        """Positions with content, which a newer block may have replaced in the index."""
        for run in held.parts():
            if run.node is not None or run.end <= first or run.start >= last:
                continue
            if run.start < first:
                run = run.split(first)
            if run.end > last:
                run.split(last)
            if self.watcher is not None and run.base == UNNAMED:
                self._name(run)
            self._index.add(chain_of(request, self.block_size), run, None)

    def _name(self, run: Run) -> None:
        run.base = self._names - run.start
        self._names += run.end - run.start

    def _write_through(self, number: int, keys: list[int], first: int, last: int) -> None:
        tier = self.tiers[number]
        blocks_per_chunk = tier.chunk_tokens // self.block_size
        for chunk in range(first // blocks_per_chunk, last // blocks_per_chunk):
            if tier.write(keys[(chunk + 1) * blocks_per_chunk - 1]):
                self.written_bytes += tier.chunk_bytes
                self.pending_writes[number] += tier.chunk_bytes

    def release(self, request: Request) -> None:
        """References drop by one; blocks at zero go to the tail of the free list.

        Those of a turn that has ended, with more to come in its session, may be kept back.
        """
        free = self._unreferenced(request.kv_blocks, request.held)
        if self._retains and request.has_more_turns and _is_done(request):
            self._free.keep(free, request.priority)
        else:
            for run in free:
                self._free.append(run)
        request.held = None
        request.kv_blocks = 0

    def take(self, count: int) -> list[Any]:
        """Pop blocks at the head; what a popped block held is forgotten (eviction)."""
        assert 0 <= count <= self.blocks_free
        self.blocks_free -= count
        if self._fresh:
            fresh = min(count, self._fresh)
            self._fresh -= fresh
            count -= fresh
        while count:
            run = self._free.head()
            blocks = run.end - run.start
            if blocks <= count:
                self._free.remove(run)
            else:
                blocks = count
            count -= blocks
            if self.watcher is not None and run.base != UNNAMED:
                self.watcher.taken([run.base + run.end - 1 - at for at in range(blocks)])
            if run.node is None:
                run.end -= blocks
            else:
                self._index.forget(run, blocks)
                self.evicted_blocks += blocks
        return []

    def put_back(self, count: int, held: list[Any]) -> None:
        """Return what `take` gave."""
        for run in self._unreferenced(count, None):
            self._free.append(run)

    def put_back_held(self, request_id: int, count: int, held: Any) -> None:
        """Return the blocks of a request that left with its KV."""
        for run in self._unreferenced(count, held):
            self._free.append(run)

    def blocks_at(self, tokens: int) -> int:
        """Full blocks and the one begun."""
        return -(-tokens // self.block_size)

    def hand_over(self, request: Request, count: int, held: list[Any]) -> None:
        """The request owns the blocks; those full at its computed length are indexed."""
        request.held = None
        request.kv_blocks = count
        self.index(request, 0, request.computed_tokens)

    def see_time(self, now_ns: int) -> None:
        """It is now so late: blocks are kept back from now, and no longer than they may be."""
        self._free.expire(now_ns)

    def clear(self) -> None:
        """Forget everything; all blocks are free."""
        self.blocks_free = self._fresh = self.blocks_total
        self._free.clear()
        self._index.clear()
        if self.watcher is not None:
            self.watcher.cleared()

    def _touch(self, request: Request, hit: Hit) -> None:
        """The request holds the blocks that were found for it."""
        request.held = held = Held()
        held.runs = hit.found
        request.kv_blocks = held.blocks = blocks = hit.npu_tokens // self.block_size
        last = hit.found[-1]
        if last.end > blocks:
            last.split(blocks)
        for run in hit.found:
            if not run.references:
                self._free.remove(run)
                self.blocks_free -= run.end - run.start
            run.references += 1

    def _unreferenced(self, count: int, held: Held | None) -> list[Run]:
        """References of so many blocks, some with content, drop by one; runs that are free now,
        last block first."""
        free: list[Run] = []
        plain = count - (0 if held is None else held.blocks)
        assert plain >= 0
        if plain:
            free.append(Run(0, plain, 0))
            self.blocks_free += plain
        if held is not None:
            parts = held.parts()
            parts.reverse()
            for run in parts:
                left = run.references = run.references - 1
                assert left >= 0
                if not left:
                    run.rest = None
                    self.blocks_free += run.end - run.start
                    free.append(run)
        return free

    def findable(self) -> frozenset[int]:
        """Keys that can be found."""
        return self._index.keys(self.block_size)

    def free_runs(self) -> list[Run]:
        """The free list from its head; blocks that were never used stand before it."""
        return self._free.order()

    def recount(self, holders: Sequence[tuple[int, Held | None]]) -> list[str]:
        """Problems found by counting all references from scratch.

        `holders`: of each, how many blocks it holds, and those with content.
        """
        problems: list[str] = []
        counted: dict[Run, int] = {}
        held = 0
        for blocks, content in holders:
            parts = [] if content is None else content.parts()
            held += blocks - sum(run.end - run.start for run in parts)
            if (
                content is not None
                and not sum(run.end - run.start for run in parts) == (content.blocks) <= blocks
            ):
                problems.append(f"{blocks} blocks held, {content.blocks} of them with content")
            for run in parts:
                counted[run] = counted.get(run, 0) + 1
        wrong = [run for run, times in counted.items() if run.references != times]
        if wrong:
            problems.append(f"reference counts of {len(wrong)} runs of blocks are wrong")
        held += sum(run.end - run.start for run in counted)
        free = self._free.order()
        idle = {run for _, _, node in self._index.nodes() for run in node.runs}
        idle -= counted.keys()
        if any(run.references for run in free) or not idle.issubset(free):
            problems.append("the free list is not the set of unreferenced blocks")
        blocks = sum(run.end - run.start for run in free) + self._fresh
        if self.blocks_free != blocks:
            problems.append(f"{self.blocks_free} blocks free, counted {blocks}")
        if held + blocks != self.blocks_total:
            problems.append(f"{held} blocks held and {blocks} free of {self.blocks_total}")
        return problems + self._index.problems()


def _is_done(request: Request) -> bool:
    return request.generated_tokens >= request.output_tokens
