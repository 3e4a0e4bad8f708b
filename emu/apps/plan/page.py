"""The answer of a plan as a page: the clusters, how sure they are, costs, what was ruled out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from emu.apps.plan.answer import Answer, Ranked, Reading
from emu.apps.plan.beside import opinion_lines
from emu.apps.plan.costs import costs_told
from emu.apps.plan.day import day_lines
from emu.apps.plan.doubt import doubt_told
from emu.apps.plan.words import (
    bounds_text,
    chosen_text,
    drawn_text,
    headroom_text,
    refused_kinds,
    survivor_lines,
    unmeasured_told,
)
from emu.report.atomic import write_text
from emu.report.page.chart import PALETTE, Axis, Chart, Limit, Series
from emu.report.page.pages import page
from emu.report.table import number

PAGE: Final = "report.html"
_BINS: Final = 12
_CLUSTERS_MAX: Final = 12
_ROW_PX: Final = 26
_LABEL_MAX: Final = 34
"""Characters of a cluster's name beside a bar: a narrow screen has no more room."""


def write_page(answer: Answer, directory: Path) -> Path:
    """Write report.html; its path."""
    flags = directory / "vllm.txt"
    best = answer.rows[0]
    text = page(
        "plan.html",
        title=f"emu: plan for {answer.model} ({answer.weights})",
        charts=[*_cost_chart(answer), *_draw_charts(best)],
        facts=[
            answer.engine,
            f"{answer.rate_per_s:g} requests/s",
            *answer.objectives,
            f"{answer.runs} runs",
            *([f"{answer.run_s:g} s of arrivals each"] if answer.run_s else []),
        ],
        best=best.label,
        tiles=_tiles(answer),
        lines=_lines(answer),
        survivors=survivor_lines(answer),
        beside=[
            line.removeprefix("beside, ")
            for line in opinion_lines(answer.beside, has_prices=answer.has_prices)
        ],
        head=_head(answer),
        rows=[_cells(row, answer) for row in [*answer.rows, *answer.others]],
        refused=[(why, ", ".join(layouts)) for why, layouts in refused_kinds(answer)],
        chosen=chosen_text(answer),
        flags=flags.read_text(encoding="utf-8") if flags.is_file() else "",
        files=", ".join(sorted(path.name for path in directory.glob("*.[ty][oa]ml"))),
    )
    path = directory / PAGE
    write_text(path, text)
    return path


def _tiles(answer: Answer) -> list[tuple[str, str, str]]:
    """(what, figure, what to know of it)."""
    best = answer.rows[0]
    tiles = []
    if best.of:
        sure = f"met in {best.met} of {best.of} draws"
        tiles.append((f"meets with {100 * answer.confidence:g} %", _gpus_text(best), sure))
    else:
        tiles.append(("meets, engine as it is", _gpus_text(best), "no draws"))
    if answer.median is not None:
        row = answer.median
        tiles.append(("meets with 50 %", _gpus_text(row), row.label))
    if answer.survivor is not None:
        row = answer.survivor
        price = f", {row.cost_per_h:,.2f} $/h" if answer.has_prices else ""
        told = f"{row.label}{price}"
        tiles.append((f"survives a lost {answer.survive}", _gpus_text(row), told))
    if answer.has_prices:
        tiles.append(("price", f"{best.cost_per_h:,.2f} $/h", f"{best.costs.per_year:,.0f} a year"))
    room = answer.headroom
    tiles.append(("headroom", f"{100 * (room.factor - 1):.0f} %", "engine as it is"))
    return tiles


def _gpus_text(row: Ranked) -> str:
    return f"{row.gpus} GPU{'s' if row.gpus != 1 else ''}"


def _lines(answer: Answer) -> list[str]:
    lines = [f"Headroom: {headroom_text(answer.headroom)}."]
    if costs_told(answer.rows[0].costs):
        lines.append(f"Cost: {'; '.join(costs_told(answer.rows[0].costs))}.")
    if answer.doubt is not None:
        lines.append(f"How sure: {doubt_told(answer.doubt)}.")
    if answer.day is not None:
        told = day_lines(answer.day, has_prices=answer.has_prices)
        lines += [f"{line[0].upper()}{line[1:]}." for line in told]
    lines.append(f"Rests on {answer.rests_on}.")
    lines += [f"Unmeasured: {text}." for text in unmeasured_told(answer)]
    lines.append(f"By arithmetic, before any run: {bounds_text(answer.bounds)}.")
    return lines


