"""Checks a parsed TOML document: where its keys stand, what kinds its tables are, what is wrong.

msgspec stops at the first problem and speaks of `object` and `$.path`; this walk over the same
type information finds every problem, names keys as the user writes them, suggests the nearest
known key and refuses what TOML allows and no quantity can be (NaN, infinity, integers beyond 64
bits). What passes here converts without error.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import re
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_args

import msgspec
from msgspec import inspect

from emu.config import names, schema
from emu.config.features import is_widened, with_keys
from emu.config.names import engine_moved, nearest, unknown_key, unknown_value
from emu.config.schema import (
    AiconfiguratorTable,
    AstraTable,
    Config,
    EngineTable,
    FasterTransformerTable,
    FaultTable,
    FcfsTable,
    LatencyTable,
    LightLlmTable,
    LinearTable,
    OrcaTable,
    OwnLatencyTable,
    OwnSchedulerTable,
    ProfileTable,
    RooflineTable,
    SarathiTable,
    SchedulerTable,
    SglangTable,
    VidurLayersTable,
    VllmTable,
    VllmV0Table,
)
from emu.errors import InputError
from emu.process.prepared import prepared

# --- places: where a key stands in a TOML text ----------------------------------------------------
# `tomllib` forgets positions, so this scanner walks the text once more. It runs only after
# `tomllib` has accepted the text and only when an error must be shown, so it may be lenient: it
# knows headers, arrays of tables, dotted and quoted keys, inline tables, arrays and all four kinds
# of strings, and reads values no further than it must to find their end.

Path = tuple[str | int, ...]

# Compiled when they are first used: most runs are without error.
_BARE_KEY = r"[A-Za-z0-9_-]+"
_BLANK = r"[ \t]*"
_BLANK_LINES = r"(?:[ \t\r\n]+|#[^\n]*)*"
_ATOM = r"[^,\]\}\n#]*"


def locate(text: str) -> dict[Path, int]:
    """Line (1-based) of every key, table and array element of a valid TOML text."""
    return _Scanner(text).run()


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """Line of a path, or of its nearest enclosing table that the text has."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.lines: dict[Path, int] = {}
        self.last_index: dict[Path, int] = {}
        self.newlines = [match.start() for match in re.finditer("\n", text)]

    def run(self) -> dict[Path, int]:
        table: Path = ()
        while True:
            self._skip(_BLANK_LINES)
            if self.pos >= len(self.text):
                return self.lines
            if self.text[self.pos] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip_line()

    def _header(self) -> Path:
        array = self.text.startswith("[[", self.pos)
        at = self.pos
        self.pos += 2 if array else 1
        keys = self._keys()
        path: Path = ()
        for position, key in enumerate(keys):
            path = (*path, key)
            last = position == len(keys) - 1
            if array and last:
                self.last_index[path] = self.last_index.get(path, -1) + 1
            self._note(path, at)
            if path in self.last_index:
                path = (*path, self.last_index[path])
                self._note(path, at)
        return path

    def _pair(self, table: Path) -> None:
        at = self.pos
        path = table
        for key in self._keys():
            path = (*path, key)
            self._note(path, at)
        self._skip(_BLANK)
        self.pos += 1  # the equals sign
        self._value(path)

    def _value(self, path: Path) -> None:
        self._skip(_BLANK)
        char = self.text[self.pos : self.pos + 1]
        if char in {'"', "'"}:
            self._string()
        elif char == "[":
            self._items(path, "]")
        elif char == "{":
            self._items(path, "}")
        else:
            self._skip(_ATOM)

    def _items(self, path: Path, end: str) -> None:
        self.pos += 1
        index = 0
        while True:
            self._skip(_BLANK_LINES)
            if self.pos >= len(self.text):
                return
            if self.text[self.pos] == end:
                self.pos += 1
                return
            if self.text[self.pos] == ",":
                self.pos += 1
                continue
            before = self.pos
            if end == "]":
                self._note((*path, index), self.pos)
                self._value((*path, index))
                index += 1
            else:
                self._pair(path)
            if self.pos == before:
                self.pos += 1

    def _keys(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._skip(_BLANK)
            if self.text[self.pos : self.pos + 1] in {'"', "'"}:
                keys.append(self._quoted_key())
            else:
                match = re.compile(_BARE_KEY).match(self.text, self.pos)
                if match is None:
                    return keys
                keys.append(match.group())
                self.pos = match.end()
            self._skip(_BLANK)
            if self.text[self.pos : self.pos + 1] != ".":
                return keys
            self.pos += 1

    def _quoted_key(self) -> str:
        quote, inner = self.text[self.pos], self._string()
        if quote == '"' and "\\" in inner:
            (inner,) = tomllib.loads(f'"{inner}" = 0')
        return inner

    def _string(self) -> str:
        """Skip a string of any kind; the text between its quotes, escapes left as they are."""
        quote = self.text[self.pos]
        long = self.text.startswith(quote * 3, self.pos)
        mark = quote * 3 if long else quote
        start = self.pos = self.pos + len(mark)
        while self.pos < len(self.text) and not self.text.startswith(mark, self.pos):
            self.pos += 2 if quote == '"' and self.text[self.pos] == "\\" else 1
        inner = self.text[start : self.pos]
        self.pos += len(mark)
        while long and self.text[self.pos : self.pos + 1] == quote:  # """a"""" ends in a quote
            self.pos += 1
        return inner

    def _skip(self, pattern: str) -> None:
        match = re.compile(pattern).match(self.text, self.pos)
        if match is not None:
            self.pos = match.end()

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.pos)
        self.pos = len(self.text) if end < 0 else end

    def _note(self, path: Path, at: int) -> None:
        self.lines.setdefault(path, bisect.bisect_left(self.newlines, at) + 1)


