"""The board of points: errors of emu and of a peer, by group; series of which drafts are not known.

An error is (emulated - measured) / measured in per cent. A group's bias is the median of the signed
errors. Rows that are left out are counted by reason: a board that hides them flatters itself.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.apps.fidelity.options import FidelityOptions
from emu.apps.fidelity.points.cases import Emulated, Job, emulate, model_of
from emu.apps.fidelity.points.doubt import doubted
from emu.apps.fidelity.points.intervals import Interval, intervals_of
from emu.apps.fidelity.points.recipes import recipe_of
from emu.apps.fidelity.points.refit import Refit, without
from emu.apps.fidelity.points.table import (
    UNKNOWN,
    Point,
    read_points,
    sampled,
    tables_below,
)
from emu.apps.fidelity.runs import Unread
from emu.errors import InputError
from emu.process.pool import pool_of

_CONFIGS: Final = "model-configs"
"""The directory beside a table that holds `OWNER--NAME_config.json` files."""
METRICS: Final = ("ttft_ms", "tpot_ms", "output_tokens_per_s")
STATED_BY: Final = "engine, GPU, precision, kind"
"""The groups that intervals are stated for."""
TRIED_BELOW: Final = 0.9
"""A series of which is not known whether drafts were on is emulated with drafts, too, where the
median of measured over emulated TPOT is below this part, if its model has layers for them. Of those
that its launch scripts may have had (`recipes.py`), the choice with the least median error of TPOT
counts: one for all points of a series."""
DRAFTED: Final = 0.75
"""Where no drafts can be emulated, a series below this part is left out as one that had some: they
shorten a token's time to 0.4 to 0.7."""
TOO_LONG: Final = "drafts of so many tokens in flight would take minutes"
_TOKENS_MAX: Final = 5_000_000
"""Clients times output tokens up to which points are emulated with drafts."""
_TRIED: Final = 3
"""Points of a series that drafts are chosen by: the shortest ones."""
_TOLD_EVERY: Final = 25
TAKEN_AS_DRAFTED: Final = (
    "series of unknown drafts, below 0.75 of TPOT without: taken to have them, not emulated"
)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A point beside its emulation; `peers` has errors of other programs by name and metric."""

    point: Point
    emulated: Emulated
    kind: str
    """dense or experts."""
    peers: dict[str, dict[str, float]]
    drafts: int = 0
    """Drafts of a step that its series is taken to have."""

    def error(self, metric: str) -> float:
        """(emulated - measured) / measured, per cent; NaN where not measured."""
        return percent(self.emulated.figures[metric], self.point.figures[metric])


class Spread(msgspec.Struct, frozen=True):
    """Errors of one metric over some points, per cent."""

    points: int
    median: float
    """Of |error|."""
    p90: float
    bias: float


class PointGroup(msgspec.Struct, frozen=True):
    """Points that are judged together."""

    by: str
    name: str
    points: int
    errors: dict[str, Spread]
    peers: dict[str, dict[str, Spread]]


class PointBoard(msgspec.Struct, frozen=True):
    """All that `emu fidelity` says of point tables."""

    compared: list[Compared]
    groups: list[PointGroup]
    left_out: dict[str, int]
    """Rows by the reason for which they are left out."""
    intervals: list[Interval] = []
    """What is stated for each part from all others, of rows that are not doubted."""
    left_out_by: str = ""
    """What a part is: engine, gpu, model; empty = a group (`STATED_BY`)."""
    refits: list[Refit] = []
    """With gpu or model: the constants that the points were emulated with."""


GROUPS: Final[Mapping[str, Callable[[Compared], str]]] = {
    "doubt": lambda row: row.point.doubt or "none",
    "engine": lambda row: row.point.engine,
    "engine, servers, drafts, doubt": lambda row: ", ".join(
        (
            row.point.engine,
            "one server" if len(row.point.servers) == 1 else "prefill and decode apart",
            "no drafts" if row.point.drafts != UNKNOWN else "drafts not stated",
            "doubted" if row.point.is_doubtful else "not doubted",
        )
    ),
    "GPU": lambda row: row.point.gpu,
    "precision": lambda row: row.point.precision or "as published",
    "kind": lambda row: row.kind,
    "drafts": lambda row: _drafts_of(row),
    "model": lambda row: row.point.model,
    "clients": lambda row: _between(row.point.clients, (8, 64)),
    STATED_BY: lambda row: ", ".join(
        (row.point.engine, row.point.gpu, row.point.precision or "as published", row.kind)
    ),
}


def _drafts_of(row: Compared) -> str:
    if row.point.drafts != UNKNOWN:
        return "none"
    how = "chosen by series" if len(recipe_of(row.point).drafts) > 1 else "by its script"
    return f"{how}: {row.drafts or 'none'}"


_PARTS: Final = {"": STATED_BY, "engine": "engine", "gpu": "GPU", "model": "model"}
"""What intervals may leave out -> by which groups."""


def percent(emulated: float, measured: float) -> float:
    """The error of a figure that was `measured` in the unit of `emulated`, per cent."""
    return 100 * (emulated / measured - 1)


def _between(value: int, edges: Sequence[int]) -> str:
    low = 1
    for edge in edges:
        if value <= edge:
            return f"{low} to {edge} clients"
        low = edge + 1
    return f"{low} clients and more"


def _kind(job: Job) -> str:
    """Whether its model has experts."""
    return "dense" if model_of(job.point, job.configs).experts is None else "experts"


def point_board(options: FidelityOptions) -> PointBoard:
    """Read every point table below a directory, emulate a sample, compare.

    Raises InputError if no point can be emulated.
    """
    directory, overrides = options.directory, tuple(options.overrides)
    points, unread, homes = _found(directory, options.only)
    usable = [point for point in points if point.drafts in ("none", UNKNOWN)]
    told = (p for p in points if p.drafts not in ("none", UNKNOWN))
    unread += [Unread(p.point_id, f"drafts are not emulated here: {p.drafts}") for p in told]
    drawn = sampled(usable, options.sample, options.seed)
    if not drawn:
        raise InputError(str(directory), None, "", _no_point(unread, options.only))
    jobs = [
        Job(point, homes[point.point_id], overrides, recipe_of(point).drafts[0]) for point in drawn
    ]
    found = {one.point_id: one for one in _emulated(jobs, options.processes)}
    peers = _peers(directory)
    chosen, drafted = _choose_drafts(jobs, found, options.processes)
    reasons = {job.point.point_id: _unlike(job, drafted, chosen) for job in jobs}
    jobs = [
        msgspec.structs.replace(job, drafts=chosen.get(job.point.series, job.drafts))
        for job in jobs
    ]
    refits: list[Refit] = []
    if options.leave_out in ("gpu", "model"):
        kept = [job for job in jobs if not reasons[job.point.point_id]]
        again, refits = without(
            kept, found, options.leave_out, lambda few: _emulated(few, options.processes)
        )
        found |= again
    compared = []
    for job in jobs:
        emulated = found[job.point.point_id]
        reason = emulated.refused or reasons[job.point.point_id]
        if reason:
            unread.append(Unread(job.point.point_id, reason))
        else:
            compared.append(_compared(job, emulated, peers))
    if not compared:
        raise InputError(str(directory), None, "", _no_point(unread, ()))
    left_out = Counter(one.reason for one in unread)
    not_drawn = len(usable) - len(drawn)
    if not_drawn:
        left_out["not in the sample"] = not_drawn
    groups, stated = groups_of(compared), _stated(compared, options.leave_out)
    counted = dict(left_out.most_common())
    return PointBoard(compared, groups, counted, stated, options.leave_out, refits)


def _no_point(unread: Sequence[Unread], only: Sequence[str]) -> str:
    """Why nothing can be emulated."""
    reasons = Counter(one.reason for one in unread).most_common(3)
    words = "; ".join(f"{count} rows: {reason}" for reason, count in reasons) or "no row"
    if only and not unread:
        words = "no row has such a word in its name or model"
    return f"no point can be emulated ({words})"


def _compared(
    job: Job, emulated: Emulated, peers: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> Compared:
    errors = _peer_errors(job.point, peers)
    return Compared(
        point=job.point, emulated=emulated, kind=_kind(job), peers=errors, drafts=job.drafts
    )


def _stated(rows: Sequence[Compared], leave_out: str) -> list[Interval]:
    """Intervals of single servers, then of prefill and decode apart, from those not doubted."""
    trusted = [row for row in rows if not row.point.is_doubtful]
    found = []
    for apart in ("", ", apart"):
        found += intervals_of(_ratios(trusted, leave_out, apart))
    return found


def _unlike(job: Job, drafted: set[tuple[str, ...]], chosen: Mapping[tuple[str, ...], int]) -> str:
    """Why a point was not emulated with the drafts that its series has; empty if it was."""
    name = job.point.series
    is_open = len(recipe_of(job.point).drafts) > 1
    if is_open and (name in drafted or name in chosen) and _is_long(job):
        return TOO_LONG
    return TAKEN_AS_DRAFTED if job.point.drafts == UNKNOWN and name in drafted else ""


def _logs_by_series(
    jobs: Iterable[Job], found: Mapping[str, Emulated]
) -> dict[tuple[str, ...], list[float]]:
    """Logarithms of measured over emulated TPOT, of series of which drafts are not known."""
    series: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for job in jobs:
        emulated = found[job.point.point_id]
        is_known = job.point.drafts != UNKNOWN or job.point.load != "clients"
        if not (is_known or emulated.refused):
            series[job.point.series].append(math.log(job.point.tpot_ms / emulated.tpot_ms))
    return series


def _off(logs: Sequence[float]) -> float:
    return statistics.median(map(abs, logs))


def _choose_drafts(
    jobs: Sequence[Job], found: dict[str, Emulated], processes: int
) -> tuple[dict[tuple[str, ...], int], set[tuple[str, ...]]]:
    """Drafts of each series that emu without them is slow for, whose points are emulated with them;
    and series that seem to have drafts where none could be emulated.
    """
    open_jobs = [job for job in jobs if len(recipe_of(job.point).drafts) > 1]
    plain = _logs_by_series(open_jobs, found)
    slow = {n for n, logs in plain.items() if statistics.median(logs) < math.log(TRIED_BELOW)}
    drafted = {n for n in slow if statistics.median(plain[n]) < math.log(DRAFTED)}
    able = [
        job
        for job in open_jobs
        if job.point.series in slow
        and model_of(job.point, job.configs).mtp_layers
        and not _is_long(job)
    ]
    first = _shortest(able)
    # Compared on the same points: those that are tried.
    plain = _logs_by_series(first, found)
    best = {job.point.series: (_off(plain[job.point.series]), 0) for job in first}
    for drafts in sorted({n for job in first for n in recipe_of(job.point).drafts if n}):
        again = [
            msgspec.structs.replace(job, drafts=drafts, is_trial=True)
            for job in first
            if drafts in recipe_of(job.point).drafts
        ]
        tried = {one.point_id: one for one in _emulated(again, processes)}
        for name, logs in _logs_by_series(again, tried).items():
            drafted.discard(name)
            if _off(logs) < best[name][0]:
                best[name] = _off(logs), drafts
    chosen = {name: drafts for name, (_, drafts) in best.items() if drafts}
    kept = [
        msgspec.structs.replace(job, drafts=chosen[job.point.series])
        for job in able
        if job.point.series in chosen
    ]
    found.update({one.point_id: one for one in _emulated(kept, processes)})
    return chosen, drafted


def _shortest(jobs: Sequence[Job]) -> list[Job]:
    """A few of each series, with the fewest tokens in flight: drafts are one choice for all."""
    series: defaultdict[tuple[str, ...], list[Job]] = defaultdict(list)
    for job in sorted(jobs, key=_tokens):
        series[job.point.series].append(job)
    return [job for members in series.values() for job in members[:_TRIED]]


def _is_long(job: Job) -> bool:
    return _tokens(job) > _TOKENS_MAX


def _tokens(job: Job) -> int:
    return job.point.clients * job.point.output_tokens


def _ratios(
    rows: Sequence[Compared], leave_out: str, apart: str
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Measured over emulated, by metric, part that is left out, and group.

    `apart`: the word that names of servers of prefill and decode apart end with; empty = of others.
    """
    part_of, group_of = GROUPS[_PARTS[leave_out]], GROUPS[STATED_BY]
    found: dict[str, dict[str, dict[str, list[float]]]] = {metric: {} for metric in METRICS}
    for row in rows:
        if (len(row.point.servers) > 1) != bool(apart):
            continue
        for metric in METRICS:
            ratio = row.point.figures[metric] / row.emulated.figures[metric]
            groups = found[metric].setdefault(part_of(row) + apart, {})
            groups.setdefault(group_of(row), []).append(ratio)
    return found


