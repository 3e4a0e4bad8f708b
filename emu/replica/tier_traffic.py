"""KV on its way between a replica's GPUs and the tiers behind them.

Owns: which links a tier is reached over, and the flows for recalls (a batch waits for them) and
write-through (in the background). Every GPU moves its own part of the KV, in parallel. What is
in a tier is `emu/kv/tiers.py`; the replica waits for a recall.

A write starts with the iteration that completes the chunk: engines copy it layer by layer while
they compute. Leaps end before such iterations, so both start at the same instant in a stepped
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emu.kv.blocks import BlockPool
from emu.kv.grouped import GroupedPool
from emu.network.carrier import Carried, Carrier
from emu.network.flows import TransferSpec
from emu.scheduling.base import Recall

READ = "kv_recall"
WRITE = "kv_offload"
"""Kinds of the flows, as in `bytes_moved` of the summary."""


class TierTraffic:
    """The flows of one replica."""

    def __init__(
        self,
        carrier: Carrier,
        gpus: Sequence[int],
        kinds: Sequence[str],
        pool: BlockPool | GroupedPool,
    ) -> None:
        """`kinds` names the tiers of the pool, nearest first: `cpu` or `cxl`."""
        topology = carrier.topology
        self._carrier = carrier
        self._pool = pool
        self._reads = []
        self._writes = []
        for kind in kinds:
            read = topology.host_to_gpu_path if kind == "cpu" else topology.cxl_to_gpu_path
            write = topology.gpu_to_host_path if kind == "cpu" else topology.gpu_to_cxl_path
            self._reads.append([read(gpu) for gpu in gpus])
            self._writes.append([write(gpu) for gpu in gpus])

    def recall(self, recalls: Sequence[Recall], on_done: Callable[[], None]) -> dict[int, Carried]:
        """Bring KV up; the flows by tier. `on_done` is called as often, when each is there."""
        by_tier: dict[int, int] = {}
        for tier, size_bytes, _, _ in recalls:
            by_tier[tier] = by_tier.get(tier, 0) + size_bytes
        return {
            tier: self._move(self._reads[tier], size_bytes, READ, on_done)
            for tier, size_bytes in by_tier.items()
        }

    def losses(self, tier: int) -> int:
        """How often the tier has lost everything."""
        return self._pool.tiers[tier].losses

    def write_through(self) -> None:
        """Start the writes that the books have noted since the last call."""
        for tier, size_bytes in enumerate(self._pool.pending_writes):
            if size_bytes:
                self._pool.pending_writes[tier] = 0
                self._move(self._writes[tier], size_bytes, WRITE, _nothing)

    def _move(
        self,
        paths: Sequence[tuple[int, ...]],
        size_bytes: int,
        kind: str,
        on_done: Callable[[], None],
    ) -> Carried:
        each, more = divmod(size_bytes, len(paths))
        parts = [(path, each + (i < more)) for i, path in enumerate(paths)]
        latency_ns = max(self._carrier.topology.latency_ns(path) for path in paths)
        return self._carrier.carry(parts, TransferSpec(kind, latency_ns), on_done)


def _nothing() -> None:
    """No request waits for a write."""
