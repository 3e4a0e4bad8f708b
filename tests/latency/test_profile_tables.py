"""Look-up rules on small tables whose answers are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.latency.profile.skew import OLD_SKEW_AXES, SkewAxes, SkewTable
from emu.latency.profile.tables import AttentionTable, Curve, DecodeTimes, ExpertTable, bracket

SMALL = settings(max_examples=60, deadline=None)


def test_curve_blends_clamps_and_extrapolates():
    curve = Curve([(10, 100), (20, 205), (40, 105)])
    assert curve.at(10) == 100
    assert curve.at(13) == 131  # 100 + 3/10 * 105 = 131.5, truncated
    assert curve.at(20) == 205
    assert curve.at(1) == 100
    assert curve.at(40) == 105
    assert curve.at(50) == 55  # the last interval falls by 5 for each token
    assert curve.at(1000) == 1, "never below one nanosecond"
    assert curve.last == 40


def test_curve_counts_zero_as_one_and_knows_single_points():
    assert Curve([(1, 7), (2, 9)]).at(0) == 7
    assert [Curve([(8, 42)]).at(x) for x in (1, 8, 100)] == [42, 42, 42]


def test_first_of_equal_keys_wins():
    curve = Curve([(2, 50), (1, 10), (2, 99)])
    assert (curve.at(1), curve.at(2)) == (10, 50)


def test_bracket_clamps_below_and_runs_on_above():
    axis = [0, 16, 32]
    assert bracket(axis, -5) == (0, 0, 0.0)
    assert bracket(axis, 0) == (0, 0, 0.0)
    assert bracket(axis, 4) == (0, 1, 0.25)
    assert bracket(axis, 16) == (1, 2, 0.0)
    assert bracket(axis, 32) == (1, 2, 1.0)
    assert bracket(axis, 48) == (1, 2, 2.0)
    assert bracket([5], 99) == (0, 0, 0.0)


def test_experts_clamp_below_and_extrapolate_above():
    table = ExpertTable([(1, 2, 100), (5, 2, 140), (1, 4, 200), (5, 4, 400)])
    assert table.at(3, 2) == 120
    assert table.at(3, 1) == 120, "fewer experts than profiled: the smallest"
    assert table.at(3, 3) == 210  # half way between 120 and 300
    assert table.at(3, 6) == 480  # 120 + 2 * 180
    assert table.at(9, 2) == 180  # the last interval goes on
    assert table.at(0, 0) == 100


ATTENTION = AttentionTable(
    [
        # (chunk, history, decodes, their history, ns)
        (0, 0, 1, 16, 100),
        (0, 0, 1, 32, 180),
        (0, 0, 4, 16, 400),
        (0, 0, 4, 32, 720),
        (16, 0, 0, 0, 300),
        (16, 64, 0, 0, 364),
        (16, 0, 1, 16, 500),
        (16, 0, 1, 32, 580),
        (16, 64, 1, 16, 600),
        (16, 64, 1, 32, 696),
    ]
)


def test_attention_blends_histories_within_a_slice():
    assert ATTENTION.at(0, 0, 1, 24) == 140
    assert ATTENTION.at(16, 32, 0, 0) == 332
    assert ATTENTION.at(16, 32, 1, 24) == 594  # (540 + 648) / 2
    assert ATTENTION.at(16, 128, 1, 48) == 924  # 660 and 792, one interval beyond


def test_attention_blends_decodes_then_chunks():
    assert ATTENTION.at(0, 0, 2, 16) == 200  # 100 + 1/3 * 300
    assert ATTENTION.at(4, 0, 1, 16) == 200  # a quarter of the way from 100 to 500


def test_attention_takes_the_nearest_pair_for_one_not_profiled():
    # (0, 0) is absent: (0, 1) is nearer than (16, 0). (16, 4) is absent: (16, 1) is nearest.
    assert ATTENTION.at(8, 0, 0, 0) == 200  # half way from 100 to 300
    assert ATTENTION.at(16, 0, 4, 16) == 500


def test_attention_prefers_the_first_of_equally_near_pairs():
    table = AttentionTable([(0, 0, 3, 8, 10), (3, 0, 0, 0, 20), (3, 0, 3, 8, 30)])
    assert table.at(0, 0, 0, 0) == 10, "(0, 3) and (3, 0) are equally far from (0, 0)"


def test_attention_ignores_axes_that_a_slice_does_not_have():
    assert ATTENTION.at(16, 32, 0, 12345) == ATTENTION.at(16, 32, 0, 0)
    assert ATTENTION.at(0, 999, 1, 24) == 140


@st.composite
def tables(draw):
    """A random grid, dense in places, with odd gaps between the values of an axis."""
    axis = st.lists(st.integers(0, 300), min_size=1, max_size=5, unique=True)
    time = st.integers(1, 10**9)
    points = [
        (pc, kp, nd, kd, draw(time))
        for pc in draw(axis)
        for nd in draw(axis)
        for kp in draw(axis)
        for kd in draw(axis)
    ]
    kept = draw(st.lists(st.booleans(), min_size=len(points), max_size=len(points)))
    return AttentionTable([p for p, keep in zip(points, kept) if keep] or points[:1])


@SMALL
@given(tables(), st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(0, 400))
def test_vectorised_lookups_equal_scalar_ones(table, pc, kp, nd, first):
    histories = np.arange(first, first + 40, dtype=np.int64)
    one_by_one = [table.at(pc, kp, nd, int(kd)) for kd in histories]
    assert table.at_many(pc, kp, nd, histories).tolist() == one_by_one


@SMALL
@given(tables(), st.integers(1, 500), st.integers(0, 2500), st.integers(1, 1500))
def test_kept_decode_times_equal_lookups(table, nd, first, steps):
    kept = DecodeTimes(table)
    run = kept.run(nd, first, steps)
    assert run.tolist() == [table.at(0, 0, nd, kd) for kd in range(first, first + steps)]
    assert kept.at(nd, first) == run[0]


def test_kept_decode_times_stay_bounded(monkeypatch):
    monkeypatch.setattr(DecodeTimes, "_BLOCKS_MAX", 3)
    kept = DecodeTimes(ATTENTION)
    times = [kept.at(nd, 20) for nd in range(1, 9)]
    assert len(kept._blocks) <= 3
    assert times == [ATTENTION.at(0, 0, nd, 20) for nd in range(1, 9)]
    assert kept.run(1, 0, 5000).tolist() == [ATTENTION.at(0, 0, 1, kd) for kd in range(5000)]


SKEW = SkewTable(
    SkewAxes(
        {
            "n": ([0, 2, 8], ["few", "many"]),
            "skew_rate": ([-0.01, 0.5, 1.01], ["low", "high"]),
            "kv_big": ([0, 100, 1000], ["short", "long"]),
            "kp": ([-1, 0, 1000], ["none", "some"]),
        }
    ),
    {
        "pc=0|few|low|short|none": 0.1,
        "pc=0|few|low|long|none": 0.2,
        "pc=0|many|high|long|none": 0.3,
        "pc=16|few|high|short|some": 0.4,
    },
    default=0.9,
)


@pytest.mark.parametrize(
    ("pc", "nd", "rate", "longest", "kp", "alpha"),
    [
        (0, 2, 0.5, 100, 0, 0.1),
        (0, 2, 0.5, 101, 0, 0.2),
        (0, 3, 0.51, 1000, 0, 0.3),
        (0, 3, 0.5, 1000, 0, 0.9),
        (16, 1, 1.0, 1, 5, 0.4),
        (16, 1, 1.0, 1, 0, 0.9),
        (17, 1, 1.0, 1, 5, 0.9),
        (0, 500, 0.9, 99_999, 0, 0.3),
    ],
)
def test_skew_buckets_end_at_their_upper_edge(pc, nd, rate, longest, kp, alpha):
    assert SKEW.alpha(pc, nd, rate, longest, kp) == alpha
    assert SKEW.alphas(pc, nd, rate, np.array([longest]), kp).tolist() == [alpha]


def test_skew_of_a_run_changes_with_the_longest_history():
    run = SKEW.alphas(0, 2, 0.1, np.array([99, 100, 101, 5000]), 0)
    assert run.tolist() == [0.1, 0.1, 0.2, 0.2]


def test_old_bundles_have_built_in_bins():
    table = SkewTable(OLD_SKEW_AXES, {"pc=0|n<=8|sr<=15%|kvB<=4k|kp=0": 0.5}, default=0.0)
    assert table.alpha(0, 8, 0.1, 4096, 0) == 0.5
    assert table.alpha(0, 9, 0.1, 4096, 0) == 0.0
