"""What others hold of a replica: a handle, and through it a view of its figures.

A leap is a promise: its iterations have been computed, but the books (blocks, tokens, cached
prefixes) are brought up to now only when they are read. Whatever reads a replica from outside
(routers, planners, watchers, the rejecter, faults, samples, pages of live mode) has a
`ReplicaHandle`, which has no books, and reads them from `view()`. A `View` is exact at the instant
of each read, whether it was just asked for or kept: a figure that grows in a leap is settled as it
is read. What is cheaper because it may be old says so in its name (`promised_...`).

Figures that no leap changes (queues, numbers of requests, states, capacities) cost nothing more
than the scheduler's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

from emu.kernel.clock import Kernel
from emu.kernel.lock import Lock
from emu.kv.blocks import BlockPool, PoolWatcher
from emu.latency.base import LatencyBackend
from emu.network.grids import Grid
from emu.replica.flight.base import Flight
from emu.replica.ports import GroupWave, ReplicaActorPort
from emu.replica.states import ReplicaState
from emu.request import Request
from emu.scheduling.base import Scheduler

if TYPE_CHECKING:
    from emu.replica.events import KvDelivered

Signals = tuple[int, int, int, int, int]
"""(time, waiting, running, waiting tokens, blocks in use): what a router sees of a replica."""

Figures = tuple[int, int, int, int, int, int]
"""(waiting, running, blocks in use, blocks, prefill tokens, decode tokens): a sample."""


class InFlight(NamedTuple):
    """What a replica is in the middle of."""

    flight: str
    """Which flight."""
    step_ends_ns: int
    """When the iteration in flight ends; -1 = none is."""
    doing: str
    """In words."""


NO_SIGNALS: Final[Signals] = (-1, 0, 0, 0, 0)
"""Before anything is known."""


@final
class View:
    """The figures of one replica, exact at the instant of each read."""

    __slots__ = ("_grows", "_replica", "_scheduler")

    def __init__(self, replica: Viewed, scheduler: Scheduler) -> None:
        self._replica = replica
        self._scheduler = scheduler
        self._grows = scheduler.grows

    # No leap changes these.
    @property
    def waiting_count(self) -> int:
        """Requests in the waiting queue, preempted ones included."""
        return self._scheduler.waiting_count

    @property
    def running_count(self) -> int:
        """Admitted requests, prefill unfinished or decoding."""
        return self._scheduler.running_count

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of waiting requests."""
        return self._scheduler.waiting_tokens

    @property
    def blocks_total(self) -> int:
        """KV blocks, less what a fault has taken away."""
        return self._scheduler.ledger.blocks_total

    @property
    def max_num_seqs(self) -> int:
        """Most requests that can run at once."""
        return self._scheduler.max_num_seqs

    @property
    def pulls(self) -> bool:
        """It may take prompts from a shared queue now."""
        return self._scheduler.pulls

    @property
    def arrived(self) -> list[KvDelivered]:
        """Deliveries of KV that wait for the boundary."""
        return self._replica.arrived

    @property
    def unfinished_migrations(self) -> int:
        """Batches whose KV waits here or leaves from here."""
        return self._replica.unfinished_migrations

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or arrives here."""
        return self._replica.is_idle

    @property
    def has_batch(self) -> bool:
        """A batch is in flight, or about to be."""
        return self._replica.has_batch

    def stale_recalls(self) -> list[int]:
        """Lower tiers that a batch in flight reads KV from, and that have lost it."""
        return self._replica.stale_recalls

    @property
    def in_flight(self) -> InFlight:
        """What it is in the middle of."""
        return self._replica.in_flight

    def waiting(self) -> Iterable[Request]:
        """Waiting requests, head first."""
        return self._scheduler.waiting()

    def failed(self) -> list[Request]:
        """Requests that failed here and have not been reported."""
        return [request for request, _ in self._scheduler.ledger.failed]

    def can_ever_hold(self, request: Request) -> str:
        """Empty, or why this replica could never serve the request, even alone."""
        return self._scheduler.can_ever_hold(request)

    def blocks_to_reserve(self, requests: Sequence[Request]) -> int:
        """Blocks that this replica must reserve to take over these requests' KV."""
        return self._scheduler.blocks_to_reserve(requests)

    def has_places(self, count: int) -> bool:
        """Whether so many more requests may have KV here."""
        return self._scheduler.has_places(count)

    def holds(self, request: Request) -> bool:
        """Whether it holds what a feature would load for the request."""
        return any(part.holds(request) for part in self._scheduler.parts)

    def watch_cache(self, watcher: PoolWatcher) -> bool:
        """Tell of what its prefix cache holds; False if it has none."""
        pool = self._scheduler.ledger.pool
        if not isinstance(pool, BlockPool):
            return False
        pool.watcher = watcher
        return True

    # Settled as they are read.
    @property
    def blocks_used(self) -> int:
        """KV blocks that are not free; cached blocks that no request references are."""
        flight = self._replica.flight
        if flight.is_leap and self._grows:
            flight.settle()
        ledger = self._scheduler.ledger
        return ledger.blocks_total - ledger.pool.blocks_free

    @property
    def blocks_free(self) -> int:
        """KV blocks that can be taken."""
        flight = self._replica.flight
        if flight.is_leap and self._grows:
            flight.settle()
        return self._scheduler.ledger.pool.blocks_free

    @property
    def tokens_produced(self) -> tuple[int, int]:
        """(prefill, decode) tokens computed so far, finished iterations of a leap included."""
        return self._replica.tokens_produced

    def figures(self) -> Figures:
        """What a sample tells of it."""
        prefill, decode = self._replica.tokens_produced  # settles
        scheduler = self._scheduler
        ledger = scheduler.ledger
        total = ledger.blocks_total
        used = total - ledger.pool.blocks_free
        return scheduler.waiting_count, scheduler.running_count, used, total, prefill, decode

    def late(self, at_ns: int) -> Signals | None:
        """What was known of it at an earlier time; None where no history is kept."""
        return self._replica.late(at_ns)

    def residents(self) -> Sequence[Request]:
        """Running requests in order of admission, with exact token counts."""
        self._replica.settle()
        return list(self._scheduler.residents())

    def prefix_match(self, request: Request) -> int:
        """Prompt tokens of the request that its prefix cache holds."""
        self._replica.settle()
        return self._scheduler.prefix_match(request)

    def has_room(self, requests: Sequence[Request]) -> bool:
        """There are blocks for the KV of these requests."""
        flight = self._replica.flight
        if flight.is_leap and self._grows:
            flight.settle()
        return self._scheduler.has_room(requests)

    def look_up(self, request: Request) -> None:
        """Write the counts of a request that it holds to the request."""
        self._replica.settle()
        self._scheduler.look_up(request)

    def recount(self) -> list[str]:
        """Full check of its counts; one line for each thing that is wrong."""
        self._replica.settle()
        return self._scheduler.recount()

    # In the books by now: a leap in flight enters its own as it ends.
    @property
    def booked_busy_ns(self) -> int:
        """Time in iterations that have ended, ns; of a leap in flight none."""
        self._replica.settle()
        return self._replica.booked_busy_ns

    # Promises: certain without a look at what is in flight.
    def promised_load(self, waiting: int, running: int) -> int:
        """Waiting and running requests, with these weights: no leap in flight changes it."""
        scheduler = self._scheduler
        return waiting * scheduler.waiting_count + running * scheduler.running_count

    @property
    def promised_blocks_free(self) -> int:
        """Free blocks before what a leap in flight has taken by now: `blocks_free` is no more."""
        return self._scheduler.ledger.pool.blocks_free


