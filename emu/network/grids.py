"""The GPUs of a replica as a grid, and how its data is cut for a transfer to another one.

Owns the pairs of GPUs that talk when KV or weights go from one replica to another (`shard_shares`).
A replica's GPU list is stage by stage, the tensor-parallel ranks of a stage side by side.
"""

from __future__ import annotations

import math

import msgspec

from emu.network.topology import LinkPath, Topology
from emu.units import cut_by


class Grid(msgspec.Struct, frozen=True):
    """The GPUs of a replica in their order, and its tensor-parallel degree."""

    gpus: tuple[int, ...]
    tensor_parallel: int

    @property
    def pipeline_parallel(self) -> int:
        """Number of stages."""
        return len(self.gpus) // self.tensor_parallel


def shard_shares(src: Grid, dst: Grid) -> list[tuple[int, int, int]]:
    """(source GPU, destination GPU, share) of each piece of a replica's KV or weights.

    Layers are cut evenly over the stages and each layer evenly over the ranks, on either side; a
    piece is what one source holds and one destination needs. Equal shapes: rank i to rank i.
    Shares are whole numbers; `cut_by` makes bytes of them.
    """
    return [
        (
            src.gpus[src_stage * src.tensor_parallel + src_rank],
            dst.gpus[dst_stage * dst.tensor_parallel + dst_rank],
            stage_part * rank_part,
        )
        for src_stage, dst_stage, stage_part in _overlaps(
            src.pipeline_parallel, dst.pipeline_parallel
        )
        for src_rank, dst_rank, rank_part in _overlaps(src.tensor_parallel, dst.tensor_parallel)
    ]


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
    """The pieces of a transfer as the parts of `FlowTable.start_group`."""
    pieces = shard_shares(src, dst)
    sizes = cut_by([share for _, _, share in pieces], size_bytes)
    return [
        (topology.path(src_gpu, dst_gpu), part_bytes)
        for (src_gpu, dst_gpu, _), part_bytes in zip(pieces, sizes, strict=True)
    ]
