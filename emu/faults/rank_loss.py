"""Groups of ranks that share experts and go on without a rank that is lost (`recovery.ep_fault`).

Owns what stands around the machine of `expert_group.py`: members are held and let go, timers, the
experts that no survivor has, notes in the timeline, figures. A member whose process is gone is held
with the others, so that requests still reach it; they are lost with those that it had when the loss
is detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from emu.catalogue import sizes
from emu.documents import DocumentView
from emu.faults.expert_group import (
    Action,
    After,
    Event,
    ExpertGroup,
    Fence,
    GroupState,
    Order,
    RankLost,
    RankReady,
)
from emu.kernel.priorities import PRIORITY_WORLD
from emu.latency.experts.placement import in_order
from emu.latency.experts.routed import make_balance, stall_of_ns
from emu.replica.events import Paused, Unpaused
from emu.replica.states import LOADING, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.units import NS_PER_S, gbps_to_bytes_per_s, s_to_ns

if TYPE_CHECKING:
    from emu.config.tables.experts import RankLossKeys
    from emu.faults.ports import FaultWorld, SharedExperts

_RUNNING: Final = (GroupState.SERVING, GroupState.DEGRADED, GroupState.FAILED)
"""States in which members are not held."""


_AWAY: Final = (ReplicaState.FAILED, ReplicaState.INACTIVE, *sorted(LOADING, key=str))
"""States of a member without a process, or without weights."""


class LossPlan:
    """How long a loss takes a group (`expert_group.Plan`)."""

    def __init__(self, shared: SharedExperts, keys: RankLossKeys) -> None:
        context = shared.context
        setting, experts = context.shared_experts, context.model.experts
        assert setting is not None
        assert experts is not None
        slots = setting.slots(experts.count) // context.expert_parallel
        self.detect_ns = s_to_ns(keys.ep_detect_s)
        self.agree_ns = s_to_ns(keys.ep_agree_s)
        self.join_ns = max(1, stall_of_ns(context, slots))
        self.reloaded_bytes = 0
        self._backup = keys.expert_backup
        self._context = context
        self._experts = experts.count
        self._members = {member: at for at, member in enumerate(shared.members)}
        balance = make_balance(context, setting)
        self._layers = (
            [in_order(experts.count, context.expert_parallel)]
            if balance is None
            else balance.placed
        )
        self._slots = slots

    def missing(self, lost: frozenset[int]) -> float:
        """Experts of a layer without a copy on a survivor, the mean of the layers."""
        gone = self._ranks(lost)
        counts = []
        for placed in self._layers:
            left = {expert for rank, own in enumerate(placed) if rank not in gone for expert in own}
            counts.append(self._experts - len(left))
        return math.fsum(counts) / len(counts)

    def has_room(self, lost: frozenset[int]) -> bool:
        """Survivors have a slot for each expert."""
        survivors = self._context.expert_parallel - len(self._ranks(lost))
        return survivors * self._slots >= self._experts

    def reload_ns(self, lost: frozenset[int]) -> int:
        """Time until every expert has a copy; -1: too few slots are left, or one has no copy."""
        if not self.has_room(lost):
            return -1
        survivors = self._context.expert_parallel - len(self._ranks(lost))
        missing = self.missing(lost)
        if not missing:
            return 1
        if self._backup == "none":
            return -1
        model, node, gpu = self._context.model, self._context.node, self._context.gpu
        experts = model.experts
        assert experts is not None
        params = experts.expert_params(model.hidden, gated=model.gated_mlp)
        weights = sizes.weight_bytes(params, sizes.expert_dtype(model, self._context.dtype))
        moved = missing * model.moe_layer_count * weights
        self.reloaded_bytes += round(moved)
        pcie = node.pcie_gbps if node.pcie_gbps > 0 else gpu.pcie_gbps
        gbps = {"host": pcie, "peer": node.nic_gbps, "disk": node.ssd_gbps}[self._backup]
        return max(1, round(moved / survivors / gbps_to_bytes_per_s(gbps) * NS_PER_S))

    def _ranks(self, lost: frozenset[int]) -> frozenset[int]:
        each = self._context.expert_parallel // len(self._members)
        firsts = (self._members[member] * each for member in sorted(lost))
        return frozenset(first + rank for first in firsts for rank in range(each))


class _Watched:
    """A group with its members, and those that are held."""

    def __init__(self, name: str, shared: SharedExperts, keys: RankLossKeys) -> None:
        self.plan = LossPlan(shared, keys)
        self.group = ExpertGroup(name, self.plan)
        self.members = tuple(shared.members)
        self.held: dict[int, tuple[int, int]] = {}
        """Member -> its incarnation and when it was held."""
        self.dead: dict[int, tuple[str, int]] = {}
        """Members whose loss is not known yet: cause, and back after."""
        self.due: dict[int, int] = {}
        """When those whose loss is known are back; -1 = as configured."""
        self.stalled_at_ns = -1
        self.stalled_ns = 0
        self.losses = 0


class RankLoss:
    """All groups of a cluster that may lose a rank and go on."""

    def __init__(
        self, cluster: FaultWorld, crash: Callable[[ReplicaHandle, str, int], None]
    ) -> None:
        """`crash`: a replica dies now, for everything that knows of it."""
        self._cluster = cluster
        self._crash = crash
        self._watched = [
            _Watched(name, shared, cluster.config.recovery)
            for name, shared in cluster.expert_groups().items()
        ]
        self._of = {member: one for one in self._watched for member in one.members}

    def takes(self, replica: ReplicaHandle) -> bool:
        """Whether its loss is the business of its group."""
        watched = self._of.get(replica.replica_id)
        return watched is not None and replica.state not in _AWAY

    def goes_on_without(self, replica: ReplicaHandle) -> bool:
        """Its group may serve without it; False = the group starts again, or it is in none."""
        watched = self._of.get(replica.replica_id)
        return watched is not None and watched.group.state is not GroupState.FAILED

    def lose(
        self, replica: ReplicaHandle, cause: str, back_ns: int, *, is_known: bool = False
    ) -> None:
        """Its process dies now; `back_ns`: it is back so long after that is known (-1: as
        configured). `is_known`: it was given up."""
        watched = self._of[replica.replica_id]
        if replica.replica_id not in watched.dead:
            watched.dead[replica.replica_id] = (cause, back_ns)
            watched.losses += 1
        elif not is_known:
            return
        self._step(watched, RankLost(replica.replica_id, is_known))

    def thawed(self, replica: ReplicaHandle) -> None:
        """A pause of its own is over: it goes on waiting with its group."""
        watched = self._of.get(replica.replica_id)
        if watched is not None and watched.group.state not in _RUNNING:
            self._hold(watched)

    def on_moved(self, replica: ReplicaHandle, before: ReplicaState) -> None:
        """A member that was lost has its weights again."""
        watched = self._of.get(replica.replica_id)
        if watched is None or before not in LOADING or replica.state in LOADING:
            return
        is_back = replica.state not in (ReplicaState.INACTIVE, ReplicaState.FAILED)
        if is_back and replica.replica_id in watched.group.lost:
            self._step(watched, RankReady(replica.replica_id))

    def _step(self, watched: _Watched, event: Event) -> None:
        group = watched.group
        before = group.state
        actions = group.step(event)
        if group.state is not before:
            self._tell(watched)
        for action in actions:
            self._apply(watched, action)
        if group.state not in _RUNNING:
            self._hold(watched)

    def _tell(self, watched: _Watched) -> None:
        group = watched.group
        names = ", ".join(str(member) for member in sorted(group.lost))
        text = group.state.value + (f", without {names}" if names else "")
        self._cluster.note("expert group", group.name, text)

    def _apply(self, watched: _Watched, action: Action) -> None:
        kernel = self._cluster.kernel
        match action:
            case Order.STALL:
                watched.stalled_at_ns = kernel.now_ns
                self._hold(watched)
            case Order.RESUME:
                self._spare(watched)
                self._release(watched)
            case After(delay_ns=delay_ns, event=event):

                def due() -> None:
                    self._step(watched, event)

                kernel.call_at(kernel.now_ns + delay_ns, PRIORITY_WORLD, due)
            case Fence(members=members):
                for member in members:
                    self._fence(watched, member)
            case Order.LOSE_GROUP:
                self._lose_group(watched)

    def _spare(self, watched: _Watched) -> None:
        """Survivors have all experts, unless the group starts again."""
        group = watched.group
        wave = self._cluster.replicas[watched.members[0]].wave
        assert wave is not None
        wave.spare(frozenset() if group.state is GroupState.FAILED else group.lost)

    def _hold(self, watched: _Watched) -> None:
        for member in watched.members:
            replica = self._cluster.replicas[member]
            if replica.state not in _AWAY and not replica.is_paused:
                replica.actor.tell(Paused())
                watched.held[member] = (replica.incarnation, replica.paused_ns)

    def _release(self, watched: _Watched) -> None:
        now_ns = self._cluster.kernel.now_ns
        watched.stalled_ns += now_ns - watched.stalled_at_ns
        held, watched.held = watched.held, {}
        for member, (life, since_ns) in held.items():
            replica = self._cluster.replicas[member]
            if replica.is_paused and (replica.incarnation, replica.paused_ns) == (life, since_ns):
                replica.actor.tell(Unpaused(life=life, since_ns=since_ns))

    def _fence(self, watched: _Watched, member: int) -> None:
        cause, back_ns = watched.dead.pop(member)
        watched.held.pop(member, None)
        watched.due[member] = self._cluster.kernel.now_ns + back_ns if back_ns >= 0 else -1
        self._crash(self._cluster.replicas[member], cause, back_ns)

    def _lose_group(self, watched: _Watched) -> None:
        """Strictly, as a group without masks: every member starts again, with the last one lost."""
        now_ns = self._cluster.kernel.now_ns
        due = [watched.due[member] for member in sorted(watched.group.lost)]
        restart_ns = s_to_ns(self._cluster.config.recovery.restart_s)
        back_ns = -1 if min(due) < 0 else max(restart_ns, max(due) - now_ns)
        for member in watched.members:
            replica = self._cluster.replicas[member]
            if replica.state not in (ReplicaState.FAILED, ReplicaState.INACTIVE):
                self._crash(replica, "too few experts are left", back_ns)
        watched.group.all_lost(frozenset(watched.members))

    def is_unknown(self, replica: ReplicaHandle) -> bool:
        """It is gone, and nothing but its group feels it yet."""
        watched = self._of.get(replica.replica_id)
        return watched is not None and replica.replica_id in watched.dead

    def problems(self) -> list[str]:
        """What of the groups' own rules does not hold now."""
        found = []
        for watched in self._watched:
            group = watched.group
            there = [self._cluster.replicas[member] for member in watched.members]
            present = [one for one in there if one.state not in _AWAY]
            if group.state not in _RUNNING:
                loose = [one.name for one in present if not one.is_paused]
                if loose:
                    found.append(f"group {group.name} is {group.state.value}, but {loose} run")
            elif watched.held or watched.dead:
                found.append(f"group {group.name} is {group.state.value} and holds members")
            if group.must_restart:
                found.append(f"group {group.name} has failed and does not start again")
            if group.state in (GroupState.SERVING, GroupState.DEGRADED):
                if not watched.plan.has_room(group.lost):
                    found.append(f"group {group.name} serves without slots for all experts")
                wrong = [one.name for one in present if one.replica_id in group.lost]
                if wrong:
                    found.append(f"group {group.name} serves with {wrong}, which it has lost")
        return found

    def figures(self) -> Mapping[str, DocumentView]:
        """What losses were to each group that had any."""
        return {
            one.group.name: {
                "ranks_lost": one.losses,
                "interrupted_s": round(one.stalled_ns / NS_PER_S, 6),
                "reloaded_bytes": one.plan.reloaded_bytes,
                "ranks_missing": len(one.group.lost),
                "state": one.group.state.value,
            }
            for one in self._watched
            if one.losses
        }
