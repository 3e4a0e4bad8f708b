"""Figures that autoscalers read through the API: resource, custom and external metrics. Pure.

CPU is the time in which an engine's steps run, of the one core that its loop has; memory is the
GPU memory of its KV blocks in use and of its weights. Custom metrics are those of vLLM's pages by
pod, and the part of time with a kernel on the GPU, as DCGM has it; the external ones are their
sums over the pods that labels select.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from emu.apps.serve.kubernetes.discovery import CUSTOM_METRICS, GPU_METRIC
from emu.apps.serve.kubernetes.documents import Document, Refused, labels_of, text
from emu.apps.serve.kubernetes.kinds import CUSTOM, EXTERNAL, METRICS, NODES, PODS
from emu.apps.serve.kubernetes.selectors import Test, select
from emu.apps.serve.kubernetes.shapes import NAMESPACE
from emu.apps.serve.kubernetes.store import Store, stamp


class Reading(Struct, frozen=True, kw_only=True):
    """Figures of one replica."""

    busy_share: float
    """Of the last seconds, the part in which an iteration ran."""
    memory_bytes: int
    gauges: Mapping[str, float]
    """By the names of vLLM, without `vllm:`."""


Readings = Callable[[int], Reading]
WINDOW_S = 15.0
"""Emulated seconds that shares of time are taken over."""


def quantity(value: float) -> str:
    """A figure in Kubernetes' form, in thousandths where it is not whole."""
    thousandths = round(value * 1000)
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


class MetricsApi:
    """The three groups over one store."""

    def __init__(self, store: Store, readings: Readings) -> None:
        self._store = store
        self._readings = readings

    def answer(
        self, group: str, version: str, parts: list[str], query: Mapping[str, str]
    ) -> Document | None:
        """The answer to a GET; None where there is nothing of that name."""
        test = select(query.get("labelSelector", ""), "")
        known = (group, version)
        if known == METRICS:
            return self._resources(parts, test)
        if known == CUSTOM and len(parts) == 5 and parts[0] == "namespaces" and parts[2] == "pods":
            return self._custom(parts[1], parts[3], parts[4], test)
        if known == EXTERNAL and len(parts) == 3 and parts[0] == "namespaces":
            return self._external(parts[1], parts[2], test)
        return None

    def _ready(self, namespace: str, test: Test) -> list[tuple[Document, Reading]]:
        """Pods that have figures."""
        found = []
        for pod in self._store.list(PODS, namespace):
            replica = labels_of(pod).get("emu/replica", "")
            if replica and test(pod):
                found.append((pod, self._readings(int(replica))))
        return found

    def _resources(self, parts: list[str], test: Test) -> Document | None:
        now = stamp(self._store.now_s)
        namespace = ""
        if parts[:1] == ["namespaces"] and len(parts) >= 3:
            namespace, parts = parts[1], parts[2:]
        if not parts or parts[0] not in ("pods", "nodes") or len(parts) > 2:
            return None
        is_nodes = parts[0] == "nodes"
        kind = "NodeMetrics" if is_nodes else "PodMetrics"
        common = {"timestamp": now, "window": f"{WINDOW_S:g}s"}
        items: list[Document] = []
        if is_nodes:
            everything = self._ready("", lambda pod: True)
            for node in filter(test, self._store.list(NODES)):
                name = text(node, "metadata", "name")
                here = [r for p, r in everything if text(p, "spec", "nodeName") == name]
                items.append({"metadata": {"name": name}, **common, "usage": _usage(here)})
        else:
            for pod, reading in self._ready(namespace, test):
                name = text(pod, "metadata", "name")
                metadata = {"name": name, "namespace": NAMESPACE, "labels": labels_of(pod)}
                one = {"name": "engine", "usage": _usage([reading])}
                items.append({"metadata": metadata, **common, "containers": [one]})
        version = "metrics.k8s.io/v1beta1"
        if len(parts) == 2:
            for item in items:
                if text(item, "metadata", "name") == parts[1]:
                    return {"kind": kind, "apiVersion": version, **item}
            raise Refused(404, f'{parts[0]}.metrics.k8s.io "{parts[1]}" not found')
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": items}

    def _custom(self, namespace: str, name: str, metric: str, test: Test) -> Document:
        items: list[Document] = []
        for pod, reading in self._ready(namespace, test):
            pod_name = text(pod, "metadata", "name")
            if name not in ("*", pod_name):
                continue
            described = {
                "kind": "Pod",
                "namespace": namespace,
                "name": pod_name,
                "apiVersion": "/v1",
            }
            items.append(
                {
                    "describedObject": described,
                    "metric": {"name": metric, "selector": None},
                    "timestamp": stamp(self._store.now_s),
                    "value": quantity(_value(reading, metric)),
                }
            )
        version = "custom.metrics.k8s.io/v1beta2"
        return {"kind": "MetricValueList", "apiVersion": version, "metadata": {}, "items": items}

    def _external(self, namespace: str, metric: str, test: Test) -> Document:
        total = sum(_value(reading, metric) for _, reading in self._ready(namespace, test))
        item = {
            "metricName": metric,
            "metricLabels": {},
            "timestamp": stamp(self._store.now_s),
            "value": quantity(total),
        }
        version = "external.metrics.k8s.io/v1beta1"
        head = {"kind": "ExternalMetricValueList", "apiVersion": version, "metadata": {}}
        return {**head, "items": [item]}


def _value(reading: Reading, metric: str) -> float:
    """A metric by the name that callers use. Raises Refused (404)."""
    if metric == GPU_METRIC:
        return 100 * reading.busy_share
    name = metric.removeprefix("vllm:").removeprefix("vllm_")
    if metric not in CUSTOM_METRICS and f"vllm:{name}" not in CUSTOM_METRICS:
        problem = f"the server could not find the metric {metric} for pods"
        raise Refused(404, problem)
    return reading.gauges[name]


def _usage(readings: list[Reading]) -> Document:
    cpu = sum(reading.busy_share for reading in readings)
    memory = sum(reading.memory_bytes for reading in readings)
    return {"cpu": f"{round(cpu * 1e9)}n", "memory": f"{memory // 1024}Ki"}
