"""`--set KEY=VALUE`: dotted keys into a parsed TOML document. Pure.

A part of the key that is a number is an index into an array; the index behind the last entry adds
one. VALUE is read as a TOML value; what is not one is taken as a string, and so is any bare word
for a key that holds a string. A list or table that the file leaves out starts from its default.
"""

from __future__ import annotations

import tomllib
from typing import Any

import msgspec
from msgspec import inspect

from emu.config.check import struct_of, table_info, unwrap, whole_schema
from emu.config.kinds import PARTIAL_TABLES, unions
from emu.config.suggestions import dotted, shown
from emu.config.tables import OVERRIDE, PARTS_MAX, Path
from emu.documents import Document
from emu.errors import InputError


def apply_override(raw: Document, text: str) -> Path:
    """Change `raw` as `KEY=VALUE` says; the path that was set."""
    key, equals, value_text = text.partition("=")
    if not equals:
        raise InputError(OVERRIDE, None, text, "expected KEY=VALUE")
    parts = [part.strip() for part in key.strip().split(".")]
    if not all(parts):
        raise InputError(OVERRIDE, None, key or text, "expected a dotted key such as router.policy")
    if len(parts) > PARTS_MAX:
        raise InputError(OVERRIDE, None, "", f"a key of more than {PARTS_MAX} parts")
    path, kind, holder = _descend(raw, parts)
    last = path[-1]
    value = _read_value(value_text.strip(), kind)
    if isinstance(holder, list):
        assert isinstance(last, int)
        holder[last] = value
    else:
        holder[last] = value
    return path


def _descend(
    raw: Document, parts: list[str]
) -> tuple[Path, inspect.Type | None, dict[Any, Any] | list[Any]]:
    """The holder of the last part, with the schema's type of the value (None: unknown key)."""
    holder: Any = raw
    kind: inspect.Type | None = whole_schema()
    path: Path = ()
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if isinstance(holder, list):
            index = _index(part, holder, path)
            kind = _item_type(kind)
            if index == len(holder):
                holder.append({})
            path = (*path, index)
            if last:
                return path, kind, holder
            holder = holder[index]
        elif isinstance(holder, dict):
            field = _field(kind, part)
            kind = _field_type(kind, field) if field else None
            path = (*path, part)
            if last:
                return path, kind, holder
            if part not in holder:
                holder[part] = _seed(field)
            holder = holder[part]
        else:
            problem = f"{dotted(path)} is {shown(holder)}, which has no keys"
            raise InputError(OVERRIDE, None, ".".join(parts), problem)
    raise AssertionError("a dotted key has at least one part")


def _index(part: str, holder: list[Any], path: Path) -> int:
    where = dotted(path)
    if not (part.isascii() and part.isdigit() and len(part) < 10):
        problem = f"{where} is an array; expected an index, got {shown(part)}"
        problem += f"; write {where}.0.{part}" if holder and part.isidentifier() else ""
        raise InputError(OVERRIDE, None, f"{where}.{part}", problem)
    index = int(part)
    if index > len(holder):
        known = f"the last index is {len(holder) - 1}" if holder else "it is empty"
        known += f"; {len(holder)} adds an entry"
        raise InputError(OVERRIDE, None, f"{where}.{part}", f"no such entry; {known}")
    return index


def _item_type(kind: inspect.Type | None) -> inspect.Type | None:
    inner = None if kind is None else unwrap(kind)
    return inner.item_type if isinstance(inner, inspect.ListType) else None


def _field(kind: inspect.Type | None, name: str) -> inspect.Field | None:
    struct = None if kind is None else struct_of(kind)
    if struct is None:
        return None
    union = unions().get(struct.cls)
    if union is not None:  # whatever the kind is
        struct = table_info(union.of_key(name))
    return next((item for item in struct.fields if item.encode_name == name), None)


def _field_type(parent: inspect.Type | None, item: inspect.Field) -> inspect.Type:
    struct = None if parent is None else struct_of(parent)
    assert struct is not None
    partial = PARTIAL_TABLES.get((struct.cls, item.encode_name))
    return item.type if partial is None else table_info(partial)


def _seed(item: inspect.Field | None) -> Any:
    """What a key that the file leaves out starts from."""
    if item is None or _item_type(item.type) is None or not callable(item.default_factory):
        return {}
    return msgspec.to_builtins(item.default_factory())


def _read_value(text: str, kind: inspect.Type | None) -> Any:
    wants_text = kind is not None and isinstance(
        unwrap(kind), (inspect.StrType, inspect.LiteralType)
    )
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    if set(document) != {"value"} or "\n" in text:
        return text
    value = document["value"]
    return text if wants_text and not isinstance(value, (str, list, dict)) else value
