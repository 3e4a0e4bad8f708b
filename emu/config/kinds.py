"""Tables that are unions: one key chooses the kind, and each kind has keys of its own. Pure.

`KINDS` is read by everything that must know them: the checker (a key of another kind is an error
with a hint), conversion, `--set`, overrides of a replica group, the reference page and
`emu schema`. A kind that is no word of the list is a class of the user's own, but for faults.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_args

import msgspec

from emu.config import names
from emu.config.schema import (
    AiconfiguratorTable,
    AstraTable,
    Config,
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
    VidurLayersTable,
    VllmTable,
    VllmV0Table,
)

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
def unions() -> Mapping[Struct, Union]:
    """All of them, faults included, whose kinds are loaded only for files that have some."""
    from emu.config.tables.faults import FAULTS

    kinds = {str(get_args(kind.__annotations__["kind"])[0]): kind for kind in FAULTS}
    return MappingProxyType({**KINDS, FaultTable: Union("kind", kinds, has_default=False)})


def fault_of(raw: Mapping[str, Any]) -> FaultTable:
    """A `[[faults]]` table as its kind. Raises msgspec.ValidationError."""
    made = msgspec.convert(raw, unions()[FaultTable].kind_of(raw))
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
    config = msgspec.convert(rest, Config)
    for name, base in _FIELDS.items():
        if name in raw:
            table = raw[name]
            kind = KINDS[base].kind_of(table) if isinstance(table, dict) else base
            made[name] = msgspec.convert(table, kind)
    return msgspec.structs.replace(config, **made) if made else config


def overridden(table: msgspec.Struct, changes: Mapping[str, Any]) -> Any:
    """A table with some keys changed; a new kind keeps the keys that it shares with the old one.

    Raises msgspec.ValidationError.
    """
    plain: dict[str, Any] = msgspec.to_builtins(table)
    base = next((base for base in KINDS if isinstance(table, base)), None)
    if base is None:
        return msgspec.convert(plain | dict(changes), type(table))
    merged = plain | dict(changes)
    kind = KINDS[base].kind_of(merged)
    if kind is not type(table):
        merged = {
            key: value
            for key, value in merged.items()
            if key in changes or key in kind.__struct_fields__
        }
    return msgspec.convert(merged, kind)
