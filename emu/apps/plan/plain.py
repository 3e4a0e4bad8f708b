"""A configuration from a few words: what `emu run` does without a file."""

from __future__ import annotations

from pathlib import Path

from emu.apps.plan.question import gpu_kinds
from emu.apps.plan.traffic import SOURCE, traffic
from emu.catalogue.lookup import lookup_model
from emu.config.toml_text import toml_text
from emu.documents import Document
from emu.errors import InputError
from emu.report.atomic import write_text
from emu.runs.options import RunOptions
from emu.units import ceil_div

GPUS_PER_NODE = 8


def plain_config(output: Path, options: RunOptions) -> Path:
    """Write `OUTPUT.toml`, a configuration of colocated replicas; its path. Raises InputError."""
    try:
        return _written(output, options)
    except InputError as error:
        if error.source != SOURCE:
            raise
        raise InputError(options.command, error.line, error.field, error.problem) from None


def _written(output: Path, options: RunOptions) -> Path:
    if not options.model:
        raise InputError("run", None, "--model", "give a configuration file, or a model")
    lookup_model(options.model, "run", "--model")
    kinds, have_prices = gpu_kinds(options.gpu)
    if len(kinds) != 1:
        raise InputError("run", None, "--gpu", "a run has one kind; emu plan compares them")
    if kinds[0].count_max or kinds[0].on_demand:
        problem = "a run takes NAME=PRICE; how many there are say --replicas and --tp"
        raise InputError("run", None, "--gpu", problem)
    table = traffic(options)
    if options.workload:
        path = Path(options.workload).resolve()
        table["path"] = str(path)
        if options.rate:
            table["rate_per_s"] = float(options.rate)
    replicas, tensor_parallel = options.replicas, options.tensor_parallel
    machines = ceil_div(replicas, max(1, GPUS_PER_NODE // tensor_parallel))
    node: Document = {"gpu": kinds[0].name, "gpus": GPUS_PER_NODE, "count": machines}
    if have_prices:
        node["hourly_price"] = kinds[0].price
    tables = {
        "model": {"name": options.model},
        "nodes": [node],
        "replicas": [{"count": replicas, "tensor_parallel": tensor_parallel}],
        "workload": table,
        "output": {"dir": str(output.resolve())},
    }
    path = output.with_name(f"{output.name}.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"# Written by emu run.\n{toml_text(tables)}")
    return path
