"""The replicas of one served model, and what they share; the whole cluster if there is one model.

Owns the queue of prompts, the relay of live scaling, the list of receivers and of watchers that
wait for one, and the control loops of the model (rejecter, planner). It is the world that watchers
and the planner see: another model's replicas are not in it, its GPUs and links are (`sharing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from emu.kernel.clock import Kernel
from emu.migration.watcher import Watcher
from emu.replica.relay_board import RelayBoard
from emu.replica.replica import Replica
from emu.replica.states import RECEIVING
from emu.scheduling.fcfs import PrefillQueue

if TYPE_CHECKING:
    from emu.autoscale.kv_reject import KvRejecter
    from emu.autoscale.scaler import Scaler
    from emu.cluster.cluster import Cluster


class ModelPool:
    """Implements `MigrationWorld` and `ScalerWorld` for one model."""

    rejecter: KvRejecter | None = None
    scaler: Scaler

    def __init__(
        self, cluster: Cluster, index: int, name: str, *, queue: PrefillQueue | None
    ) -> None:
        self.index = index
        self.name = name
        self.cluster = cluster
        self.kernel: Kernel = cluster.kernel
        self.queue = queue
        self.members: list[Replica] = []
        """Its replicas, ascending id."""
        self.relay = RelayBoard(lambda one: self.replicas[one].actor.look(), cluster.next_batch_id)
        self.scarce_decode = False
        self.replicas = cluster.replicas
        """All replicas of the cluster, by id."""
        self.network = cluster.network
        # What the cluster answers for all models; bound once, because watchers ask often.
        self.next_batch_id = cluster.next_batch_id
        self.refuses = cluster.refuses
        self.terminal = cluster.terminal
        self.on_capacity = cluster.on_capacity
        self.on_transfer = cluster.on_transfer
        self.lost = cluster.lost
        self.stuck: dict[int, Watcher] = {}
        """Those that wait for a destination, by source."""
        self._receivers: list[Replica] | None = None
        """Replicas that may receive KV; None = to be found again."""

    @property
    def is_only(self) -> bool:
        """The cluster serves no other model."""
        return len(self.cluster.pools) == 1

    @property
    def tokens_in_migration(self) -> int:
        """Prompt tokens whose KV waits for a migration or is under way."""
        watchers = self.cluster.watchers
        return sum(
            watchers[r.replica_id].outbound.tokens for r in self.members if r.replica_id in watchers
        )

    # --- changes ------------------------------------------------------------------------------
    def replica_moved(self) -> None:
        """A replica has changed its state."""
        self._receivers = None

    def poke(self) -> None:
        """Blocks or a lock are free: watchers that wait for a destination look again."""
        for source_id in sorted(self.stuck):  # the order of getting stuck must not matter
            self.stuck[source_id].look()

    # --- ScalerWorld --------------------------------------------------------------------------
    def waiting(self) -> tuple[int, int, int]:
        """Requests and prompt tokens that no replica has begun, and requests in the system."""
        gateway = self.cluster.gateway
        held = [r for r in gateway.held if self.is_only or r.model == self.index]
        requests, tokens = len(held), sum(r.prompt_tokens for r in held)
        if self.queue is not None:
            requests += len(self.queue)
            tokens += self.queue.waiting_prefill_tokens
        else:
            for replica in self.members:
                requests += replica.scheduler.waiting_count
                tokens += replica.scheduler.waiting_tokens
        outstanding = gateway.outstanding
        if not self.is_only:
            outstanding = gateway.dispatches[self.index].outstanding
        return requests, tokens, outstanding

    def is_placeable(self, replica: Replica) -> bool:
        """No replica of another model is on its GPUs."""
        return self.cluster.sharing.is_free(replica)

    @property
    def placements(self) -> int:
        """Changes whenever GPUs that models share are taken or given back."""
        return self.cluster.sharing.version

    def wants_room(self, replicas: int) -> None:
        """So many replicas find no GPUs: other models give up spares and what they can spare."""
        self.cluster.sharing.make_room(self, replicas)

    def note(self, kind: str, target: str, text: str) -> None:
        """A line in the run's timeline."""
        self.cluster.note(kind, target if self.is_only else target or self.name, text)

    def give_up(self, replica: Replica) -> None:
        """A live load has failed: KV that waits there, and batches handed over, are lost."""
        self.cluster.recovery.give_up(replica)

    # --- MigrationWorld -----------------------------------------------------------------------
    def receivers(self) -> Sequence[Replica]:
        """Replicas whose state lets them receive KV, ascending id."""
        if self._receivers is None:
            self._receivers = [r for r in self.members if r.state in RECEIVING]
        return self._receivers

    @property
    def watchers(self) -> Mapping[int, Watcher]:
        """Those of all replicas with outbound KV, by the replica's id."""
        return self.cluster.watchers

    def searched(self, *, is_found: bool) -> None:
        """Without a destination, idle decode replicas are not to be dropped now."""
        self.scarce_decode = not is_found

    def set_stuck(self, source_id: int, *, is_stuck: bool) -> None:
        """Keep the list of watchers that wait for a destination."""
        if is_stuck:
            self.stuck[source_id] = self.cluster.watchers[source_id]
        else:
            self.stuck.pop(source_id, None)
