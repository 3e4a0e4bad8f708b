"""What the configuration's keys are, for people and editors, generated from the schema. Pure.

`config_schema()` is what `emu schema` prints; `reference_markdown()` is the text of
`docs/reference/config.md` (`python -m emu.config.docs > docs/reference/config.md` writes it, a
test compares the two).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import inspect

from emu.config import names, schema
from emu.config.check import struct_of, table_info, unwrap, whole_schema
from emu.config.features import with_keys
from emu.config.kinds import KINDS, OWN_CLASS, PARTIAL_TABLES, Union, unions
from emu.config.presets import PRESETS
from emu.documents import Document

_INTRO: Final = """\
# Configuration

Every table and key of a configuration file. This page is generated from `emu/config/tables/`.

A file is TOML. Units stand in the names of the keys (`_ns`, `_us`, `_ms`, `_s`: time; `_gib`: 2^30
bytes; `_gbps`: 1e9 bits per second; `_gbytes_per_s`: 1e9 bytes per second). Relative paths are
relative to the file. Keys that are left out have the default shown here, unknown keys are refused.
On the command line, `--set KEY=VALUE` changes a key: `--set scheduler.max_num_seqs=64`,
`--set 'replicas.0.count=4'`.
"""

_ROW_HEAD: Final = "\n| key | type | default | meaning |\n|---|---|---|---|\n"
_WORDS: Final[Mapping[tuple[type, str], Sequence[str]]] = {
    (schema.RouterTable, "decode_policy"): (*names.DECODE_POLICIES, OWN_CLASS),
    (schema.RouterTable, "admission"): (*names.ADMISSIONS, OWN_CLASS),
    (schema.MigrationTable, "policy"): (*names.MIGRATIONS, OWN_CLASS),
    (schema.AutoscaleTable, "preset"): ("", *PRESETS),
}
"""Keys whose words the types do not tell."""


def config_schema() -> Document:
    """JSON Schema of the configuration, with descriptions."""
    document: Document = msgspec.json.schema(with_keys(schema.Config))
    definitions = document["$defs"]
    for base, union in unions().items():
        definitions[base.__name__] = _union_schema(base, union, definitions)
    for (holder, key), table in PARTIAL_TABLES.items():
        properties = definitions[holder.__name__]["properties"]
        described = {"description": properties[key]["description"]}
        if table in KINDS:  # of which kind depends on the table that it overrides
            union = unions()[table]
            named: Document = {union.key: _words(union.words)}
            for kind in union.structs:
                named = definitions[kind.__name__]["properties"] | named
            whole = definitions[union.structs[0].__name__]
            properties[key] = whole | described | {"properties": named}
        else:
            properties[key] = described | {
                k: v for k, v in definitions[table.__name__].items() if k != "description"
            }
        properties[key]["required"] = []
    for (holder, key), words in _WORDS.items():
        kinds = unions()[holder].structs if holder in unions() else [holder]
        for kind in kinds:
            item = definitions[kind.__name__]["properties"][key]
            item.pop("type", None)
            item |= _words(words)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "emu configuration",
        **document,
    }


def _union_schema(base: type[msgspec.Struct], union: Union, definitions: Document) -> Document:
    """The kinds of a table, each with a definition of its own."""
    structs = union.structs
    _, found = msgspec.json.schema_components(structs, ref_template="#/$defs/{name}")
    for name, struct in zip([*union.kinds, ""], structs, strict=False):
        definition = found[struct.__name__]
        if "description" in definition:  # docstrings are indented before Python 3.13
            definition["description"] = " ".join(definition["description"].split())
        key = definition["properties"][union.key]
        if name:
            key.pop("enum", None)
            key["const"] = name
        else:
            key["pattern"] = f"^{names.IMPORT_PATH}$"
        needed = [key for key in definition.get("required", ()) if key != union.key]
        definition["required"] = needed if name == union.default else [*needed, union.key]
    definitions |= found
    return {
        "description": base.__doc__,
        "anyOf": [{"$ref": f"#/$defs/{struct.__name__}"} for struct in structs],
    }


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])}, or {words[-1]}"


def _words(words: Sequence[str]) -> Document:
    """A key that takes these words, or a class by import path if that is among them."""
    known = {"enum": [word for word in words if word != OWN_CLASS]}
    if OWN_CLASS not in words:
        return known
    return {"anyOf": [known, {"type": "string", "pattern": f"^{names.IMPORT_PATH}$"}]}


def reference_markdown() -> str:
    """The reference page: a section for each table, a row for each key."""
    parts = [_INTRO]
    for heading, struct in _sections():
        parts.append(f"\n## {heading}\n")
        if struct.cls.__doc__:
            parts.append(f"\n{struct.cls.__doc__.strip().splitlines()[0]}\n")
        parts.append(key_table(struct))
        union = unions().get(struct.cls)
        if union is not None:
            parts.append(_kinds(heading, struct, union))
    return "".join(parts)


def key_table(struct: inspect.StructType) -> str:
    """The keys of one table as a Markdown table; empty if it has only tables."""
    rows = [_row(item) for item in struct.fields if not _is_section(item)]
    union = KINDS.get(struct.cls)
    if union is not None:
        cells = [f"`{union.key}`", "string", f"`{json.dumps(union.default)}`", _listed(union.words)]
        rows.insert(0, f"| {' | '.join(cells)} |\n")
    if not rows:
        return ""
    return _ROW_HEAD + "".join(rows)


def _kinds(heading: str, base: inspect.StructType, union: Union) -> str:
    """A section for the keys of each kind beside those that all have."""
    shared = {union.key, *(item.name for item in base.fields)}
    parts = []
    for name, kind in zip(union.words, union.structs, strict=True):
        struct = table_info(kind)
        own = [item for item in struct.fields if item.name not in shared]
        parts.append(f'\n### {heading} with `{union.key} = "{name}"`\n')
        parts.append(f"\n{' '.join((kind.__doc__ or '').split())}\n")
        if own:
            parts.append(_ROW_HEAD + "".join(map(_row, own)))
        else:
            parts.append("\nNo keys of its own.\n")
    return "".join(parts)


def tables() -> Iterator[tuple[str, inspect.StructType]]:
    """Every table of the schema with its dotted path (`replicas[]` for arrays of tables)."""
    yield from _walk("", whole_schema())


def _walk(path: str, struct: inspect.StructType) -> Iterator[tuple[str, inspect.StructType]]:
    yield path, struct
    fields = {item.name: item for item in struct.fields}
    for kind in unions()[struct.cls].structs if struct.cls in KINDS else ():
        for item in table_info(kind).fields:
            fields.setdefault(item.name, item)
    for item in fields.values():
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
