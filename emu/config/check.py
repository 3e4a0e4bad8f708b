"""Checks a parsed TOML document: what kinds its tables are, and what is wrong.

msgspec stops at the first problem and speaks of `object` and `$.path`; this walk over the same
type information finds every problem, names keys as the user writes them, suggests the nearest
known key and refuses what TOML allows and no quantity can be (NaN, infinity, integers beyond 64
bits). What passes here converts without error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import inspect

from emu.config.engine_words import engine_moved
from emu.config.features import with_keys
from emu.config.kinds import (
    NUMBER_MAX,
    PARTIAL_TABLES,
    Struct,
    Union,
    control_character,
    is_ordinary,
    policy_of_engine,
    unions,
)
from emu.config.schema import Config, SchedulerTable
from emu.config.suggestions import dotted, nearest, quoted, shown, unknown_key, unknown_value
from emu.config.tables import Path, Problem
from emu.documents import Document

_INT_MAX: Final = 2**63 - 1
_SWEEP: Final = "unknown key; a file with a base is a sweep: emu sweep FILE"


def unwrap(kind: inspect.Type) -> inspect.Type:
    """The type below its descriptions."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


def check_document(raw: Document) -> list[Problem]:
    """Every problem of a document that should be a `Config`."""
    return _Checker().document(raw)


def whole_schema() -> inspect.StructType:
    """The types of the whole file, with the keys of features."""
    return table_info(with_keys(Config))


@functools.cache  # milliseconds for the whole schema, the same at every call
def table_info(table: Struct) -> inspect.StructType:
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


def _collect(struct: inspect.StructType, prefix: str, found: dict[str, str]) -> None:
    """Where each key of the schema lives; the first place wins, lists show index 0."""
    for item in struct.fields:
        name = f"{prefix}{item.encode_name}"
        if prefix:
            found.setdefault(item.encode_name, name)
        kind = unwrap(item.type)
        if isinstance(kind, inspect.ListType):
            inner = struct_of(kind.item_type)
            name += ".0"
        else:
            inner = struct_of(kind)
        if inner is not None:
            _collect(inner, f"{name}.", found)
            union = unions().get(inner.cls)
            if union is not None:
                found.setdefault(union.key, f"{name}.{union.key}")
            for kind_struct in () if union is None else union.structs:
                _collect(table_info(kind_struct), f"{name}.", found)


class _Checker:
    def __init__(self) -> None:
        self.root = whole_schema()
        self.raw: Document = {}

    @functools.cached_property
    def elsewhere(self) -> dict[str, str]:
        """Where each key of the schema lives; only a key that is not known asks."""
        found: dict[str, str] = {}
        _collect(self.root, "", found)
        return found

    def document(self, raw: Document) -> list[Problem]:
        self.raw = raw
        return list(self._struct(self.root, raw, ()))

    def table(self, struct: inspect.StructType, raw: object, path: Path) -> Iterator[Problem]:
        """Problems of one table alone: keys of other tables are no suggestion."""
        self.elsewhere = {}
        return self._struct(struct, raw, path)

    def _kind(
        self, struct: inspect.StructType, value: Document, path: Path
    ) -> Iterator[Problem | inspect.StructType]:
        """The kind of a union's table, and what is wrong with its name or its keys."""
        union = unions()[struct.cls]
        default = ""
        if path[:1] in (("replicas",), ("models",)):  # of what the group overrides
            base = self.raw.get(str(path[-1]), {})
            default = base.get(union.key, "") if isinstance(base, dict) else ""
            default = default if isinstance(default, str) else ""
        if path[-1:] == ("scheduler",):
            default = default or policy_of_engine(self.raw)
        kind = union.kind_of(value, default)
        name = value.get(union.key, default or union.default)
        if kind is struct.cls:
            if union.key not in value:
                if not default:
                    yield (*path, union.key), "missing, and it has no default"
                return
            problem = _scalar_problem(inspect.StrType(), name)
            yield (*path, union.key), problem or unknown_value(str(name), union.words)
            return  # nothing is known of its keys
        for key in value:
            owners = union.owners(key)
            lacks = kind.lacks if issubclass(kind, SchedulerTable) else {}
            said = ""
            if owners and key not in kind.__struct_fields__ and key != union.key:
                said = _of_another_kind(union, str(name), owners, path)
            elif key in lacks:
                said = f'means nothing with {union.key} = "{name}"'
            if said:
                instead = lacks.get(key)
                yield (*path, key), f'{said}; "{name}" has {instead}' if instead else said
        yield table_info(kind)

    def _struct(
        self, struct: inspect.StructType, value: object, path: Path, *, partial: bool = False
    ) -> Iterator[Problem]:
        if not isinstance(value, dict):
            keys = struct.cls.__struct_fields__
            its = f"; set its keys, such as {dotted((*path, keys[0]))}" if keys and path else ""
            yield path, f"expected a table, got {shown(value)}{its}"
            return
        elsewhere_here: tuple[str, ...] = ()
        given: Mapping[str, object] = value
        may_lack = partial
        is_own = False
        union = unions().get(struct.cls)
        if union is not None:
            elsewhere_here = tuple(key for key in value if union.owners(key))
            for found in self._kind(struct, value, path):
                if isinstance(found, inspect.StructType):
                    struct = found
                else:
                    yield found
            if struct.cls in unions():
                return  # of no kind that is known
            is_own = struct.cls is union.own
            partial = partial or union.key in value
            value = {key: inner for key, inner in value.items() if key != union.key}
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
                problem = unknown_key(key, list(known), elsewhere)
                if is_own:
                    problem += f"; keys of the class stand in [{dotted((*path, 'own'))}]"
                yield where, _SWEEP if where == ("base",) else problem
                continue
            table = PARTIAL_TABLES.get((struct.cls, key))
            if table is not None:
                yield from self._struct(table_info(table), inner, where, partial=True)
            else:
                yield from self._value(known[key].type, inner, where)
        strange = [key for key in value if key not in known]
        for item in struct.fields:
            name = item.encode_name
            if item.required and name not in given and not may_lack:
                if any(nearest(key, list(known)) == name for key in strange):
                    continue  # told above: another name for it
                yield (*path, name), "missing, and it has no default"

    def _value(self, kind: inspect.Type, value: object, path: Path) -> Iterator[Problem]:
        kind = unwrap(kind)
        if isinstance(kind, inspect.StructType):
            yield from self._struct(kind, value, path)
        elif isinstance(kind, inspect.UnionType):
            yield from self._union(kind, value, path)
        elif isinstance(kind, inspect.ListType):
            if not isinstance(value, list):
                hint = f"; write [[{dotted(path)}]]" if isinstance(value, dict) else ""
                yield path, f"expected an array, got {shown(value)}{hint}"
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
        elif isinstance(kind, inspect.AnyType):
            if not is_ordinary(value):
                yield path, "expected numbers that are finite, and text without control characters"
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


