"""Objectives of TTFT that grow with the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.config.load import config_from_dict
from emu.errors import InputError
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload


@pytest.mark.parametrize(("floor", "base", "each"), [(100, 0, 0.08), (0, 50, 0.05), (0, 0, 0.06)])
def test_a_long_prompt_has_more_time(
    tmp_path: Path, floor: float, base: float, each: float
) -> None:
    lines: list[dict[str, Any]] = [
        {"arrival_time_ns": 5 * 10**7 * i, "input_toks": 50 + 397 * i % 2000, "output_toks": 3}
        for i in range(60)
    ]
    path = workload(tmp_path / "w.jsonl", lines)
    slo = {"ttft_ms": floor, "ttft_base_ms": base, "ttft_ms_per_token": each}
    run_config(
        tmp_path / "r",
        model={"name": "meta-llama/Llama-3.1-8B"},
        nodes=[{"gpu": "A100-80GB", "gpus": 1}],
        latency=LINEAR,
        slo=slo,
        workload={"path": path},
    )
    rows = rows_of(tmp_path / "r")
    met = [
        int(row["ttft_ns"]) <= max(floor, base + each * int(row["prompt_toks"])) * 1e6
        for row in rows
    ]
    assert 0 < sum(met) < len(met)
    found = summary_of(tmp_path / "r")["slo"]
    assert found["ttft_attainment"] == pytest.approx(sum(met) / len(met), abs=1e-6)
    assert found["joint_attainment"] == found["ttft_attainment"]


def test_a_base_alone_is_no_objective() -> None:
    with pytest.raises(InputError, match=r"slo\.ttft_base_ms: is a part of ttft_ms_per_token"):
        config_from_dict({"slo": {"ttft_base_ms": 300.0}})
