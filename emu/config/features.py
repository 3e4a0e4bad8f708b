"""Features of serving engines, as the configuration sees them: which there are, and their keys.

A feature is a module of `emu/features/` and its line in `FEATURES`: nothing else in the program
lists them. Modules are loaded when they are asked for: by a file that names a key which the plain
tables do not have, by the reference page, by random worlds. A plain run loads none.

The keys of a feature stand in the file where their like stand (`[scheduler]`, `[workload]`). So a
feature declares a struct of its keys for each table that it adds to (`ConfigPart.keys`), and
`with_keys` gives the table with the keys of all features. `keys_of` reads them back, typed.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, Union, get_args, get_origin

import msgspec

from emu.config.tables import Problem, Table
from emu.documents import DocumentView

if TYPE_CHECKING:
    from emu.config.schema import Config

FEATURES: Final[tuple[str, ...]] = (
    "emu.features.speculation",
    "emu.features.lora",
    "emu.features.images",
    "emu.features.skip_prefill",
    "emu.features.retention",
    "emu.features.eviction",
    "emu.features.guided_decoding",
)
"""Modules of the features, in the order in which they are asked. Each has a `FEATURE`."""

Struct = type[msgspec.Struct]
Keys = TypeVar("Keys", bound=Table)


class ConfigPart(Protocol):
    """What the configuration asks of a feature."""

    name: str
    """What it is called, in a few words."""
    keys: tuple[tuple[Struct, type[Table]], ...]
    """(table of the file, its keys there); every key has a default, with which there is none."""

    def problems(self, config: Config) -> Iterable[Problem]:
        """What is wrong across keys, as far as it needs no catalogue."""
        ...


@functools.cache
def config_parts() -> tuple[ConfigPart, ...]:
    """All features, loaded."""
    return tuple(importlib.import_module(module).FEATURE for module in FEATURES)


_MADE: dict[Struct, Struct] = {}
"""Tables with keys of features -> the plain table."""


@functools.cache
def with_keys(table: Struct) -> Struct:
    """A table with the keys of all features, in its tables too; itself where they add none."""
    fields: list[tuple[str, Any, Any]] = []
    for item in msgspec.structs.fields(table):
        inner = _with_keys_inside(item.type)
        if inner is not item.type:
            fields.append((item.name, inner, _default(item)))
    for part in config_parts():
        for base, keys in part.keys:
            if issubclass(table, base):
                its = msgspec.structs.fields(keys)
                fields += [(item.name, item.type, _default(item)) for item in its]
    if not fields:
        return table
    made = msgspec.defstruct(
        table.__name__,
        fields,
        bases=(table,),
        module=table.__module__,
        namespace={"__doc__": table.__doc__, "__reduce__": _reduced},
        kw_only=True,
        frozen=True,
        forbid_unknown_fields=True,
    )
    _MADE[made] = table
    return made


def is_widened(table: msgspec.Struct) -> bool:
    """Whether a table has the keys of features: where none is named, it has not."""
    return type(table) in _MADE


def names_features(config: Config) -> bool:
    """Whether a configuration may use any feature: no plain table has its keys."""
    parts = [group.scheduler for group in config.replicas]
    parts += [model.scheduler for model in config.models]
    plain = {*type(config.scheduler).__struct_fields__}
    return (
        is_widened(config)
        or is_widened(config.scheduler)
        or any(not part.keys() <= plain for part in parts)
    )


def keys_of(table: msgspec.Struct, kind: type[Keys]) -> Keys:
    """The keys of a feature that a table has; their defaults where it was read without them."""
    names = kind.__struct_fields__
    if names[0] not in type(table).__struct_fields__:
        return kind()
    given = msgspec.structs.asdict(table)
    return kind(**{name: given[name] for name in names})


def features_problems(config: Config) -> Iterator[Problem]:
    """What all features find wrong; none is loaded for a configuration that names none."""
    if names_features(config):
        for part in config_parts():
            yield from part.problems(config)


def _with_keys_inside(kind: Any) -> Any:
    """The type of a key, where it is a table (or may be one) that features add to."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return with_keys(kind)
    if get_origin(kind) in (Union, types.UnionType):
        inner = tuple(map(_with_keys_inside, get_args(kind)))
        return kind if inner == get_args(kind) else Union[inner]  # noqa: UP007
    return kind


def _default(item: msgspec.structs.FieldInfo) -> Any:
    if item.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=item.default_factory)
    return msgspec.field(default=item.default)


def _reduced(table: msgspec.Struct) -> tuple[object, ...]:
    """How a table with keys of features goes to another process."""
    return _remade, (_MADE[type(table)], msgspec.structs.asdict(table))


def _remade(plain: Struct, values: DocumentView) -> msgspec.Struct:
    return with_keys(plain)(**values)
