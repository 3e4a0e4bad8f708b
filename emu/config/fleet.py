"""`[[models]]`: several models that share all GPUs, written out as tables of replicas. Pure.

Each model gets a replica on every group of GPUs that it may be loaded on: `tensor_parallel`
neighbors of a machine, counted from its first GPU. Those that serve from the start are placed
first, the widest models first, so that no GPU is lost to gaps; the others are inactive. Replicas
of different models overlap (`shared`): at most one of those on a GPU is loaded at a time. Without
a planner nothing is ever loaded anew, and only the replicas that serve are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from emu.config.schema import (
    AutoscaleTable,
    Config,
    ModelTable,
    ReplicaTable,
    ServedModelTable,
)
from emu.config.tables import Problem
from emu.documents import Document

STATIC_PARTS: Final = {"distserve_full": (1, 1), "distserve_half": (1, 2)}
"""Presets of static systems, and the part of the GPUs that they use."""
PREFILL_OF_EIGHT: Final = 5
"""Static systems of the paper prefill on five replicas in eight."""
_ROLES: Final = ("prefill", "decode", "colocated")


def is_scaled(table: AutoscaleTable | None) -> bool:
    """A planner may load and drop weights."""
    return table is not None and not table.is_static


def prefill_part(replicas: int) -> int:
    """How many of a static system's replicas prefill; at least one does, and one does not."""
    return min(max(1, round(replicas * PREFILL_OF_EIGHT / 8)), replicas - 1)


