"""The API machinery: a call in, an answer out. Pure; the shell has sockets and time.

Paths, verbs, selectors, patches, conflicts and watches are as Kubernetes has them. What a write
means to the emulated cluster is the controller's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from emu.apps.serve.kubernetes import discovery
from emu.apps.serve.kubernetes.budgets import check_budgets
from emu.apps.serve.kubernetes.controller import Controller
from emu.apps.serve.kubernetes.documents import Document, Refused, decode, read, table, text
from emu.apps.serve.kubernetes.kinds import (
    BY_PATH,
    DEPLOYMENTS,
    NODES,
    PODS,
    Kind,
)
from emu.apps.serve.kubernetes.metrics import MetricsApi
from emu.apps.serve.kubernetes.objects import DeleteOptions, Eviction, Scale
from emu.apps.serve.kubernetes.patches import JSON_PATCH, MERGE, STRATEGIC, patched
from emu.apps.serve.kubernetes.selectors import Test, select
from emu.apps.serve.kubernetes.shapes import NAMESPACE
from emu.apps.serve.kubernetes.store import Store
from emu.apps.serve.kubernetes.tables import as_table
from emu.apps.serve.kubernetes.view import Action

_JSON: Final = "application/json"


class Call(Struct, frozen=True, kw_only=True):
    """What a client asks."""

    method: str
    path: str
    query: Mapping[str, str] = {}
    accept: str = ""
    content_type: str = ""
    body: bytes = b""


class Answer(Struct, frozen=True):
    """A document, or a text."""

    status: int
    content: Document | str
    actions: list[Action] = []


class Selected(Struct, frozen=True):
    """Objects that a client wants to see, and how."""

    kind: Kind
    test: Test
    is_table: bool
    include: str


class Watch(Struct, frozen=True, kw_only=True):
    """Changes from a version on, until the client leaves or the time is over."""

    selected: Selected
    version: int
    first: list[Document]
    """Objects that are told of before."""
    marks_first: bool
    """Say when these are over."""
    bookmarks: bool
    timeout_s: float


def status_of(refused: Refused) -> Document:
    """An error as clients expect it."""
    document: Document = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": str(refused),
        "reason": refused.reason,
        "code": refused.code,
    }
    if refused.cause:
        document["details"] = {"causes": [{"reason": refused.cause, "message": str(refused)}]}
    return document


def _timeout_s(query: Mapping[str, str]) -> float:
    given = query.get("timeoutSeconds", "")
    return float(given) if given.isdigit() and int(given) else 1800.0


class Place(Struct, frozen=True):
    """What a path names."""

    kind: Kind
    namespace: str
    name: str
    part: str


class KubernetesApi:
    """The API over a store and its controller."""

    def __init__(
        self, store: Store, controller: Controller, metrics: MetricsApi, emulator: str
    ) -> None:
        self._store = store
        self._controller = controller
        self._metrics = metrics
        self._emulator = emulator

    def answer(self, call: Call) -> Answer | Watch:
        """The answer to a call; errors are answers."""
        try:
            return self._answer(call)
        except Refused as refused:
            return Answer(refused.code, status_of(refused))

    def _answer(self, call: Call) -> Answer | Watch:
        parts = [part for part in call.path.split("/") if part]
        fixed = self._fixed(parts)
        if fixed is not None:
            return Answer(200, fixed)
        group, version, rest = _split(parts)
        if call.method == "GET":
            figures = self._metrics.answer(group, version, rest, call.query)
            if figures is not None:
                return Answer(200, figures)
        place = _place(group, version, rest)
        if place is None:
            raise Refused(404, "the server could not find the requested resource")
        if call.method in ("GET", "HEAD"):
            return self._read(place, call)
        return self._write(place, call)

    def _fixed(self, parts: list[str]) -> Document | str | None:
        """What does not depend on objects."""
        if parts in (["healthz"], ["livez"], ["readyz"]):
            return "ok"
        if parts == ["version"]:
            return discovery.version(self._emulator)
        if parts == ["api"]:
            return discovery.core_versions("127.0.0.1")
        if parts == ["apis"]:
            return discovery.groups()
        if parts == ["openapi", "v3"]:
            return discovery.openapi_index()
        if parts[:2] == ["openapi", "v3"]:
            group, version, rest = _split(parts[2:])
            return None if rest else discovery.openapi_document(group, version)
        group, version, rest = _split(parts)
        if parts[:1] == ["apis"] and len(parts) == 2:
            known = discovery.groups()["groups"]
            assert isinstance(known, list)
            found = next((one for one in known if one["name"] == parts[1]), None)
            return found and {"kind": "APIGroup", "apiVersion": "v1", **found}
        return None if rest or not version else discovery.resources(group, version)

    def _read(self, place: Place, call: Call) -> Answer | Watch:
        kind, store, query = place.kind, self._store, call.query
        is_table, include = "as=Table" in call.accept, query.get("includeObject", "Metadata")
        if place.part == "scale":
            return Answer(200, self._scale(store.find(kind, place.namespace, place.name)))
        if place.name and query.get("watch") not in ("true", "1"):
            found = store.find(kind, place.namespace, place.name)
            if is_table:
                version = text(found, "metadata", "resourceVersion")
                return Answer(200, as_table(kind, [found], version, store.now_s, include))
            return Answer(200, found)
        fields = query.get("fieldSelector", "")
        if place.name:
            fields = f"metadata.name={place.name}"
        chosen = select(query.get("labelSelector", ""), fields)

        def test(document: Document) -> bool:
            here = text(document, "metadata", "namespace")
            return place.namespace in ("", here) and chosen(document)

        found_all = [d for d in store.list(kind, place.namespace) if chosen(d)]
        given = query.get("resourceVersion", "")
        if given and not given.isdigit():
            raise Refused(400, f"invalid resource version {given!r}")
        if given and int(given) > store.version:
            raise Refused(504, f"Too large resource version: {given}, current: {store.version}")
        if query.get("watch") in ("true", "1"):
            # Without a version, and from version 0, what is there comes first.
            marks_first = query.get("sendInitialEvents") in ("true", "1")
            from_now = marks_first or given in ("", "0")
            return Watch(
                selected=Selected(kind, test, is_table, include),
                version=store.version if from_now else int(given),
                first=found_all if from_now else [],
                marks_first=marks_first,
                bookmarks=query.get("allowWatchBookmarks") in ("true", "1"),
                timeout_s=_timeout_s(query),
            )
        version = str(store.version)
        if is_table:
            return Answer(200, as_table(kind, found_all, version, store.now_s, include))
        head = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version}
        metadata = {"resourceVersion": version}
        return Answer(200, {**head, "metadata": metadata, "items": list[object](found_all)})

    def _scale(self, deployment: Document) -> Document:
        """The `scale` sub-resource of a deployment."""
        held = table(deployment, "metadata")
        kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        status = table(deployment, "status")
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {key: held[key] for key in kept if key in held},
            "spec": {"replicas": table(deployment, "spec").get("replicas")},
            "status": {"replicas": status.get("replicas", 0), "selector": f"app={held['name']}"},
        }

    def _write(self, place: Place, call: Call) -> Answer:
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        word = verb.get(call.method, "")
        is_part = place.part in place.kind.parts
        if not word or not (is_part or word in place.kind.verbs):
            raise Refused(405, "the server does not allow this method on the requested resource")
        if place.part and not is_part:
            raise Refused(405, f"{place.part} is written by the emulated cluster")
        if bool(place.name) == (word == "create" and not is_part):
            raise Refused(405, "the server does not allow this method on the requested resource")
        if place.part == "eviction":
            return self._evict(place, call)
        if place.part == "scale":
            return self._write_scale(place, call)
        if word == "delete":
            return self._delete(place, call)
        if word == "create":
            given = decode(call.body)
            if _is_dry(call):
                return Answer(201, given)
            namespace = place.namespace or (NAMESPACE if place.kind.is_namespaced else "")
            return Answer(201, self._store.create(place.kind, namespace, given))
        return self._change(place, call)

    def _changed(self, held: Document, call: Call) -> Document:
        """What an object becomes by a call."""
        if call.method == "PUT":
            return decode(call.body)
        kind = call.content_type.partition(";")[0].strip().lower()
        if kind not in (MERGE, STRATEGIC, JSON_PATCH, _JSON):
            raise Refused(415, f"patches are {MERGE}, {STRATEGIC} or {JSON_PATCH}, not {kind!r}")
        if kind == JSON_PATCH:
            import msgspec

            try:
                patch: object = msgspec.json.decode(call.body)
            except msgspec.DecodeError as error:
                raise Refused(400, f"the patch is not JSON: {error}") from None
            return patched(held, patch, kind)
        return patched(held, decode(call.body), MERGE if kind == _JSON else kind)

    def _change(self, place: Place, call: Call) -> Answer:
        """PUT or PATCH of an object."""
        store, kind = self._store, place.kind
        held = store.find(kind, place.namespace, place.name)
        wished = self._changed(held, call)
        if kind.is_ours:
            wished = self._allowed(kind, held, wished)
        if _is_dry(call):
            return Answer(200, wished)
        changed = store.update(kind, place.namespace, place.name, wished)
        if changed is not held and changed.get("spec") != held.get("spec"):
            self._controller.written(kind, place.name)
            changed = store.find(kind, place.namespace, place.name)
        return Answer(200, changed)

    def _allowed(self, kind: Kind, held: Document, wished: Document) -> Document:
        """The part of a wish that is its client's to say. Raises Refused for the rest."""
        wished = {**held, **wished, "status": table(held, "status")}
        if "status" not in held:
            del wished["status"]
        if kind is DEPLOYMENTS:
            name = text(held, "metadata", "name")
            replicas = table(wished, "spec").get("replicas")
            before = table(held, "spec")
            if table(wished, "spec").get("selector") != before.get("selector"):
                raise Refused(422, "spec.selector: Invalid value: field is immutable")
            if replicas != before.get("replicas"):
                self._check_replicas(name, replicas)
        elif kind is not NODES and wished.get("spec") != held.get("spec"):
            raise Refused(403, f"the spec of {kind.plural} is the emulated cluster's to say")
        return wished

    def _check_replicas(self, name: str, replicas: object) -> None:
        if isinstance(replicas, bool) or not isinstance(replicas, int):
            raise Refused(400, "spec.replicas is a whole number")
        if replicas < 0:
            problem = (
                f"spec.replicas: Invalid value: {replicas}: must be greater than or equal to 0"
            )
            raise Refused(422, f'Deployment.apps "{name}" is invalid: {problem}')
        room = self._controller.room(name)
        if replicas > room:
            problem = f"exceeded quota: there are GPUs for {room} {name} replicas, not {replicas}"
            raise Refused(403, problem)

    def _write_scale(self, place: Place, call: Call) -> Answer:
        store, kind = self._store, place.kind
        held = store.find(kind, place.namespace, place.name)
        scale = read(self._changed(self._scale(held), call), Scale)
        wanted = scale.spec.replicas
        self._check_replicas(place.name, wanted)
        metadata = dict(table(held, "metadata"))
        version = scale.metadata.get("resourceVersion")
        if isinstance(version, str) and version:
            metadata["resourceVersion"] = version
        spec = {**table(held, "spec"), "replicas": wanted}
        if not _is_dry(call):
            given = {**held, "metadata": metadata, "spec": spec}
            held = store.update(kind, place.namespace, place.name, given)
            self._controller.written(kind, place.name)
        return Answer(200, self._scale(held))

    def _evict(self, place: Place, call: Call) -> Answer:
        """A pod is asked to go; budgets may forbid it (429)."""
        pod = self._store.find(PODS, place.namespace, place.name)
        eviction = read(decode(call.body), Eviction)
        options = eviction.delete_options or DeleteOptions()
        check_budgets(self._store, pod)
        self._check_uid(pod, options)
        if not (_is_dry(call) or options.dry_run):
            self._controller.remove_pod(place.name, options.grace_period_seconds)
        return Answer(201, {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201})

    def _check_uid(self, held: Document, options: DeleteOptions) -> None:
        for key in ("uid", "resourceVersion"):
            wanted = options.preconditions.get(key)
            has = text(held, "metadata", key)
            if wanted and wanted != has:
                raise Refused(409, f"the {key} in the precondition ({wanted}) is not {has}")

    def _delete(self, place: Place, call: Call) -> Answer:
        store, kind = self._store, place.kind
        held = store.find(kind, place.namespace, place.name)
        options = read(decode(call.body), DeleteOptions) if call.body else DeleteOptions()
        self._check_uid(held, options)
        if _is_dry(call) or options.dry_run:
            return Answer(200, held)
        if kind is PODS:
            grace = call.query.get("gracePeriodSeconds", "")
            grace_s = int(grace) if grace.isdigit() else options.grace_period_seconds
            self._controller.remove_pod(place.name, grace_s)
            return Answer(200, store.get(kind, place.namespace, place.name) or held)
        success: Document = {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        if kind is NODES:
            return Answer(200, success, self._controller.remove_node(place.name))
        store.delete(kind, place.namespace, place.name)
        details = {"name": place.name, "kind": kind.plural, "uid": text(held, "metadata", "uid")}
        return Answer(200, {**success, "details": details})


def _is_dry(call: Call) -> bool:
    return call.query.get("dryRun", "") == "All"


def _split(parts: list[str]) -> tuple[str, str, list[str]]:
    """(group, version, the rest) of a path."""
    if parts[:1] == ["api"]:
        return "", (parts[1] if len(parts) > 1 else ""), parts[2:]
    if parts[:1] == ["apis"] and len(parts) > 2:
        return parts[1], parts[2], parts[3:]
    return "", "", parts


def _place(group: str, version: str, rest: list[str]) -> Place | None:
    """What the rest of a path names; None where it names nothing."""
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    if not rest or len(rest) > 3:
        return None
    if (group, rest[0]) == ("events.k8s.io", "events"):
        group, version = "", "v1"
    kind = BY_PATH.get((group, version, rest[0]))
    if kind is None or (namespace and not kind.is_namespaced):
        return None
    name = rest[1] if len(rest) > 1 else ""
    part = rest[2] if len(rest) > 2 else ""
    if kind.is_namespaced and name and not namespace:
        return None
    if part and part != "status" and part not in kind.parts:
        return None
    return Place(kind, namespace, name, part)
