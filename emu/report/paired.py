"""Systems over seeds, side by side: means with 95 % intervals, differences paired by seed. Pure.

    rows = paired_rows([SeedSet("static", [1, 2], {"mean_ttft_ms": [80.0, 82.0]}), other])

A system is a set of runs that differ in their seed. Seeds that two systems share are pairs: what
the seed does to both is taken out of their difference. The interval is Student's t; a star says
that it excludes zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from emu.documents import DocumentView
from emu.errors import InputError
from emu.report.drawn import SHOWN
from emu.report.grid import Cells, html_table, text_table
from emu.report.intervals import Mean, mean_of
from emu.report.table import number

TITLE: Final = "Means over seeds, paired by seed"
NOTE: Final = "± half of the 95 % interval; *: the difference, paired by seed, is not zero"


_STILL: Final = 1e-12
"""Values that differ by less, relative to their mean, are the same but for rounding."""


class SeedSet(msgspec.Struct, frozen=True):
    """One system: its seeds, and of each figure the values in their order."""

    name: str
    seeds: list[int]
    figures: Mapping[str, Sequence[float]]


class SeedRow(msgspec.Struct, frozen=True):
    """A figure of all systems; differences are in per cent of the first one's mean."""

    name: str
    means: list[Mean]
    percent: list[float | None]
    half: list[float | None]
    """Half of the interval of each difference."""


class PairedComparison(msgspec.Struct, frozen=True):
    """Two or more systems; a notebook shows the table."""

    names: list[str]
    seeds: list[int]
    """The seeds of the first system."""
    rows: list[SeedRow]
    title: str = TITLE

    @property
    def headings(self) -> list[str]:
        """What stands above the columns of `cells`."""
        first, *others = self.names
        return ["", first, *(text for name in others for text in (name, "difference, %"))]

    @property
    def cells(self) -> Cells:
        """The table as words."""
        return [
            [row.name, mean_text(row.means[0])]
            + [
                text
                for mean, percent, half in zip(row.means[1:], row.percent, row.half, strict=True)
                for text in (mean_text(mean), difference_text(percent, half))
            ]
            for row in self.rows
        ]

    @property
    def notes(self) -> list[str]:
        """What stands below the table."""
        still = [
            name
            for index, name in enumerate(self.names)
            if all(r.means[index].half is None and r.means[index].count > 1 for r in self.rows)
        ]
        told = f"no interval for {', '.join(still)}: the seed changes nothing in these runs"
        return [NOTE, *([told] if still else [])]

    def __repr__(self) -> str:
        """The table, as `emu compare` prints it."""
        return text_table(self.title, self.headings, self.cells, self.notes)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_table(self.title, self.headings, self.cells, self.notes)


def compared(
    sets: Sequence[SeedSet], title: str = TITLE, shown: Mapping[str, str] = SHOWN
) -> PairedComparison:
    """Systems against the first; `shown` are the figures of the table and their labels.

    Raises InputError for a system that shares no seed with the first.
    """
    for one in sets:
        if len(set(one.seeds)) < len(one.seeds):
            raise InputError("compare", None, one.name, "two of its runs have the same seed")
        if not set(one.seeds) & set(sets[0].seeds):
            raise InputError("compare", None, one.name, "the sets of runs have different seeds")
    names = [one.name for one in sets]
    return PairedComparison(names, sets[0].seeds, paired_rows(sets, shown), title)


def paired_rows(sets: Sequence[SeedSet], shown: Mapping[str, str] = SHOWN) -> list[SeedRow]:
    """A row for each figure that all systems have."""
    return [
        _row(label, [(one.seeds, one.figures[name]) for one in sets])
        for name, label in shown.items()
        if all(name in one.figures for one in sets)
    ]


def _row(label: str, columns: Sequence[tuple[Sequence[int], Sequence[float]]]) -> SeedRow:
    base = dict(zip(*columns[0], strict=True))
    means = [seed_mean(values) for _, values in columns]
    percents: list[float | None] = []
    halves: list[float | None] = []
    for (seeds, values), mean in zip(columns[1:], means[1:], strict=True):
        pairs = [(base[s], v) for s, v in zip(seeds, values, strict=True) if s in base]
        apart = mean_of([after - before for before, after in pairs])
        middle = mean_of([before for before, _ in pairs]).mean
        percents.append(percent_of(middle + apart.mean, middle))
        varies = means[0].half is not None or mean.half is not None
        is_known = varies and apart.half is not None and middle != 0
        halves.append(100 * (apart.half or 0.0) / abs(middle) if is_known else None)
    return SeedRow(label, means, percents, halves)


def seed_mean(values: Sequence[float]) -> Mean:
    """Mean and interval over seeds; no interval where the seed changes nothing."""
    mean = mean_of(list(values))
    is_still = max(values) - min(values) <= _STILL * abs(mean.mean)
    return Mean(mean.mean, None, mean.count) if is_still else mean


def numbers_of(figures: Sequence[DocumentView]) -> dict[str, list[float]]:
    """The figures that all runs have as numbers, with the value of each run."""
    return {
        name: [float(one[name]) for one in figures]
        for name in (figures[0] if figures else ())
        if all(is_number(one.get(name)) for one in figures)
    }


def is_number(value: Any) -> bool:
    """Whether it is a number that can be averaged."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def percent_of(value: float, base: float) -> float | None:
    """How much larger than the base, per cent."""
    return None if base == 0 else 100 * (value - base) / base


def mean_text(mean: Mean) -> str:
    """`12.3 ± 0.4`."""
    return number(mean.mean) + ("" if mean.half is None else f" ± {number(mean.half)}")


def difference_text(percent: float | None, half: float | None) -> str:
    """`-12.30 ± 1.40 *`: a difference and half of its interval, with a star where that excludes
    zero."""
    if percent is None:
        return "-"
    if half is None:
        return f"{percent:+.2f}"
    return f"{percent:+.2f} ± {half:.2f}{' *' if abs(percent) > half else ''}"
