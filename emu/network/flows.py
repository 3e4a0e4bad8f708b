"""The flow table: how many bytes each flow moves over which links, and when each one ends.

Owns: every transfer under way in the cluster, the rates of all of them, the bytes moved and lost
per link and kind. Pure: the caller says what time it is, starts and cancels transfers, changes
links, and asks for the next instant at which something happens. One actor owns the table.

Rules
- Flows share links max-min fairly (`fill`). Shares change only when a flow starts, stops or
  ends, or a link or a partition changes, and only among the flows connected to the change. All
  changes of one instant are applied together.
- Time is integer nanoseconds. A flow ends, and frees its links, at the first nanosecond at which
  all its bytes are through: ceil of the exact time (see `links.py` for the arithmetic).
- The latency of a path delays what is *reported* (the end, a passed mark), not the bytes: links
  are free again when the last byte has left, and the report comes `latency_ns` later. Reports of
  a transfer never overtake each other.
- Marks are byte offsets whose passing is reported (the layers of a model).
- A transfer in several parts (ranks in parallel) is reported once: at the last part's end.
- Its sender may have only the first `limit_bytes` ready (layer-wise KV transfer); there progress
  stops, and the links are free, until `extend` raises the limit.
- `after`: a hop of a chain. It forwards what another transfer brings, and stays `lag_bytes` (the
  chunk) behind it until that one has ended. A hop that is slower than the one before it runs at
  its own pace; one that has caught up runs at its feeder's. Alone on equal links of rate B, hop i
  of a chain ends at M/B + (i - 1) * chunk/B.

Does not do: routing (`topology`), deciding what happens to the transfers of a broken link (they
stall; the owner cancels, or waits).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, final

from emu.kernel.natives import heapify, heappop, heappush
from emu.network.links import (
    SLACK_UNITS,
    UNITS_PER_BYTE,
    Flow,
    Link,
    LonePart,
    Pair,
    Transfer,
    rate_units,
)
from emu.network.max_min import component, fill
from emu.units import NS_PER_S, ceil_div

if TYPE_CHECKING:
    from emu.network.audit import Books

END: Final = -1
"""The mark that stands for the end of a transfer."""
_UNLIMITED: Final = 1 << 62

Parts = Sequence[tuple[Sequence[int], int]]
"""Parallel parts of a transfer: the links of each and its bytes."""


@final
class FlowEvent:
    """Something that a transfer reports."""

    at_ns: int
    flow_id: int
    mark: int
    """Index of the mark that has been passed, or `END`."""
    tag: Any
    """Whatever the caller gave at the start."""

    __slots__ = (
        "at_ns",
        "flow_id",
        "mark",
        "tag",
    )

    def __init__(
        self,
        at_ns: int,
        flow_id: int,
        mark: int,
        tag: Any = None,
    ) -> None:
        self.at_ns = at_ns
        self.flow_id = flow_id
        self.mark = mark
        self.tag = tag


@final
class TransferSpec:
    """What a transfer is and how it goes, said once by its owner."""

    kind: str
    latency_ns: int
    pair: Pair | None
    """Between which replicas; what is cut between them stalls."""
    marks: Sequence[int]
    """Offsets into the whole transfer that are reported, ascending."""
    after: int | None
    """It forwards what this transfer brings, part by part."""
    lag_bytes: int
    """How far (per part) behind `after`."""
    weight: int
    """Its share of a link beside others."""
    limit_bytes: int | None
    """What of it the sender has ready at first; None = everything."""
    __slots__ = (
        "after",
        "kind",
        "lag_bytes",
        "latency_ns",
        "limit_bytes",
        "marks",
        "pair",
        "weight",
    )

    def __init__(
        self,
        kind: str = "kv",
        latency_ns: int = 0,
        pair: Pair | None = None,
        marks: Sequence[int] = (),
        after: int | None = None,
        lag_bytes: int = 0,
        weight: int = 1,
        limit_bytes: int | None = None,
    ) -> None:
        self.kind = kind
        self.latency_ns = latency_ns
        self.pair = pair
        self.marks = marks
        self.after = after
        self.lag_bytes = lag_bytes
        self.weight = weight
        self.limit_bytes = limit_bytes


class FlowTable:
    """All transfers of a cluster. Link i has capacity `link_bytes_per_s[i]`."""

    def __init__(self, link_bytes_per_s: Sequence[int]) -> None:
        self._rates = link_bytes_per_s
        self._links: list[Link | None] = [None] * len(link_bytes_per_s)
        """The records of links that were asked for: most of a large cluster carry nothing."""
        self.now_ns = 0
        self.started_bytes: defaultdict[str, int] = defaultdict(int)
        self.carried_bytes: defaultdict[str, int] = defaultdict(int)
        self.lost_bytes: defaultdict[str, int] = defaultdict(int)
        self._transfers: dict[int, Transfer] = {}
        self._seq = 0
        self._events: list[tuple[int, int, int, Flow | Transfer]] = []
        self._events_max = 256
        self._reports: list[tuple[int, int, Transfer, int]] = []
        self._dirty_links: list[Link] = []
        self._dirty_flows: list[Flow] = []
        self._blocked_pairs: dict[Pair, None] = {}
        self._least_latency_ns = 0
        self._has_extra_latency = False
        self._paths: dict[tuple[int, ...], tuple[Link, ...]] = {}

    @property
    def links(self) -> list[Link]:
        """The records of all links, by index."""
        return [self.link(index) for index in range(len(self._links))]

    def link(self, index: int) -> Link:
        """The record of a link."""
        record = self._links[index]
        if record is None:
            rate = self._rates[index]
            record = Link(index=index, bytes_per_s=rate, capacity=rate_units(rate))
            self._links[index] = record
        return record

    # What callers start and stop.

    def start_group(
        self,
        flow_id: int,
        parts: Parts,
        now_ns: int,
        spec: TransferSpec,
        tag: Any = None,
    ) -> None:
        """Start a transfer of parts (links, bytes) that run in parallel and end together.

        Each part passes the marks and the limit at its proportion. With `spec.after`, part i
        forwards part i of that transfer, which must not be smaller; an `after` that has ended
        holds nothing back. A part without links (nothing has to move) is through at once. `tag` is
        given back with each report.
        """
        assert flow_id not in self._transfers, f"transfer {flow_id} is already under way"
        assert parts, "a transfer has at least one part"
        self._run_until(now_ns)
        total = 0
        for _, size_bytes in parts:
            total += size_bytes
        kind, latency_ns = spec.kind, spec.latency_ns
        if not self._transfers or latency_ns < self._least_latency_ns:
            self._least_latency_ns = latency_ns
        transfer = Transfer(flow_id, kind, total, latency_ns, spec.pair, tag, now_ns, now_ns)
        self._transfers[flow_id] = transfer
        self.started_bytes[kind] += total
        is_whole = spec.limit_bytes is None and not spec.marks
        is_plain = spec.weight == 1 and is_whole and spec.after is None
        if is_plain and self._go_alone(transfer, parts):
            return
        transfer.open_flows = len(parts)
        transfer.marks_open = [len(parts)] * len(spec.marks)
        feeders = self._feeders(spec.after, len(parts))
        for index, (path, size_bytes) in enumerate(parts):
            flow = self._new_flow(transfer, path, size_bytes, spec)
            if feeders is not None and not feeders[index].is_closed:
                self._follow(flow, feeders[index], spec.lag_bytes)
            self._launch(flow)

    def _new_flow(
        self,
        transfer: Transfer,
        path: Sequence[int],
        size_bytes: int,
        spec: TransferSpec,
    ) -> Flow:
        """One part of a transfer, whose marks and limit are those of the whole."""
        self._seq += 1
        flow = Flow(self._seq, transfer, self.path(path), size_bytes)
        size, total = flow.size, transfer.size_bytes
        flow.weight = spec.weight
        flow.marks = [size * mark // total if total else 0 for mark in spec.marks]
        if spec.limit_bytes is not None and spec.limit_bytes < total:
            flow.limit = size * spec.limit_bytes // total
        flow.settled_ns = self.now_ns
        flow.is_blocked = transfer.pair in self._blocked_pairs
        transfer.flows.append(flow)
        return flow

    def cancel(self, flow_id: int, now_ns: int) -> int:
        """Stop a transfer for good and give the bytes that were carried; nothing more is reported.

        Transfers that follow it stall for good: their owner cancels them too.
        """
        self._run_until(now_ns)
        transfer = self._transfers.pop(flow_id)
        self._unfold(transfer)
        transfer.is_cancelled = True
        for flow in transfer.flows:
            if flow.is_closed:
                continue
            carried = flow.bytes_at(now_ns)
            lost = flow.size_bytes - carried
            transfer.carried_bytes += carried
            self._count(flow, carried, lost)
            for follower in flow.followers:
                self._orphan(follower)
            self._close(flow)
        transfer.flows.clear()
        return transfer.carried_bytes

    def extend(self, flow_id: int, limit_bytes: int, now_ns: int) -> None:
        """The sender now has the first `limit_bytes` ready. A lower limit is ignored."""
        self._run_until(now_ns)
        transfer = self._transfers[flow_id]
        for flow in transfer.flows:
            if limit_bytes >= transfer.size_bytes:
                limit = flow.size
            else:
                limit = flow.size * limit_bytes // transfer.size_bytes
            if flow.is_closed or limit <= flow.limit:
                continue
            flow.limit = limit
            if flow.is_running:
                self._schedule(flow)
            else:
                self._go(flow)

    # What happens to links.

    def set_rate(self, link: int, bytes_per_s: int, now_ns: int) -> None:
        """Change the capacity of a link; 0 = down: what needs it stalls, in place."""
        self._run_until(now_ns)
        record = self.link(link)
        if record.lone is not None:
            self._unfold(record.lone)
        record.bytes_per_s = bytes_per_s
        record.capacity = rate_units(bytes_per_s)
        self._dirty_links.append(record)

    def set_extra_latency(self, link: int, extra_ns: int, now_ns: int) -> None:
        """Reports of flows over this link come so much later from now on."""
        self._run_until(now_ns)
        self.link(link).extra_latency_ns = extra_ns
        self._has_extra_latency = self._has_extra_latency or extra_ns > 0

    def set_partition(self, pair: Pair, is_cut: bool, now_ns: int) -> None:
        """Cut or restore one ordered pair: transfers started with this `pair` stall meanwhile."""
        self._run_until(now_ns)
        if is_cut:
            self._blocked_pairs[pair] = None
        else:
            self._blocked_pairs.pop(pair, None)
        for transfer in self._transfers.values():
            if transfer.pair != pair:
                continue
            self._unfold(transfer)
            for flow in transfer.flows:
                flow.is_blocked = is_cut
                if is_cut:
                    self._stop(flow)
                else:
                    self._go(flow)

    # Time.

    def next_event_ns(self) -> int | None:
        """When to call `advance` next: nothing is reported before. None = nothing under way."""
        if not self._transfers:
            return None
        if self._dirty_flows or self._dirty_links:
            self._flush()
        events, reports = self._events, self._reports
        while events and events[0][3].version != events[0][2]:
            heappop(events)
        # What ends at that instant is reported a latency later: one call serves both.
        at_ns = events[0][0] + self._least_latency_ns if events else None
        if reports and (at_ns is None or reports[0][0] < at_ns):
            return reports[0][0]
        return at_ns

    def advance(self, now_ns: int) -> list[FlowEvent]:
        """Everything reported up to `now_ns`, in order of time, equal times in order of passing."""
        self._run_until(now_ns)
        events: list[FlowEvent] = []
        reports = self._reports
        while reports and reports[0][0] <= now_ns:
            at_ns, _, transfer, mark = heappop(reports)
            if transfer.is_cancelled:
                continue
            if mark == END:
                del self._transfers[transfer.flow_id]
                transfer.flows.clear()  # each points back: a run collects no cycles
            events.append(FlowEvent(at_ns, transfer.flow_id, mark, transfer.tag))
        return events

    # What callers may see.

    def transfer(self, flow_id: int) -> Transfer | None:
        """A transfer under way, or None."""
        return self._transfers.get(flow_id)

    def __contains__(self, flow_id: int) -> bool:
        """Under way, or ended with its report still to come."""
        return flow_id in self._transfers

    def is_cut(self, pair: Pair) -> bool:
        """Whether this ordered pair is partitioned now."""
        return pair in self._blocked_pairs

    def tags(self) -> list[Any]:
        """What the callers gave with each transfer that is under way, in order of starting."""
        return [transfer.tag for transfer in self._transfers.values()]

    def __len__(self) -> int:
        """Transfers under way or with their report still to come."""
        return len(self._transfers)

    def delivered_bytes(self, flow_id: int, now_ns: int) -> int:
        """Bytes of a transfer that have been carried."""
        self._run_until(now_ns)
        transfer = self._transfers[flow_id]
        self._unfold(transfer)
        return transfer.carried_bytes + sum(
            flow.bytes_at(now_ns) for flow in transfer.flows if not flow.is_closed
        )

    def books(self, now_ns: int) -> list[dict[str, Books]]:
        """For each link, bytes by kind: moved, lost, in flight (not yet through)."""
        from emu.network.audit import books_of  # only checks ask

        self._run_until(now_ns)
        return books_of(self.links, self._open_flows(), now_ns)

    def recount(self) -> None:
        """Check invariant I11 from scratch; raises InvariantViolation."""
        from emu.network.audit import audit  # only checks ask

        self._unfold_all()
        self._flush()
        audit(
            self.now_ns,
            self.links,
            list(self._transfers.values()),
            self.started_bytes,
            self.carried_bytes,
            self.lost_bytes,
        )

    def _feeders(self, after: int | None, parts: int) -> list[Flow] | None:
        """The flows of the hop before, or None when nothing holds a new one back."""
        if after is None or after not in self._transfers:
            return None
        self._unfold(self._transfers[after])
        feeders = self._transfers[after].flows
        assert len(feeders) == parts, "a hop has as many parts as the hop before it"
        return feeders

    # Time between instants: the heap, and the life of a flow.
    #
    # A flow is *running* while it holds a share of its links, which may be nothing when one is
    # down. It is not while it waits for its feeder's first chunk, stands at its limit, is cut off
    # by a partition, has lost its feeder, or is closed. Every change of that goes through `_go`,
    # `_stop`, `_close`; they note what has to be divided anew, `_flush` does it once an instant.
    #
    # A transfer that finds its links free, each for one part of it, is *alone*: its end is known,
    # and as long as no other flow comes it needs none. `_unfold` gives it one for each part as of
    # its start when another flow comes or it is read.

    def path(self, path: Sequence[int]) -> tuple[Link, ...]:
        """The records of some links."""
        key = tuple(path)
        links = self._paths.get(key)
        if links is None:
            links = self._paths[key] = tuple([self.link(index) for index in key])
        return links

    def _run_until(self, until_ns: int) -> None:
        """Let everything happen that is due by then, each thing at its own instant."""
        assert until_ns >= self.now_ns, f"time goes back: {self.now_ns} -> {until_ns}"
        events = self._events
        while True:
            while events and events[0][0] <= until_ns:
                at_ns, _, version, entry = events[0]
                if version != entry.version:
                    heappop(events)
                    continue
                if at_ns > self.now_ns and (self._dirty_flows or self._dirty_links):
                    break
                self.now_ns = at_ns
                heappop(events)
                if isinstance(entry, Flow):
                    self._happen(entry)
                else:
                    self._end_alone(entry)
            if until_ns == self.now_ns or not (self._dirty_flows or self._dirty_links):
                self.now_ns = until_ns
                return
            # Time is about to move on: first the changes of this instant, which may make the
            # entry just seen void, or bring an earlier one.
            self._flush()

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

    # A transfer alone.

    def _go_alone(self, transfer: Transfer, parts: Parts) -> bool:
        """Have the links of all parts to itself. False if a flow is there, or nothing can move."""
        if transfer.pair in self._blocked_pairs:
            return False
        lone: list[LonePart] = []
        end_ns = last = -1
        for path, size_bytes in parts:
            links = self.path(path)
            rate = _UNLIMITED
            for link in links:
                if link.running or link.lone is not None:
                    rate = 0
                    break
                if link.bytes_per_s < rate:
                    rate = link.bytes_per_s
            if not (rate and size_bytes and links):
                for held, _ in lone:
                    for link in held:
                        link.lone = None
                return False
            for link in links:
                link.lone = transfer
            # As of a flow: the slack there is less than one part of the dividend here.
            part_end_ns = self.now_ns + ceil_div(size_bytes * NS_PER_S, rate)
            if part_end_ns >= end_ns:
                end_ns, last = part_end_ns, len(lone)
            lone.append((links, size_bytes))
        transfer.seq = self._seq + 1
        self._seq += len(lone)
        transfer.lone_parts, transfer.lone_last = tuple(lone), last
        heappush(self._events, (end_ns, transfer.seq + last, 0, transfer))
        return True

    def _end_alone(self, transfer: Transfer) -> None:
        """All bytes are through, and no other flow came."""
        lone, kind = transfer.lone_parts, transfer.kind
        transfer.lone_parts = ()
        transfer.carried_bytes = transfer.size_bytes
        self.carried_bytes[kind] += transfer.size_bytes
        for links, size_bytes in lone:
            for link in links:
                link.lone = None
                link.moved_bytes[kind] = link.moved_bytes.get(kind, 0) + size_bytes
        self._report(transfer, lone[transfer.lone_last][0], END)

    def _unfold(self, transfer: Transfer) -> None:
        """Another flow comes or it is read: it has flows, as if it had had them from the start."""
        lone, transfer.lone_parts = transfer.lone_parts, ()
        if not lone:
            return
        transfer.version = 1
        for index, (links, size_bytes) in enumerate(lone):
            flow = Flow(transfer.seq + index, transfer, links, size_bytes)
            flow.settled_ns = transfer.started_ns
            flow.rate = min([link.capacity for link in links])
            transfer.flows.append(flow)
            for link in links:
                link.lone = None
            end_ns = flow.settled_ns + ceil_div(flow.size - SLACK_UNITS, flow.rate)
            if end_ns <= self.now_ns and index != transfer.lone_last:
                flow.done, flow.rate, flow.is_closed = flow.size, 0, True
                transfer.carried_bytes += size_bytes
                self._count(flow, size_bytes, 0)
                continue
            transfer.open_flows += 1
            flow.is_running = True
            for link in links:
                link.running[flow.seq] = flow
            self._schedule(flow)

    def _unfold_all(self) -> None:
        """Every transfer has its flows: all are about to be read."""
        for transfer in self._transfers.values():
            self._unfold(transfer)

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
        self._go(flow)

    def _go(self, flow: Flow) -> None:
        """Take part in the sharing, if nothing stands in the way."""
        if flow.is_running or flow.is_closed or flow.is_blocked or flow.is_orphan:
            return
        if flow.is_waiting or flow.done + SLACK_UNITS >= flow.limit:
            return
        flow.settle(self.now_ns)
        flow.is_running = True
        for link in flow.links:
            if link.lone is not None:
                self._unfold(link.lone)
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
            self._report(transfer, flow.links, END)

    def _orphan(self, follower: Flow) -> None:
        """Its feeder is gone before its end."""
        follower.feeder = None
        follower.is_orphan = True
        follower.version += 1
        self._stop(follower)

    def _count(self, flow: Flow, carried: int, lost: int) -> None:
        """Enter a flow that has ended, or was cancelled, in the books."""
        links, kind = flow.links, flow.transfer.kind
        self.carried_bytes[kind] += carried
        for link in links:
            link.moved_bytes[kind] = link.moved_bytes.get(kind, 0) + carried
        if lost:
            self.lost_bytes[kind] += lost
            for link in links:
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
                self._report(flow.transfer, flow.links, mark)

    def _report(self, transfer: Transfer, links: Iterable[Link], mark: int) -> None:
        at_ns = self.now_ns + transfer.latency_ns
        if self._has_extra_latency:
            at_ns += sum([link.extra_latency_ns for link in links])
        if at_ns < transfer.last_report_ns:
            at_ns = transfer.last_report_ns
        transfer.last_report_ns = at_ns
        self._seq += 1
        heappush(self._reports, (at_ns, self._seq, transfer, mark))

    def _open_flows(self) -> Iterator[Flow]:
        self._unfold_all()
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
