"""Runs every measured run that is found below a directory, in all processes, and compares.

Owns the registry of readers, the search, and one row for each stage. Every run is rebuilt in a
directory of its own that goes with it; runs whose arrivals are not known are drawn with several
seeds, and a figure is the mean over them.
"""

from __future__ import annotations

import csv
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.apps.fidelity.runs import (
    INFERENCE_PERF,
    METRICS,
    OVERLOADED_MS,
    READERS,
    Figures,
    MeasuredRun,
    Stage,
    Unread,
)
from emu.backends.llmservingsim.cluster_file import read_cluster_file
from emu.backends.llmservingsim.convert import import_cluster
from emu.config.load import load_config
from emu.config.schema import LatencyTable
from emu.errors import InputError
from emu.latency.posterior import Floats
from emu.process.exits import scratch
from emu.process.pool import pool_of
from emu.report.summary import Summary as RunSummary
from emu.runs.runner import adjust, execute
from emu.units import NS_PER_S


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


# --- systems of which only a series over time is known --------------------------------------------
#     rows = throughput_rows(directory)       # tokens per second, each second
#     rows = power_rows(directory)            # watts of the server, each second
#
# A directory holds, for each system, LLMServingSim's cluster file and what was measured:
#
#     A/NAME.json with A/NAME_throughput.tsv            (time_s, throughput)
#     A/NAME.json with A/server_power_NAME.tsv          (time_s, power_w)
#     workloads/*.jsonl                                 the requests that were sent
#
# The workload of a system is the one that names its model's family (`..._llama.jsonl`), that of a
# power series the one that has `pulse` in its name. Nothing is fitted to a system.
#
# Throughput: output tokens over the time to the last second in which the system answers. Energy:
# watts summed over the seconds of the series; the emulated run ends near it, and its mean power is
# taken for as many seconds.

_THROUGHPUT: Final = "_throughput.tsv"
_POWER: Final = "server_power_"
_PULSE: Final = "pulse"
_SAMPLING: Final = (
    ("latency.sampling=random",) if "sampling" in LatencyTable.__struct_fields__ else ()
)
"""The sums of the series are those of the workloads: their lengths were forced, by sampling
parameters of the client's own, so that the models' generation configs do not apply."""


class SystemRow(msgspec.Struct, frozen=True):
    """One system: a figure that was measured, and the emulated one."""

    name: str
    unit: str
    measured: float
    emulated: float
    series_error: float | None = None
    """Mean absolute difference of the two series, second by second, in per cent of the mean."""

    @property
    def error(self) -> float:
        """(emulated - measured) / measured, per cent."""
        return 100 * (self.emulated / self.measured - 1)


def throughput_rows(directory: Path, overrides: Sequence[str] = ()) -> list[SystemRow]:
    """Mean output tokens per second of every system below a directory, by path."""
    found = []
    for series in sorted(directory.rglob(f"*{_THROUGHPUT}")):
        cluster = series.with_name(series.name.removesuffix(_THROUGHPUT) + ".json")
        workload = _workload(directory, cluster, pulse=False)
        measured = _series(series, "throughput")
        summary, emulated = _run(cluster, workload, overrides)
        last_s = int(np.flatnonzero(measured)[-1])
        tokens = float(emulated.sum())
        found.append(
            SystemRow(
                _name(directory, cluster),
                "tokens/s",
                float(measured.sum()) / last_s,
                tokens / summary.duration,
                _difference(measured, emulated),
            )
        )
    return found


def power_rows(directory: Path, overrides: Sequence[str] = ()) -> list[SystemRow]:
    """Energy of every server below a directory whose power was measured, in kJ, by path."""
    found = []
    for series in sorted(directory.rglob(f"{_POWER}*.tsv")):
        cluster = series.with_name(series.stem.removeprefix(_POWER) + ".json")
        workload = _workload(directory, cluster, pulse=True)
        measured = _series(series, "power_w")
        summary, _ = _run(cluster, workload, overrides)
        if summary.energy_j is None:
            raise InputError(str(cluster), None, "nodes.power", "missing: no energy is modeled")
        watts = sum(summary.energy_j.values()) / summary.duration
        energy_kj = (float(measured.sum()) / 1e3, watts * len(measured) / 1e3)
        found.append(SystemRow(_name(directory, cluster), "kJ", *energy_kj))
    return found


def _name(directory: Path, cluster: Path) -> str:
    return cluster.relative_to(directory).with_suffix("").as_posix()


def _workload(directory: Path, cluster: Path, *, pulse: bool) -> Path:
    """The one file that the system was sent, in `workloads/` beside it or in a parent directory."""
    model = read_cluster_file(cluster, {}).instances[0].model.name.lower()
    places = [place for place in cluster.parents if place.is_relative_to(directory)]
    folder = next((p / "workloads" for p in places if (p / "workloads").is_dir()), directory)
    files = sorted(folder.glob("*.jsonl"))
    if pulse:
        fitting = [path for path in files if _PULSE in path.name]
    else:
        fitting = [path for path in files if path.stem.rpartition("_")[2] in model]
    if len(fitting) != 1:
        have = ", ".join(path.name for path in files) or "nothing"
        problem = f"{len(fitting)} workloads for {model}; there is {have}"
        raise InputError(str(folder), None, "", problem)
    return fitting[0]


def _series(path: Path, column: str) -> Floats:
    """A column, one row a second from 0."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    try:
        seconds = [float(row["time_s"]) for row in rows]
        values = np.array([float(row[column]) for row in rows])
    except (KeyError, TypeError, ValueError):
        raise InputError(str(path), None, column, "expected time_s and numbers") from None
    if seconds != list(range(len(rows))) or not values.any():
        raise InputError(str(path), None, "time_s", "expected every second from 0, not all zero")
    return values


def _run(cluster: Path, workload: Path, overrides: Sequence[str]) -> tuple[RunSummary, Floats]:
    """Emulate: the summary, and output tokens of each second (0 first, as in the measurement)."""
    with scratch("emu-systems-") as place:
        config_path = place / "cluster.toml"
        config_path.write_text(import_cluster(cluster), encoding="utf-8")
        keys = [f"workload.path={workload.resolve()}", f"output.dir={place / 'run'}"]
        keys += [*_SAMPLING, *overrides]
        config = load_config(config_path, overrides=keys)
        summary = execute(config, str(cluster), report=False).summary
        assert summary is not None
        with (place / "run" / "timeseries.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    ends_s = np.array([int(row["time_ns"]) for row in rows]) / NS_PER_S
    rates = np.array([float(row["decode_tokens_per_s"]) for row in rows])
    return summary, rates * np.diff(ends_s, prepend=0.0)


def _difference(measured: Floats, emulated: Floats) -> float:
    length = max(len(measured), len(emulated))
    both = [np.pad(series, (0, length - len(series))) for series in (measured, emulated)]
    return float(100 * np.abs(both[1] - both[0]).mean() / measured.mean())
