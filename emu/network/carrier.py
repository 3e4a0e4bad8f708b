"""The network's shell: starts transfers in the flow table and calls back when they report.

Owns the one flow table of a run and the timer for its next event. Passive: it needs no task of
its own, because everything it does happens at an instant that the table knows beforehand.

Faults. `fate` decides, when a transfer starts, what befalls it (only while some fault says so); a
transfer that makes no progress for `timeout_ns` while links are cut is given up. Both end in
`on_failed`, never in silence; a transfer whose owner gave no `on_failed` is left alone. Whatever
happens, an owner hears of a transfer's end once, unless the fault is that it hears twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol, final

from emu.kernel.clock import Kernel
from emu.kernel.priorities import PRIORITY_NETWORK
from emu.network.fates import Fate
from emu.network.flows import END, FlowTable, Parts, TransferSpec
from emu.network.grids import Grid, shard_shares
from emu.network.topology import LinkPath, Topology
from emu.units import NS_PER_S, cut_by


class TransferSink(Protocol):
    """What keeps the history of all transfers."""

    def add(self, at_ns: int, event: str, **what: Any) -> None:
        """Something happened now."""
        ...

    def transfer(
        self,
        carried: Carried,
        at_ns: int,
        topology: Topology,
        parts: Parts,
        spec: TransferSpec,
    ) -> None:
        """Bytes set out, in parallel parts (links, bytes)."""
        ...

    def transfer_over(self, carried: Carried, at_ns: int, how: str, moved_bytes: int) -> None:
        """A transfer has ended; `how`: `arrived`, `stopped`, or why it failed."""
        ...


@final
class Carried:
    """One transfer under way (the tag of its flow)."""

    flow_id: int
    carrier: Carrier
    kind: str
    size_bytes: int
    on_done: Callable[[], None]
    on_mark: Callable[[int], None] | None
    on_failed: Callable[[str], None] | None
    fate: Fate | None
    is_over: bool
    """Nothing is reported any more."""
    pair: tuple[int, int] | None
    """Replicas that it is between; -1 as the source: a copy in the machine's memory or on disk."""
    overlapped_bytes: int
    """What had left while the sender computed."""
    progress: tuple[int, int]
    """Bytes delivered when last looked at, and since when (only while links are cut)."""

    __slots__ = (
        "carrier",
        "fate",
        "flow_id",
        "is_over",
        "kind",
        "on_done",
        "on_failed",
        "on_mark",
        "overlapped_bytes",
        "pair",
        "progress",
        "size_bytes",
    )

    def __init__(
        self,
        flow_id: int,
        carrier: Carrier,
        kind: str,
        size_bytes: int,
        on_done: Callable[[], None],
        on_mark: Callable[[int], None] | None,
        on_failed: Callable[[str], None] | None = None,
    ) -> None:
        self.flow_id = flow_id
        self.carrier = carrier
        self.kind = kind
        self.size_bytes = size_bytes
        self.on_done = on_done
        self.on_mark = on_mark
        self.on_failed = on_failed
        self.fate = None
        self.is_over = False
        self.pair = None
        self.overlapped_bytes = 0
        self.progress = (-1, 0)

    def cancel(self) -> None:
        """Stop it; neither `on_done` nor `on_failed` will be called."""
        self.is_over = True
        self.carrier.cancel(self.flow_id)


@final
class Arrived:
    """Transfers of one kind that have arrived at a replica from another."""

    transfers: int
    size_bytes: int

    __slots__ = (
        "size_bytes",
        "transfers",
    )

    def __init__(self) -> None:
        self.transfers = 0
        self.size_bytes = 0


