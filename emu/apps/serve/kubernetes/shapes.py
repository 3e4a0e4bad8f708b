"""From what the controller knows to documents: pods, nodes, deployments, slices, pools. Pure."""

from __future__ import annotations

import zlib
from typing import Final

import msgspec

from emu.apps.serve.kubernetes.documents import Document, labels_of, plain, table, text
from emu.apps.serve.kubernetes.kinds import DEPLOYMENTS, Kind
from emu.apps.serve.kubernetes.objects import (
    GRACE_S,
    Address,
    Condition,
    Container,
    ContainerPort,
    ContainerStatus,
    DeploymentSpec,
    DeploymentStatus,
    Metadata,
    Node,
    NodeSpec,
    NodeStatus,
    Owner,
    Pod,
    PodSpec,
    PodStatus,
    Taint,
    Template,
)
from emu.apps.serve.kubernetes.slots import Slot
from emu.apps.serve.kubernetes.store import stamp
from emu.apps.serve.kubernetes.view import Facts, MachineView, ReplicaView
from emu.process.prepared import prepared

NAMESPACE: Final = "default"
GPUS: Final = "nvidia.com/gpu"
REVISION: Final = "deployment.kubernetes.io/revision"
IMAGE: Final = "emu/engine"
_MODEL_LABEL: Final = "emu/model"


def node_name(machine: int) -> str:
    """What a machine is called."""
    return f"node-{machine}"


def model_label(facts: Facts) -> dict[str, str]:
    """The label that all pods of a model have."""
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in facts.model)[:63].strip("-_.")
    return {_MODEL_LABEL: safe}


def role_labels(facts: Facts, role: str) -> dict[str, str]:
    """Labels of the pods of a role."""
    return {"app": role, "llm-d.ai/role": role, **model_label(facts)}


def template(facts: Facts, role: str, gpus: int, port: int) -> Document:
    """What the pods of a role are like."""
    resources = {"limits": {GPUS: str(gpus)}, "requests": {GPUS: str(gpus)}}
    container = Container(
        name="engine",
        image=f"{IMAGE}:{facts.version}",
        ports=[ContainerPort(name="http", container_port=port, protocol="TCP")] if port else [],
        resources=dict(resources),
        readiness_probe={"httpGet": {"path": "/health", "port": "http"}} if port else {},
    )
    spec = PodSpec(
        containers=[container],
        restart_policy="Always",
        termination_grace_period_seconds=GRACE_S,
    )
    return plain(Template(metadata=Metadata(labels=role_labels(facts, role)), spec=spec))


def template_hash(document: Document) -> str:
    """Names the revision of a template."""
    data = msgspec.json.encode(table(document, "spec").get("template"), order="sorted")
    return f"{zlib.crc32(data):08x}"


def deployment(facts: Facts, role: str, gpus: int, port: int) -> Document:
    """The deployment of a role, as it is at the start."""
    quarter = {"maxSurge": "25%", "maxUnavailable": "25%"}
    spec = DeploymentSpec(
        replicas=0,
        selector={"matchLabels": {"app": role}},
        template=template(facts, role, gpus, port),
        strategy={"type": "RollingUpdate", "rollingUpdate": quarter},
    )
    labels = role_labels(facts, role)
    return {"metadata": {"name": role, "labels": labels}, "spec": plain(spec)}


def deployment_status(held: Document, slots: list[Slot], revision: str, now_s: float) -> Document:
    """Figures and conditions; times of conditions that have not changed stay."""
    wanted = table(held, "spec").get("replicas")
    assert isinstance(wanted, int)
    ready = sum(slot.is_ready for slot in slots)
    updated = sum(slot.revision == revision for slot in slots)
    generation = table(held, "metadata").get("generation", 1)
    assert isinstance(generation, int)
    is_available = ready >= wanted - wanted // 4
    is_done = updated == len(slots) == wanted and ready >= wanted
    name = f"{text(held, 'metadata', 'name')}-{revision}"
    word, does = (
        ("NewReplicaSetAvailable", "has successfully progressed")
        if is_done
        else ("ReplicaSetUpdated", "is progressing")
    )
    available = Condition(
        type="Available",
        status="True" if is_available else "False",
        reason="MinimumReplicasAvailable" if is_available else "MinimumReplicasUnavailable",
        message=f"Deployment {'has' if is_available else 'does not have'} minimum availability.",
    )
    progressing = Condition(
        type="Progressing", status="True", reason=word, message=f'ReplicaSet "{name}" {does}.'
    )
    status = DeploymentStatus(
        observed_generation=generation,
        replicas=len(slots),
        updated_replicas=updated,
        ready_replicas=ready,
        available_replicas=ready,
        unavailable_replicas=max(0, max(wanted, len(slots)) - ready),
        conditions=[_since(held, one, stamp(now_s)) for one in (available, progressing)],
    )
    return {"metadata": {}, "status": plain(status)}