def _head(answer: Answer) -> list[str]:
    return [
        "cluster",
        *(["GPUs, mean"] if any(row.system for row in answer.rows) else []),
        "$/h" if answer.has_prices else "GPUs",
        *(["$ per million tokens in", "out"] if answer.has_prices else []),
        "draws that meet",
        *(f"{reading.label}, ms" for reading in answer.rows[0].readings),
    ]


def _cells(row: Ranked, answer: Answer) -> list[str]:
    cells = [row.label]
    cells += [f"{row.gpus_mean:.1f}"] if any(one.system for one in answer.rows) else []
    cells.append(f"{row.cost_per_h:,.2f}")
    if answer.has_prices:
        cells += [f"{row.costs.per_million_in:.3g}", f"{row.costs.per_million_out:.3g}"]
    cells.append(f"{row.met} of {row.of}" if row.of else drawn_text(row))
    return cells + [_reading_text(reading) for reading in row.readings]


def _reading_text(reading: Reading) -> str:
    text = number(reading.mean_ms)
    if reading.low_ms is not None and reading.high_ms is not None:
        text += f" [{number(reading.low_ms)}, {number(reading.high_ms)}]"
    if reading.drawn_low_ms is not None and reading.drawn_high_ms is not None:
        text += f"; drawn {number(reading.drawn_low_ms)} to {number(reading.drawn_high_ms)}"
    return text


class _Bars(NamedTuple):
    """Bars of one color."""

    name: str
    color: str
    shows: list[bool]
    """By row."""


def _cost_chart(answer: Answer) -> list[Chart]:
    """What the best of each layout costs: a bar with its name."""
    rows = [*answer.rows, *answer.others][:_CLUSTERS_MAX]
    if len(rows) < 2:
        return []
    parts = [
        _Bars(
            "meets with the confidence",
            PALETTE[0],
            [row.of > 0 or not answer.median for row in rows],
        ),
        _Bars(
            "engine as it is",
            PALETTE[1],
            [bool(answer.median) and not row.of for row in rows],
        ),
    ]
    return [
        Chart(
            chart_id="costs",
            section="clusters",
            title="The cheapest cluster of each layout",
            x=Axis(title="$/h" if answer.has_prices else "GPUs", low=0),
            y=Axis(names=[_short_label(row.label) for row in rows], inverse=True),
            is_wide=True,
            height=90 + _ROW_PX * len(rows),
            series=[
                Series(
                    name=part.name,
                    color=part.color,
                    shape="bar",
                    x=[
                        row.cost_per_h if is_in else 0.0
                        for row, is_in in zip(rows, part.shows, strict=True)
                    ],
                    y=[float(index) for index in range(len(rows))],
                    text=[row.label for row in rows],
                )
                for part in parts
                if any(part.shows)
            ],
        )
    ]


def _short_label(label: str) -> str:
    """`20 B200 6P+4D TP 2`, `8 B200 4 colocated TP 2`: a name that fits beside a bar."""
    gpus, _, shape = label.partition(": ")
    words = gpus.replace(" x ", " ").split("-")[0]
    return f"{words} {shape.replace(',', '')}"[:_LABEL_MAX]


def _draw_charts(row: Ranked) -> list[Chart]:
    """How the objectives of the best cluster fall over the draws."""
    return [
        _histogram(index, reading)
        for index, reading in enumerate(row.readings)
        if len(reading.drawn_ms) > 1 and math.isfinite(max(reading.drawn_ms))
    ]


def _histogram(index: int, reading: Reading) -> Chart:
    values: Sequence[float] = reading.drawn_ms
    high = max(*values, reading.limit_ms) * 1.02
    low = min(*values, reading.limit_ms) * 0.98
    counts, edges = np.histogram(values, bins=_BINS, range=(low, high))
    x: list[float] = []
    y: list[float] = []
    for count, left, right in zip(counts.tolist(), edges[:-1], edges[1:], strict=True):
        x += [float(left), float(right)]
        y += [float(count), float(count)]
    return Chart(
        chart_id=f"draws{index}",
        section="sure",
        title=f"{reading.label} over {len(values)} draws of the engine",
        x=Axis(
            title=f"{reading.label}, ms",
            unit="ms",
            low=float(f"{low:.4g}"),
            high=float(f"{high:.4g}"),
        ),
        y=Axis(title="draws", low=0, whole=True),
        limits=[Limit(axis="x", value=reading.limit_ms, text="limit")],
        series=[
            Series(name="draws", color=PALETTE[0], shape="line", x=x, y=y, area=True),
        ],
    )
