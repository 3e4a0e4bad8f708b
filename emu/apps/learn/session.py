"""A fit from beginning to end: what levels say, the posterior of an engine's constants, a file."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.apps.learn.levels import Level
from emu.config.load import load_config
from emu.engines.registry import engine_text
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.latency.posterior import (
    METRICS,
    NAMES,
    PARAMETERS,
    Floats,
    Known,
    Posterior,
    values_of,
    with_values,
)
from emu.process.exits import scratch
from emu.process.pool import Workers
from emu.process.version import __version__
from emu.report.atomic import write_text
from emu.report.rundata import read_run
from emu.runs.runner import adjust, execute
from emu.units import NS_PER_S

# --- observations: means of groups of requests, with their errors ---------------------------------
# A level is cut into cells, so that long and short prompts, and moments of low and high load, speak
# for themselves: by the part of a probe, else by length of the prompt and by requests in flight at
# arrival. Each cell is two observations, its mean TTFT and its mean TPOT. A level whose starts were
# drawn is one cell: requests cannot be paired. Mean TTFT of an overloaded cell is left out: a queue
# says nothing of a step.

OVERLOADED_S: Final = 2.0
_REQUESTS_MIN: Final = 4
"""Of a cell; parts of a probe are designed and may have fewer."""
_APART: Final = 1.5
"""Prompts differ enough to be cut by length if their quartiles are this many times apart."""


class Times(msgspec.Struct, frozen=True):
    """Seconds of each request, in the order of the workload; NaN where it has none."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats


class Observation(msgspec.Struct, frozen=True):
    """The mean of a metric over some requests."""

    label: str
    level: int
    metric: int
    """Index into `METRICS`."""
    members: NDArray[np.int64]
    error: float
    """Relative standard error of the mean from the spread of its requests."""
    is_high: bool
    """In a level cut in two by load: the upper half."""


