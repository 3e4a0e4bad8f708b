"""Identity of KV blocks: free order, eviction, hits, tiers, keys."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.kv.blocks import BlockPool
from emu.kv.counting import NO_HIT, CountingPool
from emu.kv.keys import block_keys
from emu.kv.tiers import LowerTier, chunk_tokens_for
from emu.request import Prefix, Request


def request(rid, prompt, output=1, start=0, tokens=None, prefix=None):
    if tokens is None:
        tokens = list(range(start, start + prompt + output))
    return Request(
        request_id=rid,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
        prefix=prefix or Prefix(np.array(tokens, dtype=np.int64)),
    )


def admit(pool, r, target=None):
    hit = pool.lookup(r)
    target = r.prompt_tokens if target is None else target
    assert pool.need(r, target, hit) <= pool.blocks_free
    pool.grow(r, hit.tokens, target, hit)
    r.computed_tokens = target
    return hit


# --- keys ---------------------------------------------------------------------------------------
def test_keys_are_those_of_equal_prefixes():
    a = block_keys(Prefix(np.arange(70)), 16, 64)
    b = block_keys(Prefix(np.array([*range(40), 999, *range(41, 70)])), 16, 64)
    assert len(a) == 4
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert a[3] != b[3]  # the chain carries the difference on


def test_keys_tell_order_and_position_apart():
    forward = block_keys(Prefix(np.arange(16)), 16, 16)
    backward = block_keys(Prefix(np.arange(16)[::-1].copy()), 16, 16)
    assert forward != backward
    twice = block_keys(Prefix(np.zeros(64, dtype=np.int64)), 16, 64)
    assert len(set(twice)) == 4


def test_keys_of_hashed_blocks_are_cut_to_the_block_size():
    one = Prefix(hash_ids=(7, 8, 9))
    keys = block_keys(one, 16, 1200)
    assert len(keys) == 1200 // 16
    other = block_keys(Prefix(hash_ids=(7, 8, 10)), 16, 1300)
    assert keys[:64] == other[:64]  # two blocks of 512 tokens are equal
    assert keys[64] != other[64]
    assert len(set(keys)) == len(keys)


def test_a_block_over_two_hashed_blocks_needs_both():
    # 48 does not divide 512: block 10 covers tokens 480..527, of hashed blocks 0 and 1.
    a = block_keys(Prefix(hash_ids=(1, 2)), 48, 1024)
    b = block_keys(Prefix(hash_ids=(1, 3)), 48, 1024)
    assert a[:10] == b[:10]
    assert a[10] != b[10]


def test_unknown_content_has_no_keys():
    assert block_keys(None, 16, 100) == []
    assert block_keys(Prefix(), 16, 100) == []
    assert block_keys(Prefix(np.arange(15)), 16, 15) == []
    assert block_keys(Prefix(hash_ids=(5,)), 16, 15) == []


def test_keys_do_not_depend_on_the_process():
    code = (
        "import numpy as np\nfrom emu.kv.keys import block_keys\nfrom emu.request import Prefix\n"
        "print(block_keys(Prefix(np.arange(40)), 16, 40), block_keys(Prefix(hash_ids=(3,4)), 512, 1024))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(seen) == 1
    expected = block_keys(Prefix(np.arange(40)), 16, 40)
    assert str(expected) in seen.pop()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_keys_are_equal_exactly_for_equal_prefixes(left, right):
    a = block_keys(Prefix(np.array(left, dtype=np.int64)), 4, len(left))
    b = block_keys(Prefix(np.array(right, dtype=np.int64)), 4, len(right))
    for block, (x, y) in enumerate(zip(a, b, strict=False)):
        end = (block + 1) * 4
        assert (x == y) == (left[:end] == right[:end])


def test_a_pool_of_other_blocks_has_other_keys_of_a_request():
    r = request(0, 64)
    small, large = BlockPool(10, 16).keys_of(r), BlockPool(10, 32).keys_of(r)
    assert (len(small), len(large)) == (4, 2)
    assert large == small[1::2], "a key is that of all before it"
    pool = BlockPool(10, 16)
    assert pool.keys_of(r) == small
    assert pool.keys_of(r) is pool.keys_of(r), "they are worked out once"


# --- the pool -----------------------------------------------------------------------------------
def test_a_cached_prompt_leaves_one_token_to_compute():
    """Section 6.3: a fully cached 64-token prompt with blocks of 16 hits 48."""
    pool = BlockPool(100, 16)
    admit(pool, request(0, 64))
    assert admit(pool, request(1, 64)).npu_tokens == 48
    assert pool.blocks_free == 100 - 4 - 1


def test_free_list_is_fifo_and_a_sequence_is_freed_from_its_tail():
    pool = BlockPool(6, 16)
    r = request(0, 48)
    admit(pool, r)
    pool.release(r)
    assert pool.blocks_free == 6
    for taken, found in ((3, 3), (1, 2), (1, 1), (1, 0)):  # three have never been used
        pool.take(taken)
        assert pool.match(request(1, 64)) == found * 16


def test_eviction_forgets_the_key_of_the_popped_block_only():
    pool = BlockPool(4, 16)
    r = request(0, 64)
    admit(pool, r)
    pool.release(r)
    other = request(1, 16, start=10_000)
    admit(pool, other)
    again = request(2, 80)
    assert pool.lookup(again).npu_tokens == 48  # the tail of the freed sequence goes first
    assert pool.evicted_blocks == 1


def test_a_touched_block_leaves_the_free_list_and_counts_in_the_need():
    pool = BlockPool(4, 16)
    r = request(0, 64)
    admit(pool, r)
    pool.release(r)
    again = request(1, 64)
    hit = pool.lookup(again)
    assert pool.need(again, 64, hit) == 4  # three idle hits and one fresh block
    pool.grow(again, hit.tokens, 64, hit)
    assert pool.blocks_free == 0
    assert pool.recount([(4, again.held)]) == []
    pool.release(again)
    assert pool.blocks_free == 4


def test_newest_block_wins_and_the_old_one_takes_no_key_with_it():
    pool = BlockPool(8, 16)
    a, b = request(0, 17), request(1, 17)
    pool.grow(a, 0, 17)
    pool.grow(b, 0, 17)  # no lookup: the same content twice
    again = request(2, 32)
    assert pool.need(again, 16, pool.lookup(again)) == 0  # b's, or a's, which are in use
    pool.release(a)
    assert pool.need(again, 16, pool.lookup(again)) == 0
    for rid in range(3):  # pop everything that is free, a's blocks included
        admit(pool, request(10 + rid, 32, start=1000 * (rid + 1)))
    assert pool.evicted_blocks == 0
    assert pool.lookup(again).npu_tokens == 16


def test_a_replaced_block_that_is_computed_again_is_the_newest():
    pool = BlockPool(8, 16)
    a, b = request(0, 49), request(1, 33)
    pool.grow(a, 0, 49)
    pool.grow(b, 0, 33)  # the first two of a's blocks are replaced
    pool.index(a, 16, 48)  # a's second block comes back, the third was there all the time
    pool.release(b)
    again = request(2, 64)
    hit = pool.lookup(again)
    assert (hit.npu_tokens, pool.need(again, 48, hit)) == (48, 1)  # b's first block is free
    assert pool.recount([(4, a.held)]) == []


def test_fresh_blocks_are_taken_before_freed_ones():
    pool = BlockPool(3, 16)
    r = request(0, 16)
    admit(pool, r)
    pool.release(r)
    pool.take(2)
    assert pool.evicted_blocks == 0
    pool.take(1)
    assert pool.evicted_blocks == 1


def test_counting_pool_is_exact():
    pool = CountingPool(10, 16)
    r = request(0, 100)
    assert pool.lookup(r) is NO_HIT
    assert pool.need(r, 100) == 7
    pool.grow(r, 0, 100)
    assert (pool.blocks_free, r.kv_blocks) == (3, 7)
    assert pool.need(r, 112) == 0
    assert pool.need(r, 113) == 1
    pool.release(r)
    assert (pool.blocks_free, r.kv_blocks) == (10, 0)


@pytest.mark.parametrize("seed", range(20))
def test_pool_conserves_blocks(seed):
    rng = np.random.default_rng(seed)
    pool, held = BlockPool(40, 4), {}
    for step in range(300):
        if held and rng.random() < 0.45:
            r = held.pop(sorted(held)[int(rng.integers(len(held)))])
            pool.release(r)
        else:
            family = int(rng.integers(3))
            tokens = [family * 100 + i for i in range(int(rng.integers(1, 30)))]
            r = request(step, len(tokens), 1, tokens=[*tokens, 5])
            if pool.need(r, r.prompt_tokens, pool.lookup(r)) <= pool.blocks_free:
                admit(pool, r)
                held[step] = r
        owners = [(r.kv_blocks, r.held) for r in held.values()]
        assert pool.recount(owners) == [], f"{seed=} {step=}"


# --- tiers --------------------------------------------------------------------------------------
def tier(chunks, *, chunk_tokens=256, shared=False):
    return LowerTier(
        "cpu",
        capacity_bytes=chunks * chunk_tokens * 2,
        chunk_tokens=chunk_tokens,
        bytes_per_token=2,
        shared=shared,
    )


def test_chunk_is_whole_blocks():
    assert chunk_tokens_for(16, 256) == 256
    assert chunk_tokens_for(48, 256) == 240
    assert chunk_tokens_for(512, 256) == 512


def test_chunks_are_written_through_when_complete():
    host = tier(10)
    pool = BlockPool(100, 16, [host])
    r = request(0, 600)
    pool.grow(r, 0, 250)
    assert len(host) == 0
    pool.grow(r, 250, 600)
    assert len(host) == 2  # 600 // 256
    assert pool.written_bytes == 2 * 512


def test_another_replica_hits_the_shared_tier_below_its_reached_length():
    """Section 6.3: the original could hit all of a 512-token prompt and wait for ever."""
    host = tier(10, shared=True)
    first, second = BlockPool(100, 16, [host]), BlockPool(100, 16, [host])
    admit(first, request(0, 512))
    r = request(1, 512)
    hit = second.lookup(r)
    assert (hit.npu_tokens, hit.lower_tokens, hit.recall_bytes) == (0, 256, 512)
    second.grow(r, hit.tokens, 512, hit)
    assert second.blocks_free == 68
    assert second.lookup(request(2, 512)).npu_tokens == 496  # the recalled blocks can be found


def test_lower_hit_counts_only_what_the_pool_lacks():
    host = tier(10)
    pool = BlockPool(100, 16, [host])
    r = request(0, 1000)
    admit(pool, r)
    pool.release(r)
    pool.take(48)  # 37 fresh ones, then the tail of the freed sequence: blocks 52..62
    again = request(1, 1000)
    hit = pool.lookup(again)
    assert hit.npu_tokens == 62 * 16 - 10 * 16
    # Chunks of 256: the pool holds 832 tokens = 3.25 chunks, a fourth would end beyond 999.
    assert hit.lower_tokens == 0


def test_recall_needs_a_whole_chunk_of_gain():
    host = tier(10)
    pool = BlockPool(100, 16, [host])
    r = request(0, 1040)
    admit(pool, r)
    pool.release(r)
    pool.take(35 + 65 - 17)  # leaves 17 blocks = 272 tokens of the sequence
    hit = pool.lookup(request(1, 1040))
    assert hit.npu_tokens == 272
    # From chunk 1 on, 3 chunks (to 1024) are there: 1024 - 272 = 752 tokens gained.
    assert (hit.lower_tokens, hit.recall_bytes) == (752, 3 * 512)


def test_tier_evicts_the_oldest_written():
    host = tier(2)
    assert host.write(1)
    assert host.write(2)
    assert not host.write(1)  # present: not refreshed, nothing written
    assert host.write(3)
    assert 1 not in host
    assert 2 in host
    assert (len(host), host.evicted_chunks, host.used_bytes) == (2, 1, 1024)


# --- content by runs ----------------------------------------------------------------------------
class BlockByBlock:
    """The rules of `BlockPool`, one block and one key after the other."""

    def __init__(self, blocks, size):
        self.size, self.evicted = size, 0
        self.free = list(range(blocks))
        self.references = [0] * blocks
        self.index, self.content, self.held = {}, {}, {}

    def found(self, r):
        blocks = []
        for key in self.keys(r)[: (r.prompt_tokens + r.generated_tokens - 1) // self.size]:
            if key not in self.index:
                break
            blocks.append(self.index[key])
        return blocks

    def need(self, r, target, hit):
        fresh = -(-target // self.size) - len(self.held.get(r.request_id, [])) - len(hit)
        return max(0, fresh) + sum(not self.references[block] for block in hit)

    def grow(self, r, target, hit):
        held = self.held.setdefault(r.request_id, [])
        for block in hit:
            if not self.references[block]:
                self.free.remove(block)
            self.references[block] += 1
        held += hit
        held += self.take(max(0, -(-target // self.size) - len(held)))

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.references[block] = 1
            key = self.content.pop(block, None)
            if key is not None and self.index.get(key) == block:
                del self.index[key]
                self.evicted += 1
        return taken

    def add(self, r, first, last):
        for key, block in list(zip(self.keys(r), self.held[r.request_id], strict=False))[
            first:last
        ]:
            if self.content.get(block) == key == self.key_of(block):
                continue
            self.index[key] = block
            self.content[block] = key

    def release(self, blocks):
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)

    def key_of(self, block):
        """Where it can be found."""
        key = self.content.get(block)
        return key if self.index.get(key) == block else None

    @staticmethod
    def keys(r):
        return block_keys(r.prefix, 4, r.prompt_tokens)


def keys_in_order(pool):
    """The free list from its head: the key by which each block can be found."""
    paths = {id(node): (root, path) for root, path, node in pool._index.nodes()}
    order = [None] * (pool.blocks_free - sum(run.end - run.start for run in pool.free_runs()))
    for run in pool.free_runs():
        keys = [None] * run.end
        if run.node is not None:
            root, keys = paths[id(run.node)]
            if root:
                keys = block_keys(
                    Prefix(hash_ids=tuple(keys), hash_block_tokens=8), 4, 8 * len(keys)
                )
        order += keys[run.start : run.end][::-1]
    return order


def drawn_request(rng, rid, *, hashed):
    """One of few families, which branch at every depth."""
    prompt = int(rng.integers(1, 60))
    depth = int(rng.integers(0, 8))
    family = [int(rng.integers(2)) if i % 3 == depth % 3 else 0 for i in range(8)]
    if hashed:  # units of 8 tokens = 2 blocks
        prefix = Prefix(hash_ids=tuple(family[: -(-prompt // 8)]), hash_block_tokens=8)
        return request(rid, prompt, 4, prefix=prefix)
    return request(rid, prompt, 4, tokens=[*np.repeat(family, 8)[:prompt], 1, 0, 1, rid % 2])


@pytest.mark.parametrize("seed", range(24))
def test_runs_are_found_and_forgotten_as_blocks_one_by_one(seed):
    rng = np.random.default_rng(seed)
    pool, plain = BlockPool(40, 4), BlockByBlock(40, 4)
    held: dict[int, Request] = {}
    reserved: list[list[int]] = []
    hits = 0
    for step in range(250):
        choice = rng.random()
        one = list(held.values())[int(rng.integers(len(held)))] if held else None
        if one is not None and choice < 0.35:
            del held[one.request_id]
            pool.release(one)
            plain.release(plain.held.pop(one.request_id))
        elif one is not None and choice < 0.55:  # decode steps
            target = min(one.computed_tokens + int(rng.integers(1, 5)), one.prompt_tokens + 4)
            if pool.need(one, target) <= pool.blocks_free:
                more = pool.need(one, target)
                pool.take(more)
                one.kv_blocks += more
                plain.grow(one, target, [])
                for position in range(one.computed_tokens // 4, target // 4):
                    pool.index_at(one, position)
                plain.add(one, one.computed_tokens // 4, target // 4)
                one.computed_tokens = target
        elif one is not None and choice < 0.6:  # what a batch in flight computed was lost
            first = int(rng.integers(one.computed_tokens // 4 + 1))
            pool.index(one, first * 4, one.computed_tokens)
            plain.add(one, first, one.computed_tokens // 4)
        elif choice < 0.62 and pool.blocks_free > 3 and len(reserved) < 3:
            pool.take(3)
            reserved.append(plain.take(3))
        elif reserved and choice < 0.7:
            pool.put_back(3, [])
            plain.release(reserved.pop(int(rng.integers(len(reserved)))))
        else:
            r = drawn_request(rng, step, hashed=seed % 2 == 0)
            is_blind = rng.random() < 0.3  # computed at the same time as its like
            hit = NO_HIT if is_blind else pool.lookup(r)
            found = [] if is_blind else plain.found(r)
            assert hit.npu_tokens == len(found) * 4
            target = r.prompt_tokens
            assert pool.need(r, target, hit) == plain.need(r, target, found)
            if pool.need(r, target, hit) > pool.blocks_free:
                continue
            hits += len(found)
            is_short = rng.random() < 0.3  # a first chunk, then the rest
            middle = max(hit.npu_tokens, target // 2) if is_short else target
            pool.grow(r, hit.npu_tokens, middle, hit)
            plain.grow(r, middle, found)
            plain.add(r, len(found), middle // 4)
            pool.grow(r, middle, target)
            plain.grow(r, target, [])
            plain.add(r, middle // 4, target // 4)
            r.computed_tokens = target
            held[step] = r
        keys = [plain.key_of(block) for block in plain.free]
        assert keys_in_order(pool) == keys, f"{seed=} {step=}"
        assert pool.findable() == plain.index.keys(), f"{seed=} {step=}"
        assert pool.evicted_blocks == plain.evicted
        owners = [(r.kv_blocks, r.held) for r in held.values()]
        owners += [(3, None) for _ in reserved]
        assert pool.recount(owners) == [], f"{seed=} {step=}"
    assert hits > 30


@settings(max_examples=60)
@given(st.data())
def test_a_turn_goes_on_from_the_keys_of_an_earlier_one(data) -> None:
    """Whatever of its context the two have in common, the keys are those of its tokens."""
    size = data.draw(st.sampled_from([1, 4, 16]))
    spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=5)
    context = data.draw(spans)
    before = None
    for _ in range(3):
        cut = data.draw(st.integers(0, len(context)))
        ranges = context[:cut] + data.draw(spans)
        if ranges and data.draw(st.booleans()):
            first, count = ranges[-1]
            ranges[-1] = (first, max(1, count - data.draw(st.integers(0, 5))))
        turn = Prefix(ranges=ranges)
        turn.before = before
        ids = [first + i for first, count in ranges for i in range(count)]
        plain = block_keys(Prefix(np.array(ids, dtype=np.int64)), size, len(ids))
        assert block_keys(turn, size, len(ids)) == plain
        assert turn.before is None
        if ranges:
            assert turn.token_ids.tolist() == ids
        before, context = turn, ranges
