"""The KV pool of a model whose layers keep different things: one free list, a table per group.

Owns, per block: reference count, group and key. Owns per request one table of block ids for each
group of `KvLayout`; entry 0 is the null block (what fell out of a window, or a state that no step
ended on). A block id belongs to one group at a time. Rules: vLLM 0.33, `kv_cache_coordinator.py`
and `single_type_kv_cache_manager.py`: before a request grows, the blocks that none of its later
tokens will read are freed, last first; groups then take blocks in order; what is full can be
found by (key, group). A hit needs every group: a full group its chain of blocks, a window the
blocks that cover it, a state the one block that ends where the hit ends.

States have two modes. Without prefix caching a sequence holds one block in each state group until
it ends. With it, tables are positional, and a state can be found again only where a step ended on
a block boundary (`block_tokens`), which is why schedulers cut prompts there.

Lower tiers keep the KV of whole blocks of all groups, and the states of the boundaries that have
them. A hit there ends at a boundary whose states the tier has; what it brings is all KV behind the
GPU's hit, and those states, for which a block is taken.

Invariants: `blocks_free + referenced blocks = blocks_total`; a block with references is in
exactly those tables that reference it; the index names only blocks that carry the key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from emu.kv.counting import NO_HIT, Hit
from emu.kv.groups import KvGroup, KvLayout
from emu.kv.keys import keys_of
from emu.kv.tiers import LowerTier, state_key
from emu.request import Request
from emu.units import ceil_div

NULL_BLOCK: Final = 0


class _Block(msgspec.Struct, gc=False):
    references: int = 0
    key: tuple[int, int] | None = None
    """(hash of the prefix, group) under which the block can be found."""


class _Still(msgspec.Struct, gc=False):
    """How far a sequence may go on while no table of it changes."""

    computed_tokens: int
    """Nothing is left behind by fewer computed tokens than this."""
    slots: int
    """What it holds has so many slots in every group."""


_FOREVER: Final = 1 << 62


class GroupedPool:
    """Blocks for several groups of layers; ids count from 1."""

    has_identities = True

    def __init__(
        self,
        blocks_total: int,
        layout: KvLayout,
        *,
        prefix_caching: bool,
        draft_tokens: int = 0,
        tiers: Sequence[LowerTier] = (),
        state_bytes: int = 0,
    ) -> None:
        """`tiers`: below the GPU pool, nearest first, used with prefix caching; `state_bytes`: of
        the states of a sequence there. `draft_tokens`: drafts of a sequence, each with a state of
        its own. States cannot be found again then (`prefix_caching` False where there are any)."""
        assert not (draft_tokens and prefix_caching and layout.has_states)
        self.blocks_total = blocks_total
        self.blocks_free = blocks_total
        self.layout = layout
        self.block_size = layout.hash_tokens
        self.prefix_caching = prefix_caching
        self._state_slots = 1 + draft_tokens
        self.evicted_blocks = 0
        self.tiers = tuple(tiers) if prefix_caching else ()
        self.written_bytes = 0
        """Bytes written through to lower tiers so far."""
        self.pending_writes = [0] * len(self.tiers)
        """Bytes written through to each tier that have not been carried there yet."""
        self._state_bytes = state_bytes
        self._tables: dict[int, list[list[int]]] = {}
        self._still: dict[int, _Still] = {}
        """Of sequences that hold blocks for all they needed when last asked. Most steps of a
        sequence fill a block that it has, and look at nothing else."""
        self._blocks: dict[int, _Block] = {}
        self._used = 0
        """Ids up to this one have been used."""
        self._free_first: list[int] = []
        """Used blocks without a key: taken before all others, the last freed first."""
        self._free_last: OrderedDict[int, None] = OrderedDict()
        """Those with a key: taken after blocks that were never used, the first freed first."""
        self._index: dict[tuple[int, int], dict[int, None]] = {}
        """Blocks that carry a key; the one that got it first is found."""
        kinds: dict[tuple[bool, str, int, int], list[int]] = {}
        for number, group in enumerate(layout.groups):
            kind = (group.keeps != "all", group.keeps, group.limit_tokens, group.block_tokens)
            kinds.setdefault(kind, []).append(number)
        # Groups that keep everything first: their hit only bounds the others from above.
        self._alike = [kinds[kind] for kind in sorted(kinds, key=_keeps_some)]
        """Numbers of groups that keep the same, in the order of look-ups."""
        self._new_states: set[tuple[int, int]] = set()
        """Keys of states that this step makes: others can use them from the next step on."""

    def lookup(self, request: Request) -> Hit:
        """The longest prefix that all groups hold, below the request's reached length."""
        if not self.prefix_caching:
            return NO_HIT
        keys = self.keys_of(request)
        usable_tokens = request.prompt_tokens + request.generated_tokens - 1
        limit_tokens = min(usable_tokens, len(keys) * self.layout.hash_tokens)
        tokens, longest, bound = self._common_hit(keys, limit_tokens)
        junction = longest if longest > tokens else 0
        lower_tokens, recall_bytes, tier = self._below(keys, tokens, usable_tokens)
        reached = tokens + lower_tokens
        if junction <= reached:
            junction = 0
        if not tokens:
            if not (junction or lower_tokens):
                return NO_HIT
            return Hit(reached, 0, lower_tokens, None, recall_bytes, tier, junction_tokens=junction)
        tables = tuple(
            self._table_at(number, group, keys, tokens, bound)
            for number, group in enumerate(self.layout.groups)
        )
        ids = tuple(block for table in tables for block in table if block)
        return Hit(reached, tokens, lower_tokens, None, recall_bytes, tier, ids, tables, junction)

    def _below(
        self, keys: Sequence[int], npu_tokens: int, usable_tokens: int
    ) -> tuple[int, int, int]:
        """What a lower tier has behind the GPU's hit: tokens, bytes to bring up, which tier."""
        for number, tier in enumerate(self.tiers):
            chunk = tier.chunk_tokens
            start = npu_tokens // chunk
            found = 0
            for at in range(start, usable_tokens // chunk):
                last = (at + 1) * chunk // self.layout.hash_tokens - 1
                if last >= len(keys) or keys[last] not in tier:
                    break
                if not self.layout.has_states or state_key(keys[last]) in tier:
                    found = at + 1 - start
            if found:
                recalled = found * tier.chunk_bytes + self._state_bytes
                return (start + found) * chunk - npu_tokens, recalled, number
        return 0, 0, -1

    def match(self, request: Request) -> int:
        """Prompt tokens of a request from outside that this pool holds now."""
        if not self.prefix_caching:
            return 0
        keys = self.keys_of(request)
        limit = min(request.prompt_tokens - 1, len(keys) * self.layout.hash_tokens)
        return self._common_hit(keys, limit)[0]

    def keys_of(self, request: Request) -> list[int]:
        """Keys of the request's full hash blocks, computed once."""
        keys = request.block_keys
        if keys is None or request.block_keys_size != self.block_size:
            keys = request.block_keys = keys_of(request, self.block_size)
            request.block_keys_size = self.block_size
            request.known_blocks = len(keys)
        return keys

    def _common_hit(self, keys: Sequence[int], limit_tokens: int) -> tuple[int, int, int]:
        """Tokens of the hit that all groups have, and of the longest that some had on the way.

        Alike groups are looked up together. Kinds shorten each other's hits until all agree; one
        kind alone, or one beside groups that keep everything, is looked up once. The third figure
        is the length below which chunked groups were last looked up.
        """
        unit = self.layout.block_tokens
        tokens, longest, bound = limit_tokens, 0, limit_tokens
        kinds = [self.layout.groups[numbers[0]].keeps for numbers in self._alike]
        once = len(kinds) == 1 or (len(kinds) == 2 and kinds[0] == "all")
        while True:
            before = tokens
            for numbers, keeps in zip(self._alike, kinds, strict=True):
                if keeps == "chunk":
                    bound = tokens
                tokens = self._hit_of(numbers, keys, tokens) // unit * unit
                longest = max(longest, tokens)
            if once or tokens == before:
                return tokens, longest, bound

    def _hit_of(self, numbers: Sequence[int], keys: Sequence[int], tokens: int) -> int:
        """The longest hit of alike groups of at most so many tokens."""
        group = self.layout.groups[numbers[0]]
        size = group.block_tokens
        if group.keeps == "all":
            count = 0
            while count < tokens // size and all(
                self._cached(number, group, keys, count) for number in numbers
            ):
                count += 1
            return count * size
        if group.keeps == "chunk":
            # The chunk that the bound lies in decides what counts as read already: a miss in it
            # ends the hit there, and earlier chunks are not searched.
            count = group.skipped_tokens(tokens) // size
            while count < tokens // size and all(
                self._cached(number, group, keys, count) for number in numbers
            ):
                count += 1
            return count * size
        unit = self.layout.block_tokens
        for candidate in range(tokens // unit * unit, 0, -unit):
            if all(self._covers(number, group, keys, candidate) for number in numbers):
                return candidate
        return 0

    def _covers(self, number: int, group: KvGroup, keys: Sequence[int], tokens: int) -> bool:
        """Whether the group holds what a sequence that goes on after so many tokens reads."""
        last = tokens // group.block_tokens
        if group.keeps == "state":
            return self._cached(number, group, keys, last - 1) is not None
        first = max(0, last - ceil_div(group.limit_tokens - 1, group.block_tokens))
        return all(self._cached(number, group, keys, entry) for entry in range(first, last))

    def _cached(self, number: int, group: KvGroup, keys: Sequence[int], entry: int) -> int | None:
        position = (entry + 1) * group.block_tokens // self.layout.hash_tokens - 1
        if position >= len(keys):
            return None
        blocks = self._index.get((keys[position], number))
        return None if blocks is None else next(iter(blocks))

    def _table_at(
        self, number: int, group: KvGroup, keys: Sequence[int], tokens: int, bound_tokens: int
    ) -> tuple[int, ...]:
        """The group's table of a sequence that hits so many tokens.

        `bound_tokens`: the length below which a chunked group was looked up.
        """
        last = tokens // group.block_tokens
        if group.keeps == "all":
            first = 0
        elif group.keeps == "state":
            first = last - 1
        elif group.keeps == "window":
            first = max(0, last - ceil_div(group.limit_tokens - 1, group.block_tokens))
        else:
            first = min(last, group.skipped_tokens(bound_tokens) // group.block_tokens)
        found = [self._cached(number, group, keys, entry) for entry in range(first, last)]
        return (NULL_BLOCK,) * first + tuple(block or NULL_BLOCK for block in found)

    def begin_step(self) -> None:
        """A scheduler step begins: what the one before it made exists."""
        self._new_states.clear()

    def fits(
        self,
        request: Request,
        whole_tokens: int,
        slots: int,
        hit: Hit,
        in_flight_tokens: int,
    ) -> bool:
        """Whether a waiting request can have so many slots now.

        `whole_tokens`: all of its tokens must fit too (0 = need not), windows counted as they are
        with `in_flight_tokens` planned and not confirmed.
        """
        if any(
            found and self._blocks[found[-1]].key in self._new_states
            for group, found in zip(self.layout.groups, hit.tables, strict=False)
            if group.keeps == "state"
        ):
            return False
        if whole_tokens and self._missing(request, whole_tokens, hit, in_flight_tokens) > (
            self.blocks_free
        ):
            return False
        return self.need(request, slots, hit) <= self.blocks_free

    def need(self, request: Request, target_tokens: int, hit: Hit = NO_HIT) -> int:
        """Free blocks that `grow` would consume.

        Frees first what the request's windows have left behind: vLLM does so at every attempt,
        whether or not the blocks suffice afterwards.
        """
        still = self._still.get(request.request_id)
        if (
            still is not None
            and target_tokens <= still.slots
            and request.computed_tokens < still.computed_tokens
        ):
            return 0
        self._forget(request)
        missing = self._missing(request, target_tokens, hit)
        tables = self._tables.get(request.request_id)
        if not missing and tables is not None:
            self._still[request.request_id] = self._still_of(request.computed_tokens, tables)
        return missing

    def grow(
        self,
        request: Request,
        had_tokens: int,
        target_tokens: int,
        hit: Hit = NO_HIT,
        ahead_tokens: int = 0,
    ) -> None:
        """Touch the blocks hit, take the rest, index what is full at the target length."""
        slots = target_tokens + ahead_tokens
        reached = request.prompt_tokens + request.generated_tokens
        still = self._still.get(request.request_id)
        if still is not None and slots <= still.slots:
            self.index(request, had_tokens, min(target_tokens, reached))
            return
        recalled_tokens = hit.tokens if hit.lower_tokens else 0
        if recalled_tokens:
            had_tokens = hit.npu_tokens  # recalled blocks are fresh here: indexed like computed
        missing = self._missing(request, slots, hit)
        assert missing <= self.blocks_free
        tables = self._tables_of(request)
        if hit.tables:
            for block in hit.block_ids:
                self._touch(block)
            for table, found in zip(tables, hit.tables, strict=True):
                table.extend(found)
        for group, table in zip(self.layout.groups, tables, strict=True):
            self._extend(group, table, slots, recalled_tokens)
        self._count(request)
        self.index(request, had_tokens, min(target_tokens, reached))

    def advance(self, request: Request, computed_tokens: int, target_tokens: int) -> None:
        """A decode goes on, by a step or several: what it leaves behind once so many tokens are
        computed is free, and it has its blocks up to the target. Only where nothing is found again:
        else blocks are told apart by when they were freed."""
        assert not self.prefix_caching
        still = self._still.get(request.request_id)
        if (
            still is not None
            and target_tokens <= still.slots
            and computed_tokens < still.computed_tokens
        ):
            return
        tables = self._tables[request.request_id]
        self._leave_behind(tables, computed_tokens)
        for group, table in zip(self.layout.groups, tables, strict=True):
            if group.keeps not in ("all", "state"):
                # Of blocks that several steps fill, the first ones may be left behind by now.
                first = group.skipped_tokens(computed_tokens) // group.block_tokens
                table.extend([NULL_BLOCK] * (first - len(table)))
            self._extend(group, table, target_tokens)
        self._count(request)
        self._still[request.request_id] = self._still_of(computed_tokens, tables)

    def most_blocks(self, steps: int) -> int:
        """Blocks that a decode takes at most in so many steps, whatever it leaves behind."""
        return sum(ceil_div(steps, group.block_tokens) for group in self.layout.groups)

    def index(self, request: Request, had_tokens: int, tokens: int) -> None:
        """Blocks that became full between the two lengths can be found from now on."""
        if not self.prefix_caching:
            return
        unit = self.layout.block_tokens
        had_tokens, tokens = had_tokens // unit * unit, tokens // unit * unit
        if had_tokens == tokens:
            return
        keys = self.keys_of(request)
        tables = self._tables[request.request_id]
        for number, (group, table) in enumerate(zip(self.layout.groups, tables, strict=True)):
            size = group.block_tokens
            for entry in range(had_tokens // size, tokens // size):
                position = (entry + 1) * size // self.layout.hash_tokens - 1
                if 0 <= entry < len(table) and table[entry] and position < len(keys):
                    self._carry(table[entry], (keys[position], number))
                    if group.keeps == "state":
                        self._new_states.add((keys[position], number))
        for number in range(len(self.tiers)):
            self._write_through(number, keys, tables, had_tokens, tokens)

    def _write_through(
        self,
        number: int,
        keys: Sequence[int],
        tables: Sequence[Sequence[int]],
        had_tokens: int,
        tokens: int,
    ) -> None:
        """Blocks that became full go to a tier, and states where a step ended."""
        tier = self.tiers[number]
        chunk = tier.chunk_tokens
        for at in range(had_tokens // chunk, tokens // chunk):
            last = (at + 1) * chunk // self.layout.hash_tokens - 1
            if last >= len(keys):
                return
            written = tier.chunk_bytes if tier.write(keys[last]) else 0
            if self._has_states_at(tables, (at + 1) * chunk) and tier.write(
                state_key(keys[last]), self._state_bytes
            ):
                written += self._state_bytes
            self.written_bytes += written
            self.pending_writes[number] += written

    def _has_states_at(self, tables: Sequence[Sequence[int]], tokens: int) -> bool:
        """A step ended there, and the states of all groups are here."""
        if not self._state_bytes:
            return False
        for group, table in zip(self.layout.groups, tables, strict=True):
            if group.keeps == "state":
                entry = tokens // group.block_tokens - 1
                if entry >= len(table) or not table[entry]:
                    return False
        return True

    def release(self, request: Request) -> None:
        """All of the request's blocks lose a reference, group by group, last block first."""
        self._still.pop(request.request_id, None)
        for table in self._tables.pop(request.request_id, []):
            self._drop(table)
        request.kv_blocks = 0
        request.held = None

    def take(self, count: int) -> list[int]:
        """Take free blocks for a request that is not here yet."""
        return [self._pop() for _ in range(count)]

    def put_back(self, count: int, block_ids: list[int]) -> None:
        """Return what `take` gave."""
        assert count == len(block_ids)
        self._drop(block_ids)

    def put_back_held(self, request_id: int, count: int, block_ids: list[int]) -> None:
        """Return the blocks of a request that left with its KV: its tables go."""
        assert count == len(block_ids)
        self._still.pop(request_id, None)
        for table in self._tables.pop(request_id, []):
            self._drop(table)

    def blocks_at(self, tokens: int) -> int:
        """Blocks that a sequence of so many tokens, the last one not computed, arrives with."""
        return sum(len(self._kept_entries(group, tokens)) for group in self.layout.groups)

    def hand_over(self, request: Request, count: int, block_ids: list[int]) -> None:
        """Blocks from `take` now belong to the request; its full ones are indexed."""
        slots = request.computed_tokens + 1
        assert count == len(block_ids) == self.blocks_at(slots)
        fresh = iter(block_ids)
        self._still.pop(request.request_id, None)
        tables = self._tables[request.request_id] = []
        for group in self.layout.groups:
            kept = self._kept_entries(group, slots)
            tables.append([NULL_BLOCK] * kept.start + [next(fresh) for _ in kept])
        self._count(request)
        self.index(request, 0, request.computed_tokens)

    def clear(self) -> None:
        """Forget everything; all blocks are free."""
        self.blocks_free = self.blocks_total
        self._tables.clear()
        self._still.clear()
        self._blocks.clear()
        self._free_first.clear()
        self._free_last.clear()
        self._new_states.clear()
        self._index.clear()
        self._used = 0

    def tables_of(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """Block ids of each group, 0 for the null block; empty if it holds none."""
        return tuple(tuple(table) for table in self._tables.get(request.request_id, ()))

    def _tables_of(self, request: Request) -> list[list[int]]:
        tables = self._tables.get(request.request_id)
        if tables is None:
            tables = self._tables[request.request_id] = [[] for _ in self.layout.groups]
        return tables

    def _kept_entries(self, group: KvGroup, slots: int) -> range:
        """Entries of a table that hold blocks for so many tokens, the last one not computed."""
        if group.keeps == "state" and not self.prefix_caching:
            return range(self._state_slots)
        last = ceil_div(slots, group.block_tokens)
        return range(min(group.skipped_tokens(slots - 1) // group.block_tokens, last), last)

    def _missing(
        self, request: Request, target_tokens: int, hit: Hit, in_flight_tokens: int = 0
    ) -> int:
        """Blocks that are lacking; with `in_flight_tokens`, windows hold what they reach only."""
        tables = self._tables.get(request.request_id)
        total = 0
        for number, group in enumerate(self.layout.groups):
            held = len(tables[number]) if tables is not None else 0
            if hit.tables:
                held += len(hit.tables[number])
            entries = self._entries(group, target_tokens)
            if in_flight_tokens:
                entries = min(entries, group.blocks_held(target_tokens, in_flight_tokens))
            entries = max(0, entries - held)
            most = self._state_slots if group.keeps == "state" else entries
            if hit.lower_tokens and group.keeps == "state":
                most += 1  # for the one that comes from below
            total += min(entries, most)
        touched = [block for block in hit.block_ids if not self._blocks[block].references]
        return total + len(touched)

    def _entries(self, group: KvGroup, tokens: int) -> int:
        if group.keeps == "state" and not self.prefix_caching:
            return self._state_slots
        return ceil_div(tokens, group.block_tokens)

    def _extend(
        self, group: KvGroup, table: list[int], target_tokens: int, recalled_tokens: int = 0
    ) -> None:
        if recalled_tokens and group.keeps == "state":
            entry = recalled_tokens // group.block_tokens - 1
            table.extend([NULL_BLOCK] * (entry - len(table)))
            table.append(self._pop())
        missing = self._entries(group, target_tokens) - len(table)
        if missing <= 0:
            return
        if group.keeps == "state" and self.prefix_caching:
            # States between the last one and the new one never exist.
            table.extend([NULL_BLOCK] * (missing - 1))
            missing = 1
        table.extend(self._pop() for _ in range(missing))

    def _forget(self, request: Request) -> None:
        """Free what no later token reads, judged by the tokens whose KV exists."""
        tables = self._tables.get(request.request_id)
        if tables is None:
            return
        self._leave_behind(tables, request.computed_tokens)
        self._count(request)

    def _leave_behind(self, tables: Sequence[list[int]], computed_tokens: int) -> None:
        for group, table in zip(self.layout.groups, tables, strict=True):
            if group.keeps == "all" or (group.keeps == "state" and not self.prefix_caching):
                continue
            count = group.skipped_tokens(computed_tokens) // group.block_tokens
            freed: list[int] = []
            # Entries before the first null one were freed earlier.
            for entry in range(min(count, len(table)) - 1, -1, -1):
                if not table[entry]:
                    if group.keeps == "state":
                        continue
                    break
                freed.append(table[entry])
                table[entry] = NULL_BLOCK
            self._unreference(freed)

    def _still_of(self, computed_tokens: int, tables: Sequence[Sequence[int]]) -> _Still:
        """For a sequence that has just left behind what its windows let it."""
        found = _Still(_FOREVER, _FOREVER)
        for group, table in zip(self.layout.groups, tables, strict=True):
            if group.keeps == "state" and not self.prefix_caching:
                continue
            size = group.block_tokens
            found.slots = min(found.slots, len(table) * size)
            if group.keeps == "all":
                continue
            left = group.skipped_tokens(computed_tokens) // size
            found.computed_tokens = min(
                found.computed_tokens, group.computed_tokens_to_skip((left + 1) * size)
            )
        return found

    def _count(self, request: Request) -> None:
        held = [block for table in self._tables[request.request_id] for block in table if block]
        request.held = held
        request.kv_blocks = len(held)

    def _pop(self) -> int:
        assert self.blocks_free > 0
        self.blocks_free -= 1
        if self._free_first:
            number = self._free_first.pop()
            self._blocks[number].references = 1
            return number
        if self._used < self.blocks_total:
            self._used += 1
            self._blocks[self._used] = _Block(1)
            return self._used
        number, _ = self._free_last.popitem(last=False)
        block = self._blocks[number]
        assert block.key is not None
        carriers = self._index[block.key]
        del carriers[number]
        if not carriers:
            del self._index[block.key]
        block.key = None
        self.evicted_blocks += 1
        block.references = 1
        return number

    def _carry(self, number: int, key: tuple[int, int]) -> None:
        """A block can be found by a key, after those that carry it already."""
        block = self._blocks[number]
        if block.key is None:
            block.key = key
            self._index.setdefault(key, {})[number] = None

    def _touch(self, number: int) -> None:
        block = self._blocks[number]
        if not block.references:
            del self._free_last[number]  # it was found by its key
            self.blocks_free -= 1
        block.references += 1

    def _drop(self, table: Sequence[int]) -> None:
        self._unreference([block for block in reversed(table) if block])

    def _unreference(self, numbers: Sequence[int]) -> None:
        first: list[int] = []
        for number in numbers:
            block = self._blocks[number]
            assert block.references > 0
            block.references -= 1
            if not block.references:
                self.blocks_free += 1
                if block.key is None:
                    first.append(number)
                else:
                    self._free_last[number] = None
        self._free_first.extend(reversed(first))

    def recount(self, holders: Sequence[Sequence[int]] = ()) -> list[str]:
        """Problems found by counting all references from scratch.

        `holders`: lists of ids that are held outside the tables (reservations).
        """
        counted: dict[int, int] = {}
        for table in [*(table for tables in self._tables.values() for table in tables), *holders]:
            for block in table:
                if block:
                    counted[block] = counted.get(block, 0) + 1
        problems = [
            f"block {number} has {block.references} references, counted {counted.get(number, 0)}"
            for number, block in self._blocks.items()
            if block.references != counted.get(number, 0)
        ][:8]
        for number, group in enumerate(self.layout.groups):
            if group.keeps != "state" or self.prefix_caching:
                continue
            problems += [
                f"request {name} has {len(tables[number])} of {self._state_slots} state slots"
                for name, tables in self._tables.items()
                if tables[number] and len(tables[number]) != self._state_slots
            ]
        free = {number for number, block in self._blocks.items() if not block.references}
        if sorted(free) != sorted([*self._free_first, *self._free_last]):
            problems.append("the free list is not the set of unreferenced blocks")
        if self.blocks_free != len(free) + self.blocks_total - self._used:
            problems.append(f"{self.blocks_free} blocks free, counted {len(free)}")
        if any(self._blocks[n].key != key for key, blocks in self._index.items() for n in blocks):
            problems.append("the index names a block for a key that it does not carry")
        return problems


def _keeps_some(kind: tuple[bool, str, int, int]) -> bool:
    return kind[0]
