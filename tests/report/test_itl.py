"""Inter-token gaps: exact mean, deviation and maximum, percentiles within 2^-11, independent of chunking."""

from __future__ import annotations

import math
from array import array
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.report import itl
from emu.report.itl import GapLog, bin_index, bin_middle

PERCENTS = (0, 1, 25, 50, 90, 95, 99, 99.9, 100)


def feed(runs: list[tuple[list[int], int]]) -> GapLog:
    log = GapLog()
    for gaps, count in runs:
        log.add_run(np.cumsum(np.array(gaps, dtype=np.int64)), count)
    return log


def pooled(runs: list[tuple[list[int], int]]) -> np.ndarray:
    return np.concatenate([np.repeat(gaps, count) for gaps, count in runs]).astype(np.int64)


def exact_std(samples: np.ndarray) -> float:
    values, counts = (column.tolist() for column in np.unique(samples, return_counts=True))
    count = sum(counts)
    total = sum(v * c for v, c in zip(values, counts))
    squares = sum(v * v * c for v, c in zip(values, counts))
    return math.sqrt(Fraction(count * squares - total * total, count * count))


RUNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**40), min_size=1, max_size=6), st.integers(1, 300)
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(RUNS)
def test_few_samples_are_exact(runs) -> None:
    stats = feed(runs).finish()
    samples = pooled(runs)
    assert stats.is_exact
    assert stats.samples == len(samples)
    assert stats.mean_ns == pytest.approx(int(samples.sum()) / len(samples), rel=1e-15)
    assert (stats.min_ns, stats.max_ns) == (samples.min(), samples.max())
    assert stats.std_ns == pytest.approx(samples.std(), rel=1e-9, abs=1e-6)
    for percent in PERCENTS:
        assert stats.percentile_ns(percent) == pytest.approx(
            np.percentile(samples, percent), rel=1e-9
        )


@settings(max_examples=80, deadline=None)
@given(RUNS)
def test_many_samples_keep_the_promised_error(runs) -> None:
    log = feed(runs)
    log.add_gap(1_000_003, itl.EXACT_SAMPLES)
    stats = log.finish()
    samples = np.concatenate([pooled(runs), np.full(itl.EXACT_SAMPLES, 1_000_003)])
    assert not stats.is_exact
    assert stats.samples == len(samples)
    assert stats.mean_ns == pytest.approx(int(samples.sum()) / len(samples), rel=1e-15)
    assert stats.max_ns == samples.max()
    assert stats.std_ns == pytest.approx(exact_std(samples), rel=1e-14)
    for percent in PERCENTS:
        exact = np.percentile(samples, percent)
        assert abs(stats.percentile_ns(percent) - exact) <= exact * 2**-11


@settings(max_examples=60, deadline=None)
@given(RUNS, st.integers(1, 5), st.booleans())
def test_cutting_runs_changes_nothing(runs, cut, many) -> None:
    """A leap of n steps and n single steps give the same figures, to the last bit."""
    whole, pieces, singles, few = GapLog(), GapLog(), GapLog(), GapLog()
    assert singles._few is None
    few._few = itl.FewGaps()
    for gaps, count in runs:
        ends = np.cumsum(np.array(gaps, dtype=np.int64))
        whole.add_run(ends, count, 7)
        few.add_run(array("q", ends.tolist()), count, 7)
        for start in range(0, len(gaps), cut):
            before = 7 + int(ends[start - 1]) if start else 7
            piece = np.cumsum(np.array(gaps[start : start + cut], dtype=np.int64))
            pieces.add_run(piece, count, before)
        for gap, end in zip(gaps, ends.tolist()):
            singles.add_gap(gap, count - 1, 7 + end)
            singles.add_gaps([gap], 7 + end)
    results = []
    for log in (whole, pieces, singles, few):
        if many:
            log.add_gap(5_000, itl.EXACT_SAMPLES)
        stats = log.finish()
        results.append(
            (stats.samples, stats.mean_ns, stats.std_ns, stats.min_ns, stats.max_ns,
             [stats.percentile_ns(percent) for percent in PERCENTS],
             stats.heat_width_ns, stats.heat)
        )  # fmt: skip
    assert results[0] == results[1] == results[2] == results[3]


