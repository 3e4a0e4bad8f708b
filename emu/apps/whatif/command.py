"""`emu whatif`: replay a log, try something else, look at routing decisions; and `emu export`."""

from __future__ import annotations

from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.shared.answer import Reply, json_text, tell
from emu.apps.whatif.answer import Answer, cells_of, decision_cells
from emu.apps.whatif.options import WhatifOptions
from emu.apps.whatif.page import write_page
from emu.apps.whatif.regret import Regret
from emu.apps.whatif.replay import look
from emu.process.console import open_console
from emu.report.atomic import write_text
from emu.report.table import number

_WORST: Final = 10


def whatif_command(options: WhatifOptions) -> int:
    """Replay, try, write the files, tell what was found."""
    console = open_console()

    def watch(text: str) -> None:
        if not (options.quiet or options.as_json) and console.is_terminal:
            console.print(text, style="dim")

    answer = look(options, watch)
    options.output.mkdir(parents=True, exist_ok=True)
    data = options.output / "whatif.json"
    write_text(data, json_text(plain_of(answer), indent=1))
    page = write_page(answer, options.output)

    def show(console: Console) -> None:
        print_answer(answer, console)
        console.print(f"page: {page}", soft_wrap=True)

    return tell(Reply(show, data), options)


def plain_of(answer: Answer) -> dict[str, object]:
    """The answer without the latencies of single requests."""
    regret = answer.regret
    return {
        "log": answer.log,
        "format": answer.format,
        "requests": answer.requests,
        "skipped": answer.skipped,
        "pinned": answer.is_pinned,
        "recorded_vs_emulated": [
            {**msgspec.structs.asdict(one), "percent": one.percent} for one in answer.distances
        ],
        "paired_error_percent": [msgspec.structs.asdict(one) for one in answer.paired],
        "alternatives": [
            {
                "name": one.name,
                "error": one.error,
                "completed": one.completed,
                "gpu_seconds": one.gpu_seconds,
                "cost": one.cost,
                "changes": [msgspec.structs.asdict(change) for change in one.changes],
            }
            for one in answer.alternatives
        ],
        "regret": None
        if regret is None
        else {
            "metric": regret.metric,
            "decisions": regret.count,
            "looked_at": len(regret.decisions),
            "mean_ms": regret.mean_ms,
            "low_ms": regret.low_ms,
            "high_ms": regret.high_ms,
            "regretted": regret.regretted,
            "worst": [
                {**msgspec.structs.asdict(one), "regret_ms": one.regret_ms}
                for one in regret.decisions
            ],
        },
    }


def print_answer(answer: Answer, console: Console) -> None:
    """Tables on the terminal."""
    how = "on the replicas of the log" if answer.is_pinned else "routed as configured"
    table = Table(title=f"{answer.requests:,} requests of {answer.log} ({answer.format}), {how}")
    for column in ("", "recorded, ms", "emulated, ms", "difference"):
        table.add_column(column, justify="left" if not column else "right")
    for row in answer.distances:
        figures = (number(row.recorded_ms), number(row.emulated_ms), f"{row.percent:+.2f} %")
        table.add_row(row.name, *figures)
    console.print(table)
    if answer.alternatives:
        table = Table(title="Against the replay, request by request (mean, 95 %)")
        for column in ("what if", "TTFT, ms", "E2E, ms", "faster", "slower", "GPU seconds"):
            table.add_column(column)
        for other in answer.alternatives:
            table.add_row(*cells_of(other))
        console.print(table)
    print_regret(answer.regret, console)


def print_regret(regret: Regret | None, console: Console) -> None:
    """The worst decisions."""
    if regret is None:
        return
    title = (
        f"Regret of {len(regret.decisions)} of {regret.count} routing decisions ({regret.metric}): "
        f"{regret.mean_ms:.2f} ms each [{regret.low_ms:.2f}, {regret.high_ms:.2f}], "
        f"{100 * regret.regretted:.0f} % with more than 1 %"
    )
    table = Table(title=title)
    for column in ("request", "at, s", "went to", "best", "took, ms", "best, ms", "regret, ms"):
        table.add_column(column, justify="right")
    for one in regret.decisions[:_WORST]:
        if one.regret_ms > 0:
            table.add_row(*decision_cells(one))
    console.print(table)
