"""One replica: a copy of the model on some GPUs, as a machine: events in, actions out.

Owns the replica's state, its scheduler (and through it the accounting of KV), and the iteration in
flight. Waits for nothing and acts on nothing: an event calls the handler that the table
(`table.py`) names for (state, event); the handler changes the replica and adds actions to `out`.
The actor (`actor.py`) hands in events and applies actions.

Iterations. `go_on` is the step between two instants: what has ended is completed, posted events are
applied, and the state's boundary handler begins the next thing. A run of equal decode iterations
is one leap; a change in the middle of a leap cuts it at the end of the iteration in flight, so
leaping and stepping give the same results.

Handlers stand by family of states: `serving.py`, `live_scaling.py`; by what happens: `inbound.py`,
`completion.py`, `pipelined.py`, `crash.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from operator import sub
from typing import TYPE_CHECKING, Final

from emu.errors import UnexpectedEvent
from emu.kernel.clock import AGAIN, AT_DUE, NOW, PARK, PRIORITY_REPLICA, Kernel, Lock
from emu.latency.base import BatchShape, Ends, LatencyBackend, StageLines, next_decode_shape, packed
from emu.latency.engine_steps import OutputStream
from emu.network.placement import Grid
from emu.replica.actions import Action
from emu.replica.events import CANCELS_APPLIED, LOOK, Event, Kind, KvDelivered
from emu.replica.layer_scheduler import LayerScheduler
from emu.replica.ports import (
    Observers,
    Outbox,
    OwnLeap,
    ReplicaActorPort,
    StepSink,
)
from emu.replica.prerequisites import Prerequisites, TierTraffic
from emu.replica.relay_board import RelayBoard, Relayed
from emu.replica.states import CLOSED, LOADING, ReplicaState
from emu.replica.view import NO_SIGNALS, ReplicaHandle, Signals, View
from emu.scheduling.base import Batch, Pipeline, RunOn, Scheduler, StageSpan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from emu.latency.engine_steps import Jitter


S = ReplicaState
Handler = Callable[["Replica", Event], int]
Table = dict[ReplicaState, list[Handler | None]]
STEPS_SURE: Final = 1 << 30
"""Of a promise without an end of its own."""
UNTIL_END_OF_INSTANT: Final = -6
"""A handler returns this: the next step comes when all else of this instant has happened."""
LOOP: Final = -5
"""A handler returns this: go on at once, when its actions have been applied."""

# What the replica is in the middle of (`Replica.activity`).
RESTING: Final = 0
RUNNING: Final = int(Kind.ITERATION_ENDED)
WAITING: Final = int(Kind.PREREQUISITES_LOOK)
STAGED: Final = int(Kind.STAGE_LEFT)
END_OF_INSTANT: Final = int(Kind.INSTANT_ENDED)
LAYER: Final = int(Kind.LAYER_ENDED)
RELAYED: Final = int(Kind.RELAYED_ENDED)
MEASURING: Final = int(Kind.COST_KNOWN)
_BOUNDARY: Final = int(Kind.BOUNDARY)
_CANCELLED: Final = int(Kind.CANCELLED)
_SERVES: Final = frozenset({S.COLOCATED, S.PREFILL, S.DECODE})
"""States that do one iteration after another and nothing else."""
_ROTATES: Final = frozenset({S.COLOCATED, S.DECODE})
"""States in which a batch of a pipeline that ends is just formed again."""
_LOADS: Final = LOADING | {S.NEW_PREFILL}
_WITHOUT_WEIGHTS: Final = _LOADS | {S.INACTIVE, S.FAILED}
"""States in which a replica begins without any weights."""
_APPLIES_LATER: Final = frozenset(
    {S.NEW_PREFILL, S.REFRACTORY_PREFILL, S.AUS_PREFILL, S.AUS_DECODE}
)
"""States whose boundary does not begin with what was posted (applied later, or never)."""


class Replica(ReplicaHandle):
    """State and rules of one replica."""

    # Calling a method of an object with more than 30 attributes takes three times as long without.
    # fmt: off
    __slots__ = (
        "_decode_ends", "_rotates", "_stage_lines", "_standby_ns", "activation_token_bytes",
        "activity", "applying", "batch", "board", "busy_ns", "cut_ns", "decode_context_run",
        "decode_tokens", "decodes_run", "end_ns", "ends", "expert_tokens", "first_uses", "handlers",
        "has_applied", "has_drained_enough", "is_cruising", "is_foreign", "is_metered",
        "is_monotone", "is_resuming", "is_serving", "is_watched", "iterations", "jitter",
        "layer_scheduler", "layers", "live_moves", "look", "measured_ns", "notes_formed",
        "observers", "on_stages", "out", "outbox", "own_leap", "peers", "phase", "pipeline",
        "posted", "prefill_tokens", "prerequisites", "priority", "prompts_run", "relayed",
        "relayed_cost_ns", "rest_since_ns", "rounds_seen", "runs_on", "scheduler", "segments_ready",
        "signals", "signals_blocks", "signals_ns", "standby_limit_ns", "start_ns", "steps_history",
        "stream", "table", "tells", "then", "tier_traffic", "to_measure", "waited_ns",
        "waits_here_only", "wave_wait_ns",
    )
    # fmt: on

    def __init__(
        self,
        replica_id: int,
        clock: Kernel,
        observers: Observers,
        scheduler: Scheduler,
        latency: LatencyBackend,
        table: Table,
        lock: Lock,
        *,
        state: ReplicaState,
        grid: Grid,
        machine: int,
        stages: int = 1,
        layers: int = 1,
    ) -> None:
        self.replica_id = replica_id
        self.name = f"replica {replica_id}"
        self.priority = PRIORITY_REPLICA + replica_id
        self.clock = clock
        self.observers = observers
        self.scheduler = scheduler
        self._view = View(self, scheduler)
        self.latency = latency
        self.table = table
        self.state = state
        self.handlers = table[state]
        """Row of the table for the state."""
        self.grid = grid
        self.gpus = grid.gpus
        self.machine = machine
        self.model = 0
        """Which of the served models it serves."""
        self.stages = stages
        self.history = []
        self.actor = NO_ACTOR
        self.out: list[Action] = []
        """Actions of the handler that has just run."""
        self.look = 0
        """The handler wants the replica to look up: `LOOK`; `INTERRUPT`: whatever is in flight."""
        self.cut_ns = -1
        """The handler has cut the leap in flight: its new end."""
        self.activity = RESTING
        self.applying: list[Event] = []
        """Posted events of this boundary that are not applied yet, last first."""
        self.has_applied = False
        self.posted: deque[Event] = deque()
        """The actor's mailbox."""
        self.recall_tokens_lost = 0
        """Tokens that are computed since a tier has lost them, at its last loss."""
        self.incarnation = 0
        """Grows at each crash: what was meant for an earlier life is dropped."""
        self.is_paused = False
        """The process stands still (`crash.py`), and no other actor need know."""
        self.paused_ns = -1
        self.model_loaded = state is not S.INACTIVE
        self.segments_ready = 0
        """Weights that have arrived, while they do: embedding, each layer, head."""
        self.layers = layers
        self.activation_token_bytes = 0
        self.layer_scheduler: LayerScheduler | None = None
        """Batches that are computed layer by layer (live scaling)."""
        self.phase = 0
        """How far a pass of live scaling has come (`live_scaling.py`)."""
        self.relayed: Relayed | None = None
        """What a helper computes now."""
        self.relayed_cost_ns = 0
        self.board: RelayBoard | None = None
        """Where live scaling hands over batches."""
        self.peers: Sequence[Replica] = ()
        """All replicas, by id: those between which live scaling hands over."""
        self.outbox: Outbox | None = None
        self.lock = lock
        if state in CLOSED:
            self.lock.try_acquire(self.name)
        self.is_closing = False
        """It waits for its own lock."""
        self.live_moves = 0
        """Live migrations from and to here that hold blocks."""
        self.signals: deque[Signals] | None = None
        """What was known of it lately, where it is seen late."""
        self.signals_ns = 0
        """For how long that is kept, at least."""
        self.signals_blocks = False
        """Blocks in use are part of it: each step of a leap is."""
        self.touch_log = None
        self.is_touched = True
        self.state_since_ns = clock.now_ns
        self.state_ns = {}
        self.tier_traffic: TierTraffic | None = None
        self.wave = None
        self._set_up_counters()
        self._set_up_iteration()
        self.prerequisites = Prerequisites(replica_id)
        self.note_state()

    def _set_up_counters(self) -> None:
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.busy_ns = 0
        self.iterations = 0
        observers = self.observers
        self.tells = observers.streams or observers.history is not None
        """Some observer follows single tokens."""
        self.steps_history: StepSink | None = None
        """Where every iteration is written down, if anywhere."""
        if observers.history is not None and observers.history.follows_steps:
            self.steps_history = observers.history
        self.notes_formed = self.steps_history is not None or observers.on_formed is not None
        """An observer is told of every batch that is formed."""
        self.is_watched = False
        """Something but the plain counters looks at iterations."""
        self.stream: OutputStream | None = None
        """The front end of its engine; None = a token is with its client at once."""
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
        self.rest_since_ns = -1

    def _set_up_iteration(self) -> None:
        self.slowdown = 1.0
        """Iterations take so many times longer (a straggler)."""
        self.jitter: Jitter | None = None
        """How its steps vary; None = not at all."""
        self.waited_ns = 0
        """What the batch in flight waited for its prerequisites before it ran."""
        self.wave_wait_ns = 0
        """What the batch in flight waits for other members of the group inside its layers."""
        latency = self.latency
        self._decode_ends = getattr(latency, "decode_ends", None)
        """A short cut of backends: ends of a decode run, behind a step of a given length."""
        self.is_monotone = bool(getattr(latency, "monotone_decode", False))
        """No step of a decode run is shorter than the one before it."""
        self.is_foreign = latency.foreign
        """Its costs come from outside simulated time."""
        self.first_uses = deque[int]()
        """What the next iterations take longer because their process is new."""
        self.start_process()
        self.to_measure: BatchShape | None = None
        """What a backend outside simulated time is asked for."""
        self.measured_ns = -1
        """Its answer."""
        self.then: Callable[[Replica, int], int] | None = None
        """What goes on with the answer."""
        self.is_resuming = False
        """A pause has just ended: the rest of the iteration in flight is to be waited for."""
        self.has_drained_enough = False
        """The grace of the drain under way is over: what still comes is lost."""
        self.is_cruising = False
        """One plain iteration follows another, or would if there were work. Whatever ends that
        takes its place in the queue of the instant before the replica goes on with it."""
        self.batch: Batch | None = None
        self.start_ns = 0
        self.end_ns = 0
        self.ends: Ends | None = None
        """Of a leap: when each of its iterations ends, from `start_ns` on."""
        self.on_stages: deque[tuple[list[StageSpan], Batch]] = deque()
        """Batches in flight on several stages, in order, with their spans."""
        self.pipeline = Pipeline(self.stages)
        self.own_leap: OwnLeap | None = None
        """A leap that is more than `ends` (`pipelined.py`, `wave.py`): any event ends it."""
        self.rounds_seen = 0
        """Batches of each turn in the last such leap: a guess for the next."""
        self._stage_lines = getattr(latency, "stage_lines", None)
        """A short cut of backends: costs on each stage of decode batches in a row."""
        self.is_serving = False
        self.waits_here_only = False
        """Freed blocks matter to no request but those that wait here."""
        self.runs_on = False
        self._rotates = False

    # --- the machine --------------------------------------------------------------------------
    def step(self, event: Event) -> list[Action]:
        """An event happens: the actions that follow, in order."""
        self.handle(event)
        return self.take_out()

    def handle(self, event: Event) -> None:
        """Call the handler of the table; its actions are in `out`."""
        if self.own_leap is not None:
            self.own_leap.unroll()
        handler = self.handlers[event.kind]
        if handler is None:
            raise self.unexpected(event.kind, event)
        handler(self, event)

    def take_out(self) -> list[Action]:
        """The actions that wait, to be applied now."""
        actions = self.out
        if actions:
            self.out = []
        return actions

    def unexpected(self, kind: int, event: Event | None) -> UnexpectedEvent:
        what = Kind(kind).name.lower() if event is None else repr(event)
        problem = f"{self.name} is {self.state.value} and does not expect {what}"
        return UnexpectedEvent(problem, at_ns=self.clock.now_ns, story=self.history)

    def go_on(self) -> int:
        """Take the step as far as the next actions: to be called until it is not `LOOP`.

        When the next step is due, `PARK`, `AGAIN`, or `LOOP` once the actions in `out` are applied.
        """
        while True:
            if self.applying:
                event = self.applying.pop()
                handler = self.handlers[event.kind]
                if handler is None:
                    raise self.unexpected(event.kind, event)
                handler(self, event)
                due_ns = LOOP
            elif self.activity != RESTING:
                handler = self.handlers[self.activity]
                if handler is None:
                    raise self.unexpected(self.activity, None)
                due_ns = handler(self, CANCELS_APPLIED)
            else:
                if not self.is_serving or self.is_paused or self.posted:
                    if self.is_cruising and (not self.is_serving or self.is_paused):
                        self.is_cruising = False
                        return AGAIN
                    if self.is_paused and not self.has_applied:
                        return PARK
                    if self.posted and not self.has_applied and self.state not in _APPLIES_LATER:
                        self.begin_applying()
                        continue
                self.has_applied = False
                handler = self.handlers[_BOUNDARY]
                assert handler is not None
                due_ns = handler(self, CANCELS_APPLIED)
            if due_ns != LOOP or self.out:
                return due_ns

    def begin_applying(self) -> None:
        """All that is posted now is applied at this boundary; what comes meanwhile at the next."""
        posted = list(self.posted)
        self.posted.clear()
        self.applying = posted
        self.has_applied = True
        if len(posted) == 1 and posted[0].kind != _CANCELLED:
            return
        posted.sort(key=_order)
        cancels = [index for index, event in enumerate(posted) if event.kind == _CANCELLED]
        if cancels:
            posted.insert(cancels[-1] + 1, CANCELS_APPLIED)
        posted.reverse()

    def rest(self) -> int:
        """Nothing is in flight, and there is nothing to do."""
        self.activity = RESTING
        return PARK

    def align(self, now_ns: int) -> int:
        """When the replica looks at what comes now (see `Actor.align`)."""
        activity = self.activity
        if activity == RUNNING:
            ends = self.ends
            if ends is None or self.is_paused:
                return AT_DUE
            done = self.steps_ended(ends)
            return self.end_ns if done >= len(ends) else self.start_ns + ends[done]
        if activity == RESTING:
            return AT_DUE if self.is_paused else NOW
        return NOW if activity in (STAGED, LAYER) else AT_DUE

    # --- its state ----------------------------------------------------------------------------
    def note_state(self) -> None:
        """The state has changed: which row of the table counts, and what follows for iterations."""
        state, scheduler = self.state, self.scheduler
        self.handlers = self.table[state]
        self.is_serving = state in _SERVES
        self.has_drained_enough = False
        if state in _WITHOUT_WEIGHTS:
            self.segments_ready = 0
            if state not in _LOADS:
                self.model_loaded = False
        # Where no observer follows prompts beyond their end, a batch that ends some may run on.
        is_drawn = self.observers.streams or self.observers.batches is not None
        self.runs_on = state is S.COLOCATED and not is_drawn
        self._rotates = self.stages > 1 and state in _ROTATES and not is_drawn
        self._note_watchers()
        self.waits_here_only = self.is_serving
        if self.wave is not None:
            self.wave.cut()
        # Only a replica that prefills takes from the global queue (fcfs).
        if scheduler.is_shared:
            scheduler.pulls = state is S.PREFILL
            self.waits_here_only = self.is_serving and not scheduler.pulls

    def _note_watchers(self) -> None:
        self.is_watched = (
            self.tells
            or self.is_metered
            or self.steps_history is not None
            or self.signals is not None
            or self.observers.batches is not None
        )

    def meter(self) -> None:
        """From now on, count what a model of power asks for."""
        self.is_metered = True
        self._note_watchers()

    def note_time(self, before: ReplicaState, at_ns: int) -> None:
        """Add the time since the last change to the account of a state."""
        self.state_ns[before] = self.state_ns.get(before, 0) + at_ns - self.state_since_ns
        self.state_since_ns = at_ns

    def start_process(self) -> None:
        """A fresh process: its first iterations pay for first uses."""
        self.first_uses = deque(getattr(self.latency, "first_use_ns", ()))

    def connect(self, outbox: Outbox) -> None:
        """Where the KV of prompts that end here goes."""
        self.outbox = outbox

    def keep_signals(self, delay_ns: int, *, with_blocks: bool) -> None:
        """From now on keep what was known of it for so long; `with_blocks`: their use, too."""
        if self.signals is None:
            self.signals = deque([NO_SIGNALS])
            self._note_watchers()
        self.signals_ns = max(self.signals_ns, delay_ns)
        self.signals_blocks = self.signals_blocks or with_blocks

    def note_signal(self) -> None:
        """Write down what a router with late signals will see."""
        if self.signals is not None:
            self._note_signal(self.signals, self.clock.now_ns)

    def _note_signal(self, signals: deque[Signals], at_ns: int) -> None:
        scheduler = self.scheduler
        signals.append(
            (
                at_ns,
                scheduler.waiting_count,
                scheduler.running_count,
                scheduler.waiting_tokens,
                scheduler.blocks_used,
            )
        )
        since_ns = at_ns - self.signals_ns
        while len(signals) > 1 and signals[1][0] <= since_ns:
            signals.popleft()

    def settle_steps(self, batch: Batch, steps: int, start_ns: int, ends: Ends) -> None:
        """Bring the books up to `steps` started iterations of a leap that began at `start_ns`."""
        if self.signals is None or not self.signals_blocks:
            self.scheduler.settle(batch, steps)
            return
        for step in range(batch.steps_settled + 1, steps + 1):  # as stepping would have seen it
            self.scheduler.settle(batch, step)
            self._note_signal(self.signals, start_ns + ends[step - 2])

    def forget_cache(self) -> bool:
        """Forget cached prefixes, of which none is in use; False if it has no prefix cache."""
        pool = getattr(self.scheduler, "pool", None)
        if pool is None:  # Vidur's schedulers only count
            return False
        pool.clear()
        return True

    def note_formed(self, batch: Batch, first_layer: int = 0) -> None:
        """Tell of a batch that is formed; others have run the layers before."""
        history, on_formed = self.steps_history, self.observers.on_formed
        if on_formed is not None:
            on_formed(self.replica_id, batch)
        if history is not None:
            members = self.scheduler.members(batch)
            history.formed(self.clock.now_ns, self.replica_id, batch, members, first_layer)

    # --- what others may see ------------------------------------------------------------------
    @property
    def tokens_run(self) -> int:
        """Tokens whose KV iterations have computed."""
        return self.prompts_run + self.decodes_run

    @property
    def has_batches_in_flight(self) -> bool:
        """Some batch is on the pipeline's stages, or about to be."""
        return bool(self.on_stages) or self.prerequisites.held is not None

    @property
    def has_batch(self) -> bool:
        """A batch is in flight, or about to be."""
        return self.batch is not None or self.has_batches_in_flight

    @property
    def stale_recalls(self) -> list[int]:
        """Lower tiers that a batch in flight reads KV from, and that have lost it."""
        return self.prerequisites.stale_recalls(self.tier_traffic)

    @property
    def arrived(self) -> list[KvDelivered]:
        """Deliveries of KV that wait for the boundary."""
        return [event for event in self.pending() if isinstance(event, KvDelivered)]

    def pending(self) -> Sequence[Event]:
        """Posted events that are not applied yet."""
        return [*reversed(self.applying), *self.posted] if self.applying else self.posted

    @property
    def unfinished_migrations(self) -> int:
        """Batches whose KV waits here or leaves from here; its outbound side counts them."""
        return 0 if self.outbox is None else self.outbox.unfinished

    @property
    def busy_times(self) -> tuple[int, int]:
        """(time in which it ran something, the same summed over its GPUs), ns."""
        if self.stages == 1:
            return self.busy_ns, self.busy_ns * len(self.gpus)
        stages = self.pipeline.busy_ns
        return max(stages), sum(stages) * (len(self.gpus) // self.stages)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or arrives here."""
        scheduler = self.scheduler
        return (
            self.batch is None
            and not self.has_batches_in_flight
            and not self.arrived
            and not self.live_moves
            and scheduler.running_count == 0
            and scheduler.waiting_count == 0
        )

    @property
    def tokens_produced(self) -> tuple[int, int]:
        """(prefill, decode) tokens computed so far, finished iterations of a leap included."""
        done = self.settle()
        prefill, decode = self.prefill_tokens, self.decode_tokens
        batch = self.batch
        if done == 0 or batch is None:
            return prefill, decode
        run_on = batch.run_on
        if run_on is None:
            return prefill, decode + done * batch.shape.decode_count
        opening = run_on.opening
        assert opening is not None
        decode += opening.decode_tokens + (done - 1) * run_on.shape.decode_count
        return prefill + opening.prefill_tokens, decode

    # --- rests, for the model of power ----------------------------------------------------------
    def note_rest(self, now_ns: int) -> None:
        """A rest ends now."""
        self._standby_ns += min(now_ns - self.rest_since_ns, self.standby_limit_ns)
        self.rest_since_ns = -1

    def standby_time_ns(self, end_ns: int) -> int:
        """Time up to `end_ns` in which nothing ran, each rest counted up to the limit."""
        total = self._standby_ns
        if self.rest_since_ns >= 0:
            total += min(end_ns - self.rest_since_ns, self.standby_limit_ns)
        return total

    # --- the iteration in flight: how far it is -------------------------------------------------
    def settle(self) -> int:
        """Bring the books up to now in the middle of a leap; iterations of it that have ended."""
        if self.own_leap is not None:
            self.own_leap.settle()
        ends, batch = self.ends, self.batch
        if ends is None or batch is None:
            return 0
        done = self.steps_ended(ends)
        steps = done + 1 if done < batch.max_steps else done
        if steps > batch.steps_settled:
            self.settle_steps(batch, steps, self.start_ns, ends)
        return done

    def steps_ended(self, ends: Ends) -> int:
        """Iterations of the leap in flight that have ended by now.

        At the very end of one the order of priorities says whether it has been handled: stepping,
        the next one would be under way if our turn of this instant has passed.
        """
        clock = self.clock
        elapsed_ns = clock.now_ns - self.start_ns
        if clock.priority_reached > self.priority:
            elapsed_ns += 1
        return bisect_left(ends, elapsed_ns)

    def iteration_end_ns(self, done: int) -> int:
        """When the iteration in flight ends, now if none is; `done` of a leap have ended."""
        if self.batch is None:
            return self.clock.now_ns
        ends = self.ends
        if ends is None:
            return max(self.clock.now_ns, self.end_ns)
        if done >= len(ends):  # in a group, the next one may not have started
            return max(self.clock.now_ns, self.end_ns)
        return self.start_ns + ends[done]

    # --- the iteration in flight: its beginning and its end --------------------------------------
    @property
    def is_simple(self) -> bool:
        """An iteration needs nothing but the scheduler and the latency backend."""
        return not (
            self.is_foreign
            or self.first_uses
            or self.stages > 1
            or self.tier_traffic is not None
            or self.wave is not None
        )

    @property
    def may_rotate(self) -> bool:
        """Batches that follow each other on the stages need nothing but scheduler and backend."""
        return (
            self._rotates
            and not self.latency.foreign
            and not self.first_uses
            and not self.is_paused
            and self.tier_traffic is None
            and self.wave is None
            and self.signals is None
            and self.steps_history is None
            and self.expert_tokens is None
        )

    @property
    def has_lines(self) -> bool:
        """Costs of decode batches in a row may be asked for as lines, here and now."""
        return self._stage_lines is not None and self.slowdown == 1.0

    def stage_lines(self, shape: BatchShape) -> StageLines | None:
        """Costs of decode batches in a row, if they are lines."""
        assert self._stage_lines is not None
        lines: StageLines | None = self._stage_lines(shape)
        return lines

    def stage_run_ns(self, shape: BatchShape, steps: int) -> list[list[int]]:
        """Costs of decode batches in a row, here and now: those on each stage."""
        stage_ns = self.latency.stage_ns
        each = [stage_ns(next_decode_shape(shape, step)) for step in range(steps)]
        runs = [list(run) for run in zip(*each, strict=True)]
        if self.slowdown != 1.0:
            runs = [[int(cost_ns * self.slowdown) for cost_ns in run] for run in runs]
        return runs

    @property
    def may_leap_in_waves(self) -> bool:
        """What its scheduler promises holds while the others of its group go on, too."""
        return (
            self.stages == 1
            and not self.latency.foreign
            and self.tier_traffic is None
            and self.signals is None
            and self.steps_history is None
            and self.expert_tokens is None
        )

    @property
    def paces(self) -> int:
        """For so many waves it surely keeps pace with batches of one token, if nothing comes.

        What waits without a batch may have to fail as soon as the member rests.
        """
        is_sure = self.is_serving and not (self.is_metered or self.first_uses)
        if self.scheduler.waiting_count or self.scheduler.ledger.failed:
            return 1
        return STEPS_SURE if is_sure else 1

    def awaits(self, batch: Batch, steps: int = 0) -> bool:
        """Start what the batch needs before it can run. False: it can run at once.

        `steps`: for so many waves of its group its like is certain (0 = for its steps).
        """
        return self.prerequisites.start(
            batch, self.tier_traffic, self.wave, self.actor, self.incarnation, steps
        )

    def begin(self, batch: Batch, measured_ns: int = 0) -> int:
        """The iteration, or leap, starts to run: when it ends."""
        now_ns = self.clock.now_ns
        self.activity = RUNNING
        leap = self.own_leap
        if leap is not None:
            if not self.posted:
                return leap.begin()
            leap.unroll()
        if batch.max_steps > 1:
            if self._decode_ends is not None and self.slowdown == 1.0:
                ends: Ends = self._decode_ends(batch.shape, batch.max_steps, -1)
            else:
                ends = self._varied_ends(batch.shape, batch.max_steps, -1)
            self.ends = ends
            if not self.is_cruising:
                self.is_cruising = self.is_simple
            end_ns = self.end_ns = now_ns + ends[-1]
            return end_ns
        cost_ns = measured_ns or self.latency.iteration_ns(batch.shape)
        if self.slowdown != 1.0:
            cost_ns = int(cost_ns * self.slowdown)
        if self.jitter is not None:
            cost_ns = self.jitter.step(self.iterations, cost_ns)
        if not self.is_cruising:
            if self.first_uses:
                cost_ns += self.first_uses.popleft()
            self.is_cruising = self.is_simple
            cost_ns += self.wave_wait_ns
        end_ns = self.end_ns = now_ns + cost_ns
        return end_ns

    def run_on(self, batch: Batch) -> int:
        """What is certain to follow the end of the batch's prompts is appended to it: its end."""
        if self.signals is not None:
            return self.end_ns
        batch.first_end_ns = self.end_ns
        run_on: RunOn | None = self.scheduler.run_on(batch)
        if run_on is not None:
            first_ns, steps = self.end_ns - self.start_ns, batch.max_steps - 1
            if self._decode_ends is not None and self.slowdown == 1.0:
                ends: Ends = self._decode_ends(run_on.shape, steps, first_ns)
            else:
                ends = self._varied_ends(run_on.shape, steps, first_ns)
            self.ends = ends
            self.end_ns = self.start_ns + ends[-1]
        return self.end_ns

    def _varied_ends(self, shape: BatchShape, steps: int, first_ns: int) -> Ends:
        """Ends of a decode run without short cuts, behind a step of `first_ns` (-1 = none)."""
        import numpy as np

        later = self.decode_run_ns(shape, steps)
        if self.jitter is not None:
            later = self.jitter.run(self.iterations + (1 if first_ns >= 0 else 0), later)
        if first_ns >= 0:
            later = np.concatenate((np.array([first_ns], dtype=np.int64), later + first_ns))
        return packed(later)

    def set_jitter(self, jitter: Jitter) -> None:
        """Steps vary from now on; no step of a run is known to be the longest."""
        self.jitter = jitter
        self._decode_ends = None
        self.is_monotone = False

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Ends of a decode run here and now, from its start."""
        ends = self.latency.decode_run_ns(shape, steps)
        if self.slowdown != 1.0:
            import numpy as np

            ends = np.cumsum((np.diff(ends, prepend=0) * self.slowdown).astype(np.int64))
        return ends

    def decode_costs_ns(self, shape: BatchShape, steps: int) -> list[int]:
        """What each of so many decode iterations takes here and now, without jitter."""
        ends: Ends
        if self._decode_ends is not None and self.slowdown == 1.0:
            ends = self._decode_ends(shape, steps, -1)
        else:
            ends = packed(self.decode_run_ns(shape, steps))
        return [ends[0], *map(sub, ends[1:], ends)]

    def cost_ns(self, shape: BatchShape) -> int:
        """Duration of an iteration here and now, from a backend inside simulated time."""
        cost_ns = self.latency.iteration_ns(shape)
        return cost_ns if self.slowdown == 1.0 else int(cost_ns * self.slowdown)

    # --- the iteration in flight: changes in the middle of it ------------------------------------
    def puts_off(self, done: int) -> bool:
        """A leap ends before it would see the request that has just come.

        False if that is not known without settled books.
        """
        batch, ends = self.batch, self.ends
        if batch is None or ends is None:
            return False
        start_ns = self.start_ns
        steps = self.scheduler.sees_in(batch, done + 1, start_ns + (ends[done - 1] if done else 0))
        if steps == 0:
            return False
        self._cut(ends, steps)
        return True

    def _cut(self, ends: Ends, steps: int) -> None:
        """The leap in flight takes so many steps and no more."""
        if steps < len(ends):
            self.ends = ends[:steps]
            self.end_ns = self.cut_ns = self.start_ns + ends[steps - 1]

    def changed(self, done: int) -> None:
        """The settled books have changed: cut a leap that no longer holds, look up if idle."""
        batch, ends = self.batch, self.ends
        if ends is not None and batch is not None:
            batch.last_start_ns = self.start_ns + (ends[done - 1] if done else 0)
            if self.scheduler.leap_holds(batch):
                self._cut(ends, batch.max_steps)  # it may hold, but not so long
                return
        self.look = self.look or LOOK


def _order(event: Event) -> int:
    return event.order


class _NoActor:
    """A replica without an actor, as tests of the machine have it: messages go nowhere."""

    def tell(self, event: Event) -> None:
        raise AssertionError(f"the replica has no actor: {event}")

    def post(self, event: object) -> None:
        raise AssertionError(f"the replica has no actor: {event}")

    def reserve(self, requests: Sequence[object]) -> bool:
        raise AssertionError("the replica has no actor")


NO_ACTOR: Final[ReplicaActorPort] = _NoActor()  # type: ignore[assignment]
