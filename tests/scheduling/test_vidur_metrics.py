"""The peer's own metrics, recomputed from the stamps on our requests."""

import itertools

import pytest

from emu.latency.base import BatchShape
from emu.scheduling.base import Batch, Chunk
from emu.scheduling.pipeline import Pipeline, discount_bubbles
from tests.latency.features import batch_flops, mfu
from tests.scheduling.test_vidur_golden import EXACT
from tests.scheduling.times import request_times
from tests.scheduling.vidur_drive import request
from tests.scheduling.vidur_world import CASES, US, load, play

shared = [
    pytest.mark.shared,
    pytest.mark.skipif(not CASES.is_dir(), reason="../shared/data/vidur-cases is absent"),
]
NAMES = ["vllm_preempt", "global_round_robin_vllm"]


def test_times_by_hand():
    item = request(0, 20, 5, at=100)
    item.first_scheduled_ns, item.first_token_ns, item.last_token_ns = 150, 350, 950
    item.generated_tokens, item.execution_ns, item.preemptions = 5, 600, 2
    times = request_times(item)
    assert (times.e2e_ns, times.scheduling_delay_ns, times.ttft_ns) == (850, 50, 250)
    assert (times.execution_ns, times.preempted_ns, times.prefill_ns) == (600, 200, 200)
    assert (times.prefill_ns_per_token, times.decode_ns_per_token) == (10.0, 150.0)
    assert (times.restarts, times.prompt_to_output) == (2, 4.0)


