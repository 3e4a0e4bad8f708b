"""Two to ten runs side by side.

    comparison = compare_runs([Path("runs/a"), Path("runs/b")], seed=0)
    print_comparison(comparison, console)

The first run is the base of all differences. The intervals come from a bootstrap over requests
(95 %, seeded): when all runs completed the same requests (id and prompt), the pairs are drawn,
which takes the workload's own spread out of the difference; otherwise each run is drawn on its
own. Gaps between tokens are pooled over requests when they are recorded, so ITL has no interval.
Beside the figures stands what differs between the configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.errors import InputError
from emu.report.paired import percent_of
from emu.report.rundata import RunData, read_run
from emu.report.settings_diff import Setting, differing
from emu.report.summary import Summary
from emu.report.table import number
from emu.report.what_ran import known_text
from emu.rng import rng_stream
from emu.units import NS_PER_MS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Floats = NDArray[np.float64]

STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")
_PERCENTS: Final = (50.0, 90.0, 95.0, 99.0)
_METRICS: Final = {"TTFT": "ttft_ns", "TPOT": "tpot_ns", "E2E": "latency_ns"}
_RUNS_MAX: Final = 10
_RESAMPLES: Final = 400
_RESAMPLED_VALUES_MAX: Final = 8_000_000
_RESAMPLES_MIN: Final = 60
_CONFIDENCE: Final = 0.95
_COLUMNS_MAX: Final = 1_000
SETTINGS_MAX: Final = 30
"""So many settings that differ are shown."""


class Difference(msgspec.Struct, frozen=True):
    """Against the first run, per cent; None where the base is 0."""

    percent: float | None
    low: float | None = None
    high: float | None = None

    @property
    def is_clear(self) -> bool:
        """True if the interval does not contain zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


class Row(msgspec.Struct, frozen=True):
    """One figure of all runs."""

    name: str
    unit: str
    values: Sequence[float]
    differences: list[Difference]
    """Of the second and later runs."""


class Comparison(msgspec.Struct, frozen=True):
    """What `compare` prints."""

    names: list[str]
    rows: list[Row]
    is_paired: bool
    """True if all runs completed the same requests."""
    settings: list[Setting]
    """Keys of the configurations that differ, with the value of each run."""
    known: list[str]
    """How well the engine of each run is known; empty where its files do not say."""


def compare_runs(directories: Sequence[Path], seed: int = 0) -> Comparison:
    """Read and compare."""
    if not 2 <= len(directories) <= _RUNS_MAX:
        problem = f"expected 2 to {_RUNS_MAX} runs, got {len(directories)}"
        raise InputError("compare", None, "", problem)
    return compare_data([read_run(directory) for directory in directories], seed)


def compare_data(runs: Sequence[RunData], seed: int = 0) -> Comparison:
    """Compare runs that have been read."""
    keys = [_identity(run) for run in runs]
    is_paired = all(len(key) and np.array_equal(key, keys[0]) for key in keys)
    rows: list[Row] = []
    for name, column in _METRICS.items():
        values = [_in_order(run, column, is_paired) for run in runs]
        rows += _metric_rows(name, values, is_paired, seed)
    rows += _gap_rows(runs)
    rows.sort(key=lambda row: ("TTFT", "TPOT", "ITL", "E2E").index(row.name.split()[0]))
    rows += _figure_rows(runs)
    names = run_names([run.directory for run in runs])
    known = [known_text(run) for run in runs]
    return Comparison(names, rows, is_paired, differing([run.config for run in runs]), known)


def run_names(directories: Sequence[Path]) -> list[str]:
    """The last parts of the paths that tell the runs apart."""
    parts = [directory.resolve().parts for directory in directories]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{index}: {'/'.join(part[-1:])}" for index, part in enumerate(parts, start=1)]


def statistics(values: Floats) -> list[float]:
    """Mean and percentiles; zeros without values."""
    if len(values) == 0:
        return [0.0] * len(STATISTICS)
    return [float(values.mean()), *(float(v) for v in np.percentile(values, _PERCENTS))]


def _identity(run: RunData) -> NDArray[np.int64]:
    """What must be equal for requests of two runs to be the same: id and prompt, sorted by id."""
    ids, prompts = run.completed("request_id"), run.completed("prompt_toks")
    order = np.argsort(ids, kind="stable")
    return np.stack([ids[order], prompts[order]], axis=1)


