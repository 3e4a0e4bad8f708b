"""The published ASTRA-Sim as a calculator: started anew for each question, on one iteration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from pathlib import Path

import msgspec

from emu.backends.astra.client import Command, run_oneshot
from emu.backends.astra.etfile import write_graph
from emu.backends.astra.graph import Graph, Node, NodeKind
from emu.backends.astra.inputs import InputSetup, write_inputs
from emu.process.interrupts import scratch


def on_kept_dims(graph: Graph, kept: Sequence[bool]) -> Graph:
    """The graph on a network without some of its dimensions, which are of one NPU."""
    if all(kept) or not any(node.involved for node in graph.nodes):
        return graph
    nodes = [
        msgspec.structs.replace(
            node, involved=tuple(compress(node.involved, [*kept, *[True] * len(node.involved)]))
        )
        if node.involved
        else node
        for node in graph.nodes
    ]
    return Graph(graph.npu, nodes)


class OneShotCalculator:
    """The published program: one process for each question.

    `setup` must be of the upstream dialect. It cannot have dimensions of one NPU, so a lone NPU
    is given an idle neighbor.
    """

    def __init__(
        self,
        binary: Path,
        setup: InputSetup,
        npus: int,
        *,
        kept: Sequence[bool] = (),
        timeout_s: float = 120.0,
    ) -> None:
        """`kept`: which of the graphs' network dimensions the setup has; empty = all."""
        assert setup.dialect == "upstream"
        self._binary = binary
        self._setup = setup
        self._npus = npus
        self._kept = kept
        self._timeout_s = timeout_s

    async def ends_ns(self, graphs: Sequence[Graph]) -> list[int]:
        """When each NPU ends its graph, all starting at 0. Raises RunError, InputError."""
        with scratch("emu-astra-sim-") as directory:
            files = write_inputs(self._setup, directory)
            for graph in graphs:
                graph = on_kept_dims(graph, self._kept)
                write_graph(directory / f"work.{graph.npu}.et", graph, "upstream")
            for npu in range(len(graphs), self._npus):
                idle = Graph(npu, [Node(0, NodeKind.COMP, "idle", duration_ns=1)])
                write_graph(directory / f"work.{npu}.et", idle, "upstream")
            command = Command(binary=self._binary, files=files, workload=directory / "work")
            ends = await run_oneshot(command, directory, timeout_s=self._timeout_s, npus=self._npus)
            return [ends[graph.npu] for graph in graphs]

    async def aclose(self) -> None:
        """Nothing is left running between questions."""
