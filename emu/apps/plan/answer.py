"""The search over all layouts with the emulator: the ranked clusters, intervals, headroom.

    answer = find_cluster(question, Path("runs/plan"), options)
    answer.rows[0]              # the cheapest cluster that meets all objectives with every seed

Runs go through the store and the pool of sweeps: an interrupted plan goes on where it was, and
the answer does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.apps.plan.intervals import intervals_of
from emu.apps.plan.layouts import Candidate, Layout, layouts_of
from emu.apps.plan.question import Question
from emu.apps.plan.scaled import NOT_SCALED
from emu.apps.plan.tables import (
    base_config,
    checked_config,
    checked_tables,
    model_of,
    prompts_of,
    set_rate,
    traffic_at,
    types_told,
)
from emu.apps.plan.traffic import SOURCE
from emu.apps.plan.trials import Trials, search_all, search_scaled
from emu.apps.shared.answer import Watch
from emu.apps.shared.bisection import Bisection
from emu.apps.shared.points import Base, Driver, Row, meets, point_pool, point_store, with_seeds
from emu.config.load import config_from_dict
from emu.config.names import toml_text
from emu.errors import InputError, RunError
from emu.options.shared import Workers
from emu.report.atomic import write_text
from emu.report.intervals import mean_of
from emu.workload.opened import open_workload

HEADROOM_MAX: Final = 4.0
HEADROOM_TOLERANCE: Final = 0.05


class Reading(msgspec.Struct, frozen=True):
    """A figure: its mean over seeds and 95 % interval.

    Of one seed, the best cluster's interval comes from a bootstrap over blocks of requests, and
    the others have none.
    """

    label: str
    limit_ms: float
    mean_ms: float
    low_ms: float | None
    high_ms: float | None


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that meets the objectives. `prefill` and `decode` count replicas."""

    label: str
    gpu: str
    gpus: int
    cost_per_h: float
    """Number of GPUs where they have no price."""
    mode: str
    tensor_parallel: int
    pipeline_parallel: int
    dtype: str
    limits: dict[str, int]
    """Keys of [scheduler] that were tried and chosen."""
    prefill: int
    decode: int
    replicas: int
    """With autoscaling: at most."""
    system: str
    """Preset of [autoscale]; empty: the cluster does not scale."""
    bounds: dict[str, int]
    """Keys of [autoscale]."""
    gpus_mean: float
    """GPU time divided by the time of the run; `gpus` where the cluster does not scale."""
    worst: float
    """Largest figure / limit of any objective and seed; 1 = at the limit."""
    readings: list[Reading]


class Headroom(msgspec.Struct, frozen=True):
    """How much more traffic the best cluster takes."""

    factor: float
    """Of the rate; objectives are met up to it."""
    breaks_at: float | None
    """The nearest factor tried that does not meet; None: none up to HEADROOM_MAX."""
    breaks: list[str]
    """Which objectives fail there."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `rows` has the cheapest cluster first, then the best of each other layout."""

    model: str
    weights: str
    """Types of its weights and KV cache, in words."""
    engine: str
    """Name and version in one word."""
    rate_per_s: float
    objectives: list[str]
    has_prices: bool
    rows: list[Ranked]
    headroom: Headroom
    refused: dict[str, str]
    """Layout -> why it cannot run, or that nothing as cheap as the best meets."""
    runs: int
    config: dict[str, Any]
    """The best cluster as a configuration."""


def find_cluster(
    question: Question, directory: Path, workers: Workers, watch: Watch | None = None
) -> Answer:
    """Search. Raises InputError; RunError if no cluster meets; writes the store alone."""
    plain = base_config(question)
    config = checked_config(plain, question.settings)
    spec = model_of(question)
    workload = open_workload(
        config.workload, base_dir=Path(), seed=question.seeds[0], config_source=SOURCE
    )
    rate = set_rate(plain, question, workload)
    layouts, refused = layouts_of(
        question,
        spec,
        prompts_of(workload, question, rate),
        is_roofline=config.latency.backend == "roofline",
        utilization=config.scheduler.gpu_memory_utilization,
    )
    if not layouts:
        raise InputError(SOURCE, None, "--gpu", f"no layout can run: {': '.join(refused[0])}")
    store = point_store(directory)
    write_text(directory / "base.toml", toml_text(plain))
    with point_pool(workers.jobs, workers.ray) as pool:
        driver = Driver(Base(directory / "base.toml"), question.settings, store, pool, "")
        if watch is not None:
            driver.watch = watch
        trials = Trials(driver, question)
        search_all(trials, layouts, question)
        search_scaled(trials, question)
        rows, best = _ranked(trials, question)
        for layout in layouts:
            if not any(row_layout == layout for row_layout in trials.layouts_met):
                refused.append((layout.label, trials.reason(layout)))
        refused += trials.not_scaled
        if best is None:
            raise _no_cluster(trials, question)
        headroom = _headroom(driver, question, best, plain, rate)
    tables = checked_tables(plain, question, best)
    if len(question.seeds) == 1:
        bounds = intervals_of(tables, question.objectives, question.seeds[0])
        rows[0] = msgspec.structs.replace(
            rows[0],
            readings=[
                msgspec.structs.replace(reading, low_ms=low, high_ms=high)
                for reading, (low, high) in zip(rows[0].readings, bounds, strict=True)
            ],
        )
    return Answer(
        model=spec.name,
        weights=types_told(spec, tables),
        engine=config_from_dict(dict(tables)).engine.label,
        rate_per_s=rate,
        objectives=[f"{o.label} <= {o.limit_ms:g} ms" for o in question.objectives],
        has_prices=question.has_prices,
        rows=rows,
        headroom=headroom,
        refused=dict(refused),
        runs=driver.known,
        config=tables,
    )


