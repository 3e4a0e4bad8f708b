"""The registry of kinds: a name is written once, and a key that nothing reads is refused."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from emu.config.check import check_document, struct_of, table_info, unwrap
from emu.config.kinds import FIELDS, KINDS, Struct, implementation, is_faultless, unions
from emu.config.load import config_from_dict, effective_dict
from emu.config.rules import _defaults
from emu.config.schema import (
    AutoscaleTable,
    Config,
    LatencyTable,
    RouterTable,
    SchedulerTable,
)
from emu.config.tables import Only, Table
from emu.errors import InputError
from tests.sources import parsed

ROOT = Path(__file__).resolve().parents[2] / "emu"
ELSEWHERE = {
    "load": "a verb, and a column",
    "random": "expert routing, sampling",
    "round_robin": "expert routing",
    "blitz": "an executor",
    "paper": "a column",
    "hpa": "a preset",
    "vllm": "an engine, and its files",
    "sglang": "an engine",
    "tensorrt-llm": "an engine",
    "fcfs": "an order of SGLang's queue",
}
"""Names of kinds that are also words for something else."""
OTHERS_WORDS = ("lab/", "apps/fidelity/")
"""vLLM has a scheduling policy called fcfs; LLMServingSim's options are its own."""
NAMES = [
    name for base in (RouterTable, AutoscaleTable, SchedulerTable) for name in KINDS[base].kinds
]
KEYS = ("policy", "planner")


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {
        path: parsed(path) for path in sorted(ROOT.rglob("*.py")) if "examples" not in path.parts
    }


@functools.cache
def places() -> dict[str, list[str]]:
    """Where each string stands in the code."""
    found: dict[str, list[str]] = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                found.setdefault(node.value, []).append(place)
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ELSEWHERE])
def test_a_name_of_a_kind_is_written_once(name: str) -> None:
    its = [place for place in places()[name] if not place.startswith(OTHERS_WORDS)]
    assert len(its) == 1, its
    assert its[0].startswith("config/tables/")


def test_no_code_asks_for_a_kind_by_its_name() -> None:
    """`table.policy == "load"`: an isinstance says it, and a new name breaks nothing."""
    asked = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                is_kind = any(isinstance(s, ast.Attribute) and s.attr in KEYS for s in sides)
                words = {c.value for s in sides for c in ast.walk(s) if isinstance(c, ast.Constant)}
                if is_kind and words & set(NAMES):
                    asked.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert asked == []


@pytest.mark.parametrize("base", [RouterTable, AutoscaleTable, SchedulerTable])
def test_every_kind_is_implemented(base: Struct) -> None:
    for kind in KINDS[base].kinds.values():
        assert isinstance(implementation(kind.made_by), type)  # type: ignore[attr-defined]


# A value other than the default, for each type of key.
def other(item: inspect.Field) -> Any:
    kind = unwrap(item.type)
    if isinstance(kind, inspect.UnionType):
        kind = next(unwrap(k) for k in kind.types if not isinstance(k, inspect.NoneType))
    default = None if item.required else item.default
    if isinstance(kind, inspect.BoolType):
        return not default
    if isinstance(kind, inspect.LiteralType):
        return next(word for word in kind.values if word != default)
    if isinstance(kind, inspect.IntType):
        most = default if kind.le is None or not isinstance(default, int) else int(kind.le)
        return (default + 1 if default != most else default - 1) if isinstance(default, int) else 1
    if isinstance(kind, inspect.FloatType):
        low = default if isinstance(default, float) else 0.0
        return low / 2 if kind.le is not None and low * 1.5 > kind.le else low * 1.5 + 0.25
    if isinstance(kind, inspect.ListType):
        return [[0, 1], [1, 1]]
    if isinstance(kind, inspect.DictType):
        return {"x": "x"} if isinstance(kind.value_type, inspect.StrType) else {}
    return "x"


