"""One replica: a copy of the model on some GPUs, driven by an actor.

Owns the replica's state, its scheduler (and through it the KV books), its lock against inbound
KV, and the iteration in flight. The loop takes one turn after another; which turn is a table by
state (`emu/replica/turns.py`). Others talk to it through short methods, most of them in
`emu/replica/doors.py`.

Iterations. `_execute` sleeps through one iteration, or through a leap of many equal decode
iterations. A poke in the middle of a leap wakes the replica at the end of the iteration in
flight, so leaping and stepping give the same results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from emu.kernel.clock import PARK, RANK_REPLICA, WAKE
from emu.latency.base import BatchShape, LatencyBackend
from emu.latency.frontend import OutputStream
from emu.network.placement import Grid
from emu.replica import doors
from emu.replica.inflight import InFlight
from emu.replica.obstacles import Obstacles, never
from emu.replica.outcome import complete, end_part, longest_of, note_signal
from emu.replica.staged import launch
from emu.replica.states import (
    CLOSED,
    ReplicaState,
    Writer,
    move,
    try_move,
)
from emu.replica.tiering import TierTraffic
from emu.replica.wave import SERVES, WaveGroup
from emu.replica.world import Handoff, World
from emu.replica.zag import Zag
from emu.request import Request, Status
from emu.scheduling.base import Batch, Scheduler
from emu.scheduling.stages import Pipeline, StageSpan

S = ReplicaState
_SERVES: Final = frozenset({S.COLOCATED, S.PREFILL, S.DECODE})
"""States whose turn is one iteration after another (`serve` in `emu/replica/turns.py`)."""


class Replica(InFlight):
    """State and actor of one replica."""

    def __init__(
        self,
        replica_id: int,
        world: World,
        scheduler: Scheduler,
        latency: LatencyBackend,
        *,
        state: ReplicaState,
        grid: Grid,
        machine: int,
        stages: int = 1,
    ) -> None:
        self.replica_id = replica_id
        self.name = f"replica {replica_id}"
        self.world = world
        self.kernel = world.kernel
        self.scheduler = scheduler
        super().__init__(latency, RANK_REPLICA + replica_id)
        self._is_monotone = bool(getattr(latency, "monotone_decode", False))
        self.state = state
        self.grid = grid
        self.gpus = grid.gpus
        self.machine = machine
        self.stages = stages
        self.story: list[str] = []
        self.incarnation = 0
        """Grows at each crash: what was meant for an earlier life is dropped."""
        self.is_paused = False
        """Stopped, or frozen without anybody knowing (`emu/replica/life.py`)."""
        self.paused_ns = -1
        self.start_process()
        self.model_loaded = state is not S.INACTIVE
        self.segments_ready = 0
        """Weights that have arrived, while they do: embedding, each layer, head."""
        self.layers = 1
        self.activation_token_bytes = 0
        self.zag: Zag | None = None
        """Batches that are computed layer by layer (live scaling)."""
        self.inbox = self.kernel.mailbox(self.name, self.rank)
        self.lock = self.kernel.lock(f"kv lock of {self.name}")
        if state in CLOSED:
            self.lock.try_acquire(self.name)
        self.handoff: Handoff | None = None
        self.arrived: deque[list[Request]] = deque()
        """Migrated batches, KV complete, that wait to join the running set."""
        self.cancels: list[tuple[Request, Status, str]] = []
        self.stops: list[tuple[Request, Callable[[], None]]] = []
        self.live_moves = 0
        """Live migrations from and to here that hold blocks."""
        self.jobs: list[Callable[[], None]] = []
        """What else is to be done after the iteration in flight (faults)."""
        self.unfinished_migrations = 0
        self.signals: deque[tuple[int, int, int, int, int]] | None = None
        """History of (time, waiting, running, waiting tokens, blocks) if the router's are stale."""
        self.touch_log: list[Replica] | None = None
        """Where to say that the queues have changed, if a router keeps an order of loads."""
        self.is_touched = True
        """It is in that log already, or nobody keeps one."""
        self.busy_ns = 0
        self.iterations = 0
        self.state_since_ns = self.kernel.now_ns
        self.state_ns: dict[ReplicaState, int] = {}
        self._note_state()
        self._is_closing = False
        self._on_stages: deque[tuple[list[StageSpan], Batch]] = deque()
        """Batches in flight on several stages, in order, with their spans."""
        self.pipeline = Pipeline(stages)
        self.tier_traffic: TierTraffic | None = None
        self.obstacles = Obstacles(self)
        self.stream: OutputStream | None = None
        """The front end of its engine; None = a token is with its client at once."""
        self.tells = world.streams or world.history is not None
        """Somebody follows single tokens."""
        self.is_metered = False
        """The next figures are asked for (a model of power), and counted."""
        self.prompts_run = 0
        """Tokens of chunks whose KV iterations have computed."""
        self.decodes_run = self.decode_context_run = 0
        """Plain decodes that iterations have run, and the sum of their contexts."""
        self.expert_tokens: NDArray[np.int64] | None = None
        """Tokens that each expert has computed in a layer; None where loads are even."""
        self.standby_limit_ns = 0
        """A GPU that rests is on standby for so long, then idle."""
        self._standby_ns = 0
        """Time on standby, in rests that have ended."""
        self._rest_since_ns = -1
        self.wave: WaveGroup | None = None

    # --- what others may do (first, what is in `emu/replica/doors.py`) --------------------------
    submit = doors.submit
    cancel = doors.cancel
    stop = doors.stop
    resume = doors.resume
    deliver = doors.deliver
    reserve = doors.reserve
    unreserve = doors.unreserve
    release = doors.release
    take_waiting = doors.take_waiting
    apply_requests = doors.apply_requests
    start_closing = doors.start_closing
    open = doors.open

    def move(self, to: ReplicaState, *, writer: Writer, cause: str) -> None:
        """Change the state from what it is now (`states.move`)."""
        move(self, self.state, to, writer=writer, cause=cause, at_ns=self.kernel.now_ns)

    def try_move(self, expected: S, to: S, *, writer: Writer, cause: str) -> bool:
        """Change the state if it still is what the writer believes."""
        return try_move(self, expected, to, writer=writer, cause=cause, at_ns=self.kernel.now_ns)

    def on_moved(self, before: ReplicaState, writer: Writer, cause: str, at_ns: int) -> None:
        """Books of time by state; wake the loop and everybody who watches."""
        self.state_ns[before] = self.state_ns.get(before, 0) + at_ns - self.state_since_ns
        self.state_since_ns = at_ns
        self._note_state()
        if self.wave is not None and self.state not in SERVES:
            self.wave.withdraw(self)
        self.world.on_moved(self, before, writer, cause, at_ns)
        self.inbox.poke()

    def start_process(self) -> None:
        """A fresh process: its first iterations pay for first uses."""
        self.first_uses = deque(getattr(self.latency, "first_use_ns", ()))

    def set_slowdown(self, slowdown: float) -> None:
        """From the next iteration on, each takes so many times longer."""
        self.slowdown = slowdown
        self.inbox.poke()

    def touch(self) -> None:
        """The numbers of waiting and running requests may have changed: a router looks again."""
        if not self.is_touched and self.touch_log is not None:
            self.is_touched = True
            self.touch_log.append(self)

    def _note_state(self) -> None:
        """Only a replica that prefills takes from the global queue (fcfs)."""
        self._is_serving = self.state in _SERVES
        # Where nobody follows prompts beyond their end, a batch that ends some may run on.
        is_watched = self.world.streams or self.world.batches is not None
        self._runs_on = self.state is S.COLOCATED and not is_watched
        # Freed blocks then matter to nobody but requests that wait here.
        self._waits_here_only = self._is_serving
        if self.scheduler.is_shared:
            self.scheduler.pulls = self.state is S.PREFILL
            self._waits_here_only = self._is_serving and not self.scheduler.pulls

    # --- what others may see ------------------------------------------------------------------
    @property
    def tokens_run(self) -> int:
        """Tokens whose KV iterations have computed."""
        return self.prompts_run + self.decodes_run

    @property
    def has_batches_in_flight(self) -> bool:
        """Some batch is on the pipeline's stages, or about to be."""
        return bool(self._on_stages) or self.obstacles.held is not None

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or arrives here."""
        scheduler = self.scheduler
        return (
            self._batch is None
            and not self.has_batches_in_flight
            and not self.arrived
            and not self.live_moves
            and scheduler.running_count == 0
            and scheduler.waiting_count == 0
        )

    # --- iterations ---------------------------------------------------------------------------
    async def iterate(self) -> bool:
        """Form and execute one batch (or leap). False if there was nothing to run."""
        batch = self.obstacles.held
        if batch is not None:
            if self.obstacles.left:
                return False
            self.obstacles.held = None
            await launch(self, batch)
            return True
        batch = self.scheduler.schedule(self.kernel.now_ns)
        self.touch()
        if self.signals is not None:
            note_signal(self)  # it may have admitted or preempted
        if self.tier_traffic is not None:
            self.tier_traffic.write_through()
        if batch is None:
            wave = self.wave
            if wave is None or not wave.wants(self) or len(self._on_stages) >= self.stages:
                if self._rest_since_ns < 0 and self.iterations and not self._on_stages:
                    self._rest_since_ns = self.kernel.now_ns
                return False
            batch = wave.dummy(self.kernel.now_ns)
        if self._rest_since_ns >= 0:
            self._note_rest(self.kernel.now_ns)
        if self.first_uses or (self.scheduler.waiting_count and not self._is_serving):
            batch.max_steps = 1  # who shuts down gives back what it has just preempted
        if self.stages == 1:
            await self._execute(batch)
        elif self.obstacles.meets(batch):
            self.obstacles.held = batch
        else:
            await launch(self, batch)
        return True

    def _note_rest(self, now_ns: int) -> None:
        self._standby_ns += min(now_ns - self._rest_since_ns, self.standby_limit_ns)
        self._rest_since_ns = -1

    def standby_time_ns(self, end_ns: int) -> int:
        """Time up to `end_ns` in which nothing ran, each rest counted up to the limit."""
        total = self._standby_ns
        if self._rest_since_ns >= 0:
            total += min(end_ns - self._rest_since_ns, self.standby_limit_ns)
        return total

    async def _execute(self, batch: Batch) -> None:
        incarnation = self.incarnation
        # Its end is not known yet; that of the leap before, if it was cut, may still lie ahead.
        self._start_ns = self._end_ns = self.kernel.now_ns
        self._batch = batch
        if batch.max_steps == 1 and self.obstacles.meets(batch):
            await self.obstacles.wait(incarnation)
            if self.incarnation != incarnation:
                return
            self.busy_ns -= self.kernel.now_ns - self._start_ns
        measured_ns = 0
        if self.latency.foreign:
            measured_ns = await self.latency.measure(batch.shape)  # type: ignore[attr-defined]
            if self.incarnation != incarnation:
                return
        self._begin(batch, measured_ns)
        if self._takes_turns():
            await self.inbox.take_turns(self._turn, self._end_ns, self._boundary)
        else:
            await self.inbox.wait(self._end_ns, self._boundary)
        if self.is_paused:
            await self._sit_out()
        if self.incarnation == incarnation and self._batch is not None:
            self._end()

    def _takes_turns(self) -> bool:
        """One iteration after another needs nothing but the scheduler and the latency backend."""
        waits = self.latency.foreign or self.first_uses
        return not waits and self.tier_traffic is None and self.wave is None

    def _turn(self) -> int:
        """End the batch and begin the next as `serve` does, without waking the actor.

        When that ends, or that there is nothing to do (`PARK`), or more than this (`WAKE`).
        """
        if self._batch is not None:
            self._end()
        if self._is_serving and (self.arrived or self.cancels or self.stops or self.jobs):
            self.apply_requests()
        if not self._is_serving or self.is_paused:
            return WAKE
        now_ns = self.kernel.now_ns
        batch = self.scheduler.schedule(now_ns)
        if not self.is_touched:
            self.touch()
        if self.signals is not None:
            note_signal(self)  # it may have admitted or preempted
        if batch is None:
            if self._rest_since_ns < 0:
                self._rest_since_ns = now_ns
            hopeless = self.scheduler.drop_unschedulable(now_ns)
            self.touch()
            for request, reason in hopeless:
                self.world.terminal(request, Status.FAILED, reason)
            if hopeless:
                self.world.on_capacity(self)
            return WAKE if hopeless else PARK
        if self._rest_since_ns >= 0:
            self._note_rest(now_ns)
        self._start_ns = now_ns
        self._batch = batch
        self._begin(batch)
        if self._runs_on and batch.chunks and self.signals is None:
            batch.first_end_ns = self._end_ns
            run_on = self.scheduler.run_on(batch)
            if run_on is not None:
                self._run_on(batch, run_on)
        return self._end_ns

    def _end(self) -> None:
        """The batch in flight ends now, or the part of its leap that was not cut off."""
        batch, ends, start_ns = self._batch, self._ends, self._start_ns
        assert batch is not None
        now_ns = self.kernel.now_ns
        self._ends = self._batch = None
        if ends is None:  # a single iteration, or what a pause has left of a leap
            complete(self, batch, 1, start_ns, None, now_ns - start_ns)
            return
        if now_ns != self._end_ns:
            ends = ends[: int(ends.searchsorted(now_ns - start_ns, "right"))]
        steps = len(ends)
        if steps == 1:
            longest_ns = now_ns - start_ns
        else:
            before_ns = ends.item(-2)
            if batch.run_on is None:  # else it has been known since the beginning
                batch.first_end_ns = start_ns + ends.item(0)
            batch.last_start_ns = start_ns + before_ns
            is_last = self._is_monotone
            longest_ns = now_ns - start_ns - before_ns if is_last else longest_of(ends, batch)
        complete(self, batch, steps, start_ns, ends, longest_ns)

    async def _sit_out(self) -> None:
        """Through a pause in the middle of an iteration, and the rest of the iteration.

        Who was parked in `take_turns` has no iteration in flight, and nothing to wait for.
        """
        incarnation = self.incarnation
        while self.is_paused:
            await self.stand_still()
            if self.incarnation == incarnation and self._batch is not None:
                await self.inbox.wait(self._end_ns, self._boundary)

    async def stand_still(self) -> None:
        """Until the end of a pause (or a crash), whatever happens meanwhile."""
        while self.is_paused:
            await self.inbox.wait(None, never)

    async def cost_ns(self, shape: BatchShape) -> int:
        """Duration of an iteration here and now."""
        if self.latency.foreign:
            cost_ns = await self.latency.measure(shape)  # type: ignore[attr-defined]
        else:
            cost_ns = self.latency.iteration_ns(shape)
        return cost_ns if self.slowdown == 1.0 else int(cost_ns * self.slowdown)

    end_part = end_part  # what its part of a batch brought about (`emu/replica/outcome.py`)

    async def run_alone(self, batch: Batch, cost_ns: int) -> bool:
        """Sleep through one iteration of a known cost. False: the replica crashed meanwhile."""
        self._batch, incarnation = batch, self.incarnation
        self._start_ns = self.kernel.now_ns
        self._end_ns = self._start_ns + cost_ns
        await self.inbox.wait(self._end_ns, self._boundary)
        if self.is_paused:
            await self._sit_out()
        if self.incarnation != incarnation:
            return False
        self._batch = None
        return True
