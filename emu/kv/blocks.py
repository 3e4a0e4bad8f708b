"""The KV pool with identities: prefix caching with reference counts and LRU eviction.

Owns, per block: its reference count. Owns the free list (first in, first out: taken at the
head, freed blocks appended at the tail, a sequence's last block first, so that its head survives
longest) and the index content -> block (`radix.py`: one block per content, the newest wins). Rules:
LLMServingSim sections 6.1 to 6.4.

Invariants: a block is in the free list exactly when its reference count is 0; the index points
only to blocks that hold the content; a request's blocks are referenced by it once each.

Ids of blocks taken in a row are interchangeable: a block that has been popped holds nothing, and
until it is indexed nothing distinguishes it. Therefore only the order of frees, touches and
indexing matters for results, not which of two requests got which fresh block.

Blocks that have never been used are not stored: they stand at the head of the free list in order
of id, and a counter says where they begin. Memory follows use, not capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from emu.kv.freelist import FreeList, Ids, RetainingFreeList
from emu.kv.pool import NO_HIT, Hit
from emu.kv.radix import RadixIndex, chain_of, keys_of
from emu.kv.tiers import LowerTier, chunks_resident
from emu.request import Request

if TYPE_CHECKING:
    pass


class PoolWatcher(Protocol):
    """Told of what can be found in a pool, at the moment at which it changes."""

    def stored(self, request: Request, keys: Sequence[int], first: int, blocks: list[int]) -> None:
        """`blocks` hold the request's blocks from `first` on, and can be found by their keys.

        `keys` are those of all full blocks of the request.
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
        import numpy as np

        self.blocks_total = blocks_total
        self.blocks_free = blocks_total
        self.block_size = block_size
        self.tiers = tuple(tiers)
        self.evicted_blocks = 0
        self.written_bytes = 0
        """Bytes written through to lower tiers so far."""
        self.pending_writes = [0] * len(self.tiers)
        """Bytes written through to each tier that have not been carried there yet."""
        self._used = 0
        """Blocks below this id have been used."""
        self._references = np.zeros(64, dtype=np.int32)
        self._retaining = RetainingFreeList(retain_ns) if retain_ns else None
        self._free: FreeList | RetainingFreeList = self._retaining or FreeList()
        self._index = RadixIndex()
        self.watcher: PoolWatcher | None = None

    # --- finding ----------------------------------------------------------------------------
    def lookup(self, request: Request) -> Hit:
        """Walk the first (reached - 1) // block_size blocks to the first that is not here.

        At least one token is always left to compute, in the lower tiers too (the original can
        hit a whole prompt there and then waits forever).
        """
        chain = chain_of(request, self.block_size)
        if not chain.blocks:
            return NO_HIT
        usable_tokens = request.prompt_tokens + request.generated_tokens - 1
        found = self._index.find(chain, usable_tokens // self.block_size)
        npu_tokens = len(found) * self.block_size
        for number, tier in enumerate(self.tiers):
            chunk = tier.chunk_tokens
            limit = usable_tokens // chunk
            start = npu_tokens // chunk
            count = chunks_resident(tier, self.keys_of(request), self.block_size, start, limit)
            gained = chunk * (start + count) - npu_tokens
            if count and gained >= chunk:
                tokens = npu_tokens + gained
                recall_bytes = count * tier.chunk_bytes
                return Hit(tokens, npu_tokens, gained, tuple(found), recall_bytes, number)
        if not found:
            return NO_HIT
        return Hit(npu_tokens, npu_tokens, 0, tuple(found))

    def keys_of(self, request: Request) -> list[int]:
        """Keys of the request's full blocks, computed once."""
        keys = request.block_keys
        if keys is None or request.block_keys_size != self.block_size:
            chain = chain_of(request, self.block_size)
            if chain.root:
                keys = keys_of(request, self.block_size)
            else:  # its units are the keys
                assert isinstance(chain.units, list)
                keys = chain.units
            request.block_keys = keys
            request.block_keys_size = self.block_size
        return keys

    def match(self, request: Request) -> int:
        """Prompt tokens of a request that came from outside that the GPU pool holds now."""
        limit = (request.prompt_tokens - 1) // self.block_size
        found = self._index.find(chain_of(request, self.block_size), limit)
        return len(found) * self.block_size

    def keys_wanted(self, request: Request) -> dict[int, int]:
        """By position, the keys that would cut the request's need if they were indexed.

        The first key that is missing would lengthen the hit; a key whose block is free (it costs
        one free block to touch) would then be found in a block that is in use.
        """
        import numpy as np

        keys = self.keys_of(request)
        usable_tokens = request.prompt_tokens + request.generated_tokens - 1
        limit = min(usable_tokens // self.block_size, len(keys))
        found = self._index.find(chain_of(request, self.block_size), limit)
        idle = np.flatnonzero(self._references[np.array(found, dtype=np.int64)] == 0)
        wanted: dict[int, int] = {position: keys[position] for position in idle.tolist()}
        if len(found) < limit:
            wanted[len(found)] = keys[len(found)]
        return wanted

    # --- giving and taking ------------------------------------------------------------------
    def need(self, request: Request, target_tokens: int, hit: Hit = NO_HIT) -> int:
        """Fresh blocks for the target, plus hit blocks that now leave the free list."""
        import numpy as np

        missing = -(-target_tokens // self.block_size) - request.kv_blocks - len(hit.block_ids)
        if missing < 0:
            missing = 0
        if hit.block_ids:
            counts = self._references[np.array(hit.block_ids)]
            missing += len(counts) - int(np.count_nonzero(counts))
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
        held = request.block_ids
        if held is None:
            held = request.block_ids = []
        if hit.block_ids:
            assert not held
            self._touch(hit.block_ids)
            held.extend(hit.block_ids)
        if hit is not NO_HIT:
            had_tokens = hit.npu_tokens  # recalled blocks are fresh here: indexed like computed
        missing = -(-(target_tokens + ahead_tokens) // self.block_size) - len(held)
        if missing > 0:
            held.extend(self.take(missing))
        request.kv_blocks = len(held)
        reached = request.prompt_tokens + request.generated_tokens
        self.index(request, had_tokens, min(target_tokens, reached))

    def grow_by_one(self, request: Request) -> None:
        """One more block for a decode that crosses a block boundary."""
        held = request.block_ids
        assert held is not None
        held.append(self._pop())
        request.kv_blocks += 1

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
        held = request.block_ids
        assert held is not None
        self._index.add(chain_of(request, self.block_size), held, first, last)
        if self.watcher is None and not self.tiers:
            return
        keys = self.keys_of(request)
        if self.watcher is not None:
            self.watcher.stored(request, keys, first, held[first:last])
        for number in range(len(self.tiers)):
            self._write_through(number, keys, first, last)

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
        held = request.block_ids
        if held:
            free = self._unreferenced(held)
            if self._retaining is not None and request.has_more_turns and _is_done(request):
                self._retaining.keep(free, request.priority)
            else:
                self._free.append(free)
        request.block_ids = None
        request.kv_blocks = 0

    def take(self, count: int) -> list[int]:
        """Pop blocks at the head; what a popped block held is forgotten (eviction)."""
        assert 0 <= count <= self.blocks_free
        unused = min(count, self.blocks_total - self._used)
        taken = self._take_fresh(unused) if unused else []
        if count > unused:
            self.blocks_free -= count - unused
            ids = self._free.take(count - unused)
            self._references[ids] = 1
            again: list[int] = ids.tolist()
            self._evict(again)
            taken += again
        return taken

    def put_back(self, count: int, block_ids: list[int]) -> None:
        """Return what `take` gave."""
        assert count == len(block_ids)
        self._unreference(block_ids)

    def put_back_held(self, request_id: int, count: int, block_ids: list[int]) -> None:
        """Return the blocks of a request that left with its KV."""
        self.put_back(count, block_ids)

    def blocks_at(self, tokens: int) -> int:
        """Full blocks and the one begun."""
        return -(-tokens // self.block_size)

    def hand_over(self, request: Request, count: int, block_ids: list[int]) -> None:
        """The request owns the blocks; those full at its computed length are indexed."""
        assert count == len(block_ids)
        request.block_ids = block_ids
        request.kv_blocks = count
        self.index(request, 0, request.computed_tokens)

    def see_time(self, now_ns: int) -> None:
        """It is now so late: blocks are kept back from now, and no longer than they may be."""
        if self._retaining is not None:
            self._retaining.expire(now_ns)

    def clear(self) -> None:
        """Forget everything; all blocks are free."""
        self.blocks_free = self.blocks_total
        self._references.fill(0)
        self._used = 0
        self._free.clear()
        self._index.clear()
        if self.watcher is not None:
            self.watcher.cleared()

    # --- inside -----------------------------------------------------------------------------
    def _take_fresh(self, count: int) -> list[int]:
        """Blocks that have never been used."""
        import numpy as np

        first = self._used
        self._used = end = first + count
        if end > len(self._references):
            size = min(self.blocks_total, max(end, 2 * len(self._references)))
            self._references = np.concatenate(
                (self._references, np.zeros(size - len(self._references), dtype=np.int32))
            )
            self._free.reach(size)
        self._references[first:end] = 1
        self._index.reach(end)
        self.blocks_free -= count
        return list(range(first, end))

    def _evict(self, taken: list[int]) -> None:
        """Blocks that are taken again can no longer be found."""
        if self.watcher is not None:
            self.watcher.taken(taken)
        self.evicted_blocks += self._index.forget(taken)

    def _pop(self) -> int:
        if self._used < self.blocks_total:
            return self._take_fresh(1)[0]
        self.blocks_free -= 1
        block = self._free.pop()
        self._evict([block])
        self._references[block] = 1
        return block

    def _touch(self, block_ids: Sequence[int]) -> None:
        import numpy as np

        ids: Ids = np.array(block_ids, dtype=np.int64)
        free = ids[self._references[ids] == 0]
        if len(free):
            self._free.remove(free)
            self.blocks_free -= len(free)
        self._references[ids] += 1

    def _unreference(self, block_ids: Sequence[int]) -> None:
        self._free.append(self._unreferenced(block_ids))

    def _unreferenced(self, block_ids: Sequence[int]) -> Ids:
        """References drop by one; those that are free now, last block first."""
        import numpy as np

        ids: Ids = np.array(block_ids, dtype=np.int64)[::-1]
        counts = self._references[ids] - 1
        assert len(counts) == 0 or counts.min() >= 0
        self._references[ids] = counts
        free = ids if not counts.any() else ids[counts == 0]
        self.blocks_free += len(free)
        return free

    # --- seeing -----------------------------------------------------------------------------
    def findable(self) -> frozenset[int]:
        """Keys that can be found."""
        return self._index.keys(self.block_size)

    def free_order(self) -> list[int]:
        """The free list from its head (fresh blocks first)."""
        return [*range(self._used, self.blocks_total), *self._free.order().tolist()]

    def recount(self, holders: Sequence[Sequence[int]]) -> list[str]:
        """Problems found by counting all references from scratch; `holders` = lists of ids."""
        import numpy as np

        problems: list[str] = []
        held = np.fromiter(chain.from_iterable(holders), dtype=np.int64)
        counted = np.bincount(held, minlength=self._used)
        references = self._references[: len(counted)]
        wrong = np.flatnonzero(counted != references)
        if len(wrong):
            problems.append(f"reference counts of blocks {wrong[:8].tolist()} are wrong")
        free = np.flatnonzero(references == 0)
        if not np.array_equal(np.sort(self._free.order()), free) or self._free.count != len(free):
            problems.append("the free list is not the set of unreferenced blocks")
        fresh = self.blocks_total - self._used
        if self.blocks_free != len(free) + fresh:
            problems.append(f"{self.blocks_free} blocks free, counted {len(free) + fresh}")
        return problems + self._index.problems()


def _is_done(request: Request) -> bool:
    return request.generated_tokens >= request.output_tokens
