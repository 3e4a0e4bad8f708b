"""The front of a trade-off: which points no other beats, by the direction of both figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.report.page.chart import front, is_better_high

values = st.floats(min_value=-1e6, max_value=1e6)
points = st.lists(st.tuples(values, values), max_size=12)


@pytest.mark.parametrize(
    ("names", "best"),
    [
        (("p99_ttft_ms", "p99_tpot_ms"), [0, 1]),
        (("output_throughput", "p99_ttft_ms"), [1, 2, 3]),
        (("p99_ttft_ms", "goodput"), [0, 3]),
        (("output_throughput", "goodput"), [3]),
    ],
)
def test_the_names_say_which_way_is_better(names: tuple[str, str], best: list[int]) -> None:
    assert front(names, [1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 1.5, 3.0]) == best


@given(points)
def test_the_front_is_what_no_point_beats(cloud: list[tuple[float, float]]) -> None:
    names = ("p99_ttft_ms", "output_throughput")
    x, y = [a for a, _ in cloud], [b for _, b in cloud]
    found = front(names, x, y)
    assert not any(_beaten(i, names, x, y) for i in found)
    kept = {(x[i], y[i]) for i in found}
    assert kept == {(x[i], y[i]) for i in range(len(cloud)) if not _beaten(i, names, x, y)}
    assert [x[i] for i in found] == sorted(x[i] for i in found)


def _beaten(i: int, names: tuple[str, str], x: list[float], y: list[float]) -> bool:
    """Another point is at least as good in both figures, and better in one."""
    signs = [-1 if is_better_high(name) else 1 for name in names]
    mine = signs[0] * x[i], signs[1] * y[i]
    others = [(signs[0] * a, signs[1] * b) for a, b in zip(x, y, strict=True)]
    return any(o[0] <= mine[0] and o[1] <= mine[1] and o != mine for o in others)
