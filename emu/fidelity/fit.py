"""Fits the engine's constants to measured runs, and judges them on runs that were left out.

Owns which constants are fitted, on what, and how: weighted least squares of the relative errors of
TPOT and TTFT over all stages that were neither overloaded nor near the knee, with a Huber weight
against single odd hosts and a wide prior at the constants that emu ships. The dependence of each
stage on each constant is taken from emulations of the first part of its load (a finite difference
for each constant); where the stage stands now from the whole load. One such step suffices near the
solution; `fit` may take more.

Leaving out: the constants are fitted once more without the runs of a model, GPU or run, and those
runs are emulated with the constants so found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.errors import InputError
from emu.fidelity.board import Answer, Row, Task, answers, rows_of, tasks_of
from emu.fidelity.runs import MeasuredRun
from emu.latency.posterior import Floats
from emu.latency.engine import DEFAULT_ENGINE, ENGINES, EngineModel, engine_text


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
_FITTED: Final = ("cached", "mixed")
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
            setting = _setting(Path(name), f"moved{key}", engine)
            tasks += [Task(run, 1, (*overrides, setting), part=_PART, key=key) for run in runs]
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
    return float(getattr(answer.figures[stage], metric))


def _moved(engine: EngineModel, constant: str) -> EngineModel:
    value = getattr(engine, constant) + round(CONSTANTS[constant][0])
    return msgspec.structs.replace(engine, **{constant: value})


def _setting(place: Path, name: str, engine: EngineModel) -> str:
    """The override that gives a run this engine."""
    path = place / f"{name}.toml"
    path.write_text(engine_text(engine, DEFAULT_ENGINE), encoding="utf-8")
    return f"latency.engine={path}"


def solve(
    runs: Sequence[MeasuredRun], rows: Sequence[Row], base: EngineModel, sense: Sensitivity
) -> Fit:
    """One weighted least-squares step from `base`, where the stages stand as `rows` say.

    Raises InputError if no stage is left to fit to.
    """
    kept = {run.run_id: run for run in runs}
    residuals, slopes = [], []
    counts: dict[str, int] = {}
    for row in rows:
        index = counts.get(row.run_id, 0)
        counts[row.run_id] = index + 1
        if row.run_id not in kept or row.regime not in _FITTED or row.emulated_overloaded:
            continue
        for metric, sigma in SIGMAS.items():
            measured, emulated = getattr(row.measured, metric), getattr(row.emulated, metric)
            residuals.append(np.log(emulated / measured) / sigma)
            slopes.append(sense.jacobian[row.run_id, index, metric] / sigma)
    if not residuals:
        raise InputError("fidelity", None, "fit", "no stage is left to fit to")
    now = np.array([float(getattr(base, constant)) for constant in CONSTANTS])
    ship = np.array([float(getattr(ENGINES[DEFAULT_ENGINE], c)) for c in CONSTANTS])
    widths = np.array([width for _, width in CONSTANTS.values()])
    change, spread = _least_squares(np.array(residuals), np.array(slopes), now, ship, widths)
    values = {c: round(float(v)) for c, v in zip(CONSTANTS, now + change, strict=True)}
    return Fit(
        msgspec.structs.replace(base, **values),
        dict(zip(CONSTANTS, spread.tolist(), strict=True)),
        len(residuals) // len(SIGMAS),
    )


def _least_squares(
    residuals: Floats, slopes: Floats, now: Floats, prior: Floats, widths: Floats
) -> tuple[Floats, Floats]:
    """(change of the constants, standard errors); no constant falls below zero."""
    scaled = slopes * widths  # unknowns of order one
    change = np.zeros(len(now))
    held = np.zeros(len(now), dtype=bool)
    weights = np.ones(len(residuals))
    normal = np.eye(len(now))
    for _ in range(_REWEIGHTINGS):
        free = ~held
        design = scaled[:, free]
        offset = residuals + scaled[:, held] @ change[held]
        normal = design.T @ (design * weights[:, None]) + np.eye(int(free.sum()))
        towards = ((prior - now) / widths)[free]
        change[free] = np.linalg.solve(normal, towards - design.T @ (weights * offset))
        low = now + change * widths < 0
        if (low & ~held).any():
            change[low] = -now[low] / widths[low]
            held |= low
            continue
        left = np.abs(residuals + scaled @ change)
        weights = np.where(left <= _HUBER, 1.0, _HUBER / np.maximum(left, 1e-12))
    spread = np.zeros(len(now))
    spread[~held] = np.sqrt(np.diag(np.linalg.inv(normal))) * widths[~held]
    return change * widths, spread


def fit(
    runs: Sequence[MeasuredRun],
    rows: Sequence[Row],
    processes: int,
    rounds: int,
    overrides: tuple[str, ...] = (),
) -> tuple[Fit, list[Row]]:
    """Fit to all runs from the shipped constants on: (constants, rows with them)."""
    usable = [run for run in runs if run.in_fit]
    base = ENGINES[DEFAULT_ENGINE]
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
        setting = _setting(Path(name), "fitted", engine)
        tasks = tasks_of(fitted, 1, (*overrides, setting))
        return rows_of(fitted, list(answers(tasks, processes)))


def leave_out(
    runs: Sequence[MeasuredRun],
    rows: Sequence[Row],
    by: str,
    processes: int,
    overrides: tuple[str, ...] = (),
) -> tuple[list[Row], dict[str, Fit]]:
    """Each group's runs, emulated with constants fitted to the others: (rows, fits by group)."""
    usable = [run for run in runs if run.in_fit]
    base = ENGINES[DEFAULT_ENGINE]
    groups: dict[str, list[MeasuredRun]] = {}
    for run in usable:
        groups.setdefault(run.run_id if by == "run" else str(getattr(run, by)), []).append(run)
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
            setting = _setting(Path(name), f"without{number}", fits[group].engine)
            tasks += tasks_of(left, 1, (*overrides, setting))
        found = list(answers(tasks, processes))
    return rows_of(usable, found), fits
