"""A cluster is said to miss only where so many draws miss that the others cannot mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import emu


@pytest.mark.slow
def test_what_meets_in_too_few_draws_is_told_from_what_was_not_drawn(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": "Qwen/Qwen3-8B",
        "gpu": ["H100=2.5", "L40S=0.9"],
        "rate": 10,
        "prompt_tokens": 800,
        "output_tokens": 60,
        "requests": 80,
        "ttft_p95": "500ms",
        "tpot_p95": "40ms",
        "tensor_parallel": [1],
        "draws": 6,
        "seeds": 1,
        "jobs": 1,
    }
    answer = emu.plan(**given, output=tmp_path)
    dearer = [row for row in answer.others if row.cost_per_h > answer.rows[0].cost_per_h]
    cheaper = [row for row in answer.others if row.cost_per_h < answer.rows[0].cost_per_h]
    assert not any(row.is_missed for row in answer.rows)
    assert all(row.is_missed for row in cheaper)
    assert answer.others
    page = (tmp_path / "report.html").read_text()
    assert ("too few" in page) == any(row.is_missed for row in answer.others)
    assert ("not drawn" in page) == any(not row.is_missed for row in answer.others)
    assert dearer or cheaper
