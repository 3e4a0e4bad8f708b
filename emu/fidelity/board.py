"""Runs every measured run that is found below a directory, in all processes, and compares.

Owns the registry of readers, the search, and one row for each stage. Every run is rebuilt in a
directory of its own that goes with it; runs whose arrivals are not known are drawn with several
seeds, and a figure is the mean over them.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.config.load import load_config
from emu.errors import InputError
from emu.fidelity import inference_perf, recorded
from emu.fidelity.runs import METRICS, OVERLOADED_MS, Figures, MeasuredRun, Reader, Stage
from emu.process.pool import pool_of
from emu.runs.runner import adjust, execute

READERS: Final = (
    Reader(inference_perf.NAME, inference_perf.find, inference_perf.build, inference_perf.figures),
    Reader(recorded.NAME, recorded.find, recorded.build, recorded.figures),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One stage beside its emulation."""

    run_id: str
    stage: str
    reader: str
    engine: str
    gpu: str
    model: str
    model_class: str
    tensor_parallel: int
    regime: str
    measured: Figures
    emulated: Figures
    spread: dict[str, float]
    """Half the range over seeds, per cent of the measured figure."""
    is_overloaded: bool
    is_compared: bool
    emulated_overloaded: bool
    peers: dict[str, dict[str, float]]

    def error(self, metric: str) -> float:
        """(emulated - measured) / measured, per cent."""
        measured: float = getattr(self.measured, metric)
        emulated: float = getattr(self.emulated, metric)
        return 100 * (emulated - measured) / measured

    @property
    def is_judged_right(self) -> bool:
        """The verdict (overloaded or not) is the real one."""
        return self.is_overloaded == self.emulated_overloaded


class Task(msgspec.Struct, frozen=True):
    """One run to emulate, with one seed."""

    run: MeasuredRun
    seed: int
    overrides: tuple[str, ...] = ()
    part: float = 1.0
    key: int = 0


class Answer(msgspec.Struct, frozen=True):
    """The figures of its stages."""

    run_id: str
    seed: int
    key: int
    figures: list[Figures]


def find_runs(directory: Path) -> list[MeasuredRun]:
    """All runs in a directory and below it, in order of their paths.

    Raises InputError if there is none.
    """
    if not directory.is_dir():
        raise InputError(str(directory), None, "", "not a directory")
    folders = [directory, *sorted(path for path in directory.rglob("*") if path.is_dir())]
    found = [run for folder in folders for reader in READERS for run in reader.find(folder)]
    if not found:
        kinds = ", ".join(reader.name for reader in READERS)
        raise InputError(str(directory), None, "", f"no measured run found (readers: {kinds})")
    return found


def emulate(task: Task) -> Answer:
    """Rebuild a run and emulate it."""
    reader = next(r for r in READERS if r.name == task.run.reader)
    case = reader.build(task.run, task.seed, task.part)
    with tempfile.TemporaryDirectory(prefix="emu-fidelity-") as name:
        place = Path(name)
        (place / "cluster.toml").write_text(case.config, encoding="utf-8")
        (place / "workload.jsonl").write_text(case.workload, encoding="utf-8")
        config = load_config(place / "cluster.toml", task.overrides)
        config = adjust(config, seed=task.seed, output=place / "run")
        execute(config, task.run.run_id, report=False)
        figures = reader.figures(task.run, place / "run", case)
    return Answer(task.run.run_id, task.seed, task.key, figures)


def answers(tasks: Sequence[Task], processes: int) -> Iterator[Answer]:
    """All tasks' answers, in any order; the long ones are begun first."""
    ordered = sorted(tasks, key=lambda t: -sum(stage.requests for stage in t.run.stages))
    with pool_of(emulate, processes, None, lambda task: f"its run was {task.run.run_id}") as pool:
        yield from pool.results(ordered)


