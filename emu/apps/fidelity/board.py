"""Runs every measured run that is found below a directory, in all processes, and compares.

Owns the registry of readers, the search, and one row for each stage. Every run is rebuilt in a
directory of its own that goes with it; runs whose arrivals are not known are drawn with several
seeds, and a figure is the mean over them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from emu.apps.fidelity.inferenceperf import INFERENCE_PERF
from emu.apps.fidelity.readers import READERS
from emu.apps.fidelity.runs import METRICS, OVERLOADED_MS, Figures, MeasuredRun, Stage, Unread
from emu.config.load import load_config
from emu.errors import InputError
from emu.process.pool import pool_of
from emu.runs.runner import adjust, execute


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
        measured = self.measured.of(metric)
        return 100 * (self.emulated.of(metric) - measured) / measured

    @property
    def groups(self) -> dict[str, str]:
        """What its errors are grouped by."""
        return {"gpu": self.gpu, "model_class": self.model_class, "regime": self.regime}

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
    refused: str = ""
    """Why the run cannot be emulated; it has no figures then."""


def find_runs(directory: Path) -> list[MeasuredRun]:
    """All runs in a directory and below it that can be emulated, in order of their paths.

    Raises InputError if there is none.
    """
    return runs_below(directory)[0]


def runs_below(directory: Path) -> tuple[list[MeasuredRun], list[Unread]]:
    """The runs that can be emulated, and those that cannot, with their reasons.

    Raises InputError if none can.
    """
    if not directory.is_dir():
        raise InputError(str(directory), None, "", "not a directory")
    found = _found(directory)
    runs = [run for run in found if isinstance(run, MeasuredRun)]
    unread = [run for run in found if isinstance(run, Unread)]
    if not runs and unread:
        raise InputError(unread[0].run_id, None, "", unread[0].reason)
    if not runs:
        kinds = ", ".join(reader.name for reader in READERS)
        raise InputError(str(directory), None, "", f"no measured run found (readers: {kinds})")
    return runs, unread


def has_runs(directory: Path) -> bool:
    """Whether there is a measured run in a directory or below it, of whatever kind."""
    return bool(_found(directory))


def _found(directory: Path) -> list[MeasuredRun | Unread]:
    folders = [directory, *sorted(path for path in directory.rglob("*") if path.is_dir())]
    return [run for folder in folders for reader in READERS for run in reader.find(folder)]


def emulate(task: Task) -> Answer:
    """Rebuild a run and emulate it; what its record asks for may be refused."""
    try:
        figures = _figures(task)
    except InputError as error:
        return Answer(task.run.run_id, task.seed, task.key, [], str(error))
    return Answer(task.run.run_id, task.seed, task.key, figures)


def _figures(task: Task) -> list[Figures]:
    reader = next(r for r in READERS if r.name == task.run.reader)
    case = reader.build(task.run, task.seed, task.part)
    with tempfile.TemporaryDirectory(prefix="emu-fidelity-") as name:
        place = Path(name)
        (place / "cluster.toml").write_text(case.config, encoding="utf-8")
        (place / "workload.jsonl").write_text(case.workload, encoding="utf-8")
        config = load_config(place / "cluster.toml", task.overrides)
        config = adjust(config, seed=task.seed, output=place / "run")
        execute(config, task.run.run_id, report=False)
        return reader.figures(task.run, place / "run", case)


def answers(
    tasks: Sequence[Task], processes: int, *, with_refused: bool = False
) -> Iterator[Answer]:
    """All tasks' answers, in any order; the long ones are begun first.

    Raises InputError for a run that is refused, unless `with_refused`.
    """
    ordered = sorted(tasks, key=lambda t: -sum(stage.requests for stage in t.run.stages))
    with pool_of(emulate, processes, None, lambda task: f"its run was {task.run.run_id}") as pool:
        for answer in pool.results(ordered):
            if answer.refused and not with_refused:
                raise InputError(answer.run_id, None, "", answer.refused)
            yield answer


def tasks_of(
    runs: Sequence[MeasuredRun], seeds: int, overrides: tuple[str, ...] = (), key: int = 0
) -> list[Task]:
    """Every run with each seed; once where arrivals are known."""
    return [
        Task(run, seed, overrides, key=key)
        for run in runs
        for seed in range(1, 1 + (seeds if run.reader == INFERENCE_PERF else 1))
    ]


def rows_of(runs: Sequence[MeasuredRun], found: Sequence[Answer]) -> list[Row]:
    """A row for each stage, in order of the runs."""
    rows = []
    for run in runs:
        drawn = sorted((a for a in found if a.run_id == run.run_id), key=lambda a: a.seed)
        for index, stage in enumerate(run.stages):
            rows.append(_row(run, stage, [answer.figures[index] for answer in drawn]))
    return rows


def _spread(metric: str, stage: Stage, drawn: Sequence[Figures]) -> float:
    """Half of what draws differ by, per cent of what was measured."""
    values = [figures.of(metric) for figures in drawn]
    return 50 * (max(values) - min(values)) / stage.measured.of(metric)


def _row(run: MeasuredRun, stage: Stage, drawn: Sequence[Figures]) -> Row:
    mean = Figures(*(math.fsum(f.of(m) for f in drawn) / len(drawn) for m in METRICS))
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
        spread={metric: _spread(metric, stage, drawn) for metric in METRICS},
        is_overloaded=stage.is_overloaded,
        is_compared=stage.is_compared,
        emulated_overloaded=not mean.ttft <= OVERLOADED_MS,  # no request was served: overloaded
        peers=run.peers,
    )
