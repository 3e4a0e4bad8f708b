"""Collectives: who sends what in which round, and what that costs on an idle network.

Owns the algorithms of ASTRA-Sim's system layer (ring, direct, halving-doubling) as lists of
rounds, their composition over several dimensions, chunking, and the analytical time without
congestion. Counts agree with the real program to the cycle (1 cycle = 1 ns). Does not own:
contention on shared links (`congestion.py`), who takes part (the caller).

How a collective runs. It is cut into phases, one per dimension (`phases`). A phase is a list of
rounds (`rounds`): each rank sends its messages at s_r, holds them all from its peers at a_r, and
starts the next round at s_{r+1} = a_r + endpoint delay + reduction. The first round starts one
endpoint delay after the rank enters the phase. Nobody waits for more than its data, so ranks
that start apart end apart (`ends_ns`). Where all start together every rank has the same
timeline, and one sum is enough (`collective_ns`).

Source of the rules: ASTRA-Sim as LLMServingSim drives it; chunking derived from the table of
cycle counts and confirmed against the program.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from emu.errors import InputError
from emu.network.dims import NetworkDim, rank_count, strides
from emu.units import ceil_div

Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]
Algorithm = Literal["ring", "direct", "halvingDoubling"]
KINDS: Final[tuple[str, ...]] = get_args(Kind)
ALGORITHMS: Final[tuple[str, ...]] = get_args(Algorithm)

_REDUCTION_PASSES: Final = 3
"""Reduction reads two operands and writes one."""


class CollectiveSystem(msgspec.Struct, frozen=True, kw_only=True):
    """What the time of a collective depends on beside its kind and size."""

    dims: tuple[NetworkDim, ...]
    algorithms: tuple[Algorithm, ...] = ()
    """One per dimension; empty = ring everywhere."""
    splits: int = 1
    """Chunks that a collective is cut into (`preferred-dataset-splits`)."""
    active_chunks: int = 1
    """Chunks that may be under way in one dimension at a time."""
    local_mem_gbytes_per_s: float = 1600.0
    """Memory bandwidth of a rank, 1e9 bytes/s; only the reduction uses it."""
    endpoint_delay_ns: int = 10
    optimization: Literal["localBWAware", "baseline"] = "localBWAware"
    npus_total: int = 0
    """Ranks of the whole system, which small collectives are padded to; 0 = product of `dims`."""

    @property
    def padding_bytes(self) -> int:
        """Least size of a chunk."""
        return self.npus_total or rank_count(self.dims)

    def algorithm(self, dim: int) -> Algorithm:
        """Algorithm of a dimension."""
        return self.algorithms[dim] if self.algorithms else "ring"

    def reduction_ns(self, size_bytes: int) -> int:
        """Local cost of reducing one received message."""
        rate = self.local_mem_gbytes_per_s * 1e9
        return _REDUCTION_PASSES * int(size_bytes / rate * 1e9)


class Phase(NamedTuple):
    """One dimension's part of a collective. `direction` is +1 (to the next rank) or -1."""

    dim: int
    kind: Kind
    size_bytes: int
    direction: int


class Round(NamedTuple):
    """`repeats` equal rounds of messages.

    Pattern "shift": to the rank `step` further; "xor": to the rank at `index ^ step`; "all": to
    every other rank. `reduced_bytes` is what is reduced after each of them, -1 for nothing.
    """

    pattern: Literal["shift", "xor", "all"]
    step: int
    repeats: int
    message_bytes: int
    reduced_bytes: int


