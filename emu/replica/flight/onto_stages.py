"""A pipeline's launcher: a batch goes onto the stages when it has all that it needs."""

from __future__ import annotations

from typing import final

from emu.replica.actions import Measure
from emu.replica.flight.base import Flight
from emu.replica.flight.measured import Measured
from emu.replica.flight.staged import Staged
from emu.replica.ports import GroupWave, ReplicaActorPort
from emu.replica.prerequisites import Prerequisites
from emu.replica.tier_traffic import TierTraffic
from emu.scheduling.base import Batch


@final
class OntoStages:
    """The batch goes onto the stages of the pipeline, when it has all that it needs."""

    staged: Staged
    tiers: TierTraffic | None
    group: GroupWave | None
    actor: ReplicaActorPort
    life: int

    __slots__ = ("actor", "group", "life", "staged", "tiers")

    def __init__(
        self,
        staged: Staged,
        tiers: TierTraffic | None,
        group: GroupWave | None,
        actor: ReplicaActorPort,
        life: int,
    ) -> None:
        self.staged = staged
        self.tiers = tiers
        self.group = group
        self.actor = actor
        self.life = life

    def launch(self, batch: Batch, start_ns: int, waited_ns: int) -> Flight:
        """Put the batch onto the stages; if it lacks something, hold it."""
        staged = self.staged
        if staged.held is not batch:
            needs = Prerequisites(staged.books.replica_id)
            staged.hold(batch, needs)
            if needs.start(batch, self.tiers, self.group, self.actor, self.life):
                return staged
        if not staged.books.pace.latency.foreign:
            return staged.launch()
        staged.books.out.append(Measure(batch.shape))

        def begin(cost_ns: int) -> Flight:
            return staged.launch()

        return Measured(staged.books, begin, staged)
