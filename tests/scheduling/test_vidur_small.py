"""Schedules small enough to be worked out by hand. A batch costs 10 us and 1 us per token."""

import pytest

from emu.scheduling.pipeline import Pipeline, bubble_ns
from emu.scheduling.vidur.faster_transformer import FasterTransformerScheduler
from emu.scheduling.vidur.lightllm import LightLlmScheduler, peak_tokens
from emu.scheduling.vidur.orca import OrcaScheduler
from emu.scheduling.vidur.sarathi import SarathiScheduler
from emu.scheduling.vidur.vllm_v0 import VllmV0Scheduler
from tests.scheduling.vidur_drive import make, request
from tests.scheduling.vidur_world import US, World


def batches(cls, rows, **table):
    """(formed us, members, tokens) of every batch; rows are (arrival us, prompt, output)."""
    scheduler = make(cls, leap=False, **table)
    items = [request(i, p, d, at=at * US) for i, (at, p, d) in enumerate(rows)]
    world = World([scheduler], formula=(10, 1, 0))
    world.run(items, fail_stuck=True)
    assert [r.generated_tokens for r in items] == [d for _, _, d in rows]
    formed = [(b["formed_at_us"], b["requests"], b["tokens"]) for b in world.batches]
    return formed, [r.last_token_ns // US for r in items], items


def test_vllm_v0_prompts_first_and_the_latest_arrival_is_evicted():
    formed, ends, items = batches(
        VllmV0Scheduler, [(0, 7, 4), (0, 8, 3)], num_blocks=5, watermark_blocks_fraction=0.0
    )
    assert formed == [
        (0, [0, 1], [7, 8]),  # 2 blocks each, 1 left
        (25, [0, 1], [1, 1]),  # request 1 writes its 9th token: the last block
        (37, [0], [1]),  # request 0 writes its 9th: request 1 goes, 3 blocks come back
        (48, [0], [1]),  # 2 free, request 1 needs 3 for the 10 tokens that it had reached
        (59, [1], [10]),  # read again in one pass, which yields its third token
    ]
    assert ends == [59, 79]
    assert [r.preemptions for r in items] == [0, 1]
    assert items[1].recomputed_tokens == 9
    assert items[1].max_gap_ns == (79 - 37) * US


def test_sarathi_shares_its_budget_between_decodes_and_pieces():
    formed, ends, _ = batches(SarathiScheduler, [(0, 8, 3), (5, 5, 2)], num_blocks=99, chunk_size=6)
    assert formed == [
        (0, [0], [6]),
        (16, [0, 1], [2, 4]),  # the rest of one prompt, the beginning of the next
        (32, [0, 1], [1, 1]),  # a decode and the last token of a prompt
        (44, [0, 1], [1, 1]),
    ]
    assert ends == [56, 56]


THREE = [(0, 4, 3), (0, 2, 1), (0, 3, 2)]


def test_orca_fills_a_place_as_soon_as_it_is_free():
    formed, ends, _ = batches(OrcaScheduler, THREE, num_blocks=8, max_tokens=16, batch_size_cap=2)
    assert formed == [(0, [0, 1], [4, 2]), (16, [0, 2], [1, 3]), (30, [0, 2], [1, 1])]
    assert ends == [42, 16, 42]


def test_a_static_batch_lets_nobody_in_before_its_last_member_ends():
    formed, ends, _ = batches(
        FasterTransformerScheduler, THREE, num_blocks=8, max_tokens=16, batch_size_cap=2
    )
    assert formed == [
        (0, [0, 1], [4, 2]),
        (16, [0], [1]),
        (27, [0], [1]),
        (38, [2], [3]),
        (51, [2], [1]),
    ]
    assert ends == [38, 16, 62]


def test_lightllm_lets_prompts_in_every_second_decode():
    formed, ends, _ = batches(
        LightLlmScheduler,
        [(0, 4, 6), (1, 3, 3)],
        num_blocks=20,
        block_size=1,
        max_waiting_iters=2,
    )
    assert formed == [
        (0, [0], [4]),
        (14, [0], [1]),
        (25, [0], [1]),
        (36, [1], [3]),
        (49, [0, 1], [1, 1]),
        (61, [0, 1], [1, 1]),
        (73, [0], [1]),
    ]
    assert ends == [84, 73]


@pytest.mark.parametrize(
    ("held_left", "peak"),
    [
        ([], 0),
        ([(5, 0)], 5),
        ([(7, 2), (4, 1)], 13),  # 9 alone at its end; 7+1 and 4+1 when the second ends
        ([(4, 1), (7, 2)], 13),
        ([(1, 100), (50, 0)], 101),
    ],
)
def test_peak_of_tokens_to_come(held_left, peak):
    assert peak_tokens(held_left) == peak


def test_lightllm_pauses_the_latest_arrival_when_memory_is_taken_away():
    scheduler = make(LightLlmScheduler, num_blocks=24, block_size=1, leap=False)
    first, second = request(0, 6, 4), request(1, 6, 4, at=1)
    for item in (first, second):
        scheduler.enqueue(item, 0)
    batch = scheduler.schedule(0)
    scheduler.complete(batch, 1, 100, 100)
    inbound = request(9, 10, 3)
    inbound.generated_tokens = 1
    assert scheduler.blocks_to_reserve([inbound]) == 11
    assert scheduler.reserve([inbound])
    batch = scheduler.schedule(100)  # 12 held, 11 reserved: one of two blocks can be had
    assert batch.decodes == [first]
    assert batch.preempted == [second]
    assert (second.preemptions, second.kv_blocks) == (1, 0)
    assert list(scheduler.waiting()) == [second]
    assert scheduler.recount() == []
    scheduler.complete(batch, 1, 200, 100)
    scheduler.unreserve([inbound])
    for now in range(200, 3000, 100):
        if (batch := scheduler.schedule(now)) is not None:
            scheduler.complete(batch, 1, now + 100, 100)
    assert first.generated_tokens == second.generated_tokens == 4
    assert scheduler.blocks_used == 0


def test_restarted_request_longer_than_a_batch_is_admitted_alone():
    rows = [(0, 7, 8), (0, 7, 8)]
    _, _, items = batches(
        VllmV0Scheduler,
        rows,
        num_blocks=5,
        watermark_blocks_fraction=0.0,
        max_tokens_in_batch=14,
    )
    assert items[1].preemptions > 0
    scheduler = make(VllmV0Scheduler, num_blocks=50, max_tokens_in_batch=6)
    assert scheduler.can_ever_hold(items[1]) == "prompt longer than max_tokens_in_batch 6"
    grown = request(3, 5, 20)
    grown.generated_tokens = 4
    assert scheduler.never(grown) == ""
    as_is = make(
        VllmV0Scheduler, num_blocks=50, max_tokens_in_batch=6, faithful=["oversized_restart_blocks"]
    )
    assert as_is.never(grown) == "prompt longer than max_tokens_in_batch 6"


def test_leaked_reservations_of_a_static_batch():
    tables = {"num_blocks": 8, "max_tokens": 16, "batch_size_cap": 2, "leap": False}
    used = []
    for faithful in ([], ["ft_leak"]):
        scheduler = make(FasterTransformerScheduler, faithful=faithful, **tables)
        for i, (_, prompt, output) in enumerate(THREE[:2]):
            scheduler.enqueue(request(i, prompt, output), 0)
        for now in range(3):
            scheduler.complete(scheduler.schedule(now), 1, now + 1, 1)
        assert scheduler.recount() == []
        used.append(scheduler.blocks_used)
    assert used == [0, 4]


def test_two_stages_overlap_two_batches():
    pipeline = Pipeline(2)
    first = pipeline.enter(0, (10, 10))
    second = pipeline.enter(0, (10, 10))
    assert [(s.start_ns, s.end_ns) for s in first] == [(0, 10), (10, 20)]
    assert [(s.start_ns, s.end_ns) for s in second] == [(10, 20), (20, 30)]
    assert bubble_ns(first, 0) == 0
    assert bubble_ns(second, 0) == 10
    assert pipeline.busy_ns == [20, 20]
    slow_start = pipeline.enter(25, (1, 10))
    assert [(s.start_ns, s.end_ns) for s in slow_start] == [(25, 26), (30, 40)]
    assert bubble_ns(slow_start, 25) == 4
    pipeline.reset(50)
    assert pipeline.enter(50, (1, 1))[1].end_ns == 52


def test_pipeline_keeps_two_micro_batches_in_flight():
    scheduler = make(OrcaScheduler, num_blocks=64, stages=2, batch_size_cap=1, max_tokens=16)
    items = [request(i, 4, 2) for i in range(3)]
    for item in items:
        scheduler.enqueue(item, 0)
    first, second = scheduler.schedule(0), scheduler.schedule(0)
    assert [b.chunks[0].request for b in (first, second)] == items[:2]
    assert scheduler.schedule(0) is None
    progress = scheduler.complete(first, 1, 10, 10)
    assert progress.first_tokens == [items[0]]
    assert scheduler.schedule(10).decodes == [items[0]]


def test_a_request_that_evicted_itself_waits_until_it_is_admitted_again():
    """The peer's rule: it holds back what is behind it, and others that are admitted do not end
    that."""
    s = make(VllmV0Scheduler, num_blocks=9, faithful=["evict_without_need"])
    one, other = request(0, 4, 2), request(1, 4, 2)
    for r in (one, other):
        s.enqueue(r, 0)
    s._note_self_eviction(one)
    assert s.stalls(), "it is the head of the queue"
    s.admit(other, 1)
    assert s.stalls()
    s.admit(one, 1)
    assert not s.stalls()
    s.enqueue(request(2, 4, 2), 0)
    assert not s.stalls()
