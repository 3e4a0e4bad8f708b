"""A day's curve: how many replicas each hour needs, what to reserve and what to take on demand.

    curve_of("0=5,8=40,20=20")                 # from hour: requests per second; the day repeats
    day = day_of(trials, best, judge, curve)

Each rate of the curve gets the cheapest cluster of the best layout that meets the objectives with
the same confidence, found by runs at that rate. Changes between them are taken to be at once: what
a planner's delay costs, `--autoscale` with a trace says. A GPU is reserved if it is used for a
larger part of the day than the ratio of its prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from emu.apps.plan.layouts import Candidate
from emu.apps.plan.traffic import wrong
from emu.apps.plan.trials import Judge, Trials, search_all

HOURS: Final = 24.0
_POINTS_MAX: Final = 24


class Hours(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the day: from the hour `from_h` to the hour `to_h`."""

    from_h: float
    to_h: float
    rate_per_s: float
    label: str
    """Its cluster."""
    gpus: int


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """What a day costs with as many replicas as each hour needs."""

    parts: list[Hours]
    gpus_mean: float
    reserved: int
    """GPUs that are cheaper reserved than on demand."""
    cost_per_h: float
    """Mean over the day: $, or GPUs where they have no price."""
    cost_of_peak_per_h: float
    """Of the cluster of the largest rate, all day."""


def curve_of(text: str, rate_per_s: float) -> tuple[tuple[float, float], ...]:
    """(hour, requests per second) in order; empty text: no curve.

    `rate_per_s`: what --rate says, which must be the largest. Raises InputError.
    """
    if not text:
        return ()
    points = []
    for part in text.split(","):
        hour, equals, rate = (piece.strip() for piece in part.partition("="))
        values = [_number(one) for one in (hour, rate)]
        if not equals or not (0 <= values[0] < HOURS and values[1] > 0):
            raise wrong(
                "--day", f"{part.strip()!r}: expected HOUR=RATE such as 8=40, hours 0 to 24"
            )
        points.append((values[0], values[1]))
    if len(points) > _POINTS_MAX:
        raise wrong("--day", f"has {len(points)} points; up to {_POINTS_MAX} are read")
    if points[0][0] != 0 or any(b[0] <= a[0] for a, b in pairwise(points)):
        raise wrong("--day", "begins at hour 0, and hours grow: 0=5,8=40,20=20")
    largest = max(rate for _, rate in points)
    if not math.isclose(largest, rate_per_s):
        raise wrong("--rate", f"is the largest of --day: {largest:g}, not {rate_per_s:g}")
    return tuple(points)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def day_of(
    trials: Trials, best: Candidate, judge: Judge, curve: Sequence[tuple[float, float]]
) -> Day:
    """The clusters of a day, `best` being that of its largest rate."""
    peak = max(rate for _, rate in curve)
    clusters: dict[float, Candidate] = {peak: best}
    for rate in sorted({rate for _, rate in curve} - {peak}, reverse=True):
        clusters[rate] = _cluster_at(trials, best, judge, rate / peak)
    ends = [*(hour for hour, _ in curve[1:]), HOURS]
    parts = [
        Hours(
            from_h=hour,
            to_h=end,
            rate_per_s=rate,
            label=clusters[rate].label,
            gpus=clusters[rate].gpus,
        )
        for (hour, rate), end in zip(curve, ends, strict=True)
    ]
    hours = [(part.to_h - part.from_h, clusters[part.rate_per_s]) for part in parts]
    rented = _rented(best, hours)
    return Day(
        parts=parts,
        gpus_mean=sum(length * one.gpus for length, one in hours) / HOURS,
        reserved=rented.reserved,
        cost_per_h=rented.cost_per_h,
        cost_of_peak_per_h=best.cost,
    )


class _Rented(NamedTuple):
    """GPUs of a day at the cheaper of two prices each."""

    reserved: int
    cost_per_h: float


def _rented(best: Candidate, hours: Sequence[tuple[float, Candidate]]) -> _Rented:
    """(hours, cluster) of a day: what is used long enough is reserved, the rest on demand."""
    reserved, cost = 0, 0.0
    for kind in best.layout.gpus:
        used = [(length, one.gpus_of(kind)) for length, one in hours]
        on_demand = kind.on_demand or kind.price
        for number in range(max(count for _, count in used)):
            part = sum(length for length, count in used if count > number) / HOURS
            is_reserved = part * on_demand > kind.price * (1 - 1e-9)
            reserved += is_reserved
            cost += kind.price if is_reserved else part * on_demand
    return _Rented(reserved, cost)


def _cluster_at(trials: Trials, best: Candidate, judge: Judge, factor: float) -> Candidate:
    """The cheapest of the layout that meets at a part `factor` of the rate; `best` at the most."""
    worlds = tuple(msgspec.structs.replace(world, factor=factor) for world in judge.worlds)
    there = Judge(worlds, judge.needed, f"{100 * factor:.0f} % of the rate")
    layout = msgspec.structs.replace(best.layout, replicas_min=1)
    start = (math.ceil(best.prefill * factor), math.ceil(best.decode * factor))
    search_all(trials, [(layout, start)], there, span=1.0)
    found = [one for one in trials.good(there) if one.cost <= best.cost]
    return found[0] if found else best


def day_lines(day: Day, *, has_prices: bool) -> list[str]:
    """The same in words."""
    parts = "; ".join(
        f"{part.from_h:g} to {part.to_h:g} h {part.rate_per_s:g}/s {part.label}"
        for part in day.parts
    )
    lines = [f"over the day: {parts}; {day.gpus_mean:.1f} GPUs on average"]
    if has_prices:
        lines.append(
            f"over the day: {day.cost_per_h:,.2f} $/h with {day.reserved} GPUs reserved, the others"
            f" on demand; {day.cost_of_peak_per_h:,.2f} $/h if all of the peak are reserved"
        )
    return lines
