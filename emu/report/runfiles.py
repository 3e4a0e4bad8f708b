"""Small files of a run: experts.csv, flows.csv, transitions.csv, marks.csv.

    log = TransitionLog(directory / "transitions.csv")
    log.record(time_ns, replica, "prefill", "shutting_prefill", writer="planner", cause="surplus")
    log.close()

    marks = MarkLog(directory / "marks.csv")
    marks.record(time_ns, "fault", "replica 3", "replica_crash")    # kind, target, text
    marks.close()

The first record of a replica has an empty `from`: its state at the start. Rows are written in
call order, which is time order.

experts.csv says how many tokens each expert computed, where a gate spreads them unevenly: one row
for each (replica, expert), tokens in one layer, which are the same in every layer, because one
routing serves all of them. Written only for gates other than `balanced`, whose loads are even.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from emu.report.csvtext import CsvFile, text_cell

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


TRANSITION_COLUMNS: Final = ("time_ns", "replica", "from", "to", "writer", "cause")
MARK_COLUMNS: Final = ("time_ns", "kind", "target", "text")


FLOW_COLUMNS: Final = ("source", "destination", "kind", "transfers", "bytes")


def write_flows(path: Path, flows: Iterable[tuple[int, int, str, int, int]]) -> None:
    """flows.csv: what went from replica to replica, by kind, in order of both; no file if nothing.

    Source -1: a copy in the machine's memory, or the disk.
    """
    rows = sorted(flows)
    if not rows:
        return
    file = CsvFile(path, FLOW_COLUMNS)
    for source, destination, kind, transfers, size_bytes in rows:
        file.line(f"{source},{destination},{text_cell(kind)},{transfers},{size_bytes}\n")
    file.close()


class TransitionLog:
    """Writer of transitions.csv."""

    def __init__(self, path: Path) -> None:
        self.file = CsvFile(path, TRANSITION_COLUMNS)

    @property
    def rows(self) -> int:
        """Records so far."""
        return self.file.rows

    def record(
        self, time_ns: int, replica: int, old: str, new: str, writer: str, cause: str
    ) -> None:
        """A replica went from `old` to `new` because `writer` said so."""
        self.file.line(f"{time_ns},{replica},{old},{new},{text_cell(writer)},{text_cell(cause)}\n")

    def close(self) -> None:
        """Write the rest."""
        self.file.close()


class MarkLog:
    """Writer of marks.csv: faults, recoveries, commands, plans."""

    def __init__(self, path: Path) -> None:
        self.file = CsvFile(path, MARK_COLUMNS)

    def record(self, time_ns: int, kind: str, target: str = "", text: str = "") -> None:
        """Something happened that explains what follows."""
        self.file.line(f"{time_ns},{text_cell(kind)},{text_cell(target)},{text_cell(text)}\n")

    def close(self) -> None:
        """Write the rest."""
        self.file.close()
