"""Speculative decoding: acceptance, tokens of a step, slots, and where it stops paying."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from emu.config.schema import VllmTable
from emu.features.speculation.acceptance import (
    Speculation,
    conditional_rates,
    draw,
    draws,
    expected_tokens,
)
from emu.features.speculation.drafters import stops_paying_at
from emu.features.speculation.feature import FEATURE
from emu.features.speculation.keys import SpeculativeTable, TenantAcceptance
from emu.features.speculation.passes import DraftPricer
from emu.kv.groups import KvGroup, KvLayout
from emu.latency.added import AddedBackend
from emu.latency.linear import LinearBackend
from emu.request import Prefix, Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.vllm import VllmScheduler


def drafts(count=3, rate=0.7, method="eagle", **keys):
    return SpeculativeTable(
        method=method, num_speculative_tokens=count, acceptance_rate=rate, **keys
    )


def scheduler(
    speculative=None,
    *,
    blocks=10_000,
    caching=False,
    ahead=False,
    layout=None,
    longest=10**6,
    **keys,
):
    table = VllmTable(**keys)
    limits = ReplicaLimits(
        num_blocks=blocks,
        block_size=16,
        max_model_tokens=longest,
        prefix_caching=caching,
        kv_layout=layout,
    )
    parts = [] if speculative is None else [Speculation(speculative, 7)]
    limits.forms_ahead = ahead
    return VllmScheduler(table, limits, parts=parts)


def request(number, prompt=16, output=200, ids=None, tenant=""):
    made = Request(
        request_id=number,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
        tenant=tenant,
        prefix=None if ids is None else Prefix(np.array(ids, dtype=np.int64)),
    )
    made.row = number
    return made


def drive(engine, requests, backend=None, check=None):
    """Run until all have ended; (time, output tokens, steps)."""
    for one in requests:
        engine.enqueue(one, 0)
    now_ns = tokens = steps = 0
    while (batch := engine.schedule(now_ns)) is not None:
        took_ns = 1000 if backend is None else backend.iteration_ns(batch.shape)
        now_ns += took_ns
        receivers = len(list(engine.token_receivers(batch)))
        progress = engine.complete(batch, 1, now_ns, took_ns)
        assert receivers == progress.decode_tokens
        tokens += progress.decode_tokens
        steps += 1
        if check is not None:
            check()
    return now_ns, tokens, steps


# --- acceptance -------------------------------------------------------------------------------
@pytest.mark.parametrize(("rate", "count"), [(0.85, 1), (0.8, 3), (0.7, 5), (0.3, 4)])
def test_tokens_of_a_step_are_those_of_the_closed_form(rate, count):
    engine = scheduler(drafts(count, rate))
    requests = [request(number, output=2000) for number in range(20)]
    drive(engine, requests)
    counts = engine.parts[0].counts
    closed_form = (1 - rate ** (count + 1)) / (1 - rate)
    assert expected_tokens(conditional_rates(drafts(count, rate))) == pytest.approx(closed_form)
    measured = 1 + counts.accepted_tokens / counts.drafts
    assert counts.drafts > 10_000
    assert measured == pytest.approx(closed_form, rel=0.02)
    for position, accepted in enumerate(counts.accepted_per_position):
        assert accepted / counts.drafts == pytest.approx(rate ** (position + 1), abs=0.02)


def test_rates_by_position_are_unconditional_as_in_vllm():
    table = SpeculativeTable(
        method="mtp", num_speculative_tokens=3, synthetic_acceptance_rates=[0.9, 0.6, 0.3]
    )
    assert expected_tokens(conditional_rates(table)) == pytest.approx(1 + 0.9 + 0.6 + 0.3)
    engine = scheduler(table)
    drive(engine, [request(number, output=2000) for number in range(20)])
    counts = engine.parts[0].counts
    for accepted, rate in zip(counts.accepted_per_position, [0.9, 0.6, 0.3], strict=True):
        assert accepted / counts.drafts == pytest.approx(rate, abs=0.02)


def test_a_mean_length_has_the_least_variance():
    table = SpeculativeTable(
        method="mtp", num_speculative_tokens=4, synthetic_acceptance_length=3.25
    )
    assert conditional_rates(table) == [1.0, 1.0, 0.25, 0.0]
    assert expected_tokens(conditional_rates(table)) == 3.25


def test_a_request_or_a_tenant_may_have_a_rate_of_its_own():
    table = drafts(2, 0.5, tenants=[TenantAcceptance(tenant="sure", acceptance_rate=1.0)])
    speculation = Speculation(table, 1)
    assert all(speculation.accepted(request(number, tenant="sure"), 2) == 2 for number in range(50))
    refused = request(1, tenant="sure")
    refused.acceptance_rate = 0.0
    assert speculation.accepted(refused, 2) == 0


def test_rates_of_requests_spread_around_the_mean():
    speculation = Speculation(drafts(1, 0.5, acceptance_spread=0.5), 3)
    shares = []
    for number in range(300):
        one, accepted = request(number), 0
        for position in range(100):
            one.generated_tokens = position
            accepted += speculation.accepted(one, 1)
        shares.append(accepted / 100)
    assert sum(shares) / 300 == pytest.approx(0.5, abs=0.05)
    assert min(shares) < 0.1
    assert max(shares) > 0.9


def test_acceptance_does_not_depend_on_the_batch():
    steps = []
    for seats in (1, 3, 64):
        engine = scheduler(drafts(4, 0.6), max_num_seqs=seats)
        drive(engine, [request(number, output=100 + number) for number in range(12)])
        counts = engine.parts[0].counts
        steps.append((counts.drafts, counts.draft_tokens, counts.accepted_tokens))
    assert steps[0] == steps[1] == steps[2]


def test_an_output_ends_in_the_middle_of_an_accepted_run():
    engine = scheduler(drafts(3, 1.0))
    one = request(1, output=7)
    _, tokens, steps = drive(engine, [one])
    assert tokens == one.generated_tokens == 7
    assert steps == 1 + 2  # 1 with the prompt, then 4, then 2 of 4
    assert engine.parts[0].counts.accepted_tokens == 6


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_that_works_ahead_verifies_once_more_what_has_ended(ahead):
    """Accepted drafts end an output a step before the engine can know."""
    engine = scheduler(drafts(3, 1.0), ahead=ahead)
    for one in (request(1, output=7), request(2, output=14)):
        engine.enqueue(one, 0)
    now_ns, verified = 0, []
    while (batch := engine.schedule(now_ns)) is not None:
        now_ns += 1000
        verified.append((batch.shape.verify.count, batch.shape.verify.tokens))
        engine.complete(batch, 1, now_ns, 1000)
    assert verified == [(0, 0), (2, 8), (2, 8), (2, 8) if ahead else (1, 4), (1, 4)]


def test_n_grams_that_are_not_found_leave_a_plain_decode():
    engine = scheduler(drafts(3, 1.0, method="ngram", proposal_rate=0.0))
    _, tokens, steps = drive(engine, [request(1, output=9)])
    assert (tokens, steps) == (9, 9)
    assert engine.parts[0].counts.drafts == 0


# --- slots ------------------------------------------------------------------------------------
def test_slots_are_held_ahead_and_rejected_drafts_give_none_back():
    """vLLM: block 16, 3 drafts, EAGLE: 30 prompt tokens hold 3 blocks; the fourth comes when
    computed + 4 + 3 > 48."""
    engine = scheduler(drafts(3, 0.0))
    one = request(1, prompt=30, output=40)
    engine.enqueue(one, 0)
    now_ns = 0
    while (batch := engine.schedule(now_ns)) is not None:
        before = one.computed_tokens - batch.shape.verify.tokens if one.generated_tokens else 0
        need = 33 if not one.generated_tokens else before + 4 + 3
        assert one.kv_blocks == -(-need // 16)
        now_ns += 1
        engine.complete(batch, 1, now_ns, 1)
        assert one.generated_tokens == 40 or one.computed_tokens == one.reached_tokens - 1
    assert engine.blocks_used == 0


def test_without_a_drafter_of_layers_only_the_drafts_need_slots():
    engine = scheduler(drafts(3, 0.0, method="ngram"))
    one = request(1, prompt=16, output=40)
    engine.enqueue(one, 0)
    batch = engine.schedule(0)
    assert one.kv_blocks == 1
    engine.complete(batch, 1, 1, 1)
    engine.schedule(1)
    assert (one.computed_tokens, one.kv_blocks) == (20, 2)


def test_drafts_end_at_the_models_limit():
    engine = scheduler(drafts(8, 1.0), longest=40)
    one = request(1, prompt=30, output=10)
    largest = 0

    def check():
        nonlocal largest
        largest = max(largest, one.kv_blocks)

    _, tokens, _ = drive(engine, [one], check=check)
    assert tokens == 10
    assert largest <= 3  # 40 slots


def test_a_budget_cuts_drafts_from_the_end():
    engine = scheduler(drafts(3, 1.0), max_num_batched_tokens=6, max_num_seqs=4)
    for number in range(2):
        engine.enqueue(request(number, prompt=1, output=30), 0)
    engine.complete(engine.schedule(0), 1, 1, 1)
    batch = engine.schedule(1)
    assert batch.shape.verify.tokens == 6
    assert batch.shape.verify.count == 2


WINDOWED = KvLayout(
    groups=(
        KvGroup(keeps="window", limit_tokens=64, layers=2, block_tokens=16),
        KvGroup(keeps="all", limit_tokens=0, layers=2, block_tokens=16),
    ),
    block_bytes=1,
    block_tokens=16,
    hash_tokens=16,
)
STATES = KvLayout(
    groups=(
        KvGroup(keeps="state", limit_tokens=0, layers=2, block_tokens=16),
        KvGroup(keeps="all", limit_tokens=0, layers=2, block_tokens=16),
    ),
    block_bytes=1,
    block_tokens=16,
    hash_tokens=16,
)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("caching", "layout"),
    [(False, None), (True, None), (True, WINDOWED), (False, WINDOWED), (False, STATES)],
)
@pytest.mark.parametrize("seed", range(6))
def test_books_are_kept_in_crowded_random_worlds(seed, caching, layout, ahead):
    rng = random.Random(f"{seed} {caching} {ahead}")
    engine = scheduler(
        drafts(rng.choice((1, 2, 5)), rng.choice((0.0, 0.5, 0.9)), rng.choice(("ngram", "mtp"))),
        blocks=rng.choice((40, 60)),
        caching=caching,
        layout=layout,
        ahead=ahead,
        max_num_batched_tokens=rng.choice((32, 100)),
        max_num_seqs=rng.choice((4, 16)),
    )
    requests = []
    for number in range(25):
        prompt, output = rng.randint(1, 150), rng.randint(1, 60)
        shared = min(prompt, 80)
        family = rng.randrange(3) * 1000
        ids = [family + i for i in range(shared)] + [
            10_000 * (number + 1) + i for i in range(prompt + output - shared)
        ]
        requests.append(request(number, prompt, output, ids if caching else None))

    def check():
        assert engine.recount() == []

    drive(engine, requests, check=check)
    assert [one.generated_tokens for one in requests] == [one.output_tokens for one in requests]
    assert engine.blocks_used == 0


def test_states_have_a_slot_for_each_draft():
    engine = scheduler(drafts(3, 0.5), layout=STATES)
    one = request(1, prompt=10, output=30)
    engine.enqueue(one, 0)
    engine.schedule(0)
    states, attention = engine.pool.tables_of(one)
    assert (len(states), len(attention)) == (4, 1)


# --- what it brings ---------------------------------------------------------------------------
BASE_US, TOKEN_US, DRAFT_US, RATE, COUNT = 4000.0, 100.0, 400.0, 0.6, 3


def throughput(batch_size, speculative, steps):
    """Output tokens a second of an engine whose batch is always full."""
    engine = scheduler(speculative, max_num_seqs=batch_size, max_num_batched_tokens=8192)
    backend = LinearBackend(BASE_US, TOKEN_US, 0.0)
    if speculative is not None:
        backend = AddedBackend(backend, DraftPricer(COUNT, round(DRAFT_US * 1000)))
    rng = random.Random(5)
    number = 0

    def another():
        nonlocal number
        number += 1
        engine.enqueue(request(number, prompt=1, output=rng.randint(600, 1000)), 0)

    for _ in range(batch_size):
        another()
    now_ns = tokens = start_ns = 0
    for step in range(steps):
        batch = engine.schedule(now_ns)
        took_ns = backend.iteration_ns(batch.shape)
        now_ns += took_ns
        progress = engine.complete(batch, 1, now_ns, took_ns)
        if step < 3:
            start_ns = now_ns
        else:
            tokens += progress.decode_tokens
        for _ in progress.finished:
            another()
    return tokens * 1e9 / (now_ns - start_ns)


def test_throughput_crosses_at_the_analytic_batch_size():
    mean = (1 - RATE ** (COUNT + 1)) / (1 - RATE)
    # E (base + c B) = base + draft + c B (k + 1)
    analytic = (BASE_US * (mean - 1) - DRAFT_US) / (TOKEN_US * (COUNT + 1 - mean))
    assert 23 < analytic < 24
    table = drafts(COUNT, RATE)
    paying = {
        size: throughput(size, table, 1200) > throughput(size, None, 60)
        for size in (4, 16, 22, 23, 24, 25, 26, 48)
    }
    crossover = min(size for size, pays in paying.items() if not pays)
    assert abs(crossover - analytic) <= 1, paying
    assert not paying[48]
    plain = LinearBackend(BASE_US, TOKEN_US, 0.0)
    with_drafts = AddedBackend(plain, DraftPricer(COUNT, round(DRAFT_US * 1000)))
    assert stops_paying_at(plain, with_drafts, COUNT, mean, 500, 256) == 24


def test_numbers_drawn_together_are_those_drawn_one_by_one() -> None:
    for seed, request_id, position in ((0, 0, 0), (7, 12, 5), (2**40, 10**6, 4000)):
        one_by_one = [draw(seed, 3, request_id, position + index) for index in range(40)]
        assert draws(seed, 3, request_id, position, 40) == one_by_one


def test_drawn_worlds_have_a_drafter_of_their_own_where_its_target_has_one() -> None:
    """A small model drafts in most worlds of the plain model that had an EAGLE head, in no other."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    rng = np.random.default_rng(1)
    for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B"):
        for method in ("eagle", "eagle3", "ngram"):
            seen = counts[name.partition("/")[0], method] = Counter()
            for _ in range(200):
                drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
                tables = {"model": {"name": name}, "scheduler": {"speculative_config": drafts}}
                FEATURE.vary(rng, tables, [])
                seen[drafts["method"]] += 1
                assert ("model" in drafts) == (drafts["method"] == "draft_model")
    assert 130 < counts["meta-llama", "eagle"].pop("draft_model") < 190
    assert {key: set(seen) for key, seen in counts.items()} == {key: {key[1]} for key in counts}, (
        "all others keep their own"
    )
