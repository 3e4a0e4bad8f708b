"""Two to ten runs side by side, or a run against a real server.

    comparison = compare_runs([Path("runs/a"), Path("runs/b")], seed=0)
    print_comparison(comparison, console)

The first run is the base of all differences. The intervals come from a bootstrap over requests
(95 %, seeded): when all runs completed the same requests (id and prompt), the pairs are drawn,
which takes the workload's own spread out of the difference; otherwise each run is drawn on its
own. Gaps between tokens are pooled over requests when they are recorded, so ITL has no interval.
Beside the figures stands what differs between the configurations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.config.names import json_object, read_input
from emu.errors import InputError
from emu.report.rundata import RunData, read_run
from emu.report.summary import Summary
from emu.report.table import number
from emu.rng import rng_stream
from emu.units import NS_PER_MS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# --- runs side by side ----------------------------------------------------------------------------
# --------------------------------------------------------------------------------------------------
# Which settings of several runs differ: what a comparison compares. Pure.
#
# `[output]` is left out: where the files of a run went says nothing about it.

Setting = tuple[str, list[str]]
"""Dotted key, its value in each run."""

_ABSENT: Final = object()
_PLACES: Final = frozenset({"output"})


def differing(configs: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Keys whose values are not the same in all runs, in the order of the first configuration."""
    if not all(configs):
        return []  # a directory without run.json
    return [
        setting
        for key in dict.fromkeys(key for config in configs for key in config)
        if key not in _PLACES
        for setting in _walk(key, [config.get(key, _ABSENT) for config in configs])
    ]


def _walk(path: str, values: Sequence[Any]) -> list[Setting]:
    if all(value == values[0] for value in values):
        return []
    # A table that a run lacks is one difference, not one for each of its keys.
    if all(isinstance(value, Mapping) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return [
            setting
            for key in keys
            for setting in _walk(f"{path}.{key}", [value.get(key, _ABSENT) for value in values])
        ]
    if all(isinstance(value, list) for value in values) and _has_tables(values):
        return [
            setting
            for index in range(max(map(len, values)))
            for setting in _walk(
                f"{path}.{index}",
                [value[index] if index < len(value) else _ABSENT for value in values],
            )
        ]
    return [(path, [_text(value) for value in values])]


def _has_tables(lists: Sequence[list[Any]]) -> bool:
    return any(isinstance(item, Mapping) for items in lists for item in items)


def _text(value: Any) -> str:
    if value is _ABSENT or value is None:
        return "-"
    if isinstance(value, Mapping):
        return "given"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


# --- Two to ten runs side by side -----------------------------------------------------------------

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
    return Comparison(names, rows, is_paired, differing([run.config for run in runs]))


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


def percent_of(value: float, base: float) -> float | None:
    """How much larger than the base, per cent."""
    return None if base == 0 else 100 * (value - base) / base


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


# --- printing ------------------------------------------------------------------------------------
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
    if comparison.settings:
        console.print(_settings_table(comparison))


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


# --- a run against a real server: distributions, and request by request ---------------------------
#     comparison = compare_measured(run_directory, Path("requests.jsonl"))
#     print_measured(comparison, console)
#
# Distributions are compared as LLMServingSim's validation does: mean and percentiles of each
# (linear interpolation), difference = (run - measured) / measured. vLLM's `queued_ts` is written
# when the engine looks at its inbox, between two iterations; where it is the anchor, the run's TTFT
# and E2E are counted from the same instant (`intake_ns` after the arrival). Distributions hide
# errors of single requests which cancel out, so the same requests are also paired by id: absolute
# error relative to the measurement. TPOT leaves requests with one output token out on both sides.

# --------------------------------------------------------------------------------------------------
# Measurements of a real server, read from what the tools write.
#
#     measurement = read_measurement(path)
#
# Two formats, recognized by content:
#
# * one JSON object per line, as LLMServingSim's recorder of vLLM writes (`requests.jsonl`):
#   request_id, input_toks, output_toks, arrival_time, queued_ts, first_token_ts, last_token_ts, s.
#   The clock of `arrival_time` may differ from that of the rest. It anchors TTFT and latency if it
#   lies within 100,000 s of the first and the last token; otherwise `queued_ts` does. `input_toks`
#   may be lacking: it only tells whether pairs of requests are the same ones.
# * one JSON object, the result of `vllm bench serve --save-result`: with `--save-detailed`
#   ttfts, itls, output_lens, errors (s); else the summary's figures only.


ANCHOR_LIMIT_S: Final = 100_000.0
_SUMMARY_METRICS: Final = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "E2E": "e2el"}
_SUMMARY_STATISTICS: Final = {
    "mean": "mean",
    "median": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
}


