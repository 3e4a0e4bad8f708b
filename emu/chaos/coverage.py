"""What a campaign has visited: keys of the schema, kinds of faults by the part that they struck.

`schema_keys` reads every key off the tables of the configuration, `keys_of` those of one world;
`NOT_DRAWN` names each key that no world has, with its reason. `fault_parts` reads a run's history:
which part each struck replica played at that moment. Pure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import inspect

from emu.config.check import struct_of, table_info, unwrap
from emu.config.kinds import unions
from emu.config.schema import Config
from emu.replica.states import ReplicaState as S

_OUTSIDE: Final = "names a file from outside, which no seed can make"
_TRIAL: Final = "the trial says itself what is written, for its judge"
_PROGRAM: Final = "speaks to a program from outside, or keeps what it said"
_ONE: Final = "has a single word; any other is a class of the user's own"

NOT_DRAWN: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("model.hf_config", "model.assume", "models.hf_config", "models.assume"),
                *("workload.path", "workload.format", "workload.tokenizer"),
                *("workload.turns", "workload.think_s"),  # of the format sharegpt
                *("workload.synthetic.prompt.path", "workload.synthetic.output.path"),
                *("latency.path", "latency.hardware", "latency.tables"),
                *("latency.backend=profile", "latency.backend=vidur"),
                "latency.backend=aiconfigurator",
            ),
            _OUTSIDE,
        ),
        **dict.fromkeys(
            (
                *("output.dir", "output.trace", "output.trace_events_max", "output.report"),
                *("output.timeseries_interval_ms", "output.events"),
            ),
            _TRIAL,
        ),
        **dict.fromkeys(
            (
                *("latency.binary", "latency.dialect", "latency.timeout_s"),
                *("latency.cache", "latency.replay"),
            ),
            _PROGRAM,
        ),
        **dict.fromkeys(("router.admission", "scheduler.eviction", "migration.policy"), _ONE),
        "scheduler.leap": "each world runs with leaps and without; the trial compares the two",
    }
)
"""Keys that no drawn world has, and why. Worlds' own lines are written where `path` says."""

PARTS: Final[Mapping[S, str]] = MappingProxyType(
    {
        S.PREFILL: "prefill",
        S.AUS_PREFILL: "prefill",
        S.DECODE: "decode",
        S.AUS_DECODE: "decode",
        S.MUTATING_TO_DECODE: "decode",
        S.COLOCATED: "colocated",
        S.NEW_PREFILL: "new_prefill",
        S.REFRACTORY_PREFILL: "new_prefill",
        S.OLD_PREFILL: "old_prefill",
        S.LOADING_PREFILL: "loading",
        S.LOADING_DECODE: "loading",
        S.LOADING_COLOCATED: "loading",
        S.SHUTTING_PREFILL: "shutting",
        S.SHUTTING_DECODE: "shutting",
        S.SHUTTING_NULL: "shutting",
        S.SHUTTING_COLOCATED: "shutting",
        S.INACTIVE: "inactive",
        S.FAILED: "failed",
    }
)
"""The part that a replica plays in a state; faults are counted by it."""

_SERVING: Final = ("colocated", "prefill", "decode")
_LIVE: Final = ("new_prefill", "old_prefill")
_ALL: Final = (*_SERVING, *_LIVE, "loading", "shutting")
_SENDING: Final = ("prefill", "new_prefill", "old_prefill", "shutting", "decode")
_STRIKES: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(
        (
            *("replica_crash", "replica_restart", "gpu_crash", "node_crash"),
            *("straggler", "freeze", "pause"),
            *("link_down", "link_degrade", "link_latency", "partition", "host_cache_lost"),
        ),
        _ALL,
    ),
    "kv_shrink": (*_SERVING, *_LIVE, "shutting"),  # a replica that loads has no KV memory yet
    **dict.fromkeys(
        (
            *("transfer_refused", "transfer_broken", "transfer_hang"),
            *("completion_late", "completion_twice", "handshake_lost", "destination_refuses"),
        ),
        _SENDING,  # colocated replicas hand nothing over; a replica that loads has nothing to
    ),
    "lease_expired": ("prefill", "new_prefill", "old_prefill", "shutting"),  # where KV waits
    "load_stuck": ("loading", "new_prefill"),
    "drain_expired": ("shutting",),
    "cxl_lost": ("colocated", "prefill", "decode"),  # tiers and live scaling exclude each other
}
STRIKES: Final = tuple(f"{kind} on {part}" for kind, its in _STRIKES.items() for part in its)
"""Kinds of faults on the parts that they can strike. The others strike no replica: machines'
directories, the planner, clients and the gateway."""


