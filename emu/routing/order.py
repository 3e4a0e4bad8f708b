"""The first of the least loaded among many replicas, without looking at all of them.

    order = LoadOrder([3, 0, 0])
    order.first()           # 1: the lowest place among those with the least load
    order.update(1, 5)
    order.first()           # 2

Owns a heap of (load, place) in which entries of former loads stay until they come to the top. An
update costs O(log n), a question O(1) beside the entries that it throws away.
"""

from __future__ import annotations

from collections.abc import Sequence

from emu.kernel.natives import heapify, heappop, heappush


class LoadOrder:
    """Loads by place, and where the least of them is."""

    def __init__(self, loads: Sequence[int]) -> None:
        self.loads = list(loads)
        self._places = len(loads)
        self._heap: list[int] = []
        """load * places + place: a number is compared five times faster than a tuple."""
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [load * self._places + place for place, load in enumerate(self.loads)]
        heapify(self._heap)
        self._entries_max = 4 * len(self.loads) + 64

    def update(self, place: int, load: int) -> None:
        """The load at a place, changed or not."""
        loads = self.loads
        if loads[place] == load:
            return
        loads[place] = load
        heappush(self._heap, load * self._places + place)
        if len(self._heap) > self._entries_max:
            self._rebuild()

    def first(self) -> int:
        """The lowest place among those with the least load."""
        heap, loads, places = self._heap, self.loads, self._places
        while True:
            entry = heap[0]
            place = entry % places
            if loads[place] == entry // places:
                return place
            heappop(heap)
