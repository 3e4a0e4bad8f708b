"""Which replica is on which GPUs, how its data is cut for a transfer, and what sends it.

Owns: placement at the start of a run (`place`), the pairs of GPUs that talk when KV or weights
go from one replica to another (`shard_moves`), and the network as a sender sees it (`Network`). A
replica's GPU list is stage by stage, the tensor-parallel ranks of a stage side by side.

Does not do: anything later than the start; the planner reuses these lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Literal, Protocol

import msgspec

from emu.config.schema import ReplicaTable
from emu.errors import InputError
from emu.network.topology import LinkPath, Topology


class Grid(msgspec.Struct, frozen=True):
    """The GPUs of a replica in their order, and its tensor-parallel degree."""

    gpus: tuple[int, ...]
    tensor_parallel: int

    @property
    def pipeline_parallel(self) -> int:
        """Number of stages."""
        return len(self.gpus) // self.tensor_parallel


def place(
    replicas: Sequence[ReplicaTable], topology: Topology, *, source: str = "config"
) -> list[list[int]]:
    """The GPUs of every replica, table by table, replica by replica.

    Replicas with `gpus` are put there; the others take free GPUs in order. A replica stays in
    one NVLink domain if there is one with room, else in one machine, else each tensor-parallel
    group does if it can. All GPUs of a replica are of one kind. Raises InputError naming the key.
    """
    taken: dict[int, str] = {}
    shared: dict[int, str] = {}
    explicit: dict[int, list[list[int]]] = {}
    for table, replica in enumerate(replicas):
        if replica.gpus:
            explicit[table] = _place_given(
                table, replica, topology, taken, shared if replica.shared else {}, source
            )
    kinds = dict.fromkeys(gpu.kind for gpu in topology.gpus)
    free_by_kind = {kind: _FreeGpus(topology, kind, taken) for kind in kinds}
    lists: list[list[int]] = []
    for table, replica in enumerate(replicas):
        key = f"replicas.{table}"
        if replica.shared and table not in explicit:
            raise InputError(source, None, f"{key}.shared", "needs `gpus`: which may be shared?")
        if table in explicit:
            lists.extend(explicit[table])
            continue
        for position in range(replica.count):
            gpus = _place_free(replica, free_by_kind)
            if gpus is None:
                raise InputError(source, None, key, _shortage(replica, position, topology, taken))
            for gpu in gpus:
                taken[gpu] = key
            lists.append(gpus)
    return lists


def _place_given(
    table: int,
    replica: ReplicaTable,
    topology: Topology,
    taken: dict[int, str],
    shared: dict[int, str],
    source: str,
) -> list[list[int]]:
    """`shared`: GPUs of other tables that may be taken once more."""
    key = f"replicas.{table}.gpus"

    def refuse(problem: str) -> InputError:
        return InputError(source, None, key, problem)

    size = replica.tensor_parallel * replica.pipeline_parallel
    if len(replica.gpus) != size * replica.count:
        raise refuse(
            f"{len(replica.gpus)} GPUs given, {size * replica.count} needed "
            f"({replica.count} replicas of {size})"
        )
    for gpu in replica.gpus:
        if not 0 <= gpu < len(topology.gpus):
            raise refuse(f"no GPU {gpu}: the nodes have GPUs 0 to {len(topology.gpus) - 1}")
        if gpu in taken and (gpu not in shared or shared[gpu] == key):
            raise refuse(f"GPU {gpu} is already taken by {taken[gpu]}")
        if replica.gpu and topology.gpus[gpu].kind != replica.gpu:
            raise refuse(f"GPU {gpu} is a {topology.gpus[gpu].kind}, not a {replica.gpu}")
        taken[gpu] = key
        if replica.shared:
            shared[gpu] = key
    groups = [replica.gpus[start : start + size] for start in range(0, len(replica.gpus), size)]
    for group in groups:
        kinds = list(dict.fromkeys(topology.gpus[gpu].kind for gpu in group))
        if len(kinds) > 1:
            raise refuse(f"one replica on GPUs of different kinds: {', '.join(kinds)}")
    return [list(group) for group in groups]


class _Group:
    """GPUs that are near each other: a machine, an NVLink domain, or what is in both."""

    __slots__ = ("free_count", "gpus", "passed")

    def __init__(self) -> None:
        self.gpus: list[int] = []
        """Ascending."""
        self.free_count = 0
        self.passed = 0
        """None of so many GPUs at the front is free."""


class _FreeGpus:
    """Free GPUs of one kind and the groups that they are in. What is taken is never given back.

    The groups are asked in the order of their first free GPU, which a heap keeps for each size:
    placing all replicas of a cluster costs so much for each GPU, however many there are.
    """

    def __init__(self, topology: Topology, kind: str, taken: Mapping[int, str]) -> None:
        # Machine and domain differ either way round: a domain may span machines or split one.
        near: dict[tuple[int, int], _Group] = {}
        domains: dict[int, _Group] = {}
        machines: dict[int, _Group] = {}
        self._groups_of: dict[int, list[_Group]] = {}
        self._all = _Group()
        for gpu in topology.gpus:
            if gpu.kind != kind or gpu.index in taken:
                continue
            groups = [
                self._all,
                near.setdefault((gpu.machine, gpu.nvlink_domain), _Group()),
                machines.setdefault(gpu.machine, _Group()),
            ]
            if gpu.nvlink_out >= 0:
                groups.append(domains.setdefault(gpu.nvlink_domain, _Group()))
            self._groups_of[gpu.index] = groups
            for group in groups:
                group.gpus.append(gpu.index)
                group.free_count += 1
        self._families = [list(family.values()) for family in (near, domains, machines)]
        self._heaps: dict[int, list[list[tuple[int, int]]]] = {}

    @property
    def count(self) -> int:
        """How many are free."""
        return self._all.free_count

    def take(self, gpus: Sequence[int]) -> None:
        """These are free no more."""
        for gpu in gpus:
            for group in self._groups_of.pop(gpu):
                group.free_count -= 1

    def together(self, size: int) -> list[int] | None:
        """The first `size` in one NVLink domain and machine, else domain, else machine."""
        heaps = self._heaps.get(size)
        if heaps is None:
            heaps = self._heaps[size] = [
                [(group.gpus[0], place) for place, group in enumerate(family)]
                for family in self._families
            ]
            for heap in heaps:
                heapify(heap)
        for heap, family in zip(heaps, self._families, strict=True):
            while heap:
                first, place = heap[0]
                group = family[place]
                if group.free_count < size:
                    heappop(heap)
                    continue
                now_first = self._first(group, 1)[0]
                if now_first == first:
                    return self._first(group, size)
                heapreplace(heap, (now_first, place))
        return None

    def first(self, size: int) -> list[int]:
        """The first `size`, wherever they are."""
        return self._first(self._all, size)

    def _first(self, group: _Group, size: int) -> list[int]:
        gpus, groups_of = group.gpus, self._groups_of
        while gpus[group.passed] not in groups_of:
            group.passed += 1
        free = (gpus[i] for i in range(group.passed, len(gpus)) if gpus[i] in groups_of)
        return list(islice(free, size))


def _place_free(replica: ReplicaTable, free_by_kind: Mapping[str, _FreeGpus]) -> list[int] | None:
    """Take the first free GPUs that suit, by kind in order of appearance; None = none."""
    size = replica.tensor_parallel * replica.pipeline_parallel
    for kind, free in free_by_kind.items():
        if (replica.gpu and kind != replica.gpu) or free.count < size:
            continue
        gpus = free.together(size)
        if gpus is not None:
            free.take(gpus)
            return gpus
        gpus = []
        for _ in range(replica.pipeline_parallel):
            group = free.together(replica.tensor_parallel)
            if group is None:
                group = free.first(replica.tensor_parallel)
            free.take(group)
            gpus.extend(group)
        return gpus
    return None


def _shortage(
    replica: ReplicaTable, position: int, topology: Topology, taken: dict[int, str]
) -> str:
    size = replica.tensor_parallel * replica.pipeline_parallel
    kinds = dict.fromkeys(gpu.kind for gpu in topology.gpus)
    if replica.gpu and replica.gpu not in kinds:
        return f"no node has a GPU {replica.gpu!r}; there are {', '.join(kinds)}"
    free = sum(gpu.index not in taken and replica.gpu in ("", gpu.kind) for gpu in topology.gpus)
    what = f"{replica.gpu} GPUs" if replica.gpu else "GPUs of one kind"
    return (
        f"not enough GPUs: replica {position + 1} of {replica.count} needs {size} {what}, "
        f"{free} of {len(topology.gpus)} are free"
    )


def shard_moves(src: Grid, dst: Grid, size_bytes: int) -> list[tuple[int, int, int]]:
    """(source GPU, destination GPU, bytes) of each piece of a replica's KV or weights.

    Layers are cut evenly over the stages and each layer evenly over the ranks, on either side; a
    piece is what one source holds and one destination needs. Equal shapes: rank i to rank i.
    The bytes add up to `size_bytes` exactly.
    """
    pieces: list[tuple[int, int, int]] = []
    for src_stage, dst_stage, stage_part in _overlaps(src.pipeline_parallel, dst.pipeline_parallel):
        for src_rank, dst_rank, rank_part in _overlaps(src.tensor_parallel, dst.tensor_parallel):
            src_gpu = src.gpus[src_stage * src.tensor_parallel + src_rank]
            dst_gpu = dst.gpus[dst_stage * dst.tensor_parallel + dst_rank]
            pieces.append((src_gpu, dst_gpu, stage_part * rank_part))
    total = sum(part for _, _, part in pieces)
    moves: list[tuple[int, int, int]] = []
    cut = 0
    for src_gpu, dst_gpu, part in pieces:
        # Differences of running floors: no byte is lost to rounding.
        start_bytes = size_bytes * cut // total
        cut += part
        moves.append((src_gpu, dst_gpu, size_bytes * cut // total - start_bytes))
    return moves


def _overlaps(src_count: int, dst_count: int) -> list[tuple[int, int, int]]:
    """(source index, destination index, length) of the common parts of two even cuts."""
    whole = math.lcm(src_count, dst_count)
    src_length, dst_length = whole // src_count, whole // dst_count
    overlaps = []
    for src in range(src_count):
        for dst in range(dst_count):
            length = min((src + 1) * src_length, (dst + 1) * dst_length) - max(
                src * src_length, dst * dst_length
            )
            if length > 0:
                overlaps.append((src, dst, length))
    return overlaps


def shard_paths(
    src: Grid, dst: Grid, size_bytes: int, topology: Topology
) -> list[tuple[LinkPath, int]]:
    """`shard_moves` as the parts of `FlowTable.start_group`."""
    return [
        (topology.path(src_gpu, dst_gpu), part_bytes)
        for src_gpu, dst_gpu, part_bytes in shard_moves(src, dst, size_bytes)
    ]


# --------------------------------------------------------------------------------------------------
# The network as those see it that send something: transfers with an end, nothing of links.


class Transfer(Protocol):
    """Bytes on their way."""

    def cancel(self) -> None:
        """Stop; `on_done` will not be called."""
        ...


class Network(Protocol):
    """The links, as a migration sees them."""

    def send(
        self,
        source: Grid,
        destination: Grid,
        size_bytes: int,
        *,
        kind: str,
        on_done: Callable[[], None],
        overlapped_ns: int = 0,
        pieces: int = 1,
        pair: tuple[int, int] | None = None,
        on_failed: Callable[[str], None] | None = None,
        setup_ns: int = 0,
    ) -> Transfer:
        """Move `size_bytes` in all, GPU by GPU in parallel; `on_done` when the last byte is there.

        Or `on_failed(reason)`, never both; a fault may call `on_done` a second time.

        `overlapped_ns` > 0: the sender produced the data in `pieces` equal parts over so long,
        and sent each as it became ready; only what is left is still to be moved. `pair` names the
        two replicas, for partitions between them. `setup_ns`: what the connector takes besides.
        """
        ...


# --------------------------------------------------------------------------------------------------
# What a fault does to a transfer.


class Fate(msgspec.Struct, frozen=True):
    """What is to befall a transfer."""

    kind: Literal["refused", "silent", "broken", "hang", "late", "twice", "stuck"]
    part: float = 0.0
    """broken: after this part of its bytes."""
    delay_ns: int = 0
    """late, twice: so much later."""
    copies: int = 1
    """twice: further notices, each so much after the one before."""
