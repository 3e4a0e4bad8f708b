"""Plans of the executors: from a demand to actions. Pure.

Owns the serverless executor's plans and those for colocated replicas, the blitz executor's plans,
and the ways around pairs whose load was given up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from emu.autoscale.planner import Demand, floor_of
from emu.autoscale.snapshot import (
    Action,
    Expire,
    Help,
    Load,
    MakeSpare,
    Method,
    Mutate,
    ReplicaView,
    Reuse,
    Revive,
    Role,
    Shut,
    Site,
    Snapshot,
    Target,
    involved,
)
from emu.config.schema import AutoscaleTable, CarriedTable, PaperTable
from emu.replica.states import Marker, ReplicaState
from emu.units import ms_to_ns

# --------------------------------------------------------------------------------------------------
# Scratch of a plan in the making: lists of replicas by what may be done with them.
#
# Used by the plan generators only. Lists are sorted as the executor wants them (blocks in use
# ascending, then id); the step that takes a replica removes it, so that nothing is used twice.


S = ReplicaState


class Draft:
    """Demands, candidates and actions of one plan."""

    def __init__(self, snapshot: Snapshot, demand: Demand, table: CarriedTable) -> None:
        self.snapshot = snapshot
        self.table = table
        self.prefill = demand.prefill
        self.decode = demand.decode
        self.actions: list[Action] = []
        by_state: dict[ReplicaState, list[ReplicaView]] = {}
        for view in snapshot.replicas:
            by_state.setdefault(view.state, []).append(view)
        self.normal_prefill = sorted(by_state.get(S.PREFILL, ()), key=_load)
        self.normal_decode = sorted(by_state.get(S.DECODE, ()), key=_load)
        self.shutting_prefill = sorted(by_state.get(S.SHUTTING_PREFILL, ()), key=_load)
        self.shutting_decode = sorted(by_state.get(S.SHUTTING_DECODE, ()), key=_load)
        self.spares = sorted(by_state.get(S.SHUTTING_NULL, ()), key=_load)
        self.inactive = by_state.get(S.INACTIVE, [])
        self.prefill_floor = floor_of(snapshot, table.min_prefill, len(self.normal_prefill))
        self.decode_floor = floor_of(snapshot, table.min_decode, len(self.normal_decode))

    # --- steps 1 to 4 and 8 of section 6.4 ------------------------------------------------------
    def revive(self) -> None:
        """Step 1: shutting replicas of the growing kind come back, least loaded first."""
        while self.decode > 0 and self.shutting_decode:
            self.actions.append(Revive(self.shutting_decode.pop(0).replica_id))
            self.decode -= 1
        while self.prefill > 0 and self.shutting_prefill:
            self.actions.append(Revive(self.shutting_prefill.pop(0).replica_id))
            self.prefill -= 1

    def collect_idle(self) -> None:
        """Step 2 with expiry: idle decode replicas become spares while there are too many."""
        if self.snapshot.scarce_decode:
            return
        for view in list(self.normal_decode):
            if self.decode >= 0 or len(self.normal_decode) <= self.decode_floor:
                return
            if view.blocks_used == 0 and view.is_lock_free and not view.running:
                self.normal_decode.remove(view)
                self.actions.append(MakeSpare(view.replica_id))
                self.decode += 1

    def reuse(self) -> None:
        """Step 3: spares serve again; decode and prefill in turn if both are wanted."""
        wants_decode = True
        while self.spares and (self.prefill > 0 or self.decode > 0):
            if (wants_decode and self.decode > 0) or self.prefill <= 0:
                self._reuse("decode")
                self.decode -= 1
            else:
                self._reuse("prefill")
                self.prefill -= 1
            wants_decode = not wants_decode

    def _reuse(self, role: Role) -> None:
        # A spare that was closed already needs no wait for its lock to prefill, and the other
        # way round; any spare will do.
        suited = [v for v in self.spares if v.is_closed == (role == "prefill")]
        view = (suited or self.spares)[0]
        self.spares.remove(view)
        self.actions.append(Reuse(view.replica_id, role))

    def evict(self, *, prefill: bool) -> None:
        """Step 4: spares go, whatever their age, while the kind still shrinks (faithful only).

        It counts as the reduction; by default spares keep their weights until their time is up.
        """
        if "evict_spares" not in self.table.faithful:
            return
        while self.spares and (self.prefill if prefill else self.decode) < 0:
            view = self._next_evictable()
            if view is None:
                return
            self.spares.remove(view)
            self.actions.append(Expire(view.replica_id, "evicted"))
            if prefill:
                self.prefill += 1
            else:
                self.decode += 1

    def _next_evictable(self) -> ReplicaView | None:
        free = [v for v in self.spares if is_unmarked(v) and v.is_closed]
        return min(free, key=_shut_since) if free else None

    def expire(self, *, one: bool = False) -> None:
        """Spares whose time is up lose their weights, the one that shut first first."""
        ttl_ns = ms_to_ns(self.table.spare_ttl_ms)
        while True:
            view = self._next_evictable()
            if view is None or self.snapshot.now_ns - view.shut_ns < ttl_ns:
                return
            self.spares.remove(view)
            self.actions.append(Expire(view.replica_id, "spare time is up"))
            if one:
                return

    def mutate(self) -> None:
        """Step 6: prefill replicas that are too many become the decode replicas that lack."""
        if not self.table.mutate:
            return
        while self.prefill < 0 < self.decode and len(self.normal_prefill) > 1:
            self.actions.append(Mutate(self.normal_prefill.pop(0).replica_id))
            self.prefill += 1
            self.decode -= 1

    def shut_prefill(self) -> None:
        """Step 8: one prefill replica, the least loaded, if more than one is left."""
        if self.prefill < 0 and len(self.normal_prefill) > self.prefill_floor:
            self.actions.append(Shut(self.normal_prefill.pop(0).replica_id))
            self.prefill += 1

    def shut_decode(self) -> None:
        """Step 8: one decode replica; the original takes the most loaded."""
        is_faithful = "shut_most_loaded" in self.table.faithful
        if (self.decode < 0 or is_faithful) and len(self.normal_decode) > self.decode_floor:
            index = -1 if is_faithful else 0
            self.actions.append(Shut(self.normal_decode.pop(index).replica_id))
            self.decode += 1

    # --- sources --------------------------------------------------------------------------------
    def sources(self) -> list[ReplicaView]:
        """Replicas that may send weights over RDMA, in the order of section 6.4.

        Pruned (interference), prefill replicas send only if no other replica has the weights: after
        the loss of every decode replica the original finds no source and never loads again. Those
        that never send are not even then in the list.
        """
        others = [*self.normal_decode, *self.shutting_decode, *self.spares]
        is_pruned = self.table.prefill_never_sends or (
            self.table.prune_sources and any(v.is_loaded for v in others)
        )
        candidates = others if is_pruned else [*self.normal_prefill, *others]
        return [v for v in candidates if v.is_loaded and v.rdma is Marker.NONE]


def is_unmarked(view: ReplicaView) -> bool:
    """It takes part in no transfer of weights."""
    return view.rdma is Marker.NONE and view.nvl is Marker.NONE


def _load(view: ReplicaView) -> tuple[int, int]:
    return view.blocks_used, view.replica_id


def _shut_since(view: ReplicaView) -> tuple[int, int]:
    return view.shut_ns, view.replica_id


# --------------------------------------------------------------------------------------------------
# The serverless executor's plans (BlitzScale 6.10), and those for colocated replicas. Pure.
#
# Replicas load from the memory or the disk of their own machine, never from each other. A machine
# counts as cached if it holds the weights in host memory. Shutting replicas are not revived, and a
# spare is reused only for the role that it had.


def serverless_plan(snapshot: Snapshot, demand: Demand, table: CarriedTable) -> list[Action]:
    """What to do now. An empty list = nothing."""
    draft = Draft(snapshot, demand, table)
    _shut_down(draft)
    spares_before = len(draft.spares)
    prefill, decode = max(draft.prefill, 0), max(draft.decode, 0)
    room = len(draft.inactive)
    if "spare_cap" not in table.faithful:
        room += spares_before
    if prefill + decode > room:
        decode = min(decode, room)
        prefill = max(0, room - decode)
    decode = _reuse(draft, "decode", decode)
    prefill = _reuse(draft, "prefill", prefill)
    free = _order(draft.inactive, snapshot, table)
    for role, wanted in (("decode", decode), ("prefill", prefill)):
        for _ in range(min(wanted, len(free))):
            view = free.pop(0)
            draft.actions.append(copy_load(view, role, snapshot, table))  # type: ignore[arg-type]
    draft.expire()
    return draft.actions


def _shut_down(draft: Draft) -> None:
    """Lowest prefills and highest decodes first; at least one of each stays."""
    prefills = sorted(draft.normal_prefill, key=lambda v: v.replica_id)
    decodes = sorted(draft.normal_decode, key=lambda v: -v.replica_id)
    for candidates, surplus, floor in (
        (prefills, -draft.prefill, draft.prefill_floor),
        (decodes, -draft.decode, draft.decode_floor),
    ):
        for view in candidates[: max(0, min(surplus, len(candidates) - floor))]:
            draft.actions.append(Shut(view.replica_id))


def _reuse(draft: Draft, role: Role, wanted: int) -> int:
    for view in list(draft.spares):
        if wanted > 0 and view.last_role == role:
            draft.spares.remove(view)
            draft.actions.append(Reuse(view.replica_id, role))
            wanted -= 1
    return wanted


def is_cached(view: ReplicaView, snapshot: Snapshot, table: AutoscaleTable) -> bool:
    """Whether the replica can load from the memory of its machine."""
    if table.loader in ("cache", "pool"):
        return view.machine in snapshot.cached_machines
    return table.loader == "host"


def _order(
    inactive: list[ReplicaView], snapshot: Snapshot, table: AutoscaleTable
) -> list[ReplicaView]:
    """Cached machines first."""
    return sorted(inactive, key=lambda v: (not is_cached(v, snapshot, table), v.replica_id))


def own_copy(view: ReplicaView, snapshot: Snapshot, table: AutoscaleTable) -> Method:
    """How the replica loads from its own machine."""
    if table.loader == "delay":
        return "delay"
    if is_cached(view, snapshot, table):
        return "host"
    return "remote" if table.loader == "pool" and snapshot.cached_machines else "disk"


def copy_load(view: ReplicaView, role: Role, snapshot: Snapshot, table: AutoscaleTable) -> Load:
    """The load of a replica from its own machine, or from the machine that has the copy."""
    method = own_copy(view, snapshot, table)
    machine = snapshot.cached_machines[0] if method == "remote" else -1
    return Load(method, (Target(view.replica_id, role),), machine=machine)


def colocated_plan(snapshot: Snapshot, demand: Demand, table: AutoscaleTable) -> list[Action]:
    """Replicas that do both phases: revive what drains, load what is missing, shut the emptiest."""
    actions: list[Action] = []
    wanted = demand.colocated
    views = sorted(snapshot.replicas, key=lambda v: (v.running + v.waiting, v.replica_id))
    for view in views:
        if wanted > 0 and view.state is S.SHUTTING_COLOCATED:
            actions.append(Revive(view.replica_id))
            wanted -= 1
    free = [v for v in snapshot.replicas if v.state is S.INACTIVE]
    chosen = _order(free, snapshot, table)[: max(0, wanted)]
    actions.extend(copy_load(view, "colocated", snapshot, table) for view in chosen)
    serving = [v for v in views if v.state is S.COLOCATED]
    floor = floor_of(snapshot, table.least("colocated"), len(serving))
    surplus = serving[: max(0, min(-wanted, len(serving) - floor))]
    actions.extend(Shut(view.replica_id) for view in surplus)
    return actions


# --------------------------------------------------------------------------------------------------
# The blitz executor's plans (BlitzScale 6.4 to 6.9): from a demand to actions, pure.
#
# The steps stand in `Draft`; this module puts them in order for each sign of the two demands and
# chooses how weights travel. `paper` grows chains by bandwidth and leaf switch (6.9) instead of the
# released code's order.


_NVLINK_SOURCES = frozenset(
    {
        S.DECODE,
        S.PREFILL,
        S.OLD_PREFILL,
        S.SHUTTING_PREFILL,
        S.SHUTTING_DECODE,
        S.SHUTTING_NULL,
        S.REFRACTORY_PREFILL,
        S.AUS_DECODE,
        S.AUS_PREFILL,
    }
)
_SENDS_KV = frozenset(
    {
        S.PREFILL,
        S.NEW_PREFILL,
        S.OLD_PREFILL,
        S.REFRACTORY_PREFILL,
        S.SHUTTING_PREFILL,
        S.AUS_PREFILL,
    }
)
"""KV leaves a replica in these states."""


def blitz_plan(
    snapshot: Snapshot, demand: Demand, table: CarriedTable, sites: Sequence[Site]
) -> list[Action]:
    """What to do now. An empty list = nothing."""
    prefill, decode = demand.prefill, demand.decode
    if prefill == 0 and decode == 0:
        # Nothing is left to do but to let spares go whose time is up.
        over_ns = snapshot.now_ns - ms_to_ns(table.spare_ttl_ms)
        if not any(0 <= view.shut_ns <= over_ns for view in snapshot.replicas):
            return []
    draft = Draft(snapshot, demand, table)
    draft.revive()
    if decode < 0:
        draft.collect_idle()
    draft.reuse()
    if decode < 0:
        draft.evict(prefill=False)
    if prefill < 0:
        draft.evict(prefill=True)
    returned = False
    if draft.prefill > 0 or draft.decode > 0:
        if table.nvlink:
            _load_over_nvlink(draft, sites)
        draft.mutate()
        if draft.prefill > 0 or draft.decode > 0:
            returned = _Loading(draft, sites).load()
    if decode < 0 and not returned:
        draft.shut_decode()
    if prefill < 0 and decode <= 0:
        draft.shut_prefill()
    draft.expire(one="evict_spares" in table.faithful)
    return draft.actions


def _load_over_nvlink(draft: Draft, sites: Sequence[Site]) -> None:
    """Section 6.5: one source for each machine that has a copy and free replicas."""
    domains: dict[int, list[ReplicaView]] = {}
    for view in draft.inactive:
        site = sites[view.replica_id]
        if site.has_nvlink and is_unmarked(view):
            domains.setdefault(site.domain, []).append(view)
    wants_decode = True
    for domain, free in domains.items():
        if draft.prefill <= 0 and draft.decode <= 0:
            return
        source = _nvlink_source(draft.snapshot, domain, sites)
        if source is None:
            continue
        targets: list[Target] = []
        for view in free:
            if draft.prefill <= 0 and draft.decode <= 0:
                break
            role: Role
            if (wants_decode and draft.decode > 0) or draft.prefill <= 0:
                role = "decode"
                draft.decode -= 1
            else:
                role = "prefill"
                draft.prefill -= 1
            wants_decode = not wants_decode
            targets.append(Target(view.replica_id, role))
            draft.inactive.remove(view)
        draft.actions.append(Load("nvlink", tuple(targets), (source,)))


def _nvlink_source(snapshot: Snapshot, domain: int, sites: Sequence[Site]) -> int | None:
    for view in snapshot.replicas:
        if (
            sites[view.replica_id].domain == domain
            and view.is_loaded
            and view.state in _NVLINK_SOURCES
            and view.nvl is Marker.NONE
        ):
            return view.replica_id
    return None


class _Loading:
    """Step 7: the rest of the demand over RDMA, or from host or disk."""

    def __init__(self, draft: Draft, sites: Sequence[Site]) -> None:
        self.draft = draft
        self.table = draft.table
        self.sites = sites
        self.free = [v for v in draft.inactive if is_unmarked(v)]
        self.is_live = self.table.live and all(sites[v.replica_id].can_go_live for v in self.free)

    def load(self) -> bool:
        """True if a tanz or live load was planned (the original then returns early)."""
        draft, table = self.draft, self.table
        sources = draft.sources()
        draft.prefill, draft.decode = max(draft.prefill, 0), max(draft.decode, 0)
        if not self.free:
            return False
        if table.multicast == "none" or not any(map(self._may_send, draft.snapshot.replicas)):
            self._from_loader()
            return False
        if not sources:
            return False
        if isinstance(table, PaperTable):
            return self._paper(sources)
        if table.multicast == "p2p":
            return self._p2p(sources)
        if table.multicast == "tanz":
            lanes = self._lanes(sources)
            if lanes > 1:
                return self._tanz(sources, lanes)
        return self._chains(sources)

    def _may_send(self, view: ReplicaView) -> bool:
        """It has the weights, and its links are not reserved for KV."""
        return view.is_loaded and not (self.table.prefill_never_sends and view.state in _SENDS_KV)

    # --- one to one (6.6) -----------------------------------------------------------------------
    def _p2p(self, sources: list[ReplicaView]) -> bool:
        draft = self.draft
        news = 0
        while sources and self.free and (draft.prefill > 0 or draft.decode > 0):
            source = sources.pop()
            view = self.free.pop()
            role: Role
            if draft.prefill > 0:
                draft.prefill -= 1
                is_new = self.is_live and news < len(draft.normal_prefill)
                role = "new_prefill" if is_new else "prefill"
                news += is_new
            else:
                draft.decode -= 1
                role = "decode"
            target = Target(view.replica_id, role)
            draft.actions.append(Load("p2p", (target,), (source.replica_id,)))
        self._help(news)
        return news > 0

    # --- chains (6.7) ---------------------------------------------------------------------------
    def _chains(self, sources: list[ReplicaView]) -> bool:
        draft = self.draft
        if not self.is_live or draft.prefill == 0:
            for role in ("prefill", "decode"):
                wanted = draft.prefill if role == "prefill" else draft.decode
                if wanted <= 0 or not sources or not self.free:
                    continue
                source = sources.pop()
                count = min(wanted, len(self.free))
                targets = tuple(Target(self.free.pop().replica_id, role) for _ in range(count))
                draft.actions.append(Load("chain", targets, (source.replica_id,)))
            return False
        destinations = min(len(self.free), draft.prefill + draft.decode)
        count = min(len(sources), destinations, draft.prefill)
        chains: list[list[int]] = [[] for _ in range(count)]
        for index in range(destinations):
            chains[index % count].append(self.free.pop().replica_id)
        self._launch_chains(chains, [sources.pop().replica_id for _ in range(count)])
        return True

    def _launch_chains(self, chains: list[list[int]], sources: list[int]) -> None:
        """The tail of each chain is live; the others decode while that is wanted, else prefill."""
        draft = self.draft
        news = 0
        for chain, source in zip(chains, sources, strict=True):
            roles: list[Role] = []
            for position in range(len(chain)):  # from the tail
                if position == 0 and draft.prefill > 0 and self.is_live:
                    draft.prefill -= 1
                    news += 1
                    roles.append("new_prefill")
                elif draft.decode > 0:
                    draft.decode -= 1
                    roles.append("decode")
                else:
                    draft.prefill -= 1
                    roles.append("prefill")
            roles.reverse()
            targets = tuple(map(Target, chain, roles))
            draft.actions.append(Load("chain", targets, (source,)))
        self._help(news)

    # --- lanes (6.8) ----------------------------------------------------------------------------
    def _columns(self) -> dict[int, list[ReplicaView]]:
        """Free replicas by fast-interconnect domain, fewest first."""
        groups: dict[int, list[ReplicaView]] = {}
        for view in self.free:
            groups.setdefault(self.sites[view.replica_id].domain, []).append(view)
        return dict(sorted(groups.items(), key=lambda item: (len(item[1]), item[0])))

    def _lanes(self, sources: list[ReplicaView]) -> int:
        wanted = self.draft.prefill + self.draft.decode
        widest = max(len(group) for group in self._columns().values())
        return min(len(sources), wanted, widest)

    def _tanz(self, sources: list[ReplicaView], lanes: int) -> bool:
        draft = self.draft
        columns: list[list[int]] = []
        wanted = draft.prefill + draft.decode
        for group in self._columns().values():
            if len(group) >= lanes and len(columns) * lanes < wanted:
                columns.append([view.replica_id for view in group[:lanes]])
        roles: list[list[Role]] = [["prefill"] * lanes for _ in columns]
        news = 0
        for column in range(len(columns) - 1, -1, -1):
            for lane in range(lanes):
                role: Role = "prefill"
                if column == len(columns) - 1 and self._goes_live(news):
                    role = "new_prefill"
                    news += 1
                    draft.prefill -= 1
                elif draft.decode > 0:
                    role = "decode"
                    draft.decode -= 1
                else:
                    draft.prefill -= 1
                roles[column][lane] = role
        targets = tuple(
            Target(replica, role)
            for column, its_roles in zip(columns, roles, strict=True)
            for replica, role in zip(column, its_roles, strict=True)
        )
        senders = tuple(view.replica_id for view in sources[:lanes])
        draft.actions.append(Load("tanz", targets, senders))
        self._help(news)
        self._compensate()
        return True

    def _goes_live(self, news: int) -> bool:
        """The node at the end of a lane serves while it loads, after `news` that do so already.

        Also where decode is wanted, not prefill: a loaded prefill replica then decodes at once in
        its stead, if one is left beside a helper for every new one.
        """
        draft = self.draft
        if not self.is_live or draft.prefill > 0:
            return self.is_live
        swaps = 1 - draft.prefill
        has_spare = len(draft.normal_prefill) > news + swaps
        return self.table.mutate and draft.decode >= swaps and has_spare

    def _compensate(self) -> None:
        """More prefills come than were wanted: the most loaded ones decode at once.

        This is how decode is scaled live. The helpers are out of the list already; they stay.
        """
        draft = self.draft
        if not self.table.mutate:
            return
        while draft.prefill < 0 < draft.decode and draft.normal_prefill:
            draft.actions.append(Mutate(draft.normal_prefill.pop().replica_id))
            draft.prefill += 1
            draft.decode -= 1

    def _help(self, news: int) -> None:
        """As many normal prefills, least loaded first, help the new ones."""
        draft = self.draft
        for _ in range(min(news, len(draft.normal_prefill))):
            draft.actions.append(Help(draft.normal_prefill.pop(0).replica_id))

    # --- the paper's generator (6.9) --------------------------------------------------------------
    def _paper(self, sources: list[ReplicaView]) -> bool:
        """Joined targets by bandwidth; chains grow from sources under the same leaf first."""
        draft, sites = self.draft, self.sites
        wanted = min(draft.prefill + draft.decode, len(self.free))
        groups: list[list[ReplicaView]] = []
        left = wanted
        for group in sorted(
            self._columns().values(),
            key=lambda g: (-sum(sites[v.replica_id].nic_bytes_per_s for v in g), g[0].replica_id),
        ):
            if left <= 0:
                break
            groups.append(group[:left])
            left -= len(groups[-1])
        lanes = min(len(sources), *(len(group) for group in groups))
        if lanes > 1 and all(sites[v.replica_id].has_nvlink for g in groups for v in g):
            even = [group for group in groups if len(group) >= lanes]
            self.free = [view for group in even for view in group[:lanes]]
            return self._tanz(sources, lanes)
        count = max(1, min(len(sources), len(groups)))
        chains: list[list[int]] = [[] for _ in range(count)]
        picked: list[ReplicaView] = sources[:count]
        for group in groups:
            leaf = sites[group[0].replica_id].leaf
            near = [
                i for i, source in enumerate(picked) if sites[source.replica_id].leaf == leaf
            ] or list(range(count))
            index = min(near, key=lambda i: (len(chains[i]), i))
            chains[index] += [view.replica_id for view in group]
        filled = [(c, s) for c, s in zip(chains, picked, strict=True) if c]
        self._launch_chains([c for c, _ in filled], [s.replica_id for _, s in filled])
        return self.is_live

    # --- no copy to be had over the network -------------------------------------------------------
    def _from_loader(self) -> None:
        draft = self.draft
        cached = draft.snapshot.cached_machines
        if self.table.loader in ("cache", "pool"):
            self.free.sort(key=lambda v: v.machine not in cached)
        while self.free and (draft.prefill > 0 or draft.decode > 0):
            view = self.free.pop(0)
            role: Role = "decode" if draft.decode > 0 else "prefill"
            if role == "decode":
                draft.decode -= 1
            else:
                draft.prefill -= 1
            draft.actions.append(copy_load(view, role, draft.snapshot, self.table))


# --------------------------------------------------------------------------------------------------
# Ways around pairs whose load was given up: a plan is changed where it would take one again. Pure.
#
# A control plane does not see why a load did not end in time. It remembers between which replicas
# the weights should have gone and takes, for a while, another way: another source, then the memory
# or the disk of the target's own machine. If its own machine failed it as well, another target. If
# there is no other way at all, the plan stays as it is: trying again is all that is left.
#
# Without such pairs a plan is returned as it came.


OWN: Final = -1
"""Source of a load from the target's own machine."""
_SOURCES: Final = (S.DECODE, S.SHUTTING_DECODE, S.SHUTTING_NULL, S.PREFILL)
"""The replicas that may send instead, the least valuable for prompts first."""


