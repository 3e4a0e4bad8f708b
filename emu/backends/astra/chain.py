"""The embedded executor's answer for graphs that are one chain, without running each graph.

Owns the short cut for a model on one stage whose weights lie in the NPUs' own memory. Every NPU of
such a replica computes its rows one after the other, and nothing overlaps: load from the host,
rows, collectives behind some of them, store to the host. All compute the same rows but for experts,
of which each computes its own between dispatch and combination. So the end follows from the rows'
times and what loads, collectives and stores take, and these from the number of tokens: a gate that
is asked without a key routes equal counts alike. Between two batches of the same counts only
attention differs, which is the same on all.

Exact to the cycle (`tests/astra/test_chain.py` compares with the executor): NPUs that have queued
for the host memory enter the first collective one after the other, and keep or lose that lead as
the network model says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from emu.backends.astra.executor import Delays
from emu.backends.astra.graph import (
    COMM_TYPES,
    LOCAL,
    Node,
    NodeKind,
    Place,
)
from emu.backends.astra.layer_times import counts
from emu.backends.astra.memories import Memories
from emu.backends.astra.rows import TraceGenerator
from emu.backends.astra.trace import Marker, Row
from emu.latency.base import BatchShape
from emu.network.rounds import (
    CollectiveSystem,
)

_ATTENTION = "attention"
_KNOWN_MAX = 1 << 16


class Chain:
    """Ends of iterations of one kind of replica, all NPUs starting at 0."""

    def __init__(
        self, generator: TraceGenerator, network: CollectiveSystem, memories: Memories
    ) -> None:
        self._generator = generator
        self._memories = memories
        self._delays = Delays(network)
        self._ranks = generator.setup.tensor
        self._layers = generator.setup.model.layers
        self._known: dict[tuple[int, int], int] = {}
        """By (tokens, rows of logits): the end without attention."""

    @staticmethod
    def fits(generator: TraceGenerator, network: CollectiveSystem) -> bool:
        """Whether the graphs of all whole batches are chains."""
        setup, placement = generator.setup, generator.setup.placement
        return (
            setup.pipeline == 1
            and setup.kind == "COLOCATED"
            and setup.expert in (1, setup.tensor)
            and setup.repeats_blocks
            and generator.pim is None
            and placement.default is LOCAL
            and not placement.blocks
            and not placement.layers
            and not any("Tree" in name for name in network.algorithms)
        )

    def end_ns(self, shape: BatchShape) -> int:
        """When the last NPU ends."""
        return self._without_attention(shape) + self._layers * self._attention_ns(shape)

    def run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """The same for each of so many decode iterations in a row."""
        fixed = self._without_attention(shape)
        attention = self._generator.times.attention_run_ns(shape, steps)
        ends: NDArray[np.int64] = fixed + self._layers * attention
        return ends

    def _attention_ns(self, shape: BatchShape) -> int:
        if not shape.prefill_new and not shape.decode_count:
            return 0
        return self._generator.times.attention_ns(shape)

    def _without_attention(self, shape: BatchShape) -> int:
        key = counts(shape)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            found = self._known[key] = self._measure(self._generator.trace(shape).rows)
        return found

    def _measure(self, rows: Sequence[Row]) -> int:
        """The rows' times but for attention, and what surrounds them."""
        ends = self._served(rows[0].input_place, rows[0].input_bytes, [0] * self._ranks)
        everyone = range(self._ranks)
        mine: Sequence[int] = everyone
        in_experts = False
        for row in rows:
            if row.marker is Marker.EXPERT:  # the first is the dispatch, the others tell whose turn
                if not in_experts and row.comm_bytes > 0:
                    ends = self._left(row, ends)
                in_experts, mine = True, (row.index % self._ranks,)
                continue
            if row.marker is Marker.EXPERT_END:
                in_experts, mine = False, everyone
                if row.comm_bytes > 0:
                    ends = self._left(row, ends)
                continue
            if row.name != _ATTENTION:
                for rank in mine:
                    ends[rank] += row.comp_ns
            if self._ranks > 1 and not in_experts:
                ends = self._left(row, ends)
        last_row = rows[-1]
        return max(self._served(last_row.output_place, last_row.output_bytes, ends))

    def _left(self, row: Row, ends: list[int]) -> list[int]:
        """When each NPU leaves the collective of a row that it enters at these times."""
        if row.comm == "NONE":
            return ends
        last = max(ends)
        node = Node(0, NodeKind.COLL, collective=COMM_TYPES[row.comm])
        node.size_bytes = row.comm_bytes
        leads = [last - end for end in ends]
        # As late as one is behind the last, so long after its entry it leaves.
        return [last + delay for delay in self._delays.of(node, row.involved, leads, ())]

    def _served(self, place: Place, size_bytes: int, starts: list[int]) -> list[int]:
        """When each NPU's access to a memory ends."""
        node = Node(0, NodeKind.MEM_LOAD, size_bytes=size_bytes, place=place)
        queue, service_ns = self._memories.service(node)
        if queue is None:
            return [start + service_ns for start in starts]
        ends, free_ns = list(starts), 0
        for npu in sorted(range(len(starts)), key=starts.__getitem__):
            ends[npu] = free_ns = max(free_ns, starts[npu]) + service_ns
        return ends
