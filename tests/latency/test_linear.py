"""The linear backend: hand-computed costs, leaps equal to steps."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.latency.base import BatchShape, stepped_decode_run
from emu.latency.host_costs import (
    ASYNC_SCHEDULING,
    NO_OVERHEAD,
    SYNC_SCHEDULING,
    host_costs,
    step_overhead_ns,
)
from emu.latency.linear import LinearBackend

CASES = Path(__file__).parents[3] / "shared/data/vidur-cases"


def test_formula_by_hand():
    backend = LinearBackend(5000, 50, 1)
    shape = BatchShape(
        prefill_new=[100, 20],
        prefill_context=[0, 30],
        decode_count=3,
        decode_context_sum=1000,
        sequences=5,
    )
    assert backend.iteration_ns(shape) == 1000 * (5000 + 50 * 123 + 1 * 1030)
    assert backend.stage_ns(shape) == (12_180_000,)
    assert sum(backend.components_ns(shape).values()) == 12_180_000


def test_costs_are_rounded_to_the_nearest_nanosecond():
    for base_us, cost_ns in ((0.0014, 1), (0.0015, 2), (0.0016, 2), (0.0001, 1)):
        assert LinearBackend(base_us, 0, 0).iteration_ns(BatchShape(decode_count=1)) == cost_ns
    ends = LinearBackend(0, 0, 0.0006).decode_run_ns(
        BatchShape(decode_count=1, decode_context_sum=4, sequences=1), 3
    )
    assert ends.tolist() == [2, 5, 9]  # 2.4, 3.0 and 3.6


def test_stages_parts_of_layers_and_prefill_rate():
    backend = LinearBackend(10, 1, 0, 1e6, stages=2, layers=4)
    decode = BatchShape(decode_count=2, decode_context_sum=7, sequences=2)
    assert backend.stage_ns(decode) == (12_000, 12_000)
    assert backend.iteration_ns(decode) == 24_000
    half = BatchShape(decode_count=2, decode_context_sum=7, sequences=2, layers=2)
    assert backend.iteration_ns(half) == 12_000
    prefill = BatchShape(prefill_new=[500], prefill_context=[0], sequences=1)
    assert backend.stage_ns(prefill) == (500_000, 500_000)


def test_never_below_a_nanosecond():
    assert LinearBackend(0, 0, 0).iteration_ns(BatchShape(decode_count=1, sequences=1)) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 1e5),
    st.floats(0, 500),
    st.floats(0, 10),
    st.integers(1, 300),
    st.integers(0, 10**7),
    st.integers(1, 4),
    st.integers(-1, 8),
    st.integers(1, 100),
)
def test_a_leap_equals_its_steps(base, token, context, count, context_sum, stages, layers, steps):
    backend = LinearBackend(base, token, context, stages=stages, layers=8)
    shape = BatchShape(
        decode_count=count, decode_context_sum=context_sum, sequences=count, layers=layers
    )
    leap = backend.decode_run_ns(shape, steps)
    assert leap.tolist() == stepped_decode_run(backend, shape, steps).tolist()
    assert sum(backend.components_ns(shape).values()) == backend.iteration_ns(shape)
    assert sum(backend.stage_ns(shape)) == backend.iteration_ns(shape)


@pytest.mark.shared
@pytest.mark.skipif(not CASES.exists(), reason="needs ../shared/data/vidur-cases")
@pytest.mark.parametrize("name", ["vllm_roomy", "sarathi_chunked", "pp2_vllm"])
def test_reference_batches_take_the_formula(name):
    """Durations of all first batches of requests, whose context is known to be 0."""
    case = json.loads((CASES / f"{name}.json").read_text())
    backend = LinearBackend(5000, 50, 1)
    seen: set[int] = set()
    checked = 0
    for batch in case["batches"]:
        if not seen.intersection(batch["requests"]):
            shape = BatchShape(
                prefill_new=batch["tokens"],
                prefill_context=[0] * len(batch["tokens"]),
                sequences=len(batch["tokens"]),
            )
            for _, start, end in batch["stages"]:
                assert (end - start) * 1000 == backend.iteration_ns(shape)
                checked += 1
        seen.update(batch["requests"])
    assert checked


def test_host_costs_are_switchable():
    assert host_costs(False) is NO_OVERHEAD
    assert host_costs(True) is ASYNC_SCHEDULING
    assert step_overhead_ns(NO_OVERHEAD, 100, layers=32, has_prompt=True) == 0
    assert NO_OVERHEAD.first_use_ns == ()
    assert step_overhead_ns(host_costs(True, 50.5), 100) == 50_500
    assert step_overhead_ns(ASYNC_SCHEDULING, 100, layers=32) == 300_000 + 32 * 15_000
    prompt = step_overhead_ns(ASYNC_SCHEDULING, 100, layers=32, has_prompt=True)
    assert prompt == 300_000 + 32 * 240_000
    assert host_costs(True, overlapped=False) is SYNC_SCHEDULING
    for sequences in (1, 256):  # exposed time without overlap: 1 to 3 ms, and a little
        assert 1e6 <= step_overhead_ns(SYNC_SCHEDULING, sequences) <= 3.1e6


def test_first_use_fades_out():
    times = list(ASYNC_SCHEDULING.first_use_ns)
    assert times == sorted(times, reverse=True)
    assert len(times) == 3
