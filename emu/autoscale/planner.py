"""Planners by name: who says how many replicas of each kind there should be.

A planner is asked at a tick and answers from the snapshot alone. A user's planner is a class
named by import path in `autoscale.planner`:

    class MyPlanner:
        needs_ticks = False     # True: asked every tick while requests are in the system

        def __init__(self, table: AutoscaleTable, rates: Rates) -> None: ...
        def decide(self, snapshot: Snapshot) -> Demand: ...
        def wake_ns(self, snapshot: Snapshot) -> int: ...   # ask again then; -1 = on change only

How a demand is met (revive, reuse, load from where) is the executor's plan, not the planner's.
"""

from __future__ import annotations

from typing import Protocol

from emu.autoscale.demand import Demand, Rates, demand
from emu.autoscale.snapshot import Snapshot
from emu.config.schema import AutoscaleTable
from emu.plugins import make_plugin


class Planner(Protocol):
    """How many replicas to add or remove now."""

    needs_ticks: bool

    def decide(self, snapshot: Snapshot) -> Demand:
        """The change wanted now."""
        ...

    def wake_ns(self, snapshot: Snapshot) -> int:
        """When to ask again although nothing has changed; -1 = no need."""
        ...


class BlitzPlanner:
    """BlitzScale's rule; `paper` shares it and differs in how plans are made."""

    needs_ticks = False

    def __init__(self, table: AutoscaleTable, rates: Rates) -> None:
        self._table = table
        self._rates = rates

    def decide(self, snapshot: Snapshot) -> Demand:
        """Section 6.2."""
        return demand(snapshot, self._rates, self._table)

    def wake_ns(self, snapshot: Snapshot) -> int:
        """The rule depends on nothing but the snapshot."""
        return -1


def make_planner(table: AutoscaleTable, rates: Rates) -> Planner:
    """The planner that `autoscale.planner` names. Raises InputError for an unknown one."""
    if table.planner in ("blitz", "paper"):
        return BlitzPlanner(table, rates)
    if table.planner == "hpa":
        from emu.autoscale.hpa import HpaPlanner

        return HpaPlanner(table)
    needs = ("needs_ticks", "decide", "wake_ns")
    made: Planner = make_plugin(table.planner, "autoscale.planner", table, rates, needs=needs)
    return made
