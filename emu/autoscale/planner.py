"""Planners: they say how many replicas of each kind there should be.

A planner is asked at a tick and answers from the snapshot alone. A user's planner is a class
named by import path in `autoscale.planner`:

    class MyPlanner:
        needs_ticks = False     # True: asked every tick while requests are in the system

        def __init__(self, table: OwnPlannerTable, rates: Rates) -> None: ...
        def decide(self, snapshot: Snapshot) -> Demand: ...
        def wake_ns(self, snapshot: Snapshot) -> int: ...   # ask again then; -1 = on change only

How a demand is met (revive, reuse, load from where) is the executor's plan, not the planner's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from emu.autoscale.demand import Demand, Rates, demand, scan
from emu.autoscale.snapshot import Snapshot
from emu.config.kinds import implementation
from emu.config.own import make_own
from emu.config.schema import AutoscaleTable, BlitzTable, OwnPlannerTable
from emu.errors import PluginError, shown

__all__ = ["BlitzPlanner", "Demand", "Planner", "Rates", "make_planner", "scan"]
"""With what a planner of one's own is written with (`emu/autoscale/demand.py`)."""


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
    """BlitzScale's rule; that of the paper shares it and differs in how plans are made."""

    needs_ticks = False

    def __init__(self, table: BlitzTable, rates: Rates) -> None:
        self._table = table
        self._rates = rates

    def decide(self, snapshot: Snapshot) -> Demand:
        """Section 6.2."""
        return demand(snapshot, self._rates, self._table)

    def wake_ns(self, snapshot: Snapshot) -> int:
        """The rule depends on nothing but the snapshot."""
        return -1


class _Own:
    """A planner of a user's own, whose answers are looked at."""

    def __init__(self, made: Planner, path: str) -> None:
        self._made = made
        self._what = f"autoscale.planner: {path}"
        self.needs_ticks = bool(made.needs_ticks)

    def decide(self, snapshot: Snapshot) -> Demand:
        """What the other wants; PluginError if that is no demand."""
        found: object = self._made.decide(snapshot)
        if not isinstance(found, Demand):
            raise PluginError(f"{self._what} wants {shown(found)}; expected a Demand")
        wanted = {"prefill": found.prefill, "decode": found.decode, "colocated": found.colocated}
        for name, change in wanted.items():
            if type(change) is not int:
                problem = f"wants {name} = {shown(change)}; expected a whole number"
                raise PluginError(f"{self._what} {problem}")
        try:
            found.text()
        except (TypeError, ValueError, AttributeError):
            problem = f"gives figures {shown(found.figures)}; expected numbers by name"
            raise PluginError(f"{self._what} {problem}") from None
        return found

    def wake_ns(self, snapshot: Snapshot) -> int:
        """When the other wants to be asked again."""
        found: object = self._made.wake_ns(snapshot)
        if type(found) is not int:
            problem = f"wants to be woken at {shown(found)}; expected whole ns, or -1"
            raise PluginError(f"{self._what} {problem}")
        return found


def make_planner(
    table: AutoscaleTable, rates: Rates, own: Callable[..., Planner] | None = None
) -> Planner:
    """The planner that `autoscale.planner` names; `own` makes one of a user's class.

    Raises InputError for one that cannot be made.
    """
    if isinstance(table, OwnPlannerTable):
        path = table.planner
        found = (own or make_own)(path, "autoscale.planner", table.own, table, rates)
        return _Own(found, path)
    made: Planner = implementation(table.made_by)(table, rates)
    return made
