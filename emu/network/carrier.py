"""The network's shell: starts transfers in the flow table and calls back when they report.

Owns the one flow table of a run and the timer for its next event. Passive: it needs no task of
its own, because everything it does happens at an instant that the table knows beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from emu.actor import RANK_NETWORK, Kernel
from emu.network.flows import END, FlowTable
from emu.network.placement import Grid, shard_paths
from emu.network.topology import Topology

Parts = Sequence[tuple[Sequence[int], int]]


class Carried(msgspec.Struct, eq=False):
    """One transfer under way (the tag of its flow)."""

    flow_id: int
    carrier: Carrier
    kind: str
    size_bytes: int
    started_ns: int
    on_done: Callable[[], None]
    on_mark: Callable[[int], None] | None

    def cancel(self) -> None:
        """Stop it; `on_done` will not be called."""
        self.carrier.cancel(self.flow_id)


class Carrier:
    """Transfers over the links of a topology."""

    def __init__(self, kernel: Kernel, topology: Topology) -> None:
        self.kernel = kernel
        self.topology = topology
        self._rates = topology.link_rates
        self.table = FlowTable(self._rates)
        self.moved_bytes: dict[str, int] = {}
        """Bytes of ended transfers by kind, overlapped parts included."""
        self.transfers = 0
        self.active: dict[str, int] = {}
        """Transfers under way by kind."""
        self._lanes: dict[tuple[int, int], tuple[Sequence[int], int]] = {}
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
    ) -> Carried:
        """Move a replica's data to another, GPU by GPU in parallel (see `Network.send`).

        Layer-wise overlap: while the sender computed for `overlapped_ns`, the pieces that were
        ready could leave at the path's full rate; at least the last piece is still to move.
        """
        topology = self.topology
        left_bytes = size_bytes
        if overlapped_ns and pieces > 1:
            path, _ = self._lane(source.gpus[0], destination.gpus[0])
            lanes = min(len(source.gpus), len(destination.gpus))
            rate = min((self._rates[link] for link in path), default=0) * lanes
            ready_ns = overlapped_ns * (pieces - 1) // pieces
            hidden = min(size_bytes - size_bytes // pieces, rate * ready_ns // 1_000_000_000)
            left_bytes -= hidden
            self.moved_bytes[kind] = self.moved_bytes.get(kind, 0) + hidden
        if len(source.gpus) == len(destination.gpus) == 1:
            links, latency_ns = self._lane(source.gpus[0], destination.gpus[0])
            parts: Parts = ((links, left_bytes),)
        else:
            parts = shard_paths(source, destination, left_bytes, topology)
            latency_ns = max((topology.latency_ns(links) for links, _ in parts), default=0)
        return self.carry(parts, kind=kind, on_done=on_done, latency_ns=latency_ns, pair=pair)

    def _lane(self, source: int, destination: int) -> tuple[Sequence[int], int]:
        """Links and latency between two GPUs."""
        lane = self._lanes.get((source, destination))
        if lane is None:
            links = self.topology.path(source, destination)
            lane = self._lanes[source, destination] = (links, self.topology.latency_ns(links))
        return lane

    def carry(
        self,
        parts: Parts,
        *,
        kind: str,
        on_done: Callable[[], None],
        latency_ns: int = 0,
        marks: Sequence[int] = (),
        on_mark: Callable[[int], None] | None = None,
        after: Carried | None = None,
        lag_bytes: int = 0,
        pair: tuple[int, int] | None = None,
    ) -> Carried:
        """Start a transfer of parallel parts (links, bytes); marks and chains as in `FlowTable`."""
        self._next_id += 1
        size_bytes = sum(size for _, size in parts)
        carried = Carried(
            self._next_id, self, kind, size_bytes, self.kernel.now_ns, on_done, on_mark
        )
        self.table.start_group(
            carried.flow_id,
            parts,
            self.kernel.now_ns,
            kind=kind,
            latency_ns=latency_ns,
            marks=marks,
            after=None if after is None else after.flow_id,
            lag_bytes=lag_bytes,
            pair=pair,
            tag=carried,
        )
        self.transfers += 1
        self.active[kind] = self.active.get(kind, 0) + 1
        self.rearm()
        return carried

    def cancel(self, flow_id: int) -> None:
        """Stop a transfer; nothing is reported any more."""
        transfer = self.table._transfers.get(flow_id)
        if transfer is None:
            return
        kind = transfer.kind
        moved = self.table.cancel(flow_id, self.kernel.now_ns)
        self.moved_bytes[kind] = self.moved_bytes.get(kind, 0) + moved
        self.active[kind] -= 1
        self.rearm()

    def rearm(self) -> None:
        """Set the timer for the table's next event (call after any change to the table)."""
        at_ns = self.table.next_event_ns()
        if at_ns is None:
            return
        at_ns = max(at_ns, self.kernel.now_ns)
        if self._armed_ns < 0 or at_ns < self._armed_ns:
            self._armed_ns = at_ns
            self.kernel.call_at(at_ns, RANK_NETWORK, self._fire)

    def _fire(self) -> None:
        now_ns = self.kernel.now_ns
        if self._armed_ns != now_ns:
            return  # an earlier timer took its place
        self._armed_ns = -1
        for event in self.table.advance(now_ns):
            carried: Carried = event.tag
            if event.mark == END:
                kind = carried.kind
                self.moved_bytes[kind] = self.moved_bytes.get(kind, 0) + carried.size_bytes
                self.active[kind] -= 1
                carried.on_done()
            elif carried.on_mark is not None:
                carried.on_mark(event.mark)
        self.rearm()
