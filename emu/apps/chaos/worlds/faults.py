"""Draws of `[[faults]]`: the faults of a seed, of a replica, of a long run.

A random part of the kinds is switched off, the others get different weights. Some kinds only
strike while something rare is going on (a lease, a drain, a load of weights): those come in
volleys, or with a companion fault that makes it happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from emu.apps.chaos.worlds.drawing import TIMES_S, Rng, Tables, chance, pick
from emu.config.faultkinds import FAULT_KINDS
from emu.config.fleet import expand_models
from emu.config.load import config_from_dict
from emu.documents import DocumentView

WIDE: Final = 64
"""Replicas of a large cluster."""
_LASTS_S: Final = {
    "link_down": (0.001, 0.01, 0.1, 1.0, 10.0),
    "pause": (*TIMES_S[1:], 30.0),
    "replica_restart": (0.0, *TIMES_S[1:], 60.0),
}
"""Where faults of a kind last for other times."""
_TRANSFERS: Final = (
    "destination_refuses",
    "transfer_refused",
    "transfer_broken",
    "transfer_hang",
    "completion_late",
    "completion_twice",
    "handshake_lost",
)
_NEEDS_TRANSFERS: Final = ("partition", "lease_expired", *_TRANSFERS)
_NEEDS_PLANNER: Final = ("metrics_delayed", "metrics_frozen", "metrics_lost", "planner_restart")
_WITH_PROBABILITY: Final = (*_TRANSFERS, "host_cache_stale", "load_stuck")
_TWINS: Final = (
    *("straggler", "link_degrade", "link_latency", "partition", "metrics_delayed"),
    *("metrics_frozen", "metrics_lost"),
)
"""Kinds that add up, or of which the last end counts."""
_MEETS_LOADS: Final = ("host_cache_lost", "host_cache_stale", "load_stuck")
_COLOCATED_STAGES: Final = (
    "colocated",
    "loading",
    "loading_colocated",
    "shutting_colocated",
    "any",
    "queued",
    "prefill",
    "decode",
)


class Ground(msgspec.Struct, frozen=True):
    """What of a cluster the draw depends on."""

    replicas: int
    machines: int
    gpus: int
    prefills: tuple[int, ...]
    """Replicas that prefill at the start; none = colocated serving."""
    has_transfers: bool
    has_planner: bool
    has_cxl: bool
    """KV is kept in CXL memory."""
    heals: bool
    """Every fault ends and every replica comes back."""


def ground_of(tables: DocumentView, *, heals: bool) -> Ground:
    """What a configuration's tables say about the cluster."""
    groups = tables["replicas"] if not tables.get("models") else _groups_of_models(tables)
    roles = [g.get("role", "colocated") for g in groups for _ in range(g.get("count", 1))]
    is_split = "prefill" in roles or "decode" in roles
    return Ground(
        replicas=len(roles),
        machines=sum(node.get("count", 1) for node in tables["nodes"]),
        gpus=sum(node.get("count", 1) * node.get("gpus", 8) for node in tables["nodes"]),
        prefills=tuple(index for index, role in enumerate(roles) if role == "prefill"),
        has_transfers=is_split or bool(tables.get("migration", {}).get("rebalance")),
        has_planner=bool(tables.get("autoscale")),
        has_cxl="cxl" in tables.get("network", {}).get("tiers", ()),
        heals=heals,
    )


def _groups_of_models(tables: DocumentView) -> Sequence[DocumentView]:
    """The replicas that follow from `[[models]]`."""
    groups: list[DocumentView]
    bare = {key: value for key, value in tables.items() if key != "workload"}
    groups = msgspec.to_builtins(expand_models(config_from_dict(bare)).replicas)
    return groups


def draw_faults(rng: Rng, ground: Ground, span_s: float) -> list[Tables]:
    """Some faults of some kinds for this cluster, in order of time."""
    if chance(rng, 0.05):
        return []  # a world without faults, now and then
    kinds = [name for name in kinds_for(ground) if chance(rng, 0.8 if name == "cxl_lost" else 0.35)]
    if not kinds:
        kinds = ["replica_crash"]
    weights = rng.exponential(size=len(kinds)) + 0.05
    weights /= weights.sum()
    faults: list[Tables] = []
    calm_s = float(pick(rng, (0.0, 0.05, 0.3)))
    at_s = 0.0
    for _ in range(int(rng.integers(1, 9))):
        name = kinds[int(rng.choice(len(kinds), p=weights))]
        step_s = float(rng.random()) * span_s / 4 if chance(rng, 0.7) else 0.0
        at_s = round(at_s + calm_s + step_s, 3 if chance(rng, 0.5) else 9)
        faults += _some(rng, name, at_s, ground)
    if ground.has_cxl:  # reads from there are rare, so this is tried in every such world
        faults += _some(rng, "cxl_lost", round(float(rng.random()) * span_s, 3), ground)
    return sorted(faults, key=lambda fault: fault["at_s"])


