"""A horizontal pod autoscaler for colocated replicas, as Kubernetes (and KEDA) users know it.

desired = ceil(ready x metric / target), nothing within a tolerance of 10 %, and two windows: the
lowest recommendation of the scale-up window and the highest of the scale-down window count.
Metrics: `kv_utilization` (mean part of KV blocks in use, target `target_utilization`),
`concurrency` (requests in the system per replica) and `queue` (waiting requests per replica, both
against `target_value`).

The first look records the present number as a recommendation made just before it (Kubernetes'
`recordInitialRecommendation`), so that a controller which starts, or starts again, neither
shrinks nor grows before a window has passed.

Not ready replicas (loading) are part of the present number, and their metric counts as zero when
scaling up, so that a load under way is not ordered twice.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from emu.autoscale.demand import Demand, Rates, floor_of
from emu.autoscale.snapshot import Snapshot
from emu.config.schema import HpaTable
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


class Window:
    """The extreme of what was noted within the last `span_ns`, at constant cost per note.

    Kept are only the notes that can still become the extreme: each beats all after it.
    """

    def __init__(self, span_ns: int, *, highest: bool) -> None:
        self.span_ns = span_ns
        self._sign = 1 if highest else -1
        self._kept: deque[tuple[int, int]] = deque()  # (time, value), the extreme first

    def note(self, at_ns: int, value: int) -> None:
        """A value of now; times never go back."""
        kept = self._kept
        while kept and self._sign * kept[-1][1] <= self._sign * value:
            kept.pop()
        kept.append((at_ns, value))
        while kept[0][0] < at_ns - self.span_ns:
            kept.popleft()

    @property
    def extreme(self) -> tuple[int, int]:
        """(when it was last noted, value) as of the last note."""
        return self._kept[0]

    @property
    def last(self) -> int:
        """The value noted last."""
        return self._kept[-1][1]

    def __len__(self) -> int:
        return len(self._kept)


class HpaPlanner:
    """Keeps the recommendations of both windows."""

    needs_ticks = True

    def __init__(self, table: HpaTable, rates: Rates) -> None:
        """The rates do not matter: what is measured has a target."""
        self._table = table
        self._lowest = Window(s_to_ns(table.scale_up_stabilization_s), highest=False)
        self._highest = Window(s_to_ns(table.scale_down_stabilization_s), highest=True)

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
        least = max(table.min_replicas, floor_of(snapshot, table.min_replicas, total))
        wanted = min(max(wanted, least), table.max_replicas)
        if not self._highest:
            present = min(max(total, least), table.max_replicas)
            self._lowest.note(snapshot.now_ns - 1, present)
            self._highest.note(snapshot.now_ns - 1, present)
        self._lowest.note(snapshot.now_ns, wanted)
        self._highest.note(snapshot.now_ns, wanted)
        # Up as far as the lowest recommendation, down as far as the highest.
        kept = max(self._lowest.extreme[1], min(total, self._highest.extreme[1]))
        return Demand(
            colocated=kept - total,
            figures={"ready": len(ready), "loading": loading, "load": load, "wanted": wanted},
        )

    def wake_ns(self, snapshot: Snapshot) -> int:
        """When the recommendation that keeps the number up leaves the scale-down window."""
        if not self._highest:
            return -1
        at_ns, highest = self._highest.extreme
        return -1 if highest <= self._highest.last else at_ns + self._highest.span_ns + 1
