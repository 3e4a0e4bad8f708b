"""The answer of a plan as a page: the best clusters, what was ruled out, the flags."""

from __future__ import annotations

from pathlib import Path

from emu.apps.plan.answer import Answer, Ranked
from emu.report.atomic import write_text
from emu.report.page.chart import PALETTE, Axis, Chart, Limit, Series, spread_axis
from emu.report.page.pages import page
from emu.report.table import number


def write_page(answer: Answer, directory: Path) -> Path:
    """Write report.html; its path."""
    room = answer.headroom
    headroom = f"meets everything up to {room.factor:g} times the traffic tried"
    if room.breaks_at is not None:
        headroom = (
            f"{100 * (room.factor - 1):.0f} % more traffic; at "
            f"{100 * (room.breaks_at - 1):.0f} % more {' and '.join(room.breaks)} breaks"
        )
    flags = directory / "vllm.txt"
    text = page(
        "plan.html",
        title=f"emu: plan for {answer.model} ({answer.weights})",
        charts=_charts(answer),
        facts=[
            answer.engine,
            f"{answer.rate_per_s:g} requests/s",
            *answer.objectives,
            f"{answer.runs} runs",
        ],
        best=answer.rows[0].label,
        headroom=headroom,
        head=[
            "cluster",
            *(["GPUs, mean"] if any(row.system for row in answer.rows) else []),
            "$/h" if answer.has_prices else "GPUs",
            "of a limit",
            *_labels(answer),
        ],
        rows=[_cells(row, has_mean=any(one.system for one in answer.rows)) for row in answer.rows],
        refused=list(answer.refused.items()),
        flags=flags.read_text(encoding="utf-8") if flags.is_file() else "",
        files=", ".join(sorted(path.name for path in directory.glob("*.[ty][oa]ml"))),
    )
    path = directory / "report.html"
    write_text(path, text)
    return path


def _labels(answer: Answer) -> list[str]:
    return [f"{reading.label}, ms" for reading in answer.rows[0].readings]


def _cells(row: Ranked, *, has_mean: bool) -> list[str]:
    cells = [row.label, *([f"{row.gpus_mean:.1f}"] if has_mean else [])]
    cells += [f"{row.cost_per_h:,.2f}", f"{100 * row.worst:.0f} %"]
    for reading in row.readings:
        text = number(reading.mean_ms)
        if reading.low_ms is not None and reading.high_ms is not None:
            text += f" [{number(reading.low_ms)}, {number(reading.high_ms)}]"
        cells.append(text)
    return cells


def _charts(answer: Answer) -> list[Chart]:
    """What the clusters cost, and how near to their limits they are."""
    if len(answer.rows) < 2:
        return []
    costs = [row.cost_per_h for row in answer.rows]
    used = [100 * row.worst for row in answer.rows]
    return [
        Chart(
            chart_id="clusters",
            section="clusters",
            title="Cost and how near the tightest objective is to its limit",
            x=spread_axis(min(costs), max(costs), "$/h" if answer.has_prices else "GPUs"),
            y=Axis(title="% of the limit", unit="%", low=0, high=110),
            limits=[Limit(axis="y", value=100, text="the limit")],
            is_wide=True,
            series=[
                Series(
                    name="clusters",
                    color=PALETTE[0],
                    x=costs,
                    y=used,
                    shape="points",
                    size=9,
                    text=[row.label for row in answer.rows],
                    labels=[row.label.partition(": ")[2] for row in answer.rows],
                )
            ],
        )
    ]
