"""A day's curve: each hour's cluster, and what is cheaper reserved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import emu
from emu.apps.plan.day import curve_of

GIVEN: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-7B",
    "gpu": "L40S=1/2",
    "rate": 24,
    "prompt_tokens": 800,
    "output_tokens": 30,
    "requests": 60,
    "ttft_p95": "700ms",
    "tpot_p95": "40ms",
    "tensor_parallel": [1],
    "mode": ["colocated"],
    "draws": 0,
    "seeds": 1,
    "jobs": 1,
}


def test_each_hour_has_the_cheapest_cluster_of_a_plan_at_its_rate(tmp_path: Path) -> None:
    day = emu.plan(**GIVEN, day="0=6,8=24,20=12", output=tmp_path / "day").day
    assert day is not None
    for part in day.parts:
        alone = emu.plan(**{**GIVEN, "rate": part.rate_per_s}, output=tmp_path / part.label[:3])
        assert part.gpus == alone.rows[0].gpus
    hours = [part.to_h - part.from_h for part in day.parts]
    assert hours == [8, 12, 4]
    counts = [part.gpus for part in day.parts]
    assert counts[1] > counts[0]
    used = sum(hour * count for hour, count in zip(hours, counts, strict=True)) / 24
    assert day.gpus_mean == pytest.approx(used)
    # A GPU at half the price reserved is reserved if it is used for more than half of the day.
    cost = 0.0
    for number in range(max(counts)):
        part_used = sum(h for h, c in zip(hours, counts, strict=True) if c > number) / 24
        cost += min(1.0, 2 * part_used)
    assert day.cost_per_h == pytest.approx(cost)
    assert day.cost_per_h <= day.cost_of_peak_per_h == max(counts)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0=5,8=40", "--rate: is the largest of --day: 40, not 24"),
        ("2=24", "begins at hour 0"),
        ("0=24,0=5", "hours grow"),
        ("0=24,25=5", "hours 0 to 24"),
        ("0=24,8", "expected HOUR=RATE"),
        ("0=-3", "expected HOUR=RATE"),
        (",".join(f"{hour / 2}=24" for hour in range(30)), "up to 24"),
    ],
)
def test_a_wrong_curve_is_one_line(text: str, part: str) -> None:
    with pytest.raises(emu.InputError, match=part):
        curve_of(text, 24.0)
