"""How many replicas are wanted: BlitzScale's equations (sections 6.1, 6.2) as pure functions.

`scan` counts what there is, `targets` gives the admissible interval of prefill and decode
replicas, `delta` the change. A change jumps up to the middle of the interval, goes down one
replica at a time, and inside the interval nothing happens.

Repaired by default, restored by name in `autoscale.faithful` (docs/autoscale.md):
`kv_equation` - the original divides the KV tokens by a rate that is already multiplied by the
number of decode replicas, and uses the upper bound at both ends for prefill.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from emu.autoscale.snapshot import Snapshot
from emu.config.schema import BlitzTable
from emu.replica.states import ReplicaState

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
