"""What a batch that has been formed still waits for: KV from a lower tier, its group's wave.

Starts what it waits for through two ports, the tiers and the wave; they answer with
`PrerequisiteMet`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emu.kv.blocks import BlockPool
from emu.network.carrier import Carried, Carrier
from emu.replica.events import PrerequisiteMet
from emu.replica.ports import GroupWave, ReplicaActorPort
from emu.scheduling.base import Batch, Recall, add_chunk

# --------------------------------------------------------------------------------------------------
# KV on its way between a replica's GPUs and the tiers behind them.
#
# Owns: which links a tier is reached over, and the flows for recalls (a batch waits for them) and
# write-through (in the background). Every GPU moves its own part of the KV, in parallel. What is
# in a tier is `emu/kv/tiers.py`; the replica waits for a recall.
#
# A write starts with the iteration that completes the chunk: engines copy it layer by layer while
# they compute. Leaps end before such iterations, so both start at the same instant in a stepped
# run.


READ = "kv_recall"
WRITE = "kv_offload"
"""Kinds of the flows, as in `bytes_moved` of the summary."""


class TierTraffic:
    """The flows of one replica."""

    def __init__(
        self, carrier: Carrier, gpus: Sequence[int], kinds: Sequence[str], pool: BlockPool
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
        return self._carrier.carry(parts, kind=kind, on_done=on_done, latency_ns=latency_ns)


def _nothing() -> None:
    """No request waits for a write."""


# --------------------------------------------------------------------------------------------------
# What a batch waits for


class Prerequisites:
    """Prerequisites of a batch of one replica."""

    def __init__(self, replica_id: int) -> None:
        self.left = 0
        self._replica_id = replica_id
        self._tiers: TierTraffic | None = None
        self._batch: Batch | None = None
        self._recalls: dict[int, tuple[Carried, int]] = {}
        """By tier: the flow, and how often the tier had lost everything when it began."""

    def start(
        self,
        batch: Batch,
        tiers: TierTraffic | None,
        wave: GroupWave | None,
        actor: ReplicaActorPort,
        life: int,
        steps: int = 0,
    ) -> bool:
        """Start what the batch needs before it can run. False: it can run at once.

        `steps`: for so many waves its like is certain (0 = for its steps).
        """
        self._tiers = tiers
        recalls = batch.recalls if tiers is not None else []
        self.left = int(wave is not None)
        if recalls:
            assert tiers is not None
            flows = tiers.recall(recalls, lambda: actor.tell(PrerequisiteMet(life=life)))
            self.left += len(flows)
            self._batch = batch
            self._recalls = {tier: (flow, tiers.losses(tier)) for tier, flow in flows.items()}
        if wave is not None:
            wave.enter(
                self._replica_id,
                batch.shape,
                lambda wait_ns: actor.tell(PrerequisiteMet(life=life, wait_ns=wait_ns)),
                steps or batch.max_steps,
            )
        return self.left > 0

    def drop(self) -> None:
        """The batch that waits is lost (the replica crashed); its group is told by the replica."""
        self.left = 0
        for flow, _ in self._recalls.values():
            flow.cancel()
        self._recalls = {}

    def lose_recalls(self, tier: int) -> int:
        """A tier has lost everything: what was on its way is computed in the batch that waits.

        Returns the tokens. They count as recomputed, no longer as found.
        """
        flow, _ = self._recalls.get(tier, (None, 0))
        batch = self._batch
        if flow is None or flow.is_over or batch is None:
            return 0
        flow.cancel()
        tokens = 0
        for recall in batch.recalls:
            if recall.tier == tier:
                _compute_instead(batch, recall)
                tokens += recall.tokens
        self.left -= 1
        return tokens

    def stale_recalls(self) -> list[int]:
        """Tiers from which KV is still read that they have lost: there must be none."""
        tiers = self._tiers
        return [
            tier
            for tier, (flow, losses) in self._recalls.items()
            if not flow.is_over and tiers is not None and tiers.losses(tier) != losses
        ]


def _compute_instead(batch: Batch, recall: Recall) -> None:
    """The member's new tokens begin where the KV is lost."""
    request, lost, shape = recall.request, recall.tokens, batch.shape
    chunk = next(chunk for chunk in batch.chunks if chunk.request is request)
    new, had = chunk.new_tokens, chunk.context_tokens
    if new == 1:  # it was counted as a decode
        shape.decode_count -= 1
        shape.decode_context_sum -= had
        if not shape.decode_count:
            shape.decode_context_max = shape.decode_context_min = 0
    else:
        pairs = zip(shape.prefill_new, shape.prefill_context, strict=True)
        at = list(pairs).index((new, had))
        del shape.prefill_new[at], shape.prefill_context[at]
    add_chunk(shape, new + lost, had - lost)
    chunk.new_tokens, chunk.context_tokens = new + lost, had - lost
    request.recomputed_tokens += lost
    if request.first_scheduled_ns == batch.formed_ns:
        request.prefix_hit_tokens -= lost
        request.storage_hit_tokens -= lost