class ReplicaHandle:
    """A replica for all others: its place, its state, its lock and its mailbox.

    Its books are behind `view()`. Only the replica itself writes to it.
    """

    replica_id: int
    name: str
    state: ReplicaState
    model: int
    """Which of the served models it serves."""
    machine: int
    grid: Grid
    lock: Lock
    """Held by the watcher that sends KV here, or to keep KV away."""
    actor: ReplicaActorPort
    """Where messages for this replica go; set by the actor."""
    incarnation: int
    """Grows at each crash: what was meant for an earlier life is dropped."""
    paused_ns: int
    """Since when the process stands still (`crash.py`), and no other actor need know; or -1."""
    history: list[str]
    """Its transitions, for people."""
    is_stirred: bool
    """Something has reached it, or it has computed, since it was last found at rest."""
    clock: Kernel
    _view: View

    __slots__ = (
        "_view",
        "actor",
        "clock",
        "grid",
        "history",
        "incarnation",
        "is_stirred",
        "lock",
        "machine",
        "model",
        "name",
        "paused_ns",
        "replica_id",
        "state",
    )

    def view(self) -> View:
        """Its figures, exact at the instant of each read."""
        return self._view

    @property
    def gpus(self) -> tuple[int, ...]:
        """Its GPUs, by id."""
        return self.grid.gpus

    @property
    def is_paused(self) -> bool:
        """Its process stands still."""
        return self.paused_ns >= 0

    # What the replica answers.
    @property
    def stages(self) -> int:
        """Stages of its pipeline; 1 = none."""
        raise NotImplementedError

    @property
    def latency(self) -> LatencyBackend:
        """What its iterations cost."""
        raise NotImplementedError

    @property
    def model_loaded(self) -> bool:
        """All of its weights are there."""
        raise NotImplementedError

    @property
    def is_closing(self) -> bool:
        """It waits for its own lock."""
        raise NotImplementedError

    @property
    def slowdown(self) -> float:
        """Iterations take so many times longer (a straggler)."""
        raise NotImplementedError

    @property
    def wave(self) -> GroupWave | None:
        """The data-parallel group that it is a member of."""
        raise NotImplementedError

    @property
    def state_since_ns(self) -> int:
        """When the state of now began."""
        raise NotImplementedError

    @property
    def state_ns(self) -> dict[ReplicaState, int]:
        """Time spent in each state that has been left."""
        raise NotImplementedError

    @property
    def recall_tokens_lost(self) -> int:
        """Tokens that are computed since a tier has lost them, at its last loss."""
        raise NotImplementedError

    @property
    def is_touched(self) -> bool:
        """A change of its queues has been told and not been seen, or it is told to no router."""
        raise NotImplementedError

    def look_for_rest(self) -> None:
        """If nothing runs, waits or arrives, its figures stay until it is stirred again."""
        raise NotImplementedError

    def touch(self) -> None:
        """The numbers of waiting and running requests may have changed: a router looks again."""
        raise NotImplementedError

    def tell_touches(self, log: list[ReplicaHandle]) -> None:
        """From now on a change of the queues puts the replica into `log`, once until it is seen."""
        raise NotImplementedError

    def seen(self) -> None:
        """The queues have been looked at: the next change is told again."""
        raise NotImplementedError

    def keep_signals(self, delay_ns: int, *, with_blocks: bool) -> None:
        """From now on keep what was known of it for so long; `with_blocks`: their use, too."""
        raise NotImplementedError

    def forget_cache(self) -> None:
        """Forget cached prefixes, of which none is in use; a pool that only counts has none."""
        raise NotImplementedError


