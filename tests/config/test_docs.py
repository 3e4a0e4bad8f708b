"""The schema's descriptions, JSON Schema and reference page are complete and current."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec import inspect

from emu.config.check import table_info, unwrap
from emu.config.docs import config_schema, description, reference_markdown, tables
from emu.config.kinds import unions

ROOT = Path(__file__).resolve().parents[2]


def test_every_key_and_every_table_has_a_description() -> None:
    missing = []
    paths = [path for path, _ in tables()]
    for path, struct in tables():
        if not struct.cls.__doc__ or "Base of all" in struct.cls.__doc__:
            missing.append(path)
        for item in struct.fields:
            kind = unwrap(item.type)
            holds_tables = any(p.startswith(f"{path}.{item.name}".lstrip(".")) for p in paths)
            plain_table = holds_tables and not isinstance(item.type, inspect.Metadata)
            if not plain_table and len(description(item)) < 8:
                missing.append(f"{path}.{item.name} {kind}")
    assert missing == []


def test_reference_page_is_the_generated_one() -> None:
    page = ROOT / "docs" / "reference" / "config.md"
    assert page.read_text() == reference_markdown(), (
        "run: python -m emu.config.docs > docs/reference/config.md"
    )


def test_reference_page_names_every_key() -> None:
    page = reference_markdown()
    for path, struct in tables():
        section = page.split("\n## ")
        table = path.replace("[]", "")
        heading = next(
            (s for s in section if s.startswith((f"`[{table}]`", f"`[[{table}]]`"))), section[1]
        )
        for item in struct.fields:
            assert f"`{item.name}`" in heading or f"{table}.{item.name}".lstrip(".") in page


def test_json_schema_describes_the_same_keys() -> None:
    document = json.loads(json.dumps(config_schema()))
    assert document["$schema"].startswith("https://json-schema.org/")
    names = {struct.cls.__name__: struct for _, struct in tables()}
    for union in unions().values():
        names |= {kind.__name__: table_info(kind) for kind in union.structs}
    for name, definition in document["$defs"].items():
        if "anyOf" in definition:
            continue
        assert definition["additionalProperties"] is False
        struct = names[name]
        tag = [struct.tag_field] if struct.tag_field else []
        assert list(definition["properties"]) == [*tag, *(item.name for item in struct.fields)]
    replica = document["$defs"]["ReplicaTable"]["properties"]
    assert "max_num_seqs" in replica["scheduler"]["properties"]
    assert replica["scheduler"]["description"]


def test_json_schema_lists_every_kind() -> None:
    defs = config_schema()["$defs"]
    for base, union in unions().items():
        kinds = [defs[part["$ref"].split("/")[-1]] for part in defs[base.__name__]["anyOf"]]
        words = [kind["properties"][union.key].get("const") for kind in kinds]
        assert words == [*union.kinds, *([None] if union.own else [])]
    assert "chunk_size" not in defs["VllmTable"]["properties"]
    assert "multicast" in defs["HpaTable"]["properties"]["preset"]["enum"]
    assert "multicast" not in defs["HpaTable"]["properties"]
    assert set(defs["Straggler"]["required"]) == {"at_s", "kind", "factor"}
    assert "factor" not in defs["Pause"]["properties"]
    assert defs["KvShrink"]["properties"]["part"]["maximum"] == 1
