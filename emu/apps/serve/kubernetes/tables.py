"""Lists as the tables that kubectl prints (`as=Table`): columns and cells of each kind."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from emu.apps.serve.kubernetes.documents import Document, table, text
from emu.apps.serve.kubernetes.kinds import (
    DEPLOYMENTS,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    REPLICA_SETS,
    SERVICES,
    SLICES,
    Kind,
)

Cell = str | int
Read = Callable[[Document], Cell]


class Column(Struct, frozen=True):
    """A column of a kind."""

    name: str
    read: Read
    is_wide: bool = False
    is_number: bool = False


def age(since: str, now_s: float) -> str:
    """Time since a stamp, as kubectl prints it."""
    try:
        begun = datetime.datetime.fromisoformat(since)
    except ValueError:
        return "<unknown>"
    seconds = int(now_s - begun.timestamp())
    for unit, size, below, part, small in (
        ("s", 1, 120, "", 1),
        ("m", 60, 600, "s", 1),
        ("m", 60, 10_800, "", 1),
        ("h", 3600, 28_800, "m", 60),
        ("h", 3600, 172_800, "", 1),
    ):
        if seconds < below:
            rest = seconds % size // small
            return (
                f"{max(0, seconds) // size}{unit}{rest}{part}"
                if part and rest
                else (f"{max(0, seconds) // size}{unit}")
            )
    return f"{seconds // 86_400}d"


def _status(document: Document, key: str) -> int:
    found = table(document, "status").get(key, 0)
    return found if isinstance(found, int) else 0


def _spec(document: Document, key: str) -> int:
    found = table(document, "spec").get(key, 0)
    return found if isinstance(found, int) else 0


def _items(document: Document, *path: str) -> list[Document]:
    for key in path[:-1]:
        document = table(document, key)
    found = document.get(path[-1])
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _container(document: Document) -> Document:
    return next(iter(_items(document, "status", "containerStatuses")), {})


def _pod_status(document: Document) -> str:
    if text(document, "metadata", "deletionTimestamp"):
        return "Terminating"
    waiting = table(table(_container(document), "state"), "waiting")
    return text(waiting, "reason") or text(document, "status", "phase")


def _restarts(document: Document) -> Cell:
    found = _container(document).get("restartCount", 0)
    return found if isinstance(found, int) else 0


def _node_status(document: Document) -> str:
    ready = [c for c in _items(document, "status", "conditions") if c.get("type") == "Ready"]
    word = "Ready" if ready and ready[0].get("status") == "True" else "NotReady"
    closed = table(document, "spec").get("unschedulable") is True
    return word + (",SchedulingDisabled" if closed else "")


def _about(document: Document) -> str:
    involved = table(document, "involvedObject")
    return f"{text(involved, 'kind').lower()}/{text(involved, 'name')}"


def _ports(document: Document) -> str:
    found = _items(document, "spec", "ports") or _items(document, "ports")
    return ",".join(f"{p.get('port')}/{p.get('protocol')}" for p in found) or "<unset>"


def _addresses(document: Document) -> str:
    found = [str(a) for e in _items(document, "endpoints") for a in _list(e, "addresses")]
    return ",".join(found) or "<unset>"


def _list(document: Document, key: str) -> list[object]:
    found = document.get(key)
    return found if isinstance(found, list) else []


_COLUMNS: Final[dict[Kind, tuple[Column, ...]]] = {
    PODS: (
        Column("Ready", lambda d: f"{int(_container(d).get('ready') is True)}/1"),
        Column("Status", _pod_status),
        Column("Restarts", _restarts, is_number=True),
        Column("IP", lambda d: text(d, "status", "podIP") or "<none>", is_wide=True),
        Column("Node", lambda d: text(d, "spec", "nodeName") or "<none>", is_wide=True),
    ),
    NODES: (
        Column("Status", _node_status),
        Column("Roles", lambda d: "<none>"),
        Column("Version", lambda d: text(d, "status", "nodeInfo", "kubeletVersion")),
    ),
    DEPLOYMENTS: (
        Column("Ready", lambda d: f"{_status(d, 'readyReplicas')}/{_spec(d, 'replicas')}"),
        Column("Up-to-date", lambda d: _status(d, "updatedReplicas"), is_number=True),
        Column("Available", lambda d: _status(d, "availableReplicas"), is_number=True),
    ),
    REPLICA_SETS: (
        Column("Desired", lambda d: _spec(d, "replicas"), is_number=True),
        Column("Current", lambda d: _status(d, "replicas"), is_number=True),
        Column("Ready", lambda d: _status(d, "readyReplicas"), is_number=True),
    ),
    SERVICES: (
        Column("Type", lambda d: text(d, "spec", "type")),
        Column("Cluster-IP", lambda d: text(d, "spec", "clusterIP")),
        Column("External-IP", lambda d: "<none>"),
        Column("Port(s)", _ports),
    ),
    SLICES: (
        Column("AddressType", lambda d: text(d, "addressType")),
        Column("Ports", _ports),
        Column("Endpoints", _addresses),
    ),
    NAMESPACES: (Column("Status", lambda d: text(d, "status", "phase")),),
    EVENTS: (
        Column("Type", lambda d: text(d, "type")),
        Column("Reason", lambda d: text(d, "reason")),
        Column("Object", _about),
        Column("Message", lambda d: text(d, "message")),
    ),
}


def as_table(
    kind: Kind, documents: list[Document], version: str, now_s: float, include: str
) -> Document:
    """Documents as a table. `include`: what rows carry, None, Metadata or Object."""
    columns = _COLUMNS.get(kind, ())
    heads: list[Document] = [_head("Name", "string", 0)]
    heads += [
        _head(c.name, "integer" if c.is_number else "string", int(c.is_wide)) for c in columns
    ]
    heads.append(_head("Age", "string", 0))
    rows: list[Document] = []
    for document in documents:
        cells: list[Cell] = [text(document, "metadata", "name")]
        cells += [column.read(document) for column in columns]
        since = text(document, "lastTimestamp") or text(document, "metadata", "creationTimestamp")
        cells.append(age(since, now_s))
        row: Document = {"cells": cells}
        if include == "Object":
            row["object"] = document
        elif include != "None":
            row["object"] = {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": document["metadata"],
            }
        rows.append(row)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": heads,
        "rows": rows,
    }


def _head(name: str, kind: str, priority: int) -> Document:
    form = "name" if name == "Name" else ""
    return {"name": name, "type": kind, "format": form, "description": name, "priority": priority}