def _found(
    directory: Path, only: Sequence[str]
) -> tuple[list[Point], list[Unread], dict[str, Path | None]]:
    points: list[Point] = []
    unread: list[Unread] = []
    homes: dict[str, Path | None] = {}
    for table in tables_below(directory):
        configs = table.parent / _CONFIGS
        read, left = read_points(table)
        read = doubted(read)
        wanted = [p for p in read if _is_wanted((p.point_id, p.model, table.name), only)]
        twice = [p for p in wanted if p.point_id in homes]
        if twice:
            problem = f"{twice[0].point_id!r} is the name of a row of another table, too"
            raise InputError(str(table), None, "id", problem)
        points += wanted
        unread += [one for one in left if _is_wanted((one.run_id, table.name), only)]
        homes |= {p.point_id: configs if configs.is_dir() else None for p in wanted}
    return points, unread, homes


def _is_wanted(names: Sequence[str], only: Sequence[str]) -> bool:
    return not only or any(word in name for word in only for name in names)


def _emulated(jobs: Sequence[Job], processes: int) -> Iterable[Emulated]:
    """The longest first: tokens in flight and rounds say how long one takes. Says its progress."""
    ordered = sorted(jobs, key=lambda job: -_tokens(job))
    with pool_of(emulate, processes, None, lambda job: f"it was {job.point.point_id}") as pool:
        for number, found in enumerate(pool.results(ordered), 1):
            if number % _TOLD_EVERY == 0:
                print(f"{number} of {len(ordered)} points emulated", file=sys.stderr)
            yield found


