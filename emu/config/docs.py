"""What the configuration's keys are, for people and editors, generated from the schema. Pure.

`config_schema()` is what `emu schema` prints; `reference_markdown()` is the text of
`docs/reference/config.md` (`python -m emu.config.docs > docs/reference/config.md` writes it, a
test compares the two).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect

from emu.config import schema
from emu.config.check import PARTIAL_TABLES, struct_of, table_info, unwrap

_INTRO: Final = """\
# Configuration

Every table and key of a configuration file. This page is generated from `emu/config/tables/`.

A file is TOML. Units stand in the names of the keys (`_ns`, `_us`, `_ms`, `_s`: time; `_gib`: 2^30
bytes; `_gbps`: 1e9 bits per second; `_gbytes_per_s`: 1e9 bytes per second). Relative paths are
relative to the file. Keys that are left out have the default shown here, unknown keys are refused.
On the command line, `--set KEY=VALUE` changes a key: `--set scheduler.max_num_seqs=64`,
`--set 'replicas.0.count=4'`.
"""


def config_schema() -> dict[str, Any]:
    """JSON Schema of the configuration, with descriptions."""
    document: dict[str, Any] = msgspec.json.schema(schema.Config)
    definitions = document["$defs"]
    for (holder, key), table in PARTIAL_TABLES.items():
        properties = definitions[holder.__name__]["properties"]
        properties[key] = {
            "description": properties[key]["description"],
            **{k: v for k, v in definitions[table.__name__].items() if k != "description"},
            "required": [],
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "emu configuration",
        **document,
    }


def reference_markdown() -> str:
    """The reference page: a section for each table, a row for each key."""
    parts = [_INTRO]
    for heading, struct in _sections():
        parts.append(f"\n## {heading}\n")
        if struct.cls.__doc__:
            parts.append(f"\n{struct.cls.__doc__.strip().splitlines()[0]}\n")
        parts.append(key_table(struct))
    return "".join(parts)


def key_table(struct: inspect.StructType) -> str:
    """The keys of one table as a Markdown table; empty if it has only tables."""
    rows = [_row(item) for item in struct.fields if not _is_section(item)]
    if not rows:
        return ""
    return "\n| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def tables() -> Iterator[tuple[str, inspect.StructType]]:
    """Every table of the schema with its dotted path (`replicas[]` for arrays of tables)."""
    yield from _walk("", table_info(schema.Config))


def _walk(path: str, struct: inspect.StructType) -> Iterator[tuple[str, inspect.StructType]]:
    yield path, struct
    for item in struct.fields:
        inner, is_array = _inner(item)
        if inner is not None:
            dot = "." if path else ""
            yield from _walk(f"{path}{dot}{item.encode_name}{'[]' if is_array else ''}", inner)


def _sections() -> Iterator[tuple[str, inspect.StructType]]:
    for path, struct in tables():
        if not path:
            yield "Top level", struct
        elif path.endswith("[]"):
            yield f"`[[{path[:-2].replace('[]', '')}]]`", struct
        else:
            yield f"`[{path.replace('[]', '')}]`", struct


def _inner(item: inspect.Field) -> tuple[inspect.StructType | None, bool]:
    kind = unwrap(item.type)
    if isinstance(kind, inspect.ListType):
        return struct_of(kind.item_type), True
    return struct_of(kind), False


def _is_section(item: inspect.Field) -> bool:
    """True for keys that are nothing but a table of their own."""
    kind = unwrap(item.type)
    if isinstance(kind, inspect.UnionType):
        is_text = any(isinstance(unwrap(part), inspect.StrType) for part in kind.types)
        return struct_of(kind) is not None and not is_text
    return _inner(item)[0] is not None


def description(item: inspect.Field) -> str:
    """What the schema says about a key."""
    kind = item.type
    while isinstance(kind, inspect.Metadata):
        if kind.extra_json_schema and "description" in kind.extra_json_schema:
            return str(kind.extra_json_schema["description"])
        kind = kind.type
    return ""


def _row(item: inspect.Field) -> str:
    cells = [f"`{item.encode_name}`", _type(item.type), _default(item), description(item)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _type(kind: inspect.Type) -> str:
    kind = unwrap(kind)
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f"`{word}`" for word in kind.values)
    if isinstance(kind, inspect.UnionType):
        parts = [part for part in kind.types if not isinstance(part, inspect.NoneType)]
        return " or ".join(_type(part) for part in parts)
    if isinstance(kind, inspect.AnyType):
        return "any value"
    if isinstance(kind, inspect.ListType):
        return f"array of {_type(kind.item_type)}"
    if isinstance(kind, inspect.StructType | inspect.DictType):
        return "table"
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.StrType):
        return "string"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return ("integer" if isinstance(kind, inspect.IntType) else "number") + _bounds(kind)
    raise TypeError(f"the schema has a type that the reference does not know: {kind}")


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    low = next(
        (f" {sign} {b:g}" for sign, b in ((">=", kind.ge), (">", kind.gt)) if b is not None), ""
    )
    # Ceilings that only keep absurd figures out are not worth a reader's time.
    high = f", <= {kind.le:g}" if kind.le is not None and kind.le <= 1e5 else ""
    return low + high if low else high.replace(",", "")


def _default(item: inspect.Field) -> str:
    if item.required:
        return "required"
    if callable(item.default_factory):
        return f"`{json.dumps(msgspec.to_builtins(item.default_factory()))}`"
    return "none" if item.default is None else f"`{json.dumps(item.default)}`"


if __name__ == "__main__":
    print(reference_markdown(), end="")
