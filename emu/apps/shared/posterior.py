"""The posterior of an engine's constants, from linearised emulations. Pure.

What a server did is a list of observations: logarithms of a mean TTFT or TPOT, each with a
standard error. An emulation with some constants gives the same list, and its change for a change
of each constant (`slopes`). Unknowns are in units of each parameter's `scale`.

The most probable constants balance the residuals against the prior. Both have heavy tails: an
observation that is far off counts less (Huber), and if the observations insist that the constants
lie far from the prior, the prior gives way (Student's t with `FREEDOM` degrees, in as many
directions as the observations tell). So small differences at one load are mostly taken for its
own, and large ones for the server's.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from emu.latency.posterior import PARAMETERS, Floats

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
