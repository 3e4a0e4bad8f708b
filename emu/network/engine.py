"""Time in the flow model: the heap of instants, and the life of a flow between them.

Owns: when the next flow begins, passes a mark, catches up with its feeder, reaches its limit or
ends; and that the shares are divided anew after every instant at which something changed. The
rules that a caller needs are in `flows`, which puts its interface on top of this class.

A flow is *running* while it holds a share of its links, which may be nothing when one is down.
It is not while it waits for its feeder's first chunk, stands at its limit, is cut off by a
partition, has lost its feeder, or is closed. Every change of that goes through `_go`, `_stop`,
`_close`; they note what has to be divided anew, `_flush` does it once an instant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from emu.network.links import SLACK_UNITS, UNITS_PER_BYTE, Flow, Link, Pair, Transfer, rate_units
from emu.network.sharing import component, fill
from emu.units import ceil_div

END: Final = -1
"""The mark that stands for the end of a transfer."""


class FlowEngine:
    """All flows of a cluster. Link i has capacity `link_bytes_per_s[i]`, at time 0."""

    def __init__(self, link_bytes_per_s: Sequence[int]) -> None:
        self.links = [
            Link(index=index, bytes_per_s=rate, capacity=rate_units(rate))
            for index, rate in enumerate(link_bytes_per_s)
        ]
        self.now_ns = 0
        self.started_bytes: dict[str, int] = {}
        self.carried_bytes: dict[str, int] = {}
        self.lost_bytes: dict[str, int] = {}
        self._transfers: dict[int, Transfer] = {}
        self._seq = 0
        self._events: list[tuple[int, int, int, Flow]] = []
        self._events_max = 256
        self._reports: list[tuple[int, int, Transfer, int]] = []
        self._dirty_links: list[Link] = []
        self._dirty_flows: list[Flow] = []
        self._blocked_pairs: dict[Pair, None] = {}
        self._least_latency_ns = 0
        self._has_extra_latency = False

    def _run_until(self, until_ns: int) -> None:
        """Let everything happen that is due by then, each thing at its own instant."""
        assert until_ns >= self.now_ns, f"time goes back: {self.now_ns} -> {until_ns}"
        while True:
            at_ns = self._peek()
            is_due = at_ns is not None and at_ns <= until_ns
            if (self._dirty_flows or self._dirty_links) and (
                at_ns != self.now_ns if is_due else until_ns > self.now_ns
            ):
                # Time is about to move on: first the changes of this instant, which may make
                # the entry just seen void, or bring an earlier one.
                self._flush()
                continue
            if at_ns is None or not is_due:
                break
            self.now_ns = at_ns
            self._happen(heappop(self._events)[3])
        self.now_ns = until_ns

    def _happen(self, flow: Flow) -> None:
        """The instant that was scheduled for a flow has come."""
        flow.version += 1
        if flow.is_waiting:
            flow.is_waiting = False
            self._go(flow)
            return
        flow.settle(self.now_ns)
        if flow.marks:
            self._pass_marks(flow)
        if flow.done + SLACK_UNITS >= flow.limit:
            if flow.limit == flow.size:
                self._end(flow)
            else:
                self._stop(flow)
        elif _catches_up(flow, flow.rate, self.now_ns):
            self._dirty_flows.append(flow)
        else:
            self._schedule(flow)

    def _flush(self) -> None:
        """Divide anew what the changes of this instant touch."""
        touched = self._dirty_flows
        if not touched and not self._dirty_links:
            return
        flows, links = component(self._dirty_links, touched)
        self._dirty_links = []
        self._dirty_flows = []
        fill(flows, links)
        chained = [flow for flow in flows if flow.feeder is not None]
        while chained and self._attach_those_that_catch_up(chained):
            fill(flows, links)
        stale = {flow.seq for flow in touched}
        for flow in flows:
            if flow.next_rate != flow.rate:
                flow.settle(self.now_ns)
                flow.rate = flow.next_rate
                stale.add(flow.seq)
        for flow in flows:
            feeder = flow.feeder
            if feeder is not None:
                if flow.is_attached and flow.rate < feeder.rate:
                    flow.is_attached = False
                self._schedule(flow)
            elif flow.seq in stale:
                self._schedule(flow)

    def _attach_those_that_catch_up(self, chained: list[Flow]) -> bool:
        found = False
        for flow in chained:
            if flow.is_running and _catches_up(flow, flow.next_rate, self.now_ns, is_next=True):
                flow.is_attached = found = True
        return found

    def _schedule(self, flow: Flow) -> None:
        """Note when something happens next to a flow, at its present rate."""
        flow.version += 1
        now_ns = at_ns = self.now_ns
        feeder = flow.feeder
        if flow.is_waiting and feeder is not None:
            need = min(flow.lag, feeder.size) - feeder.done_at(now_ns) - SLACK_UNITS
            if need > 0:
                if not feeder.rate:
                    return
                at_ns = now_ns + ceil_div(need, feeder.rate)
        elif flow.rate:
            target = flow.limit
            if flow.marks_passed < len(flow.marks):
                target = min(target, flow.marks[flow.marks_passed])
            at_ns = flow.settled_ns + ceil_div(target - flow.done - SLACK_UNITS, flow.rate)
            if at_ns < now_ns:
                at_ns = now_ns
            if feeder is not None and not flow.is_attached and flow.rate > feeder.rate:
                # Floor: a hop must not get ahead of what its feeder has brought.
                gap = _gap(flow, feeder, now_ns)
                at_ns = min(at_ns, now_ns + max(0, gap // (flow.rate - feeder.rate)))
        else:
            return
        heappush(self._events, (at_ns, flow.seq, flow.version, flow))
        if len(self._events) > self._events_max:
            self._drop_void_events()

    def _drop_void_events(self) -> None:
        # In place: `_run_until` holds the list.
        self._events[:] = [entry for entry in self._events if entry[3].version == entry[2]]
        heapify(self._events)
        self._events_max = 256 + 2 * len(self._events)

    def _peek(self) -> int | None:
        """The next instant at which something happens to a flow."""
        events = self._events
        while events and events[0][3].version != events[0][2]:
            heappop(events)
        return events[0][0] if events else None

    # Life of a flow.

    def _launch(self, flow: Flow) -> None:
        """A new flow takes its first step."""
        if not flow.size or not flow.links:
            flow.done = flow.size
            self._pass_marks(flow)
            self._end(flow)
            return
        if flow.marks:
            self._pass_marks(flow)
        if flow.is_waiting:
            self._dirty_flows.append(flow)
            return
        if flow.is_blocked or not flow.limit:
            return
        for link in flow.links:
            if link.running:
                self._go(flow)
                return
        # Nobody is on any of its links: no need to look further.
        flow.is_running = True
        rate = flow.links[0].capacity
        for link in flow.links:
            assert flow.seq not in link.running, "a path uses a link once"
            link.running[flow.seq] = flow
            if link.capacity < rate:
                rate = link.capacity
        flow.rate = rate
        self._schedule(flow)

    def _go(self, flow: Flow) -> None:
        """Take part in the sharing, if nothing stands in the way."""
        if flow.is_running or flow.is_closed or flow.is_blocked or flow.is_orphan:
            return
        if flow.is_waiting or flow.done + SLACK_UNITS >= flow.limit:
            return
        flow.settle(self.now_ns)
        flow.is_running = True
        for link in flow.links:
            assert flow.seq not in link.running, "a path uses a link once"
            link.running[flow.seq] = flow
        self._dirty_flows.append(flow)

    def _stop(self, flow: Flow) -> None:
        """Leave the links; progress stays."""
        if not flow.is_running:
            return
        flow.version += 1
        flow.settle(self.now_ns)
        flow.rate = 0
        flow.is_running = False
        flow.is_attached = False
        for link in flow.links:
            del link.running[flow.seq]
            if link.running:
                self._dirty_links.append(link)
        if flow.followers:
            self._dirty_flows.append(flow)

    def _close(self, flow: Flow) -> None:
        """Nothing more happens to this flow."""
        self._stop(flow)
        flow.version += 1
        flow.is_closed = True
        flow.is_waiting = False
        if flow.feeder is not None:
            flow.feeder.followers.remove(flow)
            flow.feeder = None
        flow.followers = []

    def _end(self, flow: Flow) -> None:
        """All bytes are through."""
        transfer = flow.transfer
        followers = flow.followers
        self._close(flow)
        flow.done = flow.size
        transfer.carried_bytes += flow.size_bytes
        self._count(flow, flow.size_bytes, 0)
        for follower in followers:
            follower.feeder = None
            follower.is_waiting = False
            follower.is_attached = False
            if follower.is_running:
                self._dirty_flows.append(follower)
            else:
                self._go(follower)
        transfer.open_flows -= 1
        if not transfer.open_flows:
            self._report(flow, END)

    def _orphan(self, follower: Flow) -> None:
        """Its feeder is gone before its end."""
        follower.feeder = None
        follower.is_orphan = True
        follower.version += 1
        self._stop(follower)

    def _count(self, flow: Flow, carried: int, lost: int) -> None:
        """Enter a flow that has ended, or was cancelled, in the books."""
        kind = flow.transfer.kind
        self.carried_bytes[kind] = self.carried_bytes.get(kind, 0) + carried
        if lost:
            self.lost_bytes[kind] = self.lost_bytes.get(kind, 0) + lost
        for link in flow.links:
            link.moved_bytes[kind] = link.moved_bytes.get(kind, 0) + carried
            if lost:
                link.lost_bytes[kind] = link.lost_bytes.get(kind, 0) + lost

    def _pass_marks(self, flow: Flow) -> None:
        marks = flow.marks
        while flow.marks_passed < len(marks):
            mark = flow.marks_passed
            if flow.done + SLACK_UNITS < marks[mark]:
                return
            flow.marks_passed += 1
            marks_open = flow.transfer.marks_open
            marks_open[mark] -= 1
            if not marks_open[mark]:
                self._report(flow, mark)

    def _report(self, flow: Flow, mark: int) -> None:
        transfer = flow.transfer
        at_ns = self.now_ns + transfer.latency_ns
        if self._has_extra_latency:
            at_ns += sum([link.extra_latency_ns for link in flow.links])
        at_ns = max(at_ns, transfer.last_report_ns)
        transfer.last_report_ns = at_ns
        self._seq += 1
        heappush(self._reports, (at_ns, self._seq, transfer, mark))

    def _open_flows(self) -> Iterator[Flow]:
        for transfer in self._transfers.values():
            for flow in transfer.flows:
                if not flow.is_closed:
                    yield flow

    def _follow(self, flow: Flow, feeder: Flow, lag_bytes: int) -> None:
        """Make a new flow forward what `feeder` brings."""
        assert feeder.weight == flow.weight, "hops of a chain have equal weights"
        assert feeder.size >= flow.size, "a hop cannot forward more than it receives"
        flow.feeder = feeder
        flow.lag = lag_bytes * UNITS_PER_BYTE
        flow.is_waiting = True
        feeder.followers.append(flow)


def _gap(flow: Flow, feeder: Flow, now_ns: int) -> int:
    """Units that a hop may still forward before it has caught up with its feeder."""
    return feeder.done_at(now_ns) - flow.done_at(now_ns) - flow.lag


def _catches_up(flow: Flow, rate: int, now_ns: int, is_next: bool = False) -> bool:
    """At this rate it would overtake its feeder within a nanosecond."""
    feeder = flow.feeder
    if feeder is None or flow.is_attached:
        return False
    ahead = rate - (feeder.next_rate if is_next else feeder.rate)
    return ahead > 0 and _gap(flow, feeder, now_ns) < ahead