class Measurement(msgspec.Struct):
    """Latencies in ms. Arrays may be empty when only figures are known."""

    request_ids: NDArray[np.int64]
    """Line numbers from `bench-<n>`, or positions; what pairs with a run's request_id."""
    prompt_tokens: NDArray[np.int64]
    """-1 where not recorded."""
    output_tokens: NDArray[np.int64]
    ttft_ms: Floats
    tpot_ms: Floats
    """NaN for requests with one output token: they have no TPOT."""
    e2e_ms: Floats
    itl_ms: Floats
    """All gaps, pooled; empty if not recorded."""
    makespan_s: float
    """First anchor to last token; 0 if not known."""
    figures: dict[tuple[str, str], float]
    """(metric, statistic) -> ms, when there are no single requests."""
    anchor: str
    """arrival_time, queued_ts, mixed, or client."""
    skipped: int
    """Requests that failed, and are left out."""


def read_measurement(path: Path) -> Measurement:
    """Read a file of either format, or the recording in a directory."""
    if path.is_dir():
        places = [path / "requests.jsonl", path / "vllm" / "requests.jsonl"]
        path = next((place for place in places if place.is_file()), places[0])
    data = read_input(path)
    try:
        whole = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _read_lines(path, data)
    if isinstance(whole, dict) and "first_token_ts" not in whole:
        return _read_bench(path, whole)
    return _read_lines(path, data)


# --- one object per line -------------------------------------------------------------------------
def _read_lines(path: Path, data: bytes) -> Measurement:
    rows: list[tuple[float, float, float, float]] = []
    lengths: list[tuple[int, int]] = []
    anchors: set[str] = set()
    ends: list[float] = []
    found = list(records(path, data))
    for line, record in found:
        first, last = (
            number_of(path, line, record, key) for key in ("first_token_ts", "last_token_ts")
        )
        tokens = int(number_of(path, line, record, "output_toks"))
        arrival = record.get("arrival_time")
        near = arrival is not None and all(
            abs(token - number_of(path, line, record, "arrival_time")) <= ANCHOR_LIMIT_S
            for token in (first, last)
        )
        anchor = "arrival_time" if near else "queued_ts"
        anchors.add(anchor)
        start = number_of(path, line, record, anchor)
        if not start <= first <= last:
            raise InputError(
                str(path), line, "first_token_ts", "tokens before the request, or out of order"
            )
        tpot = (last - first) / (tokens - 1) if tokens > 1 else float("nan")
        rows.append((first - start, tpot, last - start, start))
        ends.append(last)
        prompt = record.get("input_toks")
        lengths.append((prompt if isinstance(prompt, int) else -1, tokens))
    if not rows:
        raise InputError(str(path), None, "", "no measured request")
    table = np.array(rows)
    return Measurement(
        request_ids=np.array(request_ids([record for _, record in found]), dtype=np.int64),
        prompt_tokens=np.array([prompt for prompt, _ in lengths], dtype=np.int64),
        output_tokens=np.array([tokens for _, tokens in lengths], dtype=np.int64),
        ttft_ms=table[:, 0] * 1e3,
        tpot_ms=table[:, 1] * 1e3,
        e2e_ms=table[:, 2] * 1e3,
        itl_ms=np.zeros(0),
        makespan_s=max(ends) - min(row[3] for row in rows),
        figures={},
        anchor=anchors.pop() if len(anchors) == 1 else "mixed",
        skipped=0,
    )


def records(path: Path, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, record) of each line that is not empty; InputError at one that is no record."""
    for line, text in enumerate(data.split(b"\n"), start=1):
        if text.strip():
            yield line, json_object(path, line, text)


def number_of(path: Path, line: int | None, record: dict[str, Any], key: str) -> float:
    """A number of a record that was read. Raises InputError with its place."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        problem = "missing" if value is None else f"expected a number, got {value!r}"
        raise InputError(str(path), line, key, problem)
    return float(value)


def request_ids(found: Sequence[dict[str, Any]]) -> list[int]:
    """`bench-17` -> 17 if all records have a number of their own, else their positions."""
    tails = [str(record.get("request_id", "")).rpartition("-")[2] for record in found]
    if all(tail.isascii() and tail.isdigit() and len(tail) < 19 for tail in tails):
        ids = [int(tail) for tail in tails]
        if len(set(ids)) == len(ids):
            return ids
    return list(range(len(found)))