def rounds(algorithm: Algorithm, phase: Phase, npus: int) -> list[Round]:
    """The rounds of one phase among `npus` ranks."""
    kind, size = phase.kind, phase.size_bytes
    part = size if kind == "all-gather" else size // npus
    if algorithm == "direct":
        return _direct_rounds(kind, part)
    if algorithm == "halvingDoubling":
        return _halving_doubling_rounds(kind, size, npus)
    step = phase.direction
    gather = Round("shift", step, npus - 1, part, -1)
    reduce = Round("shift", step, npus - 1, part, part)
    if kind == "all-reduce":
        return [reduce, gather]
    if kind == "reduce-scatter":
        return [reduce]
    if kind == "all-gather":
        return [gather]
    # Every hop of every block is a round of its own: 1 + 2 + ... + (N - 1).
    return [Round("shift", step, npus * (npus - 1) // 2, part, -1)]


def _direct_rounds(kind: Kind, part: int) -> list[Round]:
    reduce, gather = Round("all", 1, 1, part, part), Round("all", 1, 1, part, -1)
    if kind == "all-reduce":
        return [reduce, gather]
    return [reduce] if kind == "reduce-scatter" else [gather]


def _halving_doubling_rounds(kind: Kind, size: int, npus: int) -> list[Round]:
    stages = npus.bit_length() - 1
    if kind == "all-gather":
        return [Round("xor", npus >> (j + 1), 1, size << j, -1) for j in range(stages)]
    halves = [
        # After a halving the next, smaller message is what is reduced; the last one is free.
        Round("xor", 1 << (j - 1), 1, size >> j, size >> (j + 1) if j < stages else -1)
        for j in range(1, stages + 1)
    ]
    if kind == "reduce-scatter":
        return halves
    # On the way back sizes are doubled from the smallest one, which division has cut off.
    least = size >> (stages + 1)
    return halves + [
        Round("xor", 1 << (j - 1), 1, least << (stages + 1 - j), -1) for j in range(stages, 0, -1)
    ]


def check_algorithm(algorithm: str, kind: Kind, npus: int, source: str = "network") -> None:
    """Refuse what an algorithm cannot do. Raises InputError."""
    if algorithm not in ALGORITHMS:
        names = ", ".join(ALGORITHMS)
        raise InputError(source, None, "algorithm", f"{algorithm!r} is not one of {names}")
    if algorithm == "halvingDoubling":
        if npus & (npus - 1):
            problem = f"halvingDoubling needs a power of two ranks, not {npus}"
            raise InputError(source, None, "algorithm", problem)
        if kind == "all-to-all":
            problem = "halvingDoubling has no all-to-all; use ring or direct"
            raise InputError(source, None, "algorithm", problem)


def active_dims(dims: Sequence[NetworkDim], involved: Sequence[bool] | None) -> list[int]:
    """Dimensions that a collective runs on: involved (None = all) and longer than one."""
    flags = [True] * len(dims) if involved is None else list(involved)
    return [d for d, dim in enumerate(dims) if d < len(flags) and flags[d] and dim.npus > 1]


def chunk_sizes(kind: Kind, size_bytes: int, splits: int, npus_total: int) -> list[int]:
    """Sizes of the chunks that a collective is cut into.

    A chunk smaller than the number of ranks of the whole system is padded to it (not for
    all-gather, whose size is already one rank's share). What division leaves over is sent as one
    more chunk of the full size.
    """
    chunk = size_bytes // splits
    if kind != "all-gather" and chunk < npus_total:
        return [npus_total] * splits
    if chunk == 0:
        return [size_bytes]
    return [chunk] * ceil_div(size_bytes, chunk)


def phases(
    system: CollectiveSystem, kind: Kind, size_bytes: int, active: Sequence[int]
) -> list[Phase]:
    """Phases of one chunk, in order."""
    dims = system.dims
    result: list[Phase] = []
    size = size_bytes

    def add(dim: int, phase_kind: Kind, direction: int = 1) -> None:
        nonlocal size
        result.append(Phase(dim, phase_kind, size, direction))
        if phase_kind == "reduce-scatter":
            size //= dims[dim].npus
        elif phase_kind == "all-gather":
            size *= dims[dim].npus

    if kind == "all-gather":
        for dim in reversed(active):
            add(dim, kind)
    elif kind == "all-reduce" and system.optimization == "localBWAware":
        for dim in active[:-1]:
            add(dim, "reduce-scatter")
        add(active[-1], "all-reduce")
        for dim in reversed(active[:-1]):
            add(dim, "all-gather", -1)
    else:
        for dim in active:
            add(dim, kind)
    return result


def phase_ns(system: CollectiveSystem, phase: Phase) -> int:
    """Duration of a phase that all ranks enter together."""
    dim = system.dims[phase.dim]
    delay = system.endpoint_delay_ns
    total = delay
    for each in rounds(system.algorithm(phase.dim), phase, dim.npus):
        once = dim.message_ns(each.message_bytes, _farthest(dim, each)) + delay
        if each.reduced_bytes >= 0:
            once += system.reduction_ns(each.reduced_bytes)
        total += each.repeats * once
    return total


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
    for dim in active:
        check_algorithm(system.algorithm(dim), kind, system.dims[dim].npus)
    chunks = chunk_sizes(kind, size_bytes, system.splits, system.padding_bytes)
    plans = [
        [(p.dim, phase_ns(system, p)) for p in phases(system, kind, size, active)]
        for size in chunks
    ]
    if len(plans) == 1:
        return sum(duration for _, duration in plans[0])
    return pipeline_ns(plans, len(system.dims), system.active_chunks)


def pipeline_ns(plans: Sequence[Sequence[tuple[int, int]]], queues: int, running_max: int) -> int:
    """End of the last of several chunks, each a list of (queue, duration) passed in order.

    A queue serves `running_max` chunks at a time in order of arrival; a chunk's next phase joins
    its queue when the last one ends.
    """
    waiting: list[deque[int]] = [deque() for _ in range(queues)]
    running = [0] * queues
    step = [0] * len(plans)
    events: list[tuple[int, int, int]] = []
    order = 0
    now = 0

    def start_next(queue: int) -> None:
        nonlocal order
        while waiting[queue] and running[queue] < running_max:
            chunk = waiting[queue].popleft()
            running[queue] += 1
            heapq.heappush(events, (now + plans[chunk][step[chunk]][1], order, chunk))
            order += 1

    for chunk, plan in enumerate(plans):
        waiting[plan[0][0]].append(chunk)
    for queue in range(queues):
        start_next(queue)
    while events:
        now, _, chunk = heapq.heappop(events)
        left = plans[chunk][step[chunk]][0]
        step[chunk] += 1
        running[left] -= 1
        if step[chunk] < len(plans[chunk]):
            joined = plans[chunk][step[chunk]][0]
            waiting[joined].append(chunk)
            start_next(joined)
        start_next(left)
    return now


def ends_ns(
    system: CollectiveSystem,
    kind: Kind,
    size_bytes: int,
    starts_ns: Sequence[int],
    involved: Sequence[bool] | None = None,
) -> list[int]:
    """When each rank is done, for ranks that start at different instants.

    `starts_ns` has one entry per rank of the active dimensions' product, first dimension
    fastest. Only for uncut collectives (`splits` = 1): with several chunks the order in the
    queues depends on the stagger, which `congestion.py` simulates.
    """
    assert system.splits == 1
    active = active_dims(system.dims, involved)
    (size,) = chunk_sizes(kind, size_bytes, 1, system.padding_bytes)
    shape = [system.dims[d] for d in active]
    assert len(starts_ns) == rank_count(shape)
    step = dict(zip(active, strides(shape), strict=True))
    now = list(starts_ns)
    for phase in phases(system, kind, size, active):
        plan = rounds(system.algorithm(phase.dim), phase, system.dims[phase.dim].npus)
        for first in range(len(now)):
            if first // step[phase.dim] % system.dims[phase.dim].npus:
                continue
            lane = range(
                first, first + step[phase.dim] * system.dims[phase.dim].npus, step[phase.dim]
            )
            ends = _lane_ends(system, phase.dim, plan, [now[rank] for rank in lane])
            for rank, end in zip(lane, ends, strict=True):
                now[rank] = end
    return now


def _lane_ends(
    system: CollectiveSystem, dim_index: int, plan: Sequence[Round], starts: Sequence[int]
) -> list[int]:
    """One phase along one line of ranks."""
    dim, delay, npus = system.dims[dim_index], system.endpoint_delay_ns, len(starts)
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
            if each.pattern == "all":
                arrived = [
                    max(at[j] + (net[(i - j) % npus] if i != j else 0) for j in range(npus))
                    for i in range(npus)
                ]
            elif each.pattern == "xor":
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

    def collective_ns(self, kind: Kind, size_bytes: int, ranks: int) -> int:
        """Time of a collective among `ranks` ranks that start together; 0 for one rank."""
        if ranks <= 1:
            return 0
        dims = tuple(
            msgspec.structs.replace(dim, npus=npus)
            for dim, npus in zip(self.system.dims, self.shape(ranks), strict=True)
        )
        system = msgspec.structs.replace(
            self.system, dims=dims, npus_total=self.system.padding_bytes
        )
        return collective_ns(system, kind, size_bytes)

    def message_ns(self, size_bytes: int, dim: int = 0) -> int:
        """Point-to-point message between neighbours of a dimension."""
        which = self.system.dims[dim]
        return which.message_ns(size_bytes, which.neighbour_hops())
