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
from emu.autoscale.blitz_plan import blitz_plan
from emu.autoscale.demand import Demand, Rates
from emu.autoscale.detours import detour
from emu.autoscale.launch import Launches, ScalerWorld
from emu.autoscale.loads import Weights
from emu.autoscale.planner import make_planner
from emu.autoscale.serverless_plan import colocated_plan, serverless_plan
from emu.autoscale.sight import Sight
from emu.autoscale.snapshot import ReplicaView, Site, Snapshot
from emu.config.schema import AutoscaleTable
from emu.errors import InputError, InvariantViolation
from emu.kernel.actor import PARK, Actor
from emu.kernel.priorities import PRIORITY_CONTROL, PRIORITY_PLANNER
from emu.network.topology import Topology
from emu.plugins import make_plugin
from emu.replica.events import Commanded
from emu.replica.replica import Replica
from emu.replica.states import Marker, ReplicaState, Writer
from emu.units import ceil_div, ms_to_ns

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
        load_deadline_s: float = 0.0,
        own: Callable[..., Any] = make_plugin,
    ) -> None:
        """`load_deadline_s`: loads that take longer are given up; 0 = never. `own`: makes a planner
        of a user's own."""
        for name in table.faithful:
            if name not in FAITHFUL:
                problem = f"unknown name {name!r}; there are {', '.join(FAITHFUL)}"
                raise InputError("config", None, "autoscale.faithful", problem)
        Actor.__init__(self, world.kernel, "planner", PRIORITY_PLANNER)
        Launches.__init__(
            self,
            world,
            table,
            sites=sites,
            weights=weights,
            topology=topology,
            load_deadline_s=load_deadline_s,
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
        self._inactive = [
            ReplicaView(
                replica.replica_id,
                S.INACTIVE,
                replica.machine,
                blocks_total=replica.scheduler.blocks_total,
            )
            for replica in world.replicas
        ]
        self._shut_ns: dict[int, int] = {}
        self._last_role: dict[int, str] = {}
        self._acted = False
        self._views: list[ReplicaView] = []
        self._present: list[Replica] = []
        self._has_moved = True
        """Some replica has changed its state since `_present` was made."""

    # --- the loop ---------------------------------------------------------------------------------
    def look(self) -> None:
        """Something that the planner reads has changed."""
        if self.is_active and not self._is_due:
            self.kernel.wake(self)

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
        self.last_demand, self.looked_ns = demand, now.now_ns
        actions = detour(self._plan(snapshot, demand), snapshot, self.table)
        if actions:
            text = f"{demand.text()}; {'; '.join(map(words, actions))}"
            self._world.note("plan", "", text)
            for action in actions:
                self._perform(action)
        if self._acted or (self.planner.needs_ticks and now.outstanding and self._has_any()):
            return now.now_ns + 1
        return self._wake_ns(snapshot)

    def _has_any(self) -> bool:
        """Some replica is not down: if all are, only the return of one gives something to plan."""
        return any(replica.state is not S.FAILED for replica in self._world.replicas)

    def _wake_ns(self, snapshot: Snapshot) -> int:
        """The planner's own wish, the end of a spare's time, or metrics that arrive."""
        wakes = [self.planner.wake_ns(snapshot), self.sight.wake_ns()]
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
            return colocated_plan(snapshot, demand, self.table)
        if self.table.executor == "serverless":
            return serverless_plan(snapshot, demand, self.table)
        if not (demand.prefill or demand.decode or self._shut_ns):
            return []  # as the plan would say, after a look at every replica
        return blitz_plan(snapshot, demand, self.table, self._sites)

    # --- looking ----------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        """The cluster as it is."""
        world = self._world
        now_ns = world.kernel.now_ns
        requests, tokens, outstanding = world.waiting()
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
        )

    def _all_views(self) -> tuple[ReplicaView, ...]:
        """Inactive replicas, most of them most of the time, are looked at when they change."""
        if self._has_moved:
            self._has_moved = False
            self._views = list(self._inactive)
            self._present = [
                replica
                for replica in self._world.replicas
                if replica.state is not S.INACTIVE
                or replica.replica_id in self.rdma
                or replica.replica_id in self.nvl
            ]
        views = self._views
        for replica in self._present:
            views[replica.replica_id] = self._view(replica)
        return tuple(views)

    def _view(self, replica: Replica) -> ReplicaView:
        replica_id, state = replica.replica_id, replica.state
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
            not holder,
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
        if replica.lock.is_held or not replica.is_idle:
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

        What it must not forget it rebuilds from the cluster: who loads from whom (the loads go
        on without it) and which replicas are closing (their time begins anew).
        """
        kernel = self._world.kernel
        self.planner = make_planner(self.table, self.rates, self._own)
        self._down_until_ns = max(self._down_until_ns, until_ns)
        shutting = (S.SHUTTING_NULL, *_REVIVE)
        self._shut_ns = {
            r.replica_id: kernel.now_ns for r in self._world.replicas if r.state in shutting
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
