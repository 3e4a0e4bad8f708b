"""The serverless executor's plans (BlitzScale 6.10), and those for colocated replicas. Pure.

Replicas load from the memory or the disk of their own machine, never from each other. A machine
counts as cached if it holds the weights in host memory. Shutting replicas are not revived, and a
spare is reused only for the role that it had.
"""

from __future__ import annotations

from emu.autoscale.demand import Demand, floor_of
from emu.autoscale.draft import Draft
from emu.autoscale.orders import Action, Load, Method, Reuse, Revive, Role, Shut, Target
from emu.autoscale.snapshot import ReplicaView, Snapshot
from emu.config.schema import AutoscaleTable, CarriedTable
from emu.replica.states import ReplicaState

S = ReplicaState


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
