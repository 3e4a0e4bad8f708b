"""Kubernetes: a Deployment and a Service for each role, and what scales them.

A HorizontalPodAutoscaler stands where the cluster was scaled as Kubernetes does it (planner
`hpa`). What scales in another way has no product that deploys it: the manifest then holds the
least number of replicas, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.apps.plan.manifests.roles import PORT, Role, scaling_note, short_name
from emu.apps.plan.manifests.text import yaml_documents
from emu.config.schema import Config, HpaTable
from emu.documents import Document

_IMAGE: Final = "vllm/vllm-openai:latest"
_METRICS: Final = {
    "concurrency": "vllm:num_requests_running",
    "queue": "vllm:num_requests_waiting",
    "kv_utilization": "vllm:kv_cache_usage_perc",
}
"""autoscale.metric -> vLLM's name of it."""


def kubernetes(config: Config, roles: Sequence[Role], model: str) -> str:
    """Documents of YAML: a Deployment and a Service for each role, and what scales them."""
    table = config.autoscale
    is_hpa = isinstance(table, HpaTable)
    documents: list[Document] = []
    for one in roles:
        name = f"{short_name(model)}-{one.role}"
        labels = {"app": name, "role": one.role}
        documents.append(_deployment(name, labels, one))
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "labels": labels},
                "spec": {
                    "selector": labels,
                    "ports": [{"name": "http", "port": PORT, "targetPort": PORT}],
                },
            }
        )
        if is_hpa:
            documents.append(_autoscaler(name, labels, one, config))
    return ("" if is_hpa else scaling_note(roles)) + yaml_documents(documents)


def _deployment(name: str, labels: dict[str, str], one: Role) -> Document:
    model, *flags = one.flags[2:]
    container = {
        "name": "vllm",
        "image": _IMAGE,
        "args": ["--model", model, *flags],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}},
        "resources": {"limits": {"nvidia.com/gpu": str(one.gpus)}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": one.count,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _autoscaler(name: str, labels: dict[str, str], one: Role, config: Config) -> Document:
    """What scales a Deployment. Its metric comes from an adapter (Prometheus adapter, KEDA)."""
    table = config.autoscale
    assert isinstance(table, HpaTable)
    target = table.target_value
    if table.metric == "kv_utilization":
        target = table.target_utilization
    quantity = f"{round(1000 * target)}m" if target != int(target) else str(int(target))
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": one.count,
            "maxReplicas": one.count_max,
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": _METRICS[table.metric]},
                        "target": {"type": "AverageValue", "averageValue": quantity},
                    },
                }
            ],
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": round(table.scale_up_stabilization_s)},
                "scaleDown": {
                    "stabilizationWindowSeconds": round(table.scale_down_stabilization_s)
                },
            },
        },
    }
