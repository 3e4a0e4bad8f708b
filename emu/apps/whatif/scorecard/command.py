"""`emu scorecard`: an outside router beside emu's, and with hindsight."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.shared.answer import Reply, json_text, tell
from emu.apps.whatif.answer import change_text, decision_cells
from emu.apps.whatif.scorecard.options import ScorecardOptions
from emu.apps.whatif.scorecard.score import Row, Scorecard, score
from emu.process.console import open_console
from emu.report.atomic import write_text
from emu.report.page.pages import page

COLUMNS = (
    "router", "completed", "TTFT, ms", "p99", "E2E, ms", "p99", "objectives", "prefix hits",
    "imbalance", "TTFT against yours, ms",
)  # fmt: skip


def scorecard_command(options: ScorecardOptions) -> int:
    """Replay, try, write the files, tell what was found."""
    console = open_console()

    def watch(text: str) -> None:
        if not (options.quiet or options.as_json) and console.is_terminal:
            console.print(text, style="dim")

    card = score(options, watch)
    options.output.mkdir(parents=True, exist_ok=True)
    data = options.output / "scorecard.json"
    write_text(data, json_text({**msgspec.to_builtins(card), "hits_lost": card.hits_lost}))
    path = write_page(card, options.output)

    def show(console: Console) -> None:
        table = Table(*COLUMNS, title=f"{card.requests:,} requests of {card.recording}")
        for row in card.rows:
            table.add_row(*cells_of(row))
        console.print(table)
        for sentence in sentences_of(card):
            console.print(sentence, soft_wrap=True)
        console.print(f"page: {path}", soft_wrap=True)

    return tell(Reply(show, data), options)


def cells_of(row: Row) -> list[str]:
    """A row of the table."""
    if row.error or not row.completed:
        return [row.name, row.error or "no request completed", *[""] * (len(COLUMNS) - 2)]
    latencies = (row.ttft_ms, row.ttft_p99_ms, row.e2e_ms, row.e2e_p99_ms)
    by_metric = {change.metric: change for change in row.changes}
    return [
        row.name,
        f"{row.completed:,}",
        *(f"{value:.1f}" for value in latencies),
        "-" if row.met is None else f"{100 * row.met:.1f} %",
        f"{100 * row.hit_rate:.1f} %",
        "-" if math.isnan(row.imbalance) else f"{row.imbalance:.2f}",
        change_text(by_metric["TTFT"]) if "TTFT" in by_metric else "",
    ]


def sentences_of(card: Scorecard) -> list[str]:
    """What the table does not say."""
    found = [
        f"An outside router chose the replica of {card.chosen:,} of {card.requests:,} requests; "
        f"the best of emu's routers finds {100 * card.hits_lost:.1f} % of the prompt tokens more "
        "in caches."
    ]
    regret = card.regret
    if regret is None:
        return [*found, f"No regret: {card.note}."]
    text = (
        f"Regret of a decision against an oracle ({regret.metric}): mean {regret.mean_ms:.2f} ms, "
        f"95 % interval {regret.low_ms:.2f} to {regret.high_ms:.2f} ms, from "
        f"{len(regret.decisions)} of {regret.count} decisions; {100 * regret.regretted:.0f} % had "
        "more than 1 % to save. The oracle sends one request to the best replica in hindsight, "
        "all others stay."
    )
    return [*found, text]


def write_page(card: Scorecard, directory: Path) -> Path:
    """Write report.html; its path."""
    regret = card.regret
    worst = [] if regret is None else [one for one in regret.decisions if one.regret_ms > 0]
    text = page(
        "scorecard.html",
        title="emu: scorecard of a router",
        charts=[],
        sentences=sentences_of(card),
        columns=COLUMNS,
        rows=[cells_of(row) for row in card.rows],
        worst=[decision_cells(one) for one in worst],
    )
    path = directory / "report.html"
    write_text(path, text)
    return path
