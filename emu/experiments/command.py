"""`emu experiment NAME`: run, print the tables, keep them as Markdown."""

from __future__ import annotations

import sys
from pathlib import Path

from emu.errors import InputError
from emu.experiments.scaling import EXPERIMENTS, Runner, Table, markdown


def run_experiment(name: str, *, configs: Path, output: Path, clusters: str, quiet: bool) -> int:
    """Run one experiment. Raises InputError for an unknown name or cluster."""

    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise InputError("experiment", None, "NAME", f"unknown {name!r}; there are {known}")
    names = [letter for letter in clusters.upper() if letter != ","]
    if not names or any(letter not in "AB" for letter in names):
        raise InputError("experiment", None, "--clusters", "expected A, B or AB")
    from emu.terminal import open_console

    console = open_console()

    def tell(case: str) -> None:
        if not quiet:
            print(f"running {case}", file=sys.stderr)

    runner = Runner(configs, output, tell)
    texts: list[str] = []
    for title, table in EXPERIMENTS[name](runner, names):
        console.print(_pretty(title, table))
        texts.append(markdown(title, table))
    output.mkdir(parents=True, exist_ok=True)
    page = output / f"{name}.md"
    page.write_text("\n".join(texts))
    console.print(f"tables: {page}", soft_wrap=True)
    return 0


def _pretty(title: str, rows: Table) -> object:
    from rich.table import Table as Pretty

    pretty = Pretty(title=title)
    for index, head in enumerate(rows[0]):
        pretty.add_column(head, justify="left" if index == 0 else "right")
    for row in rows[1:]:
        pretty.add_row(*row)
    return pretty
