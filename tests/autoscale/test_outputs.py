"""What a run that scales leaves behind: decisions with their numbers, loads, host memory."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from emu.runs.runner import execute
from tests.autoscale.worlds import Draw, config_of
from tests.csvfile import csv_rows

BURST = {"machines": 4, "gpus": 4, "requests": 150, "rate_per_s": 300.0, "seed": 7}


def run(directory: Path, preset: str, **overrides: object) -> dict[str, object]:
    directory.mkdir()
    draw = Draw(preset=preset, overrides=overrides, **BURST)
    assert execute(config_of(draw, directory), "test").outcome.error is None
    return json.loads((directory / "out" / "summary.json").read_text())


def test_host_memory_is_in_the_summary(tmp_path: Path) -> None:
    """Experiment (d): BlitzScale needs none, AllCache one copy on each machine, always."""
    blitz, all_, cached = (
        run(tmp_path / preset, preset) for preset in ("blitzscale", "allcache", "serverlessllm")
    )
    copy = blitz["host_cache_bytes"]["copy"]
    assert copy > 0
    assert blitz["host_cache_bytes"] == {"mean": 0, "max": 0, "copy": copy}
    assert all_["host_cache_bytes"] == {"mean": 4 * copy, "max": 4 * copy, "copy": copy}
    use = cached["host_cache_bytes"]
    assert copy <= use["mean"] <= use["max"] <= 4 * copy
    assert set(all_["loads"]) == {"host"}
    assert set(cached["loads"]) <= {"host", "disk"}
    assert set(blitz["loads"]) <= {"nvlink", "chain", "tanz"}
    assert "host_cache_bytes" in blitz["definitions"]


def test_loads_are_those_that_arrived(tmp_path: Path) -> None:
    summary = run(tmp_path / "a", "blitzscale")
    marks = csv_rows(tmp_path / "a" / "out" / "marks.csv")
    assert sum(summary["loads"].values()) == sum(row["kind"] == "loaded" for row in marks) > 0


def test_a_static_cluster_says_nothing_about_loads(tmp_path: Path) -> None:
    summary = run(tmp_path / "a", "distserve_full")
    assert (summary["loads"], summary["host_cache_bytes"]) == ({}, {})
    assert (summary["scale_ups"], summary["scale_downs"]) == (0, 0)


def test_scale_ups_count_orders(tmp_path: Path) -> None:
    """Every revive, reuse and target of a load, as the plans name them."""
    summary = run(tmp_path / "a", "blitzscale", nvlink=False, multicast="chain")
    ups = downs = 0
    for row in csv_rows(tmp_path / "a" / "out" / "marks.csv"):
        for action in row["text"].split("; ")[1:] if row["kind"] == "plan" else ():
            verb = action.split()[0]
            ups += verb in ("revive", "reuse")
            ups += len(action.partition(" -> ")[2].split()) if verb == "load" else 0
            downs += verb in ("shut", "makespare")
    assert summary["scale_ups"] == ups > 0
    assert summary["scale_downs"] == downs > 0


@pytest.mark.slow
def test_decisions_with_their_numbers_are_in_the_report(tmp_path: Path) -> None:
    tmp_path = tmp_path / "a"
    tmp_path.mkdir()
    config = config_of(Draw(**BURST), tmp_path)
    output = msgspec.structs.replace(config.output, report=True)
    execute(msgspec.structs.replace(config, output=output), "test")
    plans = [r["text"] for r in csv_rows(tmp_path / "out" / "marks.csv") if r["kind"] == "plan"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Decisions of the planner" in page
    wanted, _, done = plans[0].partition("; ")
    for figure in ("W_tokens=", "K_tokens=", "B_blocks=", "P_min=", "P_max=", "D_min=", "D_max="):
        assert figure in wanted
    assert f"<td>{wanted}</td><td>{done.replace('>', '&gt;')}</td>" in page
