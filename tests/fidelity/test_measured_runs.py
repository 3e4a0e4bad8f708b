"""Emulated runs against real vLLM: not worse than what docs/fidelity.md says."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks import fidelity_blocks, fidelity_docs
from benchmarks.fidelity import PAIRS, PHASES, Result, emulate, roofline_errors
from benchmarks.fidelity_noise import intake
from benchmarks.fidelity_steps import forced
from tests.shared_data import needs_shared

pytestmark = [needs_shared, pytest.mark.shared, pytest.mark.slow]

RTX4090, RTXPRO6000 = "RTX4090-Llama-3.1-8B", "RTXPRO6000-Llama-3.1-8B"


@cache
def result(name: str) -> Result:
    return emulate(name)


@pytest.mark.parametrize(("name", "as_close", "worst"), [(RTX4090, 13, 0.9), (RTXPRO6000, 12, 3.7)])
def test_nearly_all_metrics_are_at_least_as_close_as_the_simulators(name, as_close, worst):
    ours = np.abs(result(name).errors(result(name).ours))
    theirs = np.abs(result(name).errors(result(name).theirs))
    assert (ours <= theirs).sum() >= as_close
    assert ours.max() <= worst
    # Where it is not closer, it is by a fraction of a per cent of the metric.
    assert (ours - theirs).max() <= 0.65


def test_the_rtx4090_run_is_within_one_per_cent_however_it_is_anchored():
    found = result(RTX4090)
    for values in (found.ours, found.from_arrival):
        errors = np.sort(np.abs(found.errors(values)).ravel())
        assert errors[-1] < 1  # TPOT p95: one request, preempted
        assert errors[-2] < 0.5


@pytest.mark.parametrize(
    ("name", "ttft", "tpot", "e2e"),
    [
        (RTX4090, (2.74, 0.3), (0.59, 0.43), (0.27, 0.24)),
        (RTXPRO6000, (4.28, 2.0), (1.06, 0.52), (0.9, 0.54)),
    ],
)
def test_single_requests(name, ttft, tpot, e2e):
    ours, theirs = result(name).paired(result(name).ours), result(name).paired(result(name).theirs)
    assert (ours <= np.array([ttft, tpot, e2e])).all()
    assert (ours < theirs).all()


def test_first_tokens_come_in_the_measured_iterations():
    """Until requests wait for seats, half of all first tokens are within 4.5 ms."""
    found = result(RTXPRO6000)
    errors_ms = np.abs(found.ours["TTFT"] - found.measured.ttft_ms)[:100]
    assert np.median(errors_ms) < 4.5


def test_the_simulators_rules_give_the_simulators_requests():
    """`latency.host_overhead=false`: nothing of the engine but its kernels."""
    for name in (RTX4090, RTXPRO6000):
        found = emulate(name, ["latency.host_overhead=false"])
        for metric, values in found.theirs.items():
            assert np.array_equal(values, found.from_arrival[metric]), (name, metric)


def test_roofline_against_profiles():
    """Nothing is fitted to these profiles: the RTX 4090 has no kernel coefficients of its own, and
    the mixture's small batches are read from a cache that the tables do not have."""
    errors = roofline_errors()
    assert len(errors) == len(PHASES)
    for phase, by_pair in errors.items():
        assert len(by_pair) == len(PAIRS)
        for pair, error, limit in zip(PAIRS, by_pair, (36, 12, 20, 40), strict=True):
            assert abs(error) < limit, (phase, pair)
    decodes = [e for phase, row in errors.items() if phase.startswith("decode") for e in row]
    assert np.mean(np.abs(decodes)) < 9


@pytest.mark.parametrize(
    "name", ["rtx4090", "rtxpro6000", "makespans", "blocks", "intake", "roofline"]
)
def test_the_pages_tables_are_those_of_this_code(name):
    """`python -m benchmarks.fidelity_docs --write` makes them."""
    text = fidelity_docs.PAGE.read_text(encoding="utf-8")
    assert fidelity_docs.with_table(text, name, fidelity_docs.TABLES[name]()) == text


def test_requests_wait_for_the_engine_as_long_as_measured():
    """From the arrival to the instant from which vLLM counts, ms."""
    measured, emulated, paired = intake(RTXPRO6000)
    assert abs(emulated.mean() - measured.mean()) < 2
    assert np.abs(np.percentile(emulated, (50, 90)) - np.percentile(measured, (50, 90))).max() < 10
    assert paired[0] < 6.6


@pytest.mark.doubles
def test_fed_with_measured_iterations_first_tokens_come_in_the_measured_ones():
    """Until seats are short: order, chunks, prefix hits and the batch ahead are vLLM's."""
    assert np.abs(forced(RTXPRO6000)[:128]).max() < 1e-3


@pytest.mark.parametrize("folder", fidelity_blocks.folders(), ids=lambda f: "-".join(f.parts[-4:]))
def test_blocks_dealt_out_explain_unequal_histories(folder):
    """Without any fit; the fitted fraction was fitted to these batches."""
    as_equal, _, dealt, closed = fidelity_blocks.errors(fidelity_blocks.rows_of(folder))
    assert as_equal > 7
    assert dealt < 3.3
    assert closed < 7
