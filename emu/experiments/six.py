"""A planner that asks for six prefill replicas once: an example of a planner of one's own.

`autoscale.planner = "emu.experiments.six:AddSixOnce"`. It waits until a backlog of prompts stands
in the queue, then asks for six more prefill replicas, and for nothing after that.
"""

from __future__ import annotations

from typing import Final

from emu.autoscale.demand import Demand, Rates
from emu.autoscale.snapshot import Snapshot
from emu.config.schema import AutoscaleTable

_REPLICAS: Final = 6
_BACKLOG_TOKENS: Final = 20_000


class AddSixOnce:
    """Implements `Planner`."""

    needs_ticks = False

    def __init__(self, table: AutoscaleTable, rates: Rates) -> None:
        self._is_done = False

    def decide(self, snapshot: Snapshot) -> Demand:
        """Six, at the first backlog."""
        if self._is_done or snapshot.waiting_tokens < _BACKLOG_TOKENS:
            return Demand()
        self._is_done = True
        return Demand(prefill=_REPLICAS, figures={"W_tokens": snapshot.waiting_tokens})

    def wake_ns(self, snapshot: Snapshot) -> int:
        """Only a change of the backlog matters."""
        return -1
