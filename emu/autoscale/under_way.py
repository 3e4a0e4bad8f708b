"""Loads under way: from which replicas weights are sent, to which they come, which are waited for.

Plans read the marks: a replica sends over a network once and loads once at a time. Every load that
the scaler has ordered is in these books from the order until all its weights are there or it is
given up, and out of all of them together.
"""

from __future__ import annotations

from typing import Final

from emu.autoscale.loader import ActiveLoad
from emu.autoscale.orders import Load
from emu.replica.states import Marker

_MARKERS: Final = {
    "nvlink": Marker.NVL_CASTING,
    "p2p": Marker.RDMA_LOADING,
    "chain": Marker.RDMA_CASTING,
    "tanz": Marker.TANZ_CASTING,
}


class LoadsUnderWay:
    """The marks of replicas, by network, and the loads that they stand for."""

    def __init__(self) -> None:
        self.rdma: dict[int, Marker] = {}
        self.nvl: dict[int, Marker] = {}
        self._sending: list[ActiveLoad] = []
        """Loads whose sources still send."""
        self._awaited: list[tuple[ActiveLoad, list[int]]] = []
        """Loads that a blocking planner waits for, with the targets that are not through."""

    @property
    def is_awaited(self) -> bool:
        """A blocking planner waits for one."""
        return bool(self._awaited)

    def is_marked(self, replica_id: int) -> bool:
        """Weights go to the replica or come from it."""
        return replica_id in self.rdma or replica_id in self.nvl

    def sources(self) -> list[int]:
        """Replicas from which weights are being copied."""
        return [source for active in self._sending for source in active.load.sources]

    def mark(self, load: Load) -> None:
        """A load is ordered: its sources send, its targets load."""
        marker = _MARKERS.get(load.method)
        if marker is None:
            return
        is_nvlink = load.method == "nvlink"
        books = self.nvl if is_nvlink else self.rdma
        for source in load.sources:
            assert source not in books, f"replica {source} sends twice"
            books[source] = Marker.NVLINK_SENDING if is_nvlink else Marker.RDMA_SENDING
        for target in load.targets:
            assert not self.is_marked(target.replica), f"replica {target.replica} loads twice"
            books[target.replica] = marker
            if load.method == "tanz":
                self.nvl[target.replica] = marker

    def follow(self, active: ActiveLoad) -> None:
        """A load that is marked has begun."""
        self._sending.append(active)
        load = active.load
        if load.method == "tanz" or (load.method == "chain" and load.is_live):
            self._awaited.append((active, list(active.open_targets)))

    def take_up(self, active: ActiveLoad) -> None:
        """A load that had begun before these books: those that have their weights are through."""
        self.mark(active.load)
        for target in active.load.targets:
            if target.replica not in active.open_targets:
                self.arrived(target.replica)
        self.follow(active)

    def sent(self, active: ActiveLoad) -> None:
        """All bytes have left its sources, or none will any more."""
        if active in self._sending:
            self._sending.remove(active)
            books = self.nvl if active.load.method == "nvlink" else self.rdma
            for source in active.load.sources:
                books.pop(source, None)

    def arrived(self, replica_id: int) -> None:
        """The replica has its weights, or will not get them."""
        self.rdma.pop(replica_id, None)
        self.nvl.pop(replica_id, None)
        for entry in list(self._awaited):
            if replica_id in entry[1]:
                entry[1].remove(replica_id)
            if not entry[1]:
                self._awaited.remove(entry)
