"""The search over all layouts with the emulator: the ranked clusters, intervals, headroom.

    answer = find_cluster(question, Path("runs/plan"), jobs=2)
    answer.rows[0]              # the cheapest cluster that meets all objectives with every seed

Runs go through the store and the pool of sweeps: an interrupted plan goes on where it was, and
the answer does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from emu.api import override_texts, run
from emu.apps.plan.question import (
    NOT_SCALED,
    SOURCE,
    SPAN,
    Candidate,
    Layout,
    Objective,
    Prompts,
    Question,
    layouts_of,
    scaled,
)
from emu.apps.sweeps.drive import (
    Base,
    Bisection,
    Driver,
    Row,
    meets,
    point_pool,
    point_store,
    with_seeds,
)
from emu.catalogue import sizes
from emu.catalogue.checkpoints import check_dtype
from emu.catalogue.lookup import lookup_model, model_from_file
from emu.catalogue.model import ModelSpec
from emu.config.load import config_from_dict
from emu.config.names import toml_text
from emu.config.schema import Config
from emu.errors import InputError, RunError
from emu.process.exits import scratch
from emu.report.atomic import write_text
from emu.report.drawn import mean_of
from emu.rng import rng_stream
from emu.units import NS_PER_MS, NS_PER_S
from emu.workload.opened import Workload, open_workload

# --- the search over one layout: a generator that is told how its candidates do. Pure -------------
#     search = search_of(layout, limit)
#     asked = next(search)
#     asked = search.send([worst(candidate) for candidate in asked])     # until StopIteration
#
# `worst` is the largest figure / limit of a run: up to 1 it meets. The search takes the objectives
# to be monotone: a cluster that meets them still does with a replica more of either role. Then a
# number of colocated replicas is found by bisection; and what fails with as many replicas of one
# role as the limit allows gives the least number of the other. `limit()` is the largest number of
# replicas that could still be as cheap as the best cluster known; it may fall between two steps.
# Clusters at the limit itself are tried, so that ties are found.
#
# More prefill replicas send requests to decode in denser bursts, so that TPOT may rise a little
# with them: a bound on a role counts only where its run misses by SLACK.

Search = Generator[list[Candidate], list[float], None]
Limit = Callable[[], int]
SLACK: Final = 1.1
"""A split is ruled out by a run that misses a limit by more than this factor."""


def search_of(layout: Layout, limit: Limit, *, is_bounded: bool) -> Search:
    """The search over a layout; `is_bounded`: some cluster is known, the limit is near."""
    if layout.mode == "colocated":
        return _colocated(layout, limit, is_bounded=is_bounded)
    return _splits(layout, limit)


def _colocated(layout: Layout, limit: Limit, *, is_bounded: bool) -> Search:
    """Doubling until the objectives are met, then bisection."""
    low = layout.replicas_min - 1
    """No number up to this meets."""
    high = 0
    """Meets; 0 = none known."""
    tried = limit() if is_bounded else layout.replicas_min
    while not high:
        tried = min(tried, limit())
        if tried <= low:
            return
        if (yield [Candidate(layout, tried, 0)])[0] <= 1:
            high = tried
        else:
            low, tried = tried, 2 * tried
    while high - low > 1:
        middle = (low + high) // 2
        if (yield [Candidate(layout, middle, 0)])[0] <= 1:
            high = middle
        else:
            low = middle


def _splits(layout: Layout, limit: Limit) -> Search:
    """Least number of each role, then totals from their sum upwards until one split meets."""
    most = limit() - 1
    """Of one role."""
    least_prefill = layout.replicas_min
    if most < least_prefill:
        return
    if (yield [Candidate(layout, most, most)])[0] > SLACK:
        return
    prefill, decode = [least_prefill - 1, most], [0, most]
    while prefill[1] - prefill[0] > 1 or decode[1] - decode[0] > 1:
        brackets = [b for b in (prefill, decode) if b[1] - b[0] > 1]
        middles = [sum(bracket) // 2 for bracket in brackets]
        asked = [
            Candidate(layout, *((middle, most) if bracket is prefill else (most, middle)))
            for bracket, middle in zip(brackets, middles, strict=True)
        ]
        told = yield asked
        for bracket, middle, worst in zip(brackets, middles, told, strict=True):
            bracket[1 if worst <= SLACK else 0] = middle
    total = prefill[1] + decode[1]
    while total <= limit():
        splits = range(prefill[1], total - decode[1] + 1)
        told = yield [Candidate(layout, count, total - count) for count in splits]
        if min(told, default=SLACK) <= 1:
            return
        total += 1


# --------------------------------------------------------------------------------------------------
# Intervals of a single run's percentiles: a bootstrap over blocks of requests.
#
# A trace is the same with every seed, so seeds say nothing about how far its figures may be chance.
# Requests close to each other share queues; blocks of consecutive arrivals keep that.

BLOCKS: Final = 40
RESAMPLES: Final = 400
_COLUMNS: Final = {"ttft": "ttft_ns", "tpot": "tpot_ns", "e2e": "latency_ns"}


def intervals_of(
    tables: dict[str, Any], objectives: Sequence[Objective], seed: int
) -> list[tuple[float, float]]:
    """95 % intervals (low, high) in ms of the objectives' percentiles in one run."""
    with scratch("emu-plan-") as directory:
        requests = run(tables, output=Path(directory) / "run", report=False).requests
        order = np.argsort(requests["arrival_ns"], kind="stable")
        found = []
        for objective in objectives:
            values = requests[_COLUMNS[objective.metric]][order]
            found.append(
                block_interval(values[values >= 0] / NS_PER_MS, int(objective.at[1:]), seed)
            )
    return found


