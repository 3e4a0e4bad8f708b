"""events.jsonl: every iteration and transfer is there, and leaps change nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

import emu

CLUSTER: dict[str, Any] = {
    "model": {"name": "meta-llama/Llama-3.1-8B"},
    "nodes": [{"count": 1, "gpus": 2, "gpu": "A100-SXM4-80GB"}],
    "latency": {
        "backend": "linear",
        "base_us": 1000.0,
        "per_token_us": 100.0,
        "per_context_token_us": 1.0,
    },
    "workload": {
        "synthetic": {
            "requests": 12,
            "prompt": {"distribution": "fixed", "value": 200},
            "output": {"distribution": "fixed", "value": 40},
            "arrivals": {"rate_per_s": 50.0},
        }
    },
    "faults": [{"kind": "straggler", "at_s": 0.1, "replica": 0, "factor": 3.0, "duration_s": 0.1}],
    "output": {"events": True, "report": False},
}
SPLIT = [{"role": "prefill"}, {"role": "decode"}]


def _records(out: Path) -> list[dict[str, Any]]:
    lines = (out / "events.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines]


def test_events_do_not_depend_on_leaps(tmp_path: Path) -> None:
    files = []
    for leap in (True, False):
        config = {
            **CLUSTER,
            "replicas": [{"role": "colocated", "count": 2}],
            "scheduler": {"policy": "vllm", "leap": leap},
        }
        out = tmp_path / f"{leap}"
        emu.run(config, output=out)
        files.append((out / "events.jsonl").read_bytes())
    assert files[0] == files[1]
    assert files[0].count(b'"event":"ran"') > 100


def test_events_tell_every_iteration_and_transfer(tmp_path: Path) -> None:
    result = emu.run({**CLUSTER, "replicas": SPLIT}, output=tmp_path / "run")
    records = _records(tmp_path / "run")
    batches = {(r["replica"], r["batch"]): r for r in records if r["event"] == "batch"}
    computed = sum(new for batch in batches.values() for _, _, new in batch["members"])
    assert computed == 12 * (200 + 39)  # the last output token is never computed
    plain = 0
    for ran in (r for r in records if r["event"] == "ran"):
        members = batches[ran["replica"], ran["batch"]]["members"]
        new = sum(new for _, _, new in members)
        context = sum(before for _, before, _ in members)
        took_ns = ran["at_ns"] - ran["start_ns"]
        plain += took_ns == 1_000_000 + 100_000 * new + 1_000 * context
    assert len(batches) - 20 < plain < len(batches)  # all but those of the straggler
    kv = [r for r in records if r["event"] == "transfer" and r["kind"] == "kv"]
    over = {r["transfer"]: r for r in records if r["event"] == "transfer_over"}
    assert len(kv) == sum(r["event"] == "migrated" for r in records) > 0
    moved = sum(r["bytes"] + r.get("overlapped_bytes", 0) for r in kv)
    assert moved == result.summary.kv_bytes_moved
    assert all(over[r["transfer"]]["how"] == "arrived" for r in kv)
    rates = {r["link"]: r["bytes_per_s"] for r in records if r["event"] == "link"}
    assert all(link in rates for r in kv for links, _ in r["parts"] for link in links)