@pytest.mark.parametrize("name", [pytest.param(name, marks=shared) for name in NAMES])
def test_request_columns(name):
    metrics = load(f"metrics_{name}")
    case = load(name)
    world, requests = play(case, EXACT[name])
    assert len(world.restarts) > 0
    final = [(row["final_prefill"], row["final_decode"]) for row in case["expected"]]
    columns = metrics["request_metrics_columns"]
    before = None
    for item, row, (prompt, output) in zip(
        requests, metrics["request_metrics"], final, strict=True
    ):
        want = dict(zip(columns, row, strict=True))
        times = request_times(item)
        in_service = times.execution_ns + times.preempted_ns
        got = {
            "request_e2e_time": times.e2e_ns,
            "request_execution_time": times.execution_ns,
            "request_model_execution_time": times.execution_ns,
            "request_preemption_time": times.preempted_ns,
            "request_scheduling_delay": times.scheduling_delay_ns,
            "request_execution_plus_preemption_time": in_service,
            "prefill_e2e_time": times.ttft_ns,
            "prefill_time_execution_plus_preemption": times.prefill_ns,
        }
        # The peer divides by the lengths after restarts, and by tokens instead of gaps.
        normalized = {
            f"{key}_normalized": got[key] / output
            for key in (
                "request_e2e_time",
                "request_execution_time",
                "request_model_execution_time",
                "request_execution_plus_preemption_time",
            )
        }
        normalized["prefill_time_execution_plus_preemption_normalized"] = times.prefill_ns / prompt
        decode_ns = item.last_token_ns - item.first_token_ns
        normalized["decode_time_execution_plus_preemption_normalized"] = decode_ns / output
        for key, value in {**got, **normalized}.items():
            assert value / US == pytest.approx(want[key], rel=1e-8, abs=1e-6), key
        assert want["request_num_tokens"] == item.total_tokens
        assert want["request_pd_ratio"] == pytest.approx(times.prompt_to_output, rel=1e-6)
        assert want["request_num_restarts"] == times.restarts
        delay = want["request_inter_arrival_delay"]
        assert delay == (None if before is None else (item.arrival_ns - before) // US)
        before = item.arrival_ns


@pytest.mark.parametrize("name", [pytest.param(name, marks=shared) for name in NAMES])
def test_batch_columns_and_gaps(name):
    metrics = load(f"metrics_{name}")
    case = load(name)
    world, requests = play(case, EXACT[name])
    for number, (batch, row) in enumerate(
        zip(world.batches, metrics["batch_metrics"], strict=True)
    ):
        tokens = batch["tokens"]
        prompts = sum(t for t in tokens if t > 1)
        took = batch["stages"][-1][2] - batch["formed_at_us"]
        assert row == [number, sum(tokens), prompts, sum(tokens) - prompts, len(tokens), took]
    # The peer leaves out the gap that a restart makes; ours holds it.
    gaps = sorted(gap // US for gap in world.gaps)
    restarts = sum(r.preemptions for r in requests)
    peer = metrics["inter_token_gap"]
    assert len(gaps) == peer["count"] + restarts
    assert len(gaps) == sum(r.output_tokens - 1 for r in requests)
    assert sum(gaps) == sum((r.last_token_ns - r.first_token_ns) // US for r in requests)
    assert gaps[0] == peer["min_us"]
    assert max(r.max_gap_ns for r in requests) // US == gaps[-1] >= peer["max_us"]


def weighted_mean(samples):
    """The peer's: a step function from the first sample after 0 to the last."""
    samples = [(time, value) for time, value in samples if time > 0]
    pairs = itertools.pairwise(samples)
    area = sum(value * (later - time) for (time, value), (later, _) in pairs)
    return area / (samples[-1][0] - samples[0][0])


@pytest.mark.parametrize("name", [pytest.param(name, marks=shared) for name in NAMES])
def test_memory_and_mfu(name):
    metrics = load(f"metrics_{name}")["utilisation"]
    case = load(name)
    world, _ = play(case, EXACT[name])
    replicas = len(world.schedulers)
    processed = {row["request"]: 0 for row in case["requests"]}
    mfus = [[] for _ in range(replicas)]
    sizes = {"parameters": 6_476_005_376, "layers": 32, "query_heads": 32, "head_dim": 128}
    events = sorted(
        [(b["formed_at_us"], 1, n) for n, b in enumerate(world.batches)]
        + [(b["stages"][-1][2], 0, n) for n, b in enumerate(world.batches)]
    )
    for time, starts, number in events:
        batch = world.batches[number]
        samples = mfus[batch["replica"]]
        if not starts:
            samples.append((time, 0.0))
            for rid, new in zip(batch["requests"], batch["tokens"], strict=True):
                processed[rid] += new + (new > 1)  # a prompt brings one token with it
            continue
        members = [
            (processed[rid] if new == 1 else 0, new)
            for rid, new in zip(batch["requests"], batch["tokens"], strict=True)
        ]
        for rid, new in zip(batch["requests"], batch["tokens"], strict=True):
            processed[rid] = 0 if new > 1 else processed[rid]
        took_s = (batch["stages"][0][2] - time) / 1e6
        flops = batch_flops(members, causal=False, **sizes)
        samples.append((time, 100 * mfu(flops, took_s, 312) * 10**12 / 2**40))
    for index in range(replicas):
        # File r of the peer holds replica r mod N.
        prefix = f"replica_{index if index else replicas}"
        want = metrics[f"{prefix}_memory_usage_weighted_mean"]
        # Called a weighted mean, the peer's memory figure is the plain mean of the samples and
        # of one zero before them.
        values = [value for _, value in world.memory[index]]
        assert sum(values) / (len(values) + 1) == pytest.approx(want, rel=1e-9)
        assert max(v for _, v in world.memory[index]) == pytest.approx(
            metrics[f"{prefix}_memory_usage_max"]
        )
        stage = f"{prefix}_stage_1_mfu"
        assert max(v for _, v in mfus[index]) == pytest.approx(metrics[f"{stage}_max"], rel=1e-9)
        assert weighted_mean(mfus[index]) == pytest.approx(
            metrics[f"{stage}_weighted_mean"], rel=1e-9
        )


PIPELINED = ["pp2_vllm", "pp2_sarathi", "pp2_orca", "pp2_ft"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=shared) for name in PIPELINED])
def test_preempted_time_leaves_out_the_wait_for_the_first_stage(name):
    case = load(name)
    _, requests = play(case, EXACT[name])
    times = [request_times(item) for item in requests]
    assert any(time.stage_wait_ns for time in times)
    for time, row in zip(times, case["expected"], strict=True):
        assert time.preempted_ns == row["preempted_time_us"] * US
        assert time.execution_ns == row["execution_time_us"] * US
        parts = time.scheduling_delay_ns + time.stage_wait_ns
        assert parts + time.execution_ns + time.preempted_ns == time.e2e_ns


def test_wait_for_the_first_stage_is_noted_once():
    pipeline, item = Pipeline(2), request(0, 20, 5, at=0)
    pipeline.enter(0, [100, 50])  # another batch holds the first stage until 100
    item.first_scheduled_ns = 40
    for formed_ns in (40, 500):
        batch = Batch(0, BatchShape(), [Chunk(item, 20, 0)], formed_ns=formed_ns)
        spans = pipeline.enter(formed_ns, [100, 50])
        item.execution_ns += spans[-1].end_ns - formed_ns
        discount_bubbles(batch, spans)
    item.first_token_ns = item.last_token_ns = 650
    item.generated_tokens = 1
    times = request_times(item)
    assert (times.stage_wait_ns, times.execution_ns) == (60, 300)
    assert times.preempted_ns == 650 - 40 - 60 - 300
