"""Collectives on an idle network: what one costs, and when each rank is done.

Owns the composition of ASTRA-Sim's algorithms (`rounds.py`) over several dimensions and the
analytical time without congestion; links that messages contend for are in `congestion.py`. Counts
agree with the real program to the cycle (1 cycle = 1 ns). Does not own: which ranks take part (the
caller).

How a collective runs. It is cut into phases, one per dimension (`phases`). A phase is a list of
rounds: each rank sends its messages at s_r, holds them all from its peers at a_r, and starts the
next round at s_{r+1} = a_r + endpoint delay + reduction. The first round starts one endpoint delay
after the rank enters the phase. No rank waits for more than its data, so ranks that start apart end
apart (`ends_ns`). Where all start together every rank has the same timeline, and one sum is enough
(`collective_ns`).

Source of the rules: ASTRA-Sim as LLMServingSim drives it, confirmed against the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from emu.errors import InputError
from emu.network.chunks import chunk_sizes, pipeline_ns
from emu.network.congestion import congested_ns, simulate_ends_ns
from emu.network.dimensions import NetworkDim, message_between_ns, rank_count, strides
from emu.network.direct import direct_ends_ns
from emu.network.rounds import (
    CollectiveSystem,
    Kind,
    Parsed,
    Phase,
    Round,
    active_dims,
    check_algorithm,
    parse_algorithm,
    phases,
    rounds,
)
from emu.network.tree import tree_ends_ns


def phase_ns(system: CollectiveSystem, phase: Phase) -> int:
    """Duration of a phase that all ranks enter together."""
    dim = system.dims[phase.dim]
    parsed = parse_algorithm(system.algorithm(phase.dim))
    if parsed.base == "doubleBinaryTree" or (
        # Where not all messages take as long, or not all leave at once, rounds do not say it all.
        parsed.base == "direct" and (parsed.window or (dim.topology == "Ring" and dim.npus > 3))
    ):
        net = _net_along(dim, phase, parsed)
        return max(_packet_ends(system, parsed, phase, [0] * dim.npus, net))
    delay = system.endpoint_delay_ns
    total = delay
    for each in rounds(system.algorithm(phase.dim), phase, dim.npus):
        once = dim.message_ns(each.message_bytes, _farthest(dim, each)) + delay
        if each.reduced_bytes >= 0:
            once += system.reduction_ns(each.reduced_bytes)
        total += each.repeats * once
    return total


def _message_bytes(phase: Phase, parsed: Parsed, npus: int) -> int:
    if parsed.base == "doubleBinaryTree" or phase.kind == "all-gather":
        return phase.size_bytes
    return phase.size_bytes // npus


def _net_along(dim: NetworkDim, phase: Phase, parsed: Parsed) -> Callable[[int, int], int]:
    """Time of a phase's message between two positions of a dimension."""
    size = _message_bytes(phase, parsed, dim.npus)
    times = [dim.message_ns(size, dim.hops(0, step)) for step in range(dim.npus)]
    return lambda a, b: times[(b - a) % dim.npus]


def _packet_ends(
    system: CollectiveSystem,
    parsed: Parsed,
    phase: Phase,
    starts: Sequence[int],
    net: Callable[[int, int], int],
    *,
    mirrored: bool = False,
) -> list[int]:
    """Ends of one phase of an algorithm that is followed message by message."""
    reduction = system.reduction_ns(_message_bytes(phase, parsed, len(starts)))
    delay = system.endpoint_delay_ns
    if parsed.base == "doubleBinaryTree":
        return tree_ends_ns(starts, net, delay_ns=delay, reduction_ns=reduction, mirrored=mirrored)
    return direct_ends_ns(
        phase.kind, starts, net, delay_ns=delay, reduction_ns=reduction, window=parsed.window
    )


