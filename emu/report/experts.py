"""experts.csv: how many tokens each expert computed, where a gate spreads them unevenly.

One row for each (replica, expert): tokens in one layer, which are the same in every layer, because
one routing serves all of them. Written only for gates other than `balanced`, whose loads are even.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from emu.report.csvtext import CsvFile

COLUMNS: Final = ("replica", "expert", "tokens", "share")


def write_experts(path: Path, loads: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Write (replica, tokens of each expert) pairs; nothing if there are none."""
    if not loads:
        return
    file = CsvFile(path, COLUMNS)
    for replica, tokens in loads:
        total = max(1, sum(tokens))
        for expert, count in enumerate(tokens):
            file.line(f"{replica},{expert},{count},{count / total:.6f}\n")
    file.close()
