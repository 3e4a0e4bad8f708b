"""Fits to measured runs, judged on runs that were left out: constants of the engine, learning."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.apps.fidelity.board import Answer, Row, Task, answers, rows_of, tasks_of
from emu.apps.fidelity.runs import MeasuredRun
from emu.apps.learn.session import (
    Population,
    RunEvidence,
    most_probable,
    noise_factor,
    population,
    posterior_text,
)
from emu.engines.bundle import Engine
from emu.engines.registry import BUNDLES, engine_named, engine_text
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.latency.posterior import (
    METRICS,
    NAMES,
    PARAMETERS,
    Floats,
    Posterior,
    values_of,
    with_values,
)

# --- the engine's constants -----------------------------------------------------------------------
# Owns which constants are fitted, on what, and how: weighted least squares of the relative errors
# of TPOT and TTFT over all stages that were neither overloaded nor near the knee, with a Huber
# weight against single odd hosts and a wide prior at the constants that emu ships. The dependence
# of each stage on each constant is taken from emulations of the first part of its load (a finite
# difference for each constant); where the stage stands now from the whole load. One such step
# suffices near the solution; `fit` may take more.
#
# Leaving out: the constants are fitted once more without the runs of a model, GPU or run, and those
# runs are emulated with the constants so found.

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
    return float(getattr(answer.figures[stage], metric))


def _moved(engine: EngineModel, constant: str) -> EngineModel:
    value = getattr(engine, constant) + round(CONSTANTS[constant][0])
    return msgspec.structs.replace(engine, **{constant: value})


def _settings(
    place: Path, name: str, runs: Sequence[MeasuredRun], constants: EngineModel
) -> dict[str, str]:
    """Run -> the override that gives its engine these constants; it keeps its own switches."""
    chosen = {constant: getattr(constants, constant) for constant in CONSTANTS}
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
    ship = np.array([float(getattr(shipped(runs[0]).model, c)) for c in CONSTANTS])
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
            setting = _settings(Path(name), f"without{number}", left, fits[group].engine)
            for run in left:
                tasks += tasks_of([run], 1, (*overrides, setting[run.run_id]))
        found = list(answers(tasks, processes))
    return rows_of(usable, found), fits


# --- what learning is worth: priors, and three experiments that leave runs out --------------------
#     priors        how runs differ from the shipped engine, by GPU (emu/latency/prior.toml)
#     first stage   learn from the first stage of a run, predict the second; prior without the run
#     half          shift found on one half of the models, applied to the others on the same GPU
#     coverage      90 % intervals of stage means, prior without the run
#
# Stages near the knee or overloaded are not fitted to, but they are predicted. Slopes come from
# emulations of the first part of each load; where the stage stands from the whole load. The
# intervals are linearised; predictions are emulated.

_LEARNING_PART: Final = 0.12
"""Of each stage's load, for slopes."""
_RUNS_MIN: Final = 4
"""Runs on a GPU from which it has a prior of its own."""
_PARTS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
_Z90: Final = 1.6449
SHOWN: Final = ("ttft", "tpot", "e2e")
EXPERIMENTS: Final = ("first-stage", "half", "coverage")
Key = tuple[str, int]
"""Run and number of the stage."""


class Slopes(msgspec.Struct, frozen=True):
    """Change of the logarithm of a stage's TTFT, TPOT and E2E for one unit of each constant."""

    of: dict[Key, Floats]


class Guess(msgspec.Struct, frozen=True):
    """What is expected of a run that was not seen, as distances from its shipped engine."""

    shift: Floats
    covariance: Floats
    noise: Floats


class Stage(msgspec.Struct, frozen=True):
    """A stage of an experiment: errors in per cent by metric."""

    run_id: str
    stage: str
    gpu: str
    model: str
    default: dict[str, float]
    learned: dict[str, float]


class Interval(msgspec.Struct, frozen=True):
    """A measured mean and the interval for it, relative to the emulated one."""

    run_id: str
    stage: str
    metric: str
    measured: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """The measured mean is inside."""
        return self.low <= self.measured <= self.high


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


