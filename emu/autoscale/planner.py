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

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from emu.autoscale.snapshot import Snapshot
from emu.config.kinds import implementation
from emu.config.own import make_own
from emu.config.schema import AutoscaleTable, BlitzTable, HpaTable, OwnPlannerTable
from emu.errors import PluginError, shown
from emu.replica.states import ReplicaState
from emu.units import s_to_ns

# --------------------------------------------------------------------------------------------------
# How many replicas are wanted: BlitzScale's equations (sections 6.1, 6.2) as pure functions.
#
# `scan` counts what there is, `targets` gives the admissible interval of prefill and decode
# replicas, `delta` the change. A change jumps up to the middle of the interval, goes down one
# replica at a time, and inside the interval nothing happens.
#
# Repaired by default, restored by name in `autoscale.faithful` (docs/autoscale.md):
# `kv_equation` - the original divides the KV tokens by a rate that is already multiplied by the
# number of decode replicas, and uses the upper bound at both ends for prefill.


S = ReplicaState

_PREFILL_HOLDING: Final = frozenset({S.PREFILL, S.AUS_PREFILL, S.LOADING_PREFILL})
_PREFILL_LIVE: Final = frozenset({S.NEW_PREFILL, S.REFRACTORY_PREFILL})
_PREFILL: Final = _PREFILL_HOLDING | _PREFILL_LIVE | {S.OLD_PREFILL}
_DECODE: Final = frozenset({S.DECODE, S.LOADING_DECODE, S.MUTATING_TO_DECODE, S.AUS_DECODE})


class Rates(msgspec.Struct, frozen=True):
    """What one replica can do, tokens per second."""

    prefill_tokens_per_s: float
    """Rp."""
    transfer_tokens_per_s: float
    """Rt: KV of so many tokens into one decode replica."""


class Counts(msgspec.Struct, frozen=True):
    """What the scan found."""

    prefill: int
    """P: replicas that prefill or are about to."""
    decode: int
    """D."""
    queued_tokens: int
    """W: prompt tokens that wait, and those that live-scaling replicas hold."""
    prefill_kv_tokens: int
    """K: KV on normal prefill replicas, which is to be moved."""
    blocks_used: int
    """B: on everything that counts as prefill (except live) or decode."""
    blocks_per_replica: int
    """Bmax."""


class Interval(msgspec.Struct, frozen=True):
    """Between low and high nothing changes."""

    low: int
    high: int


class Demand(msgspec.Struct, frozen=True):
    """Replicas to add (or, negative, to remove), with the numbers behind them.

    `prefill`, `decode` and `colocated` are numbers of replicas.
    """

    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    figures: dict[str, float] = {}

    def text(self) -> str:
        """One line for the log."""
        parts = [f"prefill {self.prefill:+d}", f"decode {self.decode:+d}"]
        if self.colocated:
            parts = [f"colocated {self.colocated:+d}"]
        parts += [f"{key}={value:g}" for key, value in self.figures.items()]
        return ", ".join(parts)


def scan(snapshot: Snapshot) -> Counts:
    """Count replicas and load by the table of section 6.1."""
    prefill = decode = used = live = normal = largest = 0
    for view in snapshot.replicas:
        state = view.state
        if view.blocks_total > largest:
            largest = view.blocks_total
        if state in _DECODE:
            decode += 1
            used += view.blocks_used
        elif state in _PREFILL:
            prefill += 1
            if state in _PREFILL_LIVE:
                live += view.blocks_used
            elif state in _PREFILL_HOLDING:
                used += view.blocks_used
                if state is not S.LOADING_PREFILL:
                    normal += view.blocks_used
    return Counts(
        prefill,
        decode,
        snapshot.waiting_tokens + snapshot.block_tokens * live,
        snapshot.block_tokens * normal,
        used,
        max(1, largest),
    )


def _ceil(numerator: float, denominator: float) -> int:
    # A quotient that is a whole number but for rounding is that number.
    return math.ceil(numerator / denominator - 1e-9)


