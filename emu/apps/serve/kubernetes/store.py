"""Objects and their history: what lists and watches read. Pure.

Each change has a number, the `resourceVersion` of the object that it made. The last changes are
kept: a watch that begins before them hears `410 Expired` and its client lists again, as with etcd
after a compaction. A write that names an older version of its object is a conflict (409).
"""

from __future__ import annotations

import datetime
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Literal

import msgspec

from emu.apps.serve.kubernetes.documents import Document, Refused, table, text
from emu.apps.serve.kubernetes.kinds import EVENTS, Kind

CHANGES_KEPT: Final = 4096
EVENTS_KEPT: Final = 512
OBJECTS_MAX: Final = 10_000
"""Objects that clients may leave here."""
_UIDS: Final = uuid.UUID("6c6d6500-656d-7500-8000-000000000000")


def stamp(unix_s: float) -> str:
    """A time as Kubernetes writes it."""
    moment = datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class Change(msgspec.Struct, frozen=True):
    """An object came, changed or went."""

    version: int
    """It numbers all changes."""
    kind: Kind
    before: Document | None
    after: Document | None

    def seen(self, test: Callable[[Document], bool]) -> tuple[str, Document] | None:
        """What a watch of some objects sees of it: the type of its event and the object."""
        was = self.before is not None and test(self.before)
        if self.after is not None and test(self.after):
            return ("MODIFIED" if was else "ADDED"), self.after
        if not was:
            return None
        last = self.after or self.before
        assert last is not None
        metadata = table(last, "metadata") | {"resourceVersion": str(self.version)}
        return "DELETED", last | {"metadata": metadata}


