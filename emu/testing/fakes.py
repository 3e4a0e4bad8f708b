"""What stands around a replica on the bench: a clock set by hand, a scheduler of one page.

The fakes answer exactly and do nothing else, so that a test of the replica can be read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from emu.kernel.clock import Kernel
from emu.latency.base import BatchShape
from emu.request import Request, plain_request
from emu.scheduling.base import Batch, Chunk, Progress

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from emu.latency.ends import Ends
    from emu.replica.ports import BatchSink, StepSink
    from emu.replica.split_batch import SplitBatch
    from emu.scheduling.base import RunOn

STEP_NS: Final = 1_000
"""An iteration of `FakeLatency` takes so long, ns."""


def request(request_id: int = 1, prompt: int = 4, output: int = 3) -> Request:
    """A request as the gateway would route it; `prompt` and `output` in tokens."""
    made = plain_request(request_id, 0, prompt, output)
    made.row = request_id
    return made


class FakeClock(Kernel):
    """The instant, set by hand: `now_ns`."""

    def soon(self, call: Callable[[], None]) -> None:
        """Calls it at once: there is no queue."""
        call()


class FakeGaps:
    """Counts gaps between tokens."""

    def __init__(self) -> None:
        self.gaps = 0

    def add_run(
        self, cumulative_ends: Ends, count: int, start_ns: int = -1, first_count: int = -1
    ) -> None:
        """`count` gaps at each of these ends."""
        self.gaps += len(cumulative_ends) * count

    def add_gap(self, ns: int, count: int = 1, at_ns: int = -1) -> None:
        """`count` gaps of this length."""
        self.gaps += count

    def add_each(self, gaps_ns: Sequence[int], counts: Sequence[int], at_ns: Sequence[int]) -> None:
        """So many gaps of each of these lengths."""
        for gap_ns, count in zip(gaps_ns, counts, strict=True):
            self.add_gap(gap_ns, count)

    def add_gaps(self, gaps_ns: Iterable[int], at_ns: int = -1) -> None:
        """Single gaps."""
        self.gaps += len(list(gaps_ns))


class FakeObservers:
    """Counts gaps and follows nothing else."""

    def __init__(self, on_formed: Callable[[int, Batch], None] | None = None) -> None:
        """`on_formed` is told of each batch (of the replica of that id) when it is formed."""
        self.streams = False
        self.gaps = FakeGaps()
        self.batches: BatchSink | None = None
        self.history: StepSink | None = None
        self.on_formed = on_formed

    def on_tokens(self, replica_id: int, receivers: list[Request]) -> None:
        """Is never called: nothing streams."""
        raise AssertionError("nothing follows tokens")


class FakeLedger:
    """What memory is lost, and how much of it is free."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self.losses: dict[int, int] = {}
        """Blocks that each loss has taken, by its number."""
        self.failed: list[tuple[Request, str]] = []
        self._scheduler = scheduler
        self.pool = self

    @property
    def blocks_total(self) -> int:
        """Blocks that are not lost."""
        return self._scheduler.blocks_total

    @property
    def blocks_free(self) -> int:
        """Blocks that no request holds."""
        return self._scheduler.blocks_total - self._scheduler.blocks_used

    @property
    def lost(self) -> int:
        """Blocks that are lost now."""
        return sum(self.losses.values())

    def lose(self, loss: int, blocks: int) -> int:
        """Take free blocks away, at most so many: how many."""
        assert loss not in self.losses
        taken = self.losses[loss] = min(blocks, self.blocks_free)
        self._scheduler.blocks_total -= taken
        return taken

    def restore(self, loss: int) -> None:
        """Give back what that loss has taken."""
        self._scheduler.blocks_total += self.losses.pop(loss, 0)


