"""BlitzScale's scheduling: whole prompts in arrival order, blocks reserved up front.

Owns: `PrefillQueue`, the FIFO that prefill replicas pull from (one for the cluster, or a private
one per replica), and `FcfsScheduler`, which turns what it pulls into batches. Rules: BlitzScale
sections 1.3 and 3.2 to 3.5.

* A request reserves blocks for prompt + declared output at once and gives back exactly those.
* A prefill batch is a set of whole prompts in one iteration; decodes stand still meanwhile.
* A decode step takes all running requests; there is no cap but the blocks.
* Prefill goes first whenever something can be taken.

A scheduler with a private queue always pulls. With the global queue it does so only while its
replica is in a state that prefills; its actor says so by setting `pulls` (False at the start, so
that a decode replica never takes prompts).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from emu.config.schema import FcfsTable
from emu.kv.counting import CountingPool
from emu.latency.base import BatchShape
from emu.request import Request, Status
from emu.scheduling.base import Batch, Chunk, Progress, ReplicaLimits, Scheduler, add_chunk
from emu.scheduling.cohort import RunningRequest
from emu.scheduling.ledger import Ledger
from emu.scheduling.queues import ArrivalQueue, make_queue
from emu.scheduling.running import Record, RunningSet
from emu.units import ceil_div

_UNLIMITED: Final = 1 << 62


def reserved_blocks(request: Request, block_size: int) -> int:
    """res(q) of section 1.3 in blocks: prompt and declared output, rounded up."""
    return ceil_div(request.prompt_tokens + request.max_output_tokens, block_size)


class PrefillQueue(ArrivalQueue):
    """Strict FIFO of prompts; the first that does not fit stops the scan."""

    @property
    def waiting_prefill_tokens(self) -> int:
        """Prompt tokens in the queue (what the planner watches)."""
        return self.prompt_tokens

    def cancel(self, request: Request) -> bool:
        """The client left: the entry and its tokens go. False if it is not here."""
        return self.remove(request)

    def next_batch(
        self,
        prefill_budget: int,
        request_token_budget: int,
        block_budget: int,
        block_size: int,
        requests_max: int = 1 << 62,
    ) -> list[Request]:
        """Take as many requests from the front as the budgets allow (section 3.2).

        `prefill_budget`: tokens to compute in the batch. `request_token_budget`: tokens that one
        request may reserve. `block_budget`: blocks for all of them.
        """
        picked: list[Request] = []
        tokens = blocks = 0
        for request in self:
            tokens += request.reached_tokens
            reserved = reserved_blocks(request, block_size)
            if (
                blocks + reserved > block_budget
                or tokens > prefill_budget
                or reserved * block_size > request_token_budget
                or len(picked) >= requests_max
            ):
                break
            blocks += reserved
            picked.append(request)
        for request in picked:
            self.remove(request)
        return picked


class FcfsScheduler(Scheduler):
    """Prefill in whole batches, decode all running requests."""

    grows = False

    def __init__(
        self, table: FcfsTable, limits: ReplicaLimits, *, queue: PrefillQueue | None = None
    ) -> None:
        """`queue`: the global queue, shared by replicas; None = a private one."""
        self.is_shared = queue is not None
        self.prompts = PrefillQueue() if queue is None else queue
        super().__init__(
            table,
            limits,
            ledger=Ledger(
                CountingPool(limits.num_blocks, limits.block_size),
                make_queue(table.order) if self.is_shared else self.prompts,
            ),
        )
        self.settings = table
        self.pulls = queue is None
        self.pool = self.ledger.pool
        self.running = RunningSet(self.ledger, limits, grows=False)

    @property
    def running_count(self) -> int:
        """Requests that hold KV and run or are about to."""
        return len(self.running.requests) + len(self.ledger.arrived)

    def blocks_for(self, request: Request) -> int:
        """Blocks to reserve for an inbound request: its whole reservation."""
        return reserved_blocks(request, self.block_size)

    def enqueue(self, request: Request, now_ns: int) -> None:
        """The request joins the queue that this scheduler pulls from."""
        self.ledger.enqueue(request, now_ns)
        if self.is_shared:
            self.ledger.queue.remove(request)
            self.prompts.append(request)

    def can_ever_hold(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request, even alone."""
        reached = request.reached_tokens
        longest = request.prompt_tokens + request.max_output_tokens
        blocks = self.blocks_for(request)
        if longest > self.limits.max_model_tokens:
            return f"longer than the model's {self.limits.max_model_tokens} tokens"
        if blocks > self.blocks_total:
            return f"needs more than the replica's {self.blocks_total} KV blocks"
        if reached > self.settings.max_batch_prefill_tokens:
            budget = self.settings.max_batch_prefill_tokens
            return f"prompt longer than max_batch_prefill_tokens {budget}"
        if blocks * self.block_size > self.settings.request_token_budget:
            budget = self.settings.request_token_budget
            return f"reserves more than request_token_budget {budget}"
        return ""

    def drop_unschedulable(self, now_ns: int) -> list[tuple[Request, str]]:
        """Heads that no empty replica like this could take, removed."""
        dropped: list[tuple[Request, str]] = []
        while self.pulls and self.prompts:
            head = self.prompts.head()
            reason = self.can_ever_hold(head)
            if not reason:
                break
            self.prompts.remove(head)
            dropped.append((head, reason))
        return dropped

    def schedule(self, now_ns: int) -> Batch | None:
        """A prefill batch if anything can be taken, else one decode step of all that run."""
        if len(self.running.records) >= self.limits.pipeline_stages:
            return None
        if self.ledger.arrived:
            self.running.admit_arrived(_UNLIMITED)
        prompts = self._pull()
        if prompts:
            return self.form_prefill(prompts, now_ns)
        return self._form_decode(now_ns)

    def _pull(self) -> list[Request]:
        if not self.pulls or not self.prompts:
            return []
        table = self.settings
        return self.prompts.next_batch(
            table.max_batch_prefill_tokens,
            table.request_token_budget,
            self.pool.blocks_free,
            self.block_size,
        )

    def form_prefill(self, prompts: Sequence[Request], now_ns: int) -> Batch:
        """These prompts, whole, are a batch in flight; their blocks are taken."""
        shape = BatchShape(sequences=len(prompts))
        records: list[Record] = []
        chunks: list[Chunk] = []
        for request in prompts:
            new = request.reached_tokens
            blocks = self.blocks_for(request)
            request.computed_tokens = new
            if self.is_shared:  # it had no holder in the queue of all
                request.holder_id = self.limits.replica_id
                request.status = Status.RUNNING
            self.pool.hand_over(request, blocks, self.pool.take(blocks))
            running = self.running.admit(request)
            running.pending = new
            records.append((running, new, new))
            chunks.append(Chunk(request, new, 0))
            if request.first_scheduled_ns < 0:
                request.first_scheduled_ns = now_ns
            if request.generated_tokens == 0:
                request.prefill_scheduled_ns = now_ns
            add_chunk(shape, new, 0)
        return self._launch(shape, chunks, records, now_ns)

    def _form_decode(self, now_ns: int) -> Batch | None:
        """All running requests whose prompt is done, unless they are in flight already."""
        cohort = self.running.cohort
        if cohort.in_flight or any(running.pending for running in self._decoding_beside()):
            return None
        self.running.join_ready()
        shape = BatchShape()
        records: list[Record] = []
        if cohort.count:
            shape = cohort.next_shape()
            self.running.start_cohort_step()
        for running in self._decoding_beside():
            request = running.request
            add_chunk(shape, 1, request.computed_tokens)
            request.computed_tokens += 1
            running.pending = 1
            records.append((running, 1, request.computed_tokens))
        if shape.decode_count == 0:
            return None
        shape.sequences = shape.decode_count
        batch = self._launch(shape, [], records, now_ns)
        if cohort.count:
            self.running.leaping = batch
            if not records:
                batch.max_steps = self._leap_steps(now_ns)
        return batch

    def _decoding_beside(self) -> Iterator[RunningRequest]:
        return (one for one in self.running.beside.values() if not one.prefilling)

    def _launch(
        self, shape: BatchShape, chunks: list[Chunk], records: list[Record], now_ns: int
    ) -> Batch:
        batch = Batch(self.running.next_batch_id, shape, chunks, 1, now_ns)
        if self.running.cohort.in_flight == 0 or chunks:
            batch.decodes = [one.request for one, _, _ in records if not one.prefilling]
        self.running.next_batch_id += 1
        self.running.records[batch.batch_id] = records
        return batch

    def _leap_steps(self, now_ns: int) -> int:
        """Decoding frees nothing, so a head that does not fit now does not fit during the leap."""
        if not self.limits.leap or self.running.beside or now_ns != self.running.cohort_end_ns:
            return 1
        if self.limits.pipeline_stages > 1 or (self.is_shared and self.pulls and self.prompts):
            return 1  # another replica may take the head, and the next one may fit here
        return self.running.cohort.steps_to_first_end()

    def leap_holds(self, batch: Batch) -> bool:
        """Whether a leap in flight may go on to its promised end after a change."""
        if self.ledger.arrived or batch is not self.running.leaping:
            return False
        if not self.pulls or not self.prompts:
            return True
        # Strictly first in, first out: a private head that does not fit blocks all newcomers.
        return not self.is_shared and self.blocks_for(self.prompts.head()) > self.pool.blocks_free

    def settle(self, batch: Batch, steps: int) -> None:
        """See `Scheduler.settle`."""
        self.running.settle(batch, steps)

    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """See `Scheduler.split`."""
        return self.running.split(batch, steps, now_ns, longest_step_ns)

    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """`steps` iterations of the batch ended, the last one at `now_ns`."""
        return self.running.complete(batch, steps, now_ns, longest_step_ns)

    def cancel(self, request: Request) -> bool:
        """Remove a waiting or running request and free its blocks. False if it is not here."""
        return self.running.cancel(request)

    def detach(self, request: Request) -> None:
        """A running request leaves the running set but keeps its blocks."""
        self.running.detach(request)

    def evacuate(self) -> list[Request]:
        """Everything leaves: waiting requests first, then running ones. The pool is empty."""
        return self.ledger.evacuate(self.running.evacuate())

    def residents(self) -> Iterable[Request]:
        """Running requests in order of admission, then those that arrived and wait to be."""
        return self.running.residents()

    def look_up(self, request: Request) -> None:
        """Write the exact token counts of a resident to its request."""
        self.running.look_up(request)

    def token_receivers(self, batch: Batch) -> Iterable[Request]:
        """Members of the batch that get an output token at the end of each of its steps."""
        return self.running.token_receivers(batch)

    def members(self, batch: Batch) -> list[tuple[Request, int, int]]:
        """(request, tokens computed before, new tokens) of each member of a batch just formed."""
        return self.running.members(batch)

    def recount(self) -> list[str]:
        """Full check of the counts; one line for each thing that is wrong."""
        return self.running.recount()
