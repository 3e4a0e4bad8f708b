"""The iteration-level scheduler: what a replica asks of it, and what it answers.

A scheduler is pure: no await, no clock (time arrives as an argument), no randomness. It owns
the replica's waiting queue, its running set and its KV pool; nothing else changes them. The
replica's actor loops: `schedule` -> wait for the batch's cost -> `complete`.

What every scheduler must have are the seven abstract methods of `Scheduler`. All else has a
default here: queue, KV blocks, handoff of KV and the requests that failed are the ledger's
(`emu/scheduling/ledger.py`), and without promises an iteration is a step of its own.

Decode leaps. `schedule` may promise that the next `max_steps` iterations are the same batch with
one more context token each, as long as no mutating method is called. The actor then sleeps
through several of them and calls `complete(batch, steps, ...)` once. Blocks that steps 2..n need
are taken inside `settle`/`complete`, so that a leap cut short has taken nothing too much. The
result is identical to stepping (`max_steps` = 1), to the nanosecond and byte.

On a pipeline several batches are in flight; there the promise is a rotation (`rotation`).

A caller that reads the counts of a replica in the middle of a leap calls `settle` first; one that
changes them (reserve, cancel, enqueue) makes the actor cut the leap at the end of the iteration
in flight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

from mypy_extensions import mypyc_attr

from emu.kv.blocks import BlockPool
from emu.kv.counting import CountingPool
from emu.kv.groups import KvLayout
from emu.latency.base import BatchShape
from emu.request import Request
from emu.scheduling.ledger import Ledger
from emu.scheduling.queues import make_queue
from emu.scheduling.rotation import Rotation, Turn
from emu.units import ceil_div

if TYPE_CHECKING:
    from emu.config.schema import SchedulerTable
    from emu.scheduling.parts import Part


@final
class Chunk:
    """A member of a batch that is not a plain decode: a piece of prompt or of a recomputation."""

    request: Request
    new_tokens: int
    context_tokens: int

    __slots__ = (
        "context_tokens",
        "new_tokens",
        "request",
    )

    def __init__(
        self,
        request: Request,
        new_tokens: int,
        context_tokens: int,
    ) -> None:
        self.request = request
        self.new_tokens = new_tokens
        self.context_tokens = context_tokens


class Recall(NamedTuple):
    """KV of a member of a batch that a lower tier holds."""

    tier: int
    size_bytes: int
    request: Request
    tokens: int


@final
class Batch:
    """One iteration that has been formed, or the first of `max_steps` equal decode iterations."""

    batch_id: int
    shape: BatchShape
    chunks: list[Chunk]
    max_steps: int
    steps_settled: int
    """Steps whose blocks have been taken (the one in flight included)."""
    formed_ns: int
    last_start_ns: int
    """Start of the last step executed, if there were several; set before `complete`.

    Before `leap_holds`: start of the step in flight.
    """
    first_end_ns: int
    """End of the first step executed, if there were several; set before `complete`."""
    preempted: list[Request]
    """Requests that were preempted while this batch was formed."""
    recalls: list[Recall]
    """KV to bring up from a lower tier before the batch can run."""
    decodes: list[Request] | None
    """Plain decode members where the scheduler lists them; None = all of its decode cohort."""
    run_on: RunOn | None
    """Of a batch with prompts that leaps: its steps after the first one."""
    turn: Turn | None
    """Of a batch in flight on a pipeline that a rotation has formed: its members."""

    __slots__ = (
        "batch_id",
        "chunks",
        "decodes",
        "first_end_ns",
        "formed_ns",
        "last_start_ns",
        "max_steps",
        "preempted",
        "recalls",
        "run_on",
        "shape",
        "steps_settled",
        "turn",
    )

    def __init__(
        self,
        batch_id: int,
        shape: BatchShape,
        chunks: list[Chunk],
        max_steps: int = 1,
        formed_ns: int = 0,
        decodes: list[Request] | None = None,
    ) -> None:
        self.batch_id = batch_id
        self.shape = shape
        self.chunks = chunks
        self.max_steps = max_steps
        self.steps_settled = 1
        self.formed_ns = formed_ns
        self.last_start_ns = -1
        self.first_end_ns = -1
        self.preempted = []
        self.recalls = []
        self.decodes = decodes
        self.run_on = None
        self.turn = None


@final
class RunOn:
    """The decode run of all members of a batch that follows the end of its prompts."""

    shape: BatchShape
    """Of its first step, the second one of the batch."""
    opening: Progress | None
    """What the batch's first step brought about, once the second one is settled."""

    __slots__ = (
        "opening",
        "shape",
    )

    def __init__(
        self,
        shape: BatchShape,
        opening: Progress | None = None,
    ) -> None:
        self.shape = shape
        self.opening = opening


