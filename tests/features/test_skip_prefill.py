"""Prompts whose KV is there when their requests arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.config.load import config_from_dict
from emu.errors import InputError
from tests.cluster.helpers import LINEAR, rows_of, run_config, workload

COLOCATED: dict[str, Any] = {
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "nodes": [{"gpu": "A100-80GB", "gpus": 1}],
    "replicas": [{"count": 1}],
    "latency": LINEAR,
}


def lines(count: int) -> list[dict[str, Any]]:
    return [
        {"arrival_time_ns": 1000 + i * i * 10**8, "input_toks": 50 + i, "output_toks": 5}
        for i in range(count)
    ]


@pytest.mark.parametrize("leap", [True, False])
def test_prompts_that_are_there_need_no_computation(tmp_path: Path, leap: bool) -> None:
    path = workload(tmp_path / "w.jsonl", lines(10))
    tables = {**COLOCATED, "scheduler": {"leap": leap}}
    run_config(tmp_path / "r", **tables, workload={"path": path, "skip_prefill": True})
    for row in rows_of(tmp_path / "r"):
        prompt = int(row["prompt_toks"])
        assert int(row["npu_cache_hit"]) == prompt - 1
        if int(row["queue_ns"]) == 0:  # alone: one token, after all the others of the prompt
            assert int(row["ttft_ns"]) == 5_050_000 + 1000 * (prompt - 1)


def test_only_replicas_that_decode_what_arrives_can_skip_prompts(tmp_path: Path) -> None:
    roles = [{"role": "prefill"}, {"role": "decode"}]
    nodes = [{"gpu": "H100", "gpus": 2}]
    with pytest.raises(InputError, match=r"workload\.skip_prefill: expected colocated"):
        config_from_dict({"workload": {"skip_prefill": True}, "replicas": roles, "nodes": nodes})
    with pytest.raises(InputError, match=r"workload\.skip_prefill: needs scheduler\.policy"):
        config_from_dict({"workload": {"skip_prefill": True}, "scheduler": {"policy": "orca"}})
    hybrid = {**COLOCATED, "model": {"name": "google/gemma-2-9b"}}
    with pytest.raises(InputError, match=r"workload\.skip_prefill: .*layers that keep"):
        run_config(tmp_path / "r", **hybrid, workload={"skip_prefill": True})
