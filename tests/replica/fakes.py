"""A replica without kernel and cluster: a clock that is set by hand, a scheduler of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from emu.kernel.clock import Lock
from emu.latency.base import BatchShape
from emu.network.placement import Grid
from emu.replica.actions import Action, Move
from emu.replica.events import Event
from emu.replica.flight.base import Sort
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState, move
from emu.replica.table import HANDLERS
from emu.request import Request, Status
from emu.scheduling.base import Batch, Chunk, Progress
from tests.made import takes_the_place_of_compiled_code

STEP_NS = 1_000


def request(request_id: int = 1, prompt: int = 4, output: int = 3) -> Request:
    """A request as the gateway would route it."""
    made = Request(
        request_id=request_id,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
    )
    made.row = request_id
    return made


class FakeClock:
    """The instant, set by hand."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.priority_reached = -1

    def soon(self, call: Any) -> None:
        """What a lock asks of a kernel."""
        call()


class FakeGaps:
    """Counts gaps between tokens."""

    def __init__(self) -> None:
        self.gaps = 0

    def add_run(self, ends: Any, count: int, start_ns: int = -1, first_count: int = -1) -> None:
        self.gaps += len(ends) * count

    def add_gap(self, ns: int, count: int = 1, at_ns: int = -1) -> None:
        self.gaps += count

    def add_each(self, gaps_ns: Sequence[int], counts: Sequence[int], at_ns: Sequence[int]) -> None:
        for gap_ns, count in zip(gaps_ns, counts, strict=True):
            self.add_gap(gap_ns, count)

    def add_gaps(self, gaps_ns: Iterable[int], at_ns: int = -1) -> None:
        self.gaps += len(list(gaps_ns))


class FakeObservers:
    """No one follows."""

    streams = False
    batches = None
    on_formed: Any = None
    history = None

    def __init__(self) -> None:
        self.gaps = FakeGaps()

    def on_tokens(self, replica: Any, receivers: Any) -> None:
        raise AssertionError("no one follows tokens")


