"""The summary as tables on a terminal. Owns no figures: everything comes from `Summary`.

print_summary(summary, console)     # rich.console.Console
plain_summary(summary)              # the same for a file or a pipe, without loading rich
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from emu.process.console import PIPE_COLUMNS, plain_table
from emu.report.summary import STATISTICS, Summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_HEADS: Final = ["p50" if name == "median" else name for name in STATISTICS]
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_VERDICT_STYLE = {
    "stable": "green",
    "backlogged": "yellow",
    "overloaded": "red",
    "unknown": "yellow",
}

Figure = tuple[str, str, str]
"""Name, text, style."""


def print_summary(summary: Summary, console: Console) -> None:
    """Latencies, then the rest of what one looks at first."""
    console.print(latency_table(summary))
    console.print(figures_table(summary))


def plain_summary(summary: Summary) -> str | None:
    """What `print_summary` writes to a file or a pipe; None where a line would wrap."""
    rows = [[name, *latency_cells(summary, metric)] for metric, name in _NAMES.items()]
    heads = ["", *_HEADS]
    lines = plain_table(heads, rows, right=True)
    lines.insert(0, "Latency (ms)".ljust(len(lines[0])))
    named = [(name, value) for name, value, _ in figures(summary)]
    wide, long = (max(map(len, texts)) for texts in zip(*named, strict=True))
    lines += [f"{name.ljust(wide)}  {value.ljust(long)}  " for name, value in named]
    said = "".join(name + value for name, value in named)
    if max(map(len, lines)) > PIPE_COLUMNS or not said.isascii() or not said.isprintable():
        return None
    return "\n".join(lines)


def latency_table(summary: Summary) -> Table:
    """Milliseconds by statistic."""
    from rich.table import Table

    table = Table(title="Latency (ms)", title_justify="left")
    table.add_column("")
    for head in _HEADS:
        table.add_column(head, justify="right")
    for metric, name in _NAMES.items():
        table.add_row(name, *latency_cells(summary, metric))
    return table


def latency_cells(summary: Summary, metric: str) -> list[str]:
    """A latency's statistics, ms; dashes where nothing was measured."""
    samples = summary.itl_samples if metric == "itl" else summary.completed
    if not samples:
        return ["-"] * len(STATISTICS)
    return [number(summary.statistic(statistic, metric)) for statistic in STATISTICS]


