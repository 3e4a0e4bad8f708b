"""The engine's constants, fitted to measured runs and judged on runs that were left out.

Owns which constants are fitted, on what, and how: weighted least squares of the relative errors of
TPOT and TTFT over all stages that were neither overloaded nor near the knee, with a Huber weight
against single odd stages and a wide prior at the constants that emu ships. What all stages of a
model on a GPU have in common may be its kernels, and what those of one run share its host, so both
get an offset of their own (a mixed model): seventeen of 36 stages are of one model, and say how
times change with the load seventeen times, but once how long they are. The dependence of each stage
on each constant is taken from emulations of the first part of its load (a finite difference
for each constant); where the stage stands now from the whole load. One such step suffices near the
solution; `fit` may take more.

Leaving out: the constants are fitted once more without the runs of a model, GPU or run, and those
runs are emulated with the constants so found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.apps.fidelity.board import Answer, Row, Task, answers, rows_of, tasks_of
from emu.apps.fidelity.runs import MeasuredRun
from emu.engines.bundle import Engine
from emu.engines.registry import BUNDLES, engine_named, engine_text
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.latency.posterior import Floats

CONSTANTS: Final = {
    "step_ns": (200_000.0, 600_000.0),
    "graph_layer_ns": (3_000.0, 6_000.0),
    "sort_ns_per_million": (40_000.0, 80_000.0),
    "intake_ns": (1_000_000.0, 4_000_000.0),
    "output_event_ns": (30_000.0, 60_000.0),
}
"""Field of `EngineModel` -> (step of the finite difference, standard deviation of the prior)."""
SIGMAS: Final = {"tpot": 0.02, "ttft": 0.04}
"""Relative error of a measured stage (equal runs differ by so much)."""
OFFSETS: Final[Mapping[str, tuple[Callable[[Row], object], dict[str, float]]]] = {
    "model": (lambda row: (row.model, row.gpu, row.tensor_parallel), {"tpot": 0.04, "ttft": 0.05}),
    "host": (lambda row: row.run_id, {"tpot": 0.03, "ttft": 0.03}),
}
"""Whose stages are off together -> by what they are told apart, and the relative error (standard
deviation) that they share. A model's is that of passes beside tables of kernels (docs/lab/
roofline.md: median 3.4 % of dense decodes); a host's that of five servers with the same settings
(2 to 6 % in TPOT). With 2 to 5 % for the one and 2 to 4 % for the other, the medians of models left
out are 2.1 to 2.5 % (E2E, TPOT) and 2.3 to 3.7 % (TTFT)."""
FITTED: Final = ("cached", "mixed")
"""Regimes that are fitted to: near the knee a per cent of a step is many of a latency."""
_PART: Final = 0.08
_HUBER: Final = 1.5
_REWEIGHTINGS: Final = 12


class Fit(msgspec.Struct, frozen=True):
    """Constants found, with their standard errors."""

    engine: EngineModel
    errors: dict[str, float]
    stages: int


class Sensitivity(msgspec.Struct, frozen=True):
    """How the stages of all runs depend on the constants: rows of stages, metric by metric."""

    jacobian: dict[tuple[str, int, str], Floats]
    """(run, stage, metric) -> change of log(figure) for one unit of each constant."""


def sensitivity(
    runs: Sequence[MeasuredRun],
    base: EngineModel,
    processes: int,
    overrides: tuple[str, ...] = (),
) -> Sensitivity:
    """Emulate the first part of every run with each constant changed."""
    with tempfile.TemporaryDirectory(prefix="emu-fit-") as name:
        tasks = []
        for key, engine in enumerate([base, *(_moved(base, c) for c in CONSTANTS)]):
            setting = _settings(Path(name), f"moved{key}", runs, engine)
            tasks += [
                Task(run, 1, (*overrides, setting[run.run_id]), part=_PART, key=key) for run in runs
            ]
        found = {(a.key, a.run_id): a for a in answers(tasks, processes)}
    jacobian: dict[tuple[str, int, str], Floats] = {}
    for run in runs:
        for index in range(len(run.stages)):
            for metric in SIGMAS:
                here = _figure(found[0, run.run_id], index, metric)
                jacobian[run.run_id, index, metric] = np.array(
                    [
                        np.log(_figure(found[1 + at, run.run_id], index, metric) / here) / step
                        for at, (step, _) in enumerate(CONSTANTS.values())
                    ]
                )
    return Sensitivity(jacobian)


def _figure(answer: Answer, stage: int, metric: str) -> float:
    return answer.figures[stage].of(metric)


def _values(engine: EngineModel) -> dict[str, int]:
    """The constants that are fitted, in the order of CONSTANTS."""
    values = msgspec.structs.asdict(engine)
    return {constant: values[constant] for constant in CONSTANTS}


def _moved(engine: EngineModel, constant: str) -> EngineModel:
    value = _values(engine)[constant] + round(CONSTANTS[constant][0])
    return msgspec.structs.replace(engine, **{constant: value})


def _settings(
    place: Path, name: str, runs: Sequence[MeasuredRun], constants: EngineModel
) -> dict[str, str]:
    """Run -> the override that gives its engine these constants; it keeps its own switches."""
    chosen = _values(constants)
    found = {}
    for label in dict.fromkeys(shipped(run).label for run in runs):
        path = place / f"{name}-{label}.toml"
        model = msgspec.structs.replace(BUNDLES[label].model, **chosen)
        path.write_text(engine_text(model, label), encoding="utf-8")
        found[label] = f"engine.learned={path}"
    return {run.run_id: found[shipped(run).label] for run in runs}


def solve(
    runs: Sequence[MeasuredRun], rows: Sequence[Row], base: EngineModel, sense: Sensitivity
) -> Fit:
    """One weighted least-squares step from `base`, where the stages stand as `rows` say.

    Raises InputError if no stage is left to fit to.
    """
    kept = {run.run_id: run for run in runs}
    residuals, slopes = [], []
    offsets: list[dict[object, float]] = []
    counts: dict[str, int] = {}
    for row in rows:
        index = counts.get(row.run_id, 0)
        counts[row.run_id] = index + 1
        if row.run_id not in kept or row.regime not in FITTED or row.emulated_overloaded:
            continue
        for metric, sigma in SIGMAS.items():
            measured, emulated = row.measured.of(metric), row.emulated.of(metric)
            residuals.append(np.log(emulated / measured) / sigma)
            slopes.append(sense.jacobian[row.run_id, index, metric] / sigma)
            offsets.append(
                {
                    (name, metric, told_by(row)): shared[metric] / sigma
                    for name, (told_by, shared) in OFFSETS.items()
                }
            )
    if not residuals:
        raise InputError("fidelity", None, "fit", "no stage is left to fit to")
    now = np.array([float(value) for value in _values(base).values()])
    ship = np.array([float(value) for value in _values(shipped(runs[0]).model).values()])
    widths = np.array([width for _, width in CONSTANTS.values()])
    change, spread = _least_squares(
        np.array(residuals), np.array(slopes), _columns(offsets), now, ship, widths
    )
    values = {c: round(float(v)) for c, v in zip(CONSTANTS, now + change, strict=True)}
    return Fit(
        msgspec.structs.replace(base, **values),
        dict(zip(CONSTANTS, spread.tolist(), strict=True)),
        len(residuals) // len(SIGMAS),
    )


def _columns(offsets: Sequence[Mapping[object, float]]) -> Floats:
    """A column for each offset of any of these observations."""
    places = {key: at for at, key in enumerate(dict.fromkeys(chain.from_iterable(offsets)))}
    columns = np.zeros((len(offsets), len(places)))
    for at, mine in enumerate(offsets):
        for key, size in mine.items():
            columns[at, places[key]] = size
    return columns


def _least_squares(
    residuals: Floats, slopes: Floats, offsets: Floats, now: Floats, prior: Floats, widths: Floats
) -> tuple[Floats, Floats]:
    """(change of the constants, standard errors); no constant falls below zero.

    `offsets`: a column for each, in units of its standard deviation; what they are is not told.
    """
    constants = len(now)
    scaled = np.hstack([slopes * widths, offsets])  # unknowns of order one
    towards = np.zeros(scaled.shape[1])
    towards[:constants] = (prior - now) / widths
    least = np.full(scaled.shape[1], -np.inf)
    least[:constants] = -now / widths
    change = np.zeros(scaled.shape[1])
    held = np.zeros(scaled.shape[1], dtype=bool)
    weights = np.ones(len(residuals))
    normal = np.eye(scaled.shape[1])
    for _ in range(_REWEIGHTINGS):
        free = ~held
        design = scaled[:, free]
        left = residuals + scaled[:, held] @ change[held]
        normal = design.T @ (design * weights[:, None]) + np.eye(int(free.sum()))
        change[free] = np.linalg.solve(normal, towards[free] - design.T @ (weights * left))
        low = change < least
        if (low & ~held).any():
            change[low] = least[low]
            held |= low
            continue
        left = np.abs(residuals + scaled @ change)
        weights = np.where(left <= _HUBER, 1.0, _HUBER / np.maximum(left, 1e-12))
    spread = np.zeros(len(held))
    spread[~held] = np.sqrt(np.diag(np.linalg.inv(normal)))
    return change[:constants] * widths, spread[:constants] * widths


def fit(
    runs: Sequence[MeasuredRun],
    rows: Sequence[Row],
    processes: int,
    rounds: int,
    overrides: tuple[str, ...] = (),
) -> tuple[Fit, list[Row]]:
    """Fit to all runs from the shipped constants on: (constants, rows with them)."""
    usable = fitted_runs(runs)
    base = shipped(usable[0]).model
    sense = sensitivity(usable, base, processes, overrides)
    found = solve(usable, rows, base, sense)
    for _ in range(rounds):
        rows = with_engine(runs, found.engine, processes, overrides)
        found = solve(usable, rows, found.engine, sense)
    return found, with_engine(runs, found.engine, processes, overrides)


def with_engine(
    runs: Sequence[MeasuredRun],
    engine: EngineModel,
    processes: int,
    overrides: tuple[str, ...] = (),
) -> list[Row]:
    """The board with other constants, one seed."""
    fitted = [run for run in runs if run.in_fit]
    with tempfile.TemporaryDirectory(prefix="emu-fit-") as name:
        setting = _settings(Path(name), "fitted", fitted, engine)
        tasks = [t for r in fitted for t in tasks_of([r], 1, (*overrides, setting[r.run_id]))]
        return rows_of(fitted, list(answers(tasks, processes)))


def leave_out(
    runs: Sequence[MeasuredRun],
    rows: Sequence[Row],
    by: str,
    processes: int,
    overrides: tuple[str, ...] = (),
) -> tuple[list[Row], dict[str, Fit]]:
    """Each group's runs, emulated with constants fitted to the others: (rows, fits by group)."""
    usable = fitted_runs(runs)
    base = shipped(usable[0]).model
    groups: dict[str, list[MeasuredRun]] = {}
    for run in usable:
        name = {"run": run.run_id, "model": run.model, "gpu": run.gpu}[by]
        groups.setdefault(name, []).append(run)
    if len(groups) < 2:
        raise InputError("fidelity", None, "--leave-out", f"all runs have the same {by}")
    sense = sensitivity(usable, base, processes, overrides)
    fits: dict[str, Fit] = {}
    with tempfile.TemporaryDirectory(prefix="emu-fit-") as name:
        tasks: list[Task] = []
        for number, (group, left) in enumerate(groups.items()):
            ids = {run.run_id for run in left}
            others = [run for run in usable if run.run_id not in ids]
            fits[group] = solve(others, rows, base, sense)
            setting = _settings(Path(name), f"without{number}", left, fits[group].engine)
            for run in left:
                tasks += tasks_of([run], 1, (*overrides, setting[run.run_id]))
        found = list(answers(tasks, processes))
    return rows_of(usable, found), fits


SHOWN: Final = ("ttft", "tpot", "e2e")


def fitted_runs(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Runs that constants are fitted to. Raises InputError if there is none."""
    usable = [run for run in runs if run.in_fit]
    if not usable:
        raise InputError("fidelity", None, "fit", "no stage is left to fit to")
    return usable


def usable_runs(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Runs that may be fitted to and have a stage that was not overloaded."""
    return [run for run in runs if run.in_fit and any(s.is_compared for s in run.stages)]


def shipped(run: MeasuredRun) -> Engine:
    """The engine that a run's configuration names."""
    return engine_named(run.engine, run.run_id)