def refusal(tables: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        config_from_dict(tables)
    message = str(caught.value)
    assert "\n" not in message
    return message


PAIRS = [
    (field, name, key)
    for field, base in FIELDS.items()
    for name in unions()[base].kinds
    for key in dict.fromkeys(k for kind in unions()[base].structs for k in kind.__struct_fields__)
    if key not in (*unions()[base].keys(name), "policy", "planner", "backend")
]


@pytest.mark.parametrize("field", FIELDS)
def test_a_key_of_another_kind_is_refused_with_the_names_of_those_that_have_it(field: str) -> None:
    union = unions()[FIELDS[field]]
    for _, name, key in (pair for pair in PAIRS if pair[0] == field):
        struct = next(k for k in union.structs if key in k.__struct_fields__)
        item = next(i for i in table_info(struct).fields if i.name == key)
        said = refusal({field: {union.key: name, key: other(item)}})
        wanted = f'{field}.{key}: means nothing with {union.key} = "{name}"; it is a key of '
        assert wanted in said, said
        assert all(f'"{owner}"' in said.partition(wanted)[2] for owner in union.owners(key))


def test_a_group_of_replicas_is_judged_by_the_kind_that_it_takes() -> None:
    tables = {"scheduler": {"policy": "sarathi"}, "replicas": [{"scheduler": {"max_num_seqs": 4}}]}
    assert "replicas.0.scheduler.max_num_seqs: means nothing" in refusal(tables)
    models = [{"prefill": 1, "decode": 1, "autoscale": {"min_replicas": 2}}]
    said = refusal({"autoscale": {"planner": "blitz"}, "models": models})
    assert "models.0.autoscale.min_replicas: means nothing" in said


def conditional() -> list[tuple[tuple[str, ...], type[Table], str, Only]]:
    """Every table with keys that are read under a condition: where it stands, key, condition."""
    found = []

    def walk(struct: inspect.StructType, path: tuple[str, ...]) -> None:
        union = KINDS.get(struct.cls)
        for kind in [struct.cls] if union is None else union.kinds.values():
            assert issubclass(kind, Table)
            found.extend((path, kind, key, only) for key, only in kind.only.items())
        for item in struct.fields:
            inner = struct_of(item.type)
            if inner is not None:
                walk(inner, (*path, item.name))

    walk(table_info(Config), ())
    return found


def placed(path: tuple[str, ...], kind: type[Table], keys: dict[str, Any]) -> dict[str, Any]:
    union = next((u for u in KINDS.values() if kind in u.kinds.values()), None)
    if union is not None:
        keys = {union.key: kind.__struct_config__.tag, **keys}
    for part in reversed(path):
        keys = {part: keys}
    return keys


CONDITIONAL = conditional()


@pytest.mark.parametrize(
    ("path", "kind", "key", "only"),
    CONDITIONAL,
    ids=[f"{'.'.join(path)}-{kind.__name__}-{key}" for path, kind, key, _ in CONDITIONAL],
)
def test_a_key_that_is_not_read_is_refused(
    path: tuple[str, ...], kind: type[Table], key: str, only: Only
) -> None:
    fields = {item.name: item for item in table_info(kind).fields}
    switch = unwrap(fields[only.key].type)
    off: list[Any] = [_defaults(kind)[only.key]]
    if only.values:
        words = switch.values if isinstance(switch, inspect.LiteralType) else (True, False)
        off = [word for word in words if word not in only.values]
    assert off
    for value in off:
        keys = {only.key: value, "points": [[0, 1], [1, 1]], key: other(fields[key])}
        if "points" not in (key, *fields) or (key != "points" and value != "piecewise"):
            del keys["points"]
        said = refusal(placed(path, kind, keys))
        assert f"{'.'.join((*path, key))}: means nothing with {only.key} = " in said, said


def test_what_run_json_says_can_be_read_again() -> None:
    """All defaults stand there, those of keys that are not read too."""
    for tables in (
        {},
        {"autoscale": {"preset": "hpa"}},
        {"autoscale": {"preset": "serverlessllm"}},
    ):
        whole = effective_dict(config_from_dict(tables))
        assert effective_dict(config_from_dict(whole)) == whole


def test_an_override_of_the_kind_drops_keys_that_the_new_kind_does_not_have() -> None:
    tables = {"autoscale": {"planner": "hpa", "max_replicas": 3, "tick_ms": 5.0}}
    config = config_from_dict(tables, ["autoscale.planner=paper"])
    assert config.autoscale is not None
    assert config.autoscale.planner == "paper"
    assert config.autoscale.tick_ms == 5.0
    with pytest.raises(InputError, match=r"--set: autoscale.max_replicas: means nothing"):
        config_from_dict(tables, ["autoscale.planner=paper", "autoscale.max_replicas=4"])
    assert isinstance(config.latency, LatencyTable)


@pytest.mark.parametrize("base", list(KINDS))
def test_a_table_tells_the_name_of_its_kind(base: Struct) -> None:
    union = KINDS[base]
    for name, kind in union.kinds.items():
        assert msgspec.to_builtins(kind())[union.key] == name


def test_what_passes_without_the_walk_has_no_problem() -> None:
    """Keys that a group overrides, of every kind of its table and of others, right and wrong."""
    values: tuple[object, ...] = (0, 1, 64, -1, 10**16, 0.5, True, "", "auto", "none", [1], {})
    passed = walked = 0
    for name, base in (("scheduler", SchedulerTable), ("latency", LatencyTable)):
        union = KINDS[base]
        keys = sorted({key for kind in union.structs for key in kind.__struct_fields__})
        for own in ("", *union.kinds):
            for key in (*keys, union.key, "unknown"):
                for value in values:
                    raw: dict[str, Any] = {"replicas": [{name: {key: value}}]}
                    if own:
                        raw[name] = {union.key: own}
                    if is_faultless(raw):
                        passed += 1
                        assert check_document(raw) == [], raw
                    else:
                        walked += 1
    assert passed > 400 < walked


def test_an_engine_chooses_the_scheduler_whose_keys_a_group_overrides() -> None:
    group = {"scheduler": {"chunked_prefill_size": 2048}}
    assert is_faultless({"engine": {"name": "sglang"}, "replicas": [group]})
    assert not is_faultless({"replicas": [group]})
    assert not is_faultless({"replicas": [{**group, "engine": {"name": "sglang"}}]})
