"""Experiment (e): ten models on one fleet whose host memory holds three.

Two tables for each minimum (one replica of each kind kept, or none): the systems, and every model.
A load is a hit where the weights were in the memory of a GPU or of a host, a miss where they came
from a disk. `could hit` is the part of ServerlessLLM's loads that a memory of that size could serve
at best, if each machine always had the copies of the models that are loaded there most often.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.apps.experiments.runner import Runner, Shown, Table
from emu.config.load import config_from_dict
from emu.config.schema import Config
from emu.documents import Document
from emu.errors import InputError
from emu.report.model_figures import ModelFigures
from emu.report.summary import Summary
from emu.runs.runner import execute
from emu.units import GIB

_FLEET_SYSTEMS: Final = ("blitzscale", "allcache", "serverlessllm")
"""In the order of their TTFT in the paper."""
_CONFIG: Final = "ten_models"


def fleet(runner: Runner, clusters: Sequence[str]) -> Iterator[Shown]:
    """Experiment (e). It has a cluster of its own."""
    for minimum, words in ((1, "one replica of each kind is kept"), (0, "models scale to zero")):
        runs = {system: _run(runner, system, minimum) for system in _FLEET_SYSTEMS}
        yield Shown(title=f"ten models, {words}", table=_systems(runs))
        yield Shown(title=f"by model, {words}", table=_models(runs))


def _run(runner: Runner, system: str, minimum: int) -> tuple[Summary, Config, Path]:
    tables: Document = runner.tables(_CONFIG)
    tables["autoscale"] |= {"preset": system, "min_prefill": minimum, "min_decode": minimum}
    for model in tables["models"]:
        model |= {"prefill": minimum, "decode": minimum}
    name = f"{_CONFIG}-{system}-min{minimum}"
    out = (runner.out / name).resolve()
    tables["output"] = {"dir": str(out), "report": False}
    runner.tell(name)
    config = config_from_dict(tables, base_dir=runner.configs)
    summary = execute(config, name).summary
    assert summary is not None
    return summary, config, out


def _of_models(summary: Summary) -> dict[str, ModelFigures]:
    if isinstance(summary.models, msgspec.UnsetType):
        raise InputError(_CONFIG, None, "models", "the configuration serves one model")
    return summary.models


def _systems(runs: dict[str, tuple[Summary, Config, Path]]) -> Table:
    head = "system, TTFT mean ms, TTFT p95 ms, TTFT p99 ms, TPOT mean ms, SLO met, GPU s, loads"
    table = [[*head.split(", "), "misses", "hit rate", "could hit", "host GB mean"]]
    for system, (summary, config, out) in runs.items():
        models = _of_models(summary).values()
        hits = sum(model.load_hits for model in models)
        misses = sum(model.load_misses for model in models)
        best = _could_hit(summary, config, out) if system == "serverlessllm" else None
        table.append(
            [
                system,
                f"{summary.mean_ttft_ms:.0f}",
                f"{summary.p95_ttft_ms:.0f}",
                f"{summary.p99_ttft_ms:.0f}",
                f"{summary.mean_tpot_ms:.1f}",
                f"{summary.slo.joint_attainment or 0:.1%}",
                f"{summary.gpu_seconds.total:,.0f}",
                f"{hits + misses}",
                f"{misses}",
                f"{hits / (hits + misses):.0%}" if hits + misses else "-",
                "-" if best is None else f"{best:.0%}",
                f"{summary.host_cache_bytes.get('mean', 0) / 1e9:.0f}",
            ]
        )
    return table


def _models(runs: dict[str, tuple[Summary, Config, Path]]) -> Table:
    head = ["model", "requests", "copy GB"]
    for system in runs:
        head += [f"{system}: TTFT mean ms", "loads", "misses"]
    table = [head]
    by_system = {system: _of_models(run[0]) for system, run in runs.items()}
    for name, first in by_system[_FLEET_SYSTEMS[0]].items():
        row = [name, f"{first.completed}", f"{first.host_copy_bytes / 1e9:.0f}"]
        for models in by_system.values():
            model = models[name]
            row += [
                f"{model.mean_ttft_ms:.0f}",
                f"{model.load_hits + model.load_misses}",
                f"{model.load_misses}",
            ]
        table.append(row)
    return table


def _could_hit(summary: Summary, config: Config, out: Path) -> float:
    """Best part of the loads that fixed copies in each machine's memory could serve."""
    from emu.cluster.plan import make_plan

    plan = make_plan(config)
    loads: dict[int, Counter[str]] = {}
    with (out / "marks.csv").open(newline="") as file:
        for mark in csv.DictReader(file):
            if mark["kind"] == "loaded":
                replica = plan.replicas[int(mark["target"].removeprefix("replica "))]
                loads.setdefault(replica.machine, Counter())[replica.served] += 1
    assert config.autoscale is not None
    room = config.autoscale.host_cache_gib * GIB
    sizes = {name: model.host_copy_bytes for name, model in _of_models(summary).items()}
    served = sum(_best(counts, sizes, room) for counts in loads.values())
    total = sum(sum(counts.values()) for counts in loads.values())
    return served / total if total else 0.0


def _best(counts: Counter[str], sizes: dict[str, int], room: float) -> int:
    """Most loads that copies which fit together can serve: every set of models is tried."""
    names = sorted(counts)
    best = 0
    for chosen in range(1 << len(names)):
        picked = [name for i, name in enumerate(names) if chosen >> i & 1]
        if sum(sizes[name] for name in picked) <= room:
            best = max(best, sum(counts[name] for name in picked))
    return best
