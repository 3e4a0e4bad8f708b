"""The iteration that a replica runs, or the leap of many: when it ends, how far it is, its end.

Owns the batch in flight on one stage, the instants at which its iterations end, and nothing of
what they bring about (`outcome.py`). A leap may be cut at the end of the iteration in flight
(`_changed`, `_boundary`); whoever reads the books in the middle of one settles them first. A batch
that ends prompts may run on: what is certain to follow is appended to it (`_run_on`).
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from emu.kernel.clock import Kernel, Mailbox
from emu.latency.base import BatchShape, LatencyBackend
from emu.scheduling.base import Batch, RunOn, Scheduler


class InFlight:
    """Base of a replica."""

    kernel: Kernel
    scheduler: Scheduler
    inbox: Mailbox[None]

    def __init__(self, latency: LatencyBackend, rank: int) -> None:
        self.latency = latency
        self.rank = rank
        self.slowdown = 1.0
        """Iterations take so many times longer (a straggler)."""
        self.first_uses = deque[int]()
        """What the next iterations take longer because their process is new."""
        self.wave_wait_ns = 0
        """What the batch in flight waits for other members of the group inside its layers."""
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self._runs_opened = getattr(latency, "decode_run_ns_after", None)
        """A short cut of backends: ends of a decode run that follows a step of a given length."""
        self._batch: Batch | None = None
        self._start_ns = 0
        self._end_ns = 0
        self._ends: NDArray[np.int64] | None = None
        """Of a leap: when each of its iterations ends, from `_start_ns` on."""

    # --- how far it is ------------------------------------------------------------------------
    def settle(self) -> int:
        """Bring the books up to now in the middle of a leap; iterations of it that have ended."""
        ends, batch = self._ends, self._batch
        if ends is None or batch is None:
            return 0
        done = self._steps_ended(ends)
        steps = done + 1 if done < batch.max_steps else done
        if steps > batch.steps_settled:
            self.scheduler.settle(batch, steps)
        return done

    def _steps_ended(self, ends: NDArray[np.int64]) -> int:
        """Iterations of the leap in flight that have ended by now.

        At the very end of one the order of ranks says whether it has been handled: stepping, the
        next one would be under way if our turn of this instant has passed.
        """
        kernel = self.kernel
        elapsed_ns = kernel.now_ns - self._start_ns
        if kernel.rank_reached > self.rank:
            elapsed_ns += 1
        return int(ends.searchsorted(elapsed_ns))

    def _iteration_end_ns(self, done: int) -> int:
        """When the iteration in flight ends, now if none is; `done` of a leap have ended."""
        if self._batch is None:
            return self.kernel.now_ns
        ends = self._ends
        if ends is None:
            return max(self.kernel.now_ns, self._end_ns)
        if done >= len(ends):
            return self._end_ns
        return self._start_ns + ends.item(done)

    def _boundary(self, now_ns: int) -> int:
        """When the iteration in flight ends; -1 if that is the deadline already set."""
        ends = self._ends
        return -1 if ends is None else self._iteration_end_ns(self._steps_ended(ends))

    @property
    def tokens_produced(self) -> tuple[int, int]:
        """(prefill, decode) tokens computed so far, finished iterations of a leap included."""
        done = self.settle()
        prefill, decode = self.prefill_tokens, self.decode_tokens
        batch = self._batch
        if done == 0 or batch is None:
            return prefill, decode
        run_on = batch.run_on
        if run_on is None:
            return prefill, decode + done * batch.shape.decode_count
        opening = run_on.opening
        assert opening is not None
        decode += opening.decode_tokens + (done - 1) * run_on.shape.decode_count
        return prefill + opening.prefill_tokens, decode

    # --- when it ends -------------------------------------------------------------------------
    def _begin(self, batch: Batch, measured_ns: int = 0) -> None:
        """The iteration, or leap, starts to run: when it ends."""
        now_ns = self.kernel.now_ns
        if batch.max_steps > 1:
            if self.slowdown == 1.0:
                ends = self.latency.decode_run_ns(batch.shape, batch.max_steps)
            else:
                ends = self._decode_run_ns(batch.shape, batch.max_steps)
            self._ends = ends
            self._end_ns = now_ns + ends.item(-1)
            return
        cost_ns = measured_ns or self.latency.iteration_ns(batch.shape)
        if self.slowdown != 1.0:
            cost_ns = int(cost_ns * self.slowdown)
        if self.first_uses:
            cost_ns += self.first_uses.popleft()
        self._end_ns = now_ns + cost_ns + self.wave_wait_ns

    def _decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Ends of a decode run here and now, from its start."""
        ends = self.latency.decode_run_ns(shape, steps)
        if self.slowdown != 1.0:
            ends = np.cumsum((np.diff(ends, prepend=0) * self.slowdown).astype(np.int64))
        return ends

    def _run_on(self, batch: Batch, run_on: RunOn) -> None:
        """A decode run follows the batch in flight, as steps of its own."""
        first_ns, steps = self._end_ns - self._start_ns, batch.max_steps - 1
        if self._runs_opened is not None and self.slowdown == 1.0:
            ends = self._runs_opened(run_on.shape, steps, first_ns)
        else:
            ends = np.empty(1 + steps, dtype=np.int64)
            ends[0] = first_ns
            np.add(self._decode_run_ns(run_on.shape, steps), first_ns, out=ends[1:])
        self._ends = ends
        self._end_ns = self._start_ns + ends.item(-1)

    def _puts_off(self, done: int) -> bool:
        """A leap ends before it would see who has just come. False: that takes settled books."""
        batch, ends = self._batch, self._ends
        if batch is None or ends is None:
            return False
        start_ns = self._start_ns
        steps = self.scheduler.sees_in(
            batch, done + 1, start_ns + (ends.item(done - 1) if done else 0)
        )
        if steps == 0:
            return False
        self._cut(ends, steps)
        return True

    def _cut(self, ends: NDArray[np.int64], steps: int) -> None:
        """The leap in flight takes so many steps and no more."""
        if steps < len(ends):
            self._ends = ends[:steps]
            self._end_ns = self._start_ns + ends.item(steps - 1)
            self.inbox.bring_forward(self._end_ns)

    def _changed(self, done: int) -> None:
        """The settled books have changed: cut a leap that no longer holds, wake an idle loop."""
        batch, ends = self._batch, self._ends
        if ends is not None and batch is not None:
            batch.last_start_ns = self._start_ns + (ends.item(done - 1) if done else 0)
            if self.scheduler.leap_holds(batch):
                self._cut(ends, batch.max_steps)  # it may hold, but not so long
                return
        self.inbox.poke()
