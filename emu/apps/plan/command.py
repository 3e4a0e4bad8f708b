"""`emu plan`: the answer in words, or its file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from emu.apps.plan.answer import Answer, Ranked
from emu.apps.plan.options import PlanCommand
from emu.apps.plan.plan import planned
from emu.apps.shared.answer import Reply, progress, tell
from emu.report.table import number


def plan_command(options: PlanCommand) -> int:
    """Search, write the files, tell what was found."""
    with progress(options, "runs") as watch:
        answer = planned(options, watch)
    directory = Path(options.output)

    def show(console: Console) -> None:
        for line in lines_of(answer):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        files = sorted(path.name for path in directory.iterdir() if path.is_file())
        console.print(f"{answer.runs} runs; {directory}: {', '.join(files)}", soft_wrap=True)

    return tell(Reply(show, directory / "plan.json"), options)


def lines_of(answer: Answer) -> list[str]:
    """The answer in words."""
    best, *others = answer.rows
    lines = [f"{_row_text(best, answer)}"]
    lines += [f"next best: {_row_text(row, answer)}" for row in others[:3]]
    room = answer.headroom
    if room.breaks_at is None:
        lines.append(f"headroom: meets everything up to {room.factor:g} times the traffic tried")
    else:
        more = 100 * (room.factor - 1)
        lines.append(
            f"headroom: {more:.0f} % more traffic; at {100 * (room.breaks_at - 1):.0f} % more "
            f"{' and '.join(room.breaks)} breaks"
        )
    kinds: dict[str, list[str]] = {}
    for layout, reason in answer.refused.items():
        kinds.setdefault(reason, []).append(layout)
    lines += [f"ruled out: {', '.join(layouts)}: {reason}" for reason, layouts in kinds.items()]
    return lines


def _row_text(row: Ranked, answer: Answer) -> str:
    readings = []
    for reading in row.readings:
        text = f"{reading.label} {number(reading.mean_ms)} ms"
        if reading.low_ms is not None and reading.high_ms is not None:
            text += f" [{number(reading.low_ms)}, {number(reading.high_ms)}]"
        readings.append(text)
    cost = f", {row.cost_per_h:,.2f} $/h" if answer.has_prices else ""
    mean = f", {row.gpus_mean:.1f} GPUs on average" if row.system else ""
    return f"{row.label}; {', '.join(readings)}{mean}{cost}"
