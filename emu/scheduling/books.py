"""Who is where on one replica, and how many KV blocks each one holds.

Owns: the waiting queue, the admitted requests (residents), those detached for a KV handoff,
inbound reservations, and one counter of used blocks. Every change of a counter happens here.
Does not decide who runs: `emu/scheduling/simple.py` and its subclasses do.

Places of a request: waiting -> resident (idle, or member of a batch in flight) -> gone; beside
these `detached` (left the running set, blocks stay) and `reserved` (blocks without a request,
until `activate`). Blocks are counted, not named: no prefix sharing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from emu.config.schema import SchedulerTable
from emu.request import Request
from emu.scheduling.base import Batch, ReplicaLimits
from emu.scheduling.faithful import check_faithful
from emu.scheduling.waiting import make_queue
from emu.units import ceil_div


class ReplicaBooks:
    """Queue, residents and block counts of one replica; the base of `SimpleScheduler`."""

    policy = "books"
    grows = True
    """True: blocks are taken as tokens come. False: all of them at admission."""

    def __init__(
        self, table: SchedulerTable, limits: ReplicaLimits, *, preemptions_max: int = 0
    ) -> None:
        """`preemptions_max`: a request preempted more often fails (0 = no limit)."""
        check_faithful(table.faithful)
        self.preemptions_max = preemptions_max
        self.table = table
        self.limits = limits
        self.block_size = limits.block_size
        self.blocks_total = limits.num_blocks
        self.blocks_used = 0
        self.waiting_count = 0
        self.waiting_tokens = 0
        self.running_count = 0
        self.idle: list[Request] = []
        """Admitted requests that are in no batch in flight, in the order that the policy keeps."""
        self.rank: Callable[[Request], Any] = RANKS[table.order]
        """Sort key of running requests: the largest is the first to be preempted."""
        self._waiting = make_queue(table.order)
        self._residents: dict[int, Request] = {}
        self._prefilling: set[int] = set()
        self._detached: dict[int, tuple[Request, int]] = {}
        """With the blocks held, since the request's own field soon speaks of another replica."""
        self._reserved: dict[int, int] = {}
        self._in_flight: dict[int, Batch] = {}
        self._preempted: list[Request] = []
        self._failed: list[tuple[Request, str]] = []
        self._hopeless_blocks = "hopeless_head_blocks" in table.faithful

    # --- for policies ---------------------------------------------------------------------
    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self.blocks_total - self.blocks_used

    def is_prefilling(self, request: Request) -> bool:
        """Its prompt (or recomputation) is not complete: it runs as chunks, not as a decode."""
        return request.request_id in self._prefilling

    def blocks_for(self, request: Request) -> int:
        """Blocks that the request takes when it is admitted or reserved for."""
        return ceil_div(request.reached_tokens, self.block_size)

    def candidates(self) -> Iterator[Request]:
        """Waiting requests to try, head first.

        The next one comes only after the last one was admitted, unless `skip_blocked` lets later
        requests pass. A head that could never be admitted fails here and blocks nobody.
        """
        queue = self._waiting
        while queue:
            head = queue.head()
            yield head
            if not queue or queue.head() is not head:
                continue
            reason = "" if self._hopeless_blocks else self.never(head)
            if reason:
                queue.remove(head)
                self._note_waiting()
                self._failed.append((head, reason))
            elif self.table.skip_blocked:
                break
            else:
                return
        yield from list(islice(queue, 1, None))

    def admit(self, request: Request, blocks: int) -> None:
        """The waiting request joins the residents and takes `blocks` free blocks."""
        assert blocks <= self.free_blocks, "admission without free blocks"
        self._waiting.remove(request)
        self._note_waiting()
        self._waiting.charge(request.tenant, request.prompt_tokens)
        request.computed_tokens = 0
        request.kv_blocks = blocks
        self.blocks_used += blocks
        self._residents[request.request_id] = request
        self._prefilling.add(request.request_id)
        self.running_count += 1

    def preempt(self, request: Request) -> None:
        """An idle resident loses its KV and goes to the head of the queue; it is read again later.

        Everything that it has reached counts as prompt then, and that pass yields its next token.
        """
        self.idle.remove(request)
        self._restart(request)

    def grow(self, request: Request, tokens: int) -> bool:
        """Make sure that the resident has blocks for `tokens` tokens; False if they lack."""
        lacking = tokens - request.kv_blocks * self.block_size
        if lacking <= 0:
            return True
        blocks = ceil_div(lacking, self.block_size)
        if blocks > self.free_blocks:
            return False
        request.kv_blocks += blocks
        self.blocks_used += blocks
        return True

    # --- hooks ----------------------------------------------------------------------------
    def can_ever_hold(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request, even alone."""
        longest = request.prompt_tokens + request.max_output_tokens
        if longest > self.limits.max_model_tokens:
            return f"longer than the model's {self.limits.max_model_tokens} tokens"
        # The KV of the last output token is never computed.
        if ceil_div(longest - 1, self.block_size) > self.blocks_total:
            return f"needs more than the replica's {self.blocks_total} KV blocks"
        return self.never(request)

    def never(self, request: Request) -> str:
        """Empty, or why a waiting request could not be admitted even if the pool were empty.

        The reason names limits, not the request's own sizes, so that equal cases count together.
        """
        if self.blocks_for(request) > self.blocks_total:
            return f"needs more than the replica's {self.blocks_total} KV blocks"
        return ""

    def _return(self, members: list[Request]) -> None:
        """Members of a batch that ended become idle again, in the order of the batch."""
        self.idle += members

    def _retire(self, finished: list[Request]) -> None:
        """Members of a batch that ended have left; their blocks become free."""
        for request in finished:
            self._free(request)

    def _welcome(self, requests: Sequence[Request]) -> None:
        """Requests that come with their KV become idle."""
        self.idle += requests

    def _drop_idle(self, request: Request) -> bool:
        """Take the resident out of the idle ones; False if it is in flight."""
        if request not in self.idle:
            return False
        self.idle.remove(request)
        return True

    def _idle_ids(self) -> list[int]:
        return [request.request_id for request in self.idle]

    def _other_blocks(self) -> int:
        """Blocks held by neither residents, nor detached requests, nor reservations."""
        return 0

    # --- the protocol: coming and leaving ---------------------------------------------------
    def enqueue(self, request: Request, now_ns: int) -> None:
        """The request joins the waiting queue."""
        if request.queued_ns < 0:
            request.queued_ns = now_ns
        request.computed_tokens = request.kv_blocks = 0
        self._waiting.append(request)
        self._note_waiting()

    def drop_hopeless(self, now_ns: int) -> list[tuple[Request, str]]:
        """Requests at the head that could not run even on an empty replica, removed."""
        dropped, self._failed = self._failed, []
        while self._waiting:
            request = self._waiting.head()
            reason = self.never(request)
            if not reason:
                break
            self._waiting.remove(request)
            dropped.append((request, reason))
        self._note_waiting()
        return dropped

    def cancel(self, request: Request) -> bool:
        """Remove a waiting or running request and free its blocks; False if it is not here."""
        if self._residents.get(request.request_id) is request:
            self._depart(request)
            self._free(request)
            return True
        removed = self._waiting.remove(request)
        self._note_waiting()
        return removed

    def detach(self, request: Request) -> None:
        """A running request leaves the running set but keeps its blocks."""
        self._depart(request)
        self._detached[request.request_id] = (request, request.kv_blocks)

    def release(self, request: Request) -> None:
        """Free the blocks of a detached request (none are held any more after `evacuate`)."""
        _, blocks = self._detached.pop(request.request_id, (request, 0))
        self.blocks_used -= blocks

    def blocks_to_reserve(self, requests: Sequence[Request]) -> int:
        """Blocks that this replica must reserve to take over these requests' KV."""
        return sum(self.blocks_for(request) for request in requests)

    def reserve(self, requests: Sequence[Request]) -> bool:
        """Reserve blocks for inbound requests, all or nothing."""
        blocks = [self.blocks_for(request) for request in requests]
        if sum(blocks) > self.free_blocks:
            return False
        for request, count in zip(requests, blocks, strict=True):
            assert request.request_id not in self._reserved, "reserved twice"
            self._reserved[request.request_id] = count
        self.blocks_used += sum(blocks)
        return True

    def unreserve(self, requests: Sequence[Request]) -> None:
        """Give back a reservation that will not be used."""
        for request in requests:
            self.blocks_used -= self._reserved.pop(request.request_id, 0)

    def activate(self, requests: Sequence[Request], now_ns: int) -> None:
        """Reserved requests, KV complete, join the running set."""
        for request in requests:
            request.kv_blocks = self._reserved.pop(request.request_id)
            request.computed_tokens = request.reached_tokens - 1
        self._join(requests)

    def adopt(self, requests: Sequence[Request], now_ns: int) -> None:
        """Detached requests of this very replica join its running set."""
        for request in requests:
            _, request.kv_blocks = self._detached.pop(request.request_id)
        self._join(requests)

    def evacuate(self) -> list[Request]:
        """Waiting and running requests leave, KV lost; the pool is empty.

        Detached and inbound requests have another owner; their blocks are gone too.
        """
        waiting = list(self._waiting)
        for request in waiting:
            self._waiting.remove(request)
        leaving = [*waiting, *self._residents.values()]
        leaving += [request for request, _ in self._failed]
        for request in leaving:
            request.computed_tokens = request.kv_blocks = 0
        self._failed = []
        self._residents.clear()
        self._prefilling.clear()
        self._detached.clear()
        self._reserved.clear()
        self._in_flight.clear()
        self.idle = []
        self._preempted = []
        self.blocks_used = self.running_count = 0
        self._note_waiting()
        return leaving

    # --- the protocol: seeing ---------------------------------------------------------------
    def residents(self) -> Iterable[Request]:
        """Running requests, in order of admission."""
        return self._residents.values()

    def prefix_match(self, request: Request) -> int:
        """Tokens of the request found in a prefix cache: none, blocks are only counted here."""
        return 0

    def waiting(self) -> Iterable[Request]:
        """Waiting requests, head first."""
        return iter(self._waiting)

    def recount(self) -> list[str]:
        """Full check of the books; one line for each thing that is wrong."""
        wrong: list[str] = []

        def check(what: str, kept: int, counted: int) -> None:
            if kept != counted:
                wrong.append(f"{what}: books say {kept}, recount says {counted}")

        holders = list(self._residents.values())
        blocks = sum(r.kv_blocks for r in holders) + sum(self._reserved.values())
        blocks += sum(held for _, held in self._detached.values())
        check("blocks used", self.blocks_used, blocks + self._other_blocks())
        check("waiting requests", self.waiting_count, len(self._waiting))
        check("waiting tokens", self.waiting_tokens, sum(r.prompt_tokens for r in self._waiting))
        check("running requests", self.running_count, len(self._residents))
        if not 0 <= self.blocks_used <= self.blocks_total:
            wrong.append(f"{self.blocks_used} blocks used of {self.blocks_total}")
        wrong += [
            f"request {r.request_id}: {r.computed_tokens} tokens in {r.kv_blocks} blocks"
            for r in holders
            if r.computed_tokens > r.kv_blocks * self.block_size
        ]
        wrong += [f"request {r.request_id} waits with blocks" for r in self._waiting if r.kv_blocks]
        placed = self._idle_ids()
        for batch in self._in_flight.values():
            placed += [request.request_id for request in batch.decodes or ()]
            placed += [chunk.request.request_id for chunk in batch.chunks]
        if sorted(placed) != sorted(self._residents):
            wrong.append(f"idle and in flight {sorted(placed)}, running {sorted(self._residents)}")
        return wrong

    # --- inside -----------------------------------------------------------------------------
    def _join(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._residents[request.request_id] = request
            if request.computed_tokens < request.reached_tokens - 1 or not request.generated_tokens:
                self._prefilling.add(request.request_id)
        self.running_count += len(requests)
        self._welcome(requests)

    def _depart(self, request: Request) -> None:
        """The resident leaves the running set, and the batch in flight if it is in one."""
        del self._residents[request.request_id]
        self._prefilling.discard(request.request_id)
        self.running_count -= 1
        self._waiting.charge(request.tenant, request.generated_tokens)
        if self._drop_idle(request):
            return
        for batch in self._in_flight.values():
            if batch.decodes and request in batch.decodes:
                batch.decodes.remove(request)
            batch.chunks = [chunk for chunk in batch.chunks if chunk.request is not request]

    def _restart(self, victim: Request) -> None:
        """As `preempt`, for a resident that the policy has taken out of `idle` already."""
        del self._residents[victim.request_id]
        self.running_count -= 1
        self._free(victim)
        self._lose_progress(victim)
        self._prefilling.discard(victim.request_id)
        victim.preemptions += 1
        if self.preemptions_max and victim.preemptions > self.preemptions_max:
            self._failed.append((victim, f"preempted {victim.preemptions} times"))
            return
        self._preempted.append(victim)
        self._waiting.push_front(victim)
        self._note_waiting()

    def _lose_progress(self, victim: Request) -> None:
        victim.recomputed_tokens += victim.computed_tokens
        victim.computed_tokens = 0

    def _free(self, request: Request) -> None:
        self.blocks_used -= request.kv_blocks
        request.kv_blocks = 0

    def _note_waiting(self) -> None:
        self.waiting_count = len(self._waiting)
        self.waiting_tokens = self._waiting.prompt_tokens


def _by_deadline(request: Request) -> tuple[int, int]:
    urgency = request.deadline_ns if request.deadline_ns >= 0 else 1 << 62
    return urgency, request.arrival_ns


RANKS: Final[Mapping[str, Callable[[Request], Any]]] = MappingProxyType(
    {
        "arrival": attrgetter("arrival_ns"),
        "fair": attrgetter("arrival_ns"),
        "priority": attrgetter("priority", "arrival_ns"),
        "deadline": _by_deadline,
    }
)
