"""What a fresh server compiles while it serves: kernels of experts, by tokens of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.cluster.backends import make_latency
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.latency.abilities import FirstSize, abilities_of
from emu.latency.first_sizes import _between
from tests.cluster.helpers import rows_of, run_config, workload

MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"


def tables(model: str = MIXTRAL, gpu: str = "H100", **latency: Any) -> dict[str, Any]:
    return {
        "model": {"name": model},
        "nodes": [{"gpu": gpu, "gpus": 2}],
        "replicas": [{"tensor_parallel": 2, "count": 1}],
        "engine": {"version": "0.15"},
        "scheduler": {"max_num_seqs": 128, "max_num_batched_tokens": 2048},
        "latency": {"warm_up": False, **latency},
        "workload": {"synthetic": {"requests": 1}},
    }


def left(given: dict[str, Any]) -> tuple[FirstSize, ...]:
    config = config_from_dict(given)
    replica = make_plan(config).replicas[0]
    return abilities_of(make_latency(replica.latency_context(config))).first_sizes


def test_sizes_between_the_captured_ones_and_the_largest_are_left() -> None:
    """Graphs go to 256 tokens, the trial took 2,048: the nearest of 512, 1,024 and 1,536 is new."""
    found = left(tables())
    assert [(one.least, one.most) for one in found] == [(385, 768), (769, 1280), (1281, 1792)]
    assert {one.stall_ns for one in found} == {1_600_000_000}


@pytest.mark.parametrize(
    "given",
    [
        tables(warm_up=True),
        tables("meta-llama/Llama-3.1-8B"),
        tables("openai/gpt-oss-120b"),
        tables(gpu="B200"),
        tables() | {"engine": {"name": "tensorrt-llm"}, "scheduler": {}},
        tables() | {"engine": {"name": "none"}},
    ],
    ids=["warm", "dense", "mxfp4", "blackwell", "tensorrt-llm", "none"],
)
def test_other_servers_have_nothing_left(given: dict[str, Any]) -> None:
    assert left(given) == ()


def test_a_size_stalls_its_first_step_and_no_other(tmp_path: Path) -> None:
    rows = [
        {"input_toks": tokens, "output_toks": 2, "arrival_time_ns": at_s * 10**9}
        for at_s, tokens in ((0, 300), (10, 500), (20, 520), (30, 1000), (40, 1000), (50, 2000))
    ]
    given = tables() | {"workload": {"path": workload(tmp_path / "w.jsonl", rows)}}
    found = {}
    for name, warm_up in (("cold", False), ("warm", True)):
        given["latency"] = {"warm_up": warm_up}
        run_config(tmp_path / name, **given)
        found[name] = [int(row["ttft_ns"]) for row in rows_of(tmp_path / name)]
    stalls = [cold - warm for cold, warm in zip(found["cold"], found["warm"], strict=True)]
    assert [round(stall / 1e9, 1) for stall in stalls] == [0.2, 1.6, 0.0, 1.6, 0.0, 0.0]


def test_sizes_meet_half_way_and_the_last_one_has_no_end() -> None:
    """Up to 512 tokens are captured; the engine has tried the size of its largest step."""
    found = _between(512, 8192, 2048, 7)
    assert found == (
        FirstSize(513, 768, 7),
        FirstSize(769, 1280, 7),
        FirstSize(1281, 1792, 7),
        FirstSize(2561, 3584, 7),
        FirstSize(3585, 0, 7),
    )
    assert _between(512, 3584, 0, 7)[-1] == FirstSize(2561, 3584, 7), "3,585 are never reached"
    assert _between(512, 3585, 0, 7)[-1] == FirstSize(3585, 0, 7)
    assert [found[-1].is_met(tokens) for tokens in (3584, 3585, 10**6)] == [False, True, True]
