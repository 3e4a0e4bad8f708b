"""How long runs last: simulated time by the time that a request stays, not a count of requests.

A run begins empty, and a cluster that is overloaded needs some residence times to show it. Runs of
a search last `SHORT` mean residences, those that an answer rests on `LONG`, both at least as long
as percentiles need requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from emu.apps.plan.pace import Loads, Pace, step_limit_ms
from emu.apps.plan.question import Objective

SHORT: Final = 3.0
LONG: Final = 20.0
"""Mean residences."""
_SHORT_MIN_S: Final = 20.0
_LONG_MIN_S: Final = 120.0
_BEYOND: Final = 50
"""Requests beyond a percentile that make it steady: 1,000 requests for a p95."""
REQUESTS_MAX: Final = 20_000
"""A run of more is cut there, but never below `STAYS_MIN`: percentiles of so many are steady at any
load that is not near the limit."""
STAYS_MIN: Final = 6.0
"""Times that a request decodes, however many requests that are: the first of them fills the empty
cluster, and a queue that grows needs some more to show in a percentile."""
_PART_ALONE: Final = 0.5
"""Without an objective on steps: decodes at once, as a part of what a replica holds."""


class Spans(msgspec.Struct, frozen=True):
    """Seconds of arrivals; 0 = as the workload says."""

    short_s: float
    long_s: float
    residence_s: float = 0.0
    stay_s: float = 0.0
    """How long a request decodes at most: at the objectives' limit, or in a full batch."""


def spans_of(objectives: Sequence[Objective], loads: Loads, pace: Pace | None) -> Spans:
    """Lengths by the residence that the objectives allow, or that half full replicas have."""
    step_ms = step_limit_ms(objectives, loads)
    first_ms = max((one.limit_ms for one in objectives if one.metric == "ttft"), default=0.0)
    full_ms = math.inf
    if pace is not None:
        held = min(pace.requests_max, pace.kv_tokens // (loads.prompt + loads.output))
        full_ms = pace.step_ns(max(1, held), loads.prompt) / 1e6
        if not math.isfinite(step_ms):
            step_ms = pace.step_ns(max(1, int(_PART_ALONE * held)), loads.prompt) / 1e6
    step_ms = step_ms if math.isfinite(step_ms) else 50.0
    residence_s = (first_ms + step_ms * loads.output) / 1000
    stay_s = min(step_ms, full_ms) * loads.output / 1000
    beyond = min(1 - int(one.at[1:]) / 100 for one in objectives)
    needed_s = _BEYOND / min(beyond, 0.5) / loads.rate_per_s
    most_s = max(REQUESTS_MAX / loads.rate_per_s, STAYS_MIN * stay_s)
    long_s = min(most_s, max(_LONG_MIN_S, LONG * residence_s, needed_s))
    short_s = min(long_s, max(_SHORT_MIN_S, SHORT * residence_s, needed_s / 4))
    return Spans(_round(short_s), _round(long_s), residence_s, stay_s)


def _round(seconds: float) -> float:
    """Two digits: a number that one can say and type."""
    return float(f"{seconds:.2g}")
