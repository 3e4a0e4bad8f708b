"""Colocated replicas under the pod autoscaler: up in a burst, after the cold start; down later."""

from __future__ import annotations

from pathlib import Path

from emu.config.load import config_from_dict
from emu.runs.runner import execute
from tests.csvfile import csv_rows


def test_colocated_replicas_follow_a_burst(tmp_path: Path) -> None:
    config = config_from_dict(
        {
            "nodes": [{"gpus": 4, "pcie_gbps": 128}],
            "replicas": [{"count": 1}, {"role": "inactive", "count": 3}],
            "workload": {
                "synthetic": {
                    "requests": 10_000,
                    "duration_s": 120,
                    "arrivals": {
                        "process": "piecewise",
                        "points": [[0, 20], [30, 20], [31, 0.2], [120, 0.2]],
                    },
                    "prompt": {"distribution": "fixed", "value": 500},
                    "output": {"distribution": "fixed", "value": 100},
                }
            },
            "autoscale": {
                "preset": "hpa",
                "tick_ms": 1000,
                "target_value": 8,
                "max_replicas": 4,
                "cold_start_s": 5,
                "scale_down_stabilization_s": 20,
            },
            "output": {"dir": str(tmp_path / "out"), "report": False},
        }
    )
    result = execute(config, "test")
    assert result.summary is not None
    assert result.summary.failed == 0
    assert result.summary.scale_ups == 3
    assert result.summary.scale_downs == 3
    moves = [
        (row["to"], int(row["time_ns"]) / 1e9)
        for row in csv_rows(tmp_path / "out" / "transitions.csv")
        if row["from"]
    ]
    ordered = min(at_s for to, at_s in moves if to == "loading_colocated")
    ready = min(at_s for to, at_s in moves if to == "colocated")
    # Process start, then 16 GB of weights at 128 Gb/s.
    assert 6.0 < ready - ordered < 6.1
    shut = min(at_s for to, at_s in moves if to == "shutting_colocated")
    assert shut > 45, "the window keeps them for 20 s after the load has fallen"
    seconds = result.summary.gpu_seconds
    assert seconds.by_role["loading"] > 3 * 6.0 - 0.1
