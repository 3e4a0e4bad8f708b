"""Names of a user's own classes, and the kinds of class that a configuration can name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from emu.errors import InputError

if TYPE_CHECKING:
    pass
from emu.plugins.blame import FILES, module_file, what_it_is

OBJECTS: Final[dict[str, type]] = {}


_settings: Final = {"forbidden": False}


SUFFIX: Final = ".py"


class NamedClass(NamedTuple):
    """A class of a user's own, as a configuration names it."""

    key: str
    path: str
    own: Mapping[str, object]
    """The keys of its table."""


class Kind(NamedTuple):
    """What a class must have to be named at a key."""

    key: str
    methods: Mapping[str, int]
    """Methods and with how many arguments they are called."""
    attributes: tuple[str, ...] = ()
    base: str = ""
    """The class that it derives from, as module:Class; any of its public members counts then."""


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        kind.key: kind
        for kind in (
            Kind("router.policy", {"choose": 2}),
            Kind("router.decode_policy", {"choose": 2}),
            Kind("router.admission", {"admit": 1}),
            Kind("scheduler.eviction", {"choose": 2}),
            Kind("migration.policy", {"choose": 1}),
            Kind("autoscale.planner", {"decide": 1, "wake_ns": 1}, ("needs_ticks",)),
            Kind("scheduler.policy", {}, base="emu.scheduling.base:Scheduler"),
            Kind(
                "latency.backend",
                {"iteration_ns": 1, "stage_ns": 1, "decode_run_ns": 2, "components_ns": 1},
                ("foreign",),
            ),
            Kind("latency.expert_routing", {"route": 2}, ("draws",)),
        )
    }
)
"""Keys that take a class of one's own."""


KEYS: Final = frozenset(key.rpartition(".")[2] for key in KINDS)
"""Their last parts: a replica group may have them too."""


def forbid() -> None:
    """From now on no configuration of this process may name a class."""
    _settings["forbidden"] = True


def allow() -> None:
    """The end of `forbid`."""
    _settings["forbidden"] = False


def are_forbidden() -> bool:
    """Whether `forbid` was called."""
    return _settings["forbidden"]


def named(found: type) -> str:
    """The name under which a class that is given as an object stands in a configuration."""
    if not isinstance(found, type):
        raise InputError("config", None, "", f"{found!r} is {what_it_is(found)}, expected a class")
    module = found.__module__ if _is_dotted(found.__module__) else "object"
    base = f"{module}:{found.__name__}"
    name, number = base, 1
    while name in OBJECTS and OBJECTS[name] is not found:
        number += 1
        name = f"{base}_{number}"
    OBJECTS[name] = found
    file = module_file(found.__module__)
    FILES.add(file or _code_file(found))
    return name


def is_object(path: str) -> bool:
    """Whether a name stands for a class given as an object: other processes may not find it."""
    return path in OBJECTS


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _code_file(found: type) -> str:
    """Where the methods of a class were written (a cell of a notebook has no file)."""
    for member in vars(found).values():
        if isinstance(member, FunctionType):
            return member.__code__.co_filename
    return f"<{found.__name__}>"


def look_in(folder: Path) -> None:
    """Modules in this folder can be imported from now on, after all that could be before."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.append(place)


def replaced(value: Any) -> Any:
    """Plain tables with the names of classes in place of classes."""
    if isinstance(value, type):
        return named(value)
    if isinstance(value, Mapping):
        return {key: replaced(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [replaced(inner) for inner in value]
    return value