# --------------------------------------------------------------------------------------------------
# The line of an error that a file's meaning has, and its text has not: found from its field.
#
# Types and bounds are checked while the text is at hand (`load.py`). A model that the catalogue
# does not know, a GPU too small for the weights or a degree that does not divide come out later,
# from code that knows a key and no text. `placing` reads the file once more, and only when there is
# an error.

_UNPLACED = "config"
"""Source of errors whose place does not know its file."""


@contextlib.contextmanager
def placing(source: str) -> Iterator[None]:
    """Errors about keys of the configuration file `source` get its name and the key's line."""
    try:
        yield
    except InputError as error:
        placed = placed_in(error, source)
        if placed is None:
            raise
        raise placed from error


@contextlib.contextmanager
def blaming(overrides: Sequence[str]) -> Iterator[None]:
    """Errors about keys that `--set` gave name no line: the file's is not to blame."""
    try:
        yield
    except InputError as error:
        for override in overrides:
            key = override.partition("=")[0].strip()
            if error.field == key or error.field.startswith(f"{key}."):
                raise InputError(error.source, None, error.field, error.problem) from error
        raise


def placed_in(error: InputError, source: str) -> InputError | None:
    """The error with its place in `source`; None if it has one, or is about another file."""
    named, colon, table = error.source.partition(": ")
    is_ours = named == source or error.source == _UNPLACED
    if error.line is not None or not is_ours:
        return None
    field = error.field
    if colon and named == source:  # `cluster.toml: replicas.0`, then what is wrong with it
        field = ": ".join(part for part in (table, field) if part)
    line = line_of_field(FilePath(source), (table if colon else "") or field)
    if line is None and error.source == source:
        return None
    return InputError(source, line, field, error.problem)


