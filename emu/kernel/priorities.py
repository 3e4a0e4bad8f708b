"""Priorities of what is due at one instant: they take the order of *scheduling* out of results."""

from __future__ import annotations

from typing import Final

PRIORITY_WORLD: Final = 0
"""Arrivals, client cancellations, commands, faults."""
PRIORITY_NETWORK: Final = 1 << 20
"""Transfers."""
PRIORITY_REPLICA: Final = 2 << 20
"""Replicas: add the replica id."""
PRIORITY_WATCHER: Final = 3 << 20
"""Migration watchers: add the replica id."""
PRIORITY_CONTROL: Final = 4 << 20
"""Control loops. They read the same instants, so each has a priority of its own:"""
PRIORITY_REJECTER: Final = PRIORITY_CONTROL + 1
PRIORITY_REBALANCER: Final = PRIORITY_CONTROL + 2
PRIORITY_PLANNER: Final = PRIORITY_CONTROL + 3
