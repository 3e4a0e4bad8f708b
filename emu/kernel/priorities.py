"""Who goes first at one instant: the rank of a timer belongs to the actor that set it.

Ranks are what takes the order of *scheduling* out of results (see `emu/kernel/clock.py`).
"""

from __future__ import annotations

from typing import Final

RANK_WORLD: Final = 0
"""Arrivals, client cancellations, commands, faults."""
RANK_NETWORK: Final = 1 << 20
"""Transfers."""
RANK_REPLICA: Final = 2 << 20
"""Replicas: add the replica id."""
RANK_WATCHER: Final = 3 << 20
"""Migration watchers: add the replica id."""
RANK_CONTROL: Final = 4 << 20
"""Control loops. They read the same instants, so each has a rank of its own:"""
RANK_REJECTER: Final = RANK_CONTROL + 1
RANK_REBALANCER: Final = RANK_CONTROL + 2
RANK_PLANNER: Final = RANK_CONTROL + 3
