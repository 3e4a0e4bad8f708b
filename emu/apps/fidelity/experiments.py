"""What learning is worth: three experiments that leave runs out.

    first stage   learn from the first stage of a run, predict the second; prior without the run
    half          shift found on one half of the models, applied to the others on the same GPU
    coverage      90 % intervals of stage means, prior without the run

Stages near the knee or overloaded are not fitted to, but they are predicted. The intervals are
linearised; predictions are emulated.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.apps.fidelity.board import Row, Task, answers, rows_of
from emu.apps.fidelity.fit import FITTED, SHOWN, shipped
from emu.apps.fidelity.prior import RUNS_MIN, by_gpu, guess
from emu.apps.fidelity.runs import MeasuredRun
from emu.apps.fidelity.slopes import Slopes, evidence_among, evidence_of, setting_of
from emu.apps.shared.posterior import most_probable, noise_factor
from emu.errors import InputError
from emu.latency.posterior import Floats, values_of

_Z90: Final = 1.6449
EXPERIMENTS: Final = ("first-stage", "half", "coverage")


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
        and run.stages[0].regime in FITTED
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
            mine = evidence_among([(now[run.run_id][0], 0)], slopes)
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
        if not by_gpu(teachers, evidence):
            continue
        for run in runs:
            if run.model not in models[side::2]:
                found = guess(teachers, evidence, run.gpu, run.model)
                places[run.run_id] = values_of(shipped(run).model) + found.shift
                chosen.append(run)
    if not chosen:
        problem = f"no half of the models has {RUNS_MIN} runs on one GPU"
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
                ratio = row.measured.of(metric) / row.emulated.of(metric)
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

    def medians(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {m: float(statistics.median(abs(one[m]) for one in errors)) for m in SHOWN}

    return Comparison(
        len(stages),
        medians([stage.default for stage in stages]),
        medians([stage.learned for stage in stages]),
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