def _ranked(trials: Trials, question: Question) -> tuple[list[Ranked], Candidate | None]:
    """The best cluster of each layout, cheapest first; ties by the distance to the limits."""
    rows = {
        one: _row(trials.rows[one], one, question, trials.gpus_mean(one))
        for one in trials.met
        if one.scaling is not None or NOT_SCALED in question.systems
    }
    order = sorted(rows, key=lambda one: (rows[one].cost_per_h, rows[one].worst, one.label))
    shown: dict[tuple[Layout, str], Candidate] = {}
    for candidate in order:
        shown.setdefault((candidate.layout, rows[candidate].system), candidate)
    best = order[0] if order else None
    return [rows[one] for one in shown.values()], best


def _row(rows: Sequence[Row], candidate: Candidate, question: Question, gpus_mean: float) -> Ranked:
    readings = []
    worst = 0.0
    for objective in question.objectives:
        values = [float(row.result.figures[objective.figure]) for row in rows]
        mean = mean_of(values)
        half = mean.half
        readings.append(
            Reading(
                objective.label,
                objective.limit_ms,
                mean.mean,
                None if half is None else max(0.0, mean.mean - half),
                None if half is None else mean.mean + half,
            )
        )
        worst = max(worst, *(value / objective.limit_ms for value in values))
    layout = candidate.layout
    return Ranked(
        label=candidate.label,
        gpu=layout.gpu.name,
        gpus=candidate.gpus,
        cost_per_h=gpus_mean * layout.gpu.price,
        mode=layout.mode,
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
        dtype=layout.dtype,
        limits=layout.limits,
        prefill=candidate.prefill if candidate.decode else 0,
        decode=candidate.decode,
        replicas=candidate.replicas,
        system=candidate.scaling.system if candidate.scaling else "",
        bounds=candidate.bounds,
        gpus_mean=gpus_mean,
        worst=worst,
        readings=readings,
    )


def _no_cluster(trials: Trials, question: Question) -> Exception:
    """The error that names the nearest try, or the configuration's mistake."""
    first = [rows[0].result for rows in trials.rows.values()]
    invalid = [result for result in first if result.status == "invalid"]
    if invalid and len(invalid) == len(trials.rows):
        return InputError(SOURCE, None, "", invalid[0].error)
    tried = [
        (candidate, _row(rows, candidate, question, candidate.gpus).worst)
        for candidate, rows in trials.rows.items()
        if trials.is_allowed(candidate) and all(row.result.status == "completed" for row in rows)
    ]
    problem = f"no cluster of up to {question.gpus_max} GPUs meets the objectives"
    if tried:
        nearest, worst = min(tried, key=lambda pair: (pair[1], pair[0].cost, pair[0].label))
        problem += f"; the nearest, {nearest.label}, is at {worst:.2f} x of a limit"
    return RunError(problem)


def _headroom(
    driver: Driver, question: Question, best: Candidate, plain: dict[str, Any], rate: float
) -> Headroom:
    """Bisection on the rate of the best cluster, up to HEADROOM_MAX times."""
    conditions = [objective.condition for objective in question.objectives]
    cluster = best.values(question.gpus_per_node)
    if best.scaling is not None:
        cluster |= question.scaling
    search = Bisection(
        low=1.0,
        high=HEADROOM_MAX,
        goal="highest",
        integer=False,
        tolerance=HEADROOM_TOLERANCE,
        points_per_round=1,
    )
    rows: dict[float, list[Row]] = {}
    while factors := search.ask():
        values = [cluster | traffic_at(factor, plain, rate) for factor in factors]
        told = driver.rows(with_seeds(values, question.seeds))
        each = len(question.seeds)
        for index, factor in enumerate(factors):
            rows[factor] = told[index * each : (index + 1) * each]
        search.tell(
            {f: all(meets(row.result, conditions, 0.0) for row in rows[f]) for f in factors}
        )
    broken = search.bracket[1] if search.bracket else None
    labels = [] if broken is None else _broken(rows[broken], question)
    return Headroom(search.answer or 1.0, broken, labels)


def _broken(rows: Sequence[Row], question: Question) -> list[str]:
    """Objectives that some seed misses; or that requests were not served."""
    labels = [
        objective.label
        for objective in question.objectives
        if not all(objective.condition.holds(row.result.figures) for row in rows)
    ]
    return labels or ["requests served"]
