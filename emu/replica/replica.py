"""One replica: a copy of the model on some GPUs, as a machine: events in, actions out.

Owns the replica's state, its scheduler (and through it the accounting of KV), and what is in
flight. Waits for nothing and acts on nothing: an event calls the handler that the table
(`table.py`) names for (state, event); the handler changes the replica and adds actions to `out`.
The actor (`actor.py`) hands in events and applies actions.

Iterations. `go_on` is the step between two instants: what has ended is completed, posted events are
applied, and the state's boundary handler begins the next thing, a flight (`flight/`). A run of
equal decode iterations is one flight; a change in the middle of it cuts it at the end of the
iteration in flight, so leaping and stepping give the same results.

Handlers stand by family of states: `serving.py`, `live_scaling.py`; by what happens: `inbound.py`,
`orders.py`, `posted.py`, `crash.py`. What iterations cost, what they did, and what is told of them:
`pace.py`, `counters.py`, `watch.py`; `books.py` enters what an iteration has done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from emu.errors import UnexpectedEvent
from emu.kernel.clock import AGAIN, AT_DUE, NOW, PARK, Kernel
from emu.kernel.lock import Lock
from emu.latency.abilities import Abilities
from emu.latency.base import LatencyBackend
from emu.network.grids import Grid
from emu.replica.actions import Action, End, FreeCapacity
from emu.replica.books import Books
from emu.replica.counters import Counters
from emu.replica.events import CANCELS_APPLIED, LOOK, Event, Kind, KvDelivered
from emu.replica.flight.base import APPLY, BETWEEN, IDLE, Flight
from emu.replica.flight.launchers import FirstUses, Foreign, Grouped, Single, Tiered
from emu.replica.flight.member import Member
from emu.replica.flight.onto_stages import OntoStages
from emu.replica.flight.staged import Staged
from emu.replica.flight.starters import Composed, Plain, Starter
from emu.replica.flight.table import may_fly
from emu.replica.gate import Gate
from emu.replica.mailbox import Mailbox
from emu.replica.pace import Pace
from emu.replica.ports import GroupWave, Observers, Outbox, ReplicaActorPort
from emu.replica.relay_board import RelayBoard
from emu.replica.states import CLOSED, LOADING, PREFILL_TYPE, WAVES, ReplicaState
from emu.replica.tier_traffic import TierTraffic
from emu.replica.view import InFlight, ReplicaHandle, Signals, View, Viewed
from emu.replica.watch import Watch
from emu.replica.weights import Weights
from emu.request import Status
from emu.scheduling.base import Scheduler

if TYPE_CHECKING:
    from emu.replica.flight.awaiting import Launcher


S = ReplicaState
Handler = Callable[["Replica", Event], int]
Table = dict[ReplicaState, list[Handler | None]]
LOOP: Final = -5
"""A handler returns this: go on at once, when its actions have been applied."""
NOTHING: Final = -8
"""`Replica.begin_next`: no batch could be formed."""

_BOUNDARY: Final = int(Kind.BOUNDARY)
_SERVES: Final = frozenset({S.COLOCATED, S.PREFILL, S.DECODE})
"""States that do one iteration after another and nothing else."""
_ROTATES: Final = frozenset({S.COLOCATED, S.DECODE})
"""States in which a batch of a pipeline that ends is just formed again."""
_HANDS_OFF: Final = frozenset(PREFILL_TYPE | {S.SHUTTING_PREFILL})
"""States in which requests go on elsewhere when their prompt has ended."""
_LOADS: Final = LOADING | {S.NEW_PREFILL}
_WITHOUT_WEIGHTS: Final = _LOADS | {S.INACTIVE, S.FAILED}
"""States in which a replica begins without any weights."""
_APPLIES_LATER: Final = frozenset(
    {S.NEW_PREFILL, S.REFRACTORY_PREFILL, S.AUS_PREFILL, S.AUS_DECODE}
)
"""States whose boundary does not begin with what was posted (applied later, or never)."""


class Relaying:
    """What live scaling knows of the replicas between which it hands over batches."""

    __slots__ = ("activation_token_bytes", "board", "layers", "peers")

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.activation_token_bytes = 0
        self.board: RelayBoard | None = None
        """Where batches are handed over."""
        self.peers: Sequence[Replica] = ()
        """All replicas, by id."""


class Replica(Viewed):
    """State and rules of one replica."""

    handlers: list[Handler | None]
    """Row of the table for the state."""
    out: list[Action]
    """Actions of the handler that has just run; one list for all of its life."""
    look: int
    """The handler wants the replica to look up: `LOOK`; `INTERRUPT`: whatever is in flight."""
    staged: Staged | None
    """Its pipeline."""
    member: Member | None
    """Its place in a data-parallel group."""
    live_moves: int
    """Live migrations from and to here that hold blocks."""
    has_drained_enough: bool
    """The grace of the drain under way is over: what still comes is lost."""
    is_serving: bool
    """It does one iteration after another and nothing else."""
    flight: Flight
    """What it is in the middle of."""
    starter: Starter
    """What begins the next flight, in states that form batches."""

    # Calling a method of an object with more than 30 attributes takes three times as long without.
    # fmt: off
    __slots__ = (
        "books", "counters", "gate", "handlers", "has_drained_enough", "is_serving", "live_moves",
        "look", "mailbox", "member", "out", "outbox", "pace", "relaying", "scheduler",
        "staged", "starter", "table", "tier_traffic", "watch", "weights",
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
        able: Abilities | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.name = f"replica {replica_id}"
        self.grid = grid
        self.machine = machine
        self.model = 0
        # --- the machine
        self.table = table
        self.state = state
        self.handlers = table[state]
        self.history = []
        self.incarnation = 0
        self.is_stirred = True
        self.out: list[Action] = []
        self.look = 0
        self.actor = NO_ACTOR
        self.mailbox = Mailbox(deque())
        # --- what it is made of
        self.clock = clock
        self.scheduler = scheduler
        self._view = View(self, scheduler)
        self.pace = Pace(latency, stages, able)
        self.counters = Counters(clock.now_ns)
        self.watch = Watch(replica_id, clock, scheduler, observers)
        self.books = Books(
            replica_id, clock, scheduler, self.pace, self.watch, self.counters, self.out
        )
        self.relaying = Relaying(layers)
        self.tier_traffic: TierTraffic | None = None
        self.staged = Staged(self.books, stages, self.mailbox) if stages > 1 else None
        self.member: Member | None = None
        self.outbox: Outbox | None = None
        # --- its process, weights and lock
        self.paused_ns = -1
        self.weights = Weights(are_loaded=state is not S.INACTIVE)
        self.lock = lock
        self.gate = Gate(lock, self.name, is_closed=state in CLOSED)
        self.live_moves = 0
        self.has_drained_enough = False
        # --- iterations
        self.is_serving = False
        self.flight: Flight = IDLE if self.staged is None else self.staged
        self.starter: Starter = Plain(self.books, frees=False, runs_on=False)
        self.note_state()

    # The machine.
    def step(self, event: Event) -> list[Action]:
        """An event happens: the actions that follow, in order."""
        self.handle(event)
        return self.take_out()

    def handle(self, event: Event) -> None:
        """Call the handler of the table; its actions are in `out`."""
        if self.flight.is_joint:
            self.flight.unroll()
        handler = self.handlers[event.kind]
        if handler is None:
            raise self.unexpected(event.kind, event)
        handler(self, event)

    def take_out(self) -> list[Action]:
        """The actions that wait, to be applied now."""
        out = self.out
        actions = out[:]
        out.clear()
        return actions

    def unexpected(self, kind: int, event: Event | None) -> UnexpectedEvent:
        what = Kind(kind).name.lower() if event is None else repr(event)
        return self._complain(f"does not expect {what}")

    def _complain(self, what: str) -> UnexpectedEvent:
        problem = f"{self.name} is {self.state.value} and {what}"
        return UnexpectedEvent(problem, at_ns=self.clock.now_ns, story=self.history)

    def go_on(self) -> int:
        """Take the step as far as the next actions: to be called until it is not `LOOP`.

        When the next step is due, `PARK`, `AGAIN`, or `LOOP` once the actions in `out` are applied.
        """
        mailbox = self.mailbox
        while True:
            due_ns = LOOP
            if mailbox.applying:
                self._apply(mailbox.applying.pop())
            elif not self.flight.is_open:
                flight = self.flight = self.flight.end()
                if not flight.is_open or flight.due_ns == APPLY:
                    due_ns = self._fly_on(flight)
            elif self.is_serving and self.paused_ns < 0 and not mailbox.posted:
                # What `serving.iterate` does, without a call of the table.
                mailbox.has_applied = False
                begun = self.starter.start()
                if begun is None:
                    due_ns = self.rest()
                else:
                    self.flight = begun
                    if not begun.is_open:
                        due_ns = begun.due_ns
            else:
                due_ns = self._boundary()
            if due_ns != LOOP or self.out:
                return due_ns

    def _apply(self, event: Event) -> None:
        handler = self.handlers[event.kind]
        if handler is None:
            raise self.unexpected(event.kind, event)
        handler(self, event)

    def _fly_on(self, flight: Flight) -> int:
        """What has ended goes on, or another has followed: when it is due."""
        if flight.due_ns != APPLY:
            return flight.due_ns
        if flight.is_open or self.mailbox.posted:
            self.mailbox.begin_applying()
        return LOOP

    def _boundary(self) -> int:
        """Apply what is posted, then do what the state does; unless the process stands still."""
        if self.flight is BETWEEN and (not self.is_serving or self.paused_ns >= 0):
            self.flight = IDLE
            return AGAIN
        mailbox = self.mailbox
        if self.paused_ns >= 0 and not mailbox.has_applied:
            return PARK
        if mailbox.posted and not mailbox.has_applied and self.state not in _APPLIES_LATER:
            mailbox.begin_applying()
            return LOOP
        mailbox.has_applied = False
        handler = self.handlers[_BOUNDARY]
        assert handler is not None
        return handler(self, CANCELS_APPLIED)

    def begin_next(self) -> int:
        """Form the next batch and begin it: when it ends, or `LOOP`; `NOTHING` if there is none."""
        begun = self.starter.start()
        if begun is None:
            return NOTHING
        self.flight = begun
        return LOOP if begun.is_open else begun.due_ns

    def rest(self) -> int:
        """Nothing can be formed now: wait for a stage, fail what can never run, or for news."""
        flight = self.flight
        if isinstance(flight, Staged) and flight.holds_batch():
            return flight.wait().due_ns
        unschedulable = self.scheduler.drop_unschedulable(self.clock.now_ns)
        if not self.watch.is_touched:
            self.watch.touch()
        if not unschedulable:
            return PARK
        for request, reason in unschedulable:
            self.out.append(End(request, Status.FAILED, reason))
        self.out.append(FreeCapacity())
        if flight is not BETWEEN:
            return LOOP
        self.flight = IDLE
        return AGAIN

    def align(self, now_ns: int) -> int:
        """When the replica looks at what comes now (see `Actor.align`)."""
        flight = self.flight
        at_ns = flight.align(now_ns)
        if flight.is_open:
            return NOW if self.paused_ns < 0 else AT_DUE
        return at_ns

    def want(self, look: int) -> None:
        """The replica is to look up, so urgently at least."""
        if self.look < look:
            self.look = look

    # Its state.
    def note_state(self) -> None:
        """The state has changed: which row of the table counts, and what follows for iterations."""
        state, scheduler, flight = self.state, self.scheduler, self.flight
        self.handlers = self.table[state]
        if not may_fly(flight.sort, state, holds_batch=flight.holds_batch()):
            raise self._complain(f"has a {flight.sort.name.lower()} in flight")
        self.is_serving = state in _SERVES
        self.has_drained_enough = False
        if state in _WITHOUT_WEIGHTS:
            if state in _LOADS:
                self.weights.begin()
            else:
                self.weights.drop()
                if state is S.INACTIVE:
                    scheduler.forget()  # no process runs: what it had cached is gone
        self._note_outbox()
        # Only a replica that prefills takes from the global queue (fcfs).
        if scheduler.is_shared:
            scheduler.pulls = state is S.PREFILL
        self.choose_starter()
        if self.member is not None:
            self.member.group.cut()

    @property
    def waits_here_only(self) -> bool:
        """Freed blocks matter to no request but those that wait here."""
        return self.is_serving and not (self.scheduler.is_shared and self.scheduler.pulls)

    def choose_starter(self) -> None:
        """What begins the next flight, from now on."""
        books, pace, watch, state = self.books, self.pace, self.watch, self.state
        tiers, member, staged = self.tier_traffic, self.member, self.staged
        follows = watch.signals is not None or watch.steps_history is not None
        is_alone = not pace.latency.foreign and tiers is None
        is_simple = is_alone and member is None and staged is None and not pace.is_fresh
        runs_on = is_simple and state is S.COLOCATED and watch.signals is None
        runs_on = runs_on and not watch.is_drawn
        is_even = not follows and self.counters.expert_tokens is None
        frees = state is S.DECODE
        if staged is not None:
            forms_again = state in _ROTATES and not watch.is_drawn and not pace.is_fresh
            staged.may_rotate = forms_again and is_alone and member is None and is_even
        if member is not None:
            member.serves, member.is_serving = state in WAVES, self.is_serving
        if is_simple and self.is_serving and not (follows or watch.notes_formed):
            self.starter = Plain(books, frees=frees, runs_on=runs_on)
            return
        single = Single(books, BETWEEN if is_simple else IDLE, runs_on=runs_on)
        launcher: Launcher = Foreign(single) if pace.latency.foreign else single
        life, actor = self.incarnation, self.actor
        if staged is not None:
            launcher = OntoStages(staged, tiers, self.wave, actor, life)
        elif member is not None:
            launcher = Grouped(member, tiers, life, may_leap=is_alone and is_even)
        elif tiers is not None:
            launcher = Tiered(books, tiers, actor, life, launcher)
        if pace.is_fresh:
            launcher = FirstUses(books, launcher, self.choose_starter)
        self.starter = Composed(
            books,
            launcher,
            stages=staged,
            member=member,
            tiers=tiers,
            frees=frees,
            is_serving=self.is_serving,
        )

    # How it is put together.
    def attach(self, actor: ReplicaActorPort, posted: deque[Event]) -> None:
        """Messages for this replica go to that actor; what is posted waits there."""
        self.actor, self.mailbox.posted = actor, posted
        if self.member is not None:
            self.member.actor = actor
        self.choose_starter()

    def connect(self, outbox: Outbox) -> None:
        """Where the KV of prompts that end here goes."""
        self.outbox = outbox
        self._note_outbox()

    def _note_outbox(self) -> None:
        self.books.has_outbox = self.outbox is not None
        self.books.hands_off = self.outbox is not None and self.state in _HANDS_OFF

    def use_tiers(self, traffic: TierTraffic) -> None:
        """KV comes from lower tiers, and goes there."""
        self.tier_traffic = traffic
        self.choose_starter()

    def join(self, group: GroupWave) -> Member:
        """It is a member of a data-parallel group from now on."""
        self.member = Member(self.books, group, self.actor, self.mailbox)
        self.pace.is_monotone = False  # a gap depends on the others, too
        if self.staged is None:
            self.flight = self.member
        self.choose_starter()
        return self.member

    def meter(self) -> None:
        """From now on, count what a model of power asks for."""
        self.watch.meter()
        self.choose_starter()

    def keep_signals(self, delay_ns: int, *, with_blocks: bool) -> None:
        """From now on keep what was known of it for so long; `with_blocks`: their use, too."""
        self.watch.keep_signals(delay_ns, with_blocks=with_blocks)
        self.choose_starter()

    def tell_touches(self, log: list[ReplicaHandle]) -> None:
        """From now on a change of the queues puts the replica into `log`, once until it is seen."""
        self.watch.tell_touches(log, self)

    def look_for_rest(self) -> None:
        """If nothing runs, waits or arrives, its figures stay until it is stirred again."""
        self.is_stirred = not self.is_idle

    def touch(self) -> None:
        """The numbers of waiting and running requests may have changed: a router looks again."""
        if not self.watch.is_touched:
            self.watch.touch()

    def seen(self) -> None:
        """The queues have been looked at: the next change is told again."""
        self.watch.is_touched = False

    def forget_cache(self) -> None:
        """Forget cached prefixes, of which none is in use; a pool that only counts has none."""
        self.is_stirred = True
        self.scheduler.ledger.pool.clear()

    def start_process(self) -> None:
        """A fresh process: its first iterations pay for first uses."""
        self.pace.start_process()
        self.choose_starter()

    # What others may see.
    @property
    def stages(self) -> int:
        """Stages of its pipeline."""
        return self.pace.stages

    @property
    def latency(self) -> LatencyBackend:
        """What says how long iterations take."""
        return self.pace.latency

    @property
    def priority(self) -> int:
        """The priority of its turn at an instant."""
        return self.books.priority

    @property
    def wave(self) -> GroupWave | None:
        """The data-parallel group that it is a member of."""
        return None if self.member is None else self.member.group

    @property
    def slowdown(self) -> float:
        """Iterations take so many times longer (a straggler)."""
        return self.pace.slowdown

    @property
    def model_loaded(self) -> bool:
        """All of its weights are there."""
        return self.weights.are_loaded

    @property
    def is_closing(self) -> bool:
        """It waits for its own lock."""
        return self.gate.is_closing

    @property
    def state_since_ns(self) -> int:
        """When the state of now began."""
        return self.counters.state_since_ns

    @property
    def state_ns(self) -> dict[ReplicaState, int]:
        """Time spent in each state that has been left."""
        return self.counters.state_ns

    @property
    def recall_tokens_lost(self) -> int:
        """Tokens that are computed since a tier has lost them, at its last loss."""
        return self.counters.recall_tokens_lost

    @property
    def is_touched(self) -> bool:
        """A change of its queues has been told and not been seen, or it is told to no router."""
        return self.watch.is_touched

    def late(self, at_ns: int) -> Signals | None:
        """What was known of it at an earlier time; None where no history is kept."""
        watch = self.watch
        history = watch.signals
        if history is None:
            return None
        if watch.signals_blocks:
            self.flight.settle()
        found = history[0]
        for one in history:
            if one[0] > at_ns:
                break
            found = one
        return found

    @property
    def booked_busy_ns(self) -> int:
        """Time in iterations that have ended, ns."""
        return self.counters.busy_ns

    @property
    def has_batch(self) -> bool:
        """A batch is in flight, or about to be."""
        return self.flight.holds_batch()

    @property
    def in_flight(self) -> InFlight:
        """What it is in the middle of."""
        flight = self.flight
        ends_ns = flight.boundary_ns(flight.steps_ended())
        return InFlight(flight.sort.name.lower(), ends_ns, flight.tells(self.clock.now_ns))

    @property
    def stale_recalls(self) -> list[int]:
        """Lower tiers that a batch in flight reads KV from, and that have lost it."""
        return self.flight.stale_tiers()

    @property
    def arrived(self) -> list[KvDelivered]:
        """Deliveries of KV that wait for the boundary."""
        return [event for event in self.mailbox.pending() if isinstance(event, KvDelivered)]

    @property
    def unfinished_migrations(self) -> int:
        """Batches whose KV waits here or leaves from here; its outbound side counts them."""
        return 0 if self.outbox is None else self.outbox.unfinished

    @property
    def busy_times(self) -> tuple[int, int]:
        """(time in which it ran something, the same summed over its GPUs), ns."""
        if self.staged is None:
            return self.counters.busy_ns, self.counters.busy_ns * len(self.gpus)
        stages = self.staged.pipeline.busy_ns
        return max(stages), sum(stages) * (len(self.gpus) // self.stages)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or arrives here."""
        scheduler = self.scheduler
        return (
            not self.flight.holds_batch()
            and not self.arrived
            and not self.live_moves
            and scheduler.running_count == 0
            and scheduler.waiting_count == 0
        )

    @property
    def tokens_produced(self) -> tuple[int, int]:
        """(prefill, decode) tokens computed so far, finished iterations of a leap included."""
        flight, counters = self.flight, self.counters
        if not flight.is_leap:
            return counters.prefill_tokens, counters.decode_tokens
        prefill, decode = flight.tokens_settled(flight.settle())
        return prefill + counters.prefill_tokens, decode + counters.decode_tokens

    def settle(self) -> int:
        """Bring the books up to now in the middle of a leap; iterations of it that have ended."""
        return self.flight.settle()

    def changed(self, done: int) -> None:
        """The settled books have changed: cut a leap that no longer holds, look up if idle."""
        flight = self.flight
        if not (flight.is_leap and flight.still_holds(done)) and self.look < LOOK:
            self.look = LOOK


class _NoActor:
    """A replica without an actor, as tests of the machine have it: messages go nowhere."""

    def tell(self, event: Event) -> None:
        raise AssertionError(f"the replica has no actor: {event}")

    def post(self, event: object) -> None:
        raise AssertionError(f"the replica has no actor: {event}")

    def reserve(self, requests: Sequence[object]) -> bool:
        raise AssertionError("the replica has no actor")


NO_ACTOR: Final[ReplicaActorPort] = _NoActor()  # type: ignore[assignment]