def kinds_for(ground: Ground) -> list[str]:
    """Kinds that can find something to strike in such a cluster."""
    return [
        name
        for name in FAULT_KINDS
        if (ground.has_transfers or name not in _NEEDS_TRANSFERS)
        and (ground.prefills or name != "lease_expired")
        and (ground.has_planner or name not in _NEEDS_PLANNER)
        and (ground.has_cxl or name != "cxl_lost")
    ]


def _some(rng: Rng, name: str, at_s: float, ground: Ground) -> list[Tables]:
    """A fault, several of the kind, or the fault and one that gives it something to strike."""
    first = _fault(rng, name, at_s, ground)
    if name == "lease_expired":
        pause_s = float(pick(rng, (0.02, 0.1, 0.3)))
        count = int(rng.integers(1, 7))
        volley = [{**first, "at_s": round(at_s + pause_s * order, 9)} for order in range(count)]
        if chance(rng, 0.5):
            window_s = max(0.05, pause_s * count)
            volley.append({"at_s": at_s, "kind": "destination_refuses", "duration_s": window_s})
        return volley
    if name == "cxl_lost":  # reads from there do not take long
        pause_s, count = float(pick(rng, (0.2, 0.5, 1.0))), int(rng.integers(2, 10))
        return [{**first, "at_s": round(at_s + pause_s * order, 9)} for order in range(count)]
    if name == "drain_expired" and chance(rng, 0.6):  # drains are few: a window for all of them
        return [{**first, "at_s": 0.0, "duration_s": 10.0}]
    if name == "replica_crash" and "stage" in first:  # states that last but an instant
        more = [_fault(rng, name, at_s, ground) for _ in range(int(rng.integers(0, 4)))]
        return [first, *(fault for fault in more if "stage" in fault)]
    if name in _TWINS and first.get("duration_s") and chance(rng, 0.3):
        # Another on the same one, from the middle of the first: both count, then one, then none.
        later = {**first, "at_s": round(at_s + first["duration_s"] / 2, 9)}
        if FAULT_KINDS[name].magnitude is not None:
            later[FAULT_KINDS[name].size] = _size(rng, name)
        return [first, later]
    if name in _MEETS_LOADS and chance(rng, 0.6):
        crash = _fault(rng, "replica_restart", round(at_s + 0.01, 9), ground)
        return [first, {**crash, "duration_s": float(pick(rng, TIMES_S[1:4]))}]
    return [first]


def _struck(rng: Rng, name: str, key: str, ground: Ground) -> int | str:
    """Which of the things that a key names a fault of this kind strikes."""
    if key == "stage":
        return pick(rng, _stages(FAULT_KINDS[name].stages, ground))
    if name == "lease_expired" and key not in ("node", "gpu", "request"):
        return pick(rng, ground.prefills)
    count = {"node": ground.machines, "gpu": ground.gpus, "request": 20}.get(key, ground.replicas)
    return int(rng.integers(count))


