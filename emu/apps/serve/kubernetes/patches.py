"""Changes to documents: merge patches (RFC 7386), strategic merge patches and JSON patches (6902).

A strategic merge patch joins lists of objects by a key of their own where Kubernetes does; other
lists are replaced.
"""

from __future__ import annotations

import copy
from typing import Final

from emu.apps.serve.kubernetes.documents import Document, Refused

MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
_MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "conditions": "type",
    "taints": "key",
    "ownerReferences": "uid",
    "tolerations": "key",
}


def patched(document: Document, patch: object, kind: str) -> Document:
    """A changed copy. Raises Refused for a patch that does not apply."""
    if kind == JSON_PATCH:
        return _json_patch(copy.deepcopy(document), patch)
    if not isinstance(patch, dict):
        raise Refused(400, "the patch is not an object")
    return _merged(document, patch, is_strategic=kind == STRATEGIC)


def _merged(held: Document, patch: Document, *, is_strategic: bool) -> Document:
    if is_strategic and patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    result = dict(held)
    for key, value in patch.items():
        if is_strategic and key.startswith("$"):
            continue
        before = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            under = before if isinstance(before, dict) else {}
            result[key] = _merged(under, value, is_strategic=is_strategic)
        elif is_strategic and isinstance(value, list) and key in _MERGE_KEYS:
            result[key] = _joined(before, value, _MERGE_KEYS[key])
        else:
            result[key] = value
    return result


def _joined(held: object, patch: list[object], key: str) -> list[object]:
    """Items of both lists, those of the same key merged; `$patch: delete` takes one away."""
    items = [item for item in held if isinstance(item, dict)] if isinstance(held, list) else []
    result: dict[object, Document] = {item.get(key): item for item in items}
    for item in patch:
        if not isinstance(item, dict):
            raise Refused(400, f"items of this list are objects with {key!r}")
        name = item.get(key)
        if item.get("$patch") == "delete":
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name, {}), item, is_strategic=True)
    return list(result.values())


def _json_patch(document: Document, patch: object) -> Document:
    if not isinstance(patch, list):
        raise Refused(400, "a JSON patch is a list of operations")
    root: Document = {"": document}
    for step in patch:
        if not isinstance(step, dict):
            raise Refused(400, "an operation of a JSON patch is an object")
        word, path = step.get("op"), _pointer(step.get("path"))
        if word in ("move", "copy"):
            origin = _pointer(step.get("from"))
            value = copy.deepcopy(_at(root, origin))
            if word == "move":
                _take(root, origin)
            _put(root, path, value, is_new=True)
        elif word in ("add", "replace"):
            _put(root, path, step.get("value"), is_new=word == "add")
        elif word == "remove":
            _take(root, path)
        elif word == "test":
            if _at(root, path) != step.get("value"):
                raise Refused(422, f"the test of {step.get('path')} failed")
        else:
            raise Refused(400, f"unknown operation {word!r} of a JSON patch")
    result = root[""]
    if not isinstance(result, dict):
        raise Refused(422, "the patched document is not an object")
    return result


def _pointer(path: object) -> list[str]:
    """Keys of a JSON pointer, below the empty one of the root."""
    if not isinstance(path, str) or (path and not path.startswith("/")):
        raise Refused(400, f"{path!r} is not a JSON pointer")
    return [key.replace("~1", "/").replace("~0", "~") for key in path.split("/")]


def _index(held: list[object], key: str, room: int = 0) -> int:
    if not (key.isascii() and key.isdigit() and int(key) < len(held) + room):
        raise Refused(422, f"there is no item {key!r} in this list")
    return int(key)


def _at(root: object, path: list[str]) -> object:
    for key in path:
        if isinstance(root, dict) and key in root:
            root = root[key]
        elif isinstance(root, list):
            root = root[_index(root, key)]
        else:
            raise Refused(422, f"there is no /{'/'.join(path[1:])}")
    return root


def _take(root: object, path: list[str]) -> None:
    parent, key = _at(root, path[:-1]), path[-1]
    _at(root, path)
    if isinstance(parent, dict):
        del parent[key]
    elif isinstance(parent, list):
        del parent[_index(parent, key)]


def _put(root: object, path: list[str], value: object, *, is_new: bool) -> None:
    parent, key = _at(root, path[:-1]), path[-1]
    if not is_new:
        _at(root, path)
    if isinstance(parent, dict):
        parent[key] = value
    elif isinstance(parent, list) and is_new:
        parent.insert(len(parent) if key == "-" else _index(parent, key, 1), value)
    elif isinstance(parent, list):
        parent[_index(parent, key)] = value
    else:
        raise Refused(422, f"there is no /{'/'.join(path[1:-1])}")
