"""The catalogue of faults for those that list or draw them, and what a fault's table may lack.

Pure data, so that a file can be refused before anything is built. The kinds and their keys are in
`emu/config/tables/faults.py`; docs/faults.md describes each with the number of the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, get_args

from msgspec import Struct, inspect
from msgspec.structs import asdict

from emu.config.check import check_document, table_info, unwrap
from emu.config.kinds import fault_kinds, fault_of
from emu.config.schema import FaultTable
from emu.config.suggestions import dotted
from emu.config.tables import Problem
from emu.config.tables.faults import ReplicaStage, RequestStage
from emu.documents import Document, DocumentView
from emu.errors import InputError

REPLICA_STAGES: Final[tuple[str, ...]] = get_args(ReplicaStage)
"""Where `stage` finds the replica of a crash: groups of states, then states by name."""
REQUEST_STAGES: Final[tuple[str, ...]] = get_args(RequestStage)
"""Where `stage` finds the requests whose clients leave."""
_TARGET_KEYS: Final = ("replica", "node", "gpu", "source", "destination", "request", "stage")
_UNITS: Final = {"factor": "factor", "part": "part", "delay_ms": "ms", "extra_ms": "ms"}


class FaultKind(Struct, frozen=True, kw_only=True):
    """What a kind of fault needs and takes, read off its table."""

    numbers: str
    """In the catalogue."""
    text: str
    one_of: tuple[tuple[str, ...], ...]
    """Groups of target keys of which at least one must be given."""
    may: tuple[str, ...]
    """Further target keys that mean something."""
    size: str
    """The key that says how strong it is; "" if there is none."""
    magnitude: tuple[float, float] | None
    """Bounds of that key; the lower one is excluded if it is 0."""
    unit: str
    needs_duration: bool
    takes_duration: bool
    may_magnitude: bool
    """A crash may wait until its replica has been in the stage for a time (`after_s`)."""
    stages: tuple[str, ...]


def _kind(table: type[FaultTable]) -> FaultKind:
    fields = {item.name: item for item in table_info(table).fields}
    size = table.size or ("after_s" if "after_s" in fields else "")
    wanted = {key for group in table.target for key in group}
    stages = REQUEST_STAGES if "request" in fields else REPLICA_STAGES
    return FaultKind(
        numbers=table.numbers,
        text=" ".join((table.__doc__ or "").split()),
        one_of=table.target,
        may=tuple(key for key in _TARGET_KEYS if key in fields and key not in wanted),
        size=size,
        magnitude=_bounds(fields[size].type) if size else None,
        unit="s" if size == "after_s" else _UNITS.get(size, ""),
        needs_duration="duration_s" in fields and fields["duration_s"].required,
        takes_duration="duration_s" in fields,
        may_magnitude=size == "after_s",
        stages=stages if "stage" in fields else (),
    )


def _bounds(kind: inspect.Type) -> tuple[float, float]:
    kind = unwrap(kind)
    if isinstance(kind, inspect.UnionType):
        kind = next(unwrap(p) for p in kind.types if not isinstance(p, inspect.NoneType))
    assert isinstance(kind, inspect.FloatType)
    assert kind.le is not None
    low = kind.ge if kind.ge is not None else kind.gt
    assert low is not None
    return low, kind.le


FAULT_KINDS: Final[Mapping[str, FaultKind]] = MappingProxyType(
    {
        name: _kind(kind)
        for name, kind in fault_kinds().kinds.items()
        if issubclass(kind, FaultTable)
    }
)


def fault_problems(index: int, fault: FaultTable) -> Iterator[Problem]:
    """What a fault's table lacks, or says twice."""
    here = ("faults", index)
    given = {key: value for key, value in asdict(fault).items() if value is not None}
    for group in fault.target:
        if not any(key in given for key in group):
            names = " or ".join(group)
            yield (*here, group[0]), f"missing; a {fault.kind} needs {names}"
    if "after_s" in given and "stage" not in given:
        yield (*here, "after_s"), f"means nothing for a {fault.kind} without a stage"
    is_link = fault.kind.startswith("link_")
    if is_link and given.get("times", 1) > 1 and "duration_s" not in given:
        yield (*here, "times"), "needs duration_s: how long each of them lasts"
    if "source" in given and given["source"] == given.get("destination"):
        yield (*here, "destination"), "is the source"


def read_fault(raw: Document) -> FaultTable:
    """One table without `at_s`, for a fault that strikes now. Raises InputError, in one line."""
    tables = [raw | {"at_s": 0.0}]
    modernize(tables)
    problems = check_document({"faults": tables})
    if problems:
        path, problem = problems[0]
        raise InputError("faults", None, dotted(path[2:]), problem)
    return fault_of(tables[0])


def modernize(faults: object) -> dict[tuple[str | int, ...], tuple[str | int, ...]]:
    """Bring `[[faults]]` of before into today's keys, in place, where their meaning was clear.

    `magnitude` (seconds, a factor, a part or milliseconds, by kind) becomes the kind's own key; -1,
    an empty `stage` and other values that meant "not given" go. The result says which path of
    before a path of now has, for messages.
    """
    moved: dict[tuple[str | int, ...], tuple[str | int, ...]] = {}
    if not isinstance(faults, list):
        return moved
    kinds = fault_kinds().kinds
    for index, fault in enumerate(faults):
        name = fault.get("kind") if isinstance(fault, dict) else None
        kind = kinds.get(name) if isinstance(name, str) else None
        if kind is None or not issubclass(kind, FaultTable):
            continue
        for before, now in kind.old:
            if before in fault and now not in fault and before not in kind.__struct_fields__:
                fault[now] = fault.pop(before)
                moved["faults", index, now] = ("faults", index, before)
        _drop_what_meant_nothing(fault, kind)
    return moved


_NOT_GIVEN: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(_TARGET_KEYS, (-1,)),
        "stage": ("",),
        "magnitude": (0,),
        "after_s": (0,),
    }
)
_IDLE: Final[DocumentView] = MappingProxyType({"times": 1, "probability": 1})
"""Values that said nothing, where the kind does not have the key."""
_FOR_EVER: Final = "duration_s"


def _drop_what_meant_nothing(fault: Document, kind: type[FaultTable]) -> None:
    for key, values in _NOT_GIVEN.items():
        if key in fault and not isinstance(fault[key], bool) and fault[key] in values:
            del fault[key]
    for key, value in _IDLE.items():
        if key not in kind.__struct_fields__ and fault.get(key) == value:
            del fault[key]
    default = dict(zip(kind.__struct_fields__[::-1], kind.__struct_defaults__[::-1], strict=False))
    if fault.get(_FOR_EVER) == 0 and default.get(_FOR_EVER) is None:
        needs = any(item.name == _FOR_EVER and item.required for item in table_info(kind).fields)
        if not needs:
            del fault[_FOR_EVER]
