"""A run against a real server: distributions, and request by request.

    comparison = compare_measured(run_directory, Path("requests.jsonl"))
    print_measured(comparison, console)

Distributions are compared as LLMServingSim's validation does: mean and percentiles of each
(linear interpolation), difference = (run - measured) / measured. vLLM's `queued_ts` is written
when the engine looks at its inbox, between two iterations; where it is the anchor, the run's TTFT
and E2E are counted from the same instant (`intake_ns` after the arrival). Distributions hide
errors of single requests which cancel out, so the same requests are also paired by id: absolute
error relative to the measurement. TPOT leaves requests with one output token out on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.errors import InputError
from emu.report.paired import percent_of
from emu.report.rundata import RunData, read_run
from emu.report.table import number
from emu.units import NS_PER_MS

if TYPE_CHECKING:
    from rich.console import Console
from emu.report.compare import STATISTICS, Floats, statistics
from emu.report.measurement import Measurement, read_measurement

Places = NDArray[np.int64]

_SUMMARY_NAMES: Final = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}


class MeasuredRow(msgspec.Struct, frozen=True):
    """One statistic; ms."""

    metric: str
    statistic: str
    measured: float
    run: float
    percent: float | None


class PairedRow(msgspec.Struct, frozen=True):
    """Absolute error of single requests, per cent of the measurement."""

    metric: str
    pairs: int
    mean: float
    median: float
    p90: float


class MeasuredComparison(msgspec.Struct, frozen=True):
    """What `compare --measured` prints.

    `requests_measured`, `requests_run` and `skipped` count requests.
    """

    rows: list[MeasuredRow]
    paired: list[PairedRow]
    """Empty if the measurement has no single requests, or none with an id of the run."""
    makespan: MeasuredRow | None
    """s."""
    requests_measured: int
    requests_run: int
    anchor: str
    skipped: int
    unlike: int
    """Pairs of requests whose prompt or output is not as long in both."""


def compare_measured(directory: Path, measured: Path) -> MeasuredComparison:
    """Read and compare."""
    return compare_with(read_run(directory), read_measurement(measured))


def _makespan(run: RunData, measurement: Measurement) -> MeasuredRow | None:
    """None where it was not measured."""
    measured_s, duration = measurement.makespan_s, run.summary.duration
    if not measured_s:
        return None
    return MeasuredRow("makespan", "", measured_s, duration, percent_of(duration, measured_s))


def compare_with(run: RunData, measurement: Measurement) -> MeasuredComparison:
    """Compare what has been read. Raises InputError if the run completed no request."""
    mine = run_values(run, measurement)
    if not len(mine["TTFT"]):
        raise InputError(str(run.directory), None, "", "no completed request to compare")
    theirs = {
        "TTFT": measurement.ttft_ms,
        "TPOT": measurement.tpot_ms,
        "E2E": measurement.e2e_ms,
    }
    _, here, there = np.intersect1d(
        run.completed("request_id"), measurement.request_ids, return_indices=True
    )
    pairs = (here, there)
    return MeasuredComparison(
        rows=list(_rows(run, measurement, mine, theirs)),
        paired=_paired(mine, theirs, pairs),
        makespan=_makespan(run, measurement),
        requests_measured=len(measurement.request_ids),
        requests_run=len(mine["TTFT"]),
        anchor=measurement.anchor,
        skipped=measurement.skipped,
        unlike=_unlike(run, measurement, pairs),
    )


def _rows(
    run: RunData,
    measurement: Measurement,
    mine: Mapping[str, Floats],
    theirs: Mapping[str, Floats],
) -> Iterator[MeasuredRow]:
    """Each statistic of each latency that both have."""
    for metric in ("TTFT", "TPOT", "ITL", "E2E"):
        if metric == "ITL":
            figures = [run.summary.statistic(_SUMMARY_NAMES[s], "itl") for s in STATISTICS]
            other = measurement.itl_ms
        else:
            values = mine[metric][~np.isnan(mine[metric])]
            if not len(values):  # one token each: no TPOT
                continue
            figures = statistics(values)
            other = theirs[metric]
            other = other[~np.isnan(other)]
        known = dict(zip(STATISTICS, statistics(other), strict=True)) if len(other) else {}
        for statistic, figure in zip(STATISTICS, figures, strict=True):
            base = known.get(statistic, measurement.figures.get((metric, statistic)))
            if base is not None:
                yield MeasuredRow(metric, statistic, base, figure, percent_of(figure, base))


def run_values(run: RunData, measurement: Measurement) -> dict[str, Floats]:
    """TTFT, TPOT and E2E of the completed requests in ms, from the measurement's anchor."""
    from_intake = measurement.anchor == "queued_ts"
    tpot = run.completed("tpot_ns") / NS_PER_MS
    start = np.maximum(run.completed("intake_ns"), 0) if from_intake else 0
    return {
        "TTFT": (run.completed("ttft_ns") - start) / NS_PER_MS,
        "TPOT": np.where(run.completed("decode_toks") > 1, tpot, np.nan),
        "E2E": (run.completed("latency_ns") - start) / NS_PER_MS,
    }