def _one_ends(
    system: CollectiveSystem, kind: Kind, size_bytes: int, starts_ns: Sequence[int]
) -> list[int]:
    """Ends of a `one...` algorithm: a single circle of all ranks, whatever lies between them.

    Chunks follow each other on each rank as soon as one of those under way there has ended.
    """
    dims, npus = system.dims, len(starts_ns)
    parsed = parse_algorithm(system.algorithm(0))
    check_algorithm(system.algorithm(0), kind, npus)
    ends: list[list[int]] = []
    for number, size in enumerate(
        chunk_sizes(kind, size_bytes, system.splits, system.padding_bytes)
    ):
        before = number - system.active_chunks
        starts = list(starts_ns) if before < 0 else ends[before]
        phase = Phase(0, kind, size, 1)
        if parsed.base == "direct":
            message = _message_bytes(phase, parsed, npus)
            net = partial(_between, dims, message)
            ends.append(_packet_ends(system, parsed, phase, starts, net))
            continue
        plan = rounds(system.algorithm(0), phase, npus)
        ends.append(_circle_ends(system, plan, starts))
    return [max(each[rank] for each in ends) for rank in range(npus)]


def _between(dims: Sequence[NetworkDim], size: int, source: int, destination: int) -> int:
    return message_between_ns(dims, source, destination, size)


def _circle_ends(
    system: CollectiveSystem, plan: Sequence[Round], starts: Sequence[int]
) -> list[int]:
    npus, delay = len(starts), system.endpoint_delay_ns
    at = [start + delay for start in starts]
    for each in plan:
        after = delay
        if each.reduced_bytes >= 0:
            after += system.reduction_ns(each.reduced_bytes)
        peers = [
            i ^ each.step if each.pattern == "xor" else (i - each.step) % npus for i in range(npus)
        ]
        net = [_between(system.dims, each.message_bytes, peers[i], i) for i in range(npus)]
        for _ in range(each.repeats):
            at = [max(at[i], at[peers[i]] + net[i]) + after for i in range(npus)]
    return at