def _since(held: Document, condition: Condition, now: str) -> Condition:
    """A condition, with the times since which it is so and says so."""
    since = updated = now
    known = table(held, "status").get("conditions")
    for one in known if isinstance(known, list) else []:
        if text(one, "type") == condition.type:
            if text(one, "status") == condition.status:
                since = text(one, "lastTransitionTime") or now
            if (text(one, "reason"), text(one, "message")) == (condition.reason, condition.message):
                updated = text(one, "lastUpdateTime") or now
    return msgspec.structs.replace(condition, last_transition_time=since, last_update_time=updated)


def replica_set(
    held: Document, slots: list[Slot], revision: str, wanted: int, number: int, *, is_current: bool
) -> Document:
    """The pods of one revision of a deployment, `wanted` of them, with its number.

    Its template is the current one's, or stays.
    """
    name = text(held, "metadata", "name")
    metadata = Metadata(
        name=f"{name}-{revision}",
        annotations={REVISION: str(number)},
        labels=labels_of(held) | {"pod-template-hash": revision},
        owner_references=[owner(DEPLOYMENTS, held)],
    )
    ready = sum(slot.is_ready for slot in slots)
    status = {
        "replicas": len(slots),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "fullyLabeledReplicas": len(slots),
        "observedGeneration": 1,
    }
    template = table(table(held, "spec"), "template") if is_current else {}
    labels = table(table(template, "metadata"), "labels") | {"pod-template-hash": revision}
    spec: Document = {"replicas": wanted, "selector": {"matchLabels": labels}}
    if is_current:
        metadata_of = table(template, "metadata") | {"labels": labels}
        spec["template"] = {**template, "metadata": metadata_of}
    return {"metadata": plain(metadata), "spec": spec, "status": status}


def owner(kind: Kind, held: Document) -> Owner:
    """A reference to the object that made another."""
    return Owner(
        api_version=kind.api_version,
        kind=kind.kind,
        name=text(held, "metadata", "name"),
        uid=text(held, "metadata", "uid"),
        controller=True,
        block_owner_deletion=True,
    )


def pod(facts: Facts, slot: Slot, replica: ReplicaView | None, made_by: Owner) -> Document:
    """A pod from its slot."""
    labels = role_labels(facts, slot.role) | {"pod-template-hash": slot.revision}
    if replica is not None:
        labels["emu/replica"] = str(replica.replica_id)
    metadata = Metadata(
        name=slot.name, namespace=NAMESPACE, labels=labels, owner_references=[made_by]
    )
    if slot.is_leaving:
        metadata.deletion_timestamp = stamp(slot.leaving_s + slot.grace_s)
        metadata.deletion_grace_period_seconds = slot.grace_s
    gpus, port = (replica.gpus, replica.port) if replica is not None else (slot.gpus, 0)
    spec = msgspec.convert(table(template(facts, slot.role, gpus, port), "spec"), prepared(PodSpec))
    spec.node_name = node_name(replica.machine) if replica is not None else ""
    spec.termination_grace_period_seconds = slot.grace_s
    spec.scheduler_name = "emu"
    return plain(Pod(metadata=metadata, spec=spec, status=_pod_status(facts, slot, replica)))


def _pod_status(facts: Facts, slot: Slot, replica: ReplicaView | None) -> PodStatus:
    since = stamp(slot.changed_s)
    if replica is None:
        unplaced = Condition(
            type="PodScheduled",
            status="False",
            reason="Unschedulable",
            message=slot.problem,
            last_transition_time=since,
        )
        return PodStatus(phase="Pending", conditions=[unplaced])
    ready = "True" if slot.is_ready else "False"
    container = ContainerStatus(
        name="engine",
        image=f"{IMAGE}:{facts.version}",
        image_id="",
        ready=slot.is_ready,
        started=slot.is_ready or replica.phase == "draining",
        restart_count=slot.restarts,
        state=_container_state(slot, replica, since),
    )
    if slot.restarts:
        ended = {"exitCode": 137, "reason": "Error", "finishedAt": stamp(slot.crashed_s)}
        container.last_state = {"terminated": ended}
    why = "" if slot.is_ready else "ContainersNotReady"
    placed = stamp(slot.placed_s)
    return PodStatus(
        phase="Running",
        conditions=[
            Condition(type="PodScheduled", status="True", last_transition_time=placed),
            Condition(type="Initialized", status="True", last_transition_time=placed),
            Condition(type="ContainersReady", status=ready, reason=why, last_transition_time=since),
            Condition(type="Ready", status=ready, reason=why, last_transition_time=since),
        ],
        host_ip=facts.host,
        pod_ip=facts.host,
        pod_ips=[{"ip": facts.host}],
        start_time=placed,
        container_statuses=[container],
        reason="NodeLost" if slot.is_lost else "",
    )


