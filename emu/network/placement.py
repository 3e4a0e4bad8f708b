"""Which replica is on which GPUs, and how its data is cut for a transfer to another replica.

Owns: placement at the start of a run (`place`), and the pairs of GPUs that talk when KV or weights
go from one replica to another (`shard_moves`). A replica's GPU list is stage by stage, the
tensor-parallel ranks of a stage side by side.

Does not do: anything later than the start; the planner reuses these lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    lists: list[list[int]] = []
    for table, replica in enumerate(replicas):
        key = f"replicas.{table}"
        if replica.shared and table not in explicit:
            raise InputError(source, None, f"{key}.shared", "needs `gpus`: which may be shared?")
        if table in explicit:
            lists.extend(explicit[table])
            continue
        for position in range(replica.count):
            gpus = _place_free(replica, topology, taken)
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


def _place_free(
    replica: ReplicaTable, topology: Topology, taken: dict[int, str]
) -> list[int] | None:
    """The first free GPUs that suit, by kind in order of appearance; None = none."""
    for kind in dict.fromkeys(gpu.kind for gpu in topology.gpus):
        if replica.gpu and kind != replica.gpu:
            continue
        free = [gpu.index for gpu in topology.gpus if gpu.kind == kind and gpu.index not in taken]
        size = replica.tensor_parallel * replica.pipeline_parallel
        if len(free) < size:
            continue
        whole = _together(free, size, topology)
        if whole is not None:
            return whole
        gpus: list[int] = []
        for _ in range(replica.pipeline_parallel):
            group = _together(free, replica.tensor_parallel, topology)
            if group is None:
                group = free[: replica.tensor_parallel]
            free = [gpu for gpu in free if gpu not in group]
            gpus.extend(group)
        return gpus
    return None


def _together(free: Sequence[int], size: int, topology: Topology) -> list[int] | None:
    """The first `size` free GPUs in one NVLink domain and machine, else domain, else machine."""
    gpus = topology.gpus
    # Machine and domain differ either way round: a domain may span machines or split one.
    near: dict[tuple[int, int], list[int]] = {}
    domains: dict[int, list[int]] = {}
    machines: dict[int, list[int]] = {}
    for index in free:
        gpu = gpus[index]
        near.setdefault((gpu.machine, gpu.nvlink_domain), []).append(index)
        machines.setdefault(gpu.machine, []).append(index)
        if gpu.nvlink_out >= 0:
            domains.setdefault(gpu.nvlink_domain, []).append(index)
    for groups in (near.values(), domains.values(), machines.values()):
        for group in groups:
            if len(group) >= size:
                return group[:size]
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