class FakeLedger:
    """What memory is lost, and how much of it is free."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self.losses: dict[int, int] = {}
        self.failed: list[tuple[Request, str]] = []
        self._scheduler = scheduler
        self.pool = self

    @property
    def blocks_total(self) -> int:
        return self._scheduler.blocks_total

    @property
    def blocks_free(self) -> int:
        return self._scheduler.blocks_total - self._scheduler.blocks_used

    @property
    def lost(self) -> int:
        return sum(self.losses.values())

    def lose(self, loss: int, blocks: int) -> int:
        assert loss not in self.losses
        taken = self.losses[loss] = min(blocks, self.blocks_free)
        self._scheduler.blocks_total -= taken
        return taken

    def restore(self, loss: int) -> None:
        self._scheduler.blocks_total += self.losses.pop(loss, 0)


class FakeScheduler:
    """Whole prompts one by one, then all decodes together; a block for each token of the prompt."""

    policy = "fake"
    is_shared = False
    grows = True

    def __init__(self, blocks: int = 100, leap: int = 1, stages: int = 1) -> None:
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
        self.holds = True
        self.settled = 0
        self.ids = 0
        self.ledger = FakeLedger(self)

    @property
    def blocks_used(self) -> int:
        held = [*self.running, *self.detached, *self.reserved]
        return sum(r.prompt_tokens for r in held)

    @property
    def waiting_count(self) -> int:
        return len(self.queue)

    @property
    def running_count(self) -> int:
        return len(self.running)

    @property
    def waiting_tokens(self) -> int:
        return sum(r.prompt_tokens for r in self.queue)

    def enqueue(self, r: Request, now_ns: int) -> None:
        self.queue.append(r)

    def schedule(self, now_ns: int) -> Batch | None:
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
        batch.steps_settled = max(batch.steps_settled, steps)
        self.settled = batch.steps_settled

    def sees_in(self, batch: Batch, steps: int, start_ns: int) -> int:
        return 0

    def rotation(self, batches: Sequence[Batch]) -> None:
        """Batches do not follow each other for certain."""

    def run_on(self, batch: Batch) -> None:
        """Nothing is certain to follow."""

    def leap_holds(self, batch: Batch) -> bool:
        return self.holds

    def split(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
        members = self.in_flight[0]
        progress = self.complete(batch, steps, now_ns, longest_step_ns)
        self.in_flight.insert(0, members)
        return progress

    def complete(self, batch: Batch, steps: int, now_ns: int, longest_step_ns: int) -> Progress:
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
        return self.never

    def drop_unschedulable(self, now_ns: int) -> list[tuple[Request, str]]:
        dropped, self.unschedulable = self.unschedulable, []
        for r, _ in dropped:
            self.queue.remove(r)
        return dropped

    def cancel(self, r: Request) -> bool:
        for held in (self.queue, self.running):
            if r in held:
                held.remove(r)
                return True
        return False

    def detach(self, r: Request) -> None:
        self.running.remove(r)
        self.detached.append(r)

    def release(self, r: Request) -> None:
        if r in self.detached:
            self.detached.remove(r)

    def blocks_to_reserve(self, requests: Sequence[Request]) -> int:
        return sum(r.prompt_tokens for r in requests)

    def reserve(self, requests: Sequence[Request]) -> bool:
        if self.blocks_to_reserve(requests) > self.blocks_total - self.blocks_used:
            return False
        self.reserved += requests
        return True

    def unreserve(self, requests: Sequence[Request]) -> None:
        self.reserved = [r for r in self.reserved if r not in requests]

    def activate(self, requests: Sequence[Request], now_ns: int) -> None:
        self.unreserve(requests)
        self.running += requests

    def adopt(self, requests: Sequence[Request], now_ns: int) -> None:
        for r in requests:
            self.detached.remove(r)
            self.running.append(r)

    def evacuate(self) -> list[Request]:
        lost = [*self.queue, *self.running]
        for loss in list(self.ledger.losses):
            self.ledger.restore(loss)
        self.queue, self.running, self.detached, self.reserved = [], [], [], []
        self.in_flight = []
        return lost

    def residents(self) -> list[Request]:
        return list(self.running)

    def waiting(self) -> list[Request]:
        return list(self.queue)

    def token_receivers(self, batch: Batch) -> list[Request]:
        return []

    def recount(self) -> list[str]:
        return []


class FakeLatency:
    """Each iteration takes `STEP_NS`."""

    name = "linear"
    foreign = False
    monotone_decode = True

    def iteration_ns(self, shape: BatchShape) -> int:
        return STEP_NS

    def decode_run_ns(self, shape: BatchShape, steps: int) -> Any:
        return np.arange(1, steps + 1, dtype=np.int64) * STEP_NS

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        return (STEP_NS, STEP_NS)


class FakeOutbox:
    """What waits to leave, and how much of it there is."""

    def __init__(self) -> None:
        self.unfinished = 0
        self.batches: list[list[Request]] = []

    def flush(self) -> list[list[Request]]:
        batches, self.batches = self.batches, []
        return batches


class Bench:
    """A replica, its clock, and the actor's work done by hand: state changes and the lock."""

    def __init__(
        self,
        state: ReplicaState,
        *,
        leap: int = 1,
        stages: int = 1,
        blocks: int = 100,
        latency: FakeLatency | None = None,
    ) -> None:
        takes_the_place_of_compiled_code()
        self.clock = FakeClock()
        self.scheduler = FakeScheduler(blocks, leap, stages)
        self.lock = Lock(self.clock.soon, "lock")
        self.replica = Replica(
            0,
            self.clock,
            FakeObservers(),  # type: ignore[arg-type]
            self.scheduler,
            latency or FakeLatency(),  # type: ignore[arg-type]
            HANDLERS,
            self.lock,
            state=state,
            grid=Grid((0,), 1),
            machine=0,
            stages=stages,
        )
        self.outbox = FakeOutbox()
        self.replica.connect(self.outbox)  # type: ignore[arg-type]
        self.done: list[Action] = []
        self.due_ns = -1

    @property
    def flies(self) -> Sort:
        """What the replica is in the middle of."""
        return self.replica.flight.sort

    def use(self, clock: Any) -> None:
        """Another clock tells the instant from now on."""
        self.clock = self.replica.clock = self.replica.books.clock = clock

    def tell(self, event: Event) -> list[Action]:
        """An event happens now."""
        return self.replica.step(event)

    def post(self, event: Event) -> None:
        """An event waits for the boundary."""
        self.replica.mailbox.posted.append(event)

    def step(self) -> list[Action]:
        """The replica takes its step; `due_ns` is when the next one comes. All its actions."""
        found: list[Action] = []
        for _ in range(20):
            self.due_ns = self.replica.go_on()
            for action in self.replica.take_out():
                found.append(action)
                if isinstance(action, Move):
                    self._move(action)
            if self.due_ns != -5:
                self.done += found
                return found
        raise AssertionError(f"the step does not end: {found}")

    def run_until(self, at_ns: int) -> list[Action]:
        """Take steps as they are due."""
        found: list[Action] = []
        while 0 <= self.due_ns <= at_ns:
            self.clock.now_ns = self.due_ns
            found += self.step()
        self.clock.now_ns = at_ns
        return found

    def _move(self, action: Move) -> None:
        replica = self.replica
        if replica.state is action.expected:
            move(
                replica,
                action.expected,
                action.to,
                writer=action.writer,
                cause=action.cause,
                at_ns=self.clock.now_ns,
            )
            replica.counters.note_time(action.expected, self.clock.now_ns)
            replica.note_state()

    def running(self, *ids: int, prompt: int = 4, output: int = 3) -> list[Request]:
        """These run here already, with their first token."""
        found = []
        for request_id in ids:
            made = request(request_id, prompt, output)
            made.status, made.holder_id, made.generated_tokens = Status.RUNNING, 0, 1
            self.scheduler.running.append(made)
            found.append(made)
        return found
