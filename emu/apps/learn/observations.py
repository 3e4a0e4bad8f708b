"""Observations of levels: means of groups of requests, with their errors.

A level is cut into cells, so that long and short prompts, and moments of low and high load, speak
for themselves: by the part of a probe, else by length of the prompt and by requests in flight at
arrival. Each cell is two observations, its mean TTFT and its mean TPOT. A level whose starts were
drawn is one cell: requests cannot be paired. Mean TTFT of an overloaded cell is left out: a queue
says nothing of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.apps.learn.fields import Level
from emu.latency.posterior import METRICS, Floats

OVERLOADED_S: Final = 2.0
_REQUESTS_MIN: Final = 4
"""Of a cell; parts of a probe are designed and may have fewer."""
_APART: Final = 1.5
"""Prompts differ enough to be cut by length if their quartiles are this many times apart."""


class Times(msgspec.Struct, frozen=True):
    """Seconds of each request, in the order of the workload; NaN where it has none."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats


class Observation(msgspec.Struct, frozen=True):
    """The mean of a metric over some requests."""

    label: str
    level: int
    metric: int
    """Index into `METRICS`."""
    members: NDArray[np.int64]
    error: float
    """Relative standard error of the mean from the spread of its requests."""
    is_high: bool
    """In a level cut in two by load: the upper half."""


def measured_times(levels: Sequence[Level]) -> Times:
    """What the client measured."""
    requests = [request for level in levels for request in level.requests]
    ttft = np.array([r.ttft_s for r in requests])
    e2e = np.array([r.e2e_s for r in requests])
    between = np.array([r.output_tokens - 1 for r in requests], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(between > 0, (e2e - ttft) / between, np.nan)
    return Times(ttft, np.where(tpot > 0, tpot, np.nan), e2e)


def observations_of(levels: Sequence[Level], times: Times) -> list[Observation]:
    """All observations, level by level."""
    found: list[Observation] = []
    begin = 0
    for number, level in enumerate(levels):
        count = len(level.requests)
        least = 1 if level.requests[0].part else min(_REQUESTS_MIN, count)
        for label, chosen, is_high in _cells(level):
            members = begin + np.flatnonzero(chosen)
            for metric, values in enumerate((times.ttft_s, times.tpot_s)):
                mine = members[~np.isnan(values[members])]
                if len(mine) < max(1, least):
                    continue
                kept = values[mine]
                mean = float(kept.mean())
                if METRICS[metric] == "ttft" and mean > OVERLOADED_S:
                    continue
                spread = float(kept.std(ddof=1)) if len(kept) > 1 else 0.0
                error = spread / mean / len(kept) ** 0.5
                name = f"{level.label}{', ' if label else ''}{label}"
                found.append(Observation(name, number, metric, mine, error, is_high))
        begin += count
    return found


def _cells(level: Level) -> list[tuple[str, NDArray[np.bool_], bool]]:
    """(label, members, upper half by load) of each cell of a level."""
    requests = level.requests
    everything = np.ones(len(requests), dtype=bool)
    parts = list(dict.fromkeys(r.part for r in requests))
    if len(parts) > 1:
        return [(p, np.array([r.part == p for r in requests]), False) for p in parts]
    if level.is_drawn or len(requests) < 4 * _REQUESTS_MIN:
        return [("", everything, False)]
    flight = in_flight(level)
    order = np.lexsort((np.arange(len(flight)), flight))
    is_high = np.zeros(len(flight), dtype=bool)
    is_high[order[len(order) // 2 :]] = True
    prompts = np.array([r.prompt_tokens for r in requests])
    low, middle, high = np.quantile(prompts, (0.25, 0.5, 0.75))
    halves = [("low load", ~is_high, False), ("high load", is_high, True)]
    if high < _APART * low:
        return halves
    is_long = prompts > middle
    return [
        (f"{words}, {length} prompts", chosen & which, upper)
        for words, chosen, upper in halves
        for length, which in (("short", ~is_long), ("long", is_long))
    ]


def in_flight(level: Level) -> NDArray[np.int64]:
    """Requests that were being served when each one was sent."""
    starts = np.array([r.start_s for r in level.requests])
    ends = np.sort([r.start_s + r.e2e_s for r in level.requests])
    return np.arange(len(starts)) - np.searchsorted(ends, starts)


def means(observations: Sequence[Observation], times: Times) -> Floats:
    """Logarithm of each observation's mean with these times; NaN if a request has none."""
    columns = (times.ttft_s, times.tpot_s)
    found = []
    for observation in observations:
        values = columns[observation.metric][observation.members]
        kept = values[~np.isnan(values)]
        is_whole = 2 * len(kept) > len(values)
        found.append(np.log(kept.mean()) if is_whole and kept.mean() > 0 else np.nan)
    return np.array(found)