class Viewed(ReplicaHandle):
    """A replica as its view sees it, and nothing else (a class: calls of a protocol go by name)."""

    flight: Flight
    """What it is in the middle of: only of a leap the books may lag behind."""

    __slots__ = ("flight",)

    def settle(self) -> int:
        """Bring the books up to now in the middle of a leap; iterations of it that have ended."""
        raise NotImplementedError

    def late(self, at_ns: int) -> Signals | None:
        """What was known of it at an earlier time; None where no history is kept."""
        raise NotImplementedError

    @property
    def booked_busy_ns(self) -> int:
        """Time in iterations that have ended, ns."""
        raise NotImplementedError

    @property
    def tokens_produced(self) -> tuple[int, int]:
        """(prefill, decode) tokens computed so far, finished iterations of a leap included."""
        raise NotImplementedError

    @property
    def arrived(self) -> list[KvDelivered]:
        """Deliveries of KV that wait for the boundary."""
        raise NotImplementedError

    @property
    def unfinished_migrations(self) -> int:
        """Batches whose KV waits here or leaves from here."""
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or arrives here."""
        raise NotImplementedError

    @property
    def has_batch(self) -> bool:
        """A batch is in flight, or about to be."""
        raise NotImplementedError

    @property
    def stale_recalls(self) -> list[int]:
        """Lower tiers that a batch in flight reads KV from, and that have lost it."""
        raise NotImplementedError

    @property
    def in_flight(self) -> InFlight:
        """What it is in the middle of."""
        raise NotImplementedError
