"""Fitting the roofline's few constants to a measured run: `emu calibrate`.

The least squares are `emu/apps/calibrate.py`; the runs are ordinary emulated runs of the same
configuration. Fitted are the part of peak FLOP/s and of peak bandwidth that kernels reach, and the
host's time for each step. The measured requests are split by turns in order of arrival: one half
is fitted, the other judges. Deterministic: no random start, no random split.

A fit to a noisy run follows its noise. The held-out half decides whether anything was gained: the
mean over its requests of how much less the fit is off must be above twice its standard error, else
the constants as configured are what is recommended.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from emu.config.load import load_config
from emu.config.schema import Config, RooflineTable
from emu.errors import InputError
from emu.process.console import open_console
from emu.process.interrupts import scratch, strike_if_lost
from emu.report.measured import run_values
from emu.report.measurement import Measurement, read_measurement
from emu.report.rundata import read_run
from emu.runs.runner import execute

# --------------------------------------------------------------------------------------------------
# Least squares over emulated runs: the roofline's constants that come closest to a measurement.
#
# Pure: what a run with some constants gives comes from the caller. The residual of a request is the
# logarithm of emulated over measured, for TTFT, TPOT and E2E, with Huber's weights so that requests
# that were scheduled differently do not rule. Its derivatives come from runs with one constant
# moved at a time. Because scheduling makes the sum of residuals rough, descents should start from
# several places (`STARTS`), and the best end is polished by trying smaller and smaller moves along
# and across the valley (`settle`).

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
        """The constants that the unknowns stand for, within bounds."""
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


# --- Fitting the roofline's few constants to a measured run ---------------------------------------

_GAIN_ERRORS: Final = 2.0
"""Standard errors above which a gain is one."""


class Calibration(msgspec.Struct):
    """What `emu calibrate` prints."""

    fit: Fit
    other: Constants
    """Fitted to the held-out half alone, from the first fit on."""
    uncertainty: Floats
    """Of each constant, relative: standard error, half the difference of the halves, or of where
    descents from other places ended; the largest."""
    errors: dict[str, tuple[float, float, float, float]]
    """Held-out half: (mean error, median absolute error of single requests) in per cent, of the
    constants as configured and of the fitted ones."""
    off: tuple[float, float]
    """Held-out half: mean absolute logarithm of emulated over measured, configured and fitted."""
    gain_error: float
    """Standard error of the difference of the two, requests being independent."""
    configured: RooflineTable
    fitted_requests: int
    held_out: int
    """Requests that errors are judged on."""

    @property
    def is_gain(self) -> bool:
        """The fitted constants are better for requests that they were not fitted to."""
        return self.off[0] - self.off[1] > _GAIN_ERRORS * self.gain_error


Report = Callable[[str, int], None]
"""What is being done, and how many runs there have been."""


def calibrate(
    config: Config, measured: Path, source: str, report: Report | None = None
) -> Calibration:
    """Fit, and judge on the other half. Raises InputError for what does not match.

    `report` hears of every run before it begins.
    """
    measurement = read_measurement(measured)
    if len(measurement.request_ids) < 8:
        problem = f"{len(measurement.request_ids)} single requests; a fit needs 8 or more"
        raise InputError(str(measured), None, "", problem)
    configured = config.latency
    inherited = configured.backend
    backends = {inherited, *(g.latency.get("backend", inherited) for g in config.replicas)}
    if backends != {"roofline"} or not isinstance(configured, RooflineTable):
        names = ", ".join(sorted(backends - {"roofline"}))
        problem = f"only the roofline's constants can be fitted, and replicas use {names}"
        raise InputError(source, None, "latency.backend", problem)
    own = {key for g in config.replicas for key in g.latency} & set(Constants.__struct_fields__)
    if own:
        problem = "replicas have constants of their own; one set is fitted for all"
        raise InputError(source, None, f"replicas.latency.{min(own)}", problem)
    order = np.argsort(measurement.request_ids, kind="stable")
    base = {
        "TTFT": measurement.ttft_ms[order],
        "TPOT": measurement.tpot_ms[order],
        "E2E": measurement.e2e_ms[order],
    }

    runs, phase = 0, ""

    def emulate(constants: Constants | None) -> Values:
        nonlocal runs
        if report is not None:
            report(phase, runs)
        runs += 1
        return _emulate(config, source, constants, measurement)

    halves = [np.arange(len(order)) % 2 == half for half in (0, 1)]
    fits = []
    for number, start in enumerate(STARTS, 1):
        phase = f"descent {number} of {len(STARTS)}"
        fits.append(least_squares(emulate, base, halves[0], start))
    best = min(fits, key=lambda fit: fit.deviation)
    phase = "settling"
    fit = settle(emulate, base, halves[0], best)
    fit.runs += sum(each.runs for each in fits) - best.runs
    phase = "the other half"
    other = polish(emulate, base, halves[1], fit)
    between = np.abs(fit.constants.logarithms() - other.constants.logarithms()) / 2
    errors = {}
    before, after = emulate(None), emulate(fit.constants)
    for metric in METRICS:
        pairs = [_error(values[metric], base[metric], halves[1]) for values in (before, after)]
        errors[metric] = (*pairs[0], *pairs[1])
    off, gain_error = gain_of(before, after, base, halves[1])
    return Calibration(
        fit=fit,
        other=other.constants,
        uncertainty=np.maximum.reduce([fit.spread, between, ends_apart(fits, fit)]),
        errors=errors,
        off=off,
        gain_error=gain_error,
        configured=configured,
        fitted_requests=int(halves[0].sum()),
        held_out=int(halves[1].sum()),
    )


def _error(value: Floats, base: Floats, chosen: NDArray[np.bool_]) -> tuple[float, float]:
    usable = chosen & (base > 0) & ~np.isnan(value)
    mean = 100 * (value[usable].mean() / base[usable].mean() - 1)
    single = 100 * np.abs(value[usable] / base[usable] - 1)
    return float(mean), float(np.median(single))


def _emulate(
    config: Config, source: str, constants: Constants | None, measurement: Measurement
) -> Values:
    """One run; None = the configuration as it is."""
    keys = {} if constants is None else msgspec.structs.asdict(constants)
    latency = msgspec.structs.replace(config.latency, **keys)
    with scratch("emu-calibrate-") as directory:
        output = msgspec.structs.replace(
            config.output, dir=str(directory / "run"), trace=False, timeseries_interval_ms=0
        )
        execute(
            msgspec.structs.replace(config, latency=latency, output=output), source, report=False
        )
        run = read_run(directory / "run")
    # A finished world is a web of cycles with megabytes of arrays, in too few objects for the
    # collector to come by itself: hundreds of them would stay.
    gc.collect()
    strike_if_lost()
    ids = run.completed("request_id")
    order = np.argsort(ids, kind="stable")
    wanted = np.sort(measurement.request_ids)
    places = np.searchsorted(ids[order], wanted)
    if len(ids) == 0 or places.max() >= len(ids) or (ids[order][places] != wanted).any():
        problem = "the run does not complete every measured request; is it the same workload?"
        raise InputError(source, None, "workload", problem)
    values = run_values(run, measurement)
    return {metric: values[metric][order][places] for metric in METRICS}


# --- printing ------------------------------------------------------------------------------------
def calibrate_command(config: Path, measured: Path, overrides: Sequence[str] = ()) -> int:
    """The command: fit, print."""
    with _progress() as report:
        found = calibrate(load_config(config, overrides=overrides), measured, str(config), report)
    print_calibration(found, open_console())
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Report]:
    """A line on stderr: rewritten with every run on a terminal, else one for each phase."""
    is_terminal, before = sys.stderr.isatty(), ""

    def report(phase: str, runs: int) -> None:
        nonlocal before
        if is_terminal:
            print(f"\r\033[K{phase}: run {runs + 1}", end="", file=sys.stderr, flush=True)
        elif phase != before:
            print(f"{phase}, after {runs} runs", file=sys.stderr, flush=True)
        before = phase

    try:
        yield report
    finally:
        if is_terminal and before:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def print_calibration(found: Calibration, console: Console) -> None:
    """The constants, what they are worth on the held-out half, and a snippet for a config."""
    fit = found.fit.constants
    console.print(
        f"{found.fitted_requests} requests fitted, {found.held_out} held out; {found.fit.runs} runs"
    )
    table = Table(title="Constants", title_justify="left")
    for column in ("", "fitted", "uncertainty", "from the other half"):
        table.add_column(column, justify="left" if not column else "right")
    for index, name in enumerate(Constants.__struct_fields__):
        value, other = getattr(fit, name), getattr(found.other, name)
        table.add_row(
            name, f"{value:.4g}", f"± {100 * found.uncertainty[index]:.1f} %", f"{other:.4g}"
        )
    console.print(table)
    table = Table(title="Held-out half: error, %", title_justify="left")
    for column in ("", "as configured, mean", "single, median", "fitted, mean", "single, median"):
        table.add_column(column, justify="left" if not column else "right")
    for metric, (mean, single, fitted_mean, fitted_single) in found.errors.items():
        table.add_row(
            metric, f"{mean:+.2f}", f"{single:.2f}", f"{fitted_mean:+.2f}", f"{fitted_single:.2f}"
        )
    console.print(table)
    before, after = (100 * off for off in found.off)
    console.print(
        f"Held-out half, mean of all: {before:.2f} % off as configured, {after:.2f} % fitted "
        f"(difference ± {100 * found.gain_error:.2f}).",
        soft_wrap=True,
    )
    if not found.is_gain:
        console.print(
            "Nothing was gained: that is no more than chance. Keep the constants as configured "
            "(0 and -1 stand for the defaults):",
            soft_wrap=True,
        )
    sys.stdout.write(snippet(fit if found.is_gain else found.configured))


def snippet(constants: Constants | RooflineTable) -> str:
    """TOML to put into a configuration."""
    return (
        "[latency]\n"
        'backend = "roofline"\n'
        f"compute_efficiency = {constants.compute_efficiency:.4g}\n"
        f"memory_efficiency = {constants.memory_efficiency:.4g}\n"
        f"step_overhead_us = {constants.step_overhead_us:.4g}\n"
    )
