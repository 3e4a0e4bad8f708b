"""A server's start by phases, against what issues report; and what scaling makes of it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from emu.cluster.plan import ReplicaPlan, make_plan
from emu.cluster.start_up import captured_sizes, start_up, start_up_of
from emu.config.load import config_from_dict
from emu.engines.registry import BUNDLES
from tests.cluster.helpers import rows_of, run_config, workload
from tests.shared_data import SHARED, needs_shared

VLLM = BUNDLES["vllm-0.15"].model


def replica(**tables: Any) -> ReplicaPlan:
    return make_plan(config_from_dict(tables)).replicas[0]


@needs_shared
@pytest.mark.parametrize(
    ("phases", "layers", "is_cached", "phase", "near"),
    [
        (("torch.compile, first run",), 40, False, "compile_s", 0.02),
        (("dynamo bytecode", "torch.compile"), 80, False, "compile_s", 0.02),
        (("dynamo transform (graph from cache)",), 28, True, "compile_s", 0.3),
        (("cuda graph capture",), 28, False, "capture_s", 0.12),
        (("cuda graph capture",), 80, False, "capture_s", 0.12),
    ],
)
def test_phases_are_those_of_reported_starts(
    phases: tuple[str, ...], layers: int, is_cached: bool, phase: str, near: float
) -> None:
    """Of models of so many layers; one source each."""
    sources = {28: "issue 20264", 40: "issue 44881", 80: "issue 19824"}
    with (SHARED / "silicon" / "cold-start.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if sources[layers] in row["source"]]
    told = sum(float(row["seconds"]) for row in rows if row["phase"] in phases)
    found = start_up(VLLM, layers, 512, is_cached=is_cached)
    assert captured_sizes(512, "vllm") == 51
    scale = 67 / 51 if phase == "capture_s" else 1.0  # vLLM 0.9 captured 67 sizes
    assert scale * getattr(found, phase) == pytest.approx(told, rel=near)


def test_what_does_not_compile_or_capture_starts_sooner() -> None:
    llama = {"model": {"name": "meta-llama/Llama-3.1-8B"}, "nodes": [{"gpu": "H100"}]}
    plain = start_up_of(replica(**llama))
    eager = start_up_of(replica(**llama, latency={"enforce_eager": True}))
    other = start_up_of(replica(**llama, engine={"name": "tensorrt-llm"}))
    assert plain is not None and eager is not None and other is not None
    assert plain.compile_s == pytest.approx(32 * 1.07)
    assert (eager.compile_s, eager.capture_s, other.compile_s) == (0.0, 0.0, 0.0)
    assert plain.total_s > other.total_s > eager.total_s
    assert start_up_of(replica(**llama, engine={"name": "none"})) is None


def test_a_scaled_server_starts_by_phases(tmp_path: Path) -> None:
    rows = [
        {"input_toks": 100, "output_toks": 400, "arrival_time_ns": at * 10**9} for at in range(150)
    ]
    tables: dict[str, Any] = {
        "nodes": [{"gpu": "H100", "gpus": 2}],
        "model": {"name": "meta-llama/Llama-3.1-8B"},
        "replicas": [{"count": 1}, {"count": 1, "role": "inactive"}],
        "autoscale": {
            "preset": "hpa",
            "target_value": 1.0,
            "max_replicas": 2,
            "cold_start_s": -1,
        },
        "workload": {"path": workload(tmp_path / "w.jsonl", rows)},
    }
    run_config(tmp_path / "run", **tables)
    expected = start_up_of(replica(**{k: v for k, v in tables.items() if k != "workload"}))
    assert expected is not None
    moves = rows_of(tmp_path / "run", "transitions.csv")
    states = [row for row in moves if row["replica"] == "1" and row["from"]]
    loading, ready = (int(row["time_ns"]) for row in states[:2])
    assert (ready - loading) / 1e9 == pytest.approx(expected.total_s, abs=3)