def _fault(rng: Rng, name: str, at_s: float, ground: Ground) -> Tables:
    spec = FAULT_KINDS[name]
    fault: Tables = {"at_s": at_s, "kind": name}
    for group in spec.one_of:
        by_stage = 0.6 if ground.has_planner else 0.3
        key = "replica" if "replica" in group and not chance(rng, by_stage) else pick(rng, group)
        fault[key] = _struck(rng, name, key, ground)
    if fault.get("source", -1) == fault.get("destination", -2):
        if ground.replicas == 1:
            return _fault(rng, "straggler", at_s, ground)
        fault["destination"] = (fault["source"] + 1) % ground.replicas
    if "replica" in spec.may and chance(rng, 0.2):
        fault["replica"] = int(rng.integers(ground.replicas))
    if spec.magnitude is not None and not spec.may_magnitude:
        fault[spec.size] = _size(rng, name)
    if name in _WITH_PROBABILITY:
        fault["probability"] = float(pick(rng, (0.2, 0.5, 1.0)))
    if name == "swizzle":
        fault["probability"] = float(pick(rng, (0.5, 1.0)))
    if "stage" in fault and name == "replica_crash" and chance(rng, 0.5):
        fault["after_s"] = float(pick(rng, (0.001, 0.01, 0.1, 0.3)))
    # A window of stuck loads always ends, or nothing would ever load.
    is_finite = ground.heals or spec.needs_duration or name in ("load_stuck", "drain_expired")
    if spec.takes_duration and (is_finite or chance(rng, 0.6)):
        fault["duration_s"] = float(pick(rng, _LASTS_S.get(name, TIMES_S[1:])))
    if name == "link_down" and fault.get("duration_s"):
        fault["times"] = int(rng.integers(1, 21))
    elif name in ("client_leaves", "completion_twice"):
        fault["clients" if name == "client_leaves" else "times"] = int(rng.integers(1, 4))
    return fault


def fault_on(
    rng: Rng, name: str, at_s: float, replica: int, others: Sequence[int], *, gpus: int
) -> Tables | None:
    """A fault of a kind on this replica of one GPU, on machines of so many; None = it cannot.

    Faults of two replicas go from or to one of the `others`.
    """
    spec = FAULT_KINDS[name]
    fault: Tables = {"at_s": at_s, "kind": name}
    keys = {key for group in spec.one_of for key in group}
    if {"source", "destination"} <= keys or name == "partition":
        pair = [replica, pick(rng, others)]
        if pair[0] == pair[1]:
            return None
        order = pair if chance(rng, 0.5) else pair[::-1]
        fault |= {"source": order[0], "destination": order[1]}
    elif "replica" in keys or "replica" in spec.may:
        if "replica" in keys or chance(rng, 0.5):
            fault["replica"] = replica
    elif "gpu" in keys:
        fault["gpu"] = replica
    elif "node" in keys:
        fault["node"] = replica // gpus
    if spec.magnitude is not None and not spec.may_magnitude:
        fault[spec.size] = _size(rng, name)
    if name in _WITH_PROBABILITY:
        fault["probability"] = float(pick(rng, (0.5, 1.0)))
    if spec.takes_duration:
        fault["duration_s"] = float(pick(rng, (0.02, 0.1, 0.4)))
    if name == "completion_twice":
        fault["times"] = 1
    return fault


def _stages(stages: Sequence[str], ground: Ground) -> list[str]:
    """Those that there can be."""
    if ground.prefills:
        return [stage for stage in stages if "colocated" not in stage]
    return [stage for stage in stages if stage in _COLOCATED_STAGES]


def _size(rng: Rng, name: str) -> float:
    if name == "straggler":
        return float(pick(rng, (1.2, 3.0, 10.0)))
    if name == "overload":
        return float(pick(rng, (2.0, 2.0, 5.0, 5.0, 20.0)))
    if name == "metrics_delayed":
        return float(pick(rng, (1.0, 50.0, 500.0, 60_000.0)))
    if name in ("link_latency", "completion_late", "completion_twice"):
        return float(pick(rng, (0.001, 1.0, 100.0)))
    return float(pick(rng, (0.01, 0.1, 0.5, 0.9)))


def draw_train(rng: Rng, ground: Ground, span_s: float, every_s: float) -> list[Tables]:
    """Faults for a long run: all kinds in turn, in an order that is drawn anew each time around."""
    kinds = kinds_for(ground)
    faults: list[Tables] = []
    at_s, order = 0.0, list[int]()
    while at_s < span_s:
        order = order or [int(index) for index in rng.permutation(len(kinds))]
        train = _some(rng, kinds[order.pop()], round(at_s, 6), ground)
        faults += [_narrowed(rng, fault, ground) for fault in train if fault["at_s"] < span_s]
        at_s += every_s * (0.5 + float(rng.random()))
    return sorted(faults, key=lambda fault: fault["at_s"])


def _narrowed(rng: Rng, fault: Tables, ground: Ground) -> Tables:
    """In a large cluster a fault of transfers is one replica's, and an overload twice the rate."""
    if ground.replicas <= WIDE:
        return fault
    if fault["kind"] in _TRANSFERS:
        return {**fault, "destination": int(rng.integers(ground.replicas))}
    return {**fault, "factor": 2.0} if fault["kind"] == "overload" else fault