def block_interval(
    values: npt.NDArray[np.float64], percentile: int, seed: int
) -> tuple[float, float]:
    """95 % interval of a percentile of values in order of arrival."""
    blocks = np.array_split(values, min(BLOCKS, len(values)))
    rng = rng_stream(seed, "plan.bootstrap")
    drawn = [
        np.percentile(
            np.concatenate([blocks[index] for index in rng.integers(0, len(blocks), len(blocks))]),
            percentile,
        )
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


# --- all layouts ----------------------------------------------------------------------------------
LAYOUTS_AT_ONCE: Final = 4
"""Searches that go on at the same time. Fixed: the rows do not depend on the workers."""
HEADROOM_MAX: Final = 4.0
HEADROOM_TOLERANCE: Final = 0.05
_EPSILON: Final = 1e-9
NOT_AS_CHEAP: Final = "no cluster as cheap as the best meets the objectives"

Watch = Callable[[int, int, str], None]


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
    question: Question,
    directory: Path,
    *,
    jobs: int = 0,
    ray: str | None = None,
    watch: Watch | None = None,
) -> Answer:
    """Search. Raises InputError; RunError if no cluster meets; writes the store alone."""
    plain = base_config(question)
    config = _checked(plain, question.settings)
    spec = _model(question)
    workload = open_workload(
        config.workload, base_dir=Path(), seed=question.seeds[0], config_source=SOURCE
    )
    rate = _set_rate(plain, question, workload)
    layouts, refused = layouts_of(
        question,
        spec,
        _prompts(workload, question, rate),
        is_roofline=config.latency.backend == "roofline",
        utilization=config.scheduler.gpu_memory_utilization,
    )
    if not layouts:
        raise InputError(SOURCE, None, "--gpu", f"no layout can run: {': '.join(refused[0])}")
    store = point_store(directory)
    write_text(directory / "base.toml", toml_text(plain))
    with point_pool(jobs, ray) as pool:
        driver = Driver(Base(directory / "base.toml"), question.settings, store, pool, "")
        if watch is not None:
            driver.watch = watch
        trials = _Trials(driver, question)
        _search_all(trials, layouts, question)
        _search_scaled(trials, question)
        rows, best = _ranked(trials, question)
        for layout in layouts:
            if not any(row_layout == layout for row_layout in trials.layouts_met):
                refused.append((layout.label, trials.reason(layout)))
        refused += trials.not_scaled
        if best is None:
            raise _no_cluster(trials, question)
        headroom = _headroom(driver, question, best, plain, rate)
    tables = _checked_tables(plain, question, best)
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
        weights=_types_told(spec, tables),
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


