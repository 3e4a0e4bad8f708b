"""vLLM's scheduling as it is by default since 0.14: each batch is formed while the last one runs.

The engine forms batch n+1 when batch n starts, without waiting for what n brings. Seen from the
end of batch n, where this emulator forms the next batch, that means three things:

* a request is seen one batch late: batch n+1 holds no request that arrived after n had started.
  Its first token comes at the end of the batch after;
* what ended with batch n keeps its seat and its blocks while batch n+1 is formed (the engine
  knows that it ends, so it is no longer a member);
* an engine that has nothing to run looks again at once.

Everything else is `VllmScheduler`. Leaps stay exact: requests that were not seen yet, and seats
and blocks about to be free, end a leap after one iteration unless they could change nothing.
One stage only: a pipeline already keeps several batches in flight.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from emu.batching.base import Batch, ReplicaLimits
from emu.batching.vllm import VllmScheduler
from emu.batching.waiting import arrival_order
from emu.config.schema import SchedulerTable
from emu.kv.tiers import LowerTier
from emu.request import Request

NOBODY: Final = (sys.maxsize, 0)
"""The arrival order of nobody: behind everybody's."""


class AsyncVllmScheduler(VllmScheduler):
    """`VllmScheduler` that sees arrivals and ends one batch late."""

    def __init__(
        self,
        table: SchedulerTable,
        limits: ReplicaLimits,
        *,
        preemptions_max: int = 0,
        tiers: Sequence[LowerTier] = (),
    ) -> None:
        """As for `VllmScheduler`; one pipeline stage."""
        super().__init__(table, limits, preemptions_max=preemptions_max, tiers=tiers)
        assert limits.pipeline_stages == 1
        self._unseen_tokens = 0
        self._unseen_first = NOBODY
        """The least arrival order of the unseen ones."""
        self._leaving: list[Request] = []
        """Ended with the last batch; their seats and blocks are not free yet."""

    def schedule(self, now_ns: int) -> Batch | None:
        """Form the next iteration from what was known when the last one started."""
        if self._unseen:
            self._see(self._last_start_ns)  # when the last batch started, the next one was formed
        batch = self._form(now_ns)
        if batch is None and not self._records:
            self._free_ended()
            self._see(now_ns)
            batch = self._form(now_ns)
        return batch

    def _see(self, until_ns: int) -> None:
        """Requests that were here at that time join the waiting queue."""
        seen = []
        for arrived_ns, request in self._unseen.values():
            if arrived_ns > until_ns:
                break
            seen.append(request)
        if seen:
            self._forget(seen)
            for request in seen:
                self._queue.append(request)

    def _forget(self, requests: list[Request]) -> None:
        for request in requests:
            del self._unseen[request.request_id]
            self._unseen_tokens -= request.prompt_tokens
        # A dict keeps the places of what was deleted, and walks over them: a new one has none.
        if not self._unseen:
            self._unseen, self._unseen_first = {}, NOBODY
            return
        self._unseen = dict(self._unseen)
        rest = (arrival_order(request) for _, request in self._unseen.values())
        self._unseen_first = min(rest, default=NOBODY)

    # --- what the last batch left -----------------------------------------------------------
    def _let_go(self, request: Request) -> None:
        self._leaving.append(request)

    def _free_ended(self) -> bool:
        if not self._leaving:
            return False
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self.pool.release(request)
        return True

    def _is_full(self) -> bool:
        return len(self._seats) + len(self._leaving) >= self.table.max_num_seqs

    def _holders(self) -> list[Request]:
        return [*self.residents(), *self._leaving]

    # --- leaps ------------------------------------------------------------------------------
    def _leap_steps(self, now_ns: int, has_freed: bool) -> int:
        if self._unseen and self._may_pass():
            return 1
        return super()._leap_steps(now_ns, has_freed)

    def leap_holds(self, batch: Batch) -> bool:
        """As for `VllmScheduler`; the next batch does not see who comes now, the one after does."""
        if self._unseen and self._may_pass():
            first_ns, _ = next(iter(self._unseen.values()))
            # Who came just before the iteration in flight began is seen at its end already.
            left = 0 if first_ns <= batch.last_start_ns else 1
            batch.max_steps = min(batch.max_steps, batch.steps_settled + left)
        return super().leap_holds(batch)

    def _may_pass(self) -> bool:
        """Some unseen request could be admitted before the head of the queue."""
        if not self._queue.count or self.table.skip_blocked or self.table.order != "arrival":
            return True
        return self._unseen_first < arrival_order(self._queue.head())

    # --- leaving and coming -----------------------------------------------------------------
    def enqueue(self, request: Request, now_ns: int) -> None:
        """The request is here; the batch after the next one can have it."""
        if request.queued_ns < 0:
            request.queued_ns = now_ns
        request.computed_tokens = request.kv_blocks = 0
        request.block_ids = None
        self._unseen[request.request_id] = (now_ns, request)
        self._unseen_tokens += request.prompt_tokens
        order = arrival_order(request)
        if order < self._unseen_first:
            self._unseen_first = order

    def cancel(self, request: Request) -> bool:
        """Remove a waiting or running request and free its blocks. False if it is not here."""
        if request.request_id in self._unseen:
            self._forget([request])
            return True
        return super().cancel(request)

    def evacuate(self) -> list[Request]:
        """Everything leaves: waiting requests first, then running ones. The pool is empty."""
        self._leaving.clear()
        self._see(1 << 63)
        return super().evacuate()

    # --- seeing -----------------------------------------------------------------------------
    @property
    def waiting_count(self) -> int:
        """Requests that wait, unseen ones included."""
        return self._queue.count + len(self._unseen)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of waiting requests."""
        return self._queue.prompt_tokens + self._unseen_tokens

    def waiting(self) -> Iterator[Request]:
        """Waiting requests, head first."""
        return chain(self._queue, (request for _, request in self._unseen.values()))
