"""What was run, in words: the cluster, the workload, the settings, and how to run it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emu.report.rundata import RunData


def run_title(run: RunData) -> str:
    """Configuration and model: what tells one tab of a browser from the next."""
    model = run.config.get("model", {}).get("name") or run.config.get("model", {}).get("hf_config")
    file = Path(str(run.origin.get("config_file") or "")).name
    return ": ".join(["emu", *([file] if file not in ("", "config") else []), model or "a run"])


def facts(run: RunData) -> list[str]:
    """The cluster in a few words."""
    config = run.config
    if not config:
        return []
    found = []
    for node in config.get("nodes", []):
        gpu = node.get("gpu")
        name = gpu.get("name", "GPU") if isinstance(gpu, dict) else gpu
        found.append(f"{node.get('count', 1)} x {node.get('gpus', 1)} {name}")
    for group in config.get("replicas", []):
        shape = group.get("tensor_parallel", 1) * group.get("pipeline_parallel", 1)
        found.append(f"{group.get('count', 1)} {group.get('role')} (x {shape} GPU)")
    found.append(f"scheduler {config.get('scheduler', {}).get('policy')}")
    found.append(f"latency {config.get('latency', {}).get('backend')}")
    found += [known_text(run)] if known_text(run) else []
    if config.get("autoscale"):
        found.append(f"autoscale {config['autoscale'].get('executor')}")
    return [*found, workload_text(config), f"seed {config.get('seed')}"]


def known_text(run: RunData) -> str:
    """How well its engine is known; empty if the run's files do not say."""
    known = run.origin.get("known")
    return f"engine known to {known}" if known and isinstance(known, str) else ""


def workload_text(config: dict[str, Any]) -> str:
    """The workload in a few words: its file, or what is drawn."""
    workload = config.get("workload", {})
    if workload.get("path"):
        limit = f", first {workload['limit']:,}" if workload.get("limit") else ""
        return f"workload {Path(workload['path']).name}{limit}"
    synthetic = workload.get("synthetic") or {}
    arrivals = synthetic.get("arrivals") or {}
    rate = arrivals.get("rate_per_s")
    text = f"workload {arrivals.get('process', 'synthetic')}"
    return f"{text}, {rate:g} requests/s" if isinstance(rate, (int, float)) else text


def origin(run: RunData) -> dict[str, str]:
    """What one needs to run it again; the output directory is left out."""
    found = run.origin
    versions = found.get("versions") or {}
    rows = {
        "configuration": str(found.get("config_file") or "-"),
        "overrides": " ".join(found.get("overrides") or []) or "none",
        "workload": workload_text(run.config).removeprefix("workload ") if run.config else "-",
        "seed": str(run.config.get("seed", "-")),
        "command": str(found.get("command") or "-"),
        "again": "emu rerun on the directory of this run",
    }
    if versions:
        revision = f" (revision {versions['revision']})" if versions.get("revision") else ""
        rows["emu"] = f"{versions.get('emu', '-')}{revision}"
    return rows


def flat_settings(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values of a configuration; what is not set is left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if path or key != "output":
                yield from flat_settings(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from flat_settings(item, f"{path}.{index}")
    elif value not in (None, "", []):
        yield path, value if isinstance(value, str) else json.dumps(value)