def base_config(question: Question) -> dict[str, Any]:
    """The configuration that all candidates start from: a smallest cluster."""
    model: dict[str, Any] = {"name": question.model} if question.model else {}
    if question.hf_config:
        model["hf_config"] = str(Path(question.hf_config).resolve())
        model.setdefault("name", _model(question).name)
    workload = dict(question.workload)
    if workload.get("path"):
        workload["path"] = str(Path(workload["path"]).resolve())
    gpu = question.gpus[0]
    node: dict[str, Any] = {"gpu": gpu.name, "gpus": question.gpus_per_node}
    if question.has_prices:
        node["hourly_price"] = gpu.price
    return {
        "seed": question.seeds[0],
        "model": model,
        "nodes": [node],
        "replicas": [{"count": 1}],
        "workload": workload,
        "output": {"dir": "run"},
    }


def _checked(plain: dict[str, Any], settings: Mapping[str, Any]) -> Config:
    return config_from_dict(plain, override_texts(settings), SOURCE)


def _types_told(spec: ModelSpec, tables: Mapping[str, Any]) -> str:
    """`weights fp8_block, KV bfloat16` of a configuration."""
    table = config_from_dict(dict(tables)).model
    kv = sizes.kv_dtype(spec, table.dtype, table.kv_cache_dtype)
    return f"weights {sizes.weights_told(spec, table.dtype)}, KV {kv}"


def _model(question: Question) -> ModelSpec:
    if question.hf_config:
        return model_from_file(Path(question.hf_config), question.model, "")
    spec = lookup_model(question.model, SOURCE, "--model")
    for dtype in question.dtypes:
        check_dtype(spec, dtype, SOURCE, "--dtype")
    return spec


def _set_rate(plain: dict[str, Any], question: Question, workload: Workload) -> float:
    """Stretch a trace to the rate that was asked for; the rate, requests per second."""
    span_s = (workload.last_arrival_ns - workload.first_arrival_ns) / NS_PER_S
    own = (workload.count - 1) / span_s if span_s > 0 else 0.0
    if "path" not in question.workload:
        return question.rate_per_s
    if not question.rate_per_s:
        if not own:
            raise InputError(SOURCE, None, "--rate", "the workload has no rate of its own")
        return own
    if not own:
        raise InputError(
            SOURCE, None, "--workload", "all requests arrive at once: no rate to scale"
        )
    plain["workload"]["time_scale"] = own / question.rate_per_s
    return question.rate_per_s


def _prompts(workload: Workload, question: Question, rate: float) -> Prompts:
    """What the bound on throughput needs; sessions stretch the span, so they have no bound."""
    lengths = [block.prompt_tokens for block, _ in workload.blocks()]
    tokens = np.sort(np.concatenate(lengths)) if lengths else np.zeros(0, dtype=np.int64)
    is_plain = not workload.has_prefixes and len(tokens) == workload.count
    span_s = (workload.last_arrival_ns - workload.first_arrival_ns) / NS_PER_S
    if "path" in question.workload:
        span_s = (workload.count - 1) / rate
    return Prompts(tokens, span_s, not is_plain)


