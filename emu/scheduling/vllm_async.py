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

from collections.abc import Iterator, Sequence
from itertools import chain

from emu.config.schema import SchedulerTable
from emu.kv.tiers import LowerTier
from emu.request import Request
from emu.scheduling.base import Batch, ReplicaLimits
from emu.scheduling.vllm import VllmScheduler
from emu.scheduling.vllm_leaps import NOBODY
from emu.scheduling.waiting import arrival_order


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
            self._queue.append(request)
        if seen:
            self._forget(seen)

    def _forget(self, requests: list[Request]) -> None:
        if len(requests) == len(self._unseen):
            self._unseen, self._unseen_first, self._unseen_tokens = {}, NOBODY, 0
            return
        for request in requests:
            del self._unseen[request.request_id]
            self._unseen_tokens -= request.prompt_tokens
        # A dict keeps the places of what was deleted, and walks over them: a new one has none.
        self._unseen = dict(self._unseen)
        rest = (arrival_order(request) for _, request in self._unseen.values())
        self._unseen_first = min(rest, default=NOBODY)

    # --- what the last batch left -----------------------------------------------------------
    def _let_go(self, request: Request) -> None:
        self._leaving.append(request)

    def _holders(self) -> list[Request]:
        return [*self.residents(), *self._leaving]

    def sees_in(self, batch: Batch, started: int, last_start_ns: int) -> int:
        """Steps that a leap in flight takes after somebody came, one of them in flight.

        As `leap_holds` says, without settling the steps that have `started`. 0: that must be asked.
        """
        if self._queue.count or self._handoff.arrived or self.block_pool is not None:
            return 0
        if batch is not self._leaping or started >= batch.max_steps:
            return 0
        first_ns, _ = next(iter(self._unseen.values()))
        if first_ns <= last_start_ns:
            return 0
        batch.max_steps = started + 1
        return started + 1

    # --- leaving and coming -----------------------------------------------------------------
    def enqueue(self, request: Request, now_ns: int) -> None:
        """The request is here; the batch after the next one can have it."""
        if request.queued_ns < 0:
            request.queued_ns = now_ns
        if request.computed_tokens or request.kv_blocks or request.block_ids is not None:
            request.computed_tokens = request.kv_blocks = 0
            request.block_ids = None
        self._unseen[request.request_id] = (now_ns, request)
        self._unseen_tokens += request.prompt_tokens
        order = (request.arrival_ns, request.request_id)
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
