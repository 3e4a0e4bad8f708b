"""Which part each struck replica played at that moment, read from a run's history."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from emu.documents import DocumentView
from emu.replica.states import ReplicaState as S

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
_REPLICA: Final = re.compile(r"^(?:\w+ of )?replica (\d+)")
_PLACE: Final = re.compile(r"^(machine|GPU) (\d+)")
_CXL: Final = re.compile(r"^the CXL pool of machine (\d+)")
_PAIR: Final = re.compile(r"(\d+) -> (\d+)$")


class Place(msgspec.Struct, frozen=True):
    """Where a replica is, and what it was at the start."""

    machine: int
    gpus: Sequence[int]
    state: str


def fault_parts(records: Iterable[DocumentView], places: Sequence[Place]) -> dict[str, int]:
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
