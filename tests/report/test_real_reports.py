"""The reports of real runs, seen in a browser: disaggregated, autoscaled, and with faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from emu.config.load import load_config
from emu.runs.runner import adjust, execute
from tests.browser import look_at

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FAULTS = [
    "faults=[{at_s=3.0, kind='replica_crash', replica=5}, "
    "{at_s=5.0, kind='straggler', replica=1, magnitude=3.0, duration_s=2.0}]",
    "recovery.restart_s=2.0",
]


@pytest.mark.slow
@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize(
    ("path", "overrides", "states"),
    [
        ("disaggregated.toml", ["workload.limit=300"], ["prefill", "decode"]),
        (
            "experiments/tutorial-autoscale.toml",
            ["workload.limit=600"],
            ["prefill", "decode", "inactive", "new_prefill"],
        ),
        (
            "disaggregated.toml",
            ["workload.limit=300", *FAULTS],
            ["prefill", "decode", "failed"],
        ),
    ],
    ids=["disaggregated", "autoscaled", "chaos"],
)
def test_every_chart_is_drawn_without_an_error(
    tmp_path: Path, path: str, overrides: list[str], states: list[str]
) -> None:
    config = adjust(load_config(CONFIGS / path, overrides), seed=None, output=tmp_path / "run")
    execute(config, path, report=True)
    page = (tmp_path / "run" / "report.html").read_text()
    result = look_at(page, tmp_path)
    assert result["problems"] == []
    assert result["drawn"] == str(result["charts"])
    assert result["charts"] >= 15
    assert result["wide"] <= 1280
    for state in states:
        assert f'"{state}"' in page, state
