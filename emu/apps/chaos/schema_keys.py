"""Which keys of the schema there are, and which of them a world gives."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from msgspec import inspect

from emu.config.check import struct_of, table_info, unwrap, whole_schema
from emu.config.kinds import unions
from emu.documents import DocumentView


@functools.cache
def schema_keys() -> tuple[str, ...]:
    """Every key of the schema, dotted, without indices: `scheduler.max_num_seqs`, `faults.part`.

    A key that several kinds of a table share is one key; each kind is an entry of its own, too
    (`latency.backend=linear`).
    """
    return tuple(dict.fromkeys(_keys_in(whole_schema(), "")))


def _keys_in(table: inspect.StructType, prefix: str) -> Iterator[str]:
    union = unions().get(table.cls)
    if union is not None:
        yield f"{prefix}{union.key}"
        for name, kind in union.kinds.items():
            yield f"{prefix}{union.key}={name}"
            for item in table_info(kind).fields:
                yield from _key(item, prefix)
    else:
        for item in table.fields:
            yield from _key(item, prefix)


def _key(item: inspect.Field, prefix: str) -> Iterator[str]:
    name = f"{prefix}{item.encode_name}"
    inner = _table_in(item.type)
    if inner is None:
        yield name
        return
    if isinstance(unwrap(item.type), inspect.UnionType) and not _is_optional(item.type):
        yield name  # a name, or a table
    yield from _keys_in(inner, f"{name}.")


def _table_in(kind: inspect.Type) -> inspect.StructType | None:
    kind = unwrap(kind)
    return struct_of(kind.item_type if isinstance(kind, inspect.ListType) else kind)


def _is_optional(kind: inspect.Type) -> bool:
    kind = unwrap(kind)
    assert isinstance(kind, inspect.UnionType)
    return all(isinstance(unwrap(k), inspect.StructType | inspect.NoneType) for k in kind.types)


def keys_of(tables: DocumentView) -> set[str]:
    """Keys of the schema that a world's tables give."""
    return set(_given(whole_schema(), tables, ""))


def _given(table: inspect.StructType, given: DocumentView, prefix: str) -> Iterator[str]:
    union = unions().get(table.cls)
    if union is not None:
        kind = union.kind_of(given)
        yield f"{prefix}{union.key}={given.get(union.key, union.default)}"
        if union.key in given:
            yield f"{prefix}{union.key}"
        table = table_info(kind)
    types = {item.encode_name: item.type for item in table.fields}
    for name, value in given.items():
        if name not in types:
            continue  # a key of before, which the reader turns into today's
        inner = _table_in(types[name])
        tables = [value] if isinstance(value, Mapping) else value
        if inner is None or isinstance(tables, str):
            yield f"{prefix}{name}"
            continue
        for one in tables or ():
            yield from _given(inner, one, f"{prefix}{name}.")
