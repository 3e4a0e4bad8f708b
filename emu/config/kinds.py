"""The registry of kinds: tables of which one key chooses the kind, and each kind has its own keys.

Routers, planners, schedulers, latency back ends and faults are such kinds. A kind is a struct whose
tag is its name; nothing else in the program writes the name down. What must know the kinds reads
them here: the checker (a key of another kind is an error that names its owners), conversion,
`--set`, overrides of a replica group, the reference page, `emu schema`, random worlds. A kind that
is no word of the list is a class of the user's own, but for faults.
"""

from __future__ import annotations

import functools
import importlib
import unicodedata
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar, get_args

import msgspec

from emu.config.engine_words import ENGINES
from emu.config.features import is_widened, with_keys
from emu.config.names import is_import_path
from emu.config.schema import (
    AutoscaleTable,
    Config,
    EngineTable,
    FaultTable,
    LatencyTable,
    ModelTable,
    OwnLatencyTable,
    OwnPlannerTable,
    OwnRouterTable,
    OwnSchedulerTable,
    ReplicaTable,
    RouterTable,
    SchedulerTable,
    ServedModelTable,
)
from emu.config.tables import tag_of
from emu.config.tables.latency import BACKENDS
from emu.config.tables.routing import ROUTERS
from emu.config.tables.scaling import PLANNERS
from emu.config.tables.scheduling import SCHEDULERS
from emu.documents import Document, DocumentView
from emu.process.prepared import prepared

Struct = type[msgspec.Struct]
Kind = TypeVar("Kind", bound=msgspec.Struct)
OWN_CLASS: Final = "package.module:Class"
"""What stands in lists of names for a class of the user's own."""


class Union(msgspec.Struct, frozen=True):
    """The kinds of a table."""

    base: Struct
    """What all kinds share: for a kind that is not known."""
    key: str
    """The key that names the kind."""
    kinds: Mapping[str, Struct]
    """By name; the first one is the default."""
    own: Struct | None = None
    """For a class by import path; None: there can be no such class."""
    has_default: bool = True
    """A table that names no kind is of the first one."""

    @property
    def default(self) -> str:
        """The kind of a table that names none."""
        return next(iter(self.kinds)) if self.has_default else ""

    @property
    def words(self) -> list[str]:
        """What may stand at the key."""
        return [*self.kinds, *([OWN_CLASS] if self.own else [])]

    @property
    def structs(self) -> list[Struct]:
        """All kinds, that of a class of the user's own last."""
        return [*self.kinds.values(), *([self.own] if self.own else [])]

    def kind_of(self, table: DocumentView, default: str = "") -> Struct:
        """The kind of a table as it stands in a file; that of `default` if it names none."""
        name = table.get(self.key, default or self.default)
        if not isinstance(name, str):
            return self.base
        if name in self.kinds:
            return self.kinds[name]
        return self.own if self.own is not None and is_import_path(name) else self.base

    def of_key(self, key: str) -> Struct:
        """A kind that has this key, if any has."""
        return next((k for k in reversed(self.structs) if key in k.__struct_fields__), self.base)

    def owners(self, key: str) -> list[str]:
        """Names of the kinds that have a key."""
        words = zip(self.words, self.structs, strict=True)
        return [name for name, kind in words if key in kind.__struct_fields__]

    def foreign(self, table: DocumentView) -> list[str]:
        """Keys of a table that only other kinds have; none where its kind is not known."""
        kind = self.kind_of(table)
        own = (self.key, *kind.__struct_fields__)
        if kind is self.base:
            return []
        return [key for key in table if key not in own and self.owners(key)]

    def keys(self, name: str) -> Sequence[str]:
        """Keys of a table of the kind of this name."""
        return self.key, *self.kinds[name].__struct_fields__

    def with_keys(self) -> Union:
        """The kinds with the keys of features."""
        kinds = {name: with_keys(kind) for name, kind in self.kinds.items()}
        own = None if self.own is None else with_keys(self.own)
        return msgspec.structs.replace(self, kinds=kinds, own=own)


