"""`emu experiment NAME`: run, print the tables, keep them as Markdown with the pictures beside.

pairings   three models and traffics x systems x clusters A and B (BlitzScale Fig. 17, 18)
ablation   +Network, +Multicast, +Live (BlitzScale Fig. 20)
six        six prefill replicas at once (Fig. 21)
cache      bytes of weights in host memory (Fig. 19)
fleet      ten models on one fleet whose host memory holds three
paper      the headline figures of BlitzScale
loads      what loads may cost besides moving bytes, in the paper's setting
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from emu.apps.experiments.ablation import ablation
from emu.apps.experiments.cache import cache
from emu.apps.experiments.fleet import fleet
from emu.apps.experiments.loads import loads
from emu.apps.experiments.options import ExperimentOptions
from emu.apps.experiments.pairings import pairings
from emu.apps.experiments.paper import paper
from emu.apps.experiments.runner import Runner, Shown
from emu.apps.experiments.sixatonce import six
from emu.errors import InputError
from emu.report.atomic import write_text

EXPERIMENTS: Final[Mapping[str, Callable[[Runner, Sequence[str]], Iterator[Shown]]]] = (
    MappingProxyType(
        {
            "pairings": pairings,
            "ablation": ablation,
            "six": six,
            "cache": cache,
            "fleet": fleet,
            "paper": paper,
            "loads": loads,
        }
    )
)


def markdown(shown: Shown) -> str:
    """A table or a picture for the documentation."""
    if shown.svg:
        return f"![{shown.title}]({shown.name})\n"
    head, *rows = shown.table
    lines = [f"**{shown.title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


_BLOCK: Final = re.compile(r"(<!-- printed -->\n).*?(<!-- end of printed -->)", re.DOTALL)


def run_experiment(options: ExperimentOptions) -> int:
    """Run one experiment. Raises InputError for an unknown name, cluster or page."""
    from emu.process.console import open_console

    name, output, page = options.name, options.output, options.page
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise InputError("experiment", None, "NAME", f"unknown {name!r}; there are {known}")
    names = [letter for letter in options.clusters.upper() if letter != ","]
    if not names or any(letter not in "AB" for letter in names):
        raise InputError("experiment", None, "--clusters", "expected A, B or AB")
    if not 1 <= options.seeds <= 100:
        raise InputError("experiment", None, "--seeds", "expected 1 to 100")
    before = _page(page)
    console = open_console()

    def tell(case: str) -> None:
        if not options.quiet:
            print(f"running {case}", file=sys.stderr)

    runner = Runner(options.configs, output, tell, options.seeds, options.traces)
    texts: list[str] = []
    output.mkdir(parents=True, exist_ok=True)
    for shown in EXPERIMENTS[name](runner, names):
        texts.append(markdown(shown))
        if not shown.svg:
            console.print(_pretty(shown))
            continue
        for directory in [output] if page is None else [output, page.parent]:
            write_text(directory / shown.name, shown.svg)
        console.print(f"picture: {output / shown.name}", soft_wrap=True)
    text = "\n".join(texts)
    write_text(output / f"{name}.md", text)
    console.print(f"tables: {output / name}.md", soft_wrap=True)
    if page is not None:
        write_text(page, _BLOCK.sub(lambda found: f"{found[1]}\n{text}\n{found[2]}", before))
    return 0


def _page(page: Path | None) -> str:
    """The text of the page that is to hold the tables."""
    if page is None:
        return ""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(str(page), None, "", error.strerror or str(error)) from None
    if not _BLOCK.search(text):
        raise InputError(str(page), None, "", "no <!-- printed --> ... <!-- end of printed -->")
    return text


def _pretty(shown: Shown) -> object:
    from rich.table import Table as Pretty

    pretty = Pretty(title=shown.title)
    for index, head in enumerate(shown.table[0]):
        pretty.add_column(head, justify="left" if index == 0 else "right")
    for row in shown.table[1:]:
        pretty.add_row(*row)
    return pretty