def _peers(directory: Path) -> dict[str, dict[str, dict[str, float]]]:
    """What other programs say, by point, program and metric: tables with `id` and `tool`."""
    found: defaultdict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for path in sorted(directory.rglob("*.csv")):
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            rows = csv.DictReader(file)
            if not {"id", "tool", "ttft_ms", "tpot_ms"} <= set(rows.fieldnames or ()):
                continue
            for row in rows:
                try:
                    figures = {m: float(row[m]) for m in METRICS if row.get(m)}
                except ValueError as error:
                    raise InputError(str(path), rows.line_num, "", str(error)) from None
                found[row["id"]].setdefault(row["tool"], figures)
    return found


def _peer_errors(
    point: Point, peers: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> dict[str, dict[str, float]]:
    return {
        tool: {metric: percent(value, point.figures[metric]) for metric, value in figures.items()}
        for tool, figures in peers.get(point.point_id, {}).items()
    }


def groups_of(rows: Sequence[Compared]) -> list[PointGroup]:
    """All points, then by each property that points are grouped by."""
    found = [_group("all", "all", rows)] if rows else []
    for by, name_of in GROUPS.items():
        parts: defaultdict[str, list[Compared]] = defaultdict(list)
        for row in rows:
            parts[name_of(row)].append(row)
        found += [_group(by, name, parts[name]) for name in sorted(parts)]
    return found


def _group(by: str, name: str, rows: Sequence[Compared]) -> PointGroup:
    errors = {metric: [row.error(metric) for row in rows] for metric in METRICS}
    peers: dict[str, dict[str, Spread]] = {}
    for tool in sorted({tool for row in rows for tool in row.peers}):
        theirs = {
            m: [r.peers[tool][m] for r in rows if m in r.peers.get(tool, {})] for m in METRICS
        }
        peers[tool] = _spreads(theirs)
    return PointGroup(by, name, len(rows), _spreads(errors), peers)


def _spreads(errors: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    found = {}
    for metric, values in errors.items():
        known = sorted(value for value in values if not math.isnan(value))
        if known:
            sizes = sorted(map(abs, known))
            p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
            found[metric] = Spread(
                len(known), statistics.median(sizes), p90, statistics.median(known)
            )
    return found
