"""A front end on a real ASTRA-Sim: its polls answered, its graphs written to files.

Owns the loop that `Polling` runs around the embedded executor, with the program in its
place, and the files of each answer. Files are written before the answer is sent and removed once
no NPU can still read them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from emu.backends.astra.client import AstraClient, Report
from emu.backends.astra.etfile import write_graph
from emu.backends.astra.graph import Graph
from emu.backends.astra.polling import Answer, FrontEnd
from emu.errors import RunError

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