def _union(base: Struct, kinds: Sequence[Struct], own: Struct) -> Union:
    key = base.__struct_config__.tag_field
    assert key is not None
    return Union(base, key, MappingProxyType({tag_of(kind): kind for kind in kinds}), own)


KINDS: Final[Mapping[Struct, Union]] = MappingProxyType(
    {
        RouterTable: _union(RouterTable, ROUTERS, OwnRouterTable),
        SchedulerTable: _union(SchedulerTable, SCHEDULERS, OwnSchedulerTable),
        LatencyTable: _union(LatencyTable, BACKENDS, OwnLatencyTable),
        AutoscaleTable: _union(AutoscaleTable, PLANNERS, OwnPlannerTable),
    }
)
"""By what their kinds share."""
FIELDS: Final[Mapping[str, Struct]] = MappingProxyType(
    {
        "router": RouterTable,
        "scheduler": SchedulerTable,
        "latency": LatencyTable,
        "autoscale": AutoscaleTable,
    }
)
"""Unions at the top level of a file."""


PARTIAL_TABLES: Final[Mapping[tuple[type, str], Struct]] = {
    (ReplicaTable, "engine"): EngineTable,
    (ReplicaTable, "scheduler"): SchedulerTable,
    (ReplicaTable, "latency"): LatencyTable,
    (ReplicaTable, "model"): ModelTable,
    (ServedModelTable, "engine"): EngineTable,
    (ServedModelTable, "scheduler"): SchedulerTable,
    (ServedModelTable, "latency"): LatencyTable,
    (ServedModelTable, "autoscale"): AutoscaleTable,
}
"""Untyped fields of the schema that hold some keys of another table."""
NUMBER_MAX: Final = 1e15
_STEERING: Final = ("Cc", "Cf", "Zl", "Zp")
"""Categories of characters that no name or path has: control, invisible formats, line ends."""


def implementation(made_by: str) -> Any:
    """What the `made_by` of a table or an engine names: loaded when asked for."""
    module, _, name = made_by.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def fault_kinds() -> Union:
    """The kinds of `[[faults]]`, which are loaded only for files that have some."""
    from emu.config.tables.faults import FAULTS

    kinds = {str(get_args(kind.__annotations__["kind"])[0]): kind for kind in FAULTS}
    return Union(FaultTable, "kind", kinds, has_default=False)


@functools.cache
def unions() -> Mapping[Struct, Union]:
    """All of them, with the keys of features, and faults: neither is loaded for a plain file."""
    wide = {base: union.with_keys() for base, union in KINDS.items()}
    return MappingProxyType({**wide, FaultTable: fault_kinds()})


def fault_of(raw: DocumentView) -> FaultTable:
    """A `[[faults]]` table as its kind. Raises msgspec.ValidationError."""
    made = msgspec.convert(raw, prepared(fault_kinds().kind_of(raw)))
    assert isinstance(made, FaultTable)
    return made


def convert(raw: DocumentView) -> Config:
    """A document as a `Config`. Raises msgspec.ValidationError."""
    rest = {key: value for key, value in raw.items() if key not in FIELDS}
    made: Document = {}
    faults = rest.get("faults")
    if isinstance(faults, list) and faults and all(isinstance(fault, dict) for fault in faults):
        del rest["faults"]
        made["faults"] = [fault_of(fault) for fault in faults]
    config = _read(rest, Config)
    for name, base in FIELDS.items():
        table = raw.get(name)
        if table is not None:
            default = policy_of_engine(raw) if base is SchedulerTable else ""
            kind = KINDS[base].kind_of(table, default) if isinstance(table, dict) else base
            made[name] = _read(table, kind)
    return msgspec.structs.replace(config, **made) if made else config


def policy_of_engine(raw: DocumentView) -> str:
    """The scheduler of a document that names an engine and no scheduler; empty: none is known."""
    engine = raw.get("engine")
    name = engine.get("name") if isinstance(engine, dict) else None
    words = ENGINES.get(name) if isinstance(name, str) else None
    return "" if words is None else words.policies[0]