def detour(actions: list[Action], snapshot: Snapshot, table: AutoscaleTable) -> list[Action]:
    """The plan without the pairs in `snapshot.avoided`, as far as there is another way."""
    if not snapshot.avoided or not any(isinstance(action, Load) for action in actions):
        return actions
    return _Detours(actions, snapshot, table).actions


def hops(load: Load) -> list[tuple[int, int]]:
    """Between which replicas a load goes; rings between the nodes of a machine included."""
    targets = [target.replica for target in load.targets]
    if not load.sources:
        return [(OWN, target) for target in targets]
    lanes = len(load.sources)
    if load.method != "tanz":
        return list(zip((load.sources[0], *targets), targets, strict=False))
    pairs = list(zip((*load.sources, *targets), targets, strict=False))
    for first in range(0, len(targets), lanes):
        column = targets[first : first + lanes]
        pairs += [(a, b) for a, b in zip(column, column[1:] + column[:1], strict=True) if a != b]
    return pairs


class _Detours:
    """One plan being changed."""

    def __init__(
        self, actions: Sequence[Action], snapshot: Snapshot, table: AutoscaleTable
    ) -> None:
        self._snapshot = snapshot
        self._table = table
        self._avoided: Collection[tuple[int, int]] = frozenset(snapshot.avoided)
        self._busy = {replica for action in actions for replica in involved(action)}
        self.actions: list[Action] = []
        for action in actions:
            self.actions += self._changed(action) if isinstance(action, Load) else [action]

    def _changed(self, load: Load) -> list[Action]:
        if not any(pair in self._avoided for pair in hops(load)):
            return [load]
        if load.method == "tanz":
            for turn in range(1, len(load.sources)):
                sources = load.sources[turn:] + load.sources[:turn]
                other = msgspec.structs.replace(load, sources=sources)
                if not any(pair in self._avoided for pair in hops(other)):
                    return [other]
            self._busy -= {*load.sources}  # they may send one to one
            return [self._single(target, load) for target in load.targets]
        if not load.sources:
            return [self._single(target, load) for target in load.targets]
        bad = next(i for i, pair in enumerate(hops(load)) if pair in self._avoided)
        head: list[Action] = []
        if bad:  # the chain ends before the first target that it did not reach
            head = [msgspec.structs.replace(load, targets=load.targets[:bad])]
        else:
            self._busy -= {*load.sources}
        return head + [self._single(target, load) for target in load.targets[bad:]]

    def _single(self, target: Target, load: Load) -> Load:
        """One target by itself: another source, its own machine, another target, or as it was."""
        views = self._snapshot.replicas
        if load.sources:
            candidates = [
                view.replica_id
                for state in _SOURCES
                for view in views
                if view.state is state
                and view.is_loaded
                and view.rdma is Marker.NONE
                and view.replica_id not in self._busy
            ]
            for source in candidates:
                if (source, target.replica) not in self._avoided:
                    self._busy.add(source)
                    return Load("p2p", (target,), (source,))
        if (OWN, target.replica) not in self._avoided:
            return self._own(target)
        for view in views:
            if (
                view.state is S.INACTIVE
                and is_unmarked(view)
                and view.replica_id not in self._busy
                and (OWN, view.replica_id) not in self._avoided
            ):
                self._busy.add(view.replica_id)
                return self._own(Target(view.replica_id, target.role))
        return self._own(target)

    def _own(self, target: Target) -> Load:
        views = self._snapshot.replicas
        view = next(view for view in views if view.replica_id == target.replica)
        return copy_load(view, target.role, self._snapshot, self._table)
