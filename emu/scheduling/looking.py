"""Schedulers that form a batch while the one before it runs, and then look at what has come.

Owns the requests that the engine has not looked at yet; the queue and the KV are the ledger's.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from mypy_extensions import mypyc_attr

from emu.config.schema import SchedulerTable
from emu.request import Request
from emu.scheduling.base import ReplicaLimits, Scheduler
from emu.scheduling.ledger import Ledger, forget_kv
from emu.scheduling.queues import Unseen


@mypyc_attr(allow_interpreted_subclasses=True)
class LookingScheduler(Scheduler):
    """A scheduler whose engine looks for new requests once a batch, where it forms them ahead."""

    def __init__(
        self,
        table: SchedulerTable,
        limits: ReplicaLimits,
        *,
        preemptions_max: int,
        ledger: Ledger,
        max_num_seqs: int,
        ahead: bool,
    ) -> None:
        """`ahead`: each batch is formed while the one before it runs. `preemptions_max`: a request
        preempted more often fails (0 = no limit)."""
        super().__init__(
            table,
            limits,
            preemptions_max=preemptions_max,
            ledger=ledger,
            max_num_seqs=max_num_seqs,
        )
        self._queue = ledger.queue
        self._ahead = ahead
        self._looks_late = ahead
        """A request that comes is not in the queue at once."""
        self._unseen = Unseen()
        """Requests that the engine has not looked at yet (`_looks_late`)."""

    def enqueue(self, request: Request, now_ns: int) -> None:
        """The request is here; ahead, the batch after the next one can have it."""
        if not self._looks_late:
            self.ledger.enqueue(request, now_ns)
            return
        if request.queued_ns < 0:
            request.queued_ns = now_ns
        forget_kv(request)
        self._unseen.add(request, now_ns)

    def _see(self, until_ns: int) -> None:
        """Requests that were here at that time join the waiting queue."""
        for request in self._unseen.take(until_ns):
            self._queue.append(request)

    @property
    def waiting_count(self) -> int:
        """Requests that wait, unseen ones included."""
        return self._queue.count + self._unseen.count

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of waiting requests."""
        return self._queue.prompt_tokens + self._unseen.prompt_tokens

    def waiting(self) -> Iterable[Request]:
        """Waiting requests, head first."""
        return chain(self._queue, self._unseen)