def _read(raw: object, kind: type[Kind]) -> Kind:
    """A table as its kind. Features are loaded for one that the plain kind does not take.

    Raises msgspec.ValidationError.
    """
    try:
        return msgspec.convert(raw, prepared(kind))
    except msgspec.ValidationError:
        wide = with_keys(kind)
        if wide is kind:
            raise
        made = msgspec.convert(raw, prepared(wide))
        assert isinstance(made, kind)
        return made


def overridden(table: msgspec.Struct, changes: DocumentView) -> Any:
    """A table with some keys changed; a new kind keeps the keys that it shares with the old one.

    Raises msgspec.ValidationError.
    """
    merged: Document = msgspec.to_builtins(table) | dict(changes)
    base = next((base for base in KINDS if isinstance(table, base)), None)
    kind: Struct = type(table) if base is None else KINDS[base].kind_of(merged)
    if base is not None and tag_of(type(table)) != tag_of(kind):
        known = with_keys(kind) if is_widened(table) else kind
        shared = {KINDS[base].key, *known.__struct_fields__, *changes}
        merged = {key: value for key, value in merged.items() if key in shared}
    return _read(merged, kind)


def engine_with(table: EngineTable, changes: DocumentView) -> EngineTable:
    """An engine's table with some keys changed: another engine has its own version, and constants
    that were learned belong to the version that their file names.

    Raises msgspec.ValidationError.
    """
    kept: Document = msgspec.to_builtins(table)
    if "name" in changes and changes["name"] != table.name:
        kept |= {"version": "", "learned": ""}
    if changes.get("learned"):
        kept["version"] = ""
    return msgspec.convert(kept | dict(changes), prepared(EngineTable))


def is_faultless(raw: Document) -> bool:
    """What msgspec takes, and has nothing that only the walk judges, needs no walk.

    Most documents are like that, and the walk begins by asking for the types of all tables, which
    takes longer than reading the document.
    """
    try:
        config = convert(raw)
    except (msgspec.ValidationError, OverflowError):
        return False
    unions_of = (config.router, config.scheduler, config.latency, config.autoscale)
    if any(type(table) in KINDS for table in unions_of):
        return False  # of no kind that is known
    if any(type(fault) is FaultTable for fault in config.faults):
        return False
    if any(key in raw.get("scheduler", ()) for key in config.scheduler.lacks):
        return False
    untyped = {name for _, name in PARTIAL_TABLES}
    for group in (*raw.get("replicas", ()), *raw.get("models", ())):
        parts = untyped.intersection(group)
        if "engine" in parts or not all(_is_plain_part(raw, name, group[name]) for name in parts):
            return False
    return is_ordinary(raw)


def _is_plain_part(raw: Document, name: str, part: Document) -> bool:
    """Whether the keys that a group overrides, which may be few, are those of the file's kind."""
    base = FIELDS.get(name)
    if base is None:
        return False
    union, given = KINDS[base], raw.get(name, {})
    default = given.get(union.key) or (policy_of_engine(raw) if base is SchedulerTable else "")
    kind = union.kind_of(part, default)
    lacks = kind.lacks if issubclass(kind, SchedulerTable) else {}
    if kind in (base, union.own) or union.key in part or lacks.keys() & part.keys():
        return False
    try:
        msgspec.convert(part, prepared(kind))
    except (msgspec.ValidationError, OverflowError):
        return False
    return True


def is_ordinary(value: object) -> bool:
    """No number beyond the largest quantity, no NaN, no control character in a document."""
    if isinstance(value, dict):
        return all(map(is_ordinary, value.values()))
    if isinstance(value, list):
        return all(map(is_ordinary, value))
    if isinstance(value, (int, float)):
        return abs(value) <= NUMBER_MAX
    return not isinstance(value, str) or not control_character(value)


def control_character(text: str) -> str:
    """The first character of a text that would steer a terminal; empty if there is none."""
    if text.isprintable():
        return ""
    return next((c for c in text if unicodedata.category(c) in _STEERING), "")