class Store:
    """All objects of one server."""

    def __init__(self, session: str) -> None:
        """`session`: in the ids of objects, so that no two servers give the same."""
        self.version = 1
        self.changes: deque[Change] = deque(maxlen=CHANGES_KEPT)
        self.now_s = 0.0
        """Unix time, for stamps."""
        self._session = session
        self._made = 0
        self._objects: dict[Kind, dict[tuple[str, str], Document]] = {}

    def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """An object."""
        return self._objects.get(kind, {}).get((namespace, name))

    def list(self, kind: Kind, namespace: str = "") -> list[Document]:
        """All objects of a kind, of a namespace or of all, by name."""
        held = self._objects.get(kind, {})
        return [held[key] for key in sorted(held) if namespace in ("", key[0])]

    def since(self, kind: Kind, version: int) -> Iterator[Change]:
        """Changes of a kind after a version. Raises Refused (410) if some are forgotten."""
        first = self.changes[0].version if self.changes else self.version + 1
        if version + 1 < first or version > self.version:
            raise Refused(410, f"too old resource version: {version} ({first - 1})")
        return (c for c in list(self.changes) if c.version > version and c.kind is kind)

    def create(self, kind: Kind, namespace: str, given: Document) -> Document:
        """A new object. Raises Refused (409) if there is one of its name."""
        metadata = dict(table(given, "metadata"))
        self._made += 1
        if not text(metadata, "name"):
            if not text(metadata, "generateName"):
                raise Refused(
                    422, "metadata.name: Required value: name or generateName is required"
                )
            metadata["name"] = f"{metadata['generateName']}{self._made:05x}"
        name = text(metadata, "name")
        if self.get(kind, namespace, name) is not None:
            raise Refused(409, f'{kind.qualified} "{name}" already exists', "AlreadyExists")
        if kind is not EVENTS and not kind.is_ours and len(self.list(kind)) >= OBJECTS_MAX:
            raise Refused(429, f"there are {OBJECTS_MAX} {kind.plural} already")
        if kind.is_namespaced:
            metadata["namespace"] = namespace
        metadata["uid"] = str(uuid.uuid5(_UIDS, f"{self._session} {self._made}"))
        metadata["creationTimestamp"] = stamp(self.now_s)
        metadata["generation"] = 1
        document = {"apiVersion": kind.api_version, "kind": kind.kind, **given}
        made = self._set(kind, namespace, name, None, document | {"metadata": metadata})
        if kind is EVENTS:
            self._forget_events()
        return made

    def update(self, kind: Kind, namespace: str, name: str, given: Document) -> Document:
        """Replace an object. Raises Refused (404, 409)."""
        before = self.find(kind, namespace, name)
        metadata, held = dict(table(given, "metadata")), table(before, "metadata")
        version = metadata.get("resourceVersion")
        if version not in (None, "", held["resourceVersion"]):
            problem = (
                f'Operation cannot be fulfilled on {kind.qualified} "{name}": the object has been '
                "modified; please apply your changes to the latest version and try again"
            )
            raise Refused(409, problem)
        if metadata.get("name", name) != name:
            raise Refused(400, "the name of the object does not match the name on the URL")
        for key in ("name", "namespace", "uid", "creationTimestamp", "resourceVersion"):
            if key in held:
                metadata[key] = held[key]
        generation = held.get("generation", 1)
        assert isinstance(generation, int)
        metadata["generation"] = generation + (given.get("spec") != before.get("spec"))
        document = {**given, "apiVersion": kind.api_version, "kind": kind.kind}
        document["metadata"] = metadata
        if document == before:
            return before
        return self._set(kind, namespace, name, before, document)

    def put(self, kind: Kind, namespace: str, name: str, given: Document) -> Document:
        """What the cluster says of an object of its own, over what it said before.

        Keys of the document that `given` does not have stay, and so do labels and annotations.
        """
        before = self.get(kind, namespace, name)
        if before is None:
            return self.create(kind, namespace, given)
        held, said = table(before, "metadata"), table(given, "metadata")
        metadata = {**held, **said}
        for key in ("labels", "annotations"):
            if key in held or key in said:
                metadata[key] = {**table(held, key), **table(said, key)}
        return self.update(kind, namespace, name, {**before, **given, "metadata": metadata})

    def delete(self, kind: Kind, namespace: str, name: str) -> Document:
        """Take an object away. Raises Refused (404)."""
        before = self.find(kind, namespace, name)
        del self._objects[kind][namespace, name]
        self.version += 1
        self.changes.append(Change(self.version, kind, before, None))
        return before

    def find(self, kind: Kind, namespace: str, name: str) -> Document:
        """An object. Raises Refused (404)."""
        found = self.get(kind, namespace, name)
        if found is None:
            raise Refused(404, f'{kind.qualified} "{name}" not found')
        return found

    def _set(
        self, kind: Kind, namespace: str, name: str, before: Document | None, after: Document
    ) -> Document:
        self.version += 1
        metadata = {**table(after, "metadata"), "resourceVersion": str(self.version)}
        after = {**after, "metadata": metadata}
        self._objects.setdefault(kind, {})[namespace, name] = after
        self.changes.append(Change(self.version, kind, before, after))
        return after

    def _forget_events(self) -> None:
        """Keep the last ones."""
        held = self._objects[EVENTS]
        while len(held) > EVENTS_KEPT:
            namespace, name = next(iter(held))
            self.delete(EVENTS, namespace, name)

    def tell(
        self,
        about: Document,
        reason: str,
        message: str,
        *,
        kind: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """An event about an object."""
        metadata = table(about, "metadata")
        namespace = text(metadata, "namespace") or "default"
        involved: Document = {
            "kind": about["kind"],
            "apiVersion": about["apiVersion"],
            **{key: metadata[key] for key in ("name", "namespace", "uid") if key in metadata},
        }
        now = stamp(self.now_s)
        name = f"{text(metadata, 'name')}.{self._made + 1:x}"
        event: Document = {
            "metadata": {"name": name},
            "involvedObject": involved,
            "reason": reason,
            "message": message,
            "type": kind,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": "emu"},
        }
        self.create(EVENTS, namespace, event)
