"""Survivors: each single loss is injected, and no cheaper cluster lives through all of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emu
from emu.apps.plan.layouts import Candidate
from emu.apps.plan.question import gpu_kinds
from emu.apps.plan.survive import STRIKE
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict

GPUS_MAX = 8
TTFT_MS, TPOT_MS = 600, 40


def asked(seed: int) -> dict[str, Any]:
    """A small question of colocated replicas on machines of two GPUs, drawn at random."""
    draw = random.Random(seed)
    return {
        "model": "Qwen/Qwen2.5-7B",
        "gpu": "L40S=1",
        "rate": draw.randint(4, 14),
        "prompt_tokens": f"median={draw.randint(300, 900)},sigma=0.4,max=2000",
        "output_tokens": "10-40",
        "requests": 60,
        "ttft_p95": f"{TTFT_MS}ms",
        "tpot_p95": f"{TPOT_MS}ms",
        "tensor_parallel": [1],
        "mode": ["colocated"],
        "gpus_per_node": 2,
        "max_gpus": GPUS_MAX,
        "draws": 0,
        "seeds": 1,
        "jobs": 1,
        "survive": ("replica", "machine", "rank")[seed % 3],
    }


def is_met(tables: dict[str, Any], since_s: float) -> bool:
    """Whether a run serves all, and meets both objectives from an instant on."""
    result = emu.run(tables, keep=False, report=False)
    summary = result.summary
    if summary.failed + summary.rejected or summary.load.verdict == "overloaded":
        return False
    requests = result.requests
    late = requests["arrival_ns"] >= since_s * 1e9
    return all(
        np.percentile(values[late & (values >= 0)], 95) <= limit * 1e6
        for values, limit in ((requests["ttft_ns"], TTFT_MS), (requests["tpot_ns"], TPOT_MS))
    )


def lives(tables: dict[str, Any], count: int, survive: str, span_s: float) -> bool:
    """Whether so many replicas live through every single loss: what is left of them is enough, and
    so is a run in which it strikes."""
    apart = 2 if survive == "machine" else 1
    values = Candidate(layout(tables), count, 0, machines_min=apart).values(2)
    tables = {**tables, "replicas": values["replicas"]}
    tables["nodes"] = [{**tables["nodes"][0], "count": values["nodes.0.count"]}]
    plan = make_plan(config_from_dict(tables))
    faults = {
        "replica": [("replica_crash", "replica", one.replica_id) for one in plan.replicas],
        "rank": [("gpu_crash", "gpu", one.gpus[0]) for one in plan.replicas],
        "machine": [("node_crash", "node", at) for at in range(len(plan.topology.machines))],
    }[survive]
    at_s = round(STRIKE * span_s, 3)
    for kind, key, index in faults:
        held = sum(one.machine == index for one in plan.replicas) if key == "node" else 1
        left = {**tables, "replicas": [{**tables["replicas"][0], "count": count - held}]}
        struck = {**tables, "faults": [{"at_s": at_s, "kind": kind, key: index}]}
        struck["recovery"] = {"replace": False}
        if count == held or not (is_met(left, 0.0) and is_met(struck, at_s)):
            return False
    return True


def layout(tables: dict[str, Any]) -> Any:
    from emu.apps.plan.layouts import Layout

    assert tables["nodes"][0]["gpu"].startswith("L40S")
    return Layout(gpu_kinds(["L40S=1"])[0][0], 1, "auto", "colocated", 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_survivor_lives_through_each_loss_and_none_is_cheaper(seed: int, tmp_path: Path) -> None:
    given = asked(seed)
    answer = emu.plan(**given, output=tmp_path)
    workload = answer.config["workload"]["synthetic"]
    arrivals = emu.run(answer.config, keep=False, report=False).requests["arrival_ns"]
    span_s = float(arrivals.max() - arrivals.min()) / 1e9
    assert workload["requests"] == 60
    row, best = answer.survivor, answer.rows[0]
    counts = range(best.replicas, (row.replicas if row else GPUS_MAX) + 1)
    found = [lives(answer.config, count, given["survive"], span_s) for count in counts]
    assert found == [*[False] * (len(found) - 1), row is not None], f"{seed=}"
    assert answer.fates if row else not answer.fates
