"""One replica on a bench: no kernel, no cluster, time set by hand.

    scheduler = own_scheduler(ShortestFirst, blocks=100)
    bench = Bench(ReplicaState.COLOCATED, scheduler)
    bench.submit(request(1, prompt=60), request(2, prompt=10))
    ended = bench.run()

Without a scheduler the replica has a `FakeScheduler`, whose batches can be told in advance: for
tests of the replica itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final, Generic, TypeVar, cast, overload

import msgspec

from emu.config.schema import OwnSchedulerTable
from emu.kernel.clock import AGAIN, NEVER, Kernel
from emu.kernel.lock import Lock
from emu.latency.base import LatencyBackend
from emu.network.grids import Grid
from emu.process import compiled
from emu.process.prepared import prepared
from emu.replica.actions import Action, End, Move
from emu.replica.events import Cancelled, Event, Submitted
from emu.replica.flight.base import Sort
from emu.replica.replica import LOOP, Replica
from emu.replica.states import ReplicaState, move
from emu.replica.table import HANDLERS
from emu.request import Request, Status
from emu.scheduling.base import Batch, ReplicaLimits, Scheduler
from emu.testing.fakes import (
    FakeClock,
    FakeLatency,
    FakeObservers,
    FakeOutbox,
    FakeScheduler,
    request,
)

Own = TypeVar("Own", bound=Scheduler | FakeScheduler)
Made = TypeVar("Made", bound=Scheduler)
_STEPS_MAX: Final = 20
"""Actions are applied so often in one step at most."""
_IN_PLACE_MAX: Final = 1_000
"""Steps at one instant at most."""


def own_scheduler(
    kind: Callable[[OwnSchedulerTable, ReplicaLimits], Made],
    *,
    blocks: int = 100,
    max_model_tokens: int = 4096,
    stages: int = 1,
    **keys: object,
) -> Made:
    """A scheduler of a class of one's own, for a replica of `blocks` KV blocks.

    `max_model_tokens` in tokens. `keys`: of `[scheduler]`, `leap` (the replica takes promised
    iterations at once) and `block_size` (tokens; 4) among them; raises msgspec.ValidationError for
    those that it does not have. Limits that are not given are those of a small GPU.
    """
    stated = {"policy": "own:Scheduler", "block_size": 4, **keys}
    table = msgspec.convert(stated, prepared(OwnSchedulerTable)).stated()
    limits = ReplicaLimits(
        num_blocks=blocks,
        block_size=table.block_size,
        max_model_tokens=max_model_tokens,
        pipeline_stages=stages,
        leap=table.leap,
    )
    return kind(table, limits)


def _refuse_compiled() -> None:
    """A compiled replica takes no scheduler that is none."""
    if compiled.build().compiled:
        problem = "FakeScheduler needs the pure Python build; give the Bench a scheduler"
        raise TypeError(problem)


class Bench(Generic[Own]):
    """A replica, its clock, and the actor's work done by hand: state changes and the lock.

    Without a scheduler it has a `FakeScheduler`, which promises `leap` iterations at most; its
    replica has `stages` of a pipeline, and a prompt token takes one of its `blocks`.
    """

    before_fakes: ClassVar[Callable[[], None]] = staticmethod(_refuse_compiled)
    """Called when a `FakeScheduler` is to stand in for a scheduler."""

    @overload
    def __init__(
        self: Bench[FakeScheduler],
        state: ReplicaState,
        scheduler: None = None,
        *,
        leap: int = 1,
        stages: int = 1,
        blocks: int = 100,
        latency: LatencyBackend | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self, state: ReplicaState, scheduler: Own, *, latency: LatencyBackend | None = None
    ) -> None: ...

    def __init__(
        self,
        state: ReplicaState,
        scheduler: Own | None = None,
        *,
        leap: int = 1,
        stages: int = 1,
        blocks: int = 100,
        latency: LatencyBackend | None = None,
    ) -> None:
        """`state`: the replica begins in it. Without `latency` an iteration takes `STEP_NS`."""
        if scheduler is None:
            type(self).before_fakes()
            made = cast("Own", FakeScheduler(blocks, leap, stages))
        else:
            made = scheduler
        self.scheduler: Own = made
        self.clock: Kernel = FakeClock()
        self.lock = Lock(self.clock.soon, "lock")
        self.batches: list[Batch] = []
        """Batches that a scheduler of one's own has formed, in order."""
        is_own = isinstance(made, Scheduler)
        self.replica = Replica(
            0,
            self.clock,
            FakeObservers(self._formed if is_own else None),
            cast("Scheduler", made),
            latency or FakeLatency(),
            HANDLERS,
            self.lock,
            state=state,
            grid=Grid((0,), 1),
            machine=0,
            stages=made.limits.pipeline_stages if isinstance(made, Scheduler) else made.stages,
        )
        self.outbox = FakeOutbox()
        self.replica.connect(self.outbox)
        self.done: list[Action] = []
        """All actions of its steps so far."""
        self.due_ns = -1
        """When its next step is due, ns; below 0: none is (`PARK`, `AGAIN`)."""

    def _formed(self, replica_id: int, batch: Batch) -> None:
        self.batches.append(batch)

    def submit(self, *requests: Request) -> None:
        """Requests are routed to the replica now; `run` serves them."""
        for one in requests:
            self._end(self.tell(Submitted(one)))
            self._look_up(bool(self.replica.look))

    def cancel(self, one: Request) -> None:
        """The client of a request has left; the replica applies it at the next boundary."""
        self.post(Cancelled(request=one, status=Status.CANCELLED, reason="client_left"))
        self._look_up(True)

    def _look_up(self, wakes: bool) -> None:
        """The next step may be due earlier now: what an actor and its kernel find out."""
        replica, flight = self.replica, self.replica.flight
        if flight.is_cut and flight.due_ns < self.due_ns:
            self.due_ns = flight.due_ns
        if wakes:
            at_ns = replica.align(self.clock.now_ns)
            if 0 <= at_ns < self.due_ns:
                self.due_ns = at_ns
        replica.look, flight.is_cut = 0, False

    def run(self, until_ns: int = NEVER) -> list[Request]:
        """Serve until nothing is left to do, or up to that instant: requests that ended, in order.

        The status of each says how it ended. A step that is due at that very instant is taken.
        """
        ended: list[Request] = []
        if self.due_ns < 0:
            ended += self._end(self.step())
        in_place = 0
        while self.due_ns == AGAIN or 0 <= self.due_ns <= until_ns:
            if self.due_ns > self.clock.now_ns:
                self.clock.now_ns, in_place = self.due_ns, 0
                self.clock.priority_reached = self.replica.priority
            ended += self._end(self.step())
            in_place += 1
            if in_place > _IN_PLACE_MAX:
                raise AssertionError(f"time does not move on from {self.clock.now_ns} ns")
        if until_ns < NEVER:
            self.clock.now_ns = max(self.clock.now_ns, until_ns)
            self.clock.priority_reached = self.replica.priority + 1
        return ended

    @staticmethod
    def _end(actions: list[Action]) -> list[Request]:
        ended = [action for action in actions if isinstance(action, End)]
        for end in ended:
            end.request.status = end.status
        return [end.request for end in ended]

    @property
    def flies(self) -> Sort:
        """What the replica is in the middle of."""
        return self.replica.flight.sort

    def use(self, clock: Kernel) -> None:
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
        for _ in range(_STEPS_MAX):
            self.due_ns = self.replica.go_on()
            for action in self.replica.take_out():
                found.append(action)
                if isinstance(action, Move):
                    self.move(action)
            if self.due_ns != LOOP:
                self.done += found
                return found
        raise AssertionError(f"the step does not end: {found}")

    def run_until(self, at_ns: int) -> list[Action]:
        """Take steps as they are due, up to that instant: all their actions."""
        found: list[Action] = []
        while 0 <= self.due_ns <= at_ns:
            self.clock.now_ns = self.due_ns
            found += self.step()
        self.clock.now_ns = at_ns
        return found

    def move(self, action: Move) -> None:
        """Change the state, if it still is what the action expects."""
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

    def running(
        self: Bench[FakeScheduler], *ids: int, prompt: int = 4, output: int = 3
    ) -> list[Request]:
        """These run here already, with their first token; `prompt` and `output` in tokens."""
        found = []
        for request_id in ids:
            made = request(request_id, prompt, output)
            made.status, made.holder_id, made.generated_tokens = Status.RUNNING, 0, 1
            self.scheduler.running.append(made)
            found.append(made)
        return found
