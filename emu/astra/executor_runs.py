"""Ways to run the embedded executor: ASTRA-Sim's polling loop, one chain, one iteration from 0."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from emu.astra.executor import Delays, Executor
from emu.astra.inputs import Memories
from emu.astra.layer_times import counts
from emu.astra.rows import TraceGenerator
from emu.astra.trace import COMM_TYPES, LOCAL, Graph, Marker, Node, NodeKind, Place, Row
from emu.errors import Deadlock, RunError
from emu.latency.base import BatchShape, next_decode_shape
from emu.network.rounds import CollectiveSystem

# --------------------------------------------------------------------------------------------------
# ASTRA-Sim's outer loop around the executor: which NPU is asked for work, when, and in which
# order.
#
# Owns the fork's polling: after all events of an instant, every idle end NPU and then every idle
# start NPU asks the front end; NPUs between a start NPU and the next receive the start NPU's
# graphs. Without events the clock moves by a fixed step (the idle grid). Source: ASTRA-Sim as
# LLMServingSim drives it.
#
# `idle_step_ns` and `stagger` are quirks of the program and matter for parity only. With
# `idle_step_ns` = 0 the front end says when something will happen, and the clock jumps there; if it
# knows of nothing, every NPU is asked again as long as that may change something. Without `stagger`
# end NPUs are asked once more behind the start NPUs, so that they start together.

IDLE_STEP_NS: Final = 1_000_000
"""How far the program moves its clock when nothing is scheduled."""


class Answer(enum.Enum):
    """Answers that carry no graphs."""

    PASS = "pass"
    DONE = "done"
    EXIT = "exit"


class FrontEnd(Protocol):
    """The side that decides what the NPUs do."""

    def answer(self, npu: int, iteration: int, now_ns: int) -> Answer | Mapping[int, Graph]:
        """An idle NPU asks; `iteration` = graphs it has been given so far, the first not counted.

        Graphs are by NPU; those of NPUs that the asking one does not manage are ignored.
        """
        ...

    def next_ns(self, now_ns: int) -> int:
        """When something happens that is not in the executor (an arrival); -1 = never."""
        ...


class Polling:
    """The loop for one run."""

    def __init__(
        self,
        executor: Executor,
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        idle_step_ns: int = IDLE_STEP_NS,
        stagger: bool = True,
    ) -> None:
        self.executor = executor
        self.starts = list(starts)
        self.ends = list(ends)
        self.idle_step_ns = idle_step_ns
        self.polls = 0
        self._order = [*self.ends, *self.starts, *([] if stagger else self.ends)]
        self._vain_rounds = 0
        """Rounds of questions in a row with no event before and no answer but "pass"."""
        self._iteration = [0] * executor.npu_count
        self._asleep = [False] * executor.npu_count
        edges = [*sorted(self.starts), executor.npu_count]
        listed = set(self.ends)
        self._managed = {
            start: [npu for npu in range(start + 1, end) if npu not in listed]
            for start, end in pairwise(edges)
        }

    def run(self, front: FrontEnd, first: Sequence[Graph]) -> int:
        """Run until the front end says exit; returns the clock. Raises Deadlock.

        `first` are the graphs that every NPU is given at time 0.
        """
        executor = self.executor
        for graph in first:
            executor.load(graph)
        while True:
            if executor.step():
                self._vain_rounds = 0
            else:
                self._pass_time(front)
            for npu in self._order:
                if self._ask(front, npu) is Answer.EXIT:
                    return executor.now_ns

    def _pass_time(self, front: FrontEnd) -> None:
        executor = self.executor
        due = front.next_ns(executor.now_ns)
        if due < 0:
            # An answer may have changed what another NPU, asked before, would be told now: a
            # member of a group that has become empty, a wave that lacks one batch. Each round
            # can bring one such step for each NPU. The original would go on forever.
            if self._vain_rounds > len(self._order):
                stuck = "\n  ".join(executor.unfinished()) or "all NPUs are idle"
                raise Deadlock(f"at {executor.now_ns} ns nothing can ever happen again\n  {stuck}")
            self._vain_rounds += 1
            due = executor.now_ns
        else:
            self._vain_rounds = 0
        if self.idle_step_ns:
            executor.now_ns += self.idle_step_ns
        else:
            executor.now_ns = max(due, executor.now_ns)

    def _ask(self, front: FrontEnd, npu: int) -> Answer:
        executor = self.executor
        if self._asleep[npu] or not executor.is_idle(npu):
            return Answer.PASS
        self.polls += 1
        answer = front.answer(npu, self._iteration[npu], executor.now_ns)
        if answer is not Answer.PASS:
            self._vain_rounds = 0
        if isinstance(answer, Answer):
            self._asleep[npu] = answer is Answer.DONE
            return answer
        self._iteration[npu] += 1
        for managed in self._managed.get(npu, ()):
            if managed in answer:
                executor.load(answer[managed])
        if npu in answer:
            executor.load(answer[npu])
        return Answer.PASS


# --------------------------------------------------------------------------------------------------
# The embedded executor's answer for graphs that are one chain, without running each graph.
#
# Owns the short cut for a dense model on one stage whose weights lie in the NPUs' own memory. Every
# NPU of such a replica computes the same rows one after the other, and nothing overlaps: load from
# the host, rows, all-reduces behind some of them, store to the host. So the end is the sum of the
# rows plus what loads, collectives and stores take, and that depends on their sizes only, which
# follow from the number of tokens. Between two batches of the same counts only attention differs.
#
# Exact to the cycle (`tests/astra/test_chain.py` compares with the executor): NPUs that have queued
# for the host memory enter the first collective one after the other, and keep or lose that lead as
# the network model says; once a block leaves the leads as it found them, so do all after it.

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
            and setup.model.experts == 0
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
        run = getattr(self._generator.times, "attention_run_ns", None)
        if run is not None:
            attention: NDArray[np.int64] = run(shape, steps)
        else:
            each = (next_decode_shape(shape, step) for step in range(steps))
            attention = np.array([self._attention_ns(one) for one in each], dtype=np.int64)
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
        total = 0
        seen: dict[tuple[object, ...], list[int]] = {}
        for row in rows:
            assert row.marker is Marker.NONE
            if row.name != _ATTENTION:
                total += row.comp_ns
            if row.comm == "NONE" or self._ranks == 1:
                continue
            # As late as one is behind the last, so long after its entry it leaves.
            last = max(ends)
            leads = [last - end for end in ends]
            key = (row.comm, row.comm_bytes, row.involved, *leads)
            delays = seen.get(key)
            if delays is None:
                node = Node(0, NodeKind.COLL, collective=COMM_TYPES[row.comm])
                node.size_bytes = row.comm_bytes
                delays = seen[key] = self._delays.of(node, row.involved, leads, ())
            ends = [last + delay for delay in delays]
        last_row = rows[-1]
        return total + max(self._served(last_row.output_place, last_row.output_bytes, ends))

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


# --------------------------------------------------------------------------------------------------
# One iteration from time 0 on the embedded executor.
#
# Owns the start of the graphs and the collection of their ends; `executor.py` does the rest.


def run_once(
    network: CollectiveSystem,
    memories: Memories,
    graphs: Sequence[Graph],
    *,
    last_waits: bool = False,
) -> dict[int, int]:
    """When each NPU ends its graph, in ns; all start at 0.

    With `last_waits` the last graph starts at the first event of the others (the quirk of polled
    end NPUs). Raises RunError, with what the NPUs wait for, if one never ends.
    """
    executor = Executor(network, memories)
    late = graphs[-1] if last_waits and len(graphs) > 1 else None
    for graph in graphs if late is None else graphs[:-1]:
        executor.load(graph)
    ends: dict[int, int] = {}
    waiting = [graph.npu for graph in graphs]
    while True:
        is_late = late is not None
        still = [n for n in waiting if not executor.is_idle(n) or (is_late and n == waiting[-1])]
        if len(still) < len(waiting):
            for npu in waiting:
                if npu not in still:
                    ends[npu] = executor.now_ns
            waiting = still
        if not executor.step():
            break
        if late is not None:
            executor.load(late)
            late = None
    if waiting:
        stuck = "\n  ".join(executor.unfinished())
        raise RunError(f"the graphs of an iteration never end\n  {stuck}")
    return ends
