"""Disruption budgets: whether a pod may be evicted now. Pure."""

from __future__ import annotations

import math

from emu.apps.serve.kubernetes.documents import Document, Refused, labels_of, table, text
from emu.apps.serve.kubernetes.kinds import BUDGETS, PODS
from emu.apps.serve.kubernetes.selectors import matches
from emu.apps.serve.kubernetes.store import Store


def check_budgets(store: Store, pod: Document) -> None:
    """Raises Refused (429) if the eviction of a pod would break a budget of its namespace."""
    namespace = text(pod, "metadata", "namespace")
    if not _is_ready(pod):
        return  # as with unhealthyPodEvictionPolicy AlwaysAllow: it serves nothing
    for budget in store.list(BUDGETS, namespace):
        spec = table(budget, "spec")
        wanted = table(table(spec, "selector"), "matchLabels")
        if not matches(wanted, labels_of(pod)):
            continue
        covered = [p for p in store.list(PODS, namespace) if matches(wanted, labels_of(p))]
        healthy = sum(_is_ready(p) for p in covered)
        least = _least(spec, len(covered))
        if healthy - 1 < least:
            name = text(budget, "metadata", "name")
            problem = (
                "Cannot evict pod as it would violate the pod's disruption budget. The disruption "
                f"budget {name} needs {least} healthy pods and has {healthy} currently"
            )
            raise Refused(429, problem, cause="DisruptionBudget")


def _is_ready(pod: Document) -> bool:
    conditions = table(pod, "status").get("conditions")
    is_ready = any(
        one.get("type") == "Ready" and one.get("status") == "True"
        for one in (conditions if isinstance(conditions, list) else [])
    )
    return is_ready and not text(pod, "metadata", "deletionTimestamp")


def _least(spec: Document, pods: int) -> int:
    """Pods that must stay healthy."""
    if "minAvailable" in spec:
        return _count(spec["minAvailable"], pods)
    return pods - _count(spec.get("maxUnavailable", 1), pods)


def _count(given: object, pods: int) -> int:
    """A number, or a part of the pods, rounded up."""
    if isinstance(given, int):
        return given
    part = str(given).removesuffix("%")
    if not part.isdigit():
        raise Refused(422, f"{given!r} is neither a number nor a percentage")
    return math.ceil(int(part) * pods / 100)
