"""Objects of the API that emu makes, as structs: field names and defaults are Kubernetes'."""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field

from emu.apps.serve.kubernetes.documents import Document

GRACE_S: Final = 30
"""Kubernetes' default: emulated seconds that a pod has to finish what it serves."""


class Part(Struct, kw_only=True, rename="camel", omit_defaults=True):
    """A part of an object; what is empty is left out."""


class Owner(Part):
    """The object that made this one."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False
    block_owner_deletion: bool = False


class Metadata(Part):
    """What every object has."""

    name: str = ""
    namespace: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[Owner] = []
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None


class Condition(Part):
    """Something that is so or not."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""
    last_update_time: str = ""


class Taint(Part):
    """What keeps pods off a node."""

    key: str
    effect: str
    time_added: str = ""


class NodeSpec(Part):
    """What operators wish of a node."""

    provider_id: str = field(default="", name="providerID")
    unschedulable: bool = False
    taints: list[Taint] = []


class Address(Part):
    """Where a node is."""

    type: str
    address: str


class NodeStatus(Part):
    """What a node has, and whether it is there."""

    capacity: dict[str, str]
    allocatable: dict[str, str]
    conditions: list[Condition]
    addresses: list[Address]
    node_info: dict[str, str]


class ContainerPort(Part):
    """A port of a container."""

    name: str
    container_port: int
    protocol: str


class Container(Part):
    """The engine."""

    name: str
    image: str
    ports: list[ContainerPort] = []
    resources: Document = {}
    readiness_probe: Document = {}


class PodSpec(Part):
    """Where a pod runs, and what."""

    containers: list[Container]
    termination_grace_period_seconds: int
    node_name: str = ""
    restart_policy: str = ""
    scheduler_name: str = ""


class ContainerStatus(Part):
    """How a container is."""

    name: str
    image: str
    image_id: str = field(name="imageID")
    ready: bool
    started: bool
    restart_count: int
    state: Document = {}
    last_state: Document = {}


class PodStatus(Part):
    """How a pod is."""

    phase: str
    conditions: list[Condition] = []
    host_ip: str = field(default="", name="hostIP")
    pod_ip: str = field(default="", name="podIP")
    pod_ips: list[dict[str, str]] = field(default_factory=list, name="podIPs")
    start_time: str = ""
    container_statuses: list[ContainerStatus] = []
    reason: str = ""


class Pod(Part):
    """A replica as a pod."""

    metadata: Metadata
    spec: PodSpec
    status: PodStatus


class Node(Part):
    """A machine."""

    metadata: Metadata
    spec: NodeSpec
    status: NodeStatus


class Template(Part):
    """Pods of a deployment."""

    metadata: Metadata
    spec: PodSpec


class DeploymentSpec(Part):
    """What operators wish of a role: pods, revisions that are kept, a deadline in s."""

    replicas: int
    selector: Document = {}
    template: Document = {}
    strategy: Document = {}
    revision_history_limit: int = 10
    """Old revisions that are kept."""
    progress_deadline_seconds: int = 600


class DeploymentStatus(Part):
    """How far a role is: numbers of pods, and the generation of the spec that they follow."""

    observed_generation: int
    """Of the spec that the figures follow."""
    replicas: int = 0
    updated_replicas: int = 0
    ready_replicas: int = 0
    available_replicas: int = 0
    unavailable_replicas: int = 0
    conditions: list[Condition] = []


class ScaleSpec(Part):
    """So many are wanted."""

    replicas: int


class Scale(Part):
    """The `scale` sub-resource, as clients write it."""

    spec: ScaleSpec
    metadata: Document = {}


class DeleteOptions(Part):
    """How an object is to go."""

    grace_period_seconds: int | None = None
    preconditions: dict[str, str] = {}
    dry_run: list[str] = []
    propagation_policy: str | None = None


class Eviction(Part):
    """A pod shall go, if budgets allow it."""

    metadata: Document = {}
    delete_options: DeleteOptions | None = None
