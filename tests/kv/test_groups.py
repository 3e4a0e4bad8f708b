"""Groups of layers and the pool that serves them, against vLLM's own block tables.

The tables of the worked schedules were read off vLLM's KV cache manager (version 0.33, on a CPU).
"""

import random
from pathlib import Path

import numpy as np
import pytest

from emu.catalogue import model_from_file
from emu.errors import InputError
from emu.kv.counting import NO_HIT
from emu.kv.grouped import GroupedPool
from emu.kv.groups import KvGroup, KvLayout, kv_layout
from emu.request import Prefix, Request

CONFIGS = Path(__file__).parents[1] / "catalogue" / "configs"


def layout_of(name, **keys):
    return kv_layout(model_from_file(CONFIGS / f"{name}.json"), "bfloat16", **keys)


@pytest.mark.parametrize(
    ("name", "block_tokens", "group_layers"),
    [
        ("gpt-oss-20b", 16, [12, 12]),
        ("gemma-3-27b-it", 16, [9, 9, 9, 9, 8, 8, 10]),
        ("Llama-4-Scout-17B-16E-Instruct", 16, [12, 12, 12, 12]),
        ("Qwen3-Next-80B-A3B-Instruct", 544, [12, 12, 12, 12]),
        ("Jamba-v0.1", 80, [4] * 8),
        ("Nemotron-H-8B-Base-8K", 1040, [4] * 7),
        ("Falcon-H1-34B-Base", 1040, [72, 72]),
        ("Kimi-Linear-48B-A3B-Instruct", 1920, [7, 7, 6, 7]),
        ("MiMo-V2-Flash", 32, [9, 8, 8, 8, 8, 7]),
        ("Qwen3.5-27B", 784, [16] * 4),
        ("Qwen3.5-35B-A3B", 1056, [10] * 4),
        ("Qwen3.5-397B-A17B", 2096, [15] * 4),
        ("MiniMax-Text-01", 512, [10] * 8),
        ("NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 4160, [8] * 6),
        ("NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 8304, [12] * 5),
        ("Granite-4.0-H-Small", 528, [4] * 10),
        ("DeepSeek-V3.2", 16, [61]),
    ],
)
def test_layers_form_the_groups_that_vllm_forms(name, block_tokens, group_layers):
    layout = layout_of(name)
    assert layout.block_tokens == block_tokens
    assert sorted(group.layers for group in layout.groups) == sorted(group_layers)


@pytest.mark.parametrize(
    ("name", "keys", "block_bytes"),
    [
        ("gpt-oss-20b", {}, 393_216),
        ("gpt-oss-20b", {"keep_windows": False}, 786_432),
        ("Qwen3-Next-80B-A3B-Instruct", {}, 13_369_344),
        ("Qwen3-Next-80B-A3B-Instruct", {"draft_tokens": 2}, 13_762_560),
        ("MiMo-V2-Flash", {}, 737_280),
        ("DeepSeek-V3.2", {}, 16 * 78_324),
    ],
)
def test_bytes_of_a_block(name, keys, block_bytes):
    assert layout_of(name, **keys).block_bytes == block_bytes


def test_a_plain_model_has_one_group():
    layout = layout_of("phi-4")
    assert layout.is_uniform
    assert layout.block_bytes == 16 * 204_800


def test_a_long_decode_holds_its_full_blocks_and_one_window():
    layout = layout_of("gpt-oss-20b")
    assert layout.blocks_for(600, in_flight_tokens=64) == 38 + 13


# --- the pool -----------------------------------------------------------------------------------


def request(number, prompt, tokens=None):
    ids = np.arange(4000) + 10_000 * number if tokens is None else tokens
    return Request(
        request_id=number,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=1000,
        max_output_tokens=1000,
        prefix=Prefix(token_ids=ids.astype(np.int64)),
    )


def step(pool, owner, target):
    """One scheduled step that computes up to `target` tokens; the tokens that were found."""
    found = NO_HIT
    if not pool.tables_of(owner):
        found = pool.lookup(owner)
        owner.computed_tokens = found.tokens
    assert pool.need(owner, target, found) <= pool.blocks_free
    pool.grow(owner, owner.computed_tokens, target, found)
    owner.computed_tokens = target
    owner.generated_tokens = max(0, target - owner.prompt_tokens)
    return found.tokens


def gpt_oss_like():
    groups = (
        KvGroup(keeps="window", limit_tokens=128, layers=12, block_tokens=16),
        KvGroup(keeps="all", layers=12, block_tokens=16),
    )
    return KvLayout(groups=groups, block_bytes=1, block_tokens=16, hash_tokens=16)


def ids(first, last):
    return tuple(range(first, last + 1))


def test_window_blocks_are_freed_one_step_later_as_in_vllm():
    pool = GroupedPool(1000, gpt_oss_like(), prefix_caching=True)
    one = request(1, 300)
    step(pool, one, 300)
    assert pool.tables_of(one) == (ids(1, 19), ids(20, 38))
    one.generated_tokens = 1
    step(pool, one, 301)
    assert pool.tables_of(one) == ((0,) * 10 + ids(11, 19), ids(20, 38))
    for target in range(302, 305):
        step(pool, one, target)
    assert pool.tables_of(one) == ((0,) * 11 + ids(12, 19), ids(20, 38))
    step(pool, one, 305)
    assert pool.tables_of(one) == ((0,) * 11 + (*ids(12, 19), 39), (*ids(20, 38), 40))
    for target in range(306, 322):
        step(pool, one, target)
    assert pool.tables_of(one) == ((0,) * 12 + (*ids(13, 19), 39, 41), (*ids(20, 38), 40, 42))
    assert pool.recount() == []
    shared = np.concatenate((np.arange(4000)[:256] + 10_000, np.arange(4000) + 90_000))
    two = request(2, 400, shared)
    assert step(pool, two, 400) == 256
    windows, full = pool.tables_of(two)
    assert windows[:16] == (0,) * 8 + ids(9, 16)
    assert full[:16] == ids(20, 35)
    assert pool.recount() == []


def qwen_next_like():
    state = KvGroup(keeps="state", layers=12, block_tokens=544)
    full = KvGroup(keeps="all", layers=12, block_tokens=544)
    return KvLayout(
        groups=(state, state, state, full), block_bytes=1, block_tokens=544, hash_tokens=544
    )


def test_states_are_kept_where_steps_end_as_in_vllm():
    pool = GroupedPool(1000, qwen_next_like(), prefix_caching=True)
    one = request(1, 1642)
    expected = {
        544: ((1,), (2,), (3,), (4,)),
        1088: ((1, 5), (2, 6), (3, 7), (4, 8)),
        1632: ((0, 5, 9), (0, 6, 10), (0, 7, 11), (4, 8, 12)),
        1642: ((0, 0, 9, 13), (0, 0, 10, 14), (0, 0, 11, 15), (4, 8, 12, 16)),
    }
    for target, tables in expected.items():
        step(pool, one, target)
        assert pool.tables_of(one) == tables
    step(pool, one, 1643)
    assert pool.tables_of(one)[0] == (0, 0, 0, 13)
    assert one.kv_blocks == 7
    for shared_tokens, hit in ((1138, 1088), (1000, 544), (1642, 1632)):
        tokens = np.concatenate(
            (np.arange(4000)[:shared_tokens] + 10_000, np.arange(4000) + 70_000 + shared_tokens)
        )
        other = request(shared_tokens, 1700, tokens)
        assert pool.lookup(other).tokens == hit
    assert pool.recount() == []


def test_without_prefix_caching_a_sequence_has_one_state_for_life():
    pool = GroupedPool(1000, qwen_next_like(), prefix_caching=False)
    one = request(1, 1642)
    for target in (1000, 1642, 1643, 2000, 2200):
        step(pool, one, target)
    assert pool.tables_of(one) == ((1,), (2,), (3,), (4, 5, 6, 7, 8))
    pool.release(one)
    assert pool.blocks_free == 1000


def test_one_chunk_leaves_no_state_inside_it():
    pool = GroupedPool(1000, qwen_next_like(), prefix_caching=True)
    one = request(1, 1642)
    step(pool, one, 1642)
    twin = request(2, 1642, np.arange(4000) + 10_000)
    assert pool.lookup(twin).tokens == 0


def test_chunked_attention_frees_whole_chunks():
    chunk = KvGroup(keeps="chunk", limit_tokens=64, layers=4, block_tokens=16)
    full = KvGroup(keeps="all", layers=4, block_tokens=16)
    layout = KvLayout(groups=(chunk, full), block_bytes=1, block_tokens=16, hash_tokens=16)
    pool = GroupedPool(1000, layout, prefix_caching=True)
    one = request(1, 150)
    step(pool, one, 150)
    assert [len(table) for table in pool.tables_of(one)] == [10, 10]
    step(pool, one, 151)
    assert pool.tables_of(one)[0][:9].count(0) == 8
    for target in range(152, 194):
        step(pool, one, target)
    step(pool, one, 194)
    assert pool.tables_of(one)[0].count(0) == 12


def test_an_identical_prompt_leaves_its_last_block_to_compute():
    pool = GroupedPool(1000, gpt_oss_like(), prefix_caching=True)
    step(pool, request(1, 64), 64)
    assert pool.lookup(request(2, 64, np.arange(4000) + 10_000)).tokens == 48


def test_a_hit_needs_the_blocks_of_the_window_too():
    pool = GroupedPool(70, gpt_oss_like(), prefix_caching=True)
    one = request(1, 512)
    step(pool, one, 512)
    pool.release(one)
    assert pool.lookup(request(2, 600, one.prefix.token_ids)).tokens == 512
    other = request(3, 144)
    step(pool, other, 144)  # takes the 6 fresh blocks, then evicts 12 of the first's
    found = pool.lookup(request(4, 600, one.prefix.token_ids)).tokens
    assert found < 512
    assert pool.recount() == []


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_keep_the_books(seed):
    draw = random.Random(seed)
    layout = draw.choice([gpt_oss_like(), qwen_next_like()])
    pool = GroupedPool(draw.choice([80, 300]), layout, prefix_caching=draw.random() < 0.7)
    running, waiting = [], 0
    for number in range(1, 200):
        if draw.random() < 0.3 and len(running) < 6:
            waiting += 1
            shared = draw.randrange(3)
            tokens = np.concatenate(
                (np.arange(600) + 50_000 * shared, np.arange(4000) + 100_000 + 5000 * number)
            )
            fresh = request(number, draw.randrange(40, 1500), tokens)
            hit = pool.lookup(fresh)
            target = min(fresh.prompt_tokens, hit.tokens + draw.randrange(1, 700))
            if pool.need(fresh, target, hit) <= pool.blocks_free:
                pool.grow(fresh, hit.tokens, target, hit)
                fresh.computed_tokens = target
                running.append(fresh)
        for owner in list(running):
            room = owner.prompt_tokens - owner.computed_tokens
            target = owner.computed_tokens + (
                draw.randrange(1, min(room, 500) + 1) if room > 0 else 1
            )
            owner.generated_tokens = max(0, target - owner.prompt_tokens)
            if pool.need(owner, target) > pool.blocks_free or draw.random() < 0.02:
                pool.release(owner)
                running.remove(owner)
                continue
            pool.grow(owner, owner.computed_tokens, target)
            owner.computed_tokens = target
        assert pool.recount() == [], f"{seed=} {number=}"
    for owner in running:
        pool.release(owner)
    assert pool.blocks_free == pool.blocks_total


def test_a_moved_request_brings_what_its_windows_hold():
    pool = GroupedPool(100, gpt_oss_like(), prefix_caching=True)
    moved = request(1, 300)
    moved.computed_tokens = 300
    count = pool.blocks_at(301)
    assert count == 19 + 9
    pool.hand_over(moved, count, pool.take(count))
    windows, full = pool.tables_of(moved)
    assert windows[:10] == (0,) * 10
    assert len(full) == 19
    assert pool.recount() == []


def test_models_that_keep_nothing_are_refused():
    spec = model_from_file(CONFIGS / "Qwen3-Next-80B-A3B-Instruct.json")
    with pytest.raises(InputError, match="no attention"):
        kv_layout(spec, "bfloat16", layers=[0, 1])
