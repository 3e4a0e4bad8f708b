"""The control loop of autoscaling: look, plan, act; loads that were ordered, and their markers.

The loop waits until something that it reads has changed, then ticks at the next multiple of its
period: it takes a snapshot, asks the planner for a demand, makes a plan (pure), and carries it
out. State, marker and weights are set at the moment of the decision, by compare-and-set, so that
the next tick sees them. With nothing to do it schedules no events at all.

Each plan is recorded with the numbers behind it (marks.csv, trace).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from emu.autoscale.loads import ActiveLoad, HostCache, Loader, LoadWorld, Weights
from emu.autoscale.planner import Demand, Rates, make_planner
from emu.autoscale.snapshot import (
    Action,
    Expire,
    Help,
    Load,
    MakeSpare,
    Mutate,
    ReplicaView,
    Reuse,
    Revive,
    Role,
    Shut,
    Sight,
    Site,
    Snapshot,
    Target,
    involved,
    load_of,
    with_load,
    words,
)
from emu.config.schema import AutoscaleTable, CarriedTable
from emu.errors import InputError, InvariantViolation
from emu.kernel.clock import PARK, PRIORITY_CONTROL, PRIORITY_PLANNER, Actor, Kernel
from emu.network.carrier import Carrier
from emu.network.topology import Topology
from emu.replica.events import Commanded, LoadGivenUp, SegmentArrived, WeightsArrived
from emu.replica.states import LOADING, Marker, ReplicaState, Writer
from emu.replica.view import ReplicaHandle
from emu.units import ceil_div, ms_to_ns, s_to_ns

S = ReplicaState
# Python 3.11 looks a member up in its class far more slowly than a name of the module.
_COLOCATED: Final = S.COLOCATED
_NO_MARKER: Final = Marker.NONE
FAITHFUL: Final = (
    "kv_equation",
    "shut_most_loaded",
    "evict_spares",
    "spare_cap",
    "cache_ttl_from_load",
    "split_lock",
)
"""Oddities of the original that `autoscale.faithful` may name (docs/autoscale.md)."""
_SHUT: Final = {
    S.PREFILL: (S.SHUTTING_PREFILL, "prefill"),
    S.DECODE: (S.SHUTTING_DECODE, "decode"),
    S.COLOCATED: (S.SHUTTING_COLOCATED, "colocated"),
}
_REVIVE: Final = {
    S.SHUTTING_PREFILL: S.PREFILL,
    S.SHUTTING_DECODE: S.AUS_DECODE,
    S.SHUTTING_COLOCATED: S.COLOCATED,
}
_LOADING_STATE: Final = {
    "prefill": S.LOADING_PREFILL,
    "decode": S.LOADING_DECODE,
    "new_prefill": S.NEW_PREFILL,
    "colocated": S.LOADING_COLOCATED,
}
_MARKERS: Final = {
    "nvlink": Marker.NVL_CASTING,
    "p2p": Marker.RDMA_LOADING,
    "chain": Marker.RDMA_CASTING,
    "tanz": Marker.TANZ_CASTING,
}
AVOIDED_DEADLINES: Final = 10
"""A pair whose load was given up is left out of plans for so many load deadlines."""
_LOCAL: Final = ("host", "remote", "disk", "delay")
_READY: Final = {
    "prefill": S.PREFILL,
    "decode": S.AUS_DECODE,
    "colocated": S.COLOCATED,
}


class ScalerWorld(Protocol):
    """The cluster, as the control loop sees it."""

    kernel: Kernel
    scarce_decode: bool

    @property
    def tokens_in_migration(self) -> int:
        """Prompt tokens whose KV waits for a migration or is under way."""
        ...

    @property
    def replicas(self) -> Sequence[ReplicaHandle]:
        """All of them, by id."""
        ...

    @property
    def members(self) -> Sequence[ReplicaHandle]:
        """Those of the model that this loop scales, ascending id."""
        ...

    @property
    def is_only(self) -> bool:
        """The cluster serves no other model."""
        ...

    @property
    def placements(self) -> int:
        """Changes whenever GPUs that models share are taken or given back."""
        ...

    def is_placeable(self, replica: ReplicaHandle) -> bool:
        """No replica of another model is on its GPUs."""
        ...

    def wants_room(self, replicas: int) -> None:
        """So many replicas find no GPUs; 0 = none lacks any."""
        ...

    @property
    def network(self) -> Carrier:
        """The links."""
        ...

    def waiting(self) -> tuple[int, int, int]:
        """(requests, prompt tokens) that no replica has begun, and requests in the system."""
        ...

    def note(self, kind: str, target: str, text: str) -> None:
        """Write a line into the run's timeline."""
        ...

    def give_up(self, replica: ReplicaHandle) -> None:
        """A live load has failed: KV that waits there, and batches handed over, are lost."""
        ...


