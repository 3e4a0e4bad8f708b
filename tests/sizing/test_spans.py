"""Runs of a plan are long enough to show a queue that grows, whatever the rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.apps.plan.find import Finding
from emu.apps.plan.options import PlanOptions
from emu.apps.plan.plan import planned, question_of
from emu.apps.plan.spans import LONG, REQUESTS_MAX, STAYS_MIN, Spans

GIVEN: dict[str, Any] = {
    "model": "Qwen/Qwen3-8B",
    "gpu": "H100",
    "prompt_tokens": 500,
    "output_tokens": 300,
    "ttft_p95": "500ms",
    "tpot_p95": "30ms",
    "tensor_parallel": [1],
    "max_gpus": 4096,
}


def spans(place: Path, **given: Any) -> Spans:
    """The lengths of a question's runs."""
    question = question_of(PlanOptions(**{**GIVEN, **given}, output=place))
    return Finding(question, place).worlds.spans


@pytest.mark.parametrize("rate", [0.5, 20, 100, 1000, 5000])
def test_no_rate_makes_runs_too_short(rate: float, tmp_path: Path) -> None:
    found = spans(tmp_path, rate=rate)
    assert 0 < found.stay_s <= found.residence_s
    assert found.long_s >= 0.95 * STAYS_MIN * found.stay_s
    if rate <= 20:
        assert found.long_s >= 0.95 * LONG * found.residence_s
    assert found.short_s <= found.long_s


def test_a_loose_objective_makes_no_run_of_a_week(tmp_path: Path) -> None:
    found = spans(tmp_path, rate=200, ttft_p95="10h")
    assert found.long_s * 200 <= max(1.05 * REQUESTS_MAX, 1.05 * STAYS_MIN * found.stay_s * 200)


def test_a_run_that_is_too_short_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    short = {**GIVEN, "rate": 5, "duration": "2s", "draws": 0, "seeds": 1, "jobs": 1}
    planned(PlanOptions(**short, mode=["colocated"], output=tmp_path), say=said.append)
    assert any("too short to show a queue that grows" in line for line in said)
