"""The records of the flow model: links, flows on them, transfers made of flows.

Owns: the arithmetic scale, and how far a flow has come at a given instant. Decides nothing:
`sharing` divides the links, `flows` moves time on.

Arithmetic. Progress is an integer count of units of 1 / `UNITS_PER_BYTE` byte, and a rate is an
integer count of units per nanosecond. The scale is chosen so that

- a rate of an integer number of bytes per second is exact (the factor 1e9),
- so is an equal share of it among up to 32 flows (the factor lcm(1..32)),
- any other share is rounded *down* by less than one unit per unit of weight, 4e-43 bytes a
  nanosecond. Since integer sums do not round, the error of a flow's progress grows with its
  duration only, never with the number of rate changes: 4e-25 bytes after eleven days among a
  thousand sharers.

A flow reaches a byte offset at the first whole nanosecond at which its exact progress is not
below the offset: ceil. So that the rounding above cannot push a reach that falls exactly on a
nanosecond to the next one, the last 2**-64 (5e-20) byte is not waited for. It is also small enough
not to bring a reach forward: distances are multiples of 1e-9/k byte, k the product of the sharers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Final

import msgspec

from emu.units import NS_PER_S

UNITS_PER_RATE: Final = math.lcm(*range(1, 33)) << 64
"""Units per nanosecond that make one byte per second."""
UNITS_PER_BYTE: Final = NS_PER_S * UNITS_PER_RATE
SLACK_UNITS: Final = UNITS_PER_BYTE >> 64
"""A reach this close is a reach."""

Pair = tuple[int, int]
"""(source, destination) in the caller's numbering, for partitions between two parties."""


def _zeros() -> defaultdict[str, int]:
    return defaultdict(int)


class Link(msgspec.Struct, eq=False, kw_only=True):
    """One direction of one link."""

    index: int
    bytes_per_s: int
    capacity: int
    """Units per nanosecond."""
    extra_latency_ns: int = 0
    running: dict[int, Flow] = msgspec.field(default_factory=dict)
    """Flows that use it now, by sequence number (insertion order = order of starting)."""
    lone: Transfer | None = None
    """The transfer that has it to itself, without a flow: nothing is `running` then."""
    moved_bytes: defaultdict[str, int] = msgspec.field(default_factory=_zeros)
    """Bytes of ended flows that passed, by kind."""
    lost_bytes: defaultdict[str, int] = msgspec.field(default_factory=_zeros)
    """Bytes of cancelled flows that did not pass, by kind."""
    fill_left: int = 0
    fill_weight: int = 0
    """Scratch of `sharing.fill`."""


class Flow(msgspec.Struct, eq=False, kw_only=True):
    """A stream of bytes over a fixed set of links: one part of a transfer."""

    seq: int
    transfer: Transfer
    links: tuple[Link, ...]
    size_bytes: int
    size: int
    weight: int
    marks: list[int]
    """Offsets to report, ascending, in units."""
    limit: int
    """Units that the sender has ready; progress stops here until it is raised."""
    marks_passed: int = 0
    done: int = 0
    """Units carried up to `settled_ns`."""
    rate: int = 0
    """Units per nanosecond since `settled_ns`."""
    settled_ns: int = 0
    next_rate: int = 0
    """Scratch of `sharing.fill`; negative = not decided yet."""
    version: int = 0
    """Counts reschedulings; older entries of the event heap are void."""
    is_running: bool = False
    """True: it holds a share of its links (which may be nothing, when one is down)."""
    is_closed: bool = False
    is_blocked: bool = False
    """A partition cuts this pair off."""
    is_orphan: bool = False
    """Its feeder was cancelled: nothing more will come."""
    feeder: Flow | None = None
    """It forwards what this flow brings, `lag` behind; None once that one has ended."""
    followers: list[Flow] = msgspec.field(default_factory=list)
    lag: int = 0
    is_waiting: bool = False
    """The feeder has not brought the first chunk yet."""
    is_attached: bool = False
    """It has caught up with its feeder, and cannot be faster."""

    def done_at(self, now_ns: int) -> int:
        """Units carried up to `now_ns`, which is not before `settled_ns`."""
        return self.done + self.rate * (now_ns - self.settled_ns)

    def bytes_at(self, now_ns: int) -> int:
        """Whole bytes carried up to `now_ns`."""
        done = self.done_at(now_ns)
        if done + SLACK_UNITS >= self.size:
            return self.size_bytes
        return (done + SLACK_UNITS) // UNITS_PER_BYTE

    def settle(self, now_ns: int) -> None:
        """Move the base of `done` to `now_ns`."""
        if now_ns != self.settled_ns:
            self.done += self.rate * (now_ns - self.settled_ns)
            self.settled_ns = now_ns


class Transfer(msgspec.Struct, eq=False):
    """What a caller started under one id: flows in parallel that end together."""

    flow_id: int
    kind: str
    size_bytes: int
    latency_ns: int
    pair: Pair | None
    tag: Any
    started_ns: int
    last_report_ns: int
    flows: list[Flow] = msgspec.field(default_factory=list)
    open_flows: int = 0
    marks_open: list[int] = msgspec.field(default_factory=list)
    """For each mark, the flows that have not passed it."""
    carried_bytes: int = 0
    """Bytes of the flows that have ended."""
    is_cancelled: bool = False
    lone_links: tuple[Link, ...] = ()
    """Links that it has to itself: it has no flow until another one comes."""
    seq: int = 0
    """Of the flow that it would have."""
    version: int = 0
    """1 once it has a flow after all: its own entry in the event heap is void."""


def rate_units(bytes_per_s: int) -> int:
    """Bytes per second as units per nanosecond, exactly."""
    return bytes_per_s * UNITS_PER_RATE