def slopes_of(runs: Sequence[MeasuredRun], processes: int) -> Slopes:
    """Emulate the first part of every run with each constant changed."""
    with tempfile.TemporaryDirectory(prefix="emu-fit-") as name:
        tasks = []
        for key in range(1 + len(PARAMETERS)):
            for run in runs:
                values = values_of(shipped(run).model)
                if key:
                    values[key - 1] += PARAMETERS[key - 1].step
                setting = setting_of(Path(name), f"{key}-{run.run_id}", run, values)
                tasks.append(Task(run, 1, (setting,), part=_LEARNING_PART, key=key))
        found = {(a.key, a.run_id): a.figures for a in answers(tasks, processes)}
    slopes: dict[Key, Floats] = {}
    for run in runs:
        for index in range(len(run.stages)):
            logs = [
                np.log([getattr(found[key, run.run_id][index], m) for m in SHOWN])
                for key in range(1 + len(PARAMETERS))
            ]
            columns = [
                (logs[1 + at] - logs[0]) / parameter.step for at, parameter in enumerate(PARAMETERS)
            ]
            slopes[run.run_id, index] = np.stack(columns, axis=1)
    return Slopes(slopes)


def setting_of(place: Path, name: str, run: MeasuredRun, values: Floats) -> str:
    """The override that gives a run its shipped engine with these values."""
    path = place / f"{name}.toml"
    engine = shipped(run)
    path.write_text(engine_text(with_values(engine.model, values), engine.label), encoding="utf-8")
    return f"engine.learned={path}"


# --- what runs say -------------------------------------------------------------------------------
def evidence_of(rows: Sequence[Row], slopes: Slopes) -> dict[str, RunEvidence]:
    """Each run's stages that are fitted to."""
    found: dict[str, list[tuple[Row, int]]] = {}
    counts: dict[str, int] = {}
    for row in rows:
        index = counts.get(row.run_id, 0)
        counts[row.run_id] = index + 1
        if row.regime in _FITTED and not row.emulated_overloaded:
            found.setdefault(row.run_id, []).append((row, index))
    return {name: _evidence(stages, slopes) for name, stages in found.items()}


def _evidence(stages: Sequence[tuple[Row, int]], slopes: Slopes) -> RunEvidence:
    residuals, steep, metrics = [], [], []
    for row, index in stages:
        for number, metric in enumerate(METRICS):
            emulated, measured = getattr(row.emulated, metric), getattr(row.measured, metric)
            residuals.append(np.log(measured / emulated))
            steep.append(slopes.of[row.run_id, index][SHOWN.index(metric)])
            metrics.append(number)
    return RunEvidence(np.array(residuals), np.stack(steep), np.array(metrics))


def guess(
    runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence], gpu: str, model: str
) -> Guess:
    """What these runs say of another run of a model on a GPU.

    Of a model that is not among them only as much of the shift is taken as carries over between
    their models; the rest widens the spread. A GPU with too few runs gets a generic guess: no
    shift, and a spread as wide as the shift and the spread of the GPU with most runs.
    """
    groups = _by_gpu(runs, evidence)
    if not groups:
        raise InputError("fidelity", None, "--learn", f"needs {_RUNS_MIN} runs on one GPU")
    mine = groups.get(gpu)
    if mine is None:
        return generic(_population(max(groups.values(), key=len), evidence))
    if any(run.model == model for run in mine):
        return _guess(_population(mine, evidence))
    return other(mine, evidence)


def _guess(found: Population) -> Guess:
    return Guess(found.shift, found.covariance, found.noise)


def generic(found: Population) -> Guess:
    """The shift for a GPU that was not measured."""
    return Guess(np.zeros(len(NAMES)), np.diag(found.spread**2 + found.shift**2), found.noise)


def other(runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence]) -> Guess:
    """The shift for a model that was not measured on a GPU where others were."""
    found = _population(runs, evidence)
    part = carried_part(runs, evidence)
    rest = (1 - part) * found.shift
    return Guess(part * found.shift, found.covariance + np.outer(rest, rest), found.noise)


def carried_part(runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence]) -> float:
    """The part of a shift that helps models which it was not found with, by leaving each out.

    0 if no part of it does, or there is but one model.
    """
    models = list(dict.fromkeys(run.model for run in runs))
    if len(models) < 2:
        return 0.0
    shifts = {
        model: _population([run for run in runs if run.model != model], evidence)
        for model in models
    }
    off = {}
    for part in _PARTS:
        each = []
        for model, found in shifts.items():
            mine = [evidence[run.run_id] for run in runs if run.model == model]
            each.append(
                statistics.fmean(
                    float(
                        np.mean(
                            np.abs(e.residuals - part * e.slopes @ found.shift)
                            / found.noise[e.metrics]
                        )
                    )
                    for e in mine
                )
            )
        off[part] = statistics.fmean(each)
    return min(_PARTS, key=lambda part: off[part])


