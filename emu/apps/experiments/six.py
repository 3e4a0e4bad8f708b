"""A planner that asks for six prefill replicas once: an example of a planner of one's own.

`autoscale.planner = "emu.apps.experiments.six:AddSixOnce"`. It waits until a backlog of prompts
stands in the queue, then asks for six more prefill replicas until they are there or on their way
(with one source for each load, not all can begin at once), and for nothing after that.
"""

from __future__ import annotations

from typing import Final

from emu.autoscale.demand import Demand, Rates, scan
from emu.autoscale.snapshot import Snapshot
from emu.config.schema import OwnPlannerTable

_REPLICAS: Final = 6
_BACKLOG_TOKENS: Final = 20_000


class AddSixOnce:
    """Implements `Planner`."""

    needs_ticks = False

    def __init__(self, table: OwnPlannerTable, rates: Rates) -> None:
        self._wanted = 0

    def decide(self, snapshot: Snapshot) -> Demand:
        """Six, at the first backlog."""
        count = scan(snapshot).prefill
        if not self._wanted:
            if snapshot.waiting_tokens < _BACKLOG_TOKENS:
                return Demand()
            self._wanted = count + _REPLICAS
        missing = max(0, self._wanted - count)
        return Demand(prefill=missing, figures={"W_tokens": snapshot.waiting_tokens})

    def wake_ns(self, snapshot: Snapshot) -> int:
        """Only a change of the backlog matters."""
        return -1
