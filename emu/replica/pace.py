"""What an iteration costs on one replica, here and now.

Owns all that stands between the latency backend and the replica: the factor of a straggler, steps
that vary, first uses of a fresh process, and the short cuts that a backend may offer
(`emu/latency/abilities.py`).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from operator import sub
from typing import TYPE_CHECKING, final

from emu.latency.abilities import (
    Abilities,
    AttentionRun,
    DecodeEnds,
    FirstSize,
    LinesOf,
    abilities_of,
)
from emu.latency.base import BatchShape, LatencyBackend, next_decode_shape
from emu.latency.ends import Ends, packed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from emu.latency.jitter import Jitter
    from emu.latency.moe_gate import Routing


@final
class Pace:
    """Costs of iterations of one replica."""

    latency: LatencyBackend
    stages: int
    """Of its pipeline."""
    slowdown: float
    """Iterations take so many times longer (a straggler)."""
    jitter: Jitter | None
    """How its steps vary; None = not at all."""
    first_uses: deque[int]
    """What the next iterations take longer because their process is new, ns each."""
    first_sizes: list[FirstSize]
    """What it has yet to compile, by tokens of a step."""
    is_monotone: bool
    """No step of a decode run is shorter than the one before it."""
    is_even: bool
    """A step takes what the backend says: no straggler, and steps do not vary."""
    decode_ends: DecodeEnds | None
    """The short cut for decode runs, if there is one that holds here and now."""
    expert_loads: Callable[[BatchShape], Routing | None] | None
    """Tokens of each expert in an iteration, if the backend knows."""
    _decode_ends: DecodeEnds | None
    _lines_of: LinesOf | None
    _attention_run: AttentionRun | None
    _attention_ns: Callable[[BatchShape], int] | None

    __slots__ = (
        "_attention_ns",
        "_attention_run",
        "_decode_ends",
        "_lines_of",
        "decode_ends",
        "expert_loads",
        "first_sizes",
        "first_uses",
        "is_even",
        "is_monotone",
        "jitter",
        "latency",
        "slowdown",
        "stages",
    )

    def __init__(
        self, latency: LatencyBackend, stages: int = 1, able: Abilities | None = None
    ) -> None:
        """`able`: what the backend can do, where that is known."""
        self.latency = latency
        self.stages = stages
        self.slowdown = 1.0
        self.jitter = None
        if able is None:
            able = abilities_of(latency)
        self.is_monotone = able.is_monotone
        self.expert_loads = able.expert_loads
        self._decode_ends = able.decode_ends
        self._lines_of = able.stage_lines
        self._attention_run = able.attention_run_ns
        self._attention_ns = able.attention_ns
        self._note()
        self._begin(able)

    def _note(self) -> None:
        self.is_even = self.slowdown == 1.0 and self.jitter is None
        self.decode_ends = self._decode_ends if self.is_even else None

    def start_process(self) -> None:
        """A fresh process: its first iterations pay for first uses."""
        self._begin(abilities_of(self.latency))

    def _begin(self, able: Abilities) -> None:
        self.first_uses = deque(able.first_use_ns)
        self.first_sizes = list(able.first_sizes)

    @property
    def is_fresh(self) -> bool:
        """The process has not used all of its kernels: iterations may take longer once more."""
        return bool(self.first_uses or self.first_sizes)

    def slow_down(self, factor: float) -> None:
        """From the next iteration on, each takes so many times what the backend says."""
        self.slowdown = factor
        self._note()

    def set_jitter(self, jitter: Jitter) -> None:
        """Steps vary from now on; no step of a run is known to be the longest."""
        self.jitter = jitter
        self.is_monotone = False
        self._note()

    def cost_ns(self, shape: BatchShape) -> int:
        """Duration of an iteration, from a backend inside simulated time, without jitter."""
        return self.slowed_ns(self.latency.iteration_ns(shape))

    def slowed_ns(self, cost_ns: int) -> int:
        """What the backend says, or said, as it is for a straggler."""
        return cost_ns if self.slowdown == 1.0 else int(cost_ns * self.slowdown)

    def varied_ns(self, cost_ns: int, number: int) -> int:
        """What step `number` of the replica takes, if the backend says so much."""
        cost_ns = self.slowed_ns(cost_ns)
        return cost_ns if self.jitter is None else self.jitter.step(number, cost_ns)

    def take_first_use(self, shape: BatchShape) -> int:
        """What the iteration that begins now takes longer because its process is new, ns."""
        first_ns = self.first_uses.popleft() if self.first_uses else 0
        if self.first_sizes:
            tokens = max(shape.new_tokens, shape.padded_tokens)
            for size in [size for size in self.first_sizes if size.is_met(tokens)]:
                self.first_sizes.remove(size)
                first_ns += size.stall_ns
        return first_ns

    def run_ends(self, shape: BatchShape, steps: int, first_ns: int, number: int) -> Ends:
        """Ends of a decode run, behind a step of `first_ns` (-1 = none), from the start of all.

        `number`: steps that the replica has taken before.
        """
        if self.decode_ends is not None:
            return self.decode_ends(shape, steps, first_ns)
        later = self._plain_ends(shape, steps)
        if self.jitter is not None:
            return self.jitter.run(number + (1 if first_ns >= 0 else 0), later, first_ns)
        if first_ns < 0:
            return later
        return array("q", [first_ns, *[first_ns + end for end in later]])

    def _plain_ends(self, shape: BatchShape, steps: int) -> Ends:
        """Ends of a decode run, from its start, without jitter."""
        if self._decode_ends is not None and self.slowdown == 1.0:
            return self._decode_ends(shape, steps, -1)
        return packed(self.decode_run_ns(shape, steps))

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Ends of a decode run, from its start, without jitter."""
        ends = self.latency.decode_run_ns(shape, steps)
        if self.slowdown != 1.0:
            import numpy as np

            ends = np.cumsum((np.diff(ends, prepend=0) * self.slowdown).astype(np.int64))
        return ends

    def decode_costs_ns(self, shape: BatchShape, steps: int) -> list[int]:
        """What each of so many decode iterations takes, without jitter."""
        ends = self._plain_ends(shape, steps)
        return [ends[0], *map(sub, ends[1:], ends)]

    def attention_costs_ns(self, shape: BatchShape, steps: int) -> list[int]:
        """What attention takes in each of so many decode iterations, as the backend says."""
        if self._attention_run is not None:
            found: list[int] = self._attention_run(shape, steps).tolist()
            return found
        return [self.attention_ns(next_decode_shape(shape, step)) for step in range(steps)]

    def attention_ns(self, shape: BatchShape) -> int:
        """What attention takes in one iteration, as the backend says."""
        if self._attention_ns is not None:
            return self._attention_ns(shape)
        parts = self.latency.components_ns(shape)
        return parts["attention_prefill"] + parts["attention_decode"]

    def stage_costs_ns(self, shape: BatchShape, wave_wait_ns: int) -> tuple[int, ...]:
        """What the batch that goes onto the stages now takes on each, its first use included.

        `wave_wait_ns`: what it waits for other members of its group inside its layers.
        """
        costs_ns = self.latency.stage_ns(shape)
        if self.slowdown != 1.0:
            costs_ns = tuple(int(cost_ns * self.slowdown) for cost_ns in costs_ns)
        if self.jitter is not None:
            costs_ns = self.jitter.stages(costs_ns)
        if wave_wait_ns:
            each, more = divmod(wave_wait_ns, self.stages)
            costs_ns = tuple(cost + each + (i < more) for i, cost in enumerate(costs_ns))
        first_ns = self.take_first_use(shape)
        if first_ns:
            costs_ns = (costs_ns[0] + first_ns, *costs_ns[1:])
        return costs_ns

    def stage_run_ns(self, shape: BatchShape, steps: int) -> list[list[int]]:
        """Costs of decode batches in a row: those on each stage, without jitter."""
        stage_ns = self.latency.stage_ns
        each = [stage_ns(next_decode_shape(shape, step)) for step in range(steps)]
        runs = [list(run) for run in zip(*each, strict=True)]
        if self.slowdown != 1.0:
            runs = [[int(cost_ns * self.slowdown) for cost_ns in run] for run in runs]
        return runs

    @property
    def lines_of(self) -> LinesOf | None:
        """Costs of decode batches in a row as lines, where they may be asked for so now."""
        return self._lines_of if self.slowdown == 1.0 else None
