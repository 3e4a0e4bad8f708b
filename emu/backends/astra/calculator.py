"""A running ASTRA-Sim as a calculator: graphs in, the time of each NPU out.

Owns the way of asking a program that keeps its own clock for the duration of one iteration: all
NPUs are given their graphs at the same poll, and the first report after each one's graph says
when it ended. Between two questions the program waits for an answer, so its clock stands still.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from emu.backends.astra.client import AstraClient, Command, ProcessDialect, Report, open_astra
from emu.backends.astra.driver import remove_answer, write_answer, write_first
from emu.backends.astra.graph import Graph, Node, NodeKind
from emu.backends.astra.inputs import InputSetup, write_inputs
from emu.process.interrupts import scratch


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
        event = Node(0, NodeKind.COMP, "start", duration_ns=1)
        graphs = [Graph(npu, [event]) for npu in range(self._npus)]
        command = Command(
            binary=self._binary,
            files=write_inputs(self._setup, self._directory),
            workload=write_first(self._directory, graphs),
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