def figures_table(summary: Summary) -> Table:
    """One figure a row."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value, style in figures(summary):
        # Text, because reasons and role names are data and may look like markup.
        table.add_row(Text(name), Text(value), style=style or None)
    return table


def figures(summary: Summary) -> list[Figure]:
    """Every line below the latencies."""
    return [*_requests(summary), *_resources(summary), *remarks(summary)]


def remarks(summary: Summary) -> list[Figure]:
    """What moved and what went wrong: those of the lines that a page has no tiles for."""
    return [*_movements(summary), *_models(summary), *_warnings(summary)]


def ends(summary: Summary) -> list[str]:
    """How requests ended: `2,981 completed`, `19 cancelled`, ..."""
    counts = {
        "completed": summary.completed,
        "failed": summary.failed,
        "rejected": summary.rejected,
        "cancelled": summary.cancelled,
    }
    return [f"{n:,} {status}" for status, n in counts.items() if n or status == "completed"]


def _requests(summary: Summary) -> Iterator[Figure]:
    yield "Requests", ", ".join(ends(summary)), ""
    yield "Duration", f"{number(summary.duration)} s simulated", ""
    rates = (
        f"{number(summary.request_throughput)} requests/s",
        f"{number(summary.output_throughput)} output tokens/s",
        f"{number(summary.total_token_throughput)} tokens/s",
    )
    yield "Throughput", ", ".join(rates), ""
    slo = summary.slo
    if slo.joint_attainment is not None and summary.request_goodput is not None:
        each = (
            ("TTFT", slo.ttft_attainment),
            ("TPOT", slo.tpot_attainment),
            ("E2E", slo.e2e_attainment),
        )
        parts = ", ".join(f"{name} {part:.1%}" for name, part in each if part is not None)
        yield "Objectives", f"{slo.joint_attainment:.1%} met all ({parts})", ""
        yield "Goodput", f"{number(summary.request_goodput)} requests/s", ""
    load = summary.load
    waits = f" ({wait_growth(summary)}, mean wait {number(load.mean_wait_ms)} ms)"
    yield "Load", load.verdict + (waits if summary.completed else ""), _VERDICT_STYLE[load.verdict]


def wait_growth(summary: Summary) -> str:
    """The figure behind the verdict on load."""
    growth = round(summary.load.wait_growth_s_per_s, 3) + 0.0  # no minus sign before a zero
    return f"waiting grows {growth:+.3f} s/s"


def _resources(summary: Summary) -> Iterator[Figure]:
    gpu = summary.gpu_seconds
    if gpu.total:
        roles = ", ".join(f"{role} {number(value)}" for role, value in gpu.by_role.items())
        yield "GPU time", f"{number(gpu.total)} s ({roles}; idle {number(gpu.idle)})", ""
    if summary.cost is not None:
        yield "Cost", number(summary.cost), ""
    if summary.energy_j is not None:
        parts = ((part, j / 1e3) for part, j in summary.energy_j.items() if j)
        shares = ", ".join(f"{part} {number(kj)}" for part, kj in parts)
        total = number(sum(summary.energy_j.values()) / 1e3)
        yield "Energy", f"{total} kJ ({shares})", ""
    if summary.features:
        yield from _features(summary.features)
    if summary.prefix_hit_tokens["total"]:
        yield "Prefix hits", f"{summary.prefix_hit_rate:.1%} of prompt tokens", ""
    if summary.host_cache_bytes.get("max"):
        use = summary.host_cache_bytes
        text = f"{use['mean'] / 1e9:,.2f} GB of weights (mean; {use['max'] / 1e9:,.2f} GB at most)"
        yield "Host memory", text, ""


def _features(figures: Mapping[str, Mapping[str, object]]) -> Iterator[Figure]:
    """A line for each feature that says something."""
    from emu.features.registry import all_features  # most runs have none

    for feature in all_features():
        if feature.section in figures:
            title, text = feature.line(figures[feature.section], number)
            yield title, text, ""


def _movements(summary: Summary) -> Iterator[Figure]:
    for name, count in (
        ("Preemptions", summary.preemptions),
        ("Migrations", summary.migrations),
        ("Recomputed tokens", summary.recomputed_tokens),
    ):
        if count:
            yield name, f"{count:,}", ""
    for kind, moved in summary.bytes_moved.items():
        if moved:
            yield f"Moved ({kind})", f"{moved / 1e9:,.2f} GB", ""
    if summary.loads:
        yield "Loads", _times(summary.loads), ""


def _models(summary: Summary) -> Iterator[Figure]:
    """One line for each of several models."""
    if isinstance(summary.models, msgspec.UnsetType):
        return
    for name, model in summary.models.items():
        parts = [
            f"{model.completed:,} completed",
            f"TTFT {number(model.mean_ttft_ms)} ms (p95 {number(model.p95_ttft_ms)})",
            f"TPOT {number(model.mean_tpot_ms)} ms",
            f"GPU time {number(model.gpu_seconds)} s",
        ]
        if model.slo_attainment is not None:
            parts.append(f"{model.slo_attainment:.1%} met all")
        if model.load_hit_rate is not None:
            loads = model.load_hits + model.load_misses
            parts.append(f"{loads:,} loads, {model.load_misses:,} from a disk")
        yield f"Model {name}", ", ".join(parts), ""


def _warnings(summary: Summary) -> Iterator[Figure]:
    for name, struck in (("Faults", summary.faults), ("Faults missed", summary.faults_missed)):
        if struck:
            yield name, _times(struck), "yellow"
    for name, counts in (("Skipped", summary.rows_skipped), ("Clipped", summary.rows_clipped)):
        if counts:
            parts = [f"{count:,} {reason}" for reason, count in counts.items()]
            yield f"{name} rows", ", ".join(parts), "yellow"
    for index, (reason, count) in enumerate(summary.reasons.items()):
        yield "" if index else "Not completed", f"{count:,} {reason}", "yellow"
    if summary.partial:
        yield "Partial", summary.partial_reason, "red"


def _times(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} x{count:,}" for kind, count in counts.items())


def number(value: float) -> str:
    """Four significant digits or two decimals, whichever says more, thousands separated.

    A count (int) is written as it is.
    """
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}" if size >= 10_000 else f"{value:,.1f}"
    return f"{value:.2f}" if size >= 1 or value == 0 else f"{value:.3g}"