def _farthest(dim: NetworkDim, each: Round) -> int:
    if each.pattern == "all":
        return dim.hops(0, dim.npus // 2)
    return dim.hops(0, each.step % dim.npus)


def collective_ns(
    system: CollectiveSystem,
    kind: Kind,
    size_bytes: int,
    involved: Sequence[bool] | None = None,
) -> int:
    """Time of a collective on an idle network, all ranks starting together.

    `size_bytes` is the full tensor for all-reduce and reduce-scatter, the local shard for
    all-gather, the local buffer for all-to-all. 0 when no dimension takes part.
    """
    active = active_dims(system.dims, involved)
    if not active:
        return 0
    if system.is_one:
        return max(_one_ends(system, kind, size_bytes, [0] * rank_count(system.dims)))
    for dim in active:
        check_algorithm(system.algorithm(dim), kind, system.dims[dim].npus)
    chunks = chunk_sizes(kind, size_bytes, system.splits, system.padding_bytes)
    plans = [
        [(p.dim, phase_ns(system, p)) for p in phases(system, kind, size, active)]
        for size in chunks
    ]
    if any(map(system.is_tree, active)) and (len(plans) > 1 or len(active) > 1):
        return _tree_chunks_ns(system, kind, size_bytes, active)
    if len(plans) == 1:
        return sum(duration for _, duration in plans[0])
    return pipeline_ns(plans, len(system.dims), system.active_chunks)


def _tree_chunks_ns(
    system: CollectiveSystem, kind: Kind, size_bytes: int, active: Sequence[int]
) -> int:
    """Ranks of a tree end apart, and begin their next chunks so: followed message by message."""
    part = msgspec.structs.replace(
        system,
        dims=tuple(system.dims[dim] for dim in active),
        algorithms=tuple(system.algorithm(dim) for dim in active),
        npus_total=system.padding_bytes,
    )
    return max(simulate_ends_ns(part, kind, size_bytes, aware=False))


def ends_ns(
    system: CollectiveSystem,
    kind: Kind,
    size_bytes: int,
    starts_ns: Sequence[int],
    involved: Sequence[bool] | None = None,
    *,
    mirrored: Collection[int] = (),
) -> list[int]:
    """When each rank is done, for ranks that start at different instants.

    `starts_ns` has one entry per rank of the active dimensions' product, first dimension
    fastest. Only for uncut collectives (`splits` = 1): with several chunks the order in the
    queues depends on the stagger, which `simulate_ends_ns` follows. `mirrored`: dimensions whose
    next double binary tree is the second one; they take turns, also within a collective.
    """
    if system.is_one:
        return _one_ends(system, kind, size_bytes, starts_ns)
    assert system.splits == 1
    active = active_dims(system.dims, involved)
    (size,) = chunk_sizes(kind, size_bytes, 1, system.padding_bytes)
    shape = [system.dims[d] for d in active]
    assert len(starts_ns) == rank_count(shape)
    step = dict(zip(active, strides(shape), strict=True))
    now = list(starts_ns)
    turns = set(mirrored)
    for phase in phases(system, kind, size, active):
        is_mirrored = phase.dim in turns
        turns ^= {phase.dim}
        for first in range(len(now)):
            if first // step[phase.dim] % system.dims[phase.dim].npus:
                continue
            lane = range(
                first, first + step[phase.dim] * system.dims[phase.dim].npus, step[phase.dim]
            )
            ends = _lane_ends(system, phase, [now[rank] for rank in lane], mirrored=is_mirrored)
            for rank, end in zip(lane, ends, strict=True):
                now[rank] = end
    return now


def _lane_ends(
    system: CollectiveSystem, phase: Phase, starts: Sequence[int], *, mirrored: bool
) -> list[int]:
    """One phase along one line of ranks."""
    dim, delay, npus = system.dims[phase.dim], system.endpoint_delay_ns, len(starts)
    parsed = parse_algorithm(system.algorithm(phase.dim))
    if parsed.base in ("direct", "doubleBinaryTree"):
        along = _net_along(dim, phase, parsed)
        return _packet_ends(system, parsed, phase, starts, along, mirrored=mirrored)
    plan = rounds(system.algorithm(phase.dim), phase, npus)
    at = [start + delay for start in starts]
    for each in plan:
        after = delay
        if each.reduced_bytes >= 0:
            after += system.reduction_ns(each.reduced_bytes)
        if min(at) == max(at):
            once = dim.message_ns(each.message_bytes, _farthest(dim, each)) + after
            at = [at[0] + each.repeats * once] * npus
            continue
        net = [dim.message_ns(each.message_bytes, dim.hops(0, k)) for k in range(npus)]
        for _ in range(each.repeats):
            if each.pattern == "xor":
                hop = net[each.step]
                arrived = [max(at[i], at[i ^ each.step] + hop) for i in range(npus)]
            else:
                hop = net[each.step % npus]
                arrived = [max(at[i], at[(i - each.step) % npus] + hop) for i in range(npus)]
            at = [instant + after for instant in arrived]
    return at


class Collectives:
    """Collective costs of one system, for latency backends.

    Ranks fill the dimensions from the first on: 4 ranks on dimensions (2, 8) are 2 x 2. Keeps no
    cache; a backend that asks for the same size again and again puts one in front.
    """

    def __init__(self, system: CollectiveSystem) -> None:
        self.system = system

    def shape(self, ranks: int) -> tuple[int, ...]:
        """How many ranks of each dimension take part. Raises InputError if they do not fit."""
        left, shape = ranks, []
        for dim in self.system.dims:
            here = min(left, dim.npus)
            if left % here:
                break
            shape.append(here)
            left //= here
        if left != 1 or len(shape) != len(self.system.dims):
            sizes = " x ".join(str(dim.npus) for dim in self.system.dims)
            problem = f"{ranks} ranks do not fill dimensions of {sizes} evenly"
            raise InputError("network", None, "dims", problem)
        return tuple(shape)

    def collective_ns(
        self, kind: Kind, size_bytes: int, ranks: int, *, congestion: bool = False
    ) -> int:
        """Time of a collective among `ranks` ranks that start together; 0 for one rank.

        `congestion`: messages wait for links that others use (one dimension).
        """
        if ranks <= 1:
            return 0
        dims = tuple(
            msgspec.structs.replace(dim, npus=npus)
            for dim, npus in zip(self.system.dims, self.shape(ranks), strict=True)
        )
        system = msgspec.structs.replace(
            self.system, dims=dims, npus_total=self.system.padding_bytes
        )
        if congestion:
            return congested_ns(system, kind, size_bytes)
        return collective_ns(system, kind, size_bytes)

    def message_ns(self, size_bytes: int, dim: int = 0) -> int:
        """Point-to-point message between neighbors of a dimension."""
        which = self.system.dims[dim]
        return which.message_ns(size_bytes, which.neighbour_hops())
