"""Runs that end as soon as it is certain that they miss an objective.

    run_or_give_up(config, source, directory, [Limit("ttft", 95, 1500.0)])

The world stands still at fixed instants of emulated time, so that where a run ends does not depend
on the machine. A percentile misses for certain as soon as more requests are above the limit than
may be, of all that the workload has. The figures of a run that is not given up are those of any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.config.places import placing
from emu.config.schema import Config
from emu.documents import Document
from emu.report.records import LATENCIES
from emu.report.summary import figures_of
from emu.units import NS_PER_MS, NS_PER_S
from emu.world import Ports, World, asks_outside, prepare, uncollected

PARTS: Final = 32
"""So many times during the arrivals a run is looked at, and as often afterwards."""
RATIO: Final = "given_up.ratio"
"""Of a run that was given up: the largest percentile / limit, at least."""


class Limit(msgspec.Struct, frozen=True):
    """A percentile of a latency that must not be above a limit."""

    metric: str
    """ttft, tpot or e2e."""
    percentile: int
    limit_ms: float
    slack: float = 1.0
    """A run is given up where the percentile is above so many times the limit."""

    @property
    def figure(self) -> str:
        """The key of the percentile / the limit, at least, of a run that was given up."""
        return f"given_up.{self.metric}_p{self.percentile}"


def run_or_give_up(
    config: Config, source: str, directory: Path, limits: Sequence[Limit]
) -> Document:
    """Figures of a run, or RATIO and those of the limits. Raises what a run raises.

    None of its replicas may ask another process.
    """
    with placing(source):
        plan, workload = prepare(config, source)
        assert not asks_outside(plan)
        step_s = max(1, workload.last_arrival_ns) / PARTS / NS_PER_S
        with uncollected(), World(plan, workload, directory, Ports()) as world:
            at_s = 0.0
            while world.outcome is None:
                at_s += step_s
                world.run(at_s)
                latencies = world.recorder.requests.completed_latencies()
                ratios = certain_ratios(latencies, limits, workload.count)
                is_missed = any(
                    ratio > one.slack for one, ratio in zip(limits, ratios, strict=True)
                )
                if is_missed and world.outcome is None:
                    figures = {one.figure: ratio for one, ratio in zip(limits, ratios, strict=True)}
                    return {RATIO: max(ratios), **figures}
            world.close()
            summary = world.write_results(workload.count, workload.notes)
            if world.error is not None:
                raise world.error
    return figures_of(summary)


def certain_ratios(latencies: bytes, limits: Sequence[Limit], count: int) -> list[float]:
    """Each limit's percentile / the limit, at least, whatever comes; 0: not known.

    `latencies`: of completed requests; `count`: of all that the workload has.
    """
    rows = np.frombuffer(latencies, np.int64).reshape(-1, len(LATENCIES))
    ratios = []
    for one in limits:
        # The percentile lies at or above the value of this rank from the top.
        above = count - math.floor((count - 1) * one.percentile / 100)
        at = len(rows) - above
        if at < 0:
            ratios.append(0.0)
            continue
        values = rows[:, LATENCIES.index(one.metric)]
        ratios.append(float(np.partition(values, at)[at]) / NS_PER_MS / one.limit_ms)
    return ratios
