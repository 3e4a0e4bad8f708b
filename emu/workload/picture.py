"""A description of a workload as text for a terminal, and as an SVG file."""

from __future__ import annotations

from html import escape
from typing import Final

from emu.workload.describe import Description, Lengths

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


def picture_svg(description: Description) -> str:
    """A self-contained SVG: rate over time above, the two length histograms below."""
    d = description
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 460" role="img" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(d.source)}</title>",
        '<rect width="720" height="460" fill="#fff"/>',
        f'<text x="20" y="24" font-size="15">{escape(d.source)}: {d.requests:,} requests, '
        f"{d.rate_per_s:.2f}/s, {d.prompt.mean:.0f} in / {d.output.mean:.0f} out</text>",
    ]
    rates = d.rates_per_s or [0.0]
    span = f"{d.first_s:.0f} to {d.last_s:.0f} s"
    labels = [f"{d.first_s + index * d.rate_bin_s:.1f} s" for index in range(len(rates))]
    parts += _bars(20, 50, 680, 160, rates, labels, f"arrivals per second, {span}", "#4269d0")
    for x, name, lengths, colour in (
        (20, "prompt", d.prompt, "#3ca951"),
        (370, "output", d.output, "#ff725c"),
    ):
        counts = [float(count) for _, count in lengths.histogram]
        names = [f"{low:,}+" for low, _ in lengths.histogram]
        title = f"{name} tokens (bins double), p50 {lengths.p50:.0f}, p99 {lengths.p99:.0f}"
        parts += _bars(x, 260, 330, 160, counts, names, title, colour)
    return "\n".join([*parts, "</svg>", ""])


def _bars(
    x: int,
    y: int,
    width: int,
    height: int,
    values: list[float],
    labels: list[str],
    title: str,
    colour: str,
) -> list[str]:
    top = max(values) or 1.0
    step = width / len(values)
    parts = [f'<text x="{x}" y="{y}">{escape(title)}; highest {top:,.6g}</text>']
    for index, (value, label) in enumerate(zip(values, labels, strict=True)):
        tall = height * value / top
        parts.append(
            f'<rect x="{x + index * step:.1f}" y="{y + 10 + height - tall:.1f}" '
            f'width="{max(step - 1, 0.5):.1f}" height="{tall:.1f}" fill="{colour}">'
            f"<title>{escape(label)}: {value:,.6g}</title></rect>"
        )
    for index in sorted({0, len(values) // 2, len(values) - 1}):
        place = x + index * step
        parts.append(f'<text x="{place:.1f}" y="{y + height + 26}">{escape(labels[index])}</text>')
    return parts
