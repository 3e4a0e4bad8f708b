"""The posterior of an engine's constants from linearised emulations. Pure.

What a server did is a list of observations: logarithms of a mean TTFT or TPOT, each with a standard
error. An emulation with some constants gives the same list, and its change for a change of each
constant (`slopes`). Unknowns are in units of each parameter's `scale`.

The most probable constants balance the residuals against the prior. Both have heavy tails: an
observation that is far off counts less (Huber), and if the observations insist that the constants
lie far from the prior, the prior gives way (Student's t with `_FREEDOM` degrees, in as many
directions as the observations tell). So small differences at one load are mostly taken for its
own, and large ones for the server's.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.latency.engine import PARAMETERS, Floats

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
