"""The summary as tables on a terminal. Owns no figures: everything comes from `Summary`.

print_summary(summary, console)     # rich.console.Console; plain text when not a terminal
"""

from __future__ import annotations

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


def figures(summary: Summary) -> list[tuple[str, str, str]]:
    """Name, text and style of every line below the latencies."""
    others = [
        f"{count} {name}"
        for name, count in (
            ("failed", summary.failed),
            ("rejected", summary.rejected),
            ("cancelled", summary.cancelled),
        )
        if count
    ]
    rows = [
        ("Requests", ", ".join([f"{summary.completed} completed", *others]), ""),
        ("Duration", f"{number(summary.duration)} s simulated", ""),
        (
            "Throughput",
            f"{number(summary.request_throughput)} requests/s, "
            f"{number(summary.output_throughput)} output tokens/s, "
            f"{number(summary.total_token_throughput)} tokens/s",
            "",
        ),
    ]
    if summary.slo.joint_attainment is not None and summary.request_goodput is not None:
        parts = [
            f"{name} {attained:.1%}"
            for name, attained in (
                ("TTFT", summary.slo.ttft_attainment),
                ("TPOT", summary.slo.tpot_attainment),
                ("E2E", summary.slo.e2e_attainment),
            )
            if attained is not None
        ]
        rows.append(
            (
                "Objectives",
                f"{summary.slo.joint_attainment:.1%} met all ({', '.join(parts)}); "
                f"goodput {number(summary.request_goodput)} requests/s",
                "",
            )
        )
    load = summary.load
    growth = round(load.wait_growth_s_per_s, 3) + 0.0  # no minus sign before a zero
    rows.append(
        (
            "Load",
            f"{load.verdict} (waiting grows {growth:+.3f} s per s, "
            f"mean wait {number(load.mean_wait_ms)} ms)",
            _VERDICT_STYLE[load.verdict],
        )
    )
    gpu = summary.gpu_seconds
    if gpu.total:
        roles = ", ".join(f"{role} {number(value)}" for role, value in gpu.by_role.items())
        rows.append(("GPU time", f"{number(gpu.total)} s ({roles}; idle {number(gpu.idle)})", ""))
    if summary.cost is not None:
        rows.append(("Cost", number(summary.cost), ""))
    for name, count in (
        ("Preemptions", summary.preemptions),
        ("Migrations", summary.migrations),
        ("Recomputed tokens", summary.recomputed_tokens),
    ):
        if count:
            rows.append((name, f"{count:,}", ""))
    if summary.prefix_hit_tokens["total"]:
        rows.append(("Prefix hits", f"{summary.prefix_hit_rate:.1%} of prompt tokens", ""))
    for name, struck in (("Faults", summary.faults), ("Faults missed", summary.faults_missed)):
        if struck:
            rows.append((name, ", ".join(f"{kind} x{n}" for kind, n in struck.items()), "yellow"))
    for kind, moved in summary.bytes_moved.items():
        if moved:
            rows.append((f"Moved ({kind})", f"{moved / 1e9:,.2f} GB", ""))
    if summary.loads:
        parts = [f"{method} x{count}" for method, count in summary.loads.items()]
        rows.append(("Loads", ", ".join(parts), ""))
    if summary.host_cache_bytes.get("max"):
        use = summary.host_cache_bytes
        text = f"{use['mean'] / 1e9:,.2f} GB of weights (mean; {use['max'] / 1e9:,.2f} GB at most)"
        rows.append(("Host memory", text, ""))
    if summary.energy_j is not None:
        shares = ", ".join(f"{part} {number(j / 1e3)}" for part, j in summary.energy_j.items())
        total = number(sum(summary.energy_j.values()) / 1e3)
        rows.append(("Energy", f"{total} kJ ({shares})", ""))
    for name, counts in (("Skipped", summary.rows_skipped), ("Clipped", summary.rows_clipped)):
        if counts:
            parts = [f"{count} {reason}" for reason, count in counts.items()]
            rows.append((f"{name} rows", ", ".join(parts), "yellow"))
    for reason, count in summary.reasons.items():
        rows.append(("", f"{count} {reason}", "yellow"))
    if summary.partial:
        rows.append(("Partial", summary.partial_reason, "red"))
    return rows


def number(value: float) -> str:
    """Four significant digits or two decimals, whichever says more, thousands separated."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}" if size >= 10_000 else f"{value:,.1f}"
    return f"{value:.2f}" if size >= 1 or value == 0 else f"{value:.3g}"
