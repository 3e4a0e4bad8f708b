"""The controllers of the cluster: deployments, the scheduler, the kubelet. Pure.

`step(view)` compares what the store wishes with what the cluster is, writes what is into the store
and says what is to be done. A deployment follows the cluster (its planner, commands of the page)
until its first write or eviction; from then on its `spec.replicas` rules.

A pod is a replica in a role, from the decision to start it to its end. It waits for GPUs
(`Pending`), its weights come from host memory in emulated time, then its replica serves; a crashed
replica is a pod that is not ready. A pod that is deleted drains; what it holds when its grace is
over is lost. A pod on a lost node is replaced after five minutes, as its tolerations say.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from emu.apps.serve.kubernetes import shapes
from emu.apps.serve.kubernetes.documents import Document, Refused, table, text
from emu.apps.serve.kubernetes.kinds import (
    DEPLOYMENTS,
    MODELS,
    NAMESPACES,
    NODES,
    PODS,
    POOLS,
    REPLICA_SETS,
    SERVICES,
    SLICES,
    Kind,
)
from emu.apps.serve.kubernetes.objects import GRACE_S
from emu.apps.serve.kubernetes.shapes import NAMESPACE, node_name
from emu.apps.serve.kubernetes.slots import Slot, Stage
from emu.apps.serve.kubernetes.store import Store
from emu.apps.serve.kubernetes.view import (
    Action,
    ClusterView,
    EndDrain,
    Facts,
    LoseNode,
    ReplicaView,
    Start,
    Stop,
)
from emu.units import NS_PER_S

TOLERATION_NS: Final = 300 * NS_PER_S
"""Emulated time for which a pod stays on a node that is lost."""
_PRESENT: Final = frozenset({"loading", "serving"})


class Controller:
    """The controllers over one store."""

    def __init__(self, store: Store, facts: Facts, view: ClusterView) -> None:
        self._store = store
        self._facts = facts
        self._ruled: set[str] = set()
        """Roles whose deployment was written to."""
        self._slots: list[Slot] = []
        self._removed: set[int] = set()
        """Machines whose node was deleted."""
        self._seen: object = None
        self._made = 0
        self._actions: list[Action] = []
        self._view = view
        store.now_s = view.now_s
        self._found(view)
        self.step(view)

    def _found(self, view: ClusterView) -> None:
        """What is there from the start."""
        facts, store = self._facts, self._store
        for name in (NAMESPACE, "kube-system"):
            status = {"status": {"phase": "Active"}}
            store.create(NAMESPACES, "", {"metadata": {"name": name}, **status})
        gpus = max((replica.gpus for replica in view.replicas), default=1)
        port = next((replica.port for replica in view.replicas), 0)
        for role in facts.roles:
            store.create(DEPLOYMENTS, NAMESPACE, shapes.deployment(facts, role, gpus, port))
            store.create(SERVICES, NAMESPACE, shapes.service(facts, role, port))
        labels = shapes.model_label(facts)
        ports = [{"number": replica.port} for replica in view.replicas if replica.port][:8]
        picker = {"name": "endpoint-picker", "port": {"number": 9002}}
        pool: Document = {"selector": {"matchLabels": labels}, "targetPorts": ports}
        store.create(
            POOLS,
            NAMESPACE,
            {"metadata": {"name": "emu"}, "spec": {**pool, "endpointPickerRef": picker}},
        )
        model = {"modelName": facts.model, "criticality": "Standard", "poolRef": {"name": "emu"}}
        store.create(MODELS, NAMESPACE, {"metadata": {"name": "emu"}, "spec": model})

    def step(self, view: ClusterView) -> list[Action]:
        """Bring the store up to the cluster, and say what the cluster is to do."""
        store, self._view = self._store, view
        store.now_s = view.now_s
        seen = (view.replicas, view.machines, store.version)
        if seen == self._seen and not self._is_due(view.now_ns):
            return []
        self._actions = []
        replicas = {replica.replica_id: replica for replica in view.replicas}
        for slot in list(self._slots):
            self._follow(slot, replicas.get(slot.replica))
        self._adopt(view)
        for role in self._facts.roles:
            self._reconcile(role)
        self._schedule(view)
        self._publish(replicas)
        self._seen = (view.replicas, view.machines, store.version)
        return self._actions

    def _is_due(self, now_ns: int) -> bool:
        """Something happens by the passing of time."""
        for slot in self._slots:
            if slot.stage is Stage.LOADING and now_ns >= slot.loaded_ns:
                return True
            grace_ns = slot.grace_s * NS_PER_S
            if slot.is_leaving and not slot.is_cut and now_ns >= slot.leaving_ns + grace_ns:
                return True
            if slot.lost_ns >= 0 and now_ns >= slot.lost_ns + TOLERATION_NS:
                return True
        return False

    def refused(self, replica: int) -> None:
        """The cluster did not start this replica."""
        for slot in self._slots:
            if slot.replica == replica and slot.stage is Stage.STARTING:
                self._unplace(slot)
        self._seen = None

    def _unplace(self, slot: Slot) -> None:
        slot.stage, slot.replica = Stage.PENDING, -1

    def _follow(self, slot: Slot, replica: ReplicaView | None) -> None:
        """What has become of a pod's replica."""
        view = self._view
        if replica is None:
            return
        self._heed_node(slot, replica)
        if slot not in self._slots:
            return
        if slot.stage is Stage.LOADING:
            if replica.phase != "inactive":  # another has taken its GPUs
                self._unplace(slot)
            elif view.now_ns >= slot.loaded_ns:
                slot.stage = Stage.STARTING
                self._actions.append(Start(replica.replica_id, slot.role))
            return
        if slot.stage is Stage.STARTING:
            if replica.phase == "inactive":
                return
            slot.stage, slot.life = Stage.RUNNING, replica.life
        if replica.phase == "inactive" or (replica.phase == "failed" and slot.is_leaving):
            self._end(slot)
            return
        if replica.role and replica.role != slot.role and replica.phase in _PRESENT:
            self._end(slot)  # the planner has given it another role: it is adopted anew
            return
        if replica.life != slot.life:
            slot.restarts += replica.life - slot.life
            slot.life, slot.crashed_s = replica.life, view.now_s
            self._tell(slot, "BackOff", "the engine has crashed and is started again", "Warning")
        self._heed_ready(slot, replica)
        if slot.is_leaving:
            self._heed_drain(slot, replica)

    def _heed_ready(self, slot: Slot, replica: ReplicaView) -> None:
        is_ready = replica.phase == "serving"
        if is_ready != slot.is_ready:
            slot.is_ready, slot.changed_s = is_ready, self._view.now_s
            if is_ready:
                self._tell(slot, "Started", "Started container engine")
            elif not slot.is_leaving:
                self._tell(slot, "Unhealthy", "Readiness probe failed", "Warning")

    def _heed_drain(self, slot: Slot, replica: ReplicaView) -> None:
        """A pod that goes: stop, and in the end lose what it has."""
        if replica.phase in ("serving", "spare"):
            self._actions.append(Stop(replica.replica_id))
        elif self._is_over(slot) and not slot.is_cut:
            slot.is_cut = True
            self._actions.append(EndDrain(replica.replica_id))

    def _is_over(self, slot: Slot) -> bool:
        """The grace of a pod that goes is."""
        return self._view.now_ns >= slot.leaving_ns + slot.grace_s * NS_PER_S

    def _heed_node(self, slot: Slot, replica: ReplicaView) -> None:
        """A pod on a node that is lost is not ready, and is replaced in the end."""
        view = self._view
        slot.is_lost = view.machines[replica.machine].is_lost
        if not slot.is_lost:
            slot.lost_ns = -1
            return
        if slot.lost_ns < 0:
            slot.lost_ns = view.now_ns
        gone = replica.machine in self._removed
        if gone or view.now_ns >= slot.lost_ns + TOLERATION_NS:
            self._rule(slot.role)
            self._tell(slot, "TaintManagerEviction", "its node is lost", "Warning")
            self._end(slot)

    def _adopt(self, view: ClusterView) -> None:
        """Replicas that others have started become pods."""
        known = {slot.replica for slot in self._slots}
        for replica in view.replicas:
            if replica.replica_id in known or replica.phase not in _PRESENT or not replica.role:
                continue
            slot = self._new_slot(replica.role)
            slot.stage, slot.replica, slot.life = (
                Stage.RUNNING,
                replica.replica_id,
                replica.life,
            )
            slot.placed_s = slot.changed_s = view.now_s
            slot.is_ready = replica.phase == "serving"

    def _end(self, slot: Slot) -> None:
        self._slots.remove(slot)
        for kind in (PODS, SLICES):
            if self._store.get(kind, NAMESPACE, slot.name) is not None:
                self._store.delete(kind, NAMESPACE, slot.name)

    def _reconcile(self, role: str) -> None:
        """As many pods as are wanted, of the newest revision."""
        deployment = self._store.find(DEPLOYMENTS, NAMESPACE, role)
        alive = self.alive(role)
        if role not in self._ruled:
            if self._replicas(deployment) != len(alive):
                spec = table(deployment, "spec") | {"replicas": len(alive)}
                self._store.put(DEPLOYMENTS, NAMESPACE, role, {"spec": spec})
            return
        wanted, revision = self._replicas(deployment), shapes.template_hash(deployment)
        fresh = [slot for slot in alive if slot.revision == revision]
        surge = -(-wanted // 4) if len(fresh) < len(alive) else 0
        for _ in range(min(wanted - len(fresh), wanted + surge - len(alive))):
            self._new_slot(role)
        for slot in self._surplus(alive, revision, wanted):
            self._leave(slot)

    def _surplus(self, alive: Sequence[Slot], revision: str, wanted: int) -> Iterator[Slot]:
        """Pods that go now: those beyond what is wanted, and old ones that new ones replace."""
        order = sorted(alive, key=_first_to_go)
        stale = [slot for slot in order if slot.revision != revision]
        fresh = [slot for slot in order if slot.revision == revision]
        yield from fresh[: max(0, len(fresh) - wanted)]
        spare = sum(slot.is_ready for slot in alive) - (wanted - wanted // 4)
        for slot in stale:
            if not slot.is_ready or len(stale) > wanted:
                yield slot
            elif spare > 0:
                spare -= 1
                yield slot

    def _schedule(self, view: ClusterView) -> None:
        """Pods without GPUs get those of a free replica on an open node."""
        pending = [slot for slot in self._slots if slot.stage is Stage.PENDING]
        if not pending:
            return
        taken = {slot.replica for slot in self._slots}
        free = [r for r in view.replicas if r.phase == "inactive" and r.replica_id not in taken]
        usable = [r for r in free if self._is_open(view, r.machine)]
        count = len(view.machines)
        closed = sum(not self._is_open(view, machine) for machine in range(count))
        for slot in pending:
            if not usable:
                slot.problem = (
                    f"0/{count} nodes are available: {closed} node(s) were unschedulable, "
                    f"{count - closed} Insufficient {shapes.GPUS}."
                )
                continue
            replica = usable.pop(0)
            slot.stage, slot.replica = Stage.LOADING, replica.replica_id
            slot.loaded_ns = view.now_ns + self._facts.load_ns
            slot.placed_s = slot.changed_s = view.now_s
            slot.problem = ""

    def _is_open(self, view: ClusterView, machine: int) -> bool:
        node = self._store.get(NODES, "", node_name(machine))
        if node is None:
            return machine not in self._removed and not view.machines[machine].is_lost
        return not view.machines[machine].is_lost and not shapes.unschedulable(node)

    def _new_slot(self, role: str) -> Slot:
        deployment = self._store.find(DEPLOYMENTS, NAMESPACE, role)
        revision = shapes.template_hash(deployment)
        self._made += 1
        number = zlib.crc32(f"{self._facts.session} {self._made}".encode())
        suffix = "".join(_LETTERS[number // len(_LETTERS) ** i % len(_LETTERS)] for i in range(5))
        template = table(table(deployment, "spec"), "template")
        grace = table(template, "spec").get("terminationGracePeriodSeconds")
        slot = Slot(
            name=f"{role}-{revision}-{suffix}",
            role=role,
            revision=revision,
            gpus=max((r.gpus for r in self._view.replicas), default=1),
            grace_s=grace if isinstance(grace, int) else GRACE_S,
            changed_s=self._view.now_s,
        )
        self._slots.append(slot)
        return slot

    def _leave(self, slot: Slot, grace_s: int | None = None) -> None:
        """A pod goes: at once where nothing runs yet."""
        if slot.stage in (Stage.PENDING, Stage.LOADING):
            self._end(slot)
            return
        if grace_s is not None:
            slot.grace_s = min(grace_s, slot.grace_s) if slot.is_leaving else grace_s
        if slot.is_leaving:
            return
        slot.is_leaving, slot.is_ready = True, False
        slot.leaving_ns, slot.leaving_s = self._view.now_ns, self._view.now_s
        self._tell(slot, "Killing", "Stopping container engine")
        replica = next(r for r in self._view.replicas if r.replica_id == slot.replica)
        if slot.stage is Stage.RUNNING:
            self._heed_drain(slot, replica)

    def alive(self, role: str) -> list[Slot]:
        """Pods of a role that do not go."""
        return [slot for slot in self._slots if slot.role == role and not slot.is_leaving]

    @property
    def slots(self) -> Sequence[Slot]:
        """All pods."""
        return self._slots

    def room(self, role: str) -> int:
        """So many pods of a role there are GPUs for, on closed nodes and in pods that go too."""
        taken = {slot.replica for slot in self._slots}
        free = sum(r.phase == "inactive" and r.replica_id not in taken for r in self._view.replicas)
        placed = [slot for slot in self._slots if slot.replica >= 0]
        held = sum(slot.role == role or slot.is_leaving for slot in placed)
        return held + free

    def _rule(self, role: str) -> None:
        """From now on the deployment says how many there are."""
        if role not in self._ruled:
            self._ruled.add(role)
            deployment = self._store.find(DEPLOYMENTS, NAMESPACE, role)
            spec = table(deployment, "spec") | {"replicas": len(self.alive(role))}
            self._store.put(DEPLOYMENTS, NAMESPACE, role, {"spec": spec})

    def written(self, kind: Kind, name: str) -> None:
        """A client has changed an object."""
        if kind is DEPLOYMENTS:
            self._ruled.add(name)
        elif kind is NODES:
            held = self._store.find(NODES, "", name)
            spec = shapes.closing_taints(table(held, "spec"), self._view.now_s)
            self._store.put(NODES, "", name, {"spec": spec})

    def remove_pod(self, name: str, grace_s: int | None) -> None:
        """A pod was deleted or evicted: its deployment replaces it. Raises Refused (404)."""
        for slot in self._slots:
            if slot.name == name:
                self._rule(slot.role)
                self._leave(slot, grace_s)
                self._seen = None
                return
        raise Refused(404, f'pods "{name}" not found')

    def remove_node(self, name: str) -> list[Action]:
        """A machine is taken away, with all that runs on it."""
        self._store.find(NODES, "", name)
        machine = next(i for i in range(len(self._view.machines)) if node_name(i) == name)
        self._removed.add(machine)
        self._store.delete(NODES, "", name)
        self._seen = None
        return [LoseNode(machine)]

    def _publish(self, replicas: Mapping[int, ReplicaView]) -> None:
        """Write what is into the store."""
        store, facts, view = self._store, self._facts, self._view
        for index, machine in enumerate(view.machines):
            if index not in self._removed:
                held = store.get(NODES, "", node_name(index))
                shape = shapes.node(facts, index, machine, held, view.now_s)
                store.put(NODES, "", node_name(index), shape)
        for role in facts.roles:
            self._publish_role(role)
        for slot in self._slots:
            replica = replicas.get(slot.replica)
            made_by = store.find(REPLICA_SETS, NAMESPACE, f"{slot.role}-{slot.revision}")
            owner = shapes.owner(REPLICA_SETS, made_by)
            is_new = store.get(PODS, NAMESPACE, slot.name) is None
            shape = shapes.pod(facts, slot, replica, owner)
            held = store.put(PODS, NAMESPACE, slot.name, shape)
            if is_new and replica is not None:
                where = node_name(replica.machine)
                text_ = f"Successfully assigned {NAMESPACE}/{slot.name} to {where}"
                store.tell(held, "Scheduled", text_)
            elif is_new:
                store.tell(held, "FailedScheduling", slot.problem, kind="Warning")
            if replica is not None and replica.port:
                shape = shapes.slice_of(facts, slot, held, replica.port)
                store.put(SLICES, NAMESPACE, slot.name, shape)

    def _publish_role(self, role: str) -> None:
        store = self._store
        deployment = store.find(DEPLOYMENTS, NAMESPACE, role)
        revision, alive = shapes.template_hash(deployment), self.alive(role)
        shape = shapes.deployment_status(deployment, alive, revision, self._view.now_s)
        deployment = store.put(DEPLOYMENTS, NAMESPACE, role, shape)
        names = [text(d, "metadata", "name") for d in store.list(REPLICA_SETS, NAMESPACE)]
        prefix = f"{role}-"
        earlier = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        current = [slot.revision for slot in self._slots if slot.role == role]
        for one in dict.fromkeys([*earlier, *current, revision]):
            slots = [slot for slot in alive if slot.revision == one]
            wanted = len(slots) if one != revision else self._replicas(deployment)
            held = store.get(REPLICA_SETS, NAMESPACE, f"{role}-{one}")
            is_current = one == revision
            number = self._number(held, len(earlier))
            shape = shapes.replica_set(
                deployment, slots, one, wanted, number, is_current=is_current
            )
            if is_current:
                known = {"metadata": {"annotations": {shapes.REVISION: str(number)}}}
                store.put(DEPLOYMENTS, NAMESPACE, role, {**known})
            if not is_current and held is not None:
                shape["spec"] = table(held, "spec") | {"replicas": wanted}
            store.put(REPLICA_SETS, NAMESPACE, f"{role}-{one}", shape)

    @staticmethod
    def _number(held: Document | None, earlier: int) -> int:
        """The number of a revision; they are counted from 1."""
        known = table(table(held or {}, "metadata"), "annotations").get(shapes.REVISION)
        return int(known) if isinstance(known, str) else earlier + 1

    @staticmethod
    def _replicas(deployment: Document) -> int:
        count = table(deployment, "spec").get("replicas")
        assert isinstance(count, int)
        return count

    def _tell(
        self,
        slot: Slot,
        reason: str,
        message: str,
        kind: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        held = self._store.get(PODS, NAMESPACE, slot.name)
        if held is not None:
            self._store.tell(held, reason, message, kind=kind)


def _first_to_go(slot: Slot) -> tuple[bool, bool, int]:
    """Pods without GPUs, then those that are not ready, then the highest replicas."""
    return slot.stage is not Stage.PENDING, slot.is_ready, -slot.replica


_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
