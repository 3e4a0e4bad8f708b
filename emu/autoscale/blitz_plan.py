"""The blitz executor's plans (BlitzScale 6.4 to 6.9): from a demand to actions, pure.

The steps stand in `Draft`; this module puts them in order for each sign of the two demands and
chooses how weights travel. `paper` grows chains by bandwidth and leaf switch (6.9) instead of the
released code's order.
"""

from __future__ import annotations

from collections.abc import Mapping

from emu.autoscale.demand import Demand
from emu.autoscale.draft import Draft, is_unmarked
from emu.autoscale.local_plans import copy_load
from emu.autoscale.orders import Action, Help, Load, Mutate, Role, Target
from emu.autoscale.snapshot import ReplicaView, Site, Snapshot
from emu.config.schema import CarriedTable, PaperTable
from emu.replica.states import Marker, ReplicaState
from emu.units import ms_to_ns

S = ReplicaState


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
    snapshot: Snapshot, demand: Demand, table: CarriedTable, sites: Mapping[int, Site]
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


def _load_over_nvlink(draft: Draft, sites: Mapping[int, Site]) -> None:
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


def _nvlink_source(snapshot: Snapshot, domain: int, sites: Mapping[int, Site]) -> int | None:
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

    def __init__(self, draft: Draft, sites: Mapping[int, Site]) -> None:
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
