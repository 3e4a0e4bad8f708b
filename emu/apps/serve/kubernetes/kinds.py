"""The kinds of objects that the API has: the one table that discovery, paths and the store read."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

READ: Final = ("get", "list", "watch")
WRITE: Final = ("create", "delete", "patch", "update")


class Kind(Struct, frozen=True):
    """A kind of objects."""

    kind: str
    plural: str
    group: str = ""
    version: str = "v1"
    short: tuple[str, ...] = ()
    is_namespaced: bool = True
    verbs: tuple[str, ...] = (*READ, *WRITE)
    parts: tuple[str, ...] = ()
    """Sub-resources, beside `status`."""
    in_all: bool = False
    """`kubectl get all` shows it."""
    is_ours: bool = False
    """The emulated cluster makes and deletes these; clients change what they may wish for."""

    @property
    def api_version(self) -> str:
        """`v1`, `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """Plural and group, as messages have it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


_OURS: Final = (*READ, "patch", "update")
INFERENCE: Final = "inference.networking.k8s.io"
INFERENCE_X: Final = "inference.networking.x-k8s.io"

NAMESPACES: Final = Kind("Namespace", "namespaces", "", "v1", ("ns",), False, READ, is_ours=True)
NODES: Final = Kind("Node", "nodes", "", "v1", ("no",), False, (*_OURS, "delete"), is_ours=True)
PODS: Final = Kind(
    "Pod",
    "pods",
    short=("po",),
    verbs=(*_OURS, "delete"),
    parts=("eviction",),
    in_all=True,
    is_ours=True,
)
SERVICES: Final = Kind(
    "Service", "services", short=("svc",), verbs=_OURS, in_all=True, is_ours=True
)
EVENTS: Final = Kind("Event", "events", short=("ev",))
DEPLOYMENTS: Final = Kind(
    "Deployment",
    "deployments",
    "apps",
    short=("deploy",),
    verbs=_OURS,
    parts=("scale",),
    in_all=True,
    is_ours=True,
)
REPLICA_SETS: Final = Kind(
    "ReplicaSet", "replicasets", "apps", short=("rs",), verbs=_OURS, in_all=True, is_ours=True
)
SLICES: Final = Kind(
    "EndpointSlice", "endpointslices", "discovery.k8s.io", verbs=READ, is_ours=True
)
BUDGETS: Final = Kind("PodDisruptionBudget", "poddisruptionbudgets", "policy", short=("pdb",))
POOLS: Final = Kind("InferencePool", "inferencepools", INFERENCE, short=("infpool",))
MODELS: Final = Kind("InferenceModel", "inferencemodels", INFERENCE_X, "v1alpha2")

KINDS: Final = (
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    EVENTS,
    Kind("ConfigMap", "configmaps", short=("cm",)),
    DEPLOYMENTS,
    REPLICA_SETS,
    Kind(
        "HorizontalPodAutoscaler",
        "horizontalpodautoscalers",
        "autoscaling",
        "v2",
        ("hpa",),
        in_all=True,
    ),
    Kind("Lease", "leases", "coordination.k8s.io"),
    SLICES,
    BUDGETS,
    POOLS,
    MODELS,
    Kind("InferenceObjective", "inferenceobjectives", INFERENCE_X, "v1alpha2"),
)
BY_PATH: Final = {(kind.group, kind.version, kind.plural): kind for kind in KINDS}
METRICS: Final = ("metrics.k8s.io", "v1beta1")
CUSTOM: Final = ("custom.metrics.k8s.io", "v1beta2")
EXTERNAL: Final = ("external.metrics.k8s.io", "v1beta1")
