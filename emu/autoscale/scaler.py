"""The control loop of autoscaling: look, plan, act; and the books of weights and markers.

The loop waits until something that it reads has changed, then ticks at the next multiple of its
period: it takes a snapshot, asks the planner for a demand, makes a plan (pure), and carries it
out. State, marker and weights are set at the moment of the decision, by compare-and-set, so that
the next tick sees them. With nothing to do it schedules no events at all.

Each plan is recorded with the numbers behind it (marks.csv, trace).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from emu.autoscale.actions import (
    Action,
    Expire,
    Help,
    Load,
    MakeSpare,
    Mutate,
    Reuse,
    Revive,
    Shut,
    involved,
    words,
)
from emu.autoscale.launch import Launches, ScalerWorld
from emu.autoscale.loads import HostCache, Weights
from emu.autoscale.planner import Demand, Rates, make_planner
from emu.autoscale.snapshot import ReplicaView, Sight, Site, Snapshot, load_of, with_load
from emu.config.schema import AutoscaleTable
from emu.errors import InputError, InvariantViolation
from emu.kernel.clock import PARK, PRIORITY_CONTROL, PRIORITY_PLANNER, Actor
from emu.network.topology import Topology
from emu.plugins import make_plugin
from emu.replica.events import Commanded
from emu.replica.replica import Replica
from emu.replica.states import Marker, ReplicaState, Writer
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


OnLook = Callable[[str, Snapshot, Demand, Sequence[Action]], None]
"""Told of (planner, what it saw, what it wants, what is done)."""


class Scaler(Launches, Actor):
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
        own: Callable[..., Any] = make_plugin,
    ) -> None:
        """Loads that take longer than `load_deadline_ns` are given up (0 = never); `own` makes a
        planner of a user's own."""
        for oddity in table.faithful:
            if oddity not in FAITHFUL:
                problem = f"unknown name {oddity!r}; there are {', '.join(FAITHFUL)}"
                raise InputError("config", None, "autoscale.faithful", problem)
        Actor.__init__(self, world.kernel, name, PRIORITY_PLANNER)
        Launches.__init__(
            self,
            world,
            table,
            sites=sites,
            weights=weights,
            topology=topology,
            load_deadline_ns=load_deadline_ns,
            cache=cache,
        )
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
        minimum = min(table.min_prefill, table.min_decode)
        if table.planner == "hpa":
            minimum = table.min_replicas
        self._may_empty = minimum == 0
        """The model may be without any replica."""
        self._inactive = [
            ReplicaView(
                replica.replica_id,
                S.INACTIVE,
                replica.machine,
                blocks_total=replica.scheduler.blocks_total,
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
        self._present: list[Replica] = []
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
        if self._shut_ns:
            ttl_ns = ms_to_ns(self.table.spare_ttl_ms)
            wakes += [
                view.shut_ns + ttl_ns
                for view in snapshot.replicas
                if view.state is S.SHUTTING_NULL and view.shut_ns >= 0
            ]
        later = [at_ns for at_ns in wakes if at_ns > snapshot.now_ns]
        return min(later) if later else -1

    def _plan(self, snapshot: Snapshot, demand: Demand) -> list[Action]:
        if self.table.planner == "hpa" or demand.colocated:
            from emu.autoscale.plans import colocated_plan

            return colocated_plan(snapshot, demand, self.table)
        if self.table.executor == "serverless":
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

    def _view(self, replica: Replica) -> ReplicaView:
        replica_id, state = replica.replica_id, replica.state
        if replica_id in self._yielded:
            state = S.FAILED
        scheduler = replica.scheduler
        if scheduler.grows:
            replica.settle()
        holder = replica.lock.holder
        used = scheduler.blocks_used
        is_colocated = state is _COLOCATED
        return ReplicaView(
            replica_id,
            state,
            replica.machine,
            used,
            scheduler.blocks_total,
            scheduler.running_count if is_colocated or not used else 1,
            scheduler.waiting_count if is_colocated else 0,
            replica.model_loaded,
            holder == replica.name,
            replica.lock.is_free,
            self.rdma.get(replica_id, _NO_MARKER),
            self.nvl.get(replica_id, _NO_MARKER),
            self._shut_ns.get(replica_id, -1),
            self._last_role.get(replica_id, ""),
            replica.unfinished_migrations,
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

    def _revive(self, replica: Replica, action: Revive) -> None:
        to = _REVIVE[replica.state]
        if self._move(replica, replica.state, to, "demand came back"):
            self._shut_ns.pop(replica.replica_id, None)
            self.scale_ups += 1

    def _reuse(self, replica: Replica, action: Reuse) -> None:
        is_closed = replica.lock.holder == replica.name
        if action.role == "decode":
            to = S.AUS_DECODE if is_closed else S.DECODE
        else:
            to = S.PREFILL if is_closed else S.AUS_PREFILL
        if self._move(replica, S.SHUTTING_NULL, to, "a warm spare is reused"):
            self._shut_ns.pop(replica.replica_id, None)
            self.scale_ups += 1

    def _make_spare(self, replica: Replica, action: MakeSpare) -> None:
        if not replica.lock.is_free or not replica.is_idle:
            return
        if self._move(replica, S.DECODE, S.SHUTTING_NULL, "surplus and idle"):
            self._note_shut(replica, "decode")

    def _expire(self, replica: Replica, action: Expire) -> None:
        if self._move(replica, S.SHUTTING_NULL, S.INACTIVE, action.cause):
            self._shut_ns.pop(replica.replica_id, None)

    def _mutate(self, replica: Replica, action: Mutate) -> None:
        self._move(replica, S.PREFILL, S.MUTATING_TO_DECODE, "prefill surplus, decode deficit")

    def _help(self, replica: Replica, action: Help) -> None:
        self._move(replica, S.PREFILL, S.OLD_PREFILL, "helps a replica that loads live")

    def _shut(self, replica: Replica, action: Shut) -> None:
        to, role = _SHUT[replica.state]
        if self._move(replica, replica.state, to, "surplus"):
            self._note_shut(replica, role)

    def _note_shut(self, replica: Replica, role: str) -> None:
        self._shut_ns[replica.replica_id] = self._world.kernel.now_ns
        self._last_role[replica.replica_id] = role
        self.scale_downs += 1

    # --- GPUs that models share -------------------------------------------------------------------
    def shut_since_ns(self, replica: Replica) -> int:
        """When it began to shut."""
        return self._shut_ns.get(replica.replica_id, 0)

    def may_drop(self, replica: Replica) -> bool:
        """It is a spare that nothing holds: its GPUs may be given away at once."""
        replica_id = replica.replica_id
        is_marked = replica_id in self.rdma or replica_id in self.nvl
        is_closed = replica.lock.holder == replica.name
        return replica.state is S.SHUTTING_NULL and is_closed and not is_marked

    def drop(self, replica: Replica, cause: str) -> None:
        """A spare loses its weights, for another model."""
        self._expire(replica, Expire(replica.replica_id, cause))

    @property
    def is_yielding(self) -> bool:
        """A replica shuts for another model."""
        return bool(self._yielded)

    def can_spare(self) -> list[Replica]:
        """Replicas beyond the minimum, least loaded first; all of an idle model may go."""
        table = self.table
        is_idle = not self._world.waiting()[2]
        found: list[Replica] = []
        for state, minimum in (
            (S.PREFILL, table.min_prefill),
            (S.DECODE, table.min_decode),
            (S.COLOCATED, table.min_replicas),
        ):
            serving = [r for r in self._world.members if r.state is state]
            kept = max(minimum, 0 if is_idle else 1)
            serving.sort(key=lambda r: (r.scheduler.blocks_used, r.replica_id))
            found += serving[: max(0, len(serving) - kept)]
        return found

    def yield_one(self, to: str) -> None:
        """Shut one replica that can be spared; it does not come back before it is inactive."""
        replica = self.can_spare()[0]
        self._world.note("yield", replica.name, f"its GPUs go to {to}")
        self._shut(replica, Shut(replica.replica_id))
        self._yielded.add(replica.replica_id)
        self.look()

    def _move(self, replica: Replica, expected: S, to: S, cause: str) -> bool:
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
    def on_moved(self, replica: Replica, before: ReplicaState, writer: Writer) -> None:
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


_PERFORM: Final[dict[type, Callable[..., None]]] = {
    Revive: Scaler._revive,
    Reuse: Scaler._reuse,
    MakeSpare: Scaler._make_spare,
    Expire: Scaler._expire,
    Mutate: Scaler._mutate,
    Help: Scaler._help,
    Shut: Scaler._shut,
}
