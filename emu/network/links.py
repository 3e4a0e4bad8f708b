"""The records of the flow model: links, the flows on them, and the transfers that flows belong to.

Owns: the arithmetic scale, and how far a flow has come at a given instant. `max_min.py` divides
links among flows, `flows.py` moves time on.

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
from typing import Any, Final, final

from emu.units import NS_PER_S

UNITS_PER_RATE: Final = math.lcm(*range(1, 33)) << 64
"""Units per nanosecond that make one byte per second."""
UNITS_PER_BYTE: Final = NS_PER_S * UNITS_PER_RATE
SLACK_UNITS: Final = UNITS_PER_BYTE >> 64
"""A reach this close is a reach."""

Pair = tuple[int, int]
"""(source, destination) in the caller's numbering, for partitions between two parties."""


@final
class Link:
    """One direction of one link."""

    index: int
    bytes_per_s: int
    capacity: int
    """Units per nanosecond."""
    extra_latency_ns: int
    running: dict[int, Flow]
    """Flows that use it now, by sequence number (insertion order = order of starting)."""
    lone: Transfer | None
    """The transfer that has it to itself, without flows: nothing is `running` then."""
    moved_bytes: dict[str, int]
    """Bytes of ended flows that passed, by kind."""
    lost_bytes: dict[str, int]
    """Bytes of cancelled flows that did not pass, by kind."""
    fill_left: int
    """Units of rate that `sharing.fill` has not dealt out yet."""
    fill_weight: int
    """Scratch of `sharing.fill`."""

    __slots__ = (
        "bytes_per_s",
        "capacity",
        "extra_latency_ns",
        "fill_left",
        "fill_weight",
        "index",
        "lone",
        "lost_bytes",
        "moved_bytes",
        "running",
    )

    def __init__(
        self,
        *,
        index: int,
        bytes_per_s: int,
        capacity: int,
    ) -> None:
        self.index = index
        self.bytes_per_s = bytes_per_s
        self.capacity = capacity
        self.extra_latency_ns = 0
        self.running = {}
        self.lone = None
        self.moved_bytes = {}
        self.lost_bytes = {}
        self.fill_left = 0
        self.fill_weight = 0


@final
class Flow:
    """A stream of bytes over a fixed set of links: one part of a transfer."""

    seq: int
    """Number of its start; flows are told in this order."""
    transfer: Transfer
    links: tuple[Link, ...]
    size_bytes: int
    size: int
    """Of all its bytes, in units."""
    weight: int
    marks: list[int]
    """Offsets to report, ascending, in units."""
    limit: int
    """Units that the sender has ready; progress stops here until it is raised."""
    marks_passed: int
    done: int
    """Units carried up to `settled_ns`."""
    rate: int
    """Units per nanosecond since `settled_ns`."""
    settled_ns: int
    next_rate: int
    """Scratch of `sharing.fill`; negative = not decided yet."""
    version: int
    """Counts reschedulings; older entries of the event heap are void."""
    is_running: bool
    """True: it holds a share of its links (which may be nothing, when one is down)."""
    is_closed: bool
    is_blocked: bool
    """A partition cuts this pair off."""
    is_orphan: bool
    """Its feeder was cancelled: nothing more will come."""
    feeder: Flow | None
    """It forwards what this flow brings, `lag` behind; None once that one has ended."""
    followers: list[Flow]
    lag: int
    is_waiting: bool
    """The feeder has not brought the first chunk yet."""
    is_attached: bool
    """It has caught up with its feeder, and cannot be faster."""

    __slots__ = (
        "done",
        "feeder",
        "followers",
        "is_attached",
        "is_blocked",
        "is_closed",
        "is_orphan",
        "is_running",
        "is_waiting",
        "lag",
        "limit",
        "links",
        "marks",
        "marks_passed",
        "next_rate",
        "rate",
        "seq",
        "settled_ns",
        "size",
        "size_bytes",
        "transfer",
        "version",
        "weight",
    )

    def __init__(
        self, seq: int, transfer: Transfer, links: tuple[Link, ...], size_bytes: int
    ) -> None:
        """It stands still at its start, with everything ready to be sent."""
        self.seq = seq
        self.transfer = transfer
        self.links = links
        self.size_bytes = size_bytes
        self.size = size_bytes * UNITS_PER_BYTE
        self.weight = 1
        self.marks = []
        self.limit = self.size
        self.marks_passed = 0
        self.done = 0
        self.rate = 0
        self.settled_ns = 0
        self.next_rate = 0
        self.version = 0
        self.is_running = False
        self.is_closed = False
        self.is_blocked = False
        self.is_orphan = False
        self.feeder = None
        self.followers = []
        self.lag = 0
        self.is_waiting = False
        self.is_attached = False

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


@final
class Transfer:
    """What a caller started under one id: flows in parallel that end together."""

    flow_id: int
    kind: str
    size_bytes: int
    latency_ns: int
    pair: Pair | None
    tag: Any
    started_ns: int
    last_report_ns: int
    flows: list[Flow]
    open_flows: int
    marks_open: list[int]
    """For each mark, the flows that have not passed it."""
    carried_bytes: int
    """Bytes of the flows that have ended."""
    is_cancelled: bool
    lone_parts: tuple[LonePart, ...]
    """Its parts, if it has all their links to itself: it has no flows until another one comes."""
    lone_last: int
    """Of these the one that ends last."""
    seq: int
    """Of the first flow that it would have."""
    version: int
    """1 once it has flows after all: its own entry in the event heap is void."""

    __slots__ = (
        "carried_bytes",
        "flow_id",
        "flows",
        "is_cancelled",
        "kind",
        "last_report_ns",
        "latency_ns",
        "lone_last",
        "lone_parts",
        "marks_open",
        "open_flows",
        "pair",
        "seq",
        "size_bytes",
        "started_ns",
        "tag",
        "version",
    )

    def __init__(
        self,
        flow_id: int,
        kind: str,
        size_bytes: int,
        latency_ns: int,
        pair: Pair | None,
        tag: Any,
        started_ns: int,
        last_report_ns: int,
    ) -> None:
        self.flow_id = flow_id
        self.kind = kind
        self.size_bytes = size_bytes
        self.latency_ns = latency_ns
        self.pair = pair
        self.tag = tag
        self.started_ns = started_ns
        self.last_report_ns = last_report_ns
        self.flows = []
        self.open_flows = 0
        self.marks_open = []
        self.carried_bytes = 0
        self.is_cancelled = False
        self.lone_parts = ()
        self.lone_last = 0
        self.seq = 0
        self.version = 0


LonePart = tuple[tuple[Link, ...], int]
"""Links of a part of a transfer that has them to itself, and its bytes."""


def rate_units(bytes_per_s: int) -> int:
    """Bytes per second as units per nanosecond, exactly."""
    return bytes_per_s * UNITS_PER_RATE
