"""`itl.json`: the distribution of inter-token gaps, small enough to draw and compare later.

    write_gaps(directory / "itl.json", gaps.finish())
    read_gaps(directory / "itl.json")

The summary has the figures; this file has the curve. Beyond `VALUES_MAX` distinct gaps the values
are gathered into 128 bins per octave (within 0.4 %), at the bin's mean.
"""

from __future__ import annotations

from math import log2
from pathlib import Path
from typing import Final

import msgspec

from emu.config.input_files import read_input
from emu.errors import InputError
from emu.process.prepared import prepared
from emu.report.atomic import write_bytes
from emu.report.itl import HEAT_BINS_PER_OCTAVE, GapStats

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
    thin = _thinned(gaps.values, gaps.counts)
    content = GapFile(
        samples=gaps.samples,
        values_ns=thin.values,
        counts=thin.counts,
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


class _Distinct(msgspec.Struct, frozen=True):
    """Distinct gaps, ascending, and how many there were of each."""

    values: list[int]
    counts: list[int]


def _thinned(values: list[int], counts: list[int]) -> _Distinct:
    if len(values) <= VALUES_MAX:
        return _Distinct(values, counts)
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
    return _Distinct([*thin, round(added / total)], [*totals, total])