def targets(counts: Counts, rates: Rates, table: BlitzTable) -> tuple[Interval, Interval]:
    """Admissible numbers of prefill and of decode replicas (section 6.2)."""
    upper_s, lower_s = table.migration_upper_s, table.migration_lower_s
    kv_rate = max(1.0, rates.transfer_tokens_per_s)
    kv_tokens = counts.prefill_kv_tokens
    is_faithful = "kv_equation" in table.faithful
    if is_faithful:
        kv_rate = max(1.0, counts.decode * rates.transfer_tokens_per_s)
    kv_min, kv_max = _ceil(kv_tokens, upper_s * kv_rate), _ceil(kv_tokens, lower_s * kv_rate)
    blocks = counts.blocks_per_replica
    low = max(_ceil(counts.blocks_used, table.decode_upper * blocks), kv_min)
    high = max(_ceil(counts.blocks_used, table.decode_lower * blocks), kv_max, low)
    decode = Interval(low, high)
    prefill_rate = rates.prefill_tokens_per_s
    low = max(_ceil(counts.queued_tokens, table.prefill_upper_s * prefill_rate), kv_min)
    high = max(
        _ceil(counts.queued_tokens, table.prefill_lower_s * prefill_rate),
        kv_min if is_faithful else kv_max,
        low,
    )
    return Interval(low, high), decode


def delta(count: int, interval: Interval, minimum: int, maximum: int, *, floor: int = 1) -> int:
    """Change of a number of replicas: up to the middle, down by one, never below `floor`.

    The new number stays between `minimum` and `maximum`.
    """
    if interval.low > count:
        change = (interval.low + interval.high + 1) // 2 - count
    elif interval.high < count:
        change = interval.high - count
    else:
        change = 0
    change = max(change, -1, floor - count)
    return min(max(count + change, minimum), maximum) - count


def floor_of(snapshot: Snapshot, minimum: int, count: int) -> int:
    """Replicas of `count` that are kept even without any load: one, or none.

    `minimum` is the configured bound.
    """
    is_empty = snapshot.may_empty or (not count and not snapshot.outstanding)
    return 0 if is_empty and not minimum else 1


def demand(snapshot: Snapshot, rates: Rates, table: BlitzTable) -> Demand:
    """The change that the blitz planner wants."""
    counts = scan(snapshot)
    prefill, decode = targets(counts, rates, table)
    floor = floor_of(snapshot, table.min_prefill, counts.prefill)
    decode_floor = floor_of(snapshot, table.min_decode, counts.decode)
    return Demand(
        prefill=delta(counts.prefill, prefill, table.min_prefill, table.max_prefill, floor=floor),
        decode=delta(counts.decode, decode, table.min_decode, table.max_decode, floor=decode_floor),
        figures={
            "P": counts.prefill,
            "P_min": prefill.low,
            "P_max": prefill.high,
            "D": counts.decode,
            "D_min": decode.low,
            "D_max": decode.high,
            "W_tokens": counts.queued_tokens,
            "K_tokens": counts.prefill_kv_tokens,
            "B_blocks": counts.blocks_used,
        },
    )


# --------------------------------------------------------------------------------------------------
# A horizontal pod autoscaler for colocated replicas, as Kubernetes (and KEDA) users know it.
#
# desired = ceil(ready x metric / target), nothing within a tolerance of 10 %, and two windows: the
# lowest recommendation of the scale-up window and the highest of the scale-down window count.
# Metrics: `kv_utilization` (mean part of KV blocks in use, target `target_utilization`),
# `concurrency` (requests in the system per replica) and `queue` (waiting requests per replica, both
# against `target_value`).
#
# The first look records the present number as a recommendation made just before it (Kubernetes'
# `recordInitialRecommendation`), so that a controller which starts, or starts again, neither
# shrinks nor grows before a window has passed.
#
# Not ready replicas (loading) are part of the present number, and their metric counts as zero when
# scaling up, so that a load under way is not ordered twice.


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


# --------------------------------------------------------------------------------------------------
# Planners by name


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

    def __init__(self, made: Any, path: str) -> None:
        self._made = made
        self._what = f"autoscale.planner: {path}"
        self.needs_ticks = bool(made.needs_ticks)

    def decide(self, snapshot: Snapshot) -> Demand:
        """What the other wants; PluginError if that is no demand."""
        found = self._made.decide(snapshot)
        if not isinstance(found, Demand):
            raise PluginError(f"{self._what} wants {shown(found)}; expected a Demand")
        for name in ("prefill", "decode", "colocated"):
            change = getattr(found, name)
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
        found = self._made.wake_ns(snapshot)
        if type(found) is not int:
            problem = f"wants to be woken at {shown(found)}; expected whole ns, or -1"
            raise PluginError(f"{self._what} {problem}")
        return found


def make_planner(
    table: AutoscaleTable, rates: Rates, own: Callable[..., Any] | None = None
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