OnLook = Callable[[str, Snapshot, Demand, Sequence[Action]], None]
"""Told of (planner, what it saw, what it wants, what is done)."""


class Scaler(Actor):
    """The actor: looks, asks the planner, plans, acts."""

    def __init__(
        self,
        world: ScalerWorld,
        table: AutoscaleTable,
        *,
        rates: Rates,
        sites: Sequence[Site],
        weights: Sequence[Weights],
        topology: Topology,
        block_tokens: int,
        cache: HostCache,
        name: str = "planner",
        load_deadline_ns: int = 0,
        own: Callable[..., Any] | None = None,
    ) -> None:
        """Loads that take longer than `load_deadline_ns` are given up (0 = never); `own` makes a
        planner of a user's own."""
        for oddity in table.faithful:
            if oddity not in FAITHFUL:
                problem = f"unknown name {oddity!r}; there are {', '.join(FAITHFUL)}"
                raise InputError("config", None, "autoscale.faithful", problem)
        Actor.__init__(self, world.kernel, name, PRIORITY_PLANNER)
        self.table = table
        self.scale_ups = 0
        self.loads: dict[str, int] = {}
        """Replicas whose weights have arrived, by method."""
        self.loads_given_up = 0
        self.rdma: dict[int, Marker] = {}
        self.nvl: dict[int, Marker] = {}
        self.cache = cache
        self.stale: list[Callable[[int], bool]] = []
        """Faults: whether the copy in a machine's memory turns out not to be there."""
        self._world = world
        self._sites = sites
        self._deadline_ns = load_deadline_ns
        self._avoided: dict[tuple[int, int], int] = {}
        """Between which replicas loads did not end in time, and until when plans leave it out."""
        self._sending: list[tuple[ActiveLoad, tuple[int, ...]]] = []
        self._awaited: list[tuple[ActiveLoad, list[int]]] = []
        """Loads that a blocking planner waits for, with the targets that are not through."""
        self.loader = Loader(
            LoadWorld(
                world.kernel, world.network, topology, weights, self._on_segments, self._on_loaded
            ),
            load_delay_ms=table.load_delay_ms,
        )
        for replica in world.members:
            if replica.model_loaded:
                self.cache.loaded(replica.machine, replica.replica_id, 0)
        self.rates = rates
        self._own = own
        self.planner = make_planner(table, rates, own)
        self._wake_at_ns = 0
        """When it looks again without a change; -1 = not."""
        self._is_due = False
        """It looks when the timer comes."""
        self._has_started = False
        self.ticks = 0
        self.scale_downs = 0
        self.last_demand = Demand()
        self.looked_ns = 0
        """When the planner was asked last, and what it wanted."""
        self._block_tokens = block_tokens
        self._tick_ns = ms_to_ns(table.tick_ms)
        self.sight = Sight(ms_to_ns(table.metrics_delay_ms))
        self._down_until_ns = 0
        self._idle_ns = s_to_ns(table.idle_s)
        self._may_empty = table.may_empty
        """The model may be without any replica."""
        self._inactive = [
            ReplicaView(
                replica.replica_id,
                S.INACTIVE,
                replica.machine,
                blocks_total=replica.view().blocks_total,
            )
            for replica in world.members
        ]
        self._places = {view.replica_id: place for place, view in enumerate(self._inactive)}
        """Position of a replica among those of the model."""
        self._placements = -1
        """Of the shared GPUs, when `_views` was made."""
        self._busy_ns = 0
        """When a request was last in the system, as far as looks can tell."""
        self._was_busy = False
        """One was there at the last look."""
        self._yielded: set[int] = set()
        """Replicas that shut for another model: they are not to come back."""
        self._shut_ns: dict[int, int] = {}
        self._last_role: dict[int, str] = {}
        self._acted = False
        self._views: list[ReplicaView] = []
        self._present: list[ReplicaHandle] = []
        self._has_moved = True
        """Some replica has changed its state since `_present` was made."""
        self._on_look: OnLook | None = None

    def tell_looks(self, on_look: OnLook) -> None:
        """Tell of every look: what was seen and wanted, and what is done about it."""
        self._on_look = on_look

    # --- the loop ---------------------------------------------------------------------------------
    def look(self) -> None:
        """Something that the planner reads has changed."""
        if self.is_active and not self._is_due:
            self.kernel.wake(self)

    def request_ended(self) -> None:
        """It may have been the last one: from now on the model is idle."""
        if self._may_empty:
            self.look()

    def tick(self) -> int:
        """After a change, or when it said so, look at the next multiple of the period."""
        now_ns = self.kernel.now_ns
        if self._is_due:
            self._wake_at_ns = self.look_and_plan()
            self._is_due = False
            if self._wake_at_ns < 0:
                return PARK
            if self._wake_at_ns > now_ns:  # unless something changes before
                self.kernel.arm(self, self._wake_at_ns, PRIORITY_CONTROL)
                return PARK
        elif self._has_started and now_ns != self._wake_at_ns:
            self._wake_at_ns = now_ns + 1
        self._has_started = self._is_due = True
        return max(now_ns, ceil_div(self._wake_at_ns, self._tick_ns) * self._tick_ns)

    def look_and_plan(self) -> int:
        """One look; when to look again without a change (-1 = not)."""
        self.ticks += 1
        self._acted = False
        if self.kernel.now_ns < self._down_until_ns:
            return self._down_until_ns
        now = self.snapshot()
        snapshot = self.sight.see(now)
        if snapshot is None or (self.table.blocking and snapshot.is_busy):
            return -1
        demand = self.planner.decide(snapshot)
        if not self._world.is_only:
            snapshot = self._with_room(snapshot, demand)
        self.last_demand, self.looked_ns = demand, now.now_ns
        from emu.autoscale.plans import detour  # a run without a planner needs no plans

        actions = detour(self._plan(snapshot, demand), snapshot, self.table)
        if self._on_look is not None:
            self._on_look(self.name, snapshot, demand, actions)
        if actions:
            text = f"{demand.text()}; {'; '.join(map(words, actions))}"
            self._world.note("plan", "" if self._world.is_only else self.name, text)
            for action in actions:
                self._perform(action)
        if self._acted or (self.planner.needs_ticks and now.outstanding and self._has_any()):
            return now.now_ns + 1
        return self._wake_ns(snapshot)

    def _has_any(self) -> bool:
        """Some replica is not down: if all are, only the return of one gives something to plan."""
        return any(replica.state is not S.FAILED for replica in self._world.members)

    def _with_room(self, snapshot: Snapshot, demand: Demand) -> Snapshot:
        """Ask for GPUs that are lacking; what is seen after that."""
        world, returning = self._world, (S.SHUTTING_NULL, *_REVIVE)
        for replica_id in sorted(self._yielded):
            if self.may_drop(world.replicas[replica_id]):
                self.drop(world.replicas[replica_id], "its GPUs are for another model")
        wanted = sum(max(0, n) for n in (demand.prefill, demand.decode, demand.colocated))
        at_hand = sum(v.state is S.INACTIVE or v.state in returning for v in snapshot.replicas)
        world.wants_room(max(0, wanted - at_hand))
        if world.placements == self._placements:
            return snapshot
        load = load_of(snapshot)
        return with_load(msgspec.structs.replace(snapshot, replicas=self._all_views()), load)

    def _wake_ns(self, snapshot: Snapshot) -> int:
        """The planner's own wish, the end of a spare's time, or metrics that arrive."""
        wakes = [self.planner.wake_ns(snapshot), self.sight.wake_ns()]
        if self._may_empty and not snapshot.outstanding:
            wakes.append(self._busy_ns + self._idle_ns)
        if self._shut_ns and isinstance(self.table, CarriedTable):
            ttl_ns = ms_to_ns(self.table.spare_ttl_ms)
            wakes += [
                view.shut_ns + ttl_ns
                for view in snapshot.replicas
                if view.state is S.SHUTTING_NULL and view.shut_ns >= 0
            ]
        later = [at_ns for at_ns in wakes if at_ns > snapshot.now_ns]
        return min(later) if later else -1

    def _plan(self, snapshot: Snapshot, demand: Demand) -> list[Action]:
        if not isinstance(self.table, CarriedTable) or demand.colocated:
            from emu.autoscale.plans import colocated_plan

            return colocated_plan(snapshot, demand, self.table)
        if self.table.loads_alone:
            from emu.autoscale.plans import serverless_plan

            return serverless_plan(snapshot, demand, self.table)
        if not (demand.prefill or demand.decode or self._shut_ns):
            return []  # as the plan would say, after a look at every replica
        from emu.autoscale.plans import blitz_plan

        return blitz_plan(snapshot, demand, self.table, self._sites)

    # --- looking ----------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        """The cluster as it is."""
        world = self._world
        now_ns = world.kernel.now_ns
        requests, tokens, outstanding = world.waiting()
        if outstanding or self._was_busy:
            self._busy_ns = now_ns
        self._was_busy = outstanding > 0
        return Snapshot(
            now_ns=now_ns,
            replicas=self._all_views(),
            block_tokens=self._block_tokens,
            waiting_tokens=tokens,
            waiting_requests=requests,
            outstanding=outstanding,
            tokens_in_migration=world.tokens_in_migration,
            scarce_decode=world.scarce_decode,
            cached_machines=self.cache.cached_machines(now_ns),
            avoided=self.avoided() if self._avoided else (),
            is_busy=bool(self._awaited),
            may_empty=self._may_empty
            and not outstanding
            and now_ns - self._busy_ns >= self._idle_ns,
        )

    def _all_views(self) -> tuple[ReplicaView, ...]:
        """Inactive replicas, most of them most of the time, are looked at when they change."""
        world = self._world
        if self._has_moved or self._placements != world.placements:
            self._has_moved = False
            self._placements = world.placements
            self._views = list(self._inactive)
            if not world.is_only:
                for place, replica in enumerate(world.members):
                    if not world.is_placeable(replica):
                        view = self._views[place]
                        self._views[place] = msgspec.structs.replace(view, state=S.FAILED)
            self._present = [
                replica
                for replica in world.members
                if replica.state is not S.INACTIVE
                or replica.replica_id in self.rdma
                or replica.replica_id in self.nvl
            ]
        views = self._views
        for replica in self._present:
            views[self._places[replica.replica_id]] = self._view(replica)
        return tuple(views)

    def _view(self, replica: ReplicaHandle) -> ReplicaView:
        replica_id, state = replica.replica_id, replica.state
        if replica_id in self._yielded:
            state = S.FAILED
        view = replica.view()
        holder = replica.lock.holder
        used = view.blocks_used
        is_colocated = state is _COLOCATED
        return ReplicaView(
            replica_id,
            state,
            replica.machine,
            used,
            view.blocks_total,
            view.running_count if is_colocated or not used else 1,
            view.waiting_count if is_colocated else 0,
            replica.model_loaded,
            holder == replica.name,
            replica.lock.is_free,
            self.rdma.get(replica_id, _NO_MARKER),
            self.nvl.get(replica_id, _NO_MARKER),
            self._shut_ns.get(replica_id, -1),
            self._last_role.get(replica_id, ""),
            view.unfinished_migrations,
        )

    # --- acting -----------------------------------------------------------------------------------
    def _perform(self, action: Action) -> None:
        self._acted = True
        for replica_id in involved(action):
            if self._world.replicas[replica_id].state is S.FAILED:
                problem = f"I14: the planner decides on a dead replica: {words(action)}"
                raise InvariantViolation(problem, at_ns=self._world.kernel.now_ns)
        if isinstance(action, Load):
            self._load(action)
            return
        replica = self._world.replicas[action.replica]
        _PERFORM[type(action)](self, replica, action)

    def _revive(self, replica: ReplicaHandle, action: Revive) -> None:
        to = _REVIVE[replica.state]
        if self._move(replica, replica.state, to, "demand came back"):
            self._shut_ns.pop(replica.replica_id, None)
            self.scale_ups += 1

    def _reuse(self, replica: ReplicaHandle, action: Reuse) -> None:
        is_closed = replica.lock.holder == replica.name
        if action.role == "decode":
            to = S.AUS_DECODE if is_closed else S.DECODE
        else:
            to = S.PREFILL if is_closed else S.AUS_PREFILL
        if self._move(replica, S.SHUTTING_NULL, to, "a warm spare is reused"):
            self._shut_ns.pop(replica.replica_id, None)
            self.scale_ups += 1

    def _make_spare(self, replica: ReplicaHandle, action: MakeSpare) -> None:
        if not replica.lock.is_free or not replica.view().is_idle:
            return
        if self._move(replica, S.DECODE, S.SHUTTING_NULL, "surplus and idle"):
            self._note_shut(replica, "decode")

    def _expire(self, replica: ReplicaHandle, action: Expire) -> None:
        if self._move(replica, S.SHUTTING_NULL, S.INACTIVE, action.cause):
            self._shut_ns.pop(replica.replica_id, None)

    def _mutate(self, replica: ReplicaHandle, action: Mutate) -> None:
        self._move(replica, S.PREFILL, S.MUTATING_TO_DECODE, "prefill surplus, decode deficit")

    def _help(self, replica: ReplicaHandle, action: Help) -> None:
        self._move(replica, S.PREFILL, S.OLD_PREFILL, "helps a replica that loads live")

    def _shut(self, replica: ReplicaHandle, action: Shut) -> None:
        to, role = _SHUT[replica.state]
        if self._move(replica, replica.state, to, "surplus"):
            self._note_shut(replica, role)

    def _note_shut(self, replica: ReplicaHandle, role: str) -> None:
        self._shut_ns[replica.replica_id] = self._world.kernel.now_ns
        self._last_role[replica.replica_id] = role
        self.scale_downs += 1

    # --- GPUs that models share -------------------------------------------------------------------
    def shut_since_ns(self, replica: ReplicaHandle) -> int:
        """When it began to shut."""
        return self._shut_ns.get(replica.replica_id, 0)

    def may_drop(self, replica: ReplicaHandle) -> bool:
        """It is a spare that nothing holds: its GPUs may be given away at once."""
        replica_id = replica.replica_id
        is_marked = replica_id in self.rdma or replica_id in self.nvl
        is_closed = replica.lock.holder == replica.name
        return replica.state is S.SHUTTING_NULL and is_closed and not is_marked

    def drop(self, replica: ReplicaHandle, cause: str) -> None:
        """A spare loses its weights, for another model."""
        self._expire(replica, Expire(replica.replica_id, cause))

    @property
    def is_yielding(self) -> bool:
        """A replica shuts for another model."""
        return bool(self._yielded)

    def can_spare(self) -> list[ReplicaHandle]:
        """Replicas beyond the minimum, least loaded first; all of an idle model may go."""
        table = self.table
        is_idle = not self._world.waiting()[2]
        found: list[ReplicaHandle] = []
        for state in (S.PREFILL, S.DECODE, S.COLOCATED):
            serving = [r for r in self._world.members if r.state is state]
            kept = max(table.least(state.value), 0 if is_idle else 1)
            serving.sort(key=lambda r: (r.view().blocks_used, r.replica_id))
            found += serving[: max(0, len(serving) - kept)]
        return found

    def yield_one(self, to: str) -> None:
        """Shut one replica that can be spared; it does not come back before it is inactive."""
        replica = self.can_spare()[0]
        self._world.note("yield", replica.name, f"its GPUs go to {to}")
        self._shut(replica, Shut(replica.replica_id))
        self._yielded.add(replica.replica_id)
        self.look()

    def _move(self, replica: ReplicaHandle, expected: S, to: S, cause: str) -> bool:
        if replica.state is not expected:
            return False
        replica.actor.tell(Commanded(to=to, writer="planner", cause=cause))
        return True

    # --- faults -----------------------------------------------------------------------------------

    def lose_cache(self, machine: int) -> None:
        """The machine's memory has lost the weights; loads from there begin again from disk."""
        self.cache.lose(machine, self._world.kernel.now_ns)
        for active in list(self.loader.active):
            target = active.load.targets[0].replica
            if active.load.method == "host" and self._sites[target].machine == machine:
                self._abort(active, "host cache lost")

    def restart(self, until_ns: int) -> None:
        """The planner dies with everything that it remembers, and is back at `until_ns`.

        What it must not forget it rebuilds from the cluster: what loads from where (the loads go
        on without it) and which replicas are closing (their time begins anew).
        """
        kernel = self._world.kernel
        self.planner = make_planner(self.table, self.rates, self._own)
        self._down_until_ns = max(self._down_until_ns, until_ns)
        shutting = (S.SHUTTING_NULL, *_REVIVE)
        self._shut_ns = {
            r.replica_id: kernel.now_ns for r in self._world.members if r.state in shutting
        }
        self._last_role, self._avoided = {}, {}
        self._has_moved = True
        self.rdma.clear()
        self.nvl.clear()
        self._sending, self._awaited = [], []
        for active in self.loader.active:
            self._take_up(active)
        kernel.call_at(until_ns, PRIORITY_PLANNER, self.look)

    # --- told by the cluster -------------------------------------------------------------------
    def on_moved(self, replica: ReplicaHandle, before: ReplicaState, writer: Writer) -> None:
        """A replica changed its state."""
        self._has_moved = True
        after = replica.state
        replica_id = replica.replica_id
        if before is S.NEW_PREFILL:
            self._unmark(replica_id)
        if after in (S.INACTIVE, S.FAILED):
            self._yielded.discard(replica_id)
            self._shut_ns.pop(replica_id, None)
            self.cache.unloaded(replica.machine, replica_id, self._world.kernel.now_ns)
        elif after is S.NEW_PREFILL and writer == "command":
            self.load_by_hand(replica)
        if after is S.FAILED:
            for active in list(self.loader.active):
                involved = (*active.load.sources, *[t.replica for t in active.load.targets])
                if replica_id in involved:
                    self._abort(active, f"replica {replica_id} crashed")
            self._unmark(replica_id)
        self.look()

    # --- loads that have been ordered -------------------------------------------------------------
    @property
    def is_active(self) -> bool:
        """Something may ever be scaled (else only manual commands load weights)."""
        return not self.table.is_static

    def host_cache_bytes(self) -> dict[str, int]:
        """Weights in host memory from the start to now: mean, most, and one copy."""
        if not self.is_active:
            return {}
        cache = self.cache
        mean = cache.mean_bytes(self._world.kernel.now_ns)
        return {"mean": round(mean), "max": cache.bytes_max, "copy": cache.copy_bytes}

    def close(self) -> None:
        """The run is over: what the host copies took goes into the timeline."""
        if self.is_active:
            use = self.host_cache_bytes()
            self._world.note("host_cache", "", f"mean {use['mean']} bytes, max {use['max']} bytes")

    def restore(self, replica: ReplicaHandle, role: Role, *, from_disk: bool) -> None:
        """Weights of a replica that is back after a crash, where no planner brings them."""
        load = Load("disk" if from_disk else "host", (Target(replica.replica_id, role),))
        self._load(load, writer="recovery")

    def distrust(self, is_gone: Callable[[int], bool]) -> Callable[[], None]:
        """From now on a machine's copy is not there if `is_gone` says so; the result ends that."""
        self.stale.append(is_gone)
        return lambda: self.stale.remove(is_gone)

    def load_by_hand(self, replica: ReplicaHandle) -> None:
        """A manual `to_new_prefill`: the weights come from the machine's memory, layer by layer."""
        self.loader.start(Load("host", (Target(replica.replica_id, "new_prefill"),)))

    def sending(self) -> list[int]:
        """Replicas from which weights are being copied."""
        return [source for _, sources in self._sending for source in sources]

    def _load(self, load: Load, writer: Writer = "planner") -> None:
        world = self._world
        taken = [
            t.replica for t in load.targets if world.replicas[t.replica].state is not S.INACTIVE
        ]
        if taken:  # what changed since the plan was made: its weights have nowhere to go
            names = ", ".join(map(str, taken))
            world.note("load dropped", load.method, f"replicas {names} are not inactive any more")
            return
        if load.method == "host" and self.stale:
            machine = self._sites[load.targets[0].replica].machine
            if any(is_gone(machine) for is_gone in self.stale):
                load = msgspec.structs.replace(load, method="disk")
        for target in load.targets:
            replica = world.replicas[target.replica]
            to = _LOADING_STATE[target.role]
            cause = f"weights come by {load.method}"
            replica.actor.tell(Commanded(to=to, writer=writer, cause=cause))
            self.scale_ups += writer == "planner"  # a replica that comes back is no order of it
        self._mark(load)
        cold_ns = s_to_ns(self.table.cold_start_s) if load.method in _LOCAL else 0
        active = self.loader.start(load, after_ns=cold_ns)
        self._sending.append((active, load.sources))
        if load.method == "tanz" or (load.method == "chain" and load.is_live):
            self._awaited.append((active, [target.replica for target in load.targets]))
        if self._deadline_ns:
            world.kernel.call_at(
                world.kernel.now_ns + self._deadline_ns,
                PRIORITY_PLANNER,
                lambda: self._on_deadline(active),
            )

    def _on_deadline(self, active: ActiveLoad) -> None:
        """Too late: it is given up, and plans take other ways for a while."""
        if active.is_cancelled or not active.open_targets:
            return
        until_ns = self._world.kernel.now_ns + AVOIDED_DEADLINES * self._deadline_ns
        for pair in active.stuck_pairs():
            self._avoided[pair] = until_ns
        self._abort(active, "load deadline")

    def avoided(self) -> tuple[tuple[int, int], ...]:
        """Pairs that plans leave out now."""
        now_ns = self._world.kernel.now_ns
        return tuple(pair for pair, until_ns in self._avoided.items() if until_ns > now_ns)

    def _mark(self, load: Load) -> None:
        marker = _MARKERS.get(load.method)
        if marker is None:
            return
        is_nvlink = load.method == "nvlink"
        books = self.nvl if is_nvlink else self.rdma
        for source in load.sources:
            assert source not in books, f"replica {source} sends twice"
            books[source] = Marker.NVLINK_SENDING if is_nvlink else Marker.RDMA_SENDING
        for target in load.targets:
            assert target.replica not in self.rdma, f"replica {target.replica} loads twice"
            assert target.replica not in self.nvl, f"replica {target.replica} loads twice"
            books[target.replica] = marker
            if load.method == "tanz":
                self.nvl[target.replica] = marker

    def _take_up(self, active: ActiveLoad) -> None:
        """Books of a load that is under way."""
        load = active.load
        self._mark(load)
        for target in load.targets:
            if target.replica not in active.open_targets:
                self._unmark(target.replica)
        self._sending.append((active, load.sources))
        if load.method == "tanz" or (load.method == "chain" and load.is_live):
            self._awaited.append((active, list(active.open_targets)))

    def _on_segments(self, replica_id: int, segments: int) -> None:
        replica = self._world.replicas[replica_id]
        if self.table.note_layers:
            self._world.note("layers", f"replica {replica_id}", f"{segments} segments are there")
        replica.actor.tell(SegmentArrived(count=segments))

    def _on_loaded(self, active: ActiveLoad, target: Target) -> None:
        """All weights are there."""
        world = self._world
        replica = world.replicas[target.replica]
        state = replica.state
        if state not in LOADING and state is not S.NEW_PREFILL:
            return  # crashed meanwhile
        now_ns = world.kernel.now_ns
        self.cache.loaded(replica.machine, replica.replica_id, now_ns)
        method = active.load.method
        self.loads[method] = self.loads.get(method, 0) + 1
        took_s = (now_ns - active.started_ns) / 1e9
        world.note("loaded", f"replica {replica.replica_id}", f"{method} in {took_s:.3f} s")
        if not active.open_targets:
            self._end_of_sending(active)
        if state is S.NEW_PREFILL:
            replica.actor.tell(WeightsArrived(to=None))
            return
        self._unmark(replica.replica_id)
        to = _READY[target.role]
        if target.role == "decode" and self.table.loads_alone:
            to = S.MUTATING_TO_DECODE
        replica.actor.tell(WeightsArrived(to=to))

    def _end_of_sending(self, active: ActiveLoad) -> None:
        for entry in list(self._sending):
            if entry[0] is active:
                self._sending.remove(entry)
                books = self.nvl if active.load.method == "nvlink" else self.rdma
                for source in entry[1]:
                    books.pop(source, None)

    def _unmark(self, replica_id: int) -> None:
        self.rdma.pop(replica_id, None)
        self.nvl.pop(replica_id, None)
        for entry in list(self._awaited):
            if replica_id in entry[1]:
                entry[1].remove(replica_id)
            if not entry[1]:
                self._awaited.remove(entry)

    def _abort(self, active: ActiveLoad, cause: str) -> None:
        """Give a load up: its targets are inactive again, what they held goes elsewhere."""
        if active.is_cancelled:  # its deadline says nothing about a later load of the same replica
            return
        open_targets = list(active.open_targets)
        self.loads_given_up += 1
        self.loader.cancel(active)
        self._end_of_sending(active)
        for replica_id in open_targets:
            replica = self._world.replicas[replica_id]
            self._unmark(replica_id)
            if replica.state in LOADING or replica.state is S.NEW_PREFILL:
                is_live = replica.state is S.NEW_PREFILL
                why = f"load given up: {cause}"
                replica.actor.tell(LoadGivenUp(cause=why))
                if is_live:
                    self._world.give_up(replica)
                    order = Commanded(to=S.INACTIVE, writer="transfer", cause=why)
                    replica.actor.tell(order)


_PERFORM: Final[dict[type, Callable[..., None]]] = {
    Revive: Scaler._revive,
    Reuse: Scaler._reuse,
    MakeSpare: Scaler._make_spare,
    Expire: Scaler._expire,
    Mutate: Scaler._mutate,
    Help: Scaler._help,
    Shut: Scaler._shut,
}
