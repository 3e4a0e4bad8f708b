"""The control loop of autoscaling: look, plan, act; loads that were ordered, and their markers.

The loop waits until something that it reads has changed, then ticks at the next multiple of its
period: it takes a snapshot, asks the planner for a demand, makes a plan (pure), and carries it
out. State, marker and weights are set at the moment of the decision, by compare-and-set, so that
the next tick sees them. With nothing to do it schedules no events at all.

Each plan is recorded with the numbers behind it (marks.csv, trace).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from emu.autoscale.demand import Demand, Rates
from emu.autoscale.host_cache import HostCache
from emu.autoscale.loader import ActiveLoad, Loader, LoadWorld, Weights
from emu.autoscale.orders import (
    Action,
    Expire,
    Help,
    Load,
    MakeSpare,
    Mutate,
    Reuse,
    Revive,
    Role,
    Shut,
    Target,
    involved,
    words,
)
from emu.autoscale.planner import Planner, make_planner
from emu.autoscale.ports import ScalerWorld
from emu.autoscale.sight import Sight, load_of, with_load
from emu.autoscale.snapshot import ReplicaView, Site, Snapshot
from emu.autoscale.under_way import LoadsUnderWay
from emu.autoscale.views import ReplicaViews
from emu.config.schema import AutoscaleTable, CarriedTable
from emu.errors import InputError, InvariantViolation
from emu.kernel.clock import PARK, Actor
from emu.kernel.priorities import PRIORITY_CONTROL, PRIORITY_PLANNER
from emu.network.topology import Topology
from emu.replica.events import Commanded, LoadGivenUp, SegmentArrived, WeightsArrived
from emu.replica.states import LOADING, Marker, ReplicaState, Writer
from emu.replica.view import ReplicaHandle
from emu.units import GIB, ceil_div, ms_to_ns, s_to_ns

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
AVOIDED_DEADLINES: Final = 10
"""A pair whose load was given up is left out of plans for so many load deadlines."""
_LOCAL: Final = ("host", "remote", "disk", "delay")
_READY: Final = {
    "prefill": S.PREFILL,
    "decode": S.AUS_DECODE,
    "colocated": S.COLOCATED,
}


def _check_faithful(table: AutoscaleTable) -> None:
    for oddity in table.faithful:
        if oddity not in FAITHFUL:
            problem = f"unknown name {oddity!r}; there are {', '.join(FAITHFUL)}"
            raise InputError("config", None, "autoscale.faithful", problem)


class _Idleness:
    """Since when a model has had no request, and whether it may then be without any replica."""

    def __init__(self, table: AutoscaleTable) -> None:
        self.may_empty = table.may_empty
        """The model may be without any replica."""
        self._idle_ns = s_to_ns(table.idle_s)
        self._busy_ns = 0
        """When a request was last in the system, as far as looks can tell."""
        self._was_busy = False
        """One was there at the last look."""

    def look(self, outstanding: int, now_ns: int) -> bool:
        """So many requests are in the system now; whether its replicas may all go."""
        if outstanding or self._was_busy:
            self._busy_ns = now_ns
        self._was_busy = outstanding > 0
        return self.may_empty and not outstanding and now_ns - self._busy_ns >= self._idle_ns

    @property
    def ends_ns(self) -> int:
        """When it has been idle for long enough."""
        return self._busy_ns + self._idle_ns


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
        sites: Mapping[int, Site],
        weights: Mapping[int, Weights],
        topology: Topology,
        block_tokens: int,
        cache: HostCache,
        name: str = "planner",
        load_deadline_ns: int = 0,
        own: Callable[..., Planner] | None = None,
    ) -> None:
        """Loads that take longer than `load_deadline_ns` are given up (0 = never); `own` makes a
        planner of a user's own."""
        _check_faithful(table)
        Actor.__init__(self, world.kernel, name, PRIORITY_PLANNER)
        self.table = table
        self.scale_ups = self.loads_given_up = 0
        self.loads: dict[str, int] = {}
        """Replicas whose weights have arrived, by method."""
        self.under_way = LoadsUnderWay()
        self.cache = cache
        self.stale: list[Callable[[int], bool]] = []
        """Faults: whether the copy in a machine's memory turns out not to be there."""
        self._world = world
        self._sites = sites
        self._deadline_ns = load_deadline_ns
        self._avoided: dict[tuple[int, int], int] = {}
        """Between which replicas loads did not end in time, and until when plans leave it out."""
        self.loader = self._make_loader(topology, weights)
        for replica in world.members:
            if replica.model_loaded:
                self.cache.loaded(replica.machine, replica.replica_id, 0)
        self._make_planner = partial(make_planner, table, rates, own)
        self.planner = self._make_planner()
        self._wake_at_ns = 0
        """When it looks again without a change; -1 = not."""
        self._is_due = self._has_started = False
        """It looks when the timer comes; it has had one."""
        self.ticks = self.scale_downs = 0
        self.last_demand = Demand()
        self.looked_ns = 0
        """When the planner was asked last, and what it wanted."""
        self._block_tokens = block_tokens
        self._tick_ns = ms_to_ns(table.tick_ms)
        self.sight = Sight(ms_to_ns(table.metrics_delay_ms))
        self._down_until_ns = 0
        self._idleness = _Idleness(table)
        self._yielded: set[int] = set()
        """Replicas that shut for another model: they are not to come back."""
        self._shut_ns: dict[int, int] = {}
        self._last_role: dict[int, str] = {}
        self._acted = False
        self._views = ReplicaViews(world, self._view, self.is_marked)
        self._on_look: OnLook | None = None

    def _make_loader(self, topology: Topology, weights: Mapping[int, Weights]) -> Loader:
        world, table = self._world, self.table
        told = (self._on_segments, self._on_loaded)
        loads = LoadWorld(world.kernel, world.network, topology, weights, *told)
        return Loader(
            loads,
            load_delay_ms=table.load_delay_ms,
            pin_bytes_per_s=table.pin_gib_per_s * GIB,
        )

    def is_marked(self, replica_id: int) -> bool:
        """Weights go to the replica or come from it."""
        return self.under_way.is_marked(replica_id)

    def tell_looks(self, on_look: OnLook) -> None:
        """Tell of every look: what was seen and wanted, and what is done about it."""
        self._on_look = on_look

    def look(self) -> None:
        """Something that the planner reads has changed."""
        if self.is_active and not self._is_due:
            self.kernel.wake(self)

    def request_ended(self) -> None:
        """It may have been the last one: from now on the model is idle."""
        if self._idleness.may_empty:
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
        from emu.autoscale.detours import detour

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
        if world.placements == self._views.placements:
            return snapshot
        load = load_of(snapshot)
        return with_load(msgspec.structs.replace(snapshot, replicas=self._views.all()), load)

    def _wake_ns(self, snapshot: Snapshot) -> int:
        """The planner's own wish, the end of a spare's time, or metrics that arrive."""
        wakes = [self.planner.wake_ns(snapshot), self.sight.wake_ns()]
        if self._idleness.may_empty and not snapshot.outstanding:
            wakes.append(self._idleness.ends_ns)
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
            from emu.autoscale.local_plans import colocated_plan

            return colocated_plan(snapshot, demand, self.table)
        if self.table.loads_alone:
            from emu.autoscale.local_plans import serverless_plan

            return serverless_plan(snapshot, demand, self.table)
        if not (demand.prefill or demand.decode or self._shut_ns):
            return []  # as the plan would say, after a look at every replica
        from emu.autoscale.blitz_plan import blitz_plan

        return blitz_plan(snapshot, demand, self.table, self._sites)

    def snapshot(self) -> Snapshot:
        """The cluster as it is."""
        world = self._world
        now_ns = world.kernel.now_ns
        waiting = world.waiting()
        return Snapshot(
            now_ns=now_ns,
            replicas=self._views.all(),
            block_tokens=self._block_tokens,
            waiting_tokens=waiting.tokens,
            waiting_requests=waiting.requests,
            outstanding=waiting.outstanding,
            tokens_in_migration=world.tokens_in_migration,
            scarce_decode=world.scarce_decode,
            cached_machines=self.cache.cached_machines(now_ns),
            avoided=self.avoided() if self._avoided else (),
            is_busy=self.under_way.is_awaited,
            may_empty=self._idleness.look(waiting.outstanding, now_ns),
        )

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
            self.under_way.rdma.get(replica_id, _NO_MARKER),
            self.under_way.nvl.get(replica_id, _NO_MARKER),
            self._shut_ns.get(replica_id, -1),
            self._last_role.get(replica_id, ""),
            view.unfinished_migrations,
        )

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
        match action:
            case Revive():
                self._revive(replica)
            case Reuse():
                self._reuse(replica, action)
            case MakeSpare():
                self._make_spare(replica)
            case Expire(cause=cause):
                self.drop(replica, cause)
            case Mutate():
                cause = "prefill surplus, decode deficit"
                self._move(replica, S.PREFILL, S.MUTATING_TO_DECODE, cause)
            case Help():
                self._move(replica, S.PREFILL, S.OLD_PREFILL, "helps a replica that loads live")
            case Shut():
                self._shut(replica)

    def _revive(self, replica: ReplicaHandle) -> None:
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

    def _make_spare(self, replica: ReplicaHandle) -> None:
        if not replica.lock.is_free or not replica.view().is_idle:
            return
        if self._move(replica, S.DECODE, S.SHUTTING_NULL, "surplus and idle"):
            self._note_shut(replica, "decode")

    def _shut(self, replica: ReplicaHandle) -> None:
        to, role = _SHUT[replica.state]
        if self._move(replica, replica.state, to, "surplus"):
            self._note_shut(replica, role)

    def _note_shut(self, replica: ReplicaHandle, role: str) -> None:
        self._shut_ns[replica.replica_id] = self._world.kernel.now_ns
        self._last_role[replica.replica_id] = role
        self.scale_downs += 1

    def shut_since_ns(self, replica: ReplicaHandle) -> int:
        """When it began to shut."""
        return self._shut_ns.get(replica.replica_id, 0)

    def may_drop(self, replica: ReplicaHandle) -> bool:
        """It is a spare that nothing holds: its GPUs may be given away at once."""
        is_closed = replica.lock.holder == replica.name
        return (
            replica.state is S.SHUTTING_NULL
            and is_closed
            and not self.is_marked(replica.replica_id)
        )

    def drop(self, replica: ReplicaHandle, cause: str) -> None:
        """A spare loses its weights: its time is over, or they make room for another model."""
        if self._move(replica, S.SHUTTING_NULL, S.INACTIVE, cause):
            self._shut_ns.pop(replica.replica_id, None)

    @property
    def is_yielding(self) -> bool:
        """A replica shuts for another model."""
        return bool(self._yielded)

    def can_spare(self) -> list[ReplicaHandle]:
        """Replicas beyond the minimum, least loaded first; all of an idle model may go."""
        table = self.table
        is_idle = not self._world.waiting().outstanding
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
        self._shut(replica)
        self._yielded.add(replica.replica_id)
        self.look()

    def _move(self, replica: ReplicaHandle, expected: S, to: S, cause: str) -> bool:
        if replica.state is not expected:
            return False
        replica.actor.tell(Commanded(to=to, writer="planner", cause=cause))
        return True

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
        self.planner = self._make_planner()
        self._down_until_ns = max(self._down_until_ns, until_ns)
        shutting = (S.SHUTTING_NULL, *_REVIVE)
        self._shut_ns = {
            r.replica_id: kernel.now_ns for r in self._world.members if r.state in shutting
        }
        self._last_role, self._avoided = {}, {}
        self._views.note_move()
        self.under_way = LoadsUnderWay()
        for active in self.loader.active:
            self.under_way.take_up(active)
        kernel.call_at(until_ns, PRIORITY_PLANNER, self.look)

    def on_moved(self, replica: ReplicaHandle, before: ReplicaState, writer: Writer) -> None:
        """A replica changed its state."""
        self._views.note_move()
        after = replica.state
        replica_id = replica.replica_id
        if before is S.NEW_PREFILL:
            self.under_way.arrived(replica_id)
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
            self.under_way.arrived(replica_id)
        self.look()

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
        self.under_way.mark(load)
        cold_ns = s_to_ns(self.table.cold_start_s) if load.method in _LOCAL else 0
        active = self.loader.start(load, after_ns=cold_ns)
        self.under_way.follow(active)
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
            self.under_way.sent(active)
        if state is S.NEW_PREFILL:
            replica.actor.tell(WeightsArrived(to=None))
            return
        self.under_way.arrived(replica.replica_id)
        to = _READY[target.role]
        if target.role == "decode" and self.table.loads_alone:
            to = S.MUTATING_TO_DECODE
        replica.actor.tell(WeightsArrived(to=to))

    def _abort(self, active: ActiveLoad, cause: str) -> None:
        """Give a load up: its targets are inactive again, what they held goes elsewhere."""
        if active.is_cancelled:  # its deadline says nothing about a later load of the same replica
            return
        open_targets = list(active.open_targets)
        self.loads_given_up += 1
        self.loader.cancel(active)
        self.under_way.sent(active)
        for replica_id in open_targets:
            replica = self._world.replicas[replica_id]
            self.under_way.arrived(replica_id)
            if replica.state in LOADING or replica.state is S.NEW_PREFILL:
                is_live = replica.state is S.NEW_PREFILL
                why = f"load given up: {cause}"
                replica.actor.tell(LoadGivenUp(cause=why))
                if is_live:
                    self._world.give_up(replica)
                    order = Commanded(to=S.INACTIVE, writer="transfer", cause=why)
                    replica.actor.tell(order)