def _container_state(slot: Slot, replica: ReplicaView, since: str) -> Document:
    if replica.phase == "failed":
        text = "the engine has crashed"
        return {"waiting": {"reason": "CrashLoopBackOff", "message": text}}
    return {"running": {"startedAt": since}}


def node(
    facts: Facts, machine: int, view: MachineView, held: Document | None, now_s: float
) -> Document:
    """A node from its machine."""
    name = node_name(machine)
    memory = f"{int(view.host_memory_gib * 2**20)}Ki"
    resources = {GPUS: str(view.gpus), "cpu": "128", "memory": memory, "pods": "110"}
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "nvidia.com/gpu.product": view.gpu.replace(" ", "-"),
        "nvidia.com/gpu.count": str(view.gpus),
    }
    ready = Condition(
        type="Ready", status="True", reason="KubeletReady", message="the machine is there"
    )
    if view.is_lost:
        ready = Condition(
            type="Ready",
            status="False",
            reason="NodeStatusUnknown",
            message="Kubelet stopped posting node status.",
        )
    ready = _since(held or {}, ready, stamp(now_s))
    if view.is_lost:
        ready.status = "Unknown"
    status = NodeStatus(
        capacity=resources,
        allocatable=resources,
        conditions=[ready],
        addresses=[Address(type="Hostname", address=name)],
        node_info={
            "architecture": "amd64",
            "bootID": f"{facts.session}-{machine}",
            "containerRuntimeVersion": "emu://1",
            "kernelVersion": "emulated",
            "kubeProxyVersion": KUBERNETES,
            "kubeletVersion": KUBERNETES,
            "machineID": f"{facts.session}-{machine}",
            "operatingSystem": "linux",
            "osImage": "emulated",
            "systemUUID": f"{facts.session}-{machine}",
        },
    )
    metadata = Metadata(name=name, labels=labels)
    document = plain(Node(metadata=metadata, spec=NodeSpec(), status=status))
    document["spec"] = {**table(held or {}, "spec"), "providerID": f"emu://{name}"}
    return document


def unschedulable(document: Document) -> bool:
    """A node that operators have closed."""
    return table(document, "spec").get("unschedulable") is True


def closing_taints(spec: Document, now_s: float) -> Document:
    """The spec of a node with the taint that a cordon brings, or without."""
    key = "node.kubernetes.io/unschedulable"
    held = spec.get("taints")
    taints = [one for one in held if one.get("key") != key] if isinstance(held, list) else []
    if spec.get("unschedulable") is True:
        taints.append(plain(Taint(key=key, effect="NoSchedule", time_added=stamp(now_s))))
    result = {name: value for name, value in spec.items() if name != "taints"}
    return result | ({"taints": taints} if taints else {})


def service(facts: Facts, role: str, port: int) -> Document:
    """The service in front of a role."""
    ports = [{"name": "http", "port": 8000, "protocol": "TCP", "targetPort": "http"}]
    spec = {"type": "ClusterIP", "clusterIP": "None", "selector": {"app": role}, "ports": ports}
    return {"metadata": {"name": role, "labels": role_labels(facts, role)}, "spec": spec}


def slice_of(facts: Facts, slot: Slot, held: Document, port: int) -> Document:
    """A slice with the one endpoint of a pod: each has a port of its own."""
    endpoint = {
        "addresses": [facts.host],
        "conditions": {
            "ready": slot.is_ready and not slot.is_leaving,
            "serving": slot.is_ready,
            "terminating": slot.is_leaving,
        },
        "nodeName": text(held, "spec", "nodeName"),
        "targetRef": {
            "kind": "Pod",
            "name": slot.name,
            "namespace": NAMESPACE,
            "uid": text(held, "metadata", "uid"),
        },
    }
    labels = {"kubernetes.io/service-name": slot.role, "app": slot.role}
    return {
        "metadata": {"name": slot.name, "labels": labels},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        "endpoints": [endpoint],
    }


KUBERNETES: Final = "v1.32.0"
"""The version whose API this is a part of."""