class _Trials:
    """Candidates and what came of them, over all seeds."""

    def __init__(self, driver: Driver, question: Question) -> None:
        self._driver = driver
        self._question = question
        self._conditions = [objective.condition for objective in question.objectives]
        self.rows: dict[Candidate, list[Row]] = {}
        self.best_cost = float("inf")
        self.not_scaled: list[tuple[str, str]] = []
        """Layouts that were tried with autoscaling in vain, and why."""

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Run what has not been run, all of it together."""
        new = [one for one in dict.fromkeys(candidates) if one not in self.rows]
        seeds = self._question.seeds
        values = [
            one.values(self._question.gpus_per_node)
            | (self._question.scaling if one.scaling is not None else {})
            for one in new
        ]
        rows = self._driver.rows(with_seeds(values, seeds))
        for index, candidate in enumerate(new):
            mine = rows[index * len(seeds) : (index + 1) * len(seeds)]
            self.rows[candidate] = mine
            if self.is_met(candidate) and self.is_allowed(candidate):
                self.best_cost = min(self.best_cost, self.cost(candidate))

    def cost(self, candidate: Candidate) -> float:
        """Per hour: of its GPUs, or of the GPU time that it took."""
        if candidate.scaling is None:
            return candidate.cost
        return self.gpus_mean(candidate) * candidate.layout.gpu.price

    def gpus_mean(self, candidate: Candidate) -> float:
        """GPUs that it had over the time of its run, mean over seeds."""
        if candidate.scaling is None:
            return float(candidate.gpus)
        figures = [row.result.figures for row in self.rows[candidate]]
        return mean_of([one["gpu_seconds.total"] / one["duration"] for one in figures]).mean

    def is_met(self, candidate: Candidate) -> bool:
        """Whether every seed meets all objectives and serves every request."""
        return all(meets(row.result, self._conditions, 0.0) for row in self.rows[candidate])

    def worst(self, candidate: Candidate) -> float:
        """Largest figure / limit over objectives and seeds; infinite if not all was served."""
        rows = self.rows[candidate]
        if not all(meets(row.result, [], 0.0) for row in rows):
            return float("inf")
        return max(
            float(row.result.figures[objective.figure] or 0.0) / objective.limit_ms
            for objective in self._question.objectives
            for row in rows
        )

    def is_allowed(self, candidate: Candidate) -> bool:
        """Whether there are so many GPUs (the search also asks about more)."""
        most = candidate.layout.gpu.count_max or self._question.gpus_max
        return candidate.gpus <= min(most, self._question.gpus_max)

    @property
    def met(self) -> list[Candidate]:
        """Candidates that meet and may be built."""
        return [one for one in self.rows if self.is_allowed(one) and self.is_met(one)]

    @property
    def layouts_met(self) -> list[Layout]:
        """Layouts of which a cluster meets."""
        return [one.layout for one in self.met]

    def limit(self, layout: Layout) -> int:
        """Most replicas of a layout: so many GPUs there are, at no more than the best's cost."""
        most = min(layout.gpu.count_max or self._question.gpus_max, self._question.gpus_max)
        replicas = most // layout.replica_gpus
        if self.best_cost < float("inf"):
            span = 1.0 if self._question.systems == (NOT_SCALED,) else SPAN
            replicas = min(replicas, int(span * self.best_cost / layout.price * (1 + _EPSILON)))
        return replicas

    def reason(self, layout: Layout) -> str:
        """Why no cluster of a layout stands among the answers."""
        for candidate, rows in self.rows.items():
            if candidate.layout == layout and rows[0].result.error:
                return rows[0].result.error
        return NOT_AS_CHEAP


def _search_all(trials: _Trials, layouts: Sequence[Layout], question: Question) -> None:
    """Every layout, a few at a time, in order; the best so far bounds those that follow."""
    waiting = list(layouts)
    while waiting:
        modes = [layout.mode for layout in waiting]
        # Splits begin when all colocated layouts are done: their limit is then known.
        width = min(LAYOUTS_AT_ONCE, modes.count(modes[0]))
        now, waiting = waiting[:width], waiting[width:]
        active: list[tuple[Search, list[Candidate]]] = []
        for layout in now:
            search = search_of(
                layout,
                lambda layout=layout: trials.limit(layout),  # type: ignore[misc]
                is_bounded=trials.best_cost < float("inf"),
            )
            _advance(search, None, active)
        while active:
            trials.run([candidate for _, asked in active for candidate in asked])
            running, active = active, []
            for search, asked in running:
                _advance(search, [trials.worst(one) for one in asked], active)


