"""Emulated runs against real vLLM: not worse than what docs/fidelity.md says."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks import fidelity_docs
from benchmarks.fidelity import PAIRS, PHASES, PROFILES, Result, emulate, roofline_errors
from benchmarks.fidelity_noise import intake
from benchmarks.fidelity_steps import forced, long_history_ns
from tests.shared_data import needs_shared

pytestmark = [needs_shared, pytest.mark.shared, pytest.mark.slow]

RTX4090, RTXPRO6000 = "RTX4090-Llama-3.1-8B", "RTXPRO6000-Llama-3.1-8B"


@cache
def result(name: str) -> Result:
    return emulate(name)


@pytest.mark.parametrize(("name", "as_close", "worst"), [(RTX4090, 11, 1.4), (RTXPRO6000, 14, 4.1)])
def test_nearly_all_metrics_are_at_least_as_close_as_the_simulators(name, as_close, worst):
    ours = np.abs(result(name).errors(result(name).ours))
    theirs = np.abs(result(name).errors(result(name).theirs))
    assert (ours <= theirs).sum() >= as_close
    assert ours.max() <= worst
    # Where it is not closer, it is by a fraction of a per cent of the metric.
    assert (ours - theirs).max() <= 1.15


def test_the_rtx4090_run_is_within_one_per_cent_however_it_is_anchored():
    """But for TPOT p95, which is one request's (docs/fidelity.md)."""
    found = result(RTX4090)
    for values in (found.ours, found.from_arrival):
        errors = np.abs(found.errors(values))
        errors[1, 3] -= 1.0
        assert errors.max() < 0.4


@pytest.mark.parametrize(
    ("name", "ttft", "tpot", "e2e"),
    [
        (RTX4090, (2.51, 0.33), (0.85, 0.57), (0.31, 0.28)),
        (RTXPRO6000, (3.6, 1.9), (1.2, 0.71), (1.22, 1.03)),
    ],
)
def test_single_requests(name, ttft, tpot, e2e):
    ours, theirs = result(name).paired(result(name).ours), result(name).paired(result(name).theirs)
    assert (ours <= np.array([ttft, tpot, e2e])).all()
    assert (ours < theirs).all()


def test_first_tokens_come_in_the_measured_iterations():
    """Until requests wait for seats, half of all first tokens are within 2.5 ms."""
    found = result(RTXPRO6000)
    errors_ms = np.abs(found.ours["TTFT"] - found.measured.ttft_ms)[:100]
    assert np.median(errors_ms) < 2.5


def test_the_simulators_rules_give_the_simulators_requests():
    """`latency.host_overhead=false`: nothing of the engine but its kernels."""
    for name in (RTX4090, RTXPRO6000):
        found = emulate(name, ["latency.host_overhead=false"])
        for metric, values in found.theirs.items():
            assert np.array_equal(values, found.from_arrival[metric]), (name, metric)


def test_roofline_against_profiles():
    """One set of constants; a RTX 4090 beats its quoted peak, mixed kernels are the profiles'."""
    errors = roofline_errors()
    assert len(errors) == len(PHASES)
    for phase, by_pair in errors.items():
        assert len(by_pair) == len(PAIRS)
        limit = 36 if "+" in phase else 27
        assert max(map(abs, by_pair)) < limit, phase
    decodes = [e for phase, row in errors.items() if phase.startswith("decode") for e in row]
    assert np.mean(np.abs(decodes)) < 8


@pytest.mark.parametrize("name", ["rtx4090", "rtxpro6000", "intake", "roofline"])
def test_the_pages_tables_are_those_of_this_code(name):
    """`python -m benchmarks.fidelity_docs --write` makes them."""
    text = fidelity_docs.PAGE.read_text(encoding="utf-8")
    assert fidelity_docs.with_table(text, name, fidelity_docs.TABLES[name]()) == text


def test_requests_wait_for_the_engine_as_long_as_measured():
    """From the arrival to the instant from which vLLM counts, ms."""
    measured, emulated, paired = intake(RTXPRO6000)
    assert abs(emulated.mean() - measured.mean()) < 1
    assert np.abs(np.percentile(emulated, (50, 90)) - np.percentile(measured, (50, 90))).max() < 2.5
    assert paired[0] < 5


def test_fed_with_measured_iterations_first_tokens_come_in_the_measured_ones():
    """Until seats are short: order, chunks, prefix hits and the batch ahead are vLLM's."""
    assert np.abs(forced(RTXPRO6000)[:128]).max() < 1e-3


def test_one_long_history_costs_nothing_while_the_kernel_splits_histories():
    """Decodes x KV heads of a rank below 0.8 x 2 x 188 multiprocessors; alike in all bundles."""
    models = PROFILES / "RTXPRO6000"
    for model, degree, heads in [
        ("meta-llama/Llama-3.1-8B", 1, 8),
        ("meta-llama/Llama-3.1-8B", 2, 4),
        ("Qwen/Qwen3-32B", 1, 8),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 1, 4),
    ]:
        costs = long_history_ns(models / model / "bf16" / f"tp{degree}")
        for decodes, cost_ns in costs.items():
            assert cost_ns < 2.5 if decodes * heads < 0.8 * 2 * 188 else cost_ns > 8