def measured_times(levels: Sequence[Level]) -> Times:
    """What the client measured."""
    requests = [request for level in levels for request in level.requests]
    ttft = np.array([r.ttft_s for r in requests])
    e2e = np.array([r.e2e_s for r in requests])
    between = np.array([r.output_tokens - 1 for r in requests], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(between > 0, (e2e - ttft) / between, np.nan)
    return Times(ttft, np.where(tpot > 0, tpot, np.nan), e2e)


def observations_of(levels: Sequence[Level], times: Times) -> list[Observation]:
    """All observations, level by level."""
    found: list[Observation] = []
    begin = 0
    for number, level in enumerate(levels):
        count = len(level.requests)
        least = 1 if level.requests[0].part else min(_REQUESTS_MIN, count)
        for label, chosen, is_high in _cells(level):
            members = begin + np.flatnonzero(chosen)
            for metric, values in enumerate((times.ttft_s, times.tpot_s)):
                mine = members[~np.isnan(values[members])]
                if len(mine) < max(1, least):
                    continue
                kept = values[mine]
                mean = float(kept.mean())
                if METRICS[metric] == "ttft" and mean > OVERLOADED_S:
                    continue
                spread = float(kept.std(ddof=1)) if len(kept) > 1 else 0.0
                error = spread / mean / len(kept) ** 0.5
                name = f"{level.label}{', ' if label else ''}{label}"
                found.append(Observation(name, number, metric, mine, error, is_high))
        begin += count
    return found


def _cells(level: Level) -> list[tuple[str, NDArray[np.bool_], bool]]:
    """(label, members, upper half by load) of each cell of a level."""
    requests = level.requests
    everything = np.ones(len(requests), dtype=bool)
    parts = list(dict.fromkeys(r.part for r in requests))
    if len(parts) > 1:
        return [(p, np.array([r.part == p for r in requests]), False) for p in parts]
    if level.is_drawn or len(requests) < 4 * _REQUESTS_MIN:
        return [("", everything, False)]
    flight = in_flight(level)
    order = np.lexsort((np.arange(len(flight)), flight))
    is_high = np.zeros(len(flight), dtype=bool)
    is_high[order[len(order) // 2 :]] = True
    prompts = np.array([r.prompt_tokens for r in requests])
    low, middle, high = np.quantile(prompts, (0.25, 0.5, 0.75))
    halves = [("low load", ~is_high, False), ("high load", is_high, True)]
    if high < _APART * low:
        return halves
    is_long = prompts > middle
    return [
        (f"{words}, {length} prompts", chosen & which, upper)
        for words, chosen, upper in halves
        for length, which in (("short", ~is_long), ("long", is_long))
    ]


def in_flight(level: Level) -> NDArray[np.int64]:
    """Requests that were being served when each one was sent."""
    starts = np.array([r.start_s for r in level.requests])
    ends = np.sort([r.start_s + r.e2e_s for r in level.requests])
    return np.arange(len(starts)) - np.searchsorted(ends, starts)


def means(observations: Sequence[Observation], times: Times) -> Floats:
    """Logarithm of each observation's mean with these times; NaN if a request has none."""
    columns = (times.ttft_s, times.tpot_s)
    found = []
    for observation in observations:
        values = columns[observation.metric][observation.members]
        kept = values[~np.isnan(values)]
        is_whole = 2 * len(kept) > len(values)
        found.append(np.log(kept.mean()) if is_whole and kept.mean() > 0 else np.nan)
    return np.array(found)


# --------------------------------------------------------------------------------------------------
# Emulations of a measured workload with other constants, in processes of their own.
#
# A process keeps nothing between emulations but its modules: a long session stays as small as one
# run. The caller gets the times of all requests, in the order of the workload.


class Task(msgspec.Struct, frozen=True):
    """One emulation."""

    number: int
    config: str
    overrides: tuple[str, ...]
    engine: EngineModel
    base: str
    """The engine whose constants these are, in one word."""
    requests: int


class Answer(msgspec.Struct, frozen=True):
    """Its times."""

    number: int
    times: Times


def emulate(task: Task) -> Answer:
    """Run a configuration with an engine; what each request took."""
    with scratch("emu-learn-") as place:
        engine = place / "engine.toml"
        engine.write_text(engine_text(task.engine, task.base), encoding="utf-8")
        settings = (*task.overrides, f"engine.learned={engine}", "output.timeseries_interval_ms=0")
        config = adjust(load_config(task.config, settings), seed=None, output=place / "run")
        table = msgspec.structs.replace(config.output, trace=False)
        config = msgspec.structs.replace(config, output=table)
        execute(config, task.config, report=False)
        data = read_run(place / "run")
    gc.collect()
    order = np.argsort(data.requests["request_id"], kind="stable")
    if len(order) != task.requests:
        problem = f"{len(order)} requests ran of {task.requests}"
        raise InputError(task.config, None, "workload", problem)
    done = data.is_completed[order]
    tokens = data.requests["decode_toks"][order]
    ttft = np.where(done, data.requests["ttft_ns"][order] / NS_PER_S, np.nan)
    e2e = np.where(done, data.requests["latency_ns"][order] / NS_PER_S, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(tokens > 1, (e2e - ttft) / (tokens - 1), np.nan)
    return Answer(task.number, Times(ttft, tpot, e2e))


class Emulator:
    """One measured workload, to be emulated again and again."""

    def __init__(
        self,
        config: Path,
        overrides: Sequence[str],
        requests: int,
        base: str,
        processes: int,
        report: Callable[[int, int], None],
    ) -> None:
        """`base`: the engine that is learned, in one word.

        `report` hears (emulations done, emulations begun or to come) of each batch.
        """
        self._config = str(config)
        self._overrides = tuple(overrides)
        self._requests = requests
        self._base = base
        self._report = report
        self._workers = Workers[Task, Answer](
            processes, emulate, lambda task: f"it emulated {task.config}"
        )
        self.runs = 0

    def __enter__(self) -> Emulator:
        self._workers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._workers.__exit__(*error)  # type: ignore[arg-type]

    def times(self, engines: Sequence[EngineModel]) -> list[Times]:
        """Times of each engine, in their order."""
        tasks = [
            Task(number, self._config, self._overrides, engine, self._base, self._requests)
            for number, engine in enumerate(engines)
        ]
        found: dict[int, Times] = {}
        self._report(0, len(tasks))
        for answer in self._answers(tasks):
            found[answer.number] = answer.times
            self.runs += 1
            self._report(len(found), len(tasks))
        return [found[number] for number in range(len(tasks))]

    def _answers(self, tasks: Sequence[Task]) -> Iterator[Answer]:
        yield from self._workers.results(tasks)


# --- the posterior, from linearised emulations. Pure ----------------------------------------------
# What a server did is a list of observations: logarithms of a mean TTFT or TPOT, each with a
# standard error. An emulation with some constants gives the same list, and its change for a change
# of each constant (`slopes`). Unknowns are in units of each parameter's `scale`.
#
# The most probable constants balance the residuals against the prior. Both have heavy tails: an
# observation that is far off counts less (Huber), and if the observations insist that the constants
# lie far from the prior, the prior gives way (Student's t with `_FREEDOM` degrees, in as many
# directions as the observations tell). So small differences at one load are mostly taken for its
# own, and large ones for the server's.

_HUBER: Final = 2.0
_FREEDOM: Final = 1.0
_ONE_LOAD: Final = 2.5
_REWEIGHTINGS: Final = 30
_LEAST: Final = np.array([parameter.least for parameter in PARAMETERS])
_MOST: Final = np.array([parameter.most for parameter in PARAMETERS])
SCALES: Final = np.array([parameter.scale for parameter in PARAMETERS])


class Estimate(msgspec.Struct, frozen=True):
    """A normal distribution of constants, absolute."""

    values: Floats
    covariance: Floats
    distance: float
    """Of the values from the prior's mean, in standard deviations of the prior (Mahalanobis)."""


def noise_factor(loads: int) -> float:
    """Times the noise of a prior that an observation counts with in a fit to so many loads.

    What one load has of its own is in the load that is learned from and in the one that is
    predicted; of several loads it cancels. From 2 to 3 times, the second loads of measured runs
    that were left out come out best, and none much worse than unlearned.
    """
    more: float = (_ONE_LOAD**2 - 1) / loads
    return float((1 + more) ** 0.5)


def most_probable(
    residuals: Floats,
    errors: Floats,
    slopes: Floats,
    here: Floats,
    prior_mean: Floats,
    prior_covariance: Floats,
    reach: float = np.inf,
) -> Estimate:
    """The posterior from observations linearised at the constants `here`.

    `residuals`: logarithm of measured over emulated at `here`, one an observation; `errors` their
    standard errors; `slopes` (observations x parameters): change of the emulated logarithm for one
    unit of a constant. `here` and `prior_*` are absolute. No constant leaves its bounds, or goes
    farther than `reach` scales from `here`, where the slopes may be others.
    """
    design = slopes * SCALES / errors[:, None]
    offset = residuals / errors
    center = (prior_mean - here) / SCALES
    scatter = prior_covariance / np.outer(SCALES, SCALES)
    information = np.linalg.inv(scatter + 1e-9 * np.eye(len(SCALES)))
    weights = np.ones(len(residuals))
    give = 1.0
    change = center
    normal = information
    squared = 0.0
    low = np.maximum((_LEAST - here) / SCALES, -reach)
    high = np.minimum((_MOST - here) / SCALES, reach)
    for _ in range(_REWEIGHTINGS):
        normal = design.T @ (design * weights[:, None]) + give * information
        right = design.T @ (weights * offset) + give * (information @ center)
        change = _within(normal, right, low, high)
        left = np.abs(offset - design @ change)
        weights = np.where(left <= _HUBER, 1.0, _HUBER / np.maximum(left, 1e-12))
        away = change - center
        squared = float(away @ information @ away)
        told = len(SCALES) - give * float(np.trace(np.linalg.solve(normal, information)))
        give = (_FREEDOM + told) / (_FREEDOM + max(squared, told))
    return Estimate(
        here + change * SCALES,
        np.linalg.inv(normal) * np.outer(SCALES, SCALES),
        squared**0.5,
    )


def _within(normal: Floats, right: Floats, low: Floats, high: Floats) -> Floats:
    """The solution whose unknowns stay in bounds: those that would not are held there."""
    found = np.clip(np.zeros(len(right)), low, high)
    held = np.zeros(len(right), dtype=bool)
    for _ in range(len(right) + 1):
        free = ~held
        rest = right[free] - normal[np.ix_(free, held)] @ found[held]
        found[free] = np.linalg.solve(normal[np.ix_(free, free)], rest)
        out = (found < low) | (found > high)
        if not out.any():
            break
        found = np.clip(found, low, high)
        held |= out
        if held.all():
            break
    return np.asarray(found, dtype=np.float64)


# --- a prior from many measured runs -------------------------------------------------------------
class RunEvidence(msgspec.Struct, frozen=True):
    """What one measured run says, linearised at the shipped constants."""

    residuals: Floats
    """Logarithm of measured over emulated, one an observation."""
    slopes: Floats
    """Observations x parameters, for one unit of a constant."""
    metrics: NDArray[np.int64]
    """Index into `METRICS` of each observation."""


class Population(msgspec.Struct, frozen=True):
    """How runs differ from the shipped constants: a common shift, and a spread from run to run."""

    shift: Floats
    shift_covariance: Floats
    spread: Floats
    """Standard deviation of each constant from run to run."""
    noise: Floats
    """Relative standard error of an observation, one for each of `METRICS`."""

    @property
    def covariance(self) -> Floats:
        """Covariance of the constants of a run that was not seen, around the shift."""
        return np.diag(self.spread**2) + self.shift_covariance


_ROUNDS: Final = 80
_RUN_FREEDOM: Final = 10.0
"""Of Student's t for whole runs; at 4 spreads of normal runs come out a sixth too small."""
_PULL: Final = 2.0
"""Pseudo-runs behind each variance, so that it cannot collapse: spreads of `_SPREAD` scales,
observations off by `_NOISE`."""
_SPREAD: Final = 0.15
_NOISE: Final[Floats] = np.array([0.03, 0.012])
_SHIFT: Final = 0.5
"""Scales that a common shift may reasonably have. Without it constants whose effects cancel go far
apart, and TTFT of runs left out gets worse; at half of it intervals of runs left out get too short.
"""


def population(runs: list[RunEvidence]) -> Population:
    """Shift, spread and noise that make the runs most probable (expectation maximization).

    Runs whose observations fit badly together with the others count less (Student's t): one odd
    host does not widen everything.
    """
    size = len(SCALES)
    shift: Floats = np.zeros(size, dtype=np.float64)
    spread2: Floats = np.full(size, 0.09)
    noise2: Floats = np.array(_NOISE**2)
    information: Floats = np.eye(size) / _SHIFT**2
    scaled = [run.slopes * SCALES for run in runs]
    for _ in range(_ROUNDS):
        information = np.eye(size) / _SHIFT**2
        right = np.zeros(size)
        gathered = []
        for run, slopes in zip(runs, scaled, strict=True):
            inverse = np.linalg.inv((slopes * spread2) @ slopes.T + np.diag(noise2[run.metrics]))
            off = run.residuals - slopes @ shift
            weight = (_RUN_FREEDOM + len(off)) / (_RUN_FREEDOM + float(off @ inverse @ off))
            information += weight * slopes.T @ inverse @ slopes
            right += weight * slopes.T @ inverse @ run.residuals
            gain = (slopes * spread2).T @ inverse
            own = gain @ off
            own_var = spread2 - np.einsum("ij,ji->i", gain, slopes * spread2)
            left = off - slopes @ own
            left_var = left**2 + np.einsum(
                "ij,jk,ik->i", slopes, np.diag(spread2) - gain @ (slopes * spread2), slopes
            )
            gathered.append((weight, own, own_var, left_var, run.metrics))
        shift = np.asarray(np.linalg.solve(information, right), dtype=np.float64)
        total = np.full(size, _PULL * _SPREAD**2)
        noise_total = _PULL * _NOISE**2
        noise_count = np.full(len(_NOISE), _PULL)
        for weight, own, own_var, left_var, metrics in gathered:
            total += weight * own**2 + own_var
            for index in range(len(_NOISE)):
                noise_total[index] += weight * float(left_var[metrics == index].sum())
                noise_count[index] += int((metrics == index).sum())
        spread2 = np.asarray(total / (len(runs) + _PULL), dtype=np.float64)
        noise2 = np.asarray(noise_total / noise_count, dtype=np.float64)
    return Population(
        shift * SCALES,
        np.asarray(np.linalg.inv(information) * np.outer(SCALES, SCALES)),
        np.asarray(np.sqrt(spread2) * SCALES),
        np.asarray(np.sqrt(noise2)),
    )


# --- the fit --------------------------------------------------------------------------------------
# --------------------------------------------------------------------------------------------------
# A learned engine as a file that `engine.learned` names.
#
#     base = "vllm-0.15"          what differs from this engine
#     weights_time = 1.031 ...
#
#     [learned]                   format, name, date, emu's version, what was measured, the verdict
#     [posterior]                 mean, covariance and noise (emu/latency/posterior.py)
#
# The file depends on the data and the options only: the date is the data's, or the option's.

# --------------------------------------------------------------------------------------------------
# A fit from beginning to end: emulate, estimate, go on from there, judge elsewhere.
#
# Observations are split before anything is fitted. With several load levels the highest one that
# was not overloaded judges; with one level its moments of high load do (requests in flight when a
# request was sent). The fit sees the rest only. What it found must be closer to the judge than the
# engine as configured, by more than the scatter of the observations explains; else nothing was
# gained, and the engine stays as it is. If something was gained, the judge's observations join the
# fit at the end.

_ROUNDS_MAX: Final = 6
_REACH: Final = 4.0
"""Scales that a constant may move in one round."""
_SETTLED: Final = 0.02
"""A round that lowers the misfit by less is the last."""
_FAR: Final = 0.25
"""Scales that some constant must have moved for its slopes to be taken again."""
_CERTAIN: Final = 1.0
"""Standard errors of the mean gain above which it is one."""

Floor = NDArray[np.bool_]


class Judged(msgspec.Struct, frozen=True):
    """Errors at the load that was not fitted to."""

    label: str
    by_metric: dict[str, tuple[float, float]]
    """ttft, tpot -> mean |error| in per cent: as configured, learned."""
    observations: int
    gain: float
    """Mean of how much less the learned engine is off, per cent."""
    gain_error: float
    """Its standard error, per cent."""
    is_other_load: bool

    @property
    def is_gain(self) -> bool:
        """Something was gained."""
        return self.gain > _CERTAIN * self.gain_error and self.gain > 0


class Learned(msgspec.Struct, frozen=True):
    """What a fit found."""

    known: Known
    """The prior."""
    engine: EngineModel
    """The engine to use: the learned one, or the configured one if nothing was gained."""
    estimate: Estimate
    noise: dict[str, float]
    judged: Judged
    fitted: int
    """Observations that were fitted to."""
    left: Floats
    """Error of each observation with the engine to use, per cent: emulated over measured."""
    observations: list[Observation]
    rounds: int


class Session:
    """Keeps the best that is known, so that an interrupted fit has something to show."""

    def __init__(self, levels: Sequence[Level], known: Known, emulator: Emulator) -> None:
        """Raises InputError if there is too little to learn from."""
        self.known = known
        self._emulator = emulator
        self._measured = measured_times(levels)
        self.observations = observations_of(levels, self._measured)
        self._target = means(self.observations, self._measured)
        self.judge_label, self._is_judge, self._is_other = _judges(levels, self.observations)
        if (~self._is_judge).sum() < len(METRICS):
            raise InputError("learn", None, "", "too few requests to learn from")
        fitted = {self.observations[at].level for at in np.flatnonzero(~self._is_judge)}
        loads = sum(len({r.part for r in levels[number].requests}) for number in fitted)
        noise = np.array([known.posterior.noise[metric] for metric in METRICS])
        noise *= noise_factor(loads)
        own = np.array([o.error for o in self.observations])
        self._errors: Floats = np.hypot(noise[np.array([o.metric for o in self.observations])], own)
        self.best: Estimate | None = None
        """So far, by the observations fitted to."""
        self.rounds = 0

    def learn(self, phase: Callable[[str], None]) -> Learned:
        """Fit and judge; `phase` hears what is being done."""
        known = self.known
        prior_mean, prior_covariance = np.array(known.posterior.mean), known.posterior.matrix
        phase("as configured, and the slopes at the prior")
        here = values_of(with_values(known.engine, prior_mean))
        configured, at, slopes = self._first(here)
        fit = ~self._is_judge
        best_cost = np.inf
        best = here
        best_at, best_slopes = at, slopes
        for _ in range(_ROUNDS_MAX):
            self.rounds += 1
            cost = self._misfit(at, here, fit)
            if cost < best_cost:
                settled = cost > (1 - _SETTLED) * best_cost
                best_cost, best, best_at, best_slopes = cost, here, at, slopes
                if settled:
                    break
            elif self.rounds > 1:
                here = (here + best) / 2  # the step was too long for the slopes
                phase(f"round {self.rounds}: half the step")
                at = self._at(here)
                continue
            estimate = self._solve(at, slopes, here, fit)
            self.best = estimate
            there = values_of(with_values(known.engine, estimate.values))
            phase(f"round {self.rounds}: the engine found")
            moved = self._moved(there, here)
            here = there
            if moved > _FAR and self.rounds < _ROUNDS_MAX:
                phase(f"round {self.rounds}: the slopes there")
                at, slopes = self._with_slopes(here)
            else:
                at = self._at(here)
        judged = self._judge(configured, best_at)
        if judged.is_gain:
            everything = np.ones(len(fit), dtype=bool)
            final = self._solve(best_at, best_slopes, best, everything)
            engine = with_values(known.engine, final.values)
            phase("the engine learned from everything")
            left = self._at(values_of(engine))
            if self._misfit(left, best, everything) > self._misfit(best_at, best, everything):
                engine, left = with_values(known.engine, best), best_at
                final = Estimate(best, final.covariance, final.distance)
        else:
            final = Estimate(prior_mean, prior_covariance, 0.0)
            engine, left = known.engine, configured
        return Learned(
            known=known,
            engine=engine,
            estimate=final,
            noise=dict(known.posterior.noise),
            judged=judged,
            fitted=int(fit.sum()),
            left=100 * (np.exp(left - self._target) - 1),
            observations=self.observations,
            rounds=self.rounds,
        )

    # --- emulations ---------------------------------------------------------------------------
    def _first(self, here: Floats) -> tuple[Floats, Floats, Floats]:
        """(logarithms as configured, logarithms and slopes at `here`)."""
        engine = self.known.engine
        found = self._logs([values_of(engine), here, *self._moves(here)])
        return found[0], found[1], self._slopes(here, found[1], found[2:])

    def _with_slopes(self, here: Floats) -> tuple[Floats, Floats]:
        found = self._logs([here, *self._moves(here)])
        return found[0], self._slopes(here, found[0], found[1:])

    def _at(self, here: Floats) -> Floats:
        return self._logs([here])[0]

    def _logs(self, places: Sequence[Floats]) -> list[Floats]:
        engines = [with_values(self.known.engine, values) for values in places]
        return [means(self.observations, times) for times in self._emulator.times(engines)]

    def _moves(self, here: Floats) -> list[Floats]:
        places = []
        for index, parameter in enumerate(PARAMETERS):
            place = here.copy()
            up = here[index] + parameter.step
            place[index] = up if up <= parameter.most else here[index] - parameter.step
            places.append(place)
        return places

    def _slopes(self, here: Floats, at: Floats, moved: Sequence[Floats]) -> Floats:
        places = self._moves(here)
        columns = [
            (logs - at) / (place[index] - here[index])
            for index, (logs, place) in enumerate(zip(moved, places, strict=True))
        ]
        return np.stack(columns, axis=1)

    # --- estimates ----------------------------------------------------------------------------
    def _usable(self, at: Floats, slopes: Floats, chosen: Floor) -> Floor:
        usable: Floor = chosen & np.isfinite(at) & np.isfinite(slopes).all(axis=1)
        return usable

    def _solve(self, at: Floats, slopes: Floats, here: Floats, chosen: Floor) -> Estimate:
        usable = self._usable(at, slopes, chosen)
        if not usable.any():
            problem = "the emulated server completes none of the measured requests"
            raise InputError("learn", None, "", problem)
        return most_probable(
            (self._target - at)[usable],
            self._errors[usable],
            slopes[usable],
            here,
            np.array(self.known.posterior.mean),
            self.known.posterior.matrix,
            _REACH,
        )

    def _misfit(self, at: Floats, here: Floats, chosen: Floor) -> float:
        """Mean of the bounded residuals, in standard errors; one that is not there counts most."""
        off = np.abs(self._target - at)[chosen] / self._errors[chosen]
        return float(np.minimum(np.nan_to_num(off, nan=50.0), 50.0).mean())

    def _moved(self, there: Floats, here: Floats) -> float:
        scales = np.array([parameter.scale for parameter in PARAMETERS])
        return float((np.abs(there - here) / scales).max())

    def _judge(self, before: Floats, after: Floats) -> Judged:
        chosen = self._is_judge & np.isfinite(before) & np.isfinite(after)
        metrics = np.array([o.metric for o in self.observations])
        off = [100 * np.abs(logs - self._target) for logs in (before, after)]
        by_metric = {
            name: tuple(float(each[chosen & (metrics == index)].mean()) for each in off)
            for index, name in enumerate(METRICS)
            if (chosen & (metrics == index)).any()
        }
        gains = (off[0] - off[1])[chosen]
        weights = 1 / self._errors[chosen] ** 2
        total = float(weights.sum())
        gain = float((weights * gains).sum()) / total if total else 0.0
        own = 100 * np.array([o.error for o in self.observations])[chosen]
        scatter = float(np.sqrt((weights**2 * own**2).sum())) / total if total else 0.0
        return Judged(
            self.judge_label,
            by_metric,  # type: ignore[arg-type]
            int(chosen.sum()),
            gain,
            scatter,
            self._is_other,
        )


def _judges(
    levels: Sequence[Level], observations: Sequence[Observation]
) -> tuple[str, Floor, bool]:
    """(name of the load that judges, its observations, whether it is another load)."""
    number_of = np.array([o.level for o in observations])
    with_ttft = {o.level for o in observations if METRICS[o.metric] == "ttft"}
    if len(levels) > 1:
        steady = [i for i in range(len(levels)) if i in with_ttft] or list(range(len(levels)))
        judge = max(steady, key=lambda i: (levels[i].judges, levels[i].running, i))
        return levels[judge].label, number_of == judge, True
    is_high = np.array([o.is_high for o in observations])
    if is_high.any():
        return "moments of high load", is_high, True
    raise InputError(
        "learn",
        None,
        "",
        "one load whose requests cannot be told apart by load judges nothing; give the result of"
        " another load too",
    )


# --- A fit from beginning to end ------------------------------------------------------------------

FORMAT: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Where a learned engine comes from."""

    name: str
    data: list[str]
    """Files or the address."""
    sha256: list[str]
    """Of each file."""
    tool: str
    requests: int
    levels: list[str]
    model: str
    gpu: str
    tensor_parallel: int
    backend: str
    date: str


def check_name(name: str) -> str:
    """The name. Raises InputError for one that is no file's name."""
    if not _NAME.fullmatch(name):
        raise InputError("learn", None, "--name", f"{name!r} is no name of a file")
    return name


def save(path: Path, base: str, learned: Learned, about: About) -> None:
    """Write the file."""
    judged = learned.judged
    verdict = "gain" if judged.is_gain else "nothing gained"
    lines: dict[str, Any] = {
        "format": FORMAT,
        "name": about.name,
        "emu": __version__,
        "date": about.date,
        "verdict": verdict,
        "prior": learned.known.source,
        "data": about.data,
        "sha256": about.sha256,
        "tool": about.tool,
        "requests": about.requests,
        "levels": about.levels,
        "model": about.model,
        "gpu": about.gpu,
        "tensor_parallel": about.tensor_parallel,
        "backend": about.backend,
        "judged_on": judged.label,
    }
    for metric, (before, after) in judged.by_metric.items():
        lines[f"{metric}_error_percent"] = [round(before, 3), round(after, 3)]
    text = engine_text(learned.engine, base) + "\n[learned]\n" + _table(lines)
    posterior = Posterior(
        list(NAMES),
        (values_of(learned.engine) if judged.is_gain else learned.estimate.values).tolist(),
        learned.estimate.covariance.tolist(),
        learned.noise,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text + "\n" + posterior_text(posterior, "posterior"))


def save_partial(path: Path, base: str, engine: EngineModel) -> None:
    """What an interrupted fit had found; not judged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"format": FORMAT, "emu": __version__, "verdict": "interrupted: not judged"}
    write_text(path, engine_text(engine, base) + "\n[learned]\n" + _table(about))


def posterior_text(posterior: Posterior, name: str) -> str:
    """A distribution as a TOML table."""
    rows = ",\n".join(f"  {_value(row)}" for row in posterior.covariance)
    return (
        f"[{name}]\n"
        + _table({"parameters": posterior.parameters, "mean": posterior.mean})
        + f"covariance = [\n{rows},\n]\n"
        + f"\n[{name}.noise]\n"
        + _table(dict(posterior.noise))
    )


def _table(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in values.items())


def _value(value: Any) -> str:
    """A value of TOML (JSON's strings, numbers and lists are)."""
    if isinstance(value, float):
        return f"{value:.9g}" if "." in f"{value:.9g}" or "e" in f"{value:.9g}" else f"{value:.1f}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    return msgspec.json.encode(value).decode()
