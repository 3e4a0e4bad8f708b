"""Rules of the vllm scheduler, each on a case small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from emu.config.schema import VllmTable
from emu.kv.tiers import LowerTier
from emu.request import Prefix, Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.vllm import VllmScheduler


def scheduler(
    blocks=1000, *, bs=16, leap=True, stages=1, caching=False, preemptions_max=0, tiers=(), **keys
):
    limits = ReplicaLimits(
        num_blocks=blocks,
        block_size=bs,
        max_model_tokens=100_000,
        pipeline_stages=stages,
        prefix_caching=caching,
        leap=leap,
        preemptions_max=preemptions_max,
    )
    return VllmScheduler(VllmTable(**keys), limits, tiers=tiers)


def request(rid, prompt, output, *, arrival=0, tokens=None, **fields):
    return Request(
        request_id=rid,
        arrival_ns=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
        prefix=None if tokens is None else Prefix(np.array(tokens, dtype=np.int64)),
        **fields,
    )


def ids(requests):
    return [r.request_id for r in requests]


def step(s, now, ns=10, steps=None):
    """One batch, or leap; returns (batch, progress, now)."""
    batch = s.schedule(now)
    assert batch is not None
    steps = batch.max_steps if steps is None else steps
    batch.first_end_ns = now + ns
    now += ns * steps
    progress = s.complete(batch, steps, now, ns)
    assert s.recount() == []
    return batch, progress, now


def run_out(s, now, ns=10):
    finished = []
    while (batch := s.schedule(now)) is not None:
        batch.first_end_ns = now + ns
        now += ns * batch.max_steps
        finished += s.complete(batch, batch.max_steps, now, ns).finished
    return finished


# --- golden -----------------------------------------------------------------------------------
@pytest.mark.parametrize("leap", [False, True])
def test_worked_example_of_llmservingsim(leap):
    """Section 5.6: Llama-3.1-8B on an RTX 4090, costs as given there."""
    costs = [48_305_605, 37_040_268, 17_218_496, 17_218_688]
    s = scheduler(2588, leap=leap)
    r0, r1 = request(0, 512, 4, arrival=1_000_000), request(1, 300, 3, arrival=5_000_000)
    s.enqueue(r0, 1_000_000)
    now, at, shapes, gaps = 1_000_000, 0, [], []
    while (batch := s.schedule(now)) is not None:
        if at == 0:
            s.enqueue(r1, 5_000_000)
        shapes.append(batch.shape)
        spent = costs[at : at + batch.max_steps]
        at += batch.max_steps
        now += sum(spent)
        progress = s.complete(batch, batch.max_steps, now, max(spent))
        gaps += [cost for cost in spent for _ in range(progress.cohort_size)] + progress.gaps_ns
    assert now == 120_783_057
    assert [(x.prefill_new, x.decode_count, x.decode_context_sum) for x in shapes][:3] == [
        ([512], 0, 0),
        ([300], 1, 512),
        ([], 2, 813),
    ]
    for r, first, tpot, queued in (
        (r0, 48_305_605, 23_825_817, 0),
        (r1, 81_345_873, 17_218_592, 44_305_605),
    ):
        assert r.first_token_ns - r.arrival_ns == first
        assert (r.last_token_ns - r.first_token_ns) // (r.output_tokens - 1) == tpot
        assert r.prefill_scheduled_ns - r.arrival_ns == queued
    assert sorted(gaps) == sorted([37_040_268, 17_218_496, 17_218_688, 17_218_496, 17_218_688])
    assert (r0.max_gap_ns, r1.max_gap_ns) == (37_040_268, 17_218_688)


# --- phase A and B ----------------------------------------------------------------------------
def test_decodes_come_before_the_rest_of_a_long_prompt():
    s = scheduler(max_num_batched_tokens=8)
    s.enqueue(request(0, 3, 9), 0)
    s.enqueue(request(1, 20, 2), 0)
    first, _, now = step(s, 0)
    assert first.shape.prefill_new == [3, 5]
    second, _, now = step(s, now)
    assert (second.shape.prefill_new, second.shape.decode_count) == ([7], 1)
    third, _, now = step(s, now)
    assert (third.shape.prefill_new, third.shape.prefill_context) == ([7], [12])
    fourth, progress, now = step(s, now)
    assert (fourth.shape.prefill_new, fourth.shape.decode_count) == ([], 2)  # one token is left
    assert ids(progress.first_tokens) == [1]


def test_long_prefill_threshold_lets_others_in():
    s = scheduler(max_num_batched_tokens=100, long_prefill_token_threshold=10)
    s.enqueue(request(0, 35, 1), 0)
    s.enqueue(request(1, 12, 1), 0)
    batch, _, now = step(s, 0)
    assert batch.shape.prefill_new == [10, 10]
    batch, progress, now = step(s, now)
    assert batch.shape.prefill_new == [10, 2]
    assert ids(progress.finished) == [1]


def test_without_chunking_a_prompt_waits_for_a_whole_budget():
    s = scheduler(max_num_batched_tokens=50, chunked_prefill=False)
    for rid, prompt in enumerate((30, 30, 5)):
        s.enqueue(request(rid, prompt, 2), 0)
    batch, _, now = step(s, 0)
    assert ids(c.request for c in batch.chunks) == [0]  # the head of the line blocks the short one
    batch, _, now = step(s, now)
    assert ids(c.request for c in batch.chunks) == [1, 2]
    assert "max_num_batched_tokens 50, and not chunked" in s.can_ever_hold(request(9, 51, 1))


def test_skip_blocked_lets_a_short_request_pass():
    s = scheduler(max_num_batched_tokens=50, chunked_prefill=False, skip_blocked=True)
    for rid, prompt in enumerate((30, 30, 5)):
        s.enqueue(request(rid, prompt, 2), 0)
    batch, _, _ = step(s, 0)
    assert ids(c.request for c in batch.chunks) == [0, 2]


def test_whole_length_must_fit_at_admission():
    s = scheduler(4, max_num_batched_tokens=16)
    s.enqueue(request(0, 16, 20), 0)
    s.enqueue(request(1, 60, 1), 0)
    batch, _, _ = step(s, 0)
    assert ids(c.request for c in batch.chunks) == [0]
    assert (s.blocks_used, s.waiting_count, s.waiting_tokens) == (1, 1, 60)


def test_last_admitted_is_preempted_and_recomputes_what_it_had():
    s = scheduler(4, bs=4)
    a, b = request(0, 7, 9), request(1, 7, 9)
    s.enqueue(a, 0)
    s.enqueue(b, 0)
    _, _, now = step(s, 0)  # both hold 2 blocks of 4; both have 1 token
    batch, _, now = step(s, now)  # computes token 8 of each: still 2 blocks
    assert s.blocks_used == 4
    batch, progress, now = step(s, now, steps=1)  # token 9 needs a third block: b goes
    assert ids(batch.preempted) == [1]
    assert (b.generated_tokens, b.computed_tokens, b.kv_blocks) == (2, 0, 0)
    assert progress.cohort_size == 1
    finished = run_out(s, now)
    assert ids(finished) == [0, 1]
    assert (b.preemptions, b.recomputed_tokens) == (1, 9)
    assert (a.preemptions, a.max_gap_ns) == (0, 10)
    assert b.max_gap_ns == b.last_token_ns - 20 - 10 * 6  # one long gap, then six steps
    assert s.blocks_used == 0


def test_a_request_preempted_too_often_fails():
    s = scheduler(4, bs=4, preemptions_max=1, reserve_full_sequence=False, max_num_batched_tokens=5)
    for rid in range(2):
        s.enqueue(request(rid, 7, 8), 0)
    now, failed = 0, []
    while (batch := s.schedule(now)) is not None:
        now += 10 * batch.max_steps
        failed += s.complete(batch, batch.max_steps, now, 10).failed
        assert s.recount() == []
    failed += s.drop_unschedulable(now)
    assert [(r.request_id, why) for r, why in failed] == [(1, "preempted 2 times")]
    assert s.blocks_used == 0


def test_one_output_token_ends_with_the_prompt():
    s = scheduler()
    s.enqueue(request(0, 10, 1), 0)
    _, progress, _ = step(s, 0)
    assert ids(progress.first_tokens) == ids(progress.finished) == [0]
    assert (progress.prefill_tokens, progress.decode_tokens) == (10, 1)
    assert s.schedule(10) is None


def test_max_num_seqs_caps_the_running_set():
    s = scheduler(max_num_seqs=2)
    for rid in range(3):
        s.enqueue(request(rid, 4, 3), 0)
    batch, _, now = step(s, 0)
    assert (batch.shape.sequences, s.running_count, s.waiting_count) == (2, 2, 1)
    batch, progress, now = step(s, now)
    assert batch.max_steps == 2  # no request can get in before these two end
    assert ids(progress.finished) == [0, 1]


# --- orders -----------------------------------------------------------------------------------
def admitted(order, requests):
    s = scheduler(max_num_seqs=1, order=order)
    for r in requests:
        s.enqueue(r, 0)
    assert s.waiting_count == len(requests)
    return ids(run_out(s, 0))


def test_orders_of_the_waiting_queue():
    def waiting():
        return [
            request(0, 5, 1, arrival=3, priority=0, deadline_ns=50, tenant="x"),
            request(1, 5, 1, arrival=1, priority=1, deadline_ns=-1, tenant="x"),
            request(2, 5, 1, arrival=2, priority=1, deadline_ns=9, tenant="y"),
        ]

    assert admitted("arrival", waiting()) == [1, 2, 0]
    assert admitted("priority", waiting()) == [0, 1, 2]
    assert admitted("deadline", waiting()) == [2, 0, 1]
    assert admitted("fair", waiting()) == [1, 2, 0]


def test_fair_order_serves_the_tenant_that_had_less():
    greedy = [request(i, 100, 5, tenant="greedy") for i in range(4)]
    modest = [request(10 + i, 10, 5, tenant="modest") for i in range(4)]
    order = admitted("fair", greedy + modest)
    # After one long prompt of the greedy tenant all short ones of the other go first.
    assert order == [0, 10, 11, 12, 13, 1, 2, 3]


def test_idle_tenant_cannot_save_up_service():
    s = scheduler(max_num_seqs=1, order="fair")
    for i in range(10):
        s.enqueue(request(i, 100, 1, tenant="a"), 0)
    now = 0
    for _ in range(6):
        _, _, now = step(s, now)
    for i in range(4):
        s.enqueue(request(20 + i, 100, 1, tenant="b"), now)
    order = ids(run_out(s, now))
    assert order == [6, 20, 7, 21, 8, 22, 9, 23]  # in turns, not four of b first


# --- prefix cache -----------------------------------------------------------------------------
def test_second_request_of_the_same_step_hits_the_first():
    """Section 6.4: blocks are indexed when they are scheduled."""
    s = scheduler(caching=True)
    tokens = list(range(80))
    s.enqueue(request(0, 64, 16, tokens=tokens), 0)
    twin = request(1, 64, 16, tokens=tokens)
    s.enqueue(twin, 0)
    batch, _, _ = step(s, 0)
    assert batch.shape.prefill_new == [64, 16]
    assert batch.shape.prefill_context == [0, 48]
    assert (twin.prefix_hit_tokens, twin.npu_hit_tokens, twin.storage_hit_tokens) == (48, 48, 0)
    assert s.blocks_used == 5  # three shared


def test_hits_come_from_generated_tokens_too():
    s = scheduler(caching=True)
    tokens = list(range(200))
    s.enqueue(request(0, 30, 40, tokens=tokens[:70]), 0)
    run_out(s, 0)
    follow_up = request(1, 100, 1, tokens=tokens[:101])
    s.enqueue(follow_up, 1000)
    step(s, 1000)
    assert follow_up.prefix_hit_tokens == 64  # 69 computed: the last token's KV never is


def test_leap_ends_where_the_blocked_head_would_hit():
    """A waiting twin needs fewer blocks as soon as its next block is computed by the first."""
    tokens = list(range(100))
    s = scheduler(7, caching=True)
    s.enqueue(request(0, 30, 60, tokens=tokens[:90]), 0)
    _, _, now = step(s, 0)
    s.enqueue(request(1, 80, 1, tokens=tokens[:81]), now)
    batch = s.schedule(now)
    # 31 tokens are computed now; the block of tokens 16..31 is complete one step later.
    assert batch.max_steps == 1
    s.complete(batch, 1, now + 10, 10)
    batch = s.schedule(now + 10)
    assert batch.shape.decode_count == 1
    assert s.recount() == []


def test_recall_from_a_tier_stands_in_the_batch():
    host = LowerTier(
        "cpu", capacity_bytes=1 << 20, chunk_tokens=256, bytes_per_token=4, shared=True
    )
    tokens = list(range(520))
    for replica in range(2):
        s = scheduler(caching=True, tiers=[host])
        r = request(replica, 512, 8, tokens=tokens)
        s.enqueue(r, 0)
        batch, _, _ = step(s, 0)
        run_out(s, 10)
    assert [recall[:2] for recall in batch.recalls] == [(0, 1024)]
    assert (r.prefix_hit_tokens, r.npu_hit_tokens, r.storage_hit_tokens) == (256, 0, 256)
    assert batch.shape.prefill_new == [256]


def test_leap_stops_where_a_shared_tier_is_written():
    """Another replica may look into the tier at any time: writes happen at their own instant."""
    host = LowerTier("cpu", capacity_bytes=1 << 20, chunk_tokens=16, bytes_per_token=4, shared=True)
    s = scheduler(caching=True, tiers=[host])
    s.enqueue(request(0, 28, 30, tokens=list(range(58))), 0)
    _, _, now = step(s, 0)
    seen = []
    while (batch := s.schedule(now)) is not None:
        before = len(host)
        s.settle(batch, batch.max_steps)
        assert len(host) == before  # nothing is written in the middle of a leap
        seen.append((batch.max_steps, before))
        now += 10 * batch.max_steps
        s.complete(batch, batch.max_steps, now, 10)
    # Token 32 is computed by the fourth decode, token 48 sixteen decodes later.
    assert seen == [(3, 1), (16, 2), (10, 3)]


def test_output_may_be_known_in_part():
    s = scheduler(caching=True)
    s.enqueue(request(0, 20, 60, tokens=list(range(40))), 0)
    assert ids(run_out(s, 0)) == [0]
    twin = request(1, 60, 1, tokens=list(range(61)))
    s.enqueue(twin, 1000)
    step(s, 1000)
    assert twin.prefix_hit_tokens == 32  # tokens 0..39 were known: two full blocks


# --- cancelling, limits -----------------------------------------------------------------------
def test_cancelled_member_of_a_batch_in_flight_leaves_at_once():
    s = scheduler()
    a, b = request(0, 10, 5), request(1, 10, 5)
    s.enqueue(a, 0)
    s.enqueue(b, 0)
    batch = s.schedule(0)
    assert s.cancel(a)
    assert not s.cancel(a)
    assert s.blocks_used == 1
    progress = s.complete(batch, 1, 10, 10)
    assert ids(progress.first_tokens) == [1]
    batch = s.schedule(10)
    assert s.cancel(b)
    progress = s.complete(batch, 1, 20, 10)
    assert (progress.cohort_size, progress.decode_tokens, s.blocks_used) == (0, 0, 0)
    assert b.generated_tokens == 1
    assert s.schedule(20) is None


def test_cancelled_waiting_request_leaves_the_counts():
    s = scheduler()
    r = request(0, 10, 5)
    s.enqueue(r, 0)
    assert s.cancel(r)
    assert (s.waiting_count, s.waiting_tokens) == (0, 0)


def test_what_can_never_be_held_is_said_with_the_limit():
    s = scheduler(10)
    assert s.can_ever_hold(request(0, 100, 61)) == ""  # the last token's KV is never computed
    assert "needs more than the replica's 10 KV blocks" in s.can_ever_hold(request(0, 100, 62))
    assert "longer than the model's 100000 tokens" in s.can_ever_hold(request(0, 99_999, 2))


def test_hopeless_head_is_dropped_only_from_an_empty_replica():
    s = scheduler(4)
    ok = request(0, 20, 3)
    s.enqueue(ok, 0)
    s.enqueue(request(1, 100, 1), 0)
    _, _, now = step(s, 0)
    assert s.drop_unschedulable(now) == []
    run_out(s, now)
    assert ids(r for r, _ in s.drop_unschedulable(now)) == [1]
    assert s.waiting_count == 0


# --- leaps ------------------------------------------------------------------------------------
def test_leap_goes_to_the_first_end_and_takes_blocks_lazily():
    s = scheduler(100, bs=4)
    s.enqueue(request(0, 4, 11), 0)
    s.enqueue(request(1, 5, 21), 0)
    _, _, now = step(s, 0)
    batch = s.schedule(now)
    assert batch.max_steps == 10
    used = []
    for steps in range(1, 11):
        s.settle(batch, steps)
        used.append(s.blocks_used)
        assert [r.generated_tokens for r in s.residents()] == [steps, steps]
    assert used == [4, 4, 4, 5, 6, 6, 6, 7, 8, 8]
    progress = s.complete(batch, 10, now + 100, 10)
    assert ids(progress.finished) == [0]
    assert (progress.cohort_size, progress.decode_tokens) == (2, 20)


def test_leap_ends_before_blocks_run_out():
    s = scheduler(5, bs=4)
    s.enqueue(request(0, 4, 30), 0)
    s.enqueue(request(1, 4, 30), 0)
    _, _, now = step(s, 0)
    assert s.schedule(now).max_steps == 4  # 4 blocks last for 8 tokens each, the ninth needs 6


def test_split_leaves_one_iteration_in_flight():
    s = scheduler()
    a, b = request(0, 10, 50), request(1, 10, 60)
    s.enqueue(a, 0)
    s.enqueue(b, 0)
    _, _, now = step(s, 0)
    batch = s.schedule(now)
    progress = s.split(batch, 7, now + 77, 12)
    assert (progress.cohort_size, progress.decode_tokens) == (2, 14)
    assert (batch.max_steps, batch.formed_ns, batch.shape.decode_context_sum) == (1, 87, 34)
    assert s.cancel(a)
    assert (a.generated_tokens, a.last_token_ns, a.max_gap_ns) == (8, 87, 12)
    progress = s.complete(batch, 1, 100, 13)
    assert (progress.cohort_size, progress.gaps_ns) == (1, [])
    assert s.recount() == []
    assert ids(run_out(s, 100)) == [1]


def test_leap_holds_while_the_newcomer_cannot_get_in():
    s = scheduler(max_num_seqs=1)
    s.enqueue(request(0, 10, 50), 0)
    _, _, now = step(s, 0)
    batch = s.schedule(now)
    s.enqueue(request(1, 10, 5), now)
    assert s.leap_holds(batch)
    free = scheduler()
    free.enqueue(request(0, 10, 50), 0)
    _, _, now = step(free, 0)
    batch = free.schedule(now)
    assert free.leap_holds(batch)
    free.enqueue(request(1, 10, 5), now)
    assert not free.leap_holds(batch)


def test_a_reservation_breaks_a_leap_only_if_its_blocks_are_needed():
    s = scheduler(20, bs=4)
    s.enqueue(request(0, 4, 41), 0)
    _, _, now = step(s, 0)
    batch = s.schedule(now)
    assert batch.max_steps == 40  # ends with 44 tokens in 11 blocks
    s.settle(batch, 3)
    assert s.reserve([request(1, 32, 9)])
    assert s.leap_holds(batch)
    assert s.reserve([request(2, 8, 9)])
    assert not s.leap_holds(batch)


def test_stalled_replica_gives_a_longer_first_gap():
    s = scheduler()
    r = request(0, 10, 5)
    s.enqueue(r, 0)
    step(s, 0)
    batch, progress, _ = step(s, 25)  # no call for 15 ns
    assert batch.max_steps == 4
    assert (progress.cohort_size, progress.late_gaps_ns, progress.gaps_ns) == (1, [25], [])
    assert r.max_gap_ns == 25


def test_late_member_shares_all_gaps_but_the_first():
    s = scheduler()
    a, b, c = request(0, 10, 50), request(1, 10, 30), request(2, 10, 30)
    s.enqueue(a, 0)
    _, _, now = step(s, 0)
    for r in (b, c):
        r.generated_tokens, r.first_token_ns, r.last_token_ns = 1, 3, 3
    assert s.reserve([b, c])
    s.activate([b, c], now)
    batch = s.schedule(now)
    assert (batch.shape.decode_count, batch.max_steps) == (3, 29)
    batch.first_end_ns = now + 10
    progress = s.split(batch, 4, now + 40, 10)
    assert (progress.cohort_size, progress.late_gaps_ns) == (3, [17, 17])
    assert s.cancel(b)
    assert (b.max_gap_ns, b.last_token_ns, b.generated_tokens) == (17, now + 40, 5)
    progress = s.complete(batch, 1, now + 60, 20)
    assert (progress.cohort_size, progress.late_gaps_ns, progress.gaps_ns) == (2, [], [])
    assert s.cancel(c)
    assert (c.max_gap_ns, c.generated_tokens) == (20, 6)


def test_late_member_that_is_lost_in_its_first_step_keeps_its_time():
    s = scheduler()
    a, b = request(0, 10, 50), request(1, 10, 30)
    s.enqueue(a, 0)
    _, _, now = step(s, 0)
    b.generated_tokens, b.first_token_ns, b.last_token_ns = 1, 3, 3
    assert s.reserve([b])
    s.activate([b], now)
    s.schedule(now)
    assert ids(s.evacuate()) == [0, 1]
    assert (a.last_token_ns, b.last_token_ns, b.generated_tokens) == (now, 3, 1)


# --- handoff ----------------------------------------------------------------------------------
def test_prefill_hands_over_and_decode_goes_on():
    source, target = scheduler(20), scheduler(20)
    r = request(0, 33, 10)
    source.enqueue(r, 0)
    _, progress, _ = step(source, 0)
    assert ids(progress.first_tokens) == [0]
    source.detach(r)
    assert (source.running_count, source.blocks_used) == (0, 3)
    assert target.blocks_to_reserve([r]) == 3  # 33 + 1 tokens
    assert target.reserve([r])
    target.activate([r], 50)
    source.release(r)
    assert (source.blocks_used, target.blocks_used, target.running_count) == (0, 3, 1)
    assert source.recount() == target.recount() == []
    batch, progress, _ = step(target, 60)
    assert (batch.max_steps, progress.cohort_size, progress.late_gaps_ns) == (9, 1, [60])
    assert ids(progress.finished) == [0]
    assert (r.max_gap_ns, target.blocks_used) == (60, 0)


def test_reservation_is_all_or_nothing():
    s = scheduler(5)
    a, b = request(0, 40, 2), request(1, 40, 2)
    assert not s.reserve([a, b])
    assert s.blocks_used == 0
    assert s.reserve([a])
    s.unreserve([a])
    assert s.blocks_used == 0


@pytest.mark.parametrize("caching", [False, True])
def test_adopted_request_goes_on_with_its_blocks(caching):
    s = scheduler(20, caching=caching)
    r = request(0, 33, 10, tokens=list(range(43)))
    s.enqueue(r, 0)
    _, _, now = step(s, 0)
    s.detach(r)
    s.adopt([r], now)
    assert (s.running_count, s.blocks_used) == (1, 3)
    assert ids(run_out(s, now)) == [0]
    assert s.blocks_used == 0


def test_arrivals_beyond_the_cap_wait_for_a_seat():
    s = scheduler(max_num_seqs=1)
    moved = [request(i, 10, 3) for i in range(2)]
    for r in moved:
        r.generated_tokens, r.first_token_ns, r.last_token_ns = 1, 5, 5
    assert s.reserve(moved)
    s.activate(moved, 10)
    batch, progress, now = step(s, 10)
    assert (batch.shape.decode_count, s.running_count, s.blocks_used) == (1, 1, 1)
    assert ids(progress.finished) == [0]
    assert ids(run_out(s, now)) == [1]


def test_running_decode_can_be_detached_between_iterations():
    s = scheduler()
    a, b = request(0, 10, 50), request(1, 10, 60)
    s.enqueue(a, 0)
    s.enqueue(b, 0)
    _, _, now = step(s, 0)
    _, _, now = step(s, now, steps=9)
    s.detach(a)
    assert (a.computed_tokens, a.generated_tokens, a.kv_blocks, a.last_token_ns) == (19, 10, 2, now)
    batch, _, now = step(s, now, steps=1)
    assert batch.shape.decode_count == 1
    s.release(a)
    assert s.blocks_used == 2


@pytest.mark.parametrize("caching", [False, True])
def test_evacuation_empties_everything(caching):
    s = scheduler(14, caching=caching)
    for rid in range(4):
        s.enqueue(request(rid, 40, 20, tokens=list(range(60))), 0)
    _, _, now = step(s, 0)
    held = next(iter(s.residents()))
    s.detach(held)
    assert s.reserve([request(9, 10, 2)])
    s.schedule(now)
    assert s.waiting_count + s.running_count == 3
    left = s.evacuate()
    assert sorted(ids(left)) == sorted({0, 1, 2, 3} - {held.request_id})
    assert (s.blocks_used, s.waiting_count, s.running_count) == (0, 0, 0)
    s.release(held)  # the transfer that was under way ends: nothing to free
    assert s.recount() == []
    s.enqueue(left[0], now)
    assert ids(run_out(s, now)) == [left[0].request_id]


def test_token_receivers_are_those_who_get_a_token():
    s = scheduler(max_num_batched_tokens=20)
    s.enqueue(request(0, 5, 9), 0)
    s.enqueue(request(1, 50, 9), 0)
    batch = s.schedule(0)
    assert ids(s.token_receivers(batch)) == [0]
    s.complete(batch, 1, 10, 10)
    batch = s.schedule(10)
    assert ids(s.token_receivers(batch)) == [0]


# --- pipeline ---------------------------------------------------------------------------------
def test_stages_hold_several_batches_and_skip_pending_tokens():
    s = scheduler(stages=2, max_num_batched_tokens=10)
    s.enqueue(request(0, 10, 3), 0)
    s.enqueue(request(1, 10, 3), 0)
    first, second = s.schedule(0), s.schedule(0)
    assert ids(c.request for c in first.chunks) == [0]
    assert ids(c.request for c in second.chunks) == [1]
    assert s.schedule(0) is None
    assert ids(s.complete(first, 1, 10, 10).first_tokens) == [0]
    third = s.schedule(10)
    assert (third.shape.decode_count, ids(third.decodes)) == (1, [0])
    assert ids(s.complete(second, 1, 20, 20).first_tokens) == [1]


@pytest.mark.parametrize(
    ("outputs", "blocks", "ends"),
    [
        ((5, 4), 1000, 5),  # the second one's batch is its third, the sixth of both
        ((4, 6), 1000, 4),
        ((5, 5), 1000, 6),
        ((300, 300), 20, 288),  # each takes 9 of 18 free blocks at most: 144 steps
        ((2, 9), 1000, 0),
    ],
)
def test_batches_in_turn_follow_each_other_until_a_request_ends_or_blocks_do(outputs, blocks, ends):
    s = scheduler(blocks, stages=2, max_num_batched_tokens=10, reserve_full_sequence=False)
    for rid, output in enumerate(outputs):
        s.enqueue(request(rid, 10, output), 0)
    first, second = s.schedule(0), s.schedule(0)
    s.complete(first, 1, 10, 10)
    third = s.schedule(10)
    s.complete(second, 1, 20, 20)
    found = s.rotation([third, s.schedule(20)])
    assert (0 if found is None else found.ends_max) == ends


def test_chunk_in_flight_gives_no_token_to_an_earlier_batch():
    """Two chunks of one prompt in flight: its first token comes with the second."""
    s = scheduler(stages=2, max_num_batched_tokens=10)
    s.enqueue(request(0, 20, 3), 0)
    first, second = s.schedule(0), s.schedule(0)
    assert s.complete(first, 1, 10, 10).first_tokens == []
    assert ids(s.complete(second, 1, 20, 20).first_tokens) == [0]