@final
class Progress:
    """What the completion of a batch brought about. All at the end of its last step."""

    first_tokens: list[Request]
    """Requests that received their first output token now (a prefill replica hands these on).

    A request with one output token is in `finished` too.
    """
    resumed: list[Request]
    """Requests whose lost or evicted KV is complete again (handed on like those above)."""
    finished: list[Request]
    """Requests whose last output token came now; they have left, their blocks are free."""
    cohort_size: int
    """Members whose token gap equals the step's duration, at each step of the batch."""
    gaps_ns: list[int]
    """Gaps between tokens of all other members that received a token (not their first)."""
    late_gaps_ns: list[int]
    """Of several steps, at the first one: gaps of members that joined with it. They are in
    `cohort_size`, whose gap is another at this step only."""
    prefill_tokens: int
    """Prompt (or recomputed) tokens computed."""
    decode_tokens: int
    """Output tokens produced, first ones included."""
    made_tokens: int
    """Output tokens so far of those that got one which is not their first, after the first of
    these steps (`RunningSet`; elsewhere 0)."""
    failed: list[tuple[Request, str]]
    """Requests that can never go on here, with the reason; they have left, blocks are free."""
    opening: Progress | None
    """Of a batch that ran on: what its first step brought about, not counted here again."""

    __slots__ = (
        "cohort_size",
        "decode_tokens",
        "failed",
        "finished",
        "first_tokens",
        "gaps_ns",
        "late_gaps_ns",
        "made_tokens",
        "opening",
        "prefill_tokens",
        "resumed",
    )

    def __init__(self, cohort_size: int = 0, decode_tokens: int = 0) -> None:
        self.first_tokens = []
        self.resumed = []
        self.finished = []
        self.cohort_size = cohort_size
        self.gaps_ns = []
        self.late_gaps_ns = []
        self.prefill_tokens = 0
        self.decode_tokens = decode_tokens
        self.made_tokens = 0
        self.failed = []
        self.opening = None


