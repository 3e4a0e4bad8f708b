"""Which expert lies in which slot of which rank: EPLB, as DeepSeek published it.

An expert with much load gets more copies; slots are dealt to ranks so that their loads are alike.
Where nodes divide the groups of a group-limited router, groups are dealt to nodes first, so that a
token still meets few nodes (hierarchical); else all slots are dealt at once (global). Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Slots = list[list[int]]
"""Experts of each rank."""


def in_order(experts: int, ranks: int, slots: int = 0) -> Slots:
    """Without a balancer: slot s holds expert s, those beyond the experts the first ones again."""
    placed: Slots = [[] for _ in range(ranks)]
    slots = slots or experts
    for slot in range(slots):
        placed[slot * ranks // slots].append(slot % experts)
    return placed


def copies_of(loads: Sequence[float], slots: int) -> list[int]:
    """Copies of each expert: each further slot goes to the expert with the most load a copy."""
    copies = [1] * len(loads)
    most = [(-load, one) for one, load in enumerate(loads)]
    heapq.heapify(most)
    for _ in range(slots - len(loads)):
        one = most[0][1]
        copies[one] += 1
        heapq.heapreplace(most, (-loads[one] / copies[one], one))
    return copies


def packed(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Items dealt to packs of equal number: the heaviest first, to the lightest with room."""
    room = -(-len(weights) // packs)
    found: list[list[int]] = [[] for _ in range(packs)]
    lightest = [(0.0, pack) for pack in range(packs)]
    for item in sorted(range(len(weights)), key=lambda one: (-weights[one], one)):
        load, pack = lightest[0]
        found[pack].append(item)
        if len(found[pack]) < room:
            heapq.heapreplace(lightest, (load + weights[item], pack))
        else:
            heapq.heappop(lightest)
    return found


def balanced(
    loads: Sequence[float], slots: int, ranks: int, *, groups: int = 1, nodes: int = 1
) -> Slots:
    """EPLB's plan for one layer."""
    if groups <= 1 or nodes <= 1 or groups % nodes or ranks % nodes or slots % nodes:
        return _dealt(list(range(len(loads))), loads, slots, ranks)
    size = len(loads) // groups
    of_groups = [sum(loads[at * size : (at + 1) * size]) for at in range(groups)]
    placed: Slots = []
    for mine in packed(of_groups, nodes):
        experts = [expert for at in mine for expert in range(at * size, (at + 1) * size)]
        placed += _dealt(experts, loads, slots // nodes, ranks // nodes)
    return placed


def _dealt(experts: list[int], loads: Sequence[float], slots: int, ranks: int) -> Slots:
    """Copies of these experts, dealt to ranks."""
    own = [loads[expert] for expert in experts]
    copies = copies_of(own, slots)
    units = [at for at, count in enumerate(copies) for _ in range(count)]
    weights = [own[at] / copies[at] for at in units]
    return [[experts[units[one]] for one in pack] for pack in packed(weights, ranks)]


def rank_loads(placed: Slots, loads: Sequence[float]) -> list[float]:
    """Load of each rank; the copies of an expert share its load."""
    copies = [0] * len(loads)
    for own in placed:
        for expert in own:
            copies[expert] += 1
    return [sum(loads[expert] / copies[expert] for expert in own) for own in placed]


def moved(before: Slots, after: Slots) -> int:
    """Most slots that one rank must fill with experts that it does not hold."""
    return max(
        sum(1 for expert in new if expert not in old)
        for old, new in zip(before, after, strict=True)
    )