class FakeScheduler:
    """Whole prompts one by one, then all decodes together; a block for each token of the prompt."""

    is_shared = False
    grows = True

    def __init__(self, blocks: int = 100, leap: int = 1, stages: int = 1) -> None:
        """`leap`: decode iterations promised at most; `stages`: batches in flight at most."""
        self.blocks_total = blocks
        self.stages = stages
        self.in_flight: list[list[Request]] = []
        self.leap = leap
        self.queue: list[Request] = []
        self.running: list[Request] = []
        self.detached: list[Request] = []
        self.reserved: list[Request] = []
        self.unschedulable: list[tuple[Request, str]] = []
        self.never = ""
        """Why no request could ever be held, if so."""
        self.places = 1000
        """Requests that may have KV here."""
        self.holds = True
        """A leap still holds when it is asked."""
        self.settled = 0
        self.ids = 0
        self.ledger = FakeLedger(self)

    @property
    def blocks_used(self) -> int:
        """Blocks that requests hold."""
        held = [*self.running, *self.detached, *self.reserved]
        return sum(r.prompt_tokens for r in held)

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        return len(self.queue)

    @property
    def running_count(self) -> int:
        """Requests that run."""
        return len(self.running)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that wait."""
        return sum(r.prompt_tokens for r in self.queue)

    def enqueue(self, r: Request, now_ns: int) -> None:
        """A request waits."""
        self.queue.append(r)

    def schedule(self, now_ns: int) -> Batch | None:
        """The first prompt that waits if it fits, else all decodes that are in no batch."""
        if len(self.in_flight) >= self.stages:
            return None
        self.ids += 1
        free = self.blocks_total - self.blocks_used
        if self.queue and self.queue[0].prompt_tokens <= free:
            r = self.queue.pop(0)
            self.running.append(r)
            self.in_flight.append([r])
            shape = BatchShape(prefill_new=[r.prompt_tokens], prefill_context=[0], sequences=1)
            return Batch(self.ids, shape, [Chunk(r, r.prompt_tokens, 0)], formed_ns=now_ns)
        busy = [r for batch in self.in_flight for r in batch]
        free_to_run = [r for r in self.running if r not in busy]
        if not free_to_run:
            return None
        self.in_flight.append(free_to_run)
        left = min(r.output_tokens - r.generated_tokens for r in free_to_run)
        shape = BatchShape(decode_count=len(free_to_run), sequences=len(free_to_run))
        steps = max(1, min(self.leap, left))
        decodes = free_to_run if self.stages > 1 else None
        return Batch(self.ids, shape, [], steps, now_ns, decodes)

    def settle(self, batch: Batch, steps: int) -> None:
        """The first `steps` iterations of the batch have begun."""
        batch.steps_settled = max(batch.steps_settled, steps)
        self.settled = batch.steps_settled

    def sees_in(self, batch: Batch, steps: int, start_ns: int) -> int:
        """A change counts at once."""
        return 0

    def rotation(self, batches: Sequence[Batch]) -> None:
        """Batches do not follow each other for certain."""

    def run_on(self, batch: Batch) -> RunOn | None:
        """Nothing is certain to follow."""

    def leap_holds(self, batch: Batch) -> bool:
        """The test has set the answer: `holds`."""
        return self.holds

    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """The first `steps` iterations are over, the others go on."""
        members = self.in_flight[0]
        progress = self.complete(batch, steps, now_ns, longest_step_ns)
        self.in_flight.insert(0, members)
        return progress

    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        """Each member has `steps` tokens more; those that have all of theirs leave."""
        progress = Progress()
        going = self.in_flight.pop(0)
        for r in [r for r in going if r in self.running]:
            r.generated_tokens += steps
            r.computed_tokens = r.reached_tokens - 1
            if batch.chunks:
                progress.first_tokens.append(r)
            if r.generated_tokens >= r.output_tokens:
                self.running.remove(r)
                progress.finished.append(r)
        return progress

    def can_ever_hold(self, r: Request) -> str:
        """The test has set the answer: `never`."""
        return self.never

    def drop_unschedulable(self, now_ns: int) -> list[tuple[Request, str]]:
        """What the test has put into `unschedulable`."""
        dropped, self.unschedulable = self.unschedulable, []
        for r, _ in dropped:
            self.queue.remove(r)
        return dropped

    def cancel(self, r: Request) -> bool:
        """Drop a request that waits or runs; False if none does."""
        for held in (self.queue, self.running):
            if r in held:
                held.remove(r)
                return True
        return False

    def detach(self, r: Request) -> None:
        """It runs no more and keeps its blocks."""
        self.running.remove(r)
        self.detached.append(r)

    def release(self, r: Request) -> None:
        """Blocks of a detached request are free."""
        if r in self.detached:
            self.detached.remove(r)

    def blocks_to_reserve(self, requests: Sequence[Request]) -> int:
        """Blocks for KV that is to come."""
        return sum(r.prompt_tokens for r in requests)

    def has_room(self, requests: Sequence[Request]) -> bool:
        """There are blocks for all of them."""
        return self.blocks_to_reserve(requests) <= self.blocks_total - self.blocks_used

    def has_places(self, count: int) -> bool:
        """There are places for so many more."""
        return len(self.running) + len(self.reserved) + count <= self.places

    def reserve(self, requests: Sequence[Request]) -> bool:
        """Blocks for all of them, or False."""
        if not self.has_room(requests):
            return False
        self.reserved += requests
        return True

    def unreserve(self, requests: Sequence[Request]) -> None:
        """Give reserved blocks back."""
        self.reserved = [r for r in self.reserved if r not in requests]

    def activate(self, requests: Sequence[Request], now_ns: int) -> None:
        """Their KV has come: they run."""
        self.unreserve(requests)
        self.running += requests

    def adopt(self, requests: Sequence[Request], now_ns: int) -> None:
        """Detached requests run again."""
        for r in requests:
            self.detached.remove(r)
            self.running.append(r)

    def forget(self) -> None:
        """Nothing is cached here."""

    def evacuate(self) -> list[Request]:
        """Everything is gone: the requests, waiting ones first."""
        lost = [*self.queue, *self.running]
        for loss in list(self.ledger.losses):
            self.ledger.restore(loss)
        self.queue, self.running, self.detached, self.reserved = [], [], [], []
        self.in_flight = []
        return lost

    def residents(self) -> list[Request]:
        """Requests that run, in order of admission."""
        return list(self.running)

    def waiting(self) -> list[Request]:
        """Requests that wait, head first."""
        return list(self.queue)

    def token_receivers(self, batch: Batch) -> list[Request]:
        """Nothing follows tokens."""
        return []

    def recount(self) -> list[str]:
        """Its books are lists: nothing can be wrong in them."""
        return []


class FakeLatency:
    """Each iteration takes `STEP_NS`, on each of two stages if the replica has a pipeline."""

    name = "linear"
    foreign = False
    monotone_decode = True

    def iteration_ns(self, shape: BatchShape) -> int:
        """`STEP_NS`, ns."""
        return STEP_NS

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Ends of that many iterations, ns from the start of the first."""
        return np.arange(1, steps + 1, dtype=np.int64) * STEP_NS

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """Each of two stages takes `STEP_NS`, ns."""
        return (STEP_NS, STEP_NS)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """All of it is `other`, ns."""
        return {"other": STEP_NS}


class FakeOutbox:
    """What waits to leave, and how much of it there is."""

    def __init__(self) -> None:
        self.unfinished = 0
        self.batches: list[list[Request]] = []

    def append(self, requests: list[Request], prefill_ns: int) -> None:
        """These wait here for a decode replica; their last iteration took `prefill_ns`."""
        self.unfinished += 1
        self.batches.append(requests)

    def append_first(self, split: SplitBatch) -> None:
        """KV of the first layers of a batch waits here."""
        self.unfinished += 1

    def append_second(self, split: SplitBatch, survivors: list[Request]) -> None:
        """KV of the other layers waits here, of those that go on."""
        self.unfinished += bool(survivors)

    def flush(self) -> list[list[Request]]:
        """Take back all batches that wait."""
        batches, self.batches = self.batches, []
        return batches
