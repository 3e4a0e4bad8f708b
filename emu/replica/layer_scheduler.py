"""The layer scheduler (BlitzScale's ZigZag): which layer of which batch runs next.

Pure (BlitzScale 4.7). The unit of execution is one layer of one batch. Rule: whenever the GPU is
free, run the earliest batch whose next layer is there; else idle. The embedding counts as a step
of the first batch that waits until it is loaded; after that it costs nothing of its own.

`offer` says what may be handed to a helper. With `head_allowed` (weights still arriving) it is
the oldest batch with work left, at the end of the layer that it runs; without (weights complete) it
is the first batch behind the one that runs.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from emu.scheduling.base import Batch
from emu.units import NS_PER_MS

LIMIT_START: Final = 4
LIMIT_LEAST: Final = 2
LIMIT_STEP_NS: Final = 200 * NS_PER_MS


def limit_at(elapsed_ns: int) -> int:
    """Outstanding batches allowed so long after the start: 4, then 3, then 2 (section 4.3)."""
    return max(LIMIT_LEAST, LIMIT_START - elapsed_ns // LIMIT_STEP_NS)


class LayerTask(msgspec.Struct, eq=False):
    """One batch."""

    seq: int
    """Number of its admission."""
    batch: Batch
    layers_done: int = 0
    started_ns: int = -1
    cost_ns: int = 0
    """Of the layers done."""
    whole_ns: int = -1
    """Of all layers, where the backend cannot price a part."""
    upto_ns: int = 0
    """Of the layers done, as the backend prices them."""


class LayerScheduler:
    """Batches of one replica in order of admission."""

    def __init__(self, layers: int, started_ns: int) -> None:
        self.layers = layers
        self.started_ns = started_ns
        self.pending: deque[LayerTask] = deque()
        self.running: LayerTask | None = None
        self.run_start_ns = self.run_end_ns = -1
        self.segments_ready = 0
        """Loaded so far: embedding, layers, head."""
        self.is_wanted = False
        """A helper waits for the oldest batch: nothing is admitted meanwhile."""
        self.is_released = False
        self._next_seq = 0

    @property
    def layers_ready(self) -> int:
        """Transformer layers that have arrived."""
        return min(max(self.segments_ready - 1, 0), self.layers)

    @property
    def is_complete(self) -> bool:
        """All weights are there."""
        return self.segments_ready >= self.layers + 2

    def admit(self, batch: Batch) -> LayerTask:
        """A new batch, behind all others."""
        task = LayerTask(self._next_seq, batch)
        self._next_seq += 1
        self.pending.append(task)
        return task

    def pick(self) -> LayerTask | None:
        """The batch whose next layer is to run now."""
        assert self.running is None
        ready = self.layers_ready
        for task in self.pending:
            if task.layers_done < ready:
                return task
        return None

    def start(self, task: LayerTask, now_ns: int, cost_ns: int) -> None:
        """The GPU runs the next layer of a batch."""
        assert self.running is None
        assert task.layers_done < self.layers_ready, "a layer runs that is not loaded"
        if task.started_ns < 0:
            task.started_ns = now_ns
        task.cost_ns += cost_ns
        self.running = task
        self.run_start_ns = now_ns
        self.run_end_ns = now_ns + cost_ns

    def end_layer(self, now_ns: int) -> bool:
        """The layer under way has ended, if its time has come."""
        task = self.running
        if task is None or now_ns < self.run_end_ns:
            return False
        task.layers_done += 1
        assert task.layers_done <= self.layers
        self.running = None
        return True

    def delay(self, ns: int) -> None:
        """A pause is over: the layer under way ends so much later."""
        if self.running is not None:
            self.run_end_ns += ns

    def pop_done(self) -> LayerTask | None:
        """The oldest batch, if all its layers have run and the head is loaded."""
        if self.pending and self.is_complete and self.pending[0].layers_done == self.layers:
            return self.pending.popleft()
        return None

    def remove(self, task: LayerTask) -> None:
        """A batch leaves."""
        assert task is not self.running
        self.pending.remove(task)
        self.is_wanted = False

    def offer(self, *, head_allowed: bool) -> tuple[LayerTask | None, bool]:
        """What a helper gets: (batch, False) now, (None, True) soon, (None, False) nothing."""
        if head_allowed:
            for task in self.pending:
                if task.layers_done == self.layers:
                    continue  # it only waits for the head
                is_embedding = self.segments_ready == 0 and task is self.pending[0]
                if task is self.running or is_embedding:
                    return None, True
                return task, False
            return None, False
        is_behind = self.running is None
        for index, task in enumerate(self.pending):
            if is_behind and index > 0 and task.layers_done < self.layers:
                return task, False
            is_behind = is_behind or task is self.running
        return None, False
