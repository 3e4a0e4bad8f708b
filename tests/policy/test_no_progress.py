"""A planner that never adds what is missing ends with a story, not never."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import emu
from emu.autoscale.demand import Demand
from emu.errors import RunError, Stalled


class OnlyPrefill:
    """Adds prefill replicas where nothing decodes."""

    needs_ticks = True

    def __init__(self, table: Any, rates: Any) -> None:
        self.count = 0

    def decide(self, snapshot: Any) -> Demand:
        self.count += 1
        return Demand(prefill=1 if self.count % 7 == 0 else -1 if self.count % 7 == 3 else 0)

    def wake_ns(self, snapshot: Any) -> int:
        return int(snapshot.now_ns) + 1


def test_a_planner_that_never_adds_what_is_missing_ends_with_a_story(tmp_path: Path) -> None:
    tables = {
        "latency": {"backend": "linear"},
        "nodes": [{"gpus": 8}],
        "replicas": [{"count": 2, "role": "prefill"}, {"count": 4, "role": "inactive"}],
        "autoscale": {
            "planner": OnlyPrefill,
            "executor": "serverless",
            "loader": "delay",
            "load_delay_ms": 100.0,
            "tick_ms": 1000.0,
            "spare_ttl_ms": 200.0,
        },
        "workload": {"synthetic": {"requests": 20}},
    }
    with pytest.raises(RunError) as caught:
        emu.run(tables, ["limits.simulated_s=0"], output=tmp_path / "out", report=False)
    story = str(caught.value)
    assert type(caught.value).__name__ in ("Stalled", "Deadlock")
    assert "20 requests are outstanding" in story and "replica 0: " in story


def test_loads_that_are_given_up_for_ever_end_with_a_story(tmp_path: Path) -> None:
    """The deadline ends each load before its weights are there; the planner starts the next one."""
    tables = {
        "latency": {"backend": "linear"},
        "nodes": [{"gpus": 2}],
        "replicas": [{"count": 1, "role": "inactive"}],
        "autoscale": {"preset": "hpa", "loader": "disk", "tick_ms": 1000.0},
        "recovery": {"load_deadline_s": 0.1},
        "limits": {"stalled_s": 600.0, "simulated_s": 20_000.0},
        "workload": {"synthetic": {"requests": 20}},
    }
    with pytest.raises(Stalled, match="20 requests are in the system"):
        emu.run(tables, output=tmp_path / "out", report=False)