def _population(runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence]) -> Population:
    return population([evidence[run.run_id] for run in runs])


def _by_gpu(
    runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence]
) -> dict[str, list[MeasuredRun]]:
    """Runs that say something, of GPUs that have enough of them."""
    groups: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        if run.run_id in evidence:
            groups.setdefault(run.gpu, []).append(run)
    return {gpu: those for gpu, those in groups.items() if len(those) >= _RUNS_MIN}


def prior_text(runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence]) -> str:
    """The file of priors (emu/latency/prior.toml)."""
    groups = _by_gpu(runs, evidence)
    if not groups:
        raise InputError("fidelity", None, "--prior", f"needs {_RUNS_MIN} runs on one GPU")
    largest = _population(max(groups.values(), key=len), evidence)
    lines = [
        "# How measured runs differ from the shipped engine (`emu fidelity DIR --prior FILE`).",
        f"runs = {len(evidence)}\n",
        posterior_text(_posterior(generic(largest)), "generic"),
    ]
    for gpu, those in groups.items():
        models = json.dumps(sorted({run.model for run in those}))
        lines.append(f'[[gpus]]\ngpu = "{gpu}"\nruns = {len(those)}\nmodels = {models}\n')
        found = _posterior(_guess(_population(those, evidence)))
        lines.append(posterior_text(found, "gpus.posterior"))
        lines.append(posterior_text(_posterior(other(those, evidence)), "gpus.other"))
    return "\n".join(lines)


def _posterior(found: Guess) -> Posterior:
    noise = {metric: float(found.noise[index]) for index, metric in enumerate(METRICS)}
    return Posterior(list(NAMES), found.shift.tolist(), found.covariance.tolist(), noise)


# --- experiments ---------------------------------------------------------------------------------
def first_stage(
    runs: Sequence[MeasuredRun],
    rows: Sequence[Row],
    slopes: Slopes,
    processes: int,
    told: Callable[[str], None],
) -> list[Stage]:
    """Second stages, predicted by what their runs' first stages have taught."""
    evidence = evidence_of(rows, slopes)
    by_run = _rows_by_run(rows)
    chosen = [
        run
        for run in runs
        if len(run.stages) > 1
        and run.stages[0].regime in _FITTED
        and run.stages[1].is_compared
        and not by_run[run.run_id][0].emulated_overloaded
    ]
    guesses = {
        run.run_id: guess([r for r in runs if r.run_id != run.run_id], evidence, run.gpu, run.model)
        for run in chosen
    }
    places = {run.run_id: values_of(shipped(run).model) for run in chosen}
    now = by_run
    for number in (1, 2):
        told(f"first stage: estimate {number} of 2")
        for run in chosen:
            here, found = places[run.run_id], guesses[run.run_id]
            mine = _evidence([(now[run.run_id][0], 0)], slopes)
            places[run.run_id] = most_probable(
                mine.residuals,
                noise_factor(1) * found.noise[mine.metrics],
                mine.slopes,
                here,
                values_of(shipped(run).model) + found.shift,
                found.covariance,
            ).values
        now = _rows_by_run(emulated(chosen, places, processes))
    return [_stage(by_run[run.run_id][1], now[run.run_id][1]) for run in chosen]


def half(
    runs: Sequence[MeasuredRun],
    rows: Sequence[Row],
    slopes: Slopes,
    processes: int,
    told: Callable[[str], None],
) -> list[Stage]:
    """Stages of each half of the models, with the shift that the other half shows on their GPU."""
    evidence = evidence_of(rows, slopes)
    models = sorted({run.model for run in runs})
    by_run = _rows_by_run(rows)
    places: dict[str, Floats] = {}
    chosen = []
    for side in (0, 1):
        told(f"half of the models, {side + 1} of 2")
        teachers = [run for run in runs if run.model in models[side::2]]
        if not _by_gpu(teachers, evidence):
            continue
        for run in runs:
            if run.model not in models[side::2]:
                found = guess(teachers, evidence, run.gpu, run.model)
                places[run.run_id] = values_of(shipped(run).model) + found.shift
                chosen.append(run)
    if not chosen:
        problem = f"no half of the models has {_RUNS_MIN} runs on one GPU"
        raise InputError("fidelity", None, "--learn", problem)
    moved = [run for run in chosen if (places[run.run_id] != values_of(shipped(run).model)).any()]
    now = {**by_run, **_rows_by_run(emulated(moved, places, processes))}
    return [
        _stage(before, after)
        for run in chosen
        for before, after in zip(by_run[run.run_id], now[run.run_id], strict=True)
        if before.is_compared
    ]


