"""A fit from beginning to end: emulate, estimate, go on from there, judge elsewhere.

Observations are split before anything is fitted. With several load levels the highest one that was
not overloaded judges; with one level its moments of high load do (requests in flight when a request
was sent). The fit sees the rest only. What it found must be closer to the judge than the engine as
configured, by more than the scatter of the observations explains; else nothing was gained, and the
engine stays as it is. If something was gained, the judge's observations join the fit at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.apps.learn.emulations import Emulator
from emu.apps.learn.fields import Level
from emu.apps.learn.observations import Observation, means, measured_times, observations_of
from emu.apps.shared.posterior import Estimate, most_probable, noise_factor
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.latency.posterior import METRICS, PARAMETERS, Floats, Known, values_of, with_values

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