def tasks_of(
    runs: Sequence[MeasuredRun], seeds: int, overrides: tuple[str, ...] = (), key: int = 0
) -> list[Task]:
    """Every run with each seed; once where arrivals are known."""
    return [
        Task(run, seed, overrides, key=key)
        for run in runs
        for seed in range(1, 1 + (seeds if run.reader == inference_perf.NAME else 1))
    ]


def rows_of(runs: Sequence[MeasuredRun], found: Sequence[Answer]) -> list[Row]:
    """A row for each stage, in order of the runs."""
    rows = []
    for run in runs:
        drawn = sorted((a for a in found if a.run_id == run.run_id), key=lambda a: a.seed)
        for index, stage in enumerate(run.stages):
            rows.append(_row(run, stage, [answer.figures[index] for answer in drawn]))
    return rows


def _row(run: MeasuredRun, stage: Stage, drawn: Sequence[Figures]) -> Row:
    mean = Figures(*(math.fsum(getattr(f, m) for f in drawn) / len(drawn) for m in METRICS))
    spread = {}
    for metric in METRICS:
        values = [getattr(f, metric) for f in drawn]
        spread[metric] = 50 * (max(values) - min(values)) / getattr(stage.measured, metric)
    return Row(
        run_id=run.run_id,
        stage=stage.label,
        reader=run.reader,
        engine=run.engine,
        gpu=run.gpu,
        model=run.model,
        model_class=run.model_class,
        tensor_parallel=run.tensor_parallel,
        regime=stage.regime,
        measured=stage.measured,
        emulated=mean,
        spread=spread,
        is_overloaded=stage.is_overloaded,
        is_compared=stage.is_compared,
        emulated_overloaded=not mean.ttft <= OVERLOADED_MS,  # no request was served: overloaded
        peers=run.peers,
    )


# --------------------------------------------------------------------------------------------------
# What a board's rows say together: medians, worst, verdicts, by what groups they fall into.

GROUPS: Final = ("gpu", "model_class", "regime")


class Group(msgspec.Struct, frozen=True):
    """Stages whose errors count, taken together."""

    name: str
    stages: int
    median: dict[str, float]
    """|error| by metric, per cent."""
    bias: dict[str, float]
    """Median of the signed error."""
    worst: dict[str, float]
    """The error that is largest, with its sign."""


class Summary(msgspec.Struct, frozen=True):
    """The board in figures."""

    stages: int
    wrong_verdicts: list[str]
    overall: Group
    by: dict[str, list[Group]]
    peers: dict[str, dict[str, float]]
    """Median |error| that other simulators publish for the same runs, by simulator."""


def summarize(rows: Sequence[Row]) -> Summary:
    """Figures over all rows; errors over those that were not overloaded."""
    judged = [row for row in rows if row.is_compared]
    by = {
        key: [
            _group(name, [row for row in judged if getattr(row, key) == name])
            for name in dict.fromkeys(getattr(row, key) for row in judged)
        ]
        for key in GROUPS
    }
    wrong = [f"{row.run_id} {row.stage}" for row in rows if not row.is_judged_right]
    return Summary(len(rows), wrong, _group("all", judged), by, _peers(judged))


def _group(name: str, rows: Sequence[Row]) -> Group:
    errors = {metric: [row.error(metric) for row in rows] for metric in METRICS} if rows else {}
    return Group(
        name,
        len(rows),
        {m: statistics.median(map(abs, values)) for m, values in errors.items()},
        {m: statistics.median(values) for m, values in errors.items()},
        {m: max(values, key=abs) for m, values in errors.items()},
    )


def _peers(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    runs = {row.run_id: row.peers for row in rows}
    found: dict[str, dict[str, list[float]]] = {}
    for peers in runs.values():
        for name, errors in peers.items():
            for metric, error in errors.items():
                found.setdefault(name, {}).setdefault(metric, []).append(abs(error))
    return {
        name: {metric: statistics.median(values) for metric, values in by.items()}
        | {"runs": float(max(map(len, by.values())))}
        for name, by in sorted(found.items())
    }