@final
class Lane:
    """The way from one replica's GPUs to another's."""

    bytes_per_s: int
    """Of so many links as there are GPUs on the smaller side."""
    latency_ns: int
    """The longest of all pairs of GPUs."""
    paths: list[LinkPath]
    """Of each pair of GPUs that talk; the first of the one with the first of the other leads."""
    shares: list[int]
    """What each pair carries (see `cut_by`)."""

    __slots__ = (
        "bytes_per_s",
        "latency_ns",
        "paths",
        "shares",
    )

    def __init__(
        self,
        bytes_per_s: int,
        latency_ns: int,
        paths: list[LinkPath],
        shares: list[int],
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_ns = latency_ns
        self.paths = paths
        self.shares = shares


class Carrier:
    """Transfers over the links of a topology."""

    def __init__(self, kernel: Kernel, topology: Topology) -> None:
        self.kernel = kernel
        self.topology = topology
        self._rates = topology.link_rates
        self.table = FlowTable(self._rates)
        self.moved_bytes: defaultdict[str, int] = defaultdict(int)
        """Bytes of ended transfers by kind, overlapped parts included."""
        self.arrived: dict[tuple[int, int, str], Arrived] = {}
        """What has arrived, by source replica, destination replica and kind."""
        self.active: defaultdict[str, int] = defaultdict(int)
        """Transfers under way by kind."""
        self._lanes: dict[tuple[Grid, Grid], Lane] = {}
        self.fate: Callable[[str, tuple[int, int] | None], Fate | None] | None = None
        """Asked at the start of each transfer that can fail; None = nothing can happen."""
        self.timeout_ns = 5_000_000_000
        self.cuts = 0
        """Faults in force that may stop transfers altogether."""
        self.failures: defaultdict[str, int] = defaultdict(int)
        """Transfers that failed, by reason."""
        self._history: TransferSink | None = None
        self._is_watching = False
        self._next_id = 0
        self._armed_ns = -1

    def send(
        self,
        source: Grid,
        destination: Grid,
        size_bytes: int,
        *,
        kind: str,
        on_done: Callable[[], None],
        overlapped_ns: int = 0,
        pieces: int = 1,
        pair: tuple[int, int] | None = None,
        on_failed: Callable[[str], None] | None = None,
        setup_ns: int = 0,
    ) -> Carried:
        """Move a replica's data to another, GPU by GPU in parallel (see `Network.send`).

        Layer-wise overlap: while the sender computed for `overlapped_ns`, the pieces that were
        ready could leave at the path's full rate; at least the last piece is still to move.
        """
        lane = self._lanes.get((source, destination)) or self._new_lane(source, destination)
        left_bytes = size_bytes
        hidden = 0
        if overlapped_ns and pieces > 1:
            rate = lane.bytes_per_s
            if self.cuts and pair is not None and self.table.is_cut(pair):
                rate = 0
            ready_ns = overlapped_ns * (pieces - 1) // pieces
            hidden = rate * ready_ns // NS_PER_S
            last_bytes = size_bytes // pieces
            if hidden > size_bytes - last_bytes:
                hidden = size_bytes - last_bytes
            left_bytes -= hidden
            self.moved_bytes[kind] += hidden
        parts: Parts = ((lane.paths[0], left_bytes),)
        if len(lane.paths) > 1:
            parts = list(zip(lane.paths, cut_by(lane.shares, left_bytes), strict=True))
        spec = TransferSpec(kind, lane.latency_ns + setup_ns, pair)
        return self.carry(parts, spec, on_done, on_failed=on_failed, overlapped_bytes=hidden)

    def _new_lane(self, source: Grid, destination: Grid) -> Lane:
        """Look up the way from one replica to another; it holds until links change."""
        topology = self.topology
        pieces = shard_shares(source, destination)
        paths = [topology.path(src_gpu, dst_gpu) for src_gpu, dst_gpu, _ in pieces]
        rate = min([link.bytes_per_s for link in self.table.path(paths[0])], default=0)
        lane = self._lanes[source, destination] = Lane(
            rate * min(len(source.gpus), len(destination.gpus)),
            max([topology.latency_ns(path) for path in paths]),
            paths,
            [share for _, _, share in pieces],
        )
        return lane

    def carry(
        self,
        parts: Parts,
        spec: TransferSpec,
        on_done: Callable[[], None],
        *,
        on_mark: Callable[[int], None] | None = None,
        on_failed: Callable[[str], None] | None = None,
        overlapped_bytes: int = 0,
    ) -> Carried:
        """Start a transfer of parallel parts (links, bytes). A fate may add a mark to `spec`."""
        kind, pair = spec.kind, spec.pair
        self._next_id += 1
        size_bytes = 0
        for _, part_bytes in parts:
            size_bytes += part_bytes
        carried = Carried(self._next_id, self, kind, size_bytes, on_done, on_mark, on_failed)
        carried.pair = pair
        carried.overlapped_bytes = overlapped_bytes
        if self._history is not None:
            self._history.transfer(carried, self.kernel.now_ns, self.topology, parts, spec)
        if self.fate is not None and (on_failed is not None or kind == "weights"):
            fate = carried.fate = self.fate(kind, pair)
            if fate is not None and self._is_doomed(carried, fate):
                if self._history is not None:
                    self._history.transfer_over(carried, self.kernel.now_ns, "never_began", 0)
                return carried
            if fate is not None and fate.kind == "broken" and not spec.marks:
                spec.marks = (min(size_bytes, max(1, int(size_bytes * fate.part))),)
        self.table.start_group(carried.flow_id, parts, self.kernel.now_ns, spec, carried)
        self.active[kind] += 1
        self.rearm()
        if self.cuts:
            self.watch()
        return carried

    def _is_doomed(self, carried: Carried, fate: Fate) -> bool:
        """The transfer never begins: its owner hears of it at once, or after the timeout."""
        now_ns = self.kernel.now_ns
        if fate.kind == "refused":
            self.kernel.call_at(now_ns, PRIORITY_NETWORK, lambda: self.fail(carried, "refused"))
        elif fate.kind == "silent":
            self.kernel.call_at(
                now_ns + self.timeout_ns,
                PRIORITY_NETWORK,
                lambda: self.fail(carried, "handshake_timeout"),
            )
        else:
            return False
        return True

    def fail(self, carried: Carried, reason: str, *, is_through: bool = False) -> None:
        """A transfer ends without having brought its data; nothing if it is over already.

        `is_through`: its last byte has passed, and its end is not in the books yet.
        """
        if carried.is_over:
            return
        carried.is_over = True
        if is_through:
            moved_bytes = carried.size_bytes
            self.moved_bytes[carried.kind] += moved_bytes
            self.active[carried.kind] -= 1
        else:
            moved_bytes = self._stop(carried.flow_id)
        if self._history is not None:
            self._history.transfer_over(carried, self.kernel.now_ns, reason, moved_bytes)
        self.failures[reason] += 1
        assert carried.on_failed is not None
        carried.on_failed(reason)

    def links_changed(self, cuts: int = 0) -> None:
        """Rates, latencies or partitions have changed in the table; `cuts` more faults may stop."""
        self.cuts += cuts
        self._lanes.clear()
        self.rearm()
        if self.cuts:
            self.watch()

    def watch(self) -> None:
        """Look for transfers without progress, now and until there is nothing to look for."""
        if self._is_watching or not len(self.table):
            return
        self._is_watching = True
        self._look()

    def _look(self) -> None:
        """Give up what has stood still for the timeout; look again while something may."""
        now_ns = self.kernel.now_ns
        for carried in self.table.tags():
            if carried.on_failed is None or carried.is_over:
                continue
            delivered = self.table.delivered_bytes(carried.flow_id, now_ns)
            if delivered == carried.size_bytes:
                continue
            if delivered != carried.progress[0]:
                carried.progress = (delivered, now_ns)
            if now_ns - carried.progress[1] >= self.timeout_ns:
                self.fail(carried, "transfer_timeout")
        # What failed may have been started again meanwhile: look at the table anew.
        self._is_watching = bool(self.cuts) and any(
            carried.on_failed is not None and not carried.is_over for carried in self.table.tags()
        )
        if self._is_watching:
            later_ns = max(1, self.timeout_ns // 4)
            self.kernel.call_at(now_ns + later_ns, PRIORITY_NETWORK, self._look)

    def _end(self, carried: Carried) -> None:
        """The last byte is there: the owner hears of it, as the transfer's fate will have it."""
        now_ns, fate = self.kernel.now_ns, carried.fate
        if fate is None or fate.kind == "broken":
            carried.is_over = True
            carried.on_done()
        elif fate.kind == "hang":
            self.kernel.call_at(
                now_ns + self.timeout_ns,
                PRIORITY_NETWORK,
                lambda: self.fail(carried, "transfer_timeout"),
            )
        elif fate.kind == "stuck":
            return  # never: each waiting transfer has a deadline of its own
        elif fate.kind == "late":
            self.kernel.call_at(
                now_ns + fate.delay_ns, PRIORITY_NETWORK, lambda: self._end_late(carried)
            )
        else:
            carried.is_over = True
            carried.on_done()
            for copy in range(fate.copies):
                again_ns = now_ns + fate.delay_ns * (copy + 1)
                self.kernel.call_at(again_ns, PRIORITY_NETWORK, carried.on_done)

    def _end_late(self, carried: Carried) -> None:
        if not carried.is_over:
            carried.is_over = True
            carried.on_done()

    def set_timeout(self, timeout_ns: int) -> None:
        """A transfer without progress for so long fails."""
        self.timeout_ns = timeout_ns

    def tell_history(self, history: TransferSink) -> None:
        """Every transfer from now on, and every change of a link, is written down there."""
        self._history = history

    def set_rate(self, link: int, bytes_per_s: int) -> None:
        """A link carries so much from now on (0: nothing)."""
        self.table.set_rate(link, bytes_per_s, self.kernel.now_ns)
        if self._history is not None:
            name = self.topology.links[link].name
            self._history.add(self.kernel.now_ns, "link", link=name, bytes_per_s=bytes_per_s)

    def set_extra_latency(self, link: int, extra_ns: int) -> None:
        """Reports over a link come so much later from now on."""
        self.table.set_extra_latency(link, extra_ns, self.kernel.now_ns)
        if self._history is not None:
            name = self.topology.links[link].name
            self._history.add(self.kernel.now_ns, "link", link=name, extra_ns=extra_ns)

    def set_partition(self, pair: tuple[int, int], is_cut: bool) -> None:
        """Nothing gets from one replica to another from now on, or it does again."""
        self.table.set_partition(pair, is_cut, self.kernel.now_ns)
        if self._history is not None:
            self._history.add(self.kernel.now_ns, "partition", pair=list(pair), is_cut=is_cut)

    def ask_fate(self, fate: Callable[[str, tuple[int, int] | None], Fate | None] | None) -> None:
        """Ask `fate` at the start of each transfer from now on (None: nothing can happen)."""
        self.fate = fate

    def cancel(self, flow_id: int) -> None:
        """Stop a transfer; nothing is reported any more."""
        transfer = self.table.transfer(flow_id)
        if transfer is None:
            return
        moved_bytes = self._stop(flow_id)
        if self._history is not None:
            carried: Carried = transfer.tag
            self._history.transfer_over(carried, self.kernel.now_ns, "stopped", moved_bytes)

    def _stop(self, flow_id: int) -> int:
        """Take a transfer off its links, if it is still there; what it has moved."""
        transfer = self.table.transfer(flow_id)
        if transfer is None:
            return 0
        kind = transfer.kind
        moved = self.table.cancel(flow_id, self.kernel.now_ns)
        self.moved_bytes[kind] += moved
        self.active[kind] -= 1
        self.rearm()
        return moved

    def rearm(self) -> None:
        """Set the timer for the table's next event (call after any change to the table)."""
        at_ns = self.table.next_event_ns()
        if at_ns is None:
            return
        if at_ns < self.kernel.now_ns:
            at_ns = self.kernel.now_ns
        if self._armed_ns < 0 or at_ns < self._armed_ns:
            self._armed_ns = at_ns
            self.kernel.call_at(at_ns, PRIORITY_NETWORK, self._fire)

    def _fire(self) -> None:
        now_ns = self.kernel.now_ns
        if self._armed_ns != now_ns:
            return  # an earlier timer took its place
        self._armed_ns = -1
        late: tuple[Carried, ...] = ()
        for event in self.table.advance(now_ns):
            carried: Carried = event.tag
            if event.mark == END:
                if carried in late:
                    continue  # it has failed at this instant, with all its bytes
                kind = carried.kind
                self.moved_bytes[kind] += carried.size_bytes
                self.active[kind] -= 1
                if self._history is not None:
                    size_bytes = carried.size_bytes
                    self._history.transfer_over(carried, now_ns, "arrived", size_bytes)
                pair = carried.pair
                if pair is not None:
                    key = (pair[0], pair[1], kind)
                    arrived = self.arrived.get(key)
                    if arrived is None:
                        arrived = self.arrived[key] = Arrived()
                    arrived.transfers += 1
                    arrived.size_bytes += carried.size_bytes + carried.overlapped_bytes
                if not carried.is_over:  # given up by what came before at this instant
                    self._end(carried)
            elif carried.is_over:
                continue
            elif carried.fate is not None and carried.fate.kind in ("broken", "stuck"):
                if carried.fate.kind == "broken":
                    # A report that was held up may come with the one of the last byte.
                    is_through = carried.flow_id not in self.table
                    late += (carried,) if is_through else ()
                    self.fail(carried, "transfer_broken", is_through=is_through)
            elif carried.on_mark is not None:
                carried.on_mark(event.mark)
        self.rearm()
