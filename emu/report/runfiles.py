"""Small files of a run and their columns: itl.json, experts.csv, transitions.csv, requests.csv."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log2
from pathlib import Path
from typing import Final

import msgspec

from emu.config.names import read_input
from emu.errors import InputError
from emu.process.prepared import prepared
from emu.report.atomic import write_bytes
from emu.report.csvtext import CsvFile, text_cell
from emu.report.itl import HEAT_BINS_PER_OCTAVE, GapStats

# --------------------------------------------------------------------------------------------------
# `itl.json`: the distribution of inter-token gaps, small enough to draw and compare later.
#
#     write_gaps(directory / "itl.json", gaps.finish())
#     read_gaps(directory / "itl.json")
#
# The summary has the figures; this file has the curve. Beyond `VALUES_MAX` distinct gaps the values
# are gathered into 128 bins per octave (within 0.4 %), at the bin's mean.

VALUES_MAX: Final = 4096
_BINS_PER_OCTAVE: Final = 128


class GapFile(msgspec.Struct, kw_only=True):
    """Content of itl.json."""

    samples: int
    values_ns: list[int]
    """Ascending."""
    counts: list[int]
    heat_width_ns: int
    heat_bins_per_octave: int
    """Bins of each doubling of a gap, in the heat map."""
    heat: list[tuple[int, int, int]]
    """(interval, bin, gaps) where there were any."""


def write_gaps(path: Path, gaps: GapStats) -> None:
    """Write the file, whole or not at all."""
    values, counts = _thinned(gaps.values, gaps.counts)
    content = GapFile(
        samples=gaps.samples,
        values_ns=values,
        counts=counts,
        heat_width_ns=gaps.heat_width_ns,
        heat_bins_per_octave=HEAT_BINS_PER_OCTAVE,
        heat=gaps.heat,
    )
    write_bytes(path, msgspec.json.encode(content) + b"\n")


def read_gaps(path: Path) -> GapFile:
    """Read the file."""
    try:
        return msgspec.json.decode(read_input(path), type=prepared(GapFile))
    except msgspec.DecodeError as error:
        raise InputError(str(path), None, "", f"not a gap file of emu: {error}") from None


def _thinned(values: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
    if len(values) <= VALUES_MAX:
        return values, counts
    thin, totals, last, total, added = [], [], -1, 0, 0
    for value, count in zip(values, counts, strict=True):
        which = int(log2(max(value, 1)) * _BINS_PER_OCTAVE)
        if which != last and total:
            thin.append(round(added / total))
            totals.append(total)
            total = added = 0
        last = which
        total += count
        added += value * count
    return [*thin, round(added / total)], [*totals, total]


# --------------------------------------------------------------------------------------------------
# experts.csv: how many tokens each expert computed, where a gate spreads them unevenly.
#
# One row for each (replica, expert): tokens in one layer, which are the same in every layer,
# because one routing serves all of them. Written only for gates other than `balanced`, whose loads
# are even.

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


# --------------------------------------------------------------------------------------------------
# Figures of requests in a file of rows, read one column at a time.
#
# Percentiles of millions of requests then need memory for one column, not for all. Not compiled:
# an extension class takes no weak references.

_READ_ROWS: Final = 16_384


class FileColumns(Mapping[str, "array[int]"]):
    """Columns of a binary file of int64 rows, each read anew at each access.

    The file may be unlinked; its contents go with this object.
    """

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self._names = names
        self._file = os.open(path, os.O_RDONLY)
        self._rows = os.fstat(self._file).st_size // (8 * len(names))
        weakref.finalize(self, os.close, self._file)

    def __getitem__(self, name: str) -> array[int]:
        index, width = self._names.index(name), len(self._names)
        column = array("q")
        for start in range(0, self._rows, _READ_ROWS):
            data = os.pread(self._file, _READ_ROWS * 8 * width, start * 8 * width)
            column.extend(array("q", data)[index::width])
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# --------------------------------------------------------------------------------------------------
# Changes of replicas' states, and everything else that a timeline should mark.
#
#     log = TransitionLog(directory / "transitions.csv")
#     log.record(time_ns, replica, "prefill", "shutting_prefill", writer="planner", cause="surplus")
#     log.close()
#
#     marks = MarkLog(directory / "marks.csv")
#     marks.record(time_ns, "fault", "replica 3", "replica_crash")    # kind, target, text
#     marks.close()
#
# The first record of a replica has an empty `from`: its state at the start. Rows are written in
# call order, which is time order.

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