def _of_another_kind(union: Union, name: str, owners: list[str], path: Path) -> str:
    """What is said of a key that the table's kind does not have, but others do."""
    which = " or ".join(f'"{owner}"' for owner in owners)
    said = f'means nothing with {union.key} = "{name}"; it is a key of {union.key} = {which}'
    if name in union.kinds:
        return said
    return f"{said}; keys of the class stand in [{dotted((*path, 'own'))}]"


def check_options(kind: Struct, raw: object, path: Path) -> list[Problem]:
    """Every problem of the table of a class of a user's own, whose keys are those of `kind`."""
    return list(_Checker().table(table_info(kind), raw, path))


def _scalar_problem(kind: inspect.Type, value: object) -> str:
    if isinstance(kind, inspect.BoolType):
        return "" if isinstance(value, bool) else _mismatch(kind, value)
    if isinstance(kind, inspect.StrType):
        if not isinstance(value, str):
            return _mismatch(kind, value)
        steering = control_character(value)
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
        return _bound_problem(kind, value, NUMBER_MAX)
    raise TypeError(f"the schema has a type that the checker does not know: {kind}")


def _literal_problem(kind: inspect.LiteralType, value: object) -> str:
    if type(value) in (str, int) and value in kind.values:
        return ""
    words = [str(word) for word in kind.values]
    near = nearest(value, words) if isinstance(value, str) else ""
    hint = f"; did you mean {quoted(near)}?" if near else ""
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
        hint = f"; write {value / 100:g}" if upper == 1 and 5 <= value <= 100 else ""
        return f"expected {noun} <= {_bound(upper)}, got {shown(value)}{hint}"
    if value < -ceiling:
        return f"expected {noun} >= {_bound(-ceiling)}, got {shown(value)}"
    return ""


def _mismatch(kind: inspect.Type, value: object) -> str:
    hint = ""
    if isinstance(kind, inspect.IntType) and isinstance(value, float) and value.is_integer():
        hint = f"; write {int(value)}"
    elif isinstance(value, str) and not isinstance(kind, inspect.LiteralType):
        from emu.config.ways_out import instead_of_number, instead_of_truth

        is_truth = isinstance(kind, inspect.BoolType)
        hint = instead_of_truth(value) if is_truth else instead_of_number(value)
    return f"expected {_expectation(kind)}, got {shown(value)}{hint}"


def _expectation(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.StrType):
        return "a string"
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(quoted(word) for word in kind.values)
    assert isinstance(kind, (inspect.IntType, inspect.FloatType))
    noun = "an integer" if isinstance(kind, inspect.IntType) else "a number"
    if kind.ge is not None:
        return f"{noun} >= {_bound(kind.ge)}"
    if kind.gt is not None:
        return f"{noun} > {_bound(kind.gt)}"
    return noun


def _bound(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) and abs(value) >= 1e6 else f"{value}"
