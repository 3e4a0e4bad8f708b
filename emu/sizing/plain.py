"""A configuration from a few words: what `emu run` does without a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emu.chaos.tomltext import toml_text
from emu.errors import InputError
from emu.report.atomic import write_text
from emu.sizing.question import gpu_kinds, traffic
from emu.units import ceil_div

GPUS_PER_NODE = 8


def plain_config(
    output: Path,
    *,
    model: str,
    gpu: Sequence[str],
    replicas: int,
    tensor_parallel: int,
    workload: str,
    rate: float,
    prompt_tokens: str,
    output_tokens: str,
    preset: str,
    requests: int,
) -> Path:
    """Write `OUTPUT.toml`, a configuration of colocated replicas; its path. Raises InputError."""
    if not model:
        raise InputError("run", None, "--model", "give a configuration file, or a model")
    kinds, has_prices = gpu_kinds(gpu)
    if len(kinds) != 1:
        raise InputError("run", None, "--gpu", "a run has one kind; emu plan compares them")
    table = traffic(
        workload=workload,
        rate=rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        preset=preset,
        requests=requests,
    )
    if workload:
        path = Path(workload).resolve()
        table["path"] = str(path)
        if rate:
            table["rate_per_s"] = float(rate)
    machines = ceil_div(max(1, replicas), max(1, GPUS_PER_NODE // tensor_parallel))
    node: dict[str, Any] = {"gpu": kinds[0].name, "gpus": GPUS_PER_NODE, "count": machines}
    if has_prices:
        node["hourly_price"] = kinds[0].price
    tables = {
        "model": {"name": model},
        "nodes": [node],
        "replicas": [{"count": max(1, replicas), "tensor_parallel": tensor_parallel}],
        "workload": table,
        "output": {"dir": str(output.resolve())},
    }
    path = output.with_name(f"{output.name}.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"# Written by emu run.\n{toml_text(tables)}")
    return path