# --- vLLM's benchmark ----------------------------------------------------------------------------
def _read_bench(path: Path, result: dict[str, Any]) -> Measurement:
    duration = result.get("duration")
    makespan_s = float(duration) if isinstance(duration, (int, float)) else 0.0
    if "ttfts" not in result:
        return _bench_figures(path, result, makespan_s)
    lists = {}
    for key in ("ttfts", "itls", "output_lens"):
        value = result.get(key)
        if not isinstance(value, list) or len(value) != len(result["ttfts"]):
            raise InputError(str(path), None, key, "expected an array with one entry per request")
        lists[key] = value
    errors = result.get("errors") or [""] * len(lists["ttfts"])
    rows = []
    gaps: list[float] = []
    for index, (ttft, itls, tokens, error) in enumerate(
        zip(lists["ttfts"], lists["itls"], lists["output_lens"], errors, strict=False)
    ):
        if error or not tokens:
            continue
        try:
            spent = float(sum(itls))
            tpot = spent / (tokens - 1) if tokens > 1 else float("nan")
            rows.append((index, ttft * 1e3, tpot * 1e3, (ttft + spent) * 1e3))
            gaps.extend(gap * 1e3 for gap in itls)
        except TypeError:
            raise InputError(str(path), None, f"itls.{index}", "expected numbers") from None
    if not rows:
        raise InputError(str(path), None, "", "no measured request")
    table = np.array(rows)
    ids = table[:, 0].astype(np.int64)
    prompts = result.get("input_lens")
    if not isinstance(prompts, list) or len(prompts) != len(lists["ttfts"]):
        prompts = [-1] * len(lists["ttfts"])
    return Measurement(
        request_ids=ids,
        prompt_tokens=_lengths(prompts)[ids],
        output_tokens=_lengths(lists["output_lens"])[ids],
        ttft_ms=table[:, 1],
        tpot_ms=table[:, 2],
        e2e_ms=table[:, 3],
        itl_ms=np.array(gaps),
        makespan_s=makespan_s,
        figures={},
        anchor="client",
        skipped=len(lists["ttfts"]) - len(rows),
    )


def _lengths(values: list[Any]) -> NDArray[np.int64]:
    return np.array([n if isinstance(n, int) else -1 for n in values], dtype=np.int64)


def _bench_figures(path: Path, result: dict[str, Any], makespan_s: float) -> Measurement:
    figures = {
        (metric, label): float(result[f"{statistic}_{key}_ms"])
        for metric, key in _SUMMARY_METRICS.items()
        for statistic, label in _SUMMARY_STATISTICS.items()
        if isinstance(result.get(f"{statistic}_{key}_ms"), (int, float))
    }
    if not figures:
        problem = "neither measured requests nor a result of vllm bench serve"
        raise InputError(str(path), None, "", problem)
    empty = np.zeros(0)
    failed = result.get("failed")
    none = np.zeros(0, dtype=np.int64)
    return Measurement(
        request_ids=none,
        prompt_tokens=none,
        output_tokens=none,
        ttft_ms=empty,
        tpot_ms=empty,
        e2e_ms=empty,
        itl_ms=empty,
        makespan_s=makespan_s,
        figures=figures,
        anchor="client",
        skipped=failed if isinstance(failed, int) else 0,
    )


# --- A run against a real server ------------------------------------------------------------------

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
    rows: list[MeasuredRow] = []
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
                rows.append(MeasuredRow(metric, statistic, base, figure, percent_of(figure, base)))
    makespan = None
    if measurement.makespan_s:
        duration = run.summary.duration
        difference = percent_of(duration, measurement.makespan_s)
        makespan = MeasuredRow("makespan", "", measurement.makespan_s, duration, difference)
    _, here, there = np.intersect1d(
        run.completed("request_id"), measurement.request_ids, return_indices=True
    )
    pairs = (here, there)
    return MeasuredComparison(
        rows=rows,
        paired=_paired(mine, theirs, pairs),
        makespan=makespan,
        requests_measured=len(measurement.request_ids),
        requests_run=len(mine["TTFT"]),
        anchor=measurement.anchor,
        skipped=measurement.skipped,
        unlike=_unlike(run, measurement, pairs),
    )


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
