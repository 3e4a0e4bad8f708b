"""What a batch that has been formed still waits for: KV from a lower tier, its group's wave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.batching.base import Batch
from emu.network.carrier import Carried

if TYPE_CHECKING:
    from emu.replica.replica import Replica


class Obstacles:
    """Of one replica, for the batch that it formed last."""

    def __init__(self, replica: Replica) -> None:
        self.held: Batch | None = None
        """Formed, but not on the stages before what it needs is here (several stages)."""
        self.left = 0
        self._replica = replica
        self._recalls: list[Carried] = []

    def meets(self, batch: Batch) -> bool:
        """Begin what the batch needs before it can run. False: it can run at once."""
        replica = self._replica
        tiers, wave = replica.tier_traffic, replica.wave
        recalls = batch.recalls if tiers is not None else []
        self.left = bool(recalls) + (wave is not None)
        if recalls:
            assert tiers is not None
            self._recalls = tiers.recall(recalls, self._pass)
        if wave is not None:
            wave.enter(replica, batch.shape, self._pass)
        return self.left > 0

    def _pass(self) -> None:
        self.left -= 1
        if self.left == 0:
            if self._replica.stages == 1:
                self._replica.inbox.interrupt()
            else:
                self._replica.inbox.poke()

    async def wait(self, incarnation: int) -> None:
        """Until nothing is left, or the replica has crashed."""
        replica = self._replica
        while self.left and replica.incarnation == incarnation:
            await replica.inbox.wait(None, never)
        if replica.is_paused and replica.incarnation == incarnation:
            await replica.stand_still()

    def drop(self) -> None:
        """The batch that waits is lost (the replica crashed)."""
        self.held = None
        self.left = 0
        for recall in self._recalls:
            recall.cancel()
        self._recalls = []
        if self._replica.wave is not None:
            self._replica.wave.withdraw(self._replica)


def never(now_ns: int) -> int:
    """No message wakes who stands still; `Mailbox.interrupt` does."""
    return -1
