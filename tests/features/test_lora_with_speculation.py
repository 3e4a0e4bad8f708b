"""LoRA adapters and drafts on the same replicas."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.helpers import run_config, summary_of, workload


def test_adapters_and_drafts_together(tmp_path: Path) -> None:
    rows = [
        {
            "arrival_time_ns": index * 10**7,
            "input_toks": 50 + index,
            "output_toks": 8,
            "adapter": f"a{index % 4}",
        }
        for index in range(80)
    ]
    drafts = {"method": "eagle", "num_speculative_tokens": 2, "acceptance_rate": 0.8}
    run_config(
        tmp_path / "out",
        model={"name": "meta-llama/Llama-3.1-8B"},
        nodes=[{"gpu": "H100-SXM5-80GB", "gpus": 1}],
        scheduler={
            "enable_lora": True,
            "max_loras": 2,
            "max_cpu_loras": 8,
            "speculative_config": drafts,
        },
        workload={"path": workload(tmp_path / "w.jsonl", rows)},
    )
    summary = summary_of(tmp_path / "out")
    assert summary["completed"] == 80
    assert summary["speculation"]["num_drafts"] > 0
    assert summary["adapters"]["cold_loads"] == 4