# --- keys ---------------------------------------------------------------------------------------
@functools.cache
def schema_keys() -> tuple[str, ...]:
    """Every key of the schema, dotted, without indices: `scheduler.max_num_seqs`, `faults.part`.

    A key that several kinds of a table share is one key; each kind is an entry of its own, too
    (`latency.backend=linear`).
    """
    return tuple(dict.fromkeys(_keys_in(table_info(Config), "")))


def _keys_in(table: inspect.StructType, prefix: str) -> Iterator[str]:
    union = unions().get(table.cls)
    if union is not None:
        for name, kind in union.kinds.items():
            yield f"{prefix}{union.key}={name}"
            for item in table_info(kind).fields:
                yield from _key(item, prefix)
    else:
        for item in table.fields:
            yield from _key(item, prefix)


def _key(item: inspect.Field, prefix: str) -> Iterator[str]:
    name = f"{prefix}{item.encode_name}"
    inner = _table_in(item.type)
    if inner is None:
        yield name
        return
    if isinstance(unwrap(item.type), inspect.UnionType) and not _is_optional(item.type):
        yield name  # a name, or a table
    yield from _keys_in(inner, f"{name}.")


def _table_in(kind: inspect.Type) -> inspect.StructType | None:
    kind = unwrap(kind)
    return struct_of(kind.item_type if isinstance(kind, inspect.ListType) else kind)


def _is_optional(kind: inspect.Type) -> bool:
    kind = unwrap(kind)
    assert isinstance(kind, inspect.UnionType)
    return all(isinstance(unwrap(k), inspect.StructType | inspect.NoneType) for k in kind.types)


def keys_of(tables: Mapping[str, Any]) -> set[str]:
    """Keys of the schema that a world's tables give."""
    return set(_given(table_info(Config), tables, ""))


def _given(table: inspect.StructType, given: Mapping[str, Any], prefix: str) -> Iterator[str]:
    union = unions().get(table.cls)
    if union is not None:
        kind = union.kind_of(given)
        yield f"{prefix}{union.key}={given.get(union.key, union.default)}"
        table = table_info(kind)
    types = {item.encode_name: item.type for item in table.fields}
    for name, value in given.items():
        if name not in types:
            continue  # a key of before, which the reader turns into today's
        inner = _table_in(types[name])
        tables = [value] if isinstance(value, Mapping) else value
        if inner is None or isinstance(tables, str):
            yield f"{prefix}{name}"
            continue
        for one in tables or ():
            yield from _given(inner, one, f"{prefix}{name}.")


# --- faults by part -----------------------------------------------------------------------------
_REPLICA: Final = re.compile(r"^(?:\w+ of )?replica (\d+)")
_PLACE: Final = re.compile(r"^(machine|GPU) (\d+)")
_CXL: Final = re.compile(r"^the CXL pool of machine (\d+)")
_PAIR: Final = re.compile(r"(\d+) -> (\d+)$")


class Place(msgspec.Struct, frozen=True):
    """Where a replica is, and what it was at the start."""

    machine: int
    gpus: Sequence[int]
    state: str


def fault_parts(records: Iterable[Mapping[str, Any]], places: Sequence[Place]) -> dict[str, int]:
    """`kind on part` -> how often, for each replica that a fault struck.

    A fault of a machine or a GPU strikes all replicas there, a fault of a transfer both of its
    ends. What strikes no replica (a planner, the gateway, links of several machines) is not here.
    """
    states = [place.state for place in places]
    found: dict[str, int] = {}
    for record in records:
        if record["event"] == "state":
            states[record["replica"]] = record["to"]
        elif record["event"] == "fault":
            for part in _parts(record["target"], places, states):
                key = f"{record['kind']} on {part}"
                found[key] = found.get(key, 0) + 1
    return found


def _parts(target: str, places: Sequence[Place], states: Sequence[str]) -> set[str]:
    """Each part counts once for a fault, however many replicas play it."""
    one, place, pair = _REPLICA.match(target), _PLACE.match(target), _PAIR.search(target)
    cxl = _CXL.match(target)
    struck: list[int] = []
    if one is not None:
        struck = [int(one[1])]
    elif pair is not None:
        struck = [int(pair[1]), int(pair[2])]
    elif cxl is not None:
        struck = [i for i, p in enumerate(places) if p.machine == int(cxl[1])]
    elif place is not None:
        at = int(place[2])
        is_machine = place[1] == "machine"
        struck = [
            i for i, p in enumerate(places) if (p.machine == at if is_machine else at in p.gpus)
        ]
    return {PARTS[S(states[index])] for index in struck}
