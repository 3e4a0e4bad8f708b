"""What a batch that has been formed still waits for: KV from a lower tier, its group's wave.

Starts what it waits for through two ports, the tiers and the wave; they answer with
`PrerequisiteMet`.
"""

from __future__ import annotations

from emu.network.carrier import Carried
from emu.replica.events import PrerequisiteMet
from emu.replica.ports import GroupWave, ReplicaActorPort
from emu.replica.tier_traffic import TierTraffic
from emu.scheduling.base import Batch, Recall, add_chunk


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
