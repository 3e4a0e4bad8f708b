"""A run that took long names what made it slow."""

from __future__ import annotations

from typing import Any

import pytest

from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.config.schema import Config
from emu.runs.slow_modes import COSTS_FROM_S, slow_line, slow_modes


def _config(**tables: Any) -> Config:
    replica = {"count": 1, **tables.pop("replica", {})}
    return config_from_dict(
        {
            "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 8}],
            "replicas": [replica],
            "workload": {"synthetic": {"requests": 1, "arrivals": {"rate_per_s": 1.0}}},
            **tables,
        }
    )


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a compiled build."""
    from emu.process.compiled import Build

    monkeypatch.setattr("emu.runs.slow_modes.build", lambda: Build(frozenset({"emu.request"})))


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({}, []),
        ({"replica": {"pipeline_parallel": 2}}, ["pipelines"]),
        ({"latency": {"jitter": True}}, ["jitter"]),
        ({"scheduler": {"enable_lora": True}}, ["LoRA adapters"]),
        ({"output": {"trace": True}}, ["a trace of events"]),
    ],
)
def test_slow_modes_are_named(tables: dict[str, Any], named: list[str]) -> None:
    config = _config(**tables)
    assert slow_modes(config, make_plan(config, "test")) == named


def test_only_a_run_that_took_long_says_so() -> None:
    config = _config(latency={"jitter": True})
    plan = make_plan(config, "test")
    assert not slow_line(config, plan, COSTS_FROM_S / 2)
    assert slow_line(config, plan, 2 * COSTS_FROM_S) == "; slow here: jitter (docs/speed.md)"
    plain = _config()
    assert not slow_line(plain, make_plan(plain, "test"), 2 * COSTS_FROM_S)


def test_a_pure_build_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from emu.process.compiled import Build

    monkeypatch.setattr("emu.runs.slow_modes.build", lambda: Build(frozenset()))
    config = _config()
    assert slow_modes(config, make_plan(config, "test")) == ["pure Python (no compiled build)"]
