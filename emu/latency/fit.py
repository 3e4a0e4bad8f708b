"""Least squares over emulated runs: the roofline's constants that come closest to a measurement.

Pure: what a run with some constants gives comes from the caller. The residual of a request is the
logarithm of emulated over measured, for TTFT, TPOT and E2E, with Huber's weights so that requests
that were scheduled differently do not rule. Its derivatives come from runs with one constant moved
at a time. Because scheduling makes the sum of residuals rough, descents should start from several
places (`STARTS`), and the best end is polished by trying smaller and smaller moves along and across
the valley (`settle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Values = dict[str, Floats]
"""TTFT, TPOT and E2E in ms, one value a request."""
Emulate = Callable[["Constants"], Values]

METRICS: Final = ("TTFT", "TPOT", "E2E")
_STEP: Final = np.array([0.04, 0.04, 0.25])
"""How far each logarithm is moved for a derivative: beyond the grain of scheduling."""
_LOW: Final = np.log([0.05, 0.05, 10.0])
_HIGH: Final = np.log([1.0, 1.0, 100_000.0])
_MOVE_MAX: Final = 0.5
_ROUNDS_MAX: Final = 12
_DAMPING_MAX: Final = 1e4
_CLOSE: Final = 0.003
_HUBER: Final = 1.5
_POLISH: Final = (0.32, 0.16, 0.08, 0.04, 0.02, 0.01, 0.005)
"""Moves of the logarithms that are tried at the end, largest first."""
_AS_CLOSE: Final = 1.25
_SETTLE_MAX: Final = 5
_TRIES_MAX: Final = 30
"""Successful moves of one size."""


class Constants(msgspec.Struct, frozen=True):
    """What is fitted."""

    compute_efficiency: float = 0.8
    memory_efficiency: float = 0.82
    step_overhead_us: float = 1000.0

    def logarithms(self) -> Floats:
        """The fitted unknowns."""
        return np.log([self.compute_efficiency, self.memory_efficiency, self.step_overhead_us])

    @staticmethod
    def of(logarithms: Floats) -> Constants:
        """From the unknowns, within bounds."""
        compute, memory, overhead = np.exp(np.clip(logarithms, _LOW, _HIGH))
        return Constants(float(compute), float(memory), float(overhead))


STARTS: Final = (Constants(), Constants(0.5, 0.6), Constants(step_overhead_us=300.0))


class Fit(msgspec.Struct):
    """Outcome of least squares over some requests."""

    constants: Constants
    spread: Floats
    """Standard error of each logarithm, if requests were independent."""
    directions: Floats
    """Along (first row) and across the valley of the sum of residuals."""
    deviation: float
    """Mean absolute residual."""
    runs: int


def least_squares(
    emulate: Emulate,
    base: Values,
    chosen: NDArray[np.bool_],
    start: Constants,
    *,
    rounds_max: int = _ROUNDS_MAX,
) -> Fit:
    """Damped Gauss-Newton over the chosen requests."""
    at = start.logarithms()
    runs = 1
    residual = _residual(emulate(start), base, chosen)
    damping = 1e-3
    slopes = np.zeros((len(residual), len(at)))
    weights = _weights(residual)
    for _ in range(rounds_max):
        for index in range(len(at)):
            # Away from the bound, so that the constant does move.
            step = _STEP[index] if at[index] + _STEP[index] <= _HIGH[index] else -_STEP[index]
            moved = at.copy()
            moved[index] += step
            slopes[:, index] = (
                _residual(emulate(Constants.of(moved)), base, chosen) - residual
            ) / step
            runs += 1
        weights = _weights(residual)
        cost = float(weights @ residual**2)
        found, residual_there, damping, tried = _descend(
            emulate, base, chosen, at, residual, slopes, weights, cost, damping
        )
        runs += tried
        if found is None:
            break
        distance = float(np.abs(found - at).max())
        at, residual = found, residual_there
        if distance < _CLOSE:
            break
    normal = slopes.T @ (weights[:, None] * slopes)
    variance = float(weights @ residual**2) / max(1, len(residual) - len(at))
    spread = np.sqrt(np.maximum(np.diag(np.linalg.pinv(normal)) * variance, 0.0))
    _, across = np.linalg.eigh(normal)  # rising: the flattest direction first
    return Fit(Constants.of(at), spread, across.T, deviation(residual), runs)


def settle(emulate: Emulate, base: Values, chosen: NDArray[np.bool_], fit: Fit) -> Fit:
    """Polish and descend again from there until neither helps."""
    runs = fit.runs
    for _ in range(_SETTLE_MAX):
        before = fit.deviation
        polished = polish(emulate, base, chosen, fit)
        again = least_squares(emulate, base, chosen, polished.constants)
        runs += polished.runs - fit.runs + again.runs
        if again.deviation < polished.deviation:
            fit = again
        else:
            fit = msgspec.structs.replace(
                polished, spread=again.spread, directions=again.directions
            )
        if fit.deviation > 0.99 * before:
            break
    fit.runs = runs
    return fit


def polish(emulate: Emulate, base: Values, chosen: NDArray[np.bool_], fit: Fit) -> Fit:
    """Move along the directions of a fit, by less and less, as long as the residuals fall."""
    at = fit.constants.logarithms()
    best, runs = deviation(_residual(emulate(fit.constants), base, chosen)), fit.runs + 1
    directions = [*fit.directions, *np.eye(len(at))]
    for size in _POLISH:
        for _ in range(_TRIES_MAX):
            before = best
            for direction in directions:
                for move in (size * direction, -size * direction):
                    moved = np.clip(at + move, _LOW, _HIGH)
                    there = deviation(_residual(emulate(Constants.of(moved)), base, chosen))
                    runs += 1
                    if there < best:
                        at, best = moved, there
                        break
            if best == before:
                break
    return Fit(Constants.of(at), fit.spread, fit.directions, best, runs)


def deviation(residual: Floats) -> float:
    return float(np.abs(residual).mean())


def _descend(
    emulate: Emulate,
    base: Values,
    chosen: NDArray[np.bool_],
    at: Floats,
    residual: Floats,
    slopes: Floats,
    weights: Floats,
    cost: float,
    damping: float,
) -> tuple[Floats | None, Floats, float, int]:
    """(the next point or None, residual there, damping, runs): the first step that descends."""
    normal = slopes.T @ (weights[:, None] * slopes)
    gradient = slopes.T @ (weights * residual)
    tried = 0
    while damping <= _DAMPING_MAX:
        matrix = normal + damping * np.diag(np.diag(normal) + 1e-9)
        step = np.clip(np.linalg.solve(matrix, -gradient), -_MOVE_MAX, _MOVE_MAX)
        moved = np.clip(at + step, _LOW, _HIGH)
        there = _residual(emulate(Constants.of(moved)), base, chosen)
        tried += 1
        if float(weights @ there**2) < cost:
            return moved, there, max(damping / 10, 1e-6), tried
        damping *= 10
    return None, residual, damping, tried


def _residual(values: Values, base: Values, chosen: NDArray[np.bool_]) -> Floats:
    parts = []
    for metric in METRICS:
        value, other = values[metric][chosen], base[metric][chosen]
        usable = (value > 0) & (other > 0)  # a request of one token has no TPOT
        parts.append(
            np.where(usable, np.log(np.where(usable, value, 1) / np.where(usable, other, 1)), 0)
        )
    return np.concatenate(parts)


def _weights(residual: Floats) -> Floats:
    scale = 1.4826 * float(np.median(np.abs(residual - np.median(residual)))) + 1e-6
    return np.minimum(1.0, _HUBER * scale / np.maximum(np.abs(residual), 1e-12))


def ends_apart(fits: Sequence[Fit], settled: Fit) -> Floats:
    """Half of how far apart, by logarithm, the ends of descents lie that came about as close.

    The sum of residuals is rough: constants that suit the requests equally may be far apart.
    """
    enough = _AS_CLOSE * min(fit.deviation for fit in fits)
    ends = [fit.constants.logarithms() for fit in (*fits, settled) if fit.deviation <= enough]
    half: Floats = np.ptp(np.array(ends), axis=0) / 2
    return half


def gain_of(
    before: Values, after: Values, base: Values, chosen: NDArray[np.bool_]
) -> tuple[tuple[float, float], float]:
    """(mean absolute residual before and after, standard error of their difference)."""
    shape = (len(METRICS), -1)  # the metrics of one request are no independent observations
    off = [
        np.abs(_residual(values, base, chosen)).reshape(shape).mean(axis=0)
        for values in (before, after)
    ]
    gains = off[0] - off[1]
    error = float(gains.std(ddof=1)) / len(gains) ** 0.5
    return (float(off[0].mean()), float(off[1].mean())), error