def coverage(runs: Sequence[MeasuredRun], rows: Sequence[Row], slopes: Slopes) -> list[Interval]:
    """90 % intervals of all stage means that were not overloaded, with the run left out."""
    evidence = evidence_of(rows, slopes)
    by_run = _rows_by_run(rows)
    intervals = []
    for run in runs:
        found = guess([r for r in runs if r.run_id != run.run_id], evidence, run.gpu, run.model)
        for index, row in enumerate(by_run[run.run_id]):
            if not row.is_compared:
                continue
            steep = slopes.of[run.run_id, index]
            middle = steep @ found.shift
            own = np.einsum("ij,jk,ik->i", steep, found.covariance, steep)
            for at, metric in enumerate(SHOWN):
                left = found.noise[0 if metric == "ttft" else 1]
                wide = _Z90 * float(np.sqrt(own[at] + left**2))
                ratio = getattr(row.measured, metric) / getattr(row.emulated, metric)
                low, high = np.exp(middle[at] - wide), np.exp(middle[at] + wide)
                intervals.append(
                    Interval(run.run_id, row.stage, metric, ratio, float(low), float(high))
                )
    return intervals


def emulated(
    runs: Sequence[MeasuredRun], places: Mapping[str, Floats], processes: int
) -> list[Row]:
    """The runs with these values of their constants, one seed."""
    with tempfile.TemporaryDirectory(prefix="emu-fit-") as name:
        tasks = [
            Task(run, 1, (setting_of(Path(name), run.run_id, run, places[run.run_id]),))
            for run in runs
        ]
        return rows_of(runs, list(answers(tasks, processes)))


def _rows_by_run(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.run_id, []).append(row)
    return found


def _stage(before: Row, after: Row) -> Stage:
    return Stage(
        before.run_id,
        before.stage,
        before.gpu,
        before.model,
        {metric: before.error(metric) for metric in SHOWN},
        {metric: after.error(metric) for metric in SHOWN},
    )


class Comparison(msgspec.Struct, frozen=True):
    """Stages with the shipped and the learned engine, in figures; errors in per cent."""

    stages: int
    median_default: dict[str, float]
    median_learned: dict[str, float]
    better: dict[str, int]
    worse_by_a_point: dict[str, list[str]]


def compared(stages: Sequence[Stage]) -> Comparison:
    """Medians of |error|, and where learning helped or harmed."""

    def median(kind: str, metric: str) -> float:
        return float(statistics.median(abs(getattr(stage, kind)[metric]) for stage in stages))

    return Comparison(
        len(stages),
        {metric: median("default", metric) for metric in SHOWN},
        {metric: median("learned", metric) for metric in SHOWN},
        {m: sum(abs(s.learned[m]) < abs(s.default[m]) for s in stages) for m in SHOWN},
        {
            m: [
                f"{s.run_id} {s.stage}" for s in stages if abs(s.learned[m]) > 1 + abs(s.default[m])
            ]
            for m in SHOWN
        },
    )


class Covered(msgspec.Struct, frozen=True):
    """Coverage of intervals by metric."""

    stages: int
    inside_percent: dict[str, float]
    median_width_percent: dict[str, float]


def covered(intervals: Sequence[Interval]) -> Covered:
    """How many intervals hold, and how wide they are."""
    mine = {metric: [i for i in intervals if i.metric == metric] for metric in SHOWN}
    return Covered(
        len(mine[SHOWN[0]]),
        {m: 100 * sum(i.holds for i in those) / len(those) for m, those in mine.items()},
        {m: statistics.median(100 * (i.high - i.low) for i in those) for m, those in mine.items()},
    )
