"""The answer of a plan in words: lines of the terminal, sentences of the page. Pure."""

from __future__ import annotations

import math
from typing import Final

from emu.apps.plan.answer import Answer, Bound, Headroom, Ranked
from emu.apps.plan.beside import opinion_lines
from emu.apps.plan.costs import costs_told
from emu.apps.plan.day import day_lines
from emu.apps.plan.doubt import doubt_told
from emu.apps.plan.survive import Fate
from emu.report.table import number

_LAYOUTS_SHOWN: Final = 4
"""In a line of the terminal."""


def bounds_text(bounds: list[Bound]) -> str:
    """`16 to 28 B200; 40 to 72 H200`."""
    return "; ".join(f"{one.low} to {one.high} {one.gpu}" for one in bounds)


def lines_of(answer: Answer) -> list[str]:
    """The answer in words."""
    best, *others = answer.rows
    lines = []
    if answer.median is not None:
        lines.append(
            f"meets them with {100 * answer.confidence:g} %: {sure_text(best)}; "
            f"with 50 %: {sure_text(answer.median)}"
        )
    lines.append(_row_text(best, answer))
    lines += [f"cost: {'; '.join(costs_told(best.costs))}"] if costs_told(best.costs) else []
    lines += [f"as cheap: {_row_text(row, answer)}" for row in others[:3]]
    lines += [
        f"next, {'in too few draws' if row.is_missed else 'not drawn'}: {_row_text(row, answer)}"
        for row in answer.others[:3]
    ]
    lines.append(f"headroom: {headroom_text(answer.headroom)}")
    if answer.doubt is not None:
        lines.append(doubt_told(answer.doubt))
    if answer.day is not None:
        lines += day_lines(answer.day, has_prices=answer.has_prices)
    lines += survivor_lines(answer)
    lines += opinion_lines(answer.beside, has_prices=answer.has_prices)
    lines.append(f"rests on {answer.rests_on}")
    lines += [f"unmeasured: {text}" for text in unmeasured_told(answer)]
    lines += [f"ruled out: {_some(kinds)}: {why}" for why, kinds in refused_kinds(answer)]
    return lines


def unmeasured_told(answer: Answer) -> list[str]:
    """GPUs whose times no measured kernel stands behind; empty if there is none."""
    if not answer.unmeasured:
        return []
    return [f"no measured kernel stands behind the times of {', '.join(answer.unmeasured)}"]


def _some(layouts: list[str]) -> str:
    """The first ones, and how many more (the page has all)."""
    more = len(layouts) - _LAYOUTS_SHOWN
    return ", ".join(layouts[:_LAYOUTS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def sure_text(row: Ranked) -> str:
    """`24 x B200: 6P+6D, TP 2 (19 of 20 draws)`."""
    return f"{row.label} ({row.met} of {row.of} draws)" if row.of else row.label


def chosen_text(answer: Answer) -> str:
    """Which cluster the files hold: the survivor, where one was asked for."""
    if answer.survivor is None:
        return answer.rows[0].label
    return f"{answer.survivor.label}, which survives the loss of a {answer.survive}"


def drawn_text(row: Ranked) -> str:
    """What the draws said of a cluster that is not among the answers."""
    return "too few" if row.is_missed else "not drawn"


def headroom_text(room: Headroom) -> str:
    """How much more traffic, in words."""
    if room.breaks_at is None:
        return f"meets everything up to {room.factor:g} times the traffic tried"
    return (
        f"{100 * (room.factor - 1):.0f} % more traffic with the engine as it is; at "
        f"{100 * (room.breaks_at - 1):.0f} % more {' and '.join(room.breaks)} breaks"
    )


def refused_kinds(answer: Answer) -> list[tuple[str, list[str]]]:
    """Reason -> layouts that it rules out."""
    kinds: dict[str, list[str]] = {}
    for layout, reason in answer.refused.items():
        kinds.setdefault(reason, []).append(layout)
    return list(kinds.items())


def survivor_lines(answer: Answer) -> list[str]:
    """What a loss does to the best cluster, and which one lives through it."""
    if not answer.survive:
        return []
    lines = [f"without a spare: {fate_text(fate)}" for fate in answer.fates_of_best]
    if answer.survivor is None:
        return [*lines, f"no cluster that was tried survives the loss of a {answer.survive}"]
    row = answer.survivor
    price = f", {row.cost_per_h:,.2f} $/h" if answer.has_prices else ""
    lines.append(f"survives the loss of a {answer.survive}: {sure_text(row)}{price}")
    lines += [f"after losing {fate_text(fate)}" for fate in answer.fates]
    return lines


def fate_text(fate: Fate) -> str:
    """`machine 0 (2P+1D): TTFT p95 31,000 ms, ..., misses`."""
    figures = ", ".join(
        f"{label} {number(ms)} ms" for label, ms in fate.figures_ms.items() if math.isfinite(ms)
    )
    figures = figures or "no request is served after it"
    lost = f", {fate.unserved} requests not served" if fate.unserved else ""
    return f"{fate.loss}: {figures}{lost}, {'meets' if fate.is_met else 'misses'}"


def _row_text(row: Ranked, answer: Answer) -> str:
    readings = []
    for reading in row.readings:
        text = f"{reading.label} {number(reading.mean_ms)} ms"
        if reading.low_ms is not None and reading.high_ms is not None:
            text += f" [{number(reading.low_ms)}, {number(reading.high_ms)}]"
        if reading.drawn_low_ms is not None and reading.drawn_high_ms is not None:
            low, high = number(reading.drawn_low_ms), number(reading.drawn_high_ms)
            text += f" (engine drawn: {low} to {high})"
        readings.append(text)
    cost = f", {row.cost_per_h:,.2f} $/h" if answer.has_prices else ""
    mean = f", {row.gpus_mean:.1f} GPUs on average" if row.system else ""
    return f"{row.label}; {', '.join(readings)}{mean}{cost}"
