"""The summary as tables on a terminal. Owns no figures: everything comes from `Summary`.

print_summary(summary, console)     # rich.console.Console; plain text when not a terminal
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from emu.report.summary import STATISTICS, Summary

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


def latency_table(summary: Summary) -> Table:
    """Milliseconds by statistic."""
    table = Table(title="Latency (ms)", title_justify="left")
    table.add_column("")
    for statistic in STATISTICS:
        table.add_column("p50" if statistic == "median" else statistic, justify="right")
    for metric, name in _NAMES.items():
        table.add_row(
            name, *(number(summary.statistic(statistic, metric)) for statistic in STATISTICS)
        )
    return table


def figures_table(summary: Summary) -> Table:
    """One figure a row."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value, style in figures(summary):
        # Text, because reasons and role names are data and may look like markup.
        table.add_row(Text(name), Text(value), style=style or None)
    return table


def figures(summary: Summary) -> list[Figure]:
    """Every line below the latencies."""
    return [
        *_requests(summary),
        *_resources(summary),
        *_movements(summary),
        *_warnings(summary),
    ]


def _requests(summary: Summary) -> Iterator[Figure]:
    counts = {
        "completed": summary.completed,
        "failed": summary.failed,
        "rejected": summary.rejected,
        "cancelled": summary.cancelled,
    }
    shown = [f"{n:,} {status}" for status, n in counts.items() if n or status == "completed"]
    yield "Requests", ", ".join(shown), ""
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
        goodput = f"goodput {number(summary.request_goodput)} requests/s"
        yield "Objectives", f"{slo.joint_attainment:.1%} met all ({parts}); {goodput}", ""
    load = summary.load
    growth = round(load.wait_growth_s_per_s, 3) + 0.0  # no minus sign before a zero
    waits = f"waiting grows {growth:+.3f} s per s, mean wait {number(load.mean_wait_ms)} ms"
    yield "Load", f"{load.verdict} ({waits})", _VERDICT_STYLE[load.verdict]


def _resources(summary: Summary) -> Iterator[Figure]:
    gpu = summary.gpu_seconds
    if gpu.total:
        roles = ", ".join(f"{role} {number(value)}" for role, value in gpu.by_role.items())
        yield "GPU time", f"{number(gpu.total)} s ({roles}; idle {number(gpu.idle)})", ""
    if summary.cost is not None:
        yield "Cost", number(summary.cost), ""
    if summary.energy_j is not None:
        shares = ", ".join(f"{part} {number(j / 1e3)}" for part, j in summary.energy_j.items())
        total = number(sum(summary.energy_j.values()) / 1e3)
        yield "Energy", f"{total} kJ ({shares})", ""
    if summary.prefix_hit_tokens["total"]:
        yield "Prefix hits", f"{summary.prefix_hit_rate:.1%} of prompt tokens", ""
    if summary.host_cache_bytes.get("max"):
        use = summary.host_cache_bytes
        text = f"{use['mean'] / 1e9:,.2f} GB of weights (mean; {use['max'] / 1e9:,.2f} GB at most)"
        yield "Host memory", text, ""


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


def _warnings(summary: Summary) -> Iterator[Figure]:
    for name, struck in (("Faults", summary.faults), ("Faults missed", summary.faults_missed)):
        if struck:
            yield name, _times(struck), "yellow"
    for name, counts in (("Skipped", summary.rows_skipped), ("Clipped", summary.rows_clipped)):
        if counts:
            parts = [f"{count:,} {reason}" for reason, count in counts.items()]
            yield f"{name} rows", ", ".join(parts), "yellow"
    for reason, count in summary.reasons.items():
        yield "", f"{count:,} {reason}", "yellow"
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