def _advance(
    search: Search, told: list[float] | None, active: list[tuple[Search, list[Candidate]]]
) -> None:
    """Take a search one step on, and keep it if it asks for more."""
    try:
        asked = next(search) if told is None else search.send(told)
    except StopIteration:
        return
    active.append((search, asked))


def _search_scaled(trials: _Trials, question: Question) -> None:
    """Clusters that scale, from the cheapest static one of each layout."""
    cheapest: dict[Layout, Candidate] = {}
    for one in sorted(trials.met, key=lambda one: (one.cost, one.label)):
        cheapest.setdefault(one.layout, one)
    for static in cheapest.values():
        layout = static.layout
        most = min(layout.gpu.count_max or question.gpus_max, question.gpus_max)
        for system in question.systems:
            if system == NOT_SCALED:
                continue
            tried = scaled(static, system, most // layout.replica_gpus)
            tried.sort(key=lambda one: one.cost)
            for low in dict.fromkeys(one.cost for one in tried):
                if low < trials.best_cost:
                    trials.run([one for one in tried if one.cost == low])
            if tried and not any(one in trials.rows and trials.is_met(one) for one in tried):
                label = f"{layout.label} by {system}"
                trials.not_scaled.append((label, NOT_AS_CHEAP))


def _ranked(trials: _Trials, question: Question) -> tuple[list[Ranked], Candidate | None]:
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


def _no_cluster(trials: _Trials, question: Question) -> Exception:
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
        values = [cluster | _traffic_at(factor, plain, rate) for factor in factors]
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


def _traffic_at(factor: float, plain: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """The keys that make the traffic `factor` times as dense; none at 1, the run of the search."""
    if factor == 1.0:
        return {}
    if "path" in plain["workload"]:
        return {"workload.time_scale": plain["workload"].get("time_scale", 1.0) / factor}
    return {"workload.synthetic.arrivals.rate_per_s": rate * factor}


def _broken(rows: Sequence[Row], question: Question) -> list[str]:
    """Objectives that some seed misses; or that requests were not served."""
    labels = [
        objective.label
        for objective in question.objectives
        if not all(objective.condition.holds(row.result.figures) for row in rows)
    ]
    return labels or ["requests served"]


def _checked_tables(plain: dict[str, Any], question: Question, best: Candidate) -> dict[str, Any]:
    """The best cluster as the tables of a configuration, settings included."""
    tables = msgspec.to_builtins(plain)
    values = best.values(question.gpus_per_node)
    node = tables["nodes"][0]
    for key in ("gpu", "gpus", "count"):
        node[key] = values[f"nodes.0.{key}"]
    if question.has_prices:
        node["hourly_price"] = best.layout.gpu.price
    tables["replicas"] = values["replicas"]
    if best.layout.limits:
        tables.setdefault("scheduler", {}).update(best.layout.limits)
    if best.layout.dtype != "auto":
        tables["model"]["dtype"] = best.layout.dtype
    for objective in question.objectives:
        if objective.metric in ("ttft", "tpot", "e2e"):
            tables.setdefault("slo", {})[f"{objective.metric}_ms"] = objective.limit_ms
    if best.scaling is not None:
        tables["autoscale"] = {"preset": best.scaling.system, **best.bounds}
        tables = _with_settings(tables, question.scaling)
    return _with_settings(tables, question.settings)


def _with_settings(tables: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with dotted keys set, as `--set` does."""
    from emu.config.load import apply_override

    for text in override_texts(settings):
        apply_override(tables, text)
    return tables