@final
class ReplicaLimits:
    """What a scheduler needs to know of the replica that it serves."""

    num_blocks: int
    block_size: int
    max_model_tokens: int
    pipeline_stages: int
    prefix_caching: bool
    """True only if the workload has token ids or hashes at all; else blocks are just counted."""
    leap: bool
    kv_layout: KvLayout | None
    """How the layers of a hybrid model share KV blocks; None = all keep all tokens."""
    state_bytes: int
    """Of the states of a sequence, all layers and ranks."""
    replica_id: int
    """The holder of what is taken from a queue of the whole cluster."""
    hands_off: bool
    """Requests leave when their prompt is computed (a prefill replica)."""
    preemptions_max: int
    """A request preempted more often fails (0 = no limit)."""
    forms_ahead: bool
    """Each batch is formed while the one before it runs, for schedulers that can."""
    members: int
    """Replicas that step together, this one among them: ranks of attention of one server."""
    __slots__ = (
        "block_size",
        "forms_ahead",
        "hands_off",
        "kv_layout",
        "leap",
        "max_model_tokens",
        "members",
        "num_blocks",
        "pipeline_stages",
        "preemptions_max",
        "prefix_caching",
        "replica_id",
        "state_bytes",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_tokens: int,
        pipeline_stages: int = 1,
        prefix_caching: bool = False,
        leap: bool = True,
        kv_layout: KvLayout | None = None,
        state_bytes: int = 0,
        replica_id: int = -1,
        *,
        hands_off: bool = False,
        preemptions_max: int = 0,
        forms_ahead: bool = False,
        members: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_tokens = max_model_tokens
        self.pipeline_stages = pipeline_stages
        self.prefix_caching = prefix_caching
        self.leap = leap
        self.kv_layout = kv_layout
        self.state_bytes = state_bytes
        self.replica_id = replica_id
        self.hands_off = hands_off
        self.preemptions_max = preemptions_max
        self.forms_ahead = forms_ahead
        self.members = members


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler(ABC):
    """Iteration-level scheduling of one replica, with its KV pool."""

    must_have: ClassVar[tuple[str, ...]] = (
        "cancel",
        "complete",
        "detach",
        "evacuate",
        "residents",
        "running_count",
        "schedule",
    )
    """The abstract members: a compiled class does not say which they are."""
    grows: ClassVar[bool] = True
    """Blocks are taken as tokens come; False: all of them at admission."""
    block_pool: BlockPool | None = None
    """The pool, where blocks have identities (prefix caching)."""
    parts: Sequence[Part] = ()
    """What features of the replica do here."""
    is_shared = False
    """It pulls its prompts from a queue that other replicas pull from too."""
    pulls = False
    """It may take prompts from a shared queue now; the replica says so at changes of state."""

    def __init__(
        self,
        table: SchedulerTable,
        limits: ReplicaLimits,
        *,
        ledger: Ledger | None = None,
        max_num_seqs: int = 0,
    ) -> None:
        """`ledger`: with a pool or a queue of the policy's own. `max_num_seqs`: most requests that
        can run at once (0 = no limit but the blocks)."""
        self.table = table
        self.limits = limits
        self.block_size = limits.block_size
        self.ledger = ledger or Ledger(
            CountingPool(limits.num_blocks, limits.block_size), make_queue(table.order)
        )
        self.ledger.preemptions_max = limits.preemptions_max
        self.max_num_seqs = max_num_seqs or limits.num_blocks
        """Most requests that can run at once (each holds a block at least)."""

    # What a policy must have.
    @abstractmethod
    def schedule(self, now_ns: int) -> Batch | None:
        """Form the next iteration, or None if nothing can run (or too many are in flight)."""

    @abstractmethod
    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """`steps` iterations of the batch ended, the last one at `now_ns`."""

    @property
    @abstractmethod
    def running_count(self) -> int:
        """Admitted requests (prefill unfinished or decoding), detached ones not counted."""

    @abstractmethod
    def residents(self) -> Iterable[Request]:
        """Running requests, in order of admission, with exact token counts.

        Those that arrived with their KV (`ledger.arrived`) and do not run yet are among them.
        """

    def look_up(self, request: Request) -> None:
        """Write the exact token counts of a resident to its request; others have theirs."""
        for _ in self.residents():
            pass

    @abstractmethod
    def cancel(self, request: Request) -> bool:
        """Remove a waiting or running request and free its blocks.

        A member of a batch in flight leaves at once; the batch's cost does not change. False if
        the request is not here.
        """

    @abstractmethod
    def detach(self, request: Request) -> None:
        """A running request leaves the running set but keeps its blocks (KV handoff: hold)."""

    @abstractmethod
    def evacuate(self) -> list[Request]:
        """Everything here is lost or leaves: all requests, waiting first; the pool is empty.

        Detached and inbound requests have another owner; their blocks are gone too.
        """

    def forget(self) -> None:
        """The process ends while it holds nothing: what it had cached and loaded is gone."""
        self.ledger.forget()
        for part in self.parts:
            part.clear()

    # Figures.
    @property
    def blocks_total(self) -> int:
        """Blocks of the pool, less what a fault has taken out of it."""
        return self.ledger.blocks_total

    @property
    def blocks_used(self) -> int:
        """Blocks that are not free: residents, inbound reservations, sources of open transfers.

        Cached blocks that no request references are free.
        """
        ledger = self.ledger
        return ledger.blocks_total - ledger.pool.blocks_free

    @property
    def waiting_count(self) -> int:
        """Requests in the waiting queue, preempted ones included."""
        return self.ledger.queue.count

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of waiting requests."""
        return self.ledger.queue.prompt_tokens

    def prefix_match(self, request: Request) -> int:
        """Prompt tokens of a request that the GPU pool holds (what a router may ask)."""
        return 0 if self.block_pool is None else self.block_pool.match(request)

    # Waiting.
    def enqueue(self, request: Request, now_ns: int) -> None:
        """The request joins the waiting queue; it has no KV here."""
        self.ledger.enqueue(request, now_ns)

    def waiting(self) -> Iterable[Request]:
        """Waiting requests, head first."""
        return iter(self.ledger.queue)

    def can_ever_hold(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request, even alone."""
        longest = request.prompt_tokens + request.max_output_tokens
        if longest > self.limits.max_model_tokens:
            return f"longer than the model's {self.limits.max_model_tokens} tokens"
        # The KV of the last output token is never computed.
        if ceil_div(longest - 1, self.block_size) > self.blocks_total:
            return f"needs more than the replica's {self.blocks_total} KV blocks"
        return ""

    def drop_unschedulable(self, now_ns: int) -> list[tuple[Request, str]]:
        """Requests at the head that can never be scheduled although nothing runs, removed."""
        ledger = self.ledger
        dropped = ledger.take_failed()
        while ledger.queue:
            head = ledger.queue.head()
            reason = self.can_ever_hold(head)
            if not reason:
                break
            ledger.queue.remove(head)
            dropped.append((head, reason))
        return dropped

    # Leaps: without promises each iteration is a step of its own.
    def settle(self, batch: Batch, steps: int) -> None:  # noqa: B027
        """Bring the counts up to `steps` started iterations of a leap in flight (idempotent)."""

    def leap_holds(self, batch: Batch) -> bool:
        """Whether a settled leap in flight may go on to its promised end after a change.

        Where only a part of it may, that part is the promise from then on (`batch.max_steps`).
        To be asked after `enqueue`, `reserve`, `unreserve`, `release` or the cancellation of a
        waiting request; any other change ends a leap at the end of the iteration in flight.
        """
        return False

    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """The first `steps` iterations of a leap ended at `now_ns`, the next one is in flight.

        Afterwards the batch is that one iteration, as if it had been stepped to (for a crash or a
        pause in the middle of a leap).
        """
        raise AssertionError(f"{type(self).__name__} promises no leaps")

    def sees_in(self, batch: Batch, started: int, last_start_ns: int) -> int:
        """Steps that a leap takes after a request came, as `leap_holds` says, without settling.

        `started` steps have started, the last one at `last_start_ns`. 0: `leap_holds` must be
        asked.
        """
        return 0

    def run_on(self, batch: Batch) -> RunOn | None:
        """The decode run that is certain to follow a batch just formed with prompts.

        Its steps are the batch's from now on (`max_steps`); `Batch.first_end_ns` must be set
        before any is settled. None: there is no such run, or it is not certain yet.
        """
        return None

    def rotation(self, batches: Sequence[Batch]) -> Rotation | None:
        """How long the batches in flight on a pipeline, all of them, are certain to follow each
        other in turn; None if they are not."""
        return None

    def turn(
        self, turn: Turn, ended: int, formed: int, last_ns: int, gap_ns: int, run_ns: int
    ) -> None:
        """`ended` batches of a turn of a rotation have ended, the last one at `last_ns`, and
        `formed` were formed again; its members waited `gap_ns` for a token at most and ran for
        `run_ns`."""
        raise AssertionError(f"{type(self).__name__} promises no rotations")

    def resume(self, rotation: Rotation, batches: list[Batch]) -> list[Batch]:
        """The rotation is over: those of its batches that are in flight now, in order.

        `batches` were in flight when it began, in order, and have ended."""
        raise AssertionError(f"{type(self).__name__} promises no rotations")

    def token_receivers(self, batch: Batch) -> Iterable[Request]:
        """Members of the batch that get an output token at the end of each of its steps."""
        readers = [
            chunk.request
            for chunk in batch.chunks
            if chunk.context_tokens + chunk.new_tokens == chunk.request.reached_tokens
        ]
        return [*(batch.decodes or ()), *readers]

    def members(self, batch: Batch) -> list[tuple[Request, int, int]]:
        """(request, tokens computed before, new tokens) of each member of a batch just formed."""
        decodes = [(request, request.computed_tokens, 1) for request in batch.decodes or ()]
        chunks = [(c.request, c.context_tokens, c.new_tokens) for c in batch.chunks]
        return decodes + chunks

    # KV on its way out or in.
    def blocks_for(self, request: Request) -> int:
        """Blocks to reserve for an inbound request: those of prompt and output so far."""
        return self.ledger.pool.blocks_at(request.reached_tokens)

    def release(self, request: Request) -> None:
        """Free the blocks of a detached request (no-op after an evacuation)."""
        self.ledger.release(request)

    def blocks_to_reserve(self, requests: Sequence[Request]) -> int:
        """Blocks that this replica must reserve to take over these requests' KV."""
        blocks = 0
        for request in requests:
            blocks += self.blocks_for(request)
        return blocks

    def has_room(self, requests: Sequence[Request]) -> bool:
        """Whether `reserve` would take these requests now."""
        return self.blocks_to_reserve(requests) <= self.ledger.pool.blocks_free

    def has_places(self, count: int) -> bool:
        """Whether so many more requests may have KV here: some engines give it to no more requests
        than may run, where others let it wait for a place in the batch."""
        return True

    def reserve(self, requests: Sequence[Request]) -> bool:
        """Reserve blocks for inbound requests, all or nothing. Sets nothing on the requests."""
        return self.ledger.reserve(requests, [self.blocks_for(request) for request in requests])

    def unreserve(self, requests: Sequence[Request]) -> None:
        """Give back a reservation that will not be used."""
        self.ledger.unreserve(requests)

    def activate(self, requests: Sequence[Request], now_ns: int) -> None:
        """Reserved requests, KV complete, join the running set as soon as there is room."""
        for request in requests:
            request.computed_tokens = request.reached_tokens - 1
        self.ledger.activate(requests)

    def adopt(self, requests: Sequence[Request], now_ns: int) -> None:
        """Detached requests of this very replica go on here (role change, no move)."""
        self.ledger.adopt(requests)

    # Checks.
    def recount(self) -> list[str]:
        """Full check of the counts; one line for each thing that is wrong."""
        return self.ledger.recount(list(self.residents()))


def add_chunk(shape: BatchShape, new_tokens: int, context_tokens: int) -> None:
    """One more member with so many new tokens; exactly one token counts as a decode."""
    if new_tokens != 1:
        shape.prefill_new.append(new_tokens)
        shape.prefill_context.append(context_tokens)
        return
    if shape.decode_count == 0:
        shape.decode_context_max = shape.decode_context_min = context_tokens
    elif context_tokens > shape.decode_context_max:
        shape.decode_context_max = context_tokens
    elif context_tokens < shape.decode_context_min:
        shape.decode_context_min = context_tokens
    shape.decode_count += 1
    shape.decode_context_sum += context_tokens


def members_of(batch: Batch) -> Iterator[Request]:
    """All members that are still in the batch."""
    yield from batch.decodes or ()
    for chunk in batch.chunks:
        yield chunk.request