def test_buffers_flush_and_long_runs_wrap() -> None:
    rng = np.random.default_rng(3)
    gaps = rng.integers(10_000_000, 40_000_000, 3 * itl._BUFFER + 7)
    log = GapLog()
    log.add_run(np.cumsum(gaps), 2)
    for gap in gaps[: itl._BUFFER + 5].tolist():
        log.add_gap(gap)
    samples = np.concatenate([gaps, gaps, gaps[: itl._BUFFER + 5]])
    stats = log.finish()
    assert stats.samples == len(samples)
    assert stats.mean_ns == pytest.approx(samples.mean(), rel=1e-12)
    assert stats.percentile_ns(50) == pytest.approx(np.percentile(samples, 50), rel=2**-11)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(1, 2**40)), min_size=1, max_size=9))
def test_squares_are_summed_in_whole_numbers(pairs) -> None:
    values, counts = (np.array(column, dtype=np.int64) for column in zip(*pairs))
    assert itl._weighted_squares(values, counts) == sum(v * v * c for v, c in pairs)


def test_runs_that_wait_together_are_told_apart() -> None:
    log = GapLog()
    log.add_run(np.array([5, 9], dtype=np.int64), 1)
    log.add_run(np.array([7], dtype=np.int64), 3)
    log.add_run(np.array([2, 4, 11], dtype=np.int64), 2)
    stats = log.finish()
    assert stats.values == [2, 4, 5, 7]
    assert stats.counts == [4, 1, 1, 5]


def test_bins_of_one_are_bins_of_many() -> None:
    edges = [2**k + d for k in range(1, 61) for d in (-1, 0, 1)]
    roots = [round(2 ** (k / 4)) + d for k in range(8, 200) for d in (-1, 0, 1)]
    drawn = np.random.default_rng(5).integers(0, 2**40, 2000).tolist()
    values = np.array([*range(5000), *edges, *roots, *drawn], dtype=np.int64)
    index = bin_index(values)
    assert [itl.bin_of(value) for value in values.tolist()] == index.tolist()
    assert [itl.middle_of(place) for place in index.tolist()] == bin_middle(index).tolist()
    values = values[values < 2**44]  # beyond, floating point rounds into the next octave
    assert [itl.row_of(value) for value in values.tolist()] == itl.heat_row(values).tolist()


def test_bins_are_exact_when_small_and_tight_at_every_power_of_two() -> None:
    small = np.arange(4096, dtype=np.int64)
    assert (bin_middle(bin_index(small)) == small).all()
    edges = np.array([2**k + d for k in range(13, 62) for d in (-1, 0, 1)], dtype=np.int64)
    index = bin_index(edges)
    assert (np.diff(index) >= 0).all()
    assert index.max() < itl._BINS
    assert (np.abs(bin_middle(index) - edges) <= edges * 2.0**-12).all()


def test_sum_beyond_64_bits_is_exact() -> None:
    log = GapLog()
    log.add_gap(2**61, 1_000)
    assert log.finish().mean_ns == float(2**61)


def test_no_samples_and_negative_gaps() -> None:
    stats = GapLog().finish()
    assert (stats.samples, stats.mean_ns, stats.percentile_ns(99), stats.max_ns) == (0, 0.0, 0.0, 0)
    log = GapLog()
    log.add_gap(-1)
    with pytest.raises(ValueError, match="negative: -1 ns"):
        log.finish()


def test_heat_counts_every_gap_with_a_time_in_its_interval() -> None:
    log = GapLog()
    log.add_run(np.array([100_000_000, 300_000_000]), 3, start_ns=0)
    log.add_gap(1_000)
    log.add_gap(50_000_000, 2, at_ns=600_000_000_000)
    stats = log.finish()
    assert stats.heat_width_ns == 4_000_000_000
    assert [(column, count) for column, _, count in stats.heat] == [(0, 3), (0, 3), (150, 2)]
    assert stats.heat[0][1] == itl.row_of(100_000_000) == itl.heat_row(np.array([100_000_000]))[0]
