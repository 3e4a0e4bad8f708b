"""A running ASTRA-Sim as a calculator: graphs in, the time of each NPU out.

Owns the way of asking a program that keeps its own clock for the duration of one iteration: all
NPUs are given their graphs at the same poll, and the first report after each one's graph says
when it ended. Between two questions the program waits for an answer, so its clock stands still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import compress
from pathlib import Path
from typing import Final

import anyio
import msgspec

from emu.astra.etfile import write_graph
from emu.astra.executor_runs import Answer, FrontEnd
from emu.astra.inputs import InputSetup, write_inputs
from emu.astra.nodes import Graph, Node, NodeKind
from emu.astra.process import (
    AstraClient,
    Command,
    ProcessDialect,
    Report,
    open_astra,
    run_oneshot,
)
from emu.errors import RunError
from emu.process.interrupts import scratch

# --------------------------------------------------------------------------------------------------
# A front end on a real ASTRA-Sim: its polls answered, its graphs written to files.
#
# Owns the loop that `executor_runs.py` runs around the embedded executor, with the program in its
# place, and the files of each answer. Files are written before the answer is sent and removed once
# no NPU can still read them.

PASSES_MAX: Final = 2_000_000
"""Answers in a row that give no NPU work; more means that nothing will ever happen."""
_ANSWERS_KEPT: Final = 64


def write_answer(directory: Path, name: str, graphs: Mapping[int, Graph]) -> Path:
    """Write the graphs of one answer; the prefix to send."""
    prefix = directory / name
    for npu, graph in graphs.items():
        write_graph(directory / f"{name}.{npu}.et", graph)
    return prefix


def remove_answer(prefix: Path, npus: Iterable[int]) -> None:
    """Delete the files of an answer that are not read any more."""
    for npu in npus:
        Path(f"{prefix}.{npu}.et").unlink(missing_ok=True)


class Driver:
    """Answers a program's polls until the front end says exit."""

    def __init__(self, client: AstraClient, front: FrontEnd, directory: Path) -> None:
        self._client = client
        self._front = front
        self._directory = directory
        self._expected: dict[int, int] = {}
        """NPU -> graphs given to it."""
        self._prefixes: dict[int, Path] = {}
        """Answers by identity of their graphs: members of a group share one."""
        self._kept: deque[Mapping[int, Graph]] = deque()
        self._count = 0

    async def run(self) -> int:
        """The clock at the end, in ns. Raises RunError."""
        passes = 0
        while True:
            report = await self._client.report()
            self._verify(report)
            answer = self._front.answer(report.npu, report.iteration, report.cycles)
            if answer is Answer.EXIT:
                await self._client.exit()
                return report.cycles
            if answer is Answer.DONE:
                await self._client.done()
            elif answer is Answer.PASS:
                passes += 1
                if passes > PASSES_MAX:
                    raise RunError(
                        f"ASTRA-Sim: at {report.cycles} ns no system has had work for "
                        f"{PASSES_MAX} polls; a batch in flight never ends"
                    )
                await self._client.wait()
            else:
                assert not isinstance(answer, Answer)
                passes = 0
                self._expected[report.npu] = report.iteration + 1
                await self._client.give(self._files(answer))

    def _verify(self, report: Report) -> None:
        expected = self._expected.get(report.npu, 0)
        if report.iteration != expected:
            raise RunError(
                f"ASTRA-Sim: NPU {report.npu} reports iteration {report.iteration}, "
                f"it has been given {expected} graphs"
            )

    def _files(self, graphs: Mapping[int, Graph]) -> Path:
        known = self._prefixes.get(id(graphs))
        if known is not None:
            return known
        prefix = write_answer(self._directory, f"batch{self._count}", graphs)
        self._count += 1
        self._prefixes[id(graphs)] = prefix
        # The graphs are kept alive as long as their identity is a key.
        self._kept.append(graphs)
        if len(self._kept) > _ANSWERS_KEPT:
            old = self._kept.popleft()
            remove_answer(self._prefixes.pop(id(old)), old)
        return prefix


def write_first(directory: Path, graphs: Sequence[Graph]) -> Path:
    """Write the graphs that the program is started with; their prefix."""
    return write_answer(directory, "first", {graph.npu: graph for graph in graphs})


# --------------------------------------------------------------------------------------------------


class Calculator:
    """One program, started at the first question and ended by `aclose`."""

    def __init__(
        self,
        binary: Path,
        setup: InputSetup,
        npus: int,
        *,
        dialect: ProcessDialect = "fork",
        timeout_s: float = 120.0,
    ) -> None:
        self._binary = binary
        self._setup = setup
        self._npus = npus
        self._dialect = dialect
        self._timeout_s = timeout_s
        self._stack = AsyncExitStack()
        self._client: AstraClient | None = None
        self._directory = Path()
        self._unanswered: Report | None = None
        self._given = 0
        self._lock = anyio.Lock()

    async def ends_ns(self, graphs: Sequence[Graph]) -> list[int]:
        """When each NPU ends its graph, all starting at 0. Raises RunError, InputError."""
        async with self._lock:
            return await self._ask({graph.npu: graph for graph in graphs})

    async def _ask(self, graphs: dict[int, Graph]) -> list[int]:
        client = self._client or await self._open()
        # End NPUs are asked in order, then the start NPU 0: a round begins with the first of them.
        first = 1 if self._npus > 1 else 0
        report = self._unanswered or await client.report()
        while report.npu != first:
            await client.wait()
            report = await client.report()
        self._unanswered = None
        self._given += 1
        prefix = write_answer(self._directory, f"batch{self._given}", graphs)
        started: dict[int, int] = {}
        ended: dict[int, int] = {}
        while True:
            npu = report.npu
            if npu not in started:
                started[npu] = report.cycles
                await client.give(prefix)
            elif npu not in ended and report.iteration == self._given:
                ended[npu] = report.cycles
                if len(ended) == self._npus:
                    self._unanswered = report
                    break
                await client.wait()
            else:
                await client.wait()
            report = await client.report()
        remove_answer(prefix, graphs)
        begin = min(started.values())
        return [ended[npu] - begin for npu in range(self._npus)]

    async def _open(self) -> AstraClient:
        self._directory = self._stack.enter_context(scratch("emu-astra-sim-"))
        files = write_inputs(self._setup, self._directory)
        event = Node(0, NodeKind.COMP, "start", duration_ns=1)
        workload = write_first(self._directory, [Graph(npu, [event]) for npu in range(self._npus)])
        command = Command(
            binary=self._binary,
            files=files,
            workload=workload,
            start_npus=[0],
            end_npus=range(1, self._npus),
        )
        self._client = await self._stack.enter_async_context(
            open_astra(command, self._directory, dialect=self._dialect, timeout_s=self._timeout_s)
        )
        return self._client

    async def aclose(self) -> None:
        """End the program."""
        self._client = None
        self._unanswered = None
        await self._stack.aclose()


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
