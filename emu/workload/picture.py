"""A description of a workload as text for a terminal."""

from __future__ import annotations

from typing import Final

from emu.workload.statistics import Description, Lengths

_BARS: Final = " ▁▂▃▄▅▆▇█"
_TENANTS_SHOWN: Final = 5


def picture(description: Description, width: int = 60) -> str:
    """Plain text of about `width` columns: figures, rate over time, histograms."""
    d = description
    lines = [
        f"{d.source} ({d.format}): {d.requests:,} requests in {d.lines:,} lines",
        f"arrivals {d.first_s:.3f} .. {d.last_s:.3f} s, {d.rate_per_s:.3f}/s, "
        f"peak {d.peak_per_s}/s, gap cv {d.gap_cv:.2f}",
    ]
    if d.sessions:
        lines.append(
            f"sessions {d.sessions:,}, {d.turns_mean:.1f} turns each, "
            f"{d.tool_s_mean:.2f} s between turns"
        )
    lines.append(f"tokens {d.prompt.total:,} in, {d.output.total:,} out, {d.tokens_per_s:,.0f}/s")
    if len(d.tenants) > 1:
        shown = ", ".join(f"{name or '-'} {count}" for name, count in d.tenants[:_TENANTS_SHOWN])
        lines.append(f"tenants {len(d.tenants)}: {shown}")
    if d.sharing.requests_with_ids:
        scope = " of the part looked at" if d.sharing.is_partial else ""
        lines.append(f"shared prefixes: {100 * d.sharing.fraction:.1f} % of prompt tokens{scope}")
    if d.rates_per_s:
        lines += ["", f"arrivals per second, {d.rate_bin_s:.3g} s a column"]
        lines.append(sparkline(d.rates_per_s) + f"  max {max(d.rates_per_s):.2f}")
    for name, lengths in (("prompt", d.prompt), ("output", d.output)):
        lines += ["", _summary(name, lengths), *_histogram(lengths, width)]
    for kind, counts in (
        ("skipped", d.notes.skipped),
        ("clipped", d.notes.clipped),
        ("rejected", d.notes.rejected),
    ):
        lines += [f"{kind}: {count} {reason}" for reason, count in counts.items()]
    lines += [f"warning: {text}" for text in d.notes.warnings]
    return "\n".join(lines) + "\n"


def sparkline(values: list[float]) -> str:
    """One character for each value, its height in eighths of the largest; 0 is blank."""
    top = max(values, default=0.0)
    if top <= 0:
        return " " * len(values)
    return "".join(_BARS[0 if value <= 0 else max(1, round(8 * value / top))] for value in values)


def _summary(name: str, lengths: Lengths) -> str:
    return (
        f"{name} tokens: mean {lengths.mean:.0f}, p50 {lengths.p50:.0f}, p90 {lengths.p90:.0f}, "
        f"p99 {lengths.p99:.0f}, max {lengths.max:,}"
    )


def _histogram(lengths: Lengths, width: int) -> list[str]:
    top = max(count for _, count in lengths.histogram)
    room = max(10, width - 22)
    rows = []
    for low, count in lengths.histogram:
        eighths = 0 if not count else max(1, round(8 * room * count / top))
        bar = "█" * (eighths // 8) + (_BARS_LEFT[eighths % 8] if eighths % 8 else "")
        rows.append(f"{low:>9,}+ {bar:<{room}} {count:,}")
    return rows


_BARS_LEFT: Final = " ▏▎▍▌▋▊▉"