def _unlike(run: RunData, measurement: Measurement, pairs: tuple[Places, Places]) -> int:
    here, there = pairs
    differs = np.zeros(len(here), dtype=bool)
    for column, theirs in (
        ("prompt_toks", measurement.prompt_tokens),
        ("decode_toks", measurement.output_tokens),
    ):
        known = theirs[there]
        differs |= (known >= 0) & (run.completed(column)[here] != known)
    return int(differs.sum())


def _paired(
    mine: dict[str, Floats], theirs: dict[str, Floats], pairs: tuple[Places, Places]
) -> list[PairedRow]:
    here, there = pairs
    rows = []
    for metric in mine:
        if not len(here):
            continue
        value, base = mine[metric][here], theirs[metric][there]
        usable = ~np.isnan(value) & ~np.isnan(base) & (base > 0)
        if usable.any():
            errors = 100 * np.abs(value[usable] - base[usable]) / base[usable]
            p50, p90 = (float(v) for v in np.percentile(errors, (50, 90)))
            rows.append(PairedRow(metric, int(usable.sum()), float(errors.mean()), p50, p90))
    return rows


def print_measured(comparison: MeasuredComparison, console: Console) -> None:
    """Both tables."""
    from rich.table import Table

    table = Table(title="Run against measurement (ms)", title_justify="left")
    for column in ("", "statistic", "measured", "run", "difference"):
        table.add_column(column, justify="left" if column in ("", "statistic") else "right")
    before = ""
    for row in comparison.rows:
        if before and row.metric != before:
            table.add_section()
        name = row.metric if row.metric != before else ""
        before = row.metric
        percent = "-" if row.percent is None else f"{row.percent:+.2f} %"
        table.add_row(name, row.statistic, number(row.measured), number(row.run), percent)
    console.print(table)
    if comparison.paired:
        paired = Table(title="Request by request, absolute error (%)", title_justify="left")
        for column in ("", "pairs", "mean", "median", "p90"):
            paired.add_column(column, justify="left" if not column else "right")
        for pair in comparison.paired:
            figures = (f"{value:.2f}" for value in (pair.mean, pair.median, pair.p90))
            paired.add_row(pair.metric, str(pair.pairs), *figures)
        console.print(paired)
    for note in notes(comparison):
        console.print(note, soft_wrap=True)


def notes(comparison: MeasuredComparison) -> list[str]:
    """What the tables do not say: makespan, how many requests, from where they are measured."""
    found = []
    if comparison.makespan is not None:
        span = comparison.makespan
        percent = "" if span.percent is None else f" ({span.percent:+.2f} %)"
        found.append(f"makespan: {span.measured:.3f} s measured, {span.run:.3f} s here{percent}")
    found.append(
        f"{comparison.requests_measured or 'no single'} requests measured "
        f"({comparison.skipped} left out), {comparison.requests_run} completed here; "
        f"measured from {comparison.anchor}"
        + (", here from when the engine took them." if comparison.anchor == "queued_ts" else ".")
    )
    if comparison.unlike:
        found.append(
            f"{comparison.unlike} requests with the same id have other lengths here: "
            "is it the same workload?"
        )
    if comparison.requests_measured and not comparison.paired:
        found.append("no request has an id of the run: nothing is paired")
    return found
