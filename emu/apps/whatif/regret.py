"""What the best replica in hindsight would have given: the regret of routing decisions.

A decision is looked at by emulating the log again with this one request on another replica and
all others where they were. Its regret is its own latency less that on the best replica, never
negative. Emulations go from the last instant before it at which nothing was in the system (where
the past cannot matter: no autoscaling, faults, commands or prefix caches) to the last arrival
before its end in the replay; what comes later cannot make it any faster than that.

All decisions are looked at, or a random part of them; the mean of the part has an interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.apps.whatif.latencies import (
    Latencies,
)
from emu.apps.whatif.variants import Outcome, Variant
from emu.config.schema import Config
from emu.report.intervals import t_quantile
from emu.rng import rng_stream
from emu.workload.items import Line


class Decision(msgspec.Struct, frozen=True):
    """One routing decision and what would have been best."""

    request: int
    """Its place in the log, from 0."""
    arrival_s: float
    chosen: int
    """Replica that served the request."""
    best: int
    took_ms: float
    best_ms: float

    @property
    def regret_ms(self) -> float:
        """How much the best replica would have saved it."""
        return self.took_ms - self.best_ms


class Regret(msgspec.Struct):
    """The regret of all decisions, estimated from those that were looked at."""

    metric: str
    decisions: list[Decision]
    """Looked at, the worst first."""
    count: int
    """Decisions in the log that had a choice."""
    mean_ms: float
    low_ms: float
    high_ms: float
    """95 %, Student's t with the correction for a part of a finite number."""
    regretted: float
    """Part with more than 1 % of the latency to save."""


class Choice(msgspec.Struct, frozen=True):
    """An alternative of a decision that is to be emulated."""

    request: int
    replica: int
    offset: int
    """Place of the request among the lines of the emulation."""


def chosen_decisions(
    lines: Sequence[Line], pins: NDArray[np.int64], count: int, seed: int
) -> list[int]:
    """Requests whose decisions are looked at: all with a choice, or so many of them at random."""
    able = [index for index in range(len(lines)) if pins[index] >= 0]
    if not count or count >= len(able):
        return able
    rng = rng_stream(seed, "whatif.decisions")
    return sorted(int(index) for index in rng.choice(able, count, replace=False))


def alternatives(
    config: Config,
    lines: Sequence[Line],
    pins: NDArray[np.int64],
    base: Latencies,
    requests: Sequence[int],
    replicas: Sequence[int],
) -> tuple[list[Variant], list[Choice]]:
    """The emulations that the regret of these requests needs."""
    arrivals = np.array([line.arrival_time_ns for line in lines])
    ends = arrivals + np.where(np.isnan(base.e2e_ms), np.inf, base.e2e_ms * 1e6)
    starts = _starts(arrivals, ends) if _forgets(config, lines) else np.zeros(len(lines), dtype=int)
    variants, choices = [], []
    for request in requests:
        low = int(starts[request])
        high = int(np.searchsorted(arrivals, ends[request], "right"))
        for replica in replicas:
            if replica == pins[request]:
                continue
            cut = []
            for index in range(low, max(high, request + 1)):
                pin = replica if index == request else int(pins[index])
                line = msgspec.structs.replace(lines[index], replica=pin)
                if index == request:
                    line.decode_replica = -1
                cut.append(line)
            key = f"{request} on {replica}"
            variants.append(Variant(key, config, cut))
            choices.append(Choice(request, replica, request - low))
    return variants, choices


def _forgets(config: Config, lines: Sequence[Line]) -> bool:
    """What happens after an instant at which nothing is in the system does not depend on before."""
    if any(line.input_tok_ids or line.tok_id_ranges or line.hash_ids for line in lines):
        return False  # what is cached stays
    return config.autoscale is None and not config.faults and not config.commands


def _starts(arrivals: NDArray[np.int64], ends: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each request the first one after the last idle instant before it."""
    starts = np.zeros(len(arrivals), dtype=np.int64)
    latest, first = -1.0, 0
    for index, arrival in enumerate(arrivals):
        if arrival > latest:  # all before it have ended
            first = index
        starts[index] = first
        latest = max(latest, float(ends[index]))
    return starts


def regret_of(
    metric: str,
    base: Latencies,
    lines: Sequence[Line],
    pins: NDArray[np.int64],
    requests: Sequence[int],
    count: int,
    found: Sequence[tuple[Choice, Outcome]],
) -> Regret:
    """The regret of the decisions that were looked at; `count`: of the whole log."""
    best: dict[int, tuple[float, int]] = {}
    took = base.of(metric)
    for request in requests:
        best[request] = (float(took[request]), int(pins[request]))
    for choice, outcome in found:
        value = float(outcome.latencies.of(metric)[choice.offset])
        if not np.isnan(value) and value < best[choice.request][0]:
            best[choice.request] = (value, choice.replica)
    decisions = [
        Decision(
            request,
            lines[request].arrival_time_ns / 1e9,
            int(pins[request]),
            best[request][1],
            float(took[request]),
            best[request][0],
        )
        for request in requests
        if not np.isnan(took[request])
    ]
    regrets = np.array([one.regret_ms for one in decisions])
    mean = float(regrets.mean()) if len(regrets) else 0.0
    half = 0.0
    if 1 < len(regrets) < count:
        part = (count - len(regrets)) / max(1, count - 1)
        error = float(regrets.std(ddof=1)) * (part / len(regrets)) ** 0.5
        half = t_quantile(len(regrets) - 1) * error
    regretted = [one.regret_ms > 0.01 * one.took_ms for one in decisions]
    decisions.sort(key=lambda one: (-one.regret_ms, one.request))
    return Regret(
        metric,
        decisions,
        count,
        mean,
        max(0.0, mean - half),
        mean + half,
        float(np.mean(regretted)) if decisions else 0.0,
    )
