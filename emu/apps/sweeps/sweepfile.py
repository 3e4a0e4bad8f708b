"""The sweep file: one Struct for each table, conditions on figures, and how it is read.

    base = "cluster.toml"               # the config that every point starts from
    output = "../runs/capacity"         # default: runs/NAME beside the sweep file
    [set]                               # overrides of every point, dotted keys
    [grid] | [[list]] | [random] | [search] | [pareto]      # exactly one

Keys of points are dotted keys of a config, written with quotes ("router.policy" = [...]) or
without (router.policy = [...]). Raises InputError; nothing is run here.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct, field

from emu.config.places import line_of, locate
from emu.config.schema import doc
from emu.config.suggestions import unknown_key
from emu.config.tomlfile import read_toml
from emu.documents import Document
from emu.errors import InputError
from emu.process.prepared import prepared

Count = Annotated[int, Meta(ge=1, le=100_000)]
Per = Annotated[int, Meta(ge=1, le=1000)]


class SweepTable(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Base of all tables."""


class RangeTable(SweepTable, kw_only=True, frozen=True):
    """Where the values of one key are drawn from."""

    values: Annotated[list[Any], doc("Any of these.")] = field(default_factory=list)
    min: Annotated[float | None, doc("Smallest number.")] = None
    max: Annotated[float | None, doc("Largest number.")] = None
    log: Annotated[bool, doc("Evenly in the logarithm.")] = False
    integer: Annotated[bool, doc("Whole numbers only.")] = False


class RandomTable(SweepTable, kw_only=True, frozen=True):
    """Points drawn at random."""

    points: Annotated[Count, doc("How many.")]
    seed: Annotated[int, doc("Of the draws; the runs keep the config's."), Meta(ge=0)] = 0
    keys: Annotated[Document, doc("Dotted key -> range (see below).")]


class SearchTable(SweepTable, kw_only=True, frozen=True):
    """The largest or smallest value of one key that meets conditions, by bisection."""

    key: Annotated[str, doc("Dotted key of a number, such as a rate or a count.")]
    goal: Annotated[Literal["highest", "lowest"], doc("Which value is wanted.")] = "highest"
    min: Annotated[float, doc("Lower end of the range.")]
    max: Annotated[float, doc("Upper end of the range.")]
    integer: Annotated[bool, doc("Whole numbers only.")] = False
    tolerance: Annotated[
        float, Meta(gt=0, le=1), doc("Stop when the bracket is this narrow, relative to its end.")
    ] = 0.02
    points_per_round: Annotated[
        Per, doc("Values tried at once between the ends; the answer does not depend on --jobs.")
    ] = 3
    meet: Annotated[list[str], Meta(min_length=1), doc('Conditions, such as "p99_ttft_ms < 2000".')]
    max_unserved: Annotated[
        float, Meta(ge=0, le=1), doc("Part of the requests that may be rejected or fail.")
    ] = 0.0


class ParetoTable(SweepTable, kw_only=True, frozen=True):
    """The front of two or three figures, searched with Optuna (extra `search`)."""

    points: Annotated[Count, doc("How many points are tried.")] = 40
    points_per_round: Annotated[Per, doc("Points tried at once.")] = 8
    seed: Annotated[int, doc("Of the search."), Meta(ge=0)] = 0
    minimize: Annotated[
        list[str], Meta(min_length=1, max_length=3), doc("Figures of summary.json to minimize.")
    ]
    keys: Annotated[Document, doc("Dotted key -> range (see below).")]


class PlotTable(SweepTable, kw_only=True, frozen=True):
    """What the trade-off plot of the report shows."""

    x: Annotated[str, doc("Figure of summary.json, or a key of the points.")] = "output_throughput"
    y: Annotated[
        str,
        doc("The same; smaller is better. Empty = the latency of a condition, else p99_ttft_ms."),
    ] = ""


