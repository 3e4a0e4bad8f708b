"""Fitting the roofline's few constants to a measured run: `emu calibrate`.

The least squares are `emu/latency/fit.py`; the runs are ordinary emulated runs of the same
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
from emu.config.schema import Config, LatencyTable
from emu.errors import InputError
from emu.latency.fit import (
    METRICS,
    STARTS,
    Constants,
    Fit,
    Floats,
    Values,
    ends_apart,
    gain_of,
    least_squares,
    polish,
    settle,
)
from emu.process.interrupts import scratch, strike_if_lost
from emu.process.terminal import open_console
from emu.report.measured import run_values
from emu.report.measurement import Measurement, read_measurement
from emu.report.rundata import read_run
from emu.runs.runner import execute

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
    configured: LatencyTable
    fitted_requests: int
    held_out: int

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
    inherited = config.latency.backend
    backends = {inherited, *(g.latency.get("backend", inherited) for g in config.replicas)}
    if backends != {"roofline"}:
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
        configured=config.latency,
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


def snippet(constants: Constants | LatencyTable) -> str:
    """TOML to put into a configuration."""
    return (
        "[latency]\n"
        'backend = "roofline"\n'
        f"compute_efficiency = {constants.compute_efficiency:.4g}\n"
        f"memory_efficiency = {constants.memory_efficiency:.4g}\n"
        f"step_overhead_us = {constants.step_overhead_us:.4g}\n"
    )
