"""A server that is no server: emulated runs with an engine that a test hides from the learner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from emu.config.load import load_config
from emu.report.rundata import read_run
from emu.runs.runner import adjust, execute

CONFIG = """\
[model]
name = "Qwen/Qwen2.5-7B-Instruct"
[[nodes]]
gpu = "H100-SXM5-80GB"
[[replicas]]
[workload]
path = "workload.jsonl"
[engine]
learned = "hidden.toml"
[output]
report = false
timeseries_interval_ms = 0
"""


def workload(rate: float, seconds: float, seed: int, prompt: tuple[int, int] = (100, 900)) -> str:
    """Poisson arrivals, mixed lengths."""
    rng = np.random.default_rng(seed)
    at, lines = 0.0, []
    while at < seconds:
        row = {
            "arrival_time_ns": round(at * 1e9),
            "input_toks": int(rng.integers(*prompt)),
            "output_toks": int(rng.integers(40, 160)),
        }
        lines.append(json.dumps(row) + "\n")
        at += float(rng.exponential(1 / rate))
    return "".join(lines)


def served(place: Path, engine: str, text: str, seed: int = 1) -> dict[str, Any]:
    """What `vllm bench serve --save-detailed` would have written of a run with this engine."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "hidden.toml").write_text('base = "vllm-0.15"\n' + engine)
    (place / "workload.jsonl").write_text(text)
    (place / "cluster.toml").write_text(CONFIG)
    config = adjust(load_config(place / "cluster.toml"), seed=seed, output=place / "run")
    execute(config, "hidden", report=False)
    data = read_run(place / "run")
    order = np.argsort(data.requests["request_id"])
    column = {name: data.requests[name][order] for name in data.requests}
    ttfts = column["ttft_ns"] / 1e9
    spent = (column["latency_ns"] - column["ttft_ns"]) / 1e9
    outputs = column["decode_toks"].astype(int).tolist()
    return {
        "date": "20261120-071729",
        "backend": "vllm",
        "model_id": "Qwen/Qwen2.5-7B-Instruct",
        "request_rate": 1.0,
        "max_concurrency": None,
        "duration": 1.0,
        "completed": len(ttfts),
        "input_lens": column["prompt_toks"].astype(int).tolist(),
        "output_lens": outputs,
        "ttfts": ttfts.tolist(),
        "itls": [
            [] if n < 2 else [float(s) / (n - 1)] * (n - 1)
            for s, n in zip(spent, outputs, strict=True)
        ],
        "start_times": (5000 + column["arrival_ns"] / 1e9).tolist(),
        "errors": [""] * len(ttfts),
    }