class Sweep(SweepTable, kw_only=True, frozen=True):
    """The whole file."""

    base: Annotated[str, doc("Config file, relative to this file.")]
    output: Annotated[str, doc("Output directory; empty = runs/NAME beside this file.")] = ""
    fixed: Annotated[Document, doc("Overrides of every point.")] = field(
        default_factory=dict, name="set"
    )
    seeds: Annotated[
        list[Annotated[int, Meta(ge=0)]], doc("Run every point with each of these; empty = once.")
    ] = field(default_factory=list)
    draws: Annotated[
        int,
        Meta(ge=0, le=10_000),
        doc("Draws of engine, arrivals and sampling at each point; 0 = none (`--draws`)."),
    ] = 0
    keep_runs: Annotated[bool, doc("Keep the output directory of every run.")] = False
    parquet: Annotated[bool, doc("Also write results.parquet (extra `parquet`).")] = False
    grid: Annotated[
        Document | None, doc("Dotted key -> array of values; all combinations are run.")
    ] = None
    listed: Annotated[
        list[Document] | None, doc("One table of dotted keys and values for each point.")
    ] = field(default=None, name="list")
    random: RandomTable | None = None
    search: SearchTable | None = None
    pareto: ParetoTable | None = None
    plot: PlotTable = field(default_factory=PlotTable)

    @property
    def kind(self) -> str:
        """Which of the ways it uses."""
        return next(kind for kind in KINDS if self.table(kind) is not None)

    def table(self, kind: str) -> Any:
        """The table of one of KINDS, or None."""
        return getattr(self, "listed" if kind == "list" else kind)


KINDS: Final = ("grid", "list", "random", "search", "pareto")
_TABLES: Final = {
    "random": RandomTable,
    "search": SearchTable,
    "pareto": ParetoTable,
    "plot": PlotTable,
    "": Sweep,
}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


def load_sweep(path: Path) -> Sweep:
    """Read a sweep file."""
    source = str(path)
    text, raw = read_toml(path, source)
    if "base" not in raw and any(key in raw for key in ("nodes", "replicas", "workload")):
        problem = f'missing: this file is a cluster, which a sweep file names: base = "{path.name}"'
        raise InputError(source, None, "base", problem)
    try:
        sweep = msgspec.convert(raw, prepared(Sweep))
    except msgspec.ValidationError as error:
        raise _problem(source, text, str(error)) from None
    given = [kind for kind in KINDS if sweep.table(kind) is not None]
    if len(given) != 1:
        found = ", ".join(given) or "none of them"
        problem = f"expected exactly one of {', '.join(KINDS)}; found {found}"
        raise InputError(source, None, "", problem)
    if sweep.search is not None and not sweep.search.min < sweep.search.max:
        problem = f"must be below max ({sweep.search.max:g})"
        raise InputError(source, place(text, ("search", "min")), "search.min", problem)
    return sweep


def place(text: str, path: tuple[str | int, ...]) -> int | None:
    """Line of a key, if the text can be read at all."""
    try:
        return line_of(locate(text), path)
    except RecursionError:
        return None


def _problem(source: str, text: str, message: str) -> InputError:
    problem, _, where = message.partition(" - at `$")
    parts = tuple(part for part in re.split(r"[.\[\]]+", where.rstrip("`")) if part)
    match = _UNKNOWN.match(problem)
    if match is not None:
        table = _TABLES.get(parts[0] if parts else "", RangeTable)
        parts = (*parts, match.group(1))
        problem = unknown_key(match.group(1), list(table.__struct_encode_fields__), {})
    field = ".".join(parts)
    return InputError(source, place(text, parts), field, problem[:1].lower() + problem[1:])


def flat(table: Document, prefix: str = "") -> Document:
    """Dotted keys of nested tables, down to what is no table or a range."""
    found: Document = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and not is_range(value):
            found.update(flat(value, f"{name}."))
        else:
            found[name] = value
    return found


def is_range(value: Document) -> bool:
    """True for `{values = [...]}` and `{min = 1, max = 9}`."""
    return "values" in value or ("min" in value and not isinstance(value["min"], dict))


def ranges(table: Document, source: str, field: str) -> dict[str, RangeTable]:
    """The ranges of a [random] or [pareto] table. Raises InputError."""
    found: dict[str, RangeTable] = {}
    for key, value in flat(table).items():
        where = f"{field}.{key}"
        if isinstance(value, list):
            value = {"values": value}
        try:
            one = msgspec.convert(value, prepared(RangeTable))
        except msgspec.ValidationError as error:
            raise InputError(source, None, where, str(error)) from None
        if not one.values:
            if one.min is None or one.max is None or not one.min < one.max:
                problem = "expected {values = [...]} or {min = ..., max = ...} with min below max"
                raise InputError(source, None, where, problem)
            if math.isinf(one.min) or math.isinf(one.max):
                raise InputError(source, None, where, "min and max must be finite")
            if one.log and one.min <= 0:
                raise InputError(source, None, where, "log needs a min above 0")
        found[key] = one
    if not found:
        raise InputError(source, None, field, "has no key")
    return found