def _in_order(run: RunData, column: str, is_paired: bool) -> Floats:
    values = run.completed(column).astype(np.float64) / NS_PER_MS
    if is_paired:
        values = values[np.argsort(run.completed("request_id"), kind="stable")]
    return values


def _metric_rows(name: str, values: list[Floats], is_paired: bool, seed: int) -> list[Row]:
    figures = [statistics(v) for v in values]
    intervals = [
        _intervals(values[0], other, is_paired, seed, f"{name}.{index}")
        for index, other in enumerate(values[1:], start=1)
    ]
    rows = []
    for place, statistic in enumerate(STATISTICS):
        base = figures[0][place]
        differences = [
            Difference(percent_of(figures[index + 1][place], base), *interval[place])
            for index, interval in enumerate(intervals)
        ]
        row_values = [figure[place] for figure in figures]
        rows.append(Row(f"{name} {statistic}", "ms", row_values, differences))
    return rows


def _intervals(
    base: Floats, other: Floats, is_paired: bool, seed: int, name: str
) -> list[tuple[float | None, float | None]]:
    """Bounds of the difference in per cent, for each statistic."""
    largest = max(len(base), len(other))
    if min(len(base), len(other)) < 2:
        return [(None, None)] * len(STATISTICS)
    # Percentiles of very many requests hardly vary, so fewer draws do.
    draws = max(_RESAMPLES_MIN, min(_RESAMPLES, _RESAMPLED_VALUES_MAX // largest))
    rng = rng_stream(seed, f"bootstrap.{name}")
    drawn = np.empty((draws, len(STATISTICS)))
    for index in range(draws):
        picks = rng.integers(0, len(base), len(base))
        again = picks if is_paired else rng.integers(0, len(other), len(other))
        low = np.array(statistics(base[picks]))
        high = np.array(statistics(other[again]))
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn[index] = 100 * (high - low) / low
    edge = 100 * (1 - _CONFIDENCE) / 2
    result: list[tuple[float | None, float | None]] = []
    for column in drawn.T:
        if np.isfinite(column).all():
            bounds = np.percentile(column, (edge, 100 - edge))
            result.append((float(bounds[0]), float(bounds[1])))
        else:
            result.append((None, None))
    return result


def _gap_rows(runs: Sequence[RunData]) -> list[Row]:
    names = ("mean", "median", "p90", "p95", "p99")
    return [
        _plain(f"ITL {label}", "ms", [run.summary.statistic(name, "itl") for run in runs])
        for name, label in zip(names, STATISTICS, strict=True)
    ]


def _figure_rows(runs: Sequence[RunData]) -> list[Row]:
    summaries = [run.summary for run in runs]
    rows = [
        _plain("completed", "", [s.completed for s in summaries]),
        _plain("duration", "s", [s.duration for s in summaries]),
        _plain("requests", "1/s", [s.request_throughput for s in summaries]),
        _plain("output tokens", "1/s", [s.output_throughput for s in summaries]),
    ]
    if all(s.request_goodput is not None for s in summaries):
        met = [100 * (s.slo.joint_attainment or 0.0) for s in summaries]
        rows.append(_plain("objectives met", "%", met))
        rows.append(_plain("goodput", "1/s", [s.request_goodput or 0.0 for s in summaries]))
    rows.append(_plain("GPU time", "s", [s.gpu_seconds.total for s in summaries]))
    if all(s.cost is not None for s in summaries):
        rows.append(_plain("cost", "", [s.cost or 0.0 for s in summaries]))
    if all(s.energy_j is not None for s in summaries):
        energy = [sum((s.energy_j or {}).values()) / 1e3 for s in summaries]
        rows.append(_plain("energy", "kJ", energy))
    moved = [s.kv_bytes_moved / 1e9 for s in summaries]
    rows += [
        _plain("KV moved", "GB", moved),
        _plain("preemptions", "", [s.preemptions for s in summaries]),
    ]
    rows += _model_rows(summaries)
    return [row for row in rows if any(row.values)]


def _model_rows(summaries: Sequence[Summary]) -> list[Row]:
    """Figures of the models that all runs serve beside others."""
    models = [s.models for s in summaries if not isinstance(s.models, msgspec.UnsetType)]
    if len(models) < len(summaries):
        return []
    rows: list[Row] = []
    for name in (n for n in models[0] if all(n in each for each in models)):
        own = [each[name] for each in models]
        rows += [
            _plain(f"{name}: TTFT mean", "ms", [m.mean_ttft_ms for m in own]),
            _plain(f"{name}: TTFT p95", "ms", [m.p95_ttft_ms for m in own]),
            _plain(f"{name}: TPOT mean", "ms", [m.mean_tpot_ms for m in own]),
            _plain(f"{name}: GPU time", "s", [m.gpu_seconds for m in own]),
            _plain(f"{name}: loads", "", [m.load_hits + m.load_misses for m in own]),
            _plain(f"{name}: loads from a disk", "", [m.load_misses for m in own]),
        ]
    return rows


def _plain(name: str, unit: str, values: Sequence[float]) -> Row:
    """A figure without an interval."""
    return Row(name, unit, values, [Difference(percent_of(v, values[0])) for v in values[1:]])


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table; differences whose interval excludes zero stand out. Then what differs."""
    table = _figures_table(comparison, has_intervals=True)
    has_intervals = _width(table, console) <= console.width
    if not has_intervals:
        table = _figures_table(comparison, has_intervals=False)
        # Lines that a terminal wraps are better than figures cut in half.
        console.width = max(console.width, _width(table, console))
    console.print(table)
    kind = "paired by request" if comparison.is_paired else "requests drawn from each run"
    text = f"95 % intervals from a bootstrap, {kind}; bold: zero lies outside."
    if not has_intervals:
        text += " The intervals stand in wider terminals and in --html."
    console.print(text)
    for line in known_lines(comparison):
        console.print(line, soft_wrap=True)
    if comparison.settings:
        console.print(_settings_table(comparison))


def known_lines(comparison: Comparison) -> list[str]:
    """How well the engines are known: runs of which the same is said stand in one line."""
    runs: dict[str, list[str]] = {}
    for name, known in zip(comparison.names, comparison.known, strict=True):
        if known:
            runs.setdefault(known, []).append(name)
    whole = len(comparison.names)
    return [
        known if len(names) == whole else f"{', '.join(names)}: {known}"
        for known, names in runs.items()
    ]


def _width(table: Table, console: Console) -> int:
    """Columns that it takes if it may."""
    unbounded = console.options.update(max_width=_COLUMNS_MAX)
    return console.measure(table, options=unbounded).maximum


def _figures_table(comparison: Comparison, *, has_intervals: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Comparison (latencies in ms)", title_justify="left")
    table.add_column("")
    for index, name in enumerate(comparison.names):
        table.add_column(Text(name), justify="right")
        if index:
            table.add_column("difference" if has_intervals else "diff.", justify="right")
    before = ""
    for row in comparison.rows:
        group = row.name.split()[0] if row.name.split()[0] in (*_METRICS, "ITL") else ""
        if before and group != before:
            table.add_section()
        before = group
        cells: list[Text] = [Text(number(row.values[0]))]
        for value, difference in zip(row.values[1:], row.differences, strict=True):
            style = "bold" if difference.is_clear else ""
            text = difference_text(difference, has_interval=has_intervals)
            cells += [Text(number(value)), Text(text, style=style)]
        has_unit = row.unit not in ("", "ms")
        table.add_row(Text(f"{row.name}, {row.unit}" if has_unit else row.name), *cells)
    return table


def _settings_table(comparison: Comparison) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Settings that differ", title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    for _ in comparison.names:
        table.add_column(justify="right", overflow="fold")
    table.add_row("", *map(Text, comparison.names), end_section=True)
    for key, values in comparison.settings[:SETTINGS_MAX]:
        table.add_row(Text(key), *map(Text, values))
    left = len(comparison.settings) - SETTINGS_MAX
    if left > 0:
        table.add_row(f"and {left} more")
    return table


def difference_text(difference: Difference, *, has_interval: bool = True) -> str:
    """`+3.2 % [+1.0, +5.5]`."""
    if difference.percent is None:
        return "-"
    text = f"{round(difference.percent, 2) + 0.0:+.2f} %"  # no minus sign before a zero
    if has_interval and difference.low is not None and difference.high is not None:
        text += f" [{difference.low:+.2f}, {difference.high:+.2f}]"
    return text
