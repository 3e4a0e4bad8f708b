"""The scheduler against the naive model of the rules, and leaping against stepping."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emu.config.schema import SchedulerTable
from tests.scheduling.vllm_world import (
    Program,
    Spec,
    run_naive,
    run_naive_pipeline,
    run_pipeline,
    run_scheduler,
)


@st.composite
def programs(draw, *, orders=("arrival",), scale=1):
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    chunked = draw(st.booleans()) or draw(st.booleans())
    threshold = draw(st.sampled_from([0, 0, 5, 17]))
    budget = draw(st.sampled_from([3, 8, 24, 64, 2048]))
    longest = 40 * scale
    if not chunked:
        budget = 2048
    table = SchedulerTable(
        block_size=block_size,
        max_num_seqs=draw(st.sampled_from([1, 3, 8, 256])),
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        chunked_prefill=chunked,
        reserve_full_sequence=draw(st.booleans()),
        order=draw(st.sampled_from(orders)),
        skip_blocked=draw(st.integers(0, 4)) == 0,
    )
    count = draw(st.integers(1, 14))
    span = draw(st.sampled_from([1, 5_000, 60_000]))
    specs = []
    for _ in range(count):
        prompt = draw(st.integers(1, longest))
        output = draw(st.integers(1, longest))
        arrival = draw(st.integers(0, span))
        cancel = arrival + draw(st.integers(0, 60_000)) if draw(st.integers(0, 5)) == 0 else -1
        specs.append(
            Spec(
                arrival,
                prompt,
                output,
                family=draw(st.integers(0, 2)),
                shared=draw(st.sampled_from([0, 8, 16, 40, 200])),
                cancel_at=cancel,
                priority=draw(st.integers(0, 2)),
                deadline=draw(st.sampled_from([-1, 5_000, 50_000])),
                tenant=draw(st.sampled_from(["a", "b"])),
            )
        )
    # A pool in which each request fits alone, mostly too small for all.
    largest = max(-(-(s.prompt + s.output) // block_size) for s in specs)
    blocks = largest + draw(st.integers(0, 3 * largest))
    cuts = draw(st.lists(st.integers(0, 200_000), max_size=6))
    return Program(table, blocks, block_size, draw(st.booleans()), specs, cuts)


COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


def assert_same(left, right):
    for a, b in zip(left[0], right[0]):
        assert a == b
    assert len(left[0]) == len(right[0])
    assert left[1] == right[1]


@settings(max_examples=120, **COMMON)
@given(programs())
def test_scheduler_is_the_naive_model(program):
    log, ends, _ = run_scheduler(program, leap=False)
    assert_same((log, ends), run_naive(program))


@settings(max_examples=120, **COMMON)
@given(programs(orders=("arrival", "priority", "deadline", "fair")))
def test_leaping_is_stepping(program):
    stepped = run_scheduler(program, leap=False, check_books=False)
    leaped = run_scheduler(program, leap=True)
    assert_same(stepped, leaped)


@settings(max_examples=80, **COMMON)
@given(programs(orders=("arrival", "priority", "deadline", "fair")))
def test_the_cohort_gives_what_the_walk_over_the_running_list_gives(program):
    walked = run_scheduler(program, leap=False, walks=True)
    assert_same(walked, run_scheduler(program, leap=False, check_books=False))


@settings(max_examples=80, **COMMON)
@given(programs(), st.integers(2, 4))
def test_pipeline_is_the_naive_model(program, stages):
    log, ends = run_pipeline(program, stages)
    assert_same((log, ends), run_naive_pipeline(program, stages))
