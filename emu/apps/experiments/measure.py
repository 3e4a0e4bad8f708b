"""Runs of the scaling experiments, each made once: a configuration with some tables replaced."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from emu.config.load import config_from_dict
from emu.documents import Document, DocumentView
from emu.runs.runner import execute

CLUSTERS: Final[Mapping[str, DocumentView]] = {
    "A": {
        "count": 4,
        "gpu": "A800-SXM4-80GB",
        "gpus": 8,
        "nvlink_gbps": 1600,
        "nic_gbps": 100,
        "pcie_gbps": 128,
        "ssd_gbps": 10,
    },
    # No NVLink: GPUs of a half machine reach each other over PCIe at 256 Gb/s.
    "B": {
        "count": 2,
        "gpu": "A100-SXM4-80GB",
        "gpus": 8,
        "nvlink_gbps": 256,
        "nvlink_domain": 4,
        "nic_gbps": 100,
        "pcie_gbps": 128,
        "ssd_gbps": 10,
    },
}
"""Table 1 of the BlitzScale paper."""


class Figures(msgspec.Struct, kw_only=True):
    """What a table shows of one run."""

    completed: int
    ttft_ms_mean: float
    ttft_ms_p95: float
    ttft_ms_p99: float
    tbt_ms_mean: float
    tbt_ms_p95: float
    kv_wait_ms_p99: float
    """Between replicas, from the end of a prompt at one to its arrival at the other."""
    answer_s_mean: float
    """From the first token of a request to its last."""
    gpu_s: float
    gpu_s_serving: float
    """Without spares and loading."""
    slo_met: float
    """Part of the requests that met the objectives of the file."""
    weights_gb: float
    scale_ups: int
    host_gb_mean: float
    host_gb_max: float
    copy_gb: float
    """One copy of the weights."""
    loads: dict[str, int]
    """Replicas whose weights arrived, by method."""
    directory: Path
    """Where the files of the run are."""
    ttfts_ms: list[float]
    tpots_ms: list[float]
    tbts_ms: list[float]
    """Of requests with more than one token: the mean time between two, the wait for a decode
    replica included (what the released client of BlitzScale reports)."""
    speed_up: float

    def met(self, ttft_ms: float, tpot_ms: float) -> float:
        """Part of the requests within other objectives."""
        ttft, tpot = np.array(self.ttfts_ms), np.array(self.tpots_ms)
        return float(np.mean((ttft <= ttft_ms) & (tpot <= tpot_ms))) if len(ttft) else 0.0


def load_tables(path: Path) -> Document:
    """The tables of a configuration file."""
    return tomllib.loads(path.read_text())


def put(tables: Document, key: str, value: Any) -> None:
    """Set a dotted key."""
    *parents, last = key.split(".")
    for parent in parents:
        tables = tables.setdefault(parent, {})
    tables[last] = value


def on_cluster(tables: Document, name: str) -> None:
    """Put the run on cluster A or B; B has half the GPUs, so half the load."""
    tables["nodes"] = [dict(CLUSTERS[name])]
    gpus = CLUSTERS[name]["count"] * CLUSTERS[name]["gpus"]
    groups = tables["replicas"]
    used = sum(g.get("count", 1) * g.get("tensor_parallel", 1) for g in groups)
    if used == gpus:
        return
    factor = gpus / used
    for group in groups:
        if group["role"] == "inactive":
            others = sum(
                g.get("count", 1) * g.get("tensor_parallel", 1) for g in groups if g is not group
            )
            group["count"] = (gpus - others) // group.get("tensor_parallel", 1)
    arrivals = tables["workload"].get("synthetic", {}).get("arrivals", {})
    arrivals["points"] = [[at, rate * factor] for at, rate in arrivals.get("points", [])]


def measure(tables: Document, base_dir: Path, out: Path) -> Figures:
    """Run it and collect the figures."""
    tables.setdefault("output", {})
    tables["output"] |= {"dir": str(out.resolve()), "report": False, "trace": False}
    result = execute(config_from_dict(tables, base_dir=base_dir), out.name)
    summary = result.summary
    assert summary is not None
    seconds = summary.gpu_seconds
    idle = sum(seconds.by_role.get(role, 0.0) for role in ("spare", "loading"))
    with (out / "requests.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "completed"]
    host = summary.host_cache_bytes
    return Figures(
        completed=summary.completed,
        ttft_ms_mean=summary.mean_ttft_ms,
        ttft_ms_p95=summary.p95_ttft_ms,
        ttft_ms_p99=summary.p99_ttft_ms,
        tbt_ms_mean=summary.mean_itl_ms,
        tbt_ms_p95=summary.p95_itl_ms,
        kv_wait_ms_p99=float(np.percentile([int(r["migration_ns"]) for r in rows], 99)) / 1e6,
        answer_s_mean=float(
            np.mean([int(r["last_token_ns"]) - int(r["first_token_ns"]) for r in rows])
        )
        / 1e9,
        gpu_s=seconds.total,
        gpu_s_serving=seconds.total - idle,
        slo_met=summary.slo.joint_attainment or 0.0,
        weights_gb=summary.bytes_moved.get("weights", 0) / 1e9,
        scale_ups=summary.scale_ups,
        host_gb_mean=host.get("mean", 0) / 1e9,
        host_gb_max=host.get("max", 0) / 1e9,
        copy_gb=host.get("copy", 0) / 1e9,
        loads=summary.loads,
        directory=out,
        ttfts_ms=[int(row["ttft_ns"]) / 1e6 for row in rows],
        tpots_ms=[int(row["tpot_ns"]) / 1e6 for row in rows],
        tbts_ms=[int(row["tpot_ns"]) / 1e6 for row in rows if int(row["output_toks"]) > 1],
        speed_up=result.outcome.end_ns / 1e9 / result.wall_s,
    )
