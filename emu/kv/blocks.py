"""KV pools of one replica: how many blocks each request holds, and which.

Owns: the count of free blocks, and (for `BlockPool`) identities, reference counts, the free list
and the index of cached blocks. Books are exact: `blocks_free + blocks_used = blocks_total`, where
cached blocks without references are free. Does not decide which request gets blocks: callers ask
`need` first and take only what is free (check, then act).

Three pools with one interface:

* `CountingPool` only counts. It is used when prefix caching is off or the workload has no token
  ids: then no block can ever be found again by its content, any free block is as good as any
  other, and identities cannot influence anything.
* `PresentPool` counts too, and has every prompt's KV (`workload.skip_prefill`).
* `BlockPool` tracks identities, for prefix caching.

`grow`, `release` and `index` keep `Request.kv_blocks` (and `held`) of the request up to date.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, final

from emu.kv.radix import UNNAMED, Held, RadixIndex, Run, chain_of, keys_of
from emu.request import Request
from emu.units import ceil_div

# --------------------------------------------------------------------------------------------------
# Lower KV tiers (host memory, CXL) behind a replica's GPU pool.
#
# Owns: which chunks a tier holds, and its eviction. A chunk is several GPU blocks long (256 tokens
# by default) and is known by the key of its last block. Chunks are written through when they become
# complete on the GPU and are evicted oldest-written first; a lookup does not refresh them. A tier
# may be shared by several replicas: it is a plain object that they all hold.
#
# Does not: move bytes or take time. `WriteCount`s and recall bytes are figures for the latency
# side. Rules: LLMServingSim sections 6.1, 6.3 and 6.4.


class LowerTier:
    """One tier: a set of chunks of bounded size, oldest-written evicted first."""

    def __init__(
        self,
        name: str,
        *,
        capacity_bytes: int,
        chunk_tokens: int,
        bytes_per_token: int,
        shared: bool = False,
    ) -> None:
        """`bytes_per_token` counts all ranks of a replica; `chunk_tokens` is a multiple of the
        block size (see `chunk_tokens_for`)."""
        self.name = name
        self.chunk_tokens = chunk_tokens
        self.chunk_bytes = chunk_tokens * bytes_per_token
        self.capacity_chunks = capacity_bytes // self.chunk_bytes if self.chunk_bytes else 0
        self.shared = shared
        self.written_chunks = 0
        self.evicted_chunks = 0
        self.version = 0
        """Grows with every change of content, so that readers can tell that nothing changed."""
        self.losses = 0
        """How often everything was lost."""
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def used_bytes(self) -> int:
        """Bytes of the chunks held."""
        return len(self._chunks) * self.chunk_bytes

    def write(self, key: int) -> bool:
        """Write a chunk through unless it is here. True if bytes were written."""
        if key in self._chunks or self.capacity_chunks == 0:
            return False
        if len(self._chunks) >= self.capacity_chunks:
            self._chunks.popitem(last=False)
            self.evicted_chunks += 1
        self._chunks[key] = None
        self.written_chunks += 1
        self.version += 1
        return True

    def clear(self) -> None:
        """Everything is lost (the machine failed)."""
        self._chunks.clear()
        self.losses += 1
        self.version += 1


def chunk_tokens_for(block_size: int, wanted_tokens: int) -> int:
    """Whole blocks in a chunk of about `wanted_tokens` (section 6.1)."""
    return max(block_size, wanted_tokens // block_size * block_size)


def chunks_resident(
    tier: LowerTier, keys: list[int], block_size: int, first_chunk: int, limit_chunks: int
) -> int:
    """Consecutive chunks from `first_chunk` on (below `limit_chunks`) that the tier holds."""
    blocks_per_chunk = ceil_div(tier.chunk_tokens, block_size)
    found = 0
    for chunk in range(first_chunk, limit_chunks):
        last_block = (chunk + 1) * blocks_per_chunk - 1
        if last_block >= len(keys) or keys[last_block] not in tier:
            break
        found += 1
    return found


# --------------------------------------------------------------------------------------------------
# Pools that count


@final
class Hit:
    """What a lookup found for a request at admission."""

    tokens: int
    """All tokens that need not be computed: those of the next two fields."""
    npu_tokens: int
    """Tokens whose blocks are in the GPU pool."""
    lower_tokens: int
    """Further tokens that a lower tier holds; they need fresh GPU blocks and a recall."""
    found: list[Run]
    """The GPU blocks hit, first to last; the last run may be longer."""
    recall_bytes: int
    """Bytes to bring up from the tier, whole chunks."""
    tier: int
    """Index of the tier that holds the lower tokens; -1 = none."""
    block_ids: tuple[int, ...]
    """Of a hybrid model: the blocks hit."""
    tables: tuple[tuple[int, ...], ...]
    """Of a hybrid model: the block table of each group, 0 for the null block."""
    junction_tokens: int
    """Of a hybrid model: where a prefix ends that some group holds and others do not; 0 = none."""

    __slots__ = (
        "block_ids",
        "found",
        "junction_tokens",
        "lower_tokens",
        "npu_tokens",
        "recall_bytes",
        "tables",
        "tier",
        "tokens",
    )

    def __init__(
        self,
        tokens: int = 0,
        npu_tokens: int = 0,
        lower_tokens: int = 0,
        found: list[Run] | None = None,
        recall_bytes: int = 0,
        tier: int = -1,
        block_ids: tuple[int, ...] = (),
        tables: tuple[tuple[int, ...], ...] = (),
        junction_tokens: int = 0,
    ) -> None:
        self.tokens = tokens
        self.npu_tokens = npu_tokens
        self.lower_tokens = lower_tokens
        self.found: list[Run] = [] if found is None else found
        self.block_ids = block_ids
        self.recall_bytes = recall_bytes
        self.tier = tier
        self.tables = tables
        self.junction_tokens = junction_tokens


NO_HIT: Final = Hit()


class CountingPool:
    """Blocks are counted, not told apart."""

    has_identities = False

    def __init__(self, blocks_total: int, block_size: int) -> None:
        self.blocks_total = blocks_total
        self.blocks_free = blocks_total
        self.block_size = block_size

    def lookup(self, request: Request) -> Hit:
        """Nothing can be found."""
        return NO_HIT

    def need(self, request: Request, target_tokens: int, hit: Hit = NO_HIT) -> int:
        """Blocks up to `target_tokens` that the request lacks."""
        missing = -(-target_tokens // self.block_size) - request.kv_blocks
        return missing if missing > 0 else 0

    def grow(
        self,
        request: Request,
        had_tokens: int,
        target_tokens: int,
        hit: Hit = NO_HIT,
        ahead_tokens: int = 0,
    ) -> None:
        """Count the missing blocks as the request's."""
        missing = -(-(target_tokens + ahead_tokens) // self.block_size) - request.kv_blocks
        if missing > 0:
            assert missing <= self.blocks_free
            self.blocks_free -= missing
            request.kv_blocks += missing

    def release(self, request: Request) -> None:
        """All of the request's blocks are free."""
        self.blocks_free += request.kv_blocks
        assert self.blocks_free <= self.blocks_total
        request.kv_blocks = 0

    def take(self, count: int) -> list[Any]:
        """Count blocks as taken."""
        assert 0 <= count <= self.blocks_free
        self.blocks_free -= count
        return []

    def put_back(self, count: int, held: Any) -> None:
        """Count blocks as free."""
        self.blocks_free += count
        assert self.blocks_free <= self.blocks_total

    def put_back_held(self, request_id: int, count: int, held: Any) -> None:
        """Count blocks as free."""
        self.put_back(count, held)

    def blocks_at(self, tokens: int) -> int:
        """Full blocks and the one begun."""
        return -(-tokens // self.block_size)

    def hand_over(self, request: Request, count: int, held: Any) -> None:
        """The blocks were counted when taken."""
        request.kv_blocks = count

    def clear(self) -> None:
        """All blocks are free."""
        self.blocks_free = self.blocks_total


class PresentPool(CountingPool):
    """A counting pool to which the KV of each prompt comes with its request.

    All but the last token of a prompt need no computation (that one makes the first logits). The
    KV of a request that was preempted is gone and computed again.
    """

    def lookup(self, request: Request) -> Hit:
        """The prompt, in blocks that the request takes as any other."""
        if request.generated_tokens or request.preemptions or request.prompt_tokens == 1:
            return NO_HIT
        return Hit(tokens=request.prompt_tokens - 1, npu_tokens=request.prompt_tokens - 1)


# --------------------------------------------------------------------------------------------------
# The free list of a pool: first in, first out, with removal from the middle, in whole runs.
#
# A run is taken from its last block on, so that the head of a sequence survives longest. Runs that
# follow each other in the list and in content become one.
#
# Blocks may be kept back for a time, and are then taken last. They are kept by the priority of
# their request (a smaller number is more urgent), and taken when no other is left: the least urgent
# first, within a priority those kept longest ago. One whose time is over goes to the tail of the
# others, as in TensorRT-LLM. All of them are free: keeping one refuses no request a block.


def _ring() -> Run:
    """An empty list: what stands before its first and after its last run."""
    ring = Run(0, 0, 0)
    ring.before = ring.after = ring
    return ring


@final
class FreeList:
    """Runs in the order in which they will be taken."""

    def __init__(self, ttl_ns: int = 0) -> None:
        """`ttl_ns`: for how long blocks are kept back."""
        self._ttl_ns = ttl_ns
        self._now_ns = 0
        self._plain = _ring()
        self._kept: dict[int, Run] = {}
        """By priority."""
        self._order: list[int] = []
        """Priorities, the least urgent first."""
        self._serial = 0
        self._expiries: deque[tuple[int, int, int]] = deque()
        """(until, serial number, priority) of each keeping, in order of time."""

    def append(self, run: Run) -> None:
        """Put a run at the tail. It may become a part of the one before it."""
        run.serial = 0
        _append(self._plain, run)

    def keep(self, runs: list[Run], priority: int) -> None:
        """Put runs at the tail of those that are kept for requests of this priority."""
        if not runs:
            return
        ring = self._kept.get(priority)
        if ring is None:
            ring = self._kept[priority] = _ring()
            self._order = sorted(self._kept, reverse=True)
        self._serial += 1
        for run in runs:
            run.serial = self._serial
            _append(ring, run)
        self._expiries.append((self._now_ns + self._ttl_ns, self._serial, priority))

    def expire(self, now_ns: int) -> None:
        """It is now so late: blocks whose time is over are like any other."""
        self._now_ns = now_ns
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, serial, priority = self._expiries.popleft()
            ring = self._kept[priority]
            while True:
                run = ring.after  # those kept first stand first
                if run is None or run is ring or run.serial != serial:
                    break
                self.remove(run)
                self.append(run)

    def remove(self, run: Run) -> None:
        """Take a run, wherever it stands."""
        before, after = run.before, run.after
        assert before is not None
        assert after is not None
        before.after = after
        after.before = before
        run.before = run.after = None

    def head(self) -> Run:
        """The run whose last block will be taken next; there must be one."""
        run = self._plain.after
        if run is self._plain:
            for priority in self._order:
                ring = self._kept[priority]
                run = ring.after
                if run is not ring:
                    break
        assert run is not None
        return run

    def clear(self) -> None:
        """Nothing is free."""
        for ring in (self._plain, *self._kept.values()):
            while (run := ring.after) is not None and run is not ring:
                self.remove(run)
        self._kept.clear()
        self._order = []
        self._expiries.clear()

    def order(self) -> list[Run]:
        """All of it, from the head."""
        found: list[Run] = []
        for ring in (self._plain, *[self._kept[priority] for priority in self._order]):
            run = ring.after
            while run is not None and run is not ring:
                found.append(run)
                run = run.after
        return found


def _append(ring: Run, run: Run) -> None:
    last = ring.before
    assert last is not None
    node = run.node
    if last is not ring and last.node is node and last.serial == run.serial:
        if node is None:
            if last.base == run.base == UNNAMED:  # nothing tells these blocks apart
                last.end += run.end - run.start
                return
        elif last.start == run.end and last.base == run.base:
            last.start = run.start
            node.runs.remove(run)
            return
    last.after = run
    run.before = last
    run.after = ring
    ring.before = run


# --------------------------------------------------------------------------------------------------
# The KV pool with identities: prefix caching with reference counts and LRU eviction.
#
# Owns the free list (first in, first out: taken at the head, freed blocks appended at the tail, a
# sequence's last block first, so that its head survives longest) and the index content -> blocks
# (`radix.py`: one block per content, the newest wins). Rules: LLMServingSim sections 6.1 to 6.4.
#
# Blocks are told apart by what they hold: a run of them has one node of the index, one count of
# references, one place in the free list. Those of a request without known content are a number.
# Nothing is kept for a block, and no operation costs a step for each.
#
# Invariants: a run is in the free list exactly when nothing refers to it; the index points only to
# blocks that hold the content; a request's runs are referenced by it once each.
#
# Ids of blocks taken in a row are interchangeable: a block that has been popped holds nothing, and
# until it is indexed nothing distinguishes it. Therefore only the order of frees, touches and
# indexing matters for results, not which of two requests got which fresh block. Blocks that have
# never been used stand at the head of the free list; they are a number, too.


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

    # --- giving and taking ------------------------------------------------------------------
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

    # --- inside -----------------------------------------------------------------------------
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

    # --- seeing -----------------------------------------------------------------------------
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
