"""I14, as seen from outside: what a planner may not decide, however wrong its metrics are.

Reads the text of each plan in the history (`prefill -1, decode +0, P=3, ...; shut 2`) and knows
the bounds of `[autoscale]`. No plan names a dead replica. No plan leads out of `min_*` and
`max_*`. A planner without metrics holds. Oscillation has a bound, too: the blitz planner goes
down by one at a time (or back to the maximum), the pod autoscaler not below any number that it
wanted within its scale-down window.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from emu.config.schema import AutoscaleTable, BlitzTable, HpaTable

_IDS: Final = re.compile(r"(?<![a-z0-9])\d+")
_CHANGE: Final = re.compile(r"(prefill|decode|colocated) ([+-]\d+)")
_FIGURE: Final = re.compile(r"(\w+)=([-+.\de]+)")


class PlanWatch:
    """Judges the plans of one run, in order."""

    def __init__(self, table: AutoscaleTable) -> None:
        self._table = table
        self._wanted: list[tuple[int, float]] = []
        """(when, replicas wanted) of the pod autoscaler, since it last lost its memory."""
        self._blind = 0
        """Faults that leave the planner without metrics."""

    def fault(self, kind: str, *, is_over: bool) -> None:
        """A fault strikes, or is over."""
        if kind == "metrics_lost":
            self._blind += -1 if is_over else 1
        elif kind == "planner_restart":
            self._wanted.clear()

    def judge(self, at_ns: int, text: str, states: Mapping[int, str]) -> Iterator[str]:
        """Whatever is wrong with a plan; `states` by replica, as far as they have changed."""
        head, *actions = text.split("; ")
        if self._blind:
            yield f"I14: the planner has no metrics, and decides: {text}"
        for action in actions:
            for replica in map(int, _IDS.findall(action)):
                if states.get(replica) == "failed":
                    yield f"I14: the planner decides on replica {replica}, which is dead: {action}"
        changes = {role: int(change) for role, change in _CHANGE.findall(head)}
        figures = {name: float(value) for name, value in _FIGURE.findall(head)}
        table = self._table
        if isinstance(table, HpaTable):
            yield from self._pods(table, at_ns, changes.get("colocated", 0), figures)
        elif isinstance(table, BlitzTable):
            for role, count, least, most in (
                ("prefill", figures["P"], table.min_prefill, table.max_prefill),
                ("decode", figures["D"], table.min_decode, table.max_decode),
            ):
                change = changes[role]
                yield from _bounds(role, count, change, least, most)
                if change < -1 and count + change != most:
                    yield f"I14: {change} {role} replicas at once: {head}"

    def _pods(
        self, table: HpaTable, at_ns: int, change: int, figures: Mapping[str, float]
    ) -> Iterator[str]:
        count = figures["ready"] + figures["loading"]
        yield from _bounds("colocated", count, change, table.min_replicas, table.max_replicas)
        since_ns = at_ns - round(table.scale_down_stabilization_s * 1e9)
        self._wanted = [note for note in self._wanted if note[0] >= since_ns]
        self._wanted.append((at_ns, figures["wanted"]))
        highest = max(wanted for _, wanted in self._wanted)
        if change < 0 and count + change < min(count, highest):
            yield f"I14: down to {count + change:g} replicas, {highest:g} were wanted a while ago"


def _bounds(role: str, count: float, change: int, least: int, most: int) -> Iterator[str]:
    after = count + change
    if (change > 0 and after > most) or (change < 0 and after < least):
        yield f"I14: {count:g}{change:+d} {role} replicas, bounds are {least} and {most}"
