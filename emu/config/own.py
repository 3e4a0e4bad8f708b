"""Classes of a user's own and their tables: `[router.own]`, `[scheduler.own]` and their like.

A class says by an attribute `Options`, a msgspec.Struct, which keys it reads; its constructor gets
them as `options`:

    class Weighted:
        class Options(msgspec.Struct):
            weight: float = 2.0

        def __init__(self, options: Options) -> None: ...

The table of a class that is a table's kind is `own` beside the key that names it, that of another
class `KEY_own` beside KEY.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from emu.config.suggestions import dotted
from emu.errors import InputError
from emu.plugins.named import NamedClass
from emu.process.prepared import prepared

_KINDS: Final = frozenset(
    {
        "router.policy",
        "scheduler.policy",
        "latency.backend",
        "autoscale.planner",
        "migration.policy",
    }
)


def own_table(key: str) -> str:
    """The dotted name of the table with the keys of the class that `key` names."""
    return f"{key.rpartition('.')[0]}.own" if key in _KINDS else f"{key}_own"


def check_own(named: NamedClass, source: str = "config") -> None:
    """Load a class and look at what it has, and at its table. Raises InputError."""
    from emu.plugins.loading import check_plugin  # most runs name no class

    key, path, own = named
    _options(check_plugin(path, key, source), path, key, own, source)


def make_own(
    path: str,
    key: str,
    own: Mapping[str, object],
    *arguments: object,
    context: object = None,
    source: str = "config",
) -> Any:
    """An object of the class that a configuration names at `key`, with the keys of its table.

    Raises InputError (at the key, or at one of its table) if it cannot be made so.
    """
    from emu.plugins.loading import check_plugin  # most runs name no class
    from emu.plugins.making import make_plugin

    found = check_plugin(path, key, source)
    options = _options(found, path, key, own, source)
    return make_plugin(path, key, *arguments, context=context, options=options, source=source)


def _options(
    found: type, path: str, key: str, own: Mapping[str, object], source: str
) -> msgspec.Struct | None:
    table = own_table(key)
    kind = vars(found).get("Options") or getattr(found, "Options", None)
    if kind is None:
        for name in own:
            problem = f"unknown key; {path} has no Options, which would say what keys it reads"
            raise InputError(source, None, f"{table}.{name}", problem)
        return None
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        problem = f"{path}: Options is no msgspec.Struct, whose fields would be the keys"
        raise InputError(source, None, key, problem)
    from emu.config.check import check_options

    for place, problem in check_options(kind, own, tuple(table.split("."))):
        raise InputError(source, None, dotted(place), problem)
    try:
        return msgspec.convert(own, prepared(kind))
    except msgspec.ValidationError as error:
        raise InputError(source, None, table, str(error)) from None