def line_of_field(file: FilePath, field: str) -> int | None:
    """Line of a dotted key in a TOML file, or of the nearest table around it.

    A key of an array of tables without an index is looked for in all of them.
    """
    try:
        lines = locate(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    path: Path = tuple(int(part) if part.isdecimal() else part for part in field.split("."))
    if len(path) > 1 and (path[0], 0) in lines and not isinstance(path[1], int):
        index = 0
        while (path[0], index) in lines:
            if (path[0], index, *path[1:]) in lines:
                return lines[(path[0], index, *path[1:])]
            index += 1
    for own in (path, _shared(path)):
        if own and own in lines:
            return lines[own]
    return line_of(lines, path)


def _shared(path: Path) -> Path:
    """`replicas.0.scheduler.x` stands in `scheduler.x` where the group does not say it."""
    is_of_group = path[:1] == ("replicas",) and len(path) > 3
    return path[2:] if is_of_group else ()


# --- kinds: one key of a table chooses the kind, and each kind has keys of its own ----------------
# `KINDS` is read by everything that must know them: the checker (a key of another kind is an error
# with a hint), conversion, `--set`, overrides of a replica group, the reference page and `emu
# schema`. A kind that is no word of the list is a class of the user's own, but for faults.

Struct = type[msgspec.Struct]


class Union(NamedTuple):
    """The kinds of a table."""

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

    def kind_of(self, table: Mapping[str, Any], default: str = "") -> Struct:
        """The kind of a table as it stands in a file; that of `default` if it names none."""
        name = table.get(self.key, default or self.default)
        if not isinstance(name, str):
            return self.base
        if name in self.kinds:
            return self.kinds[name]
        return self.own if self.own is not None and names.is_import_path(name) else self.base

    @property
    def base(self) -> Struct:
        """What all kinds share: for a kind that is not known."""
        return _BASES[self.key]

    def of_key(self, key: str) -> Struct:
        """A kind that has this key, if any has."""
        if self.own is not None:
            return self.own
        return next((k for k in self.kinds.values() if key in k.__struct_fields__), self.base)

    def owners(self, key: str) -> list[str]:
        """Names of the kinds that have a key."""
        return [name for name, kind in self.kinds.items() if key in kind.__struct_fields__]

    def with_keys(self) -> Union:
        """The kinds with the keys of features."""
        kinds = {name: with_keys(kind) for name, kind in self.kinds.items()}
        own = None if self.own is None else with_keys(self.own)
        return self._replace(kinds=kinds, own=own)


_BASES: Final[Mapping[str, Struct]] = {
    "policy": SchedulerTable,
    "backend": LatencyTable,
    "kind": FaultTable,
}
KINDS: Final[Mapping[Struct, Union]] = MappingProxyType(
    {
        SchedulerTable: Union(
            "policy",
            {
                "vllm": VllmTable,
                "sglang": SglangTable,
                "vllm_v0": VllmV0Table,
                "sarathi": SarathiTable,
                "orca": OrcaTable,
                "lightllm": LightLlmTable,
                "faster_transformer": FasterTransformerTable,
                "fcfs": FcfsTable,
            },
            OwnSchedulerTable,
        ),
        LatencyTable: Union(
            "backend",
            {
                "roofline": RooflineTable,
                "profile": ProfileTable,
                "linear": LinearTable,
                "astra-sim": AstraTable,
                "aiconfigurator": AiconfiguratorTable,
                "vidur": VidurLayersTable,
            },
            OwnLatencyTable,
        ),
    }
)
_FIELDS: Final[Mapping[str, Struct]] = {"scheduler": SchedulerTable, "latency": LatencyTable}
"""Unions at the top level of a file."""


@functools.cache
def fault_kinds() -> Union:
    """The kinds of `[[faults]]`, which are loaded only for files that have some."""
    from emu.config.tables.faults import FAULTS

    kinds = {str(get_args(kind.__annotations__["kind"])[0]): kind for kind in FAULTS}
    return Union("kind", kinds, has_default=False)


@functools.cache
def unions() -> Mapping[Struct, Union]:
    """All of them, with the keys of features, and faults: neither is loaded for a plain file."""
    wide = {base: union.with_keys() for base, union in KINDS.items()}
    return MappingProxyType({**wide, FaultTable: fault_kinds()})


def whole_schema() -> inspect.StructType:
    """The types of the whole file, with the keys of features."""
    return table_info(with_keys(Config))


def fault_of(raw: Mapping[str, Any]) -> FaultTable:
    """A `[[faults]]` table as its kind. Raises msgspec.ValidationError."""
    made = msgspec.convert(raw, prepared(fault_kinds().kind_of(raw)))
    assert isinstance(made, FaultTable)
    return made


def convert(raw: Mapping[str, Any]) -> Config:
    """A document as a `Config`. Raises msgspec.ValidationError."""
    rest = {key: value for key, value in raw.items() if key not in _FIELDS}
    made: dict[str, Any] = {}
    faults = rest.get("faults")
    if isinstance(faults, list) and faults and all(isinstance(fault, dict) for fault in faults):
        del rest["faults"]
        made["faults"] = [fault_of(fault) for fault in faults]
    config = _read(rest, Config)
    assert isinstance(config, Config)
    for name, base in _FIELDS.items():
        if name in raw:
            table = raw[name]
            default = _policy_of_engine(raw) if base is SchedulerTable else ""
            made[name] = _read(
                table, KINDS[base].kind_of(table, default) if isinstance(table, dict) else base
            )
    return msgspec.structs.replace(config, **made) if made else config


def _policy_of_engine(raw: Mapping[str, Any]) -> str:
    """The scheduler of a document that names an engine and no scheduler; empty: none is known."""
    engine = raw.get("engine")
    name = engine.get("name") if isinstance(engine, dict) else None
    words = names.ENGINES.get(name) if isinstance(name, str) else None
    return "" if words is None else words.policies[0]


def _read(raw: Any, kind: Struct) -> msgspec.Struct:
    """A table as its kind. Features are loaded for one that the plain kind does not take, and for
    a class of a user's own, which may read all keys. Raises msgspec.ValidationError."""
    if any(kind is union.own for union in KINDS.values()):
        return msgspec.convert(raw, prepared(with_keys(kind)))
    try:
        return msgspec.convert(raw, prepared(kind))
    except msgspec.ValidationError:
        if with_keys(kind) is kind:
            raise
        return msgspec.convert(raw, prepared(with_keys(kind)))


def overridden(table: msgspec.Struct, changes: Mapping[str, Any]) -> Any:
    """A table with some keys changed; a new kind keeps the keys that it shares with the old one.

    Raises msgspec.ValidationError.
    """
    plain: dict[str, Any] = msgspec.to_builtins(table)
    base = next((base for base in KINDS if isinstance(table, base)), None)
    if base is None:
        return msgspec.convert(plain | dict(changes), prepared(type(table)))
    merged = plain | dict(changes)
    kind = KINDS[base].kind_of(merged)
    if not isinstance(table, kind):
        known = with_keys(kind) if is_widened(table) else kind
        merged = {
            key: value
            for key, value in merged.items()
            if key in changes or key in known.__struct_fields__
        }
    return _read(merged, kind)


def engine_with(table: EngineTable, changes: Mapping[str, Any]) -> EngineTable:
    """An engine's table with some keys changed: another engine has its own version, and constants
    that were learned belong to the version that their file names.

    Raises msgspec.ValidationError.
    """
    kept: dict[str, Any] = msgspec.to_builtins(table)
    if "name" in changes and changes["name"] != table.name:
        kept |= {"version": "", "learned": ""}
    if changes.get("learned"):
        kept["version"] = ""
    return msgspec.convert(kept | dict(changes), prepared(EngineTable))


# --- the check ------------------------------------------------------------------------------------
Problem = tuple[Path, str]

PARTIAL_TABLES: Final[Mapping[tuple[type, str], type[msgspec.Struct]]] = {
    (schema.ReplicaTable, "engine"): schema.EngineTable,
    (schema.ReplicaTable, "scheduler"): schema.SchedulerTable,
    (schema.ReplicaTable, "latency"): schema.LatencyTable,
    (schema.ReplicaTable, "model"): schema.ModelTable,
    (schema.ServedModelTable, "engine"): schema.EngineTable,
    (schema.ServedModelTable, "scheduler"): schema.SchedulerTable,
    (schema.ServedModelTable, "latency"): schema.LatencyTable,
    (schema.ServedModelTable, "autoscale"): schema.AutoscaleTable,
}
"""Untyped fields of the schema that hold some keys of another table."""

_INT_MAX: Final = 2**63 - 1
_NUMBER_MAX: Final = 1e15
_SHOWN_CHARS: Final = 60
_SWEEP: Final = "unknown key; a file with a base is a sweep: emu sweep FILE"
_OWNERS_SHOWN: Final = 4
_STEERING: Final = ("Cc", "Cf", "Zl", "Zp")
"""Categories of characters that no name or path has: control, invisible formats, line ends."""


def check_document(raw: dict[str, Any]) -> list[Problem]:
    """Every problem of a document that should be a `Config`."""
    return [] if _is_faultless(raw) else _Checker().document(raw)


def _is_faultless(raw: dict[str, Any]) -> bool:
    """What msgspec takes, and has nothing that only the walk judges, needs no walk.

    Most documents are like that, and the walk begins by asking for the types of all tables, which
    takes longer than reading the document.
    """
    try:
        config = convert(raw)
    except (msgspec.ValidationError, OverflowError):
        return False
    if type(config.scheduler) in KINDS or type(config.latency) in KINDS:
        return False  # of no kind that is known
    if any(type(fault) is schema.FaultTable for fault in config.faults):
        return False
    if any(key in raw.get("scheduler", ()) for key in config.scheduler.lacks):
        return False
    untyped = {name for _, name in PARTIAL_TABLES}
    groups = (*raw.get("replicas", ()), *raw.get("models", ()))
    if any(untyped.intersection(group) for group in groups):
        return False
    return _is_ordinary(raw)


def _is_ordinary(value: object) -> bool:
    """No number beyond the largest quantity, no NaN, no control character in a document."""
    if isinstance(value, dict):
        return all(map(_is_ordinary, value.values()))
    if isinstance(value, list):
        return all(map(_is_ordinary, value))
    if isinstance(value, (int, float)):
        return abs(value) <= _NUMBER_MAX
    return not isinstance(value, str) or not _control_character(value)


def _control_character(text: str) -> str:
    """The first character of a text that would steer a terminal; empty if there is none."""
    if text.isprintable():
        return ""
    return next((c for c in text if unicodedata.category(c) in _STEERING), "")


def dotted(path: Path) -> str:
    """A path as the user writes it after `--set`."""
    return ".".join(str(part) for part in path)


def shown(value: object) -> str:
    """A value as an error message quotes it: TOML-like and short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        digits = hex(value) if abs(value) >= 10**300 else str(value)
        return digits if len(digits) <= _SHOWN_CHARS else "a huge integer"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        short = value if len(value) <= _SHOWN_CHARS else value[: _SHOWN_CHARS - 3] + "..."
        return _quoted(short)
    return "nothing" if value is None else f"a date or time ({value})"


def unwrap(kind: inspect.Type) -> inspect.Type:
    """The type below its descriptions."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


@functools.cache  # milliseconds for the whole schema, the same at every call
def table_info(table: type[msgspec.Struct]) -> inspect.StructType:
    """What msgspec knows of a table's fields."""
    kind = inspect.type_info(table)
    assert isinstance(kind, inspect.StructType)
    return kind


def struct_of(kind: inspect.Type) -> inspect.StructType | None:
    """The table that a type is, or may be."""
    kind = unwrap(kind)
    if isinstance(kind, inspect.StructType):
        return kind
    if isinstance(kind, inspect.UnionType):
        return next((s for s in map(struct_of, kind.types) if s is not None), None)
    return None


class _Checker:
    def __init__(self) -> None:
        self.root = whole_schema()
        self.raw: dict[str, Any] = {}
        self.elsewhere: dict[str, str] = {}
        self._collect(self.root, "")

    def document(self, raw: dict[str, Any]) -> list[Problem]:
        self.raw = raw
        return list(self._struct(self.root, raw, ()))

    def _collect(self, struct: inspect.StructType, prefix: str) -> None:
        """Where each key of the schema lives; the first place wins, lists show index 0."""
        for item in struct.fields:
            name = f"{prefix}{item.encode_name}"
            if prefix:
                self.elsewhere.setdefault(item.encode_name, name)
            kind = unwrap(item.type)
            if isinstance(kind, inspect.ListType):
                inner = struct_of(kind.item_type)
                name += ".0"
            else:
                inner = struct_of(kind)
            if inner is not None:
                self._collect(inner, f"{name}.")
                union = unions().get(inner.cls)
                for kind_struct in () if union is None else union.kinds.values():
                    self._collect(table_info(kind_struct), f"{name}.")

    def _kind(
        self, struct: inspect.StructType, value: dict[str, Any], path: Path
    ) -> Iterator[Problem | inspect.StructType]:
        """The kind of a union's table, and what is wrong with its name or its keys."""
        union = unions()[struct.cls]
        default = ""
        if path[:1] in (("replicas",), ("models",)):  # of what the group overrides
            base = self.raw.get(str(path[-1]), {})
            default = base.get(union.key, "") if isinstance(base, dict) else ""
            default = default if isinstance(default, str) else ""
        if path[-1:] == ("scheduler",):
            default = default or _policy_of_engine(self.raw)
        kind = union.kind_of(value, default)
        name = value.get(union.key, default or union.default)
        if kind is struct.cls:
            if isinstance(name, str) and union.key in value:
                known = [*union.kinds, *(["package.module:Class"] if union.own else [])]
                yield (*path, union.key), unknown_value(name, known)
            if union.own is None:
                return  # nothing is known of its keys
            kind = union.own  # its keys are judged as if all kinds had them
        for key in value:
            owners = union.owners(key)
            if owners and key not in kind.__struct_fields__:
                yield (*path, key), _of_another_kind(union, key, str(name), owners, kind)
            elif issubclass(kind, SchedulerTable) and key in kind.lacks:
                yield (*path, key), _of_no_use(union, key, str(name), kind.lacks[key])
        yield table_info(kind)

    def _struct(
        self, struct: inspect.StructType, value: object, path: Path, *, partial: bool = False
    ) -> Iterator[Problem]:
        if not isinstance(value, dict):
            yield path, f"expected a table, got {shown(value)}"
            return
        elsewhere_here: tuple[str, ...] = ()
        given: Mapping[str, object] = value
        may_lack = partial
        union = unions().get(struct.cls)
        if union is not None:
            elsewhere_here = tuple(key for key in value if union.owners(key))
            for found in self._kind(struct, value, path):
                if isinstance(found, inspect.StructType):
                    struct = found
                else:
                    yield found
            if isinstance(value.get(union.key), str):
                if struct.cls in unions():
                    return  # of no kind that is known
                value = {key: inner for key, inner in value.items() if key != union.key}
                partial = True
        known = {item.encode_name: item for item in struct.fields}
        for key, inner in value.items():
            where = (*path, key)
            if key not in known and key in elsewhere_here:
                continue  # told above
            if key not in known and path[-1:] == ("latency",) and key == "engine":
                yield where, engine_moved(inner)
                continue
            if key not in known:
                elsewhere = {} if partial else self.elsewhere
                is_sweep = where == ("base",)
                yield where, _SWEEP if is_sweep else unknown_key(key, list(known), elsewhere)
                continue
            table = PARTIAL_TABLES.get((struct.cls, key))
            if table is not None:
                yield from self._struct(table_info(table), inner, where, partial=True)
            else:
                yield from self._value(known[key].type, inner, where)
        for item in struct.fields:
            if item.required and item.encode_name not in given and not may_lack:
                yield (*path, item.encode_name), "missing, and it has no default"

    def _value(self, kind: inspect.Type, value: object, path: Path) -> Iterator[Problem]:
        kind = unwrap(kind)
        if isinstance(kind, inspect.StructType):
            yield from self._struct(kind, value, path)
        elif isinstance(kind, inspect.UnionType):
            yield from self._union(kind, value, path)
        elif isinstance(kind, inspect.ListType):
            if not isinstance(value, list):
                yield path, f"expected an array, got {shown(value)}"
                return
            for index, inner in enumerate(value):
                yield from self._value(kind.item_type, inner, (*path, index))
        elif isinstance(kind, inspect.DictType):
            if not isinstance(value, dict):
                yield path, f"expected a table, got {shown(value)}"
                return
            for key, inner in value.items():
                problem = _scalar_problem(unwrap(kind.key_type), key)
                if problem:
                    yield (*path, key), problem
                yield from self._value(kind.value_type, inner, (*path, key))
        else:
            problem = _scalar_problem(kind, value)
            if problem:
                yield path, problem

    def _union(self, kind: inspect.UnionType, value: object, path: Path) -> Iterator[Problem]:
        if value is None and any(isinstance(part, inspect.NoneType) for part in kind.types):
            return  # TOML has no null, but a dict from `effective_dict` does
        struct = struct_of(kind)
        scalars = [
            part
            for part in map(unwrap, kind.types)
            if not isinstance(part, (inspect.StructType, inspect.NoneType))
        ]
        if isinstance(value, dict) and struct is not None:
            yield from self._struct(struct, value, path)
            return
        if any(not _scalar_problem(part, value) for part in scalars):
            return
        names = ["a table"] if struct is not None else []
        names = [_expectation(part) for part in scalars] + names
        yield path, f"expected {' or '.join(names)}, got {shown(value)}"


def _of_another_kind(
    union: Union, key: str, name: str, owners: list[str], kind: type[msgspec.Struct]
) -> str:
    """What is said of a key that the table's kind does not have, but others do."""
    if len(owners) > _OWNERS_SHOWN:
        own = ", ".join(field for field in kind.__struct_fields__ if field != union.key)
        return f'means nothing with {union.key} = "{name}", whose keys are {own}'
    which = " or ".join(f'"{owner}"' for owner in owners)
    return f'means nothing with {union.key} = "{name}"; it is a key of {union.key} = {which}'


def _of_no_use(union: Union, key: str, name: str, instead: str) -> str:
    """What is said of a key that all kinds have, and one has no use for."""
    hint = f"; its key is {instead}" if instead else ""
    return f'means nothing with {union.key} = "{name}"{hint}'


def _scalar_problem(kind: inspect.Type, value: object) -> str:
    if isinstance(kind, inspect.BoolType):
        return "" if isinstance(value, bool) else _mismatch(kind, value)
    if isinstance(kind, inspect.StrType):
        if not isinstance(value, str):
            return _mismatch(kind, value)
        steering = _control_character(value)
        if steering == "\0":
            return "contains a NUL character"
        return f"contains the control character {steering!a}" if steering else ""
    if isinstance(kind, inspect.LiteralType):
        return _literal_problem(kind, value)
    if isinstance(kind, inspect.IntType):
        if isinstance(value, bool) or not isinstance(value, int):
            return _mismatch(kind, value)
        return _bound_problem(kind, value, _INT_MAX)
    if isinstance(kind, inspect.FloatType):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return _mismatch(kind, value)
        if isinstance(value, float) and not math.isfinite(value):
            return _mismatch(kind, value)
        return _bound_problem(kind, value, _NUMBER_MAX)
    raise TypeError(f"the schema has a type that the checker does not know: {kind}")


def _quoted(word: object) -> str:
    return msgspec.json.encode(word).decode()


def _literal_problem(kind: inspect.LiteralType, value: object) -> str:
    if type(value) in (str, int) and value in kind.values:
        return ""
    words = [str(word) for word in kind.values]
    near = nearest(value, words) if isinstance(value, str) else ""
    hint = f"; did you mean {_quoted(near)}?" if near else ""
    return f"{_mismatch(kind, value)}{hint}"


def _bound_problem(
    kind: inspect.IntType | inspect.FloatType, value: int | float, ceiling: float
) -> str:
    noun = "an integer" if isinstance(kind, inspect.IntType) else "a number"
    if kind.ge is not None and value < kind.ge:
        return f"expected {noun} >= {_bound(kind.ge)}, got {shown(value)}"
    if kind.gt is not None and value <= kind.gt:
        return f"expected {noun} > {_bound(kind.gt)}, got {shown(value)}"
    if kind.lt is not None and value >= kind.lt:
        return f"expected {noun} < {_bound(kind.lt)}, got {shown(value)}"
    upper = ceiling if kind.le is None else kind.le
    if value > upper:
        return f"expected {noun} <= {_bound(upper)}, got {shown(value)}"
    if value < -ceiling:
        return f"expected {noun} >= {_bound(-ceiling)}, got {shown(value)}"
    return ""


def _mismatch(kind: inspect.Type, value: object) -> str:
    return f"expected {_expectation(kind)}, got {shown(value)}"


def _expectation(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.StrType):
        return "a string"
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(_quoted(word) for word in kind.values)
    assert isinstance(kind, (inspect.IntType, inspect.FloatType))
    noun = "an integer" if isinstance(kind, inspect.IntType) else "a number"
    if kind.ge is not None:
        return f"{noun} >= {_bound(kind.ge)}"
    if kind.gt is not None:
        return f"{noun} > {_bound(kind.gt)}"
    return noun


def _bound(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) and abs(value) >= 1e6 else f"{value}"
