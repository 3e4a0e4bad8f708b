"""ASTRA-Sim's outer loop around the executor: which NPU is asked for work, when, and in which
order.

Owns the fork's polling: after all events of an instant, every idle end NPU and then every idle
start NPU asks the front end; NPUs between a start NPU and the next receive the start NPU's
graphs. Without events the clock moves by a fixed step (the idle grid). Source: ASTRA-Sim as
LLMServingSim drives it.

`idle_step_ns` and `stagger` are quirks of the program and matter for parity only. With
`idle_step_ns` = 0 the front end says when something will happen, and the clock jumps there; if it
knows of nothing, every NPU is asked again as long as that may change something. Without `stagger`
end NPUs are asked once more behind the start NPUs, so that they start together.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, Protocol

from emu.backends.astra.executor import Executor
from emu.backends.astra.graph import (
    Graph,
)
from emu.errors import Deadlock

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