def fleet_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with `[[models]]`, once all types are right."""
    if not config.models:
        return
    labels: dict[str, int] = {}
    for index, model in enumerate(config.models):
        if model.label in labels:
            problem = f"{model.label!r} is served by models.{labels[model.label]} already"
            yield ("models", index, "served_name"), f"{problem}; give another served_name"
        labels.setdefault(model.label, index)
        largest = max((node.gpus for node in config.nodes), default=0)
        if model.tensor_parallel > largest:
            yield (
                ("models", index, "tensor_parallel"),
                f"expected at most {largest}, the GPUs of a machine, got {model.tensor_parallel}",
            )
            return
        roles = model.prefill + model.decode
        if model.colocated and roles:
            yield (
                ("models", index, "colocated"),
                "a model has colocated replicas, or prefill and decode replicas, not both",
            )
        if not is_scaled(config.autoscale) and not _is_split(config):
            if not roles and not model.colocated:
                yield ("models", index), "no replica serves it, and no planner ever starts one"
            if bool(model.prefill) != bool(model.decode):
                yield ("models", index), "needs a prefill and a decode replica"
    if config.commands and is_scaled(config.autoscale):
        yield ("commands",), "models that share GPUs are loaded by the planner alone"
    for name in config.workload.model_shares:
        if name not in labels:
            yield ("workload", "model_shares", name), _unknown(name, labels)
    table = config.migration
    for key, is_on in (("rebalance", table.rebalance), ("drain", table.drain)):
        if is_on:
            yield ("migration", key), "not with [[models]]: running requests stay where they are"
    wanted = _counts(config)
    have = sum(node.count * node.gpus for node in config.nodes)
    need = sum(
        sum(c.values()) * m.tensor_parallel for m, c in zip(config.models, wanted, strict=True)
    )
    if need > have or _placed(config, wanted) is None:
        yield ("models",), f"the replicas of the start need {need} GPUs, the nodes have {have}"


def _unknown(name: str, labels: dict[str, int]) -> str:
    return f"no model is served as {name!r}; there are {', '.join(labels)}"


def expand_models(config: Config) -> Config:
    """The configuration with `[[replicas]]` for its `[[models]]`; without any it is returned."""
    if not config.models:
        return config
    wanted = _counts(config)
    placed = _placed(config, wanted)
    assert placed is not None  # `fleet_problems` has looked
    tables: list[ReplicaTable] = []
    for index, model in enumerate(config.models):
        serving: set[int] = set()
        for role in _ROLES:
            slots = placed[index, role]
            serving.update(gpu for slot in slots for gpu in slot)
            if slots:
                tables.append(_table(config, model, role, slots))
        if is_scaled(config.autoscale):
            rest = [s for s in _slots(config, model) if not serving.intersection(s)]
            if rest:
                tables.append(_table(config, model, "inactive", rest))
    return msgspec.structs.replace(config, replicas=tables)


def _table(
    config: Config, model: ServedModelTable, role: str, slots: Sequence[Sequence[int]]
) -> ReplicaTable:
    given = msgspec.structs.asdict(model)
    keys: Document = {
        name: given[name]
        for name, default in msgspec.structs.asdict(ModelTable()).items()
        if given[name] != default or name in ("name", "served_name")
    }
    return ReplicaTable(
        role=role,  # type: ignore[arg-type]
        count=len(slots),
        tensor_parallel=model.tensor_parallel,
        gpus=[gpu for slot in slots for gpu in slot],
        shared=is_scaled(config.autoscale),
        model=keys,
        engine=dict(model.engine),
        scheduler=dict(model.scheduler),
        latency=dict(model.latency),
    )


def _slots(config: Config, model: ServedModelTable) -> list[tuple[int, ...]]:
    """Groups of GPUs that the model may be loaded on."""
    slots: list[tuple[int, ...]] = []
    first, size = 0, model.tensor_parallel
    for node in config.nodes:
        for _ in range(node.count):
            slots += [
                tuple(range(first + start, first + start + size))
                for start in range(0, node.gpus - size + 1, size)
            ]
            first += node.gpus
    return slots


def _placed(
    config: Config, wanted: Sequence[dict[str, int]]
) -> dict[tuple[int, str], list[tuple[int, ...]]] | None:
    """Slots of those that serve from the start, by model and role; None = there is no room."""
    taken: set[int] = set()
    placed: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    order = sorted(range(len(wanted)), key=lambda i: (-config.models[i].tensor_parallel, i))
    free_slots: dict[int, Iterator[tuple[int, ...]]] = {}
    """By size. Models of one size go on where the one before has ended: nothing becomes free."""
    for index in order:
        model = config.models[index]
        if model.tensor_parallel not in free_slots:
            free_slots[model.tensor_parallel] = iter(_slots(config, model))
        free = free_slots[model.tensor_parallel]
        for role in _ROLES:
            slots = placed.setdefault((index, role), [])
            while len(slots) < wanted[index][role]:
                slot = next((s for s in free if not taken.intersection(s)), None)
                if slot is None:
                    return None
                taken.update(slot)
                slots.append(slot)
    return placed


def _is_split(config: Config) -> bool:
    """A static preset deals the GPUs out by itself."""
    table = config.autoscale
    is_static = table is not None and table.preset in STATIC_PARTS
    return is_static and not any(m.prefill or m.decode or m.colocated for m in config.models)


def _serving(model: ServedModelTable) -> dict[str, int]:
    counts = (model.prefill, model.decode, model.colocated)
    return dict(zip(_ROLES, counts, strict=True))


def _counts(config: Config) -> list[dict[str, int]]:
    """Replicas of the start by role, model by model."""
    if not _is_split(config):
        return [_serving(model) for model in config.models]
    assert config.autoscale is not None
    numerator, denominator = STATIC_PARTS[config.autoscale.preset]
    gpus = sum(node.count * node.gpus for node in config.nodes) * numerator // denominator
    shares = config.workload.model_shares
    weights = [
        (shares.get(model.label, 0.0) if shares else 1.0) * model.tensor_parallel
        for model in config.models
    ]
    counts = [2 for _ in config.models]
    left = gpus - sum(2 * model.tensor_parallel for model in config.models)
    sizes = [model.tensor_parallel for model in config.models]
    behind = [(2 * sizes[i] / weights[i], i) for i in range(len(sizes)) if weights[i]]
    heapify(behind)
    while behind:  # one replica more for the model that is furthest behind its part
        index = heappop(behind)[1]
        if sizes[index] > left:
            continue  # nor will there be room later
        counts[index] += 1
        left -= sizes[index]
        heappush(behind, (counts[index] * sizes[index] / weights[index], index))
    return [
        {"prefill": prefill_part(count), "decode": count - prefill_part(count), "colocated": 0}
        for count in counts
    ]
