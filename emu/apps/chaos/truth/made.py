"""Workloads that are made: when requests arrive and how long they are, against their laws.

Restates `[workload.synthetic]` of docs/workloads.md. One draw is chance; so many of them lie as
their law says, within a distance that one sample in a thousand million exceeds (Kolmogorov and
Smirnov). Even arrivals and fixed lengths are exact. Sessions, closed loops and clients that arrive
by other keys are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from emu.apps.chaos.truth.tape import Tape, keys_of, to_ns
from emu.config.schema import ArrivalsTable, LengthsTable, SyntheticTable

_FAR: Final = math.sqrt(-math.log(1e-9 / 2) / 2)
_LEAST: Final = 8
_MOVED: Final = (
    *("rate_per_s", "concurrency", "max_in_flight", "start_s", "path", "preset"),
    *("max_prompt_tokens", "max_output_tokens", "skip_prefill"),
)
"""Keys of `[workload]` after which rows do not say what was drawn."""
Row = Mapping[str, str]


def judge_made(tape: Tape, rows: Sequence[Row]) -> None:
    """Arrivals, prompts and outputs of a workload without lines."""
    workload = tape.config.workload
    keys, made = keys_of(workload), workload.synthetic
    is_other = any(keys.get(key) for key in _MOVED) or (keys.get("upscale") or 1) != 1
    if not isinstance(made, SyntheticTable) or is_other or tape.config.models:
        return
    is_odd = made.sessions.turns_max > 1 or made.images is not None
    if is_odd or any(fault["kind"] == "overload" for fault in tape.faults):
        return
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(int(row["request_id"]), row)
    drawn = [first[number] for number in sorted(first)]
    if len(drawn) < _LEAST:
        return
    times_ns = [int(row["arrival_ns"]) for row in drawn]
    _arrivals(tape, made, [ns / 1e9 / workload.time_scale for ns in times_ns], times_ns)
    if not made.prefix_groups:
        _lengths(tape, "prompt", made.prompt, [int(row["prompt_toks"]) for row in drawn])


def _arrivals(tape: Tape, made: SyntheticTable, times_s: list[float], times_ns: list[int]) -> None:
    table, scale = made.arrivals, tape.config.workload.time_scale
    tape.count("made_arrivals")
    if table.process in ("constant", "all_at_once"):
        gap_s = 0.0 if table.process == "all_at_once" else 1 / table.rate_per_s
        for number, at_ns in enumerate(times_ns):
            if abs(at_ns - to_ns(number * gap_s * scale)) > 1 + scale:
                tape.say(f"T7: request {number} is made for {at_ns} ns, one each {gap_s} s")
                return
        return
    if scale >= 0.1 and (table.process != "gamma" or table.cv <= 1):
        tape.count("made_ties")
        if len(set(times_ns)) < len(times_ns) - 1:
            tape.say(f"T7: of {len(times_ns)} requests {len(set(times_ns))} come at their own time")
    if table.process == "gamma":
        gaps = [after - before for before, after in pairwise([0.0, *times_s])]
        shape = 1 / table.cv**2
        _compare(tape, "gaps", gaps, lambda gap: _gamma(shape, gap * table.rate_per_s * shape))
        return
    expected = [_expected(table, at_s) for at_s in times_s]
    count, last = len(expected), expected[-1]
    if not made.duration_s and abs(count - last) > 6 * math.sqrt(count) + 3:
        tape.say(f"T7: {count} requests arrive until {times_s[-1]} s, expected {last:.1f}")
    _compare(tape, "arrivals", expected, lambda at: at / last)
    if table.process == "burst":
        every_s = table.burst_every_s
        whole = times_s[-1] // every_s * every_s
        phases = [at_s % every_s for at_s in times_s if at_s < whole]
        if len(phases) >= _LEAST:
            each = _expected(table, every_s)
            _compare(tape, "phases", phases, lambda at_s: _expected(table, at_s) / each)


def _expected(table: ArrivalsTable, at_s: float) -> float:
    """Arrivals until then, on average."""
    if table.process == "burst":
        period, rest = divmod(at_s, table.burst_every_s)
        in_burst, length_s = table.burst_rate_per_s, table.burst_length_s
        of_period = in_burst * length_s + table.rate_per_s * (table.burst_every_s - length_s)
        inside = in_burst * min(rest, length_s) + table.rate_per_s * max(0.0, rest - length_s)
        return period * of_period + inside
    if table.process == "piecewise":
        total, points = 0.0, [(0.0, table.points[0][1]), *map(tuple, table.points), (1e9, -1.0)]
        for (since_s, rate), (until_s, after) in pairwise(points):
            span_s = max(0.0, min(at_s, until_s) - since_s)
            slope = 0.0 if after < 0 or until_s <= since_s else (after - rate) / (until_s - since_s)
            total += rate * span_s + slope * span_s * span_s / 2
        return total
    return table.rate_per_s * at_s


def _gamma(shape: float, most: float) -> float:
    """The part of a gamma distribution of scale 1 that is at most so much (its power series)."""
    if most <= 0.0:
        return 0.0
    term = total = 1 / shape
    place = shape
    while term > 1e-12 * total:
        place += 1
        term *= most / place
        total += term
    return min(1.0, total * math.exp(shape * math.log(most) - most - math.lgamma(shape)))


def _lengths(tape: Tape, what: str, table: LengthsTable, lengths: list[int]) -> None:
    tape.count("made_lengths")
    if table.distribution == "fixed":
        if set(lengths) != {table.value}:
            tape.say(f"T7: {what}s of {sorted(set(lengths))[:3]} tokens, all should {table.value}")
        return
    if table.distribution == "trace":
        return
    if not table.min <= min(lengths) <= max(lengths) <= table.max:
        tape.say(f"T7: {what}s of {min(lengths)} to {max(lengths)} tokens")
    _compare(tape, f"{what}s", lengths, _law(table))


def _law(table: LengthsTable) -> Callable[[float], float]:
    """The part of all lengths that are no longer than one."""
    if table.distribution == "uniform":
        return lambda length: (length - table.min + 1) / (table.max - table.min + 1)
    if table.distribution == "zipf":
        weights = [rank**-table.theta for rank in range(1, table.max - table.min + 2)]
        whole = math.fsum(weights)
        return lambda length: math.fsum(weights[: int(length) - table.min + 1]) / whole
    root = table.sigma * math.sqrt(2)

    def normal(length: float) -> float:
        if length >= table.max:
            return 1.0
        return (1 + math.erf(math.log((length + 0.5) / table.median) / root)) / 2

    return normal


def _compare(tape: Tape, what: str, drawn: Sequence[float], law: Callable[[float], float]) -> None:
    """The largest distance of what was drawn from its law."""
    values, count = sorted(drawn), len(drawn)
    last_of = {value: place for place, value in enumerate(values, start=1)}
    far = max((abs(place / count - law(value)), value) for value, place in last_of.items())
    if far[0] > _FAR / math.sqrt(count) + 1 / count:
        tape.say(f"T7: {what} do not follow their law: {far[0]:.2f} away at {far[1]:g}")
