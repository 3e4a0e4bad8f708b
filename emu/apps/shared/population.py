"""A prior of an engine's constants from many measured runs: a common shift, a spread."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.apps.shared.posterior import SCALES
from emu.latency.posterior import Floats


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
