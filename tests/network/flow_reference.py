"""A slow and plain model of shared links with exact fractions, to judge the flow table by.

Shares no code with it: rates come from progressive filling in its textbook form, progress is a
Fraction, and everything is computed anew at every instant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

NS = 10**9


@dataclass
class RefFlow:
    links: tuple[int, ...]
    size: int
    weight: int = 1
    marks: tuple[int, ...] = ()
    done: Fraction = Fraction(0)
    end_ns: int | None = None
    cancelled: bool = False
    mark_ns: list[int] = field(default_factory=list)


def progressive_filling(flows: dict[int, RefFlow], capacity: list[Fraction]) -> dict[int, Fraction]:
    """Raise every flow's level in equal steps until a link fills; freeze those on it; repeat."""
    rates = {key: Fraction(0) for key in flows}
    rising = set(flows)
    while rising:
        step = None
        for link, limit in enumerate(capacity):
            weight = sum(flows[key].weight for key in rising if link in flows[key].links)
            if weight:
                used = sum(rates[key] for key in flows if link in flows[key].links)
                room = (limit - used) / weight
                step = room if step is None else min(step, room)
        assert step is not None
        for key in rising:
            rates[key] += step * flows[key].weight
        full = {
            link
            for link, limit in enumerate(capacity)
            if sum(rates[key] for key in flows if link in flows[key].links) == limit
        }
        rising = {key for key in rising if not full.intersection(flows[key].links)}
    return rates


class Reference:
    def __init__(self, bytes_per_s: list[int]) -> None:
        self.capacity = [Fraction(rate, NS) for rate in bytes_per_s]
        self.flows: dict[int, RefFlow] = {}
        self.now = 0

    def active(self) -> dict[int, RefFlow]:
        return {
            key: flow
            for key, flow in self.flows.items()
            if flow.end_ns is None and not flow.cancelled
        }

    def run_until(self, until: float) -> None:
        """Advance to `until` (or math.inf: as far as anything moves)."""
        while True:
            flows = self.active()
            rates = progressive_filling(flows, self.capacity)
            ends = [
                self.now + math.ceil((flow.size - flow.done) / rates[key])
                for key, flow in flows.items()
                if rates[key]
            ]
            to = min(ends, default=until)
            to = min(to, until)
            if to == math.inf:
                return
            for key, flow in flows.items():
                if not rates[key]:
                    continue
                start = flow.done
                flow.done = min(Fraction(flow.size), start + rates[key] * (to - self.now))
                for mark in flow.marks[len(flow.mark_ns) :]:
                    at = self.now + math.ceil((mark - start) / rates[key])
                    if at > to:
                        break
                    flow.mark_ns.append(max(self.now, at))
                if flow.done == flow.size:
                    flow.end_ns = to
            moved = to > self.now
            self.now = int(to)
            if to == until and not (moved and any(f.end_ns == to for f in flows.values())):
                return
