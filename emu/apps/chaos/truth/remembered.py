"""What a replica remembers: each prefix hit is the one that its blocks and tiers hold.

Restates docs/prefix-caching.md block by block, for vLLM's policy on one stage. A block is known by
all tokens up to its end; where two hold the same, the newer one is found. Blocks are taken from the
head of a list and come back to its end, the last one of a sequence first; what is taken is
forgotten. Turns of a session that goes on may be kept back for a time. Lower tiers get each chunk
when its last block is full, and forget the chunk that was written first. A replica is followed
until something else happens to it than arrivals, batches and tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from emu.apps.chaos.truth.seats import Seat
from emu.apps.chaos.truth.tape import Record, Tape, keys_of, to_ns
from emu.config.schema import VllmTable

_GIB: Final = 1 << 30
Place = tuple[str, object]
"""Where a tier is, so that replicas have it together."""
_MOVED: Final = ("skip_prefill", "max_prompt_tokens", "max_output_tokens")
"""Keys of `[workload]` that change what a request says or finds."""


class Said(msgspec.Struct, frozen=True):
    """What a request says: ids of its prompt and output, if the line tells them."""

    ids: tuple[int, ...]
    goes_on: bool
    """Its session has turns that wait for it."""
    priority: int


def said_in(tape: Tape, lines: Sequence[Record]) -> dict[int, Said] | None:
    """What each request says; None where lines do not say it all."""
    workload = keys_of(tape.config.workload)
    if any(workload.get(key) for key in _MOVED) or (workload.get("upscale") or 1) != 1:
        return None
    start_ns = to_ns(workload["start_s"])
    kept = [line for line in lines if line["arrival_time_ns"] >= start_ns]
    found: dict[int, Said] = {}
    for line in kept[: workload["limit"] or None]:
        turns = line.get("sub_requests", [line])
        for index, turn in enumerate(turns):
            ids = (*turn.get("input_tok_ids", ()), *turn.get("output_tok_ids", ()))
            ids = ids or _tokens_of_blocks(turn)
            if "images" in turn or "adapter" in line:
                return None
            later = [
                at
                for at, other in enumerate(turns)
                if index in (other.get("after") or ([at - 1] if "after" not in other else []))
            ]
            found[len(found)] = Said(ids, bool(later), line.get("priority", 0))
    return found


def _tokens_of_blocks(turn: Record) -> tuple[int, ...]:
    """A name for each token of a prompt of which only blocks of 512 tokens have names."""
    blocks = turn.get("hash_ids", ())
    known = min(int(turn["input_toks"]), 512 * len(blocks))
    return tuple(512 * blocks[at // 512] + at % 512 for at in range(known))


class Tier:
    """A lower tier: chunks in the order in which they were written."""

    def __init__(self, chunk_blocks: int, chunks_max: int) -> None:
        self.chunk_blocks = chunk_blocks
        self.chunks_max = chunks_max
        self.chunks: dict[int, None] = {}

    def write(self, key: int) -> None:
        """Keep a chunk, known by its last block, unless it is here."""
        if key in self.chunks or not self.chunks_max:
            return
        while len(self.chunks) >= self.chunks_max:
            del self.chunks[next(iter(self.chunks))]
        self.chunks[key] = None


class Shelf:
    """The blocks of one replica."""

    def __init__(self, seat: Seat, retain_ns: int, tiers: Sequence[Tier]) -> None:
        self.seat = seat
        self.size = int(seat.scheduler.block_size)
        self.tiers = tiers
        self.retain_ns = retain_ns
        self.free: dict[int, None] = dict.fromkeys(range(seat.blocks))
        """The head of the list is taken first."""
        self.kept: dict[int, int] = {}
        """Until when a block is kept back, in the order of keeping."""
        self.urgency: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.block_of: dict[int, int] = {}
        """The newest block with a key."""
        self.users: dict[int, int] = defaultdict(int)
        self.held: dict[int, list[int]] = {}
        """Blocks of each row that runs."""
        self.leaving: list[tuple[int, Said]] = []
        """Rows that have ended, whose blocks the engine has not taken back."""

    def hit(self, keys: Sequence[int], usable_tokens: int) -> tuple[int, int, int]:
        """Tokens that a new row finds here, those that a tier has behind them, and which tier."""
        found, most = 0, min(usable_tokens // self.size, len(keys))
        while found < most and keys[found] in self.block_of:
            found += 1
        for number, tier in enumerate(self.tiers):
            start, count = found // tier.chunk_blocks, 0
            while (last := (start + count + 1) * tier.chunk_blocks) <= most:
                if keys[last - 1] not in tier.chunks:
                    break
                count += 1
            more = (start + count) * tier.chunk_blocks - found
            if count and more >= tier.chunk_blocks:
                return found * self.size, more * self.size, number
        return found * self.size, 0, -1

    def begin(self, row: int, keys: Sequence[int], found_tokens: int) -> None:
        """A row holds the blocks that it finds."""
        blocks = [self.block_of[key] for key in keys[: found_tokens // self.size]]
        for block in blocks:
            self.free.pop(block, None)
            self.kept.pop(block, None)
            self.users[block] += 1
        self.held[row] = blocks

    def grow(self, row: int, keys: Sequence[int], had: int, tokens: int, known: int) -> bool:
        """A row has blocks for so many tokens; those full from `had` on can be found, as far as
        tokens are `known`. False: there are not enough."""
        blocks = self.held[row]
        while len(blocks) * self.size < tokens:
            block = self._taken()
            if block < 0:
                return False
            self.users[block] = 1
            blocks.append(block)
        first, last = had // self.size, min(tokens, known) // self.size
        for at in range(first, min(last, len(keys))):
            block = blocks[at]
            if self.block_of.get(keys[at]) != block:
                self.key_of[block] = keys[at]
                self.block_of[keys[at]] = block
        for tier in self.tiers:
            whole = min(last, len(keys)) // tier.chunk_blocks
            for chunk in range(first // tier.chunk_blocks, whole):
                tier.write(keys[(chunk + 1) * tier.chunk_blocks - 1])
        return True

    def _taken(self) -> int:
        """The block that is taken next; what it held is forgotten. -1: there is none."""
        if self.free:
            block = next(iter(self.free))
            del self.free[block]
        elif self.kept:
            block = max(self.kept, key=lambda one: self.urgency[one])  # the first of the largest
            del self.kept[block]
        else:
            return -1
        key = self.key_of.pop(block, None)
        if key is not None and self.block_of.get(key) == block:
            del self.block_of[key]
        return block

    def release(self, row: int, now_ns: int, keeps: Said | None = None) -> None:
        """A row leaves; `keeps`: its session goes on."""
        for block in reversed(self.held.pop(row)):
            self.users[block] -= 1
            if self.users[block]:
                continue
            if keeps is not None and keeps.goes_on and self.retain_ns:
                self.kept[block] = now_ns + self.retain_ns
                self.urgency[block] = keeps.priority
            else:
                self.free[block] = None

    def see_time(self, now_ns: int) -> None:
        """What was kept for long enough is like any other."""
        for block in [block for block, until_ns in self.kept.items() if until_ns <= now_ns]:
            del self.kept[block]
            self.free[block] = None


class Remembered:
    """All prefix caches of a run."""

    def __init__(self, tape: Tape, said: Mapping[int, Said] | None) -> None:
        self._tape = tape
        self._got: dict[int, int] = defaultdict(int)
        self._names: dict[tuple[int, tuple[int, ...]], int] = {}
        self._keys: dict[tuple[int, int], list[int]] = {}
        self._said = said
        self.matched: dict[tuple[int, int], dict[int, int]] = {}
        """By row and instant: tokens of its prompt that each replica had when it was queued."""
        self._shelves = self._made() if self._said is not None else {}

    def _made(self) -> dict[int, Shelf]:
        network, seats = self._tape.config.network, self._tape.seats
        if any(fault["kind"] in ("kv_shrink", "overload") for fault in self._tape.faults):
            return {}
        users: dict[Place, list[Seat]] = defaultdict(list)
        for seat in seats:
            for kind in network.tiers:
                users[self._place(kind, seat)].append(seat)
        found: dict[int, Shelf] = {}
        shared: dict[Place, Tier] = {}
        for seat in seats:
            places = [self._place(kind, seat) for kind in network.tiers]
            others = [other for place in places for other in users[place]]
            if not all(_is_followed(other) for other in (seat, *others)):
                continue
            retain_ns = to_ns(keys_of(seat.scheduler).get("retain_s") or 0.0)
            tiers = []
            for place in places:
                tier = shared.get(place)
                if tier is None:
                    tier = self._tier(place, seat, len(users[place]))
                if network.tier_shared:
                    shared[place] = tier
                tiers.append(tier)
            found[seat.replica] = Shelf(seat, retain_ns, tiers)
        return found

    def _place(self, kind: str, seat: Seat) -> Place:
        """The memory of its machine, or the pool that its machine names by its figures."""
        node = self._tape.config.nodes[seat.place[1]]
        if kind == "cpu":
            return kind, seat.machine
        return kind, (node.cxl_gib, node.cxl_gbytes_per_s, node.cxl_latency_ns, node.cxl_devices)

    def _tier(self, place: Place, seat: Seat, users: int) -> Tier:
        config = self._tape.config
        network, node = config.network, config.nodes[seat.place[1]]
        gib = node.cxl_gib
        if place[0] == "cpu":
            gib = min(network.cpu_tier_gib or node.host_memory_gib, node.host_memory_gib)
        size = int(seat.scheduler.block_size)
        blocks = max(1, network.tier_block_tokens // size)
        share = int(gib * _GIB) // (1 if network.tier_shared else users)
        return Tier(blocks, share // (blocks * size * seat.kv_token_bytes))

    def judge(self) -> None:
        """Replay all caches."""
        if not self._shelves:
            return
        self._tape.replay(
            {
                "ended": self._ended,
                "lost": self._leaves,
                "routed": self._leaves,
                "migrated": self._migrated,
                "state": self._state,
                "fault": self._fault,
                "tokens": self._tokens,
                "batch": self._batch,
                "queued": self._queued,
            }
        )

    # What ends the following of a replica.
    def _drop(self, replica: int) -> None:
        gone = self._shelves.pop(replica, None)
        if gone is None:
            return
        for other, shelf in list(self._shelves.items()):
            if any(tier in gone.tiers for tier in shelf.tiers):
                self._drop(other)

    def _leaves(self, record: Record) -> None:
        for replica, shelf in list(self._shelves.items()):
            if record["row"] in shelf.held:
                self._drop(replica)

    def _ended(self, record: Record) -> None:
        if record["status"] != "completed":
            self._leaves(record)

    def _migrated(self, record: Record) -> None:
        self._drop(record["source"])
        self._drop(record["destination"])

    def _state(self, record: Record) -> None:
        self._drop(record["replica"])

    def _fault(self, record: Record) -> None:
        if record["kind"] in ("host_cache_lost", "cxl_lost"):
            for replica in list(self._shelves):
                self._drop(replica)

    # What is followed.
    def _queued(self, record: Record) -> None:
        row = record["row"]
        if len(self._shelves) < len(self._tape.seats) or self._of(row) is None:
            return
        most = int(self._tape.arrived[row]["prompt"]) - 1
        self.matched[row, record["at_ns"]] = {
            replica: shelf.hit(self._keys_of(row, shelf.size), most)[0]
            for replica, shelf in self._shelves.items()
        }

    def _tokens(self, record: Record) -> None:
        shelf = self._shelves.get(record["replica"])
        for row in record["rows"]:
            self._got[row] += len(record["ends"])
            if shelf is None or row not in shelf.held:
                continue
            if self._got[row] < self._tape.arrived[row]["output"]:
                continue
            said = self._of(row)
            assert said is not None
            if shelf.seat.is_ahead:
                shelf.leaving.append((row, said))
            else:
                shelf.see_time(record["at_ns"])
                shelf.release(row, record["at_ns"], said)

    def _batch(self, record: Record) -> None:
        replica, at_ns = record["replica"], record["at_ns"]
        shelf = self._shelves.get(replica)
        if shelf is None:
            return
        if "first_layer" in record or "verified" in record:
            self._drop(replica)
            return
        shelf.see_time(at_ns)
        for row in record.get("preempted", ()):
            if row in shelf.held:
                shelf.release(row, at_ns)
        recalls = {recall[0]: recall[1:] for recall in record.get("recalls", ())}
        for row, before, new in record["members"]:
            said = self._of(row)
            if said is None or not self._member(shelf, record, (row, before, new), recalls):
                self._drop(replica)
                return
        for row, said in shelf.leaving:
            if row in shelf.held:
                shelf.release(row, at_ns, said)
        shelf.leaving.clear()

    def _member(
        self,
        shelf: Shelf,
        record: Record,
        member: tuple[int, int, int],
        recalls: dict[int, list[int]],
    ) -> bool:
        """One member of a batch; False where it cannot be followed."""
        row, before, new = member
        reached = self._tape.arrived[row]["prompt"] + self._got[row]
        keys, had = self._keys_of(row, shelf.size), before
        if row not in shelf.held:
            found, more, tier = shelf.hit(keys, reached - 1)
            self._tape.count("remembered")
            _, _, recalled = recalls.get(row, [-1, 0, 0])
            is_tier = recalls.get(row, [-1])[0]
            if (before, recalled, is_tier) != (found + more, more, tier):
                self._tape.say(
                    f"T5: batch {record['batch']} of replica {shelf.seat.replica} at "
                    f"{record['at_ns']} ns finds {before} tokens of row {row}, {recalled} of them "
                    f"in tier {is_tier}; should {found + more}, {more} of them in {tier}"
                )
                return False
            shelf.begin(row, keys, found)
            had = found
        return shelf.grow(row, keys, had, before + new, reached)

    def _of(self, row: int) -> Said | None:
        assert self._said is not None
        return self._said.get(self._tape.arrived[row]["request"])

    def _keys_of(self, row: int, size: int) -> list[int]:
        """A name for each block of a request whose tokens are told."""
        request = int(self._tape.arrived[row]["request"])
        found = self._keys.get((request, size))
        if found is None:
            said = self._of(row)
            assert said is not None
            found, before = [], -1
            for at in range(0, len(said.ids) - size + 1, size):
                one = before, said.ids[at : at + size]
                before = self._names.setdefault(one, len(self._names))
                found.append(before)
            self._keys[request, size] = found
        return found


def _is_followed(seat: Seat) -> bool:
    table = seat.scheduler
    is_odd = seat.is_hybrid or seat.stages > 1 or not seat.is_plain
    own = keys_of(table).get("eviction", "last") not in ("", "last")
    is_cached = isinstance(table, VllmTable) and table.caches_prefixes
    return is_cached and seat.role == "colocated" and not is_odd and not own
