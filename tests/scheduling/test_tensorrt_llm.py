"""TensorRT-LLM's scheduler: NVIDIA's own rows, a walk as its sources do it, leaps against steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from emu.config.schema import TensorrtLlmTable
from emu.kv.tree_pool import TreePool
from emu.request import Prefix, Request
from emu.scheduling.base import Batch, ReplicaLimits
from emu.scheduling.tensorrt_llm.capacity import (
    FITS,
    LACKS_BLOCKS,
    LACKS_PLACE,
    WAITS_FOR_PREFIX,
    Contributed,
    Room,
)
from emu.scheduling.tensorrt_llm.chunks import from_hit, in_order, in_turn, shares, whole
from emu.scheduling.tensorrt_llm.scheduler import TensorrtLlmScheduler
from tests.scheduling.naive_tensorrt_llm import Active, Naive
from tests.scheduling.sglang_world import run
from tests.scheduling.tensorrt_llm_world import random_program

BLOCK = 32


def request(
    rid: int, prompt: int, output: int, output_max: int = 0, ids: list[int] | None = None
) -> Request:
    return Request(
        request_id=rid,
        arrival_ns=rid,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output_max or output,
        prefix=None if ids is None else Prefix(np.array(ids, dtype=np.int64)),
    )


def scheduler(
    num_blocks: int,
    *,
    block: int = BLOCK,
    ahead: bool = False,
    hands_off: bool = False,
    **keys: object,
) -> TensorrtLlmScheduler:
    limits = ReplicaLimits(
        num_blocks=num_blocks,
        block_size=block,
        max_model_tokens=100_000,
        prefix_caching=True,
        leap=False,
        hands_off=hands_off,
    )
    table = TensorrtLlmTable(tokens_per_block=block, block_size=block, **keys)
    limits.forms_ahead = ahead
    return TensorrtLlmScheduler(table, limits)


def members(of: TensorrtLlmScheduler, batch: Batch) -> dict[int, int]:
    return {one.request_id: new for one, _, new in of.members(batch)}


def step(of: TensorrtLlmScheduler, now_ns: int) -> dict[int, int]:
    """New tokens of the members of an iteration of 10 ns; empty: there is none."""
    batch = of.schedule(now_ns)
    if batch is None:
        return {}
    found = members(of, batch)
    of.complete(batch, 1, now_ns + 10, 10)
    assert of.recount() == []
    return found


def steps(of: TensorrtLlmScheduler, requests: list[Request]) -> list[dict[int, int]]:
    for one in requests:
        of.enqueue(one, 0)
    found: list[dict[int, int]] = []
    while True:
        found.append(step(of, 10 * len(found)))
        if not found[-1]:
            return found[:-1]


# --- capacity: the rows of the reference ----------------------------------------------------------
def test_blocks_of_all_output_are_kept() -> None:
    of = scheduler(6, block=4)
    found = steps(of, [request(0, 8, 8), request(1, 8, 8)])
    assert [sorted(one) for one in found] == [[0]] * 8 + [[1]] * 8


@pytest.mark.parametrize(
    ("blocks", "keys", "dropped"),
    [
        (6, {}, []),  # 8 tokens and 16 of output are just all blocks
        (5, {}, ["8 tokens (6 KV blocks) can never be scheduled"]),
        (2, {"capacity_scheduler_policy": "MAX_UTILIZATION"}, []),
        (1, {"capacity_scheduler_policy": "MAX_UTILIZATION"}, ["8 tokens (2 KV blocks)"]),
        (6, {"enable_chunked_prefill": False, "max_num_tokens": 8}, []),
        (6, {"enable_chunked_prefill": False, "max_num_tokens": 7}, ["8 tokens (6 KV blocks)"]),
        (6, {"enable_chunked_prefill": True, "max_num_tokens": 7}, []),
    ],
)
def test_a_head_that_fits_an_empty_replica_is_not_dropped(
    blocks: int, keys: dict[str, object], dropped: list[str]
) -> None:
    of = scheduler(blocks, block=4, **keys)
    of.enqueue(request(0, 8, 16), 0)
    told = [reason for _, reason in of.drop_unschedulable(0)]
    assert len(told) == len(dropped)
    assert all(reason.startswith(begin) for reason, begin in zip(told, dropped, strict=True))
    assert of.waiting_count == 1 - len(dropped)


def test_a_batch_of_28_of_64_runs() -> None:
    """MiniMax-M2.5 on four B200: 7,319 blocks, 1,096 tokens in, 7,000 out."""
    of = scheduler(7319, max_num_tokens=1 << 20)
    for rid in range(64):
        of.enqueue(request(rid, 1096, 7000), 0)
    assert len(step(of, 0)) == 28
    for at in range(1, 50):
        assert step(of, 10 * at) == dict.fromkeys(range(28), 1)
    assert of.waiting_count == 36


def test_the_first_that_does_not_fit_ends_the_asking() -> None:
    room = Room("GUARANTEED_NO_EVICT", BLOCK, spare_blocks=100, places=9)
    assert room.cost(request(0, 3000, 1000)) == 125
    assert room.cost(request(1, 100, 28)) == 4
    of = scheduler(100)
    of.enqueue(request(0, 90, 6), 0)
    assert step(of, 0) == {0: 90}
    of.enqueue(request(1, 3000, 300), 1)
    of.enqueue(request(2, 100, 28), 1)
    assert step(of, 10) == {0: 1}


def test_what_running_requests_still_need_is_kept() -> None:
    of = scheduler(9)
    of.enqueue(request(0, 100, 60), 0)
    for at in range(11):
        step(of, 10 * at)
    assert of.blocks_used == 4
    of.enqueue(request(1, 64, 64), 111)
    assert step(of, 120) == {0: 1, 1: 64}, "1 is kept, 4 of the 4 others are needed"
    tight = scheduler(8)
    tight.enqueue(request(0, 100, 60), 0)
    for at in range(11):
        step(tight, 10 * at)
    tight.enqueue(request(1, 64, 64), 111)
    assert step(tight, 120) == {0: 1}


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [
        ("MAX_UTILIZATION", [range(41), range(80, 119)], 51),
        ("GUARANTEED_NO_EVICT", [range(80, 160)], 10),
        ("STATIC_BATCH", [range(80, 160)], 10),
    ],
)
def test_nvidias_rows_of_two_requests(policy: str, first: list[range], second: int) -> None:
    """`capacitySchedulerTest.cpp`: 10 blocks of 10 tokens, 10 in and 80 out."""
    of = scheduler(10, block=10, capacity_scheduler_policy=policy, enable_block_reuse=False)
    found = steps(of, [request(0, 10, 80), request(1, 10, 80)])
    assert [at for at, one in enumerate(found) if 0 in one] == list(range(80))
    assert [at for at, one in enumerate(found) if 1 in one] == [at for run in first for at in run]
    assert found[80][1] == second, "paused: its context is prompt and outputs"


def test_the_request_that_came_last_is_paused() -> None:
    of = scheduler(10, block=10, capacity_scheduler_policy="MAX_UTILIZATION")
    for rid, prompt in ((0, 38), (1, 25), (2, 25)):
        of.enqueue(request(rid, prompt, 40), 0)
    found = [step(of, 10 * at) for at in range(4)]
    assert found[2] == {0: 1, 1: 1, 2: 1}, "4, 3 and 3 blocks"
    assert found[3] == {0: 1, 1: 1}
    assert [one.request_id for one in of.waiting()] == [2]
    assert of.blocks_used == 5 + 3


def test_one_that_gives_way_leaves_its_own_blocks_and_no_more() -> None:
    """Of six blocks the last one has two. It gives way to five, and one block is left: too few for
    the next, whose prompt takes two."""
    keys = {"capacity_scheduler_policy": "MAX_UTILIZATION", "enable_block_reuse": False}
    of = scheduler(6, block=4, **keys)
    of.enqueue(request(5, 8, 8), 0)
    assert step(of, 0) == {5: 8}
    of.enqueue(request(0, 20, 2), 10)
    of.enqueue(request(1, 8, 8), 10)
    assert step(of, 10) == {0: 20}
    assert (of.waiting_count, of.blocks_used) == (2, 5)


def test_a_step_without_members_is_formed_again() -> None:
    """With reuse, one that asks again for blocks waits for the block that it was to make itself.
    The one that gave way was all that ran: the engine goes around once more at once."""
    of = scheduler(6, block=4, capacity_scheduler_policy="MAX_UTILIZATION")
    of.enqueue(request(5, 8, 8), 0)
    assert step(of, 0) == {5: 8}
    of.enqueue(request(0, 20, 2), 10)
    assert step(of, 10) == {0: 20}


def test_a_static_batch_waits_for_the_end_of_the_last() -> None:
    of = scheduler(100, capacity_scheduler_policy="STATIC_BATCH")
    found = steps(of, [request(0, 10, 2), request(1, 10, 4)])
    of.enqueue(request(2, 10, 1), 0)
    assert [sorted(one) for one in found] == [[0, 1], [0, 1], [1], [1]]
    late = scheduler(100, capacity_scheduler_policy="STATIC_BATCH")
    late.enqueue(request(0, 10, 3), 0)
    step(late, 0)
    late.enqueue(request(1, 10, 1), 1)
    assert [sorted(step(late, at)) for at in (10, 20, 30)] == [[0], [0], [1]]


def test_room_has_places_and_blocks() -> None:
    room = Room("MAX_UTILIZATION", BLOCK, spare_blocks=5, places=2)
    assert room.take(request(0, 64, 1000)) == FITS
    assert room.take(request(1, 100, 1)) == LACKS_BLOCKS
    assert room.take(request(2, 96, 1)) == FITS
    assert room.take(request(3, 0, 1)) == LACKS_PLACE


# --- tokens ---------------------------------------------------------------------------------------
def test_contexts_are_cut_to_whole_units() -> None:
    assert in_order([300, 100], 236, 32) == [224, 0]
    assert in_order([76, 100], 236, 32) == [76, 100]
    assert in_order([300, 10], 236, 32) == [224, 10], "what is not cut may use the rest"
    assert in_turn([300, 100], 236, 32) == [128, 100]
    assert whole([100, 200, 10], 250) == [100, 0, 0]
    assert shares([300, 100], 400, "EQUAL_PROGRESS", 32) == [300, 100]
    assert [from_hit(40, 64, 300, 32), from_hit(40, 64, 100, 32), from_hit(0, 64, 99, 32)] == [
        *(56, 60, 64)
    ]


@pytest.mark.parametrize(
    ("chunking", "first", "second"),
    [
        ("FIRST_COME_FIRST_SERVED", {20: 224}, {20: 76, 21: 100}),
        ("EQUAL_PROGRESS", {20: 128, 21: 100}, {20: 172, 21: 1}),
    ],
)
def test_twenty_generations_and_two_contexts(
    chunking: str, first: dict[int, int], second: dict[int, int]
) -> None:
    of = scheduler(
        1000, max_num_tokens=256, enable_chunked_prefill=True, context_chunking_policy=chunking
    )
    for rid in range(20):
        of.enqueue(request(rid, 8, 50), 0)
    step(of, 0)
    for rid, prompt in ((20, 300), (21, 100)):
        of.enqueue(request(rid, prompt, 9), 1)
    generations = dict.fromkeys(range(20), 1)
    assert step(of, 10) == generations | first
    assert step(of, 20) == generations | second


def test_a_prompt_that_does_not_fit_the_step_waits_whole() -> None:
    of = scheduler(1000, max_num_tokens=256)
    found = steps(of, [request(0, 200, 2), request(1, 100, 1), request(2, 10, 1)])
    assert found == [{0: 200}, {0: 1, 1: 100, 2: 10}]
    assert "not chunked" in of.can_ever_hold(request(3, 257, 1))
    assert of.can_ever_hold(request(3, 256, 1)) == ""


# --- reuse ----------------------------------------------------------------------------------------
def shared(rid: int, tokens: int = 64, own: int = 40) -> Request:
    ids = [*range(tokens), *range(1000 * (rid + 1), 1000 * (rid + 1) + own)]
    return request(rid, tokens + own, 4, ids=ids)


def test_contexts_wait_for_more_of_them_while_requests_generate() -> None:
    keys = {"batch_wait_timeout_iters": 3, "batch_wait_max_tokens_ratio": 0.5}
    of = scheduler(1000, max_num_tokens=1000, **keys)
    of.enqueue(request(0, 100, 30), 0)
    assert step(of, 0) == {0: 100}  # nothing generates: nothing waits
    of.enqueue(request(1, 100, 30), 1)
    assert [step(of, 10 + 10 * at) for at in range(4)] == [{0: 1}] * 3 + [{0: 1, 1: 100}]
    of.enqueue(request(2, 100, 30), 50)
    assert step(of, 50) == {0: 1, 1: 1}
    of.enqueue(request(3, 398, 30), 60)
    assert step(of, 60) == {0: 1, 1: 1, 2: 100, 3: 398}  # 500 of 1,000 tokens


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"batch_wait_timeout_iters": 3}, "batch_wait_timeout_iters"),
        ({"batch_wait_max_tokens_ratio": 0.5}, "batch_wait_max_tokens_ratio"),
    ],
)
def test_one_key_of_waiting_alone_is_refused(keys: dict[str, float], field: str) -> None:
    assert TensorrtLlmTable(**keys).misfit[0] == field


def test_a_context_waits_for_a_block_that_another_computes() -> None:
    of = scheduler(1000)
    assert steps(of, [shared(rid) for rid in range(3)])[:2] == [{0: 104}, {0: 1, 1: 40, 2: 40}]
    # One step late: the second does not wait, because the first is no context any more.
    late = scheduler(1000, ahead=True)
    for rid in range(3):
        late.enqueue(shared(rid), 0)
    assert [step(late, at) for at in (0, 10, 20)] == [
        *({0: 104}, {0: 1, 1: 104}, {0: 1, 1: 1, 2: 40})
    ]


def test_chunked_contexts_hold_back_those_that_share_their_blocks() -> None:
    of = scheduler(1000, enable_chunked_prefill=True, max_num_tokens=64)
    of.enqueue(shared(0, tokens=128), 0)
    of.enqueue(shared(1, tokens=128), 0)
    assert [step(of, at) for at in (0, 10, 20, 30)] == [{0: 64}, {0: 64}, {0: 40}, {0: 1, 1: 32}]
    contributed = Contributed(TreePool(10, BLOCK, by_page=True))
    assert not contributed.makes_wait(shared(0))
    assert contributed.makes_wait(shared(1))
    room = Room("MAX_UTILIZATION", BLOCK, spare_blocks=99, places=9, contributed=contributed)
    assert room.take(shared(2)) == WAITS_FOR_PREFIX


@pytest.mark.parametrize(
    ("keys", "idle", "hit"),
    [
        ({}, True, 40),
        ({"enable_partial_reuse": False}, True, 32),
        ({"copy_on_partial_reuse": False}, True, 40),
        ({"copy_on_partial_reuse": False}, False, 32),
        ({"enable_block_reuse": False}, True, 0),
    ],
)
def test_hits_are_counted_in_tokens(keys: dict[str, object], idle: bool, hit: int) -> None:
    of = scheduler(1000, **keys)
    first = shared(0, tokens=40, own=24)
    first.output_tokens = 1 if idle else 30
    of.enqueue(first, 0)
    for at in range(4):
        step(of, 10 * at)
    second = shared(1, tokens=40, own=50)
    of.enqueue(second, 40)
    assert step(of, 50)[1] == 90 - hit
    assert second.prefix_hit_tokens == hit


def test_the_next_turn_finds_the_block_that_was_begun() -> None:
    of = scheduler(1000)
    ids = list(range(200))
    steps(of, [request(0, 40, 10, ids=ids[:50])])
    turn = request(1, 60, 2, ids=ids)
    of.enqueue(turn, 0)
    assert step(of, 1000) == {1: 11}, "the last output was never computed"
    assert turn.prefix_hit_tokens == 49


def test_blocks_freed_first_go_first_from_the_end_of_their_run() -> None:
    of = scheduler(8)
    old, new = (request(rid, 100, 1, ids=[1000 * rid + t for t in range(101)]) for rid in (0, 1))
    steps(of, [old, new])
    assert (of.pool.match(shared_with(old)), of.pool.match(shared_with(new))) == (96, 96)
    steps(of, [request(2, 40, 1)])
    assert (of.pool.match(shared_with(old)), of.pool.match(shared_with(new))) == (64, 96)
    steps(of, [request(3, 60, 1)])
    assert of.pool.match(shared_with(old)) == 0
    assert of.pool.match(shared_with(new)) == 96


def shared_with(one: Request) -> Request:
    assert one.prefix is not None
    assert one.prefix.token_ids is not None
    return request(99, len(one.prefix.token_ids), 1, ids=one.prefix.token_ids.tolist())


# --- one step late --------------------------------------------------------------------------------
@pytest.mark.parametrize(("known", "sizes"), [("off", [2, 2, 2, 2, 1]), ("on", [2, 2, 2, 1, 1])])
def test_what_has_ended_takes_part_once_more(known: str, sizes: list[int]) -> None:
    of = scheduler(100, ahead=True, length_ends_known=known)
    for rid, output in ((0, 3), (1, 9)):
        of.enqueue(request(rid, 20, output), 0)
    found = []
    for at in range(5):
        batch = of.schedule(10 * at)
        assert batch is not None
        found.append(batch.shape.sequences)
        of.complete(batch, 1, 10 * at + 10, 10)
    assert found == sizes


def test_an_end_that_was_not_known_costs_a_row_either_way() -> None:
    of = scheduler(100, ahead=True, length_ends_known="on")
    of.enqueue(request(0, 20, 2, output_max=9), 0)
    assert step(of, 0) == {0: 20}
    assert step(of, 10) == {0: 1}
    batch = of.schedule(20)
    assert batch is not None
    assert batch.shape.sequences == 1
    of.complete(batch, 1, 30, 10)
    assert of.schedule(30) is None
    assert of.blocks_used == 0


# --- beside other replicas ------------------------------------------------------------------------
def test_a_destination_keeps_blocks_for_the_output() -> None:
    of = scheduler(9)
    coming = request(0, 60, 100)
    coming.generated_tokens = 1
    assert of.reserve([coming])
    assert of.blocks_used == 2
    other = request(1, 60, 100)
    assert not of.reserve([other]), "5 blocks to its end, and 5 are kept"
    of.enqueue(other, 0)
    assert step(of, 0) == {}
    of.unreserve([coming])
    assert of.recount() == []
    assert step(of, 10) == {1: 60}


def test_kv_comes_to_a_place_in_the_batch() -> None:
    of = scheduler(90, max_batch_size=2)
    first, second = request(0, 60, 100), request(1, 60, 100)
    assert of.has_places(2)
    assert not of.has_places(3)
    assert of.reserve([first])
    assert of.has_places(1)
    assert not of.has_places(2)
    assert of.reserve([second])
    of.activate([first], 0)
    assert not of.has_places(1)


def test_a_prefill_replica_keeps_none() -> None:
    of = scheduler(4, hands_off=True)
    of.enqueue(request(0, 60, 100), 0)
    of.enqueue(request(1, 60, 100), 0)
    assert step(of, 0) == {0: 60, 1: 60}


# --- against the walk -----------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(40))
def test_steps_are_those_of_the_sources(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(seed)
    budget = rng.choice((64, 256))
    table = replace(
        program.table,
        enable_block_reuse=False,
        batch_wait_timeout_iters=0,
        max_num_tokens=max(budget, program.table.max_batch_size),
    )
    lengths = [(rng.randint(1, 60), rng.randint(1, 60)) for _ in range(rng.randint(1, 20))]
    blocks = rng.choice((200, 400, 4000)) // table.block_size
    most = [rng.choice((out, out + 20)) for _, out in lengths]
    if table.capacity_scheduler_policy == "MAX_UTILIZATION":
        table = replace(table, enable_chunked_prefill=True)  # else a long context waits for ever
    requests = [
        request(rid, *lengths[rid], output_max=most[rid])
        for rid in range(len(lengths))
        if sum(lengths[rid]) - lengths[rid][1] + most[rid] <= blocks * table.block_size
    ]
    naive = Naive(
        table,
        blocks,
        [
            Active(one.request_id, one.prompt_tokens, one.output_tokens, one.max_output_tokens)
            for one in requests
        ],
    )
    limits = ReplicaLimits(blocks, table.block_size, 10**6, leap=False)
    found = steps(TensorrtLlmScheduler(table, limits), requests)
    wanted = []
    while naive.active:
        wanted.append(naive.step())
    assert found == wanted


# --- leaps ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(60))
def test_leaps_are_steps(seed: int) -> None:
    program = random_program(seed)
    stepped, leapt = run(program, leap=False), run(program, leap=True)
    assert stepped[:2] == leapt[:2]
    if program.table.capacity_scheduler_policy != "MAX_UTILIZATION":
        assert not leapt[3], "nothing is ever paused"


def test_the_programs_leap_and_pause() -> None:
    found = [run(random_program(seed), leap=True) for seed in range(40)]
    assert sum(leaps for _, _, leaps, _ in found) > 100
    assert sum(paused for _, _, _, paused in found) > 10
