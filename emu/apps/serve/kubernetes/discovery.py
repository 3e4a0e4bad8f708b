"""What the API says of itself: groups, versions, resources, and its OpenAPI documents."""

from __future__ import annotations

from typing import Final

from emu.apps.serve.kubernetes.documents import Document
from emu.apps.serve.kubernetes.kinds import (
    CUSTOM,
    EXTERNAL,
    KINDS,
    METRICS,
    Kind,
)
from emu.apps.serve.kubernetes.shapes import KUBERNETES

POD_METRICS: Final = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
GPU_METRIC: Final = "DCGM_FI_DEV_GPU_UTIL"
CUSTOM_METRICS: Final = (*(f"vllm:{name}" for name in POD_METRICS), GPU_METRIC)


def versions() -> list[tuple[str, str]]:
    """(group, version) of everything, the core apart."""
    found = dict.fromkeys((kind.group, kind.version) for kind in KINDS if kind.group)
    return [*found, METRICS, CUSTOM, EXTERNAL]


def groups() -> Document:
    """`/apis`."""
    named: dict[str, list[Document]] = {}
    for group, version in versions():
        known: Document = {"groupVersion": f"{group}/{version}", "version": version}
        named.setdefault(group, []).append(known)
    items = [
        {"name": name, "versions": known, "preferredVersion": known[0]}
        for name, known in named.items()
    ]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": items}


def core_versions(host: str) -> Document:
    """`/api`."""
    address = {"clientCIDR": "0.0.0.0/0", "serverAddress": host}
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [address]}


def resources(group: str, version: str) -> Document | None:
    """`/api/v1` or `/apis/GROUP/VERSION`; None where there is no such thing."""
    name = f"{group}/{version}" if group else version
    if (group, version) == METRICS:
        rows = [_metric("nodes", "NodeMetrics", False), _metric("pods", "PodMetrics", True)]
    elif (group, version) == CUSTOM:
        rows = [_metric(f"pods/{one}", "MetricValueList", True) for one in CUSTOM_METRICS]
    elif (group, version) == EXTERNAL:
        rows = [_metric(one, "ExternalMetricValueList", True) for one in CUSTOM_METRICS]
    else:
        kinds = [kind for kind in KINDS if (kind.group, kind.version) == (group, version)]
        if not kinds:
            return None
        rows = [row for kind in kinds for row in _rows(kind)]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": name,
        "resources": rows,
    }


def _metric(name: str, kind: str, is_namespaced: bool) -> Document:
    row = {"name": name, "singularName": "", "namespaced": is_namespaced, "kind": kind}
    return {**row, "verbs": ["get", "list"]}


def _rows(kind: Kind) -> list[Document]:
    row: Document = {
        "name": kind.plural,
        "singularName": kind.kind.lower(),
        "namespaced": kind.is_namespaced,
        "kind": kind.kind,
        "verbs": list(kind.verbs),
        "shortNames": list(kind.short),
    }
    if kind.in_all:
        row["categories"] = ["all"]
    common = {"singularName": "", "namespaced": kind.is_namespaced}
    rows = [row]
    for part in (*kind.parts, *(("status",) if kind.is_ours else ())):
        more: Document = {"name": f"{kind.plural}/{part}", "kind": kind.kind, "verbs": ["get"]}
        if part == "scale":
            more |= {"group": "autoscaling", "version": "v1", "kind": "Scale"}
            more["verbs"] = ["get", "patch", "update"]
        elif part == "eviction":
            more |= {"group": "policy", "version": "v1", "kind": "Eviction", "verbs": ["create"]}
        rows.append({**more, **common})
    return rows


def version(emulator: str) -> Document:
    """`/version`, with the key that vLLM uses beside Kubernetes' own."""
    major, minor, _ = KUBERNETES.removeprefix("v").split(".")
    return {"version": emulator, "major": major, "minor": minor, "gitVersion": KUBERNETES}


def openapi_index() -> Document:
    """`/openapi/v3`: where the documents are."""
    places = ["api/v1", *(f"apis/{group}/{version}" for group, version in versions()[:-3])]
    return {"paths": {place: {"serverRelativeURL": f"/openapi/v3/{place}"} for place in places}}


def openapi_document(group: str, version: str) -> Document | None:
    """Paths and schemas of a group; what emu does not read of an object is open."""
    kinds = [kind for kind in KINDS if (kind.group, kind.version) == (group, version)]
    if not kinds:
        return None
    schemas: Document = {}
    paths: Document = {}
    for kind in kinds:
        name = ".".join(("emu", kind.api_version.replace("/", "."), kind.kind))
        typed = {"group": kind.group, "version": kind.version, "kind": kind.kind}
        schemas[name] = _schema() | {"x-kubernetes-group-version-kind": [typed]}
        place = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.api_version}"
        if kind.is_namespaced:
            place += "/namespaces/{namespace}"
        answer = {
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        }
        one = {
            verb: {
                "x-kubernetes-action": action,
                "x-kubernetes-group-version-kind": typed,
                "parameters": [
                    {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}},
                    {"name": "dryRun", "in": "query", "schema": {"type": "string"}},
                ],
                "responses": {"200": {"description": "OK", **answer}},
            }
            for verb, action in (("get", "get"), ("patch", "patch"), ("put", "put"))
            if verb == "get" or "patch" in kind.verbs
        }
        paths[f"{place}/{kind.plural}/{{name}}"] = one
        paths[f"{place}/{kind.plural}"] = {"get": one["get"] | {"x-kubernetes-action": "list"}}
        if "create" in kind.verbs:
            made = one["patch"] | {"x-kubernetes-action": "post"}
            paths[f"{place}/{kind.plural}"] = {"get": one["get"], "post": made}
    return {
        "openapi": "3.0.0",
        "info": {"title": "emu", "version": KUBERNETES},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _schema() -> Document:
    """What every object has; the rest is open, as of a custom resource."""
    body: Document = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    words = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
    return {
        "type": "object",
        "properties": {**words, "metadata": body, "spec": body, "status": body},
    }
