"""A horizontal pod autoscaler for colocated replicas, as Kubernetes (and KEDA) users know it.

desired = ceil(ready x metric / target), nothing within a tolerance of 10 %, and two windows: the
lowest recommendation of the scale-up window and the highest of the scale-down window count.
Metrics: `kv_utilization` (mean part of KV blocks in use, target `target_utilization`),
`concurrency` (requests in the system per replica) and `queue` (waiting requests per replica, both
against `target_value`).

Not ready replicas (loading) are part of the present number, and their metric counts as zero when
scaling up, so that a load under way is not ordered twice.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from emu.autoscale.demand import Demand
from emu.autoscale.snapshot import Snapshot
from emu.config.schema import AutoscaleTable
from emu.replica.states import ReplicaState
from emu.units import s_to_ns

S = ReplicaState
_TOLERANCE: Final = 0.1


def recommend(ready: int, total: int, load: float, target: float) -> int:
    """Replicas that bring `load` (the sum over replicas) to `target` each.

    `total` = ready ones and those on their way. Within the tolerance: as many as there are.
    """
    if ready == 0:
        return max(total, 1 if load > 0 else 0)
    ratio = load / (ready * target)
    if abs(ratio - 1) <= _TOLERANCE:
        return total
    if ratio > 1:  # loading replicas count, with a metric of zero
        ratio = load / (total * target)
        if ratio <= 1 + _TOLERANCE:
            return total
    return math.ceil(load / target - 1e-9)


class HpaPlanner:
    """Keeps the recommendations of both windows."""

    needs_ticks = True

    def __init__(self, table: AutoscaleTable) -> None:
        self._table = table
        self._up_ns = s_to_ns(table.scale_up_stabilization_s)
        self._down_ns = s_to_ns(table.scale_down_stabilization_s)
        self._history: deque[tuple[int, int]] = deque()

    def decide(self, snapshot: Snapshot) -> Demand:
        """The change after tolerance, windows and bounds."""
        table = self._table
        ready = [v for v in snapshot.replicas if v.state is S.COLOCATED]
        loading = sum(v.state is S.LOADING_COLOCATED for v in snapshot.replicas)
        total = len(ready) + loading
        if table.metric == "kv_utilization":
            load = sum(v.blocks_used / v.blocks_total for v in ready)
            target = table.target_utilization
        else:
            waiting = snapshot.waiting_requests
            load = float(waiting if table.metric == "queue" else snapshot.outstanding)
            target = table.target_value
        wanted = recommend(len(ready), total, load, target)
        wanted = min(max(wanted, table.min_replicas), table.max_replicas)
        self._note(snapshot.now_ns, wanted)
        change = self._stabilised(snapshot.now_ns, total) - total
        return Demand(
            colocated=change,
            figures={"ready": len(ready), "loading": loading, "load": load, "wanted": wanted},
        )

    def _note(self, now_ns: int, wanted: int) -> None:
        horizon_ns = now_ns - max(self._up_ns, self._down_ns)
        history = self._history
        while history and history[0][0] < horizon_ns:
            history.popleft()
        history.append((now_ns, wanted))

    def _stabilised(self, now_ns: int, total: int) -> int:
        lowest = min(n for at, n in self._history if at >= now_ns - self._up_ns)
        highest = max(n for at, n in self._history if at >= now_ns - self._down_ns)
        if total < lowest:
            return lowest
        return min(total, highest)

    def wake_ns(self, snapshot: Snapshot) -> int:
        """When the recommendation that keeps the number up leaves the scale-down window."""
        if not self._history:
            return -1
        last = self._history[-1][1]
        highest = max(n for _, n in self._history)
        if highest <= last:
            return -1
        return max(at for at, n in self._history if n == highest) + self._down_ns + 1
