"""The flow table: how many bytes each flow moves over which links, and when each one ends.

Owns: every transfer under way in the cluster, the rates of all of them, the bytes moved and lost
per link and kind. Pure: the caller says what time it is, starts and cancels transfers, changes
links, and asks for the next instant at which something happens. One actor owns the table.

Rules
- Flows share links max-min fairly (`sharing`). Shares change only when a flow starts, stops or
  ends, or a link or a partition changes, and only among the flows connected to the change. All
  changes of one instant are applied together.
- Time is integer nanoseconds. A flow ends, and frees its links, at the first nanosecond at which
  all its bytes are through: ceil of the exact time (see `links` for the arithmetic).
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
stall; the owner asks `transfers_on` and cancels, or waits).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop
from typing import Any, final

from emu.network.audit import Books, audit, books_of
from emu.network.engine import END, FlowEngine
from emu.network.links import UNITS_PER_BYTE, UNITS_PER_RATE, Flow, Pair, Transfer, rate_units

__all__ = ["END", "FlowEvent", "FlowTable"]


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


class FlowTable(FlowEngine):
    """All transfers of a cluster. Link i has capacity `link_bytes_per_s[i]`."""

    # What callers start and stop.

    def start(
        self,
        flow_id: int,
        links: Sequence[int],
        size_bytes: int,
        now_ns: int,
        **options: Any,
    ) -> None:
        """Start a transfer over one path; options as for `start_group`."""
        self.start_group(flow_id, ((links, size_bytes),), now_ns, **options)

    def start_group(
        self,
        flow_id: int,
        parts: Parts,
        now_ns: int,
        *,
        kind: str = "kv",
        weight: int = 1,
        latency_ns: int = 0,
        marks: Sequence[int] = (),
        limit_bytes: int | None = None,
        pair: Pair | None = None,
        after: int | None = None,
        lag_bytes: int = 0,
        tag: Any = None,
    ) -> None:
        """Start a transfer of parts (links, bytes) that run in parallel and end together.

        `marks` (ascending) and `limit_bytes` are offsets into the whole transfer; each part
        passes them at its proportion. With `after`, part i forwards part i of that transfer, which
        must not be smaller, `lag_bytes` (per part) behind it; an `after` that has ended holds
        nothing back. A part without links (nothing has to move) is through at once.
        """
        assert flow_id not in self._transfers, f"transfer {flow_id} is already under way"
        assert parts, "a transfer has at least one part"
        self._run_until(now_ns)
        total = 0
        for _, size_bytes in parts:
            total += size_bytes
        if not self._transfers or latency_ns < self._least_latency_ns:
            self._least_latency_ns = latency_ns
        transfer = Transfer(flow_id, kind, total, latency_ns, pair, tag, now_ns, now_ns)
        self._transfers[flow_id] = transfer
        self.started_bytes[kind] += total
        is_plain = len(parts) == weight == 1 and not marks and after is None and limit_bytes is None
        if is_plain and self._go_alone(transfer, self.path(parts[0][0])):
            return
        transfer.open_flows = len(parts)
        transfer.marks_open = [len(parts)] * len(marks)
        limit_bytes = total if limit_bytes is None else min(limit_bytes, total)
        feeders = self._feeders(after, len(parts))
        for index, (path, size_bytes) in enumerate(parts):
            flow = self._new_flow(transfer, path, size_bytes, weight, marks, limit_bytes)
            if feeders is not None and not feeders[index].is_closed:
                self._follow(flow, feeders[index], lag_bytes)
            self._launch(flow)

    def _new_flow(
        self,
        transfer: Transfer,
        path: Sequence[int],
        size_bytes: int,
        weight: int,
        marks: Sequence[int],
        limit_bytes: int,
    ) -> Flow:
        """One part of a transfer, which has `marks` and `limit_bytes` as a whole."""
        self._seq += 1
        size, total = size_bytes * UNITS_PER_BYTE, transfer.size_bytes
        flow = Flow(
            seq=self._seq,
            transfer=transfer,
            links=self.path(path),
            size_bytes=size_bytes,
            size=size,
            weight=weight,
            marks=[size * mark // total if total else 0 for mark in marks],
            limit=size if limit_bytes == total else size * limit_bytes // total,
            settled_ns=self.now_ns,
            is_blocked=transfer.pair in self._blocked_pairs,
        )
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
        record = self.links[link]
        if record.lone is not None:
            self._unfold(record.lone)
        record.bytes_per_s = bytes_per_s
        record.capacity = rate_units(bytes_per_s)
        self._dirty_links.append(record)

    def set_extra_latency(self, link: int, extra_ns: int, now_ns: int) -> None:
        """Reports of flows over this link come so much later from now on."""
        self._run_until(now_ns)
        self.links[link].extra_latency_ns = extra_ns
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

    def rate_of(self, flow_id: int) -> float:
        """Present rate of a transfer, all parts, in bytes per second."""
        self._unfold(self._transfers[flow_id])
        self._flush()
        return sum(flow.rate for flow in self._transfers[flow_id].flows) / UNITS_PER_RATE

    def delivered_bytes(self, flow_id: int, now_ns: int) -> int:
        """Bytes of a transfer that have been carried."""
        self._run_until(now_ns)
        transfer = self._transfers[flow_id]
        self._unfold(transfer)
        return transfer.carried_bytes + sum(
            flow.bytes_at(now_ns) for flow in transfer.flows if not flow.is_closed
        )

    def transfers_on(self, link: int) -> list[int]:
        """Ids of the transfers that still have bytes to move over a link, in order of starting."""
        self._unfold_all()
        return [
            transfer.flow_id
            for transfer in self._transfers.values()
            if any(
                not flow.is_closed and any(used.index == link for used in flow.links)
                for flow in transfer.flows
            )
        ]

    def running_flows(self) -> int:
        """Flows that move at this instant."""
        self._flush()
        return sum(flow.rate > 0 for flow in self._open_flows())

    def utilisation(self, link: int) -> float:
        """Part of a link's present capacity in use; 0 for a link that is down."""
        self._unfold_all()
        self._flush()
        record = self.links[link]
        used = sum(flow.rate for flow in record.running.values())
        return used / record.capacity if record.capacity else 0.0

    def books(self, now_ns: int) -> list[dict[str, Books]]:
        """For each link, bytes by kind: moved, lost, in flight (not yet through)."""
        self._run_until(now_ns)
        return books_of(self.links, self._open_flows(), now_ns)

    def recount(self) -> None:
        """Check invariant I11 from scratch; raises InvariantViolation."""
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
