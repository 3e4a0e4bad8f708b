"""What follows a loss: crash of a replica, requests that start again, restarts, unservable cases.

Owns the order in which the owners of a crashed replica's things hear of it (replica, watchers,
live migrations, relay), so that no block, lock or request is left behind, and the policy of
`[recovery]`: a request whose KV is lost is routed again, with everything that it has received
counted as prompt, or fails with a reason. No token is produced twice.

A replica that is back has no weights: it loads them again (from its machine's memory, or from the
disk if that copy is lost) and returns to its role, unless a planner decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from emu.kernel.priorities import PRIORITY_WORLD
from emu.replica.events import Commanded, Crashed, DrainExpired, Restarted
from emu.replica.states import DRAINING, LOADING, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status
from emu.units import s_to_ns

if TYPE_CHECKING:
    from emu.autoscale.orders import Role
    from emu.faults.ports import FaultWorld
    from emu.faults.rank_loss import RankLoss

S = ReplicaState
_ROLE_OF: Final[dict[ReplicaState, Role]] = {
    S.PREFILL: "prefill",
    S.NEW_PREFILL: "prefill",
    S.REFRACTORY_PREFILL: "prefill",
    S.OLD_PREFILL: "prefill",
    S.AUS_PREFILL: "prefill",
    S.LOADING_PREFILL: "prefill",
    S.DECODE: "decode",
    S.AUS_DECODE: "decode",
    S.MUTATING_TO_DECODE: "decode",
    S.LOADING_DECODE: "decode",
    S.COLOCATED: "colocated",
    S.LOADING_COLOCATED: "colocated",
}
"""The role to which a replica returns; in other states it was leaving or had none."""
_RECEIVES: Final = (S.DECODE, S.SHUTTING_DECODE, S.AUS_DECODE, S.MUTATING_TO_DECODE)
_PROMPTS: Final = (S.COLOCATED, S.PREFILL, S.NEW_PREFILL, S.REFRACTORY_PREFILL, S.AUS_PREFILL)
_NEVER: Final = -2
"""Of a time to come back."""
LOADS_MAX: Final = 3
"""A replica whose weights do not come in so many attempts stays inactive."""


class Recovery:
    """Losses and what is done about them."""

    def __init__(self, cluster: FaultWorld) -> None:
        self.cluster = cluster
        self.table = cluster.config.recovery
        self.crashes = 0
        self.requests_lost = 0
        self.has_lost_capacity = False
        """Some replica or some blocks are gone: requests may be left that no replica can serve."""
        self.cacheless: list[int] = []
        """Machines whose memory has lost the weights."""
        self.gpus_down: Counter[int] = Counter()
        """GPUs that cannot be used, with how many faults say so."""
        self._grounded: dict[int, Callable[[], None]] = {}
        """Replicas that would be back but for a GPU."""
        self._replaced: set[int] = set()
        """Replicas whose role a spare has taken: spares themselves, once they are back."""
        self._role_at_crash: dict[int, Role] = {}
        self._loads: dict[int, int] = {}
        self._retrying: set[int] = set()
        """Replicas whose load was given up, and which load again after a while."""
        self.ranks: RankLoss | None = None
        """Groups that go on without a lost rank; None = none does."""
        if self.table.ep_fault == "mask":
            from emu.faults.rank_loss import RankLoss  # most clusters share no experts

            self.ranks = RankLoss(cluster, self._crash)

    def lose_gpus(self, gpus: Sequence[int]) -> None:
        """These cannot be used before `gpus_back`."""
        self.gpus_down.update(gpus)

    def lose_capacity(self) -> None:
        """Some replica or some blocks are gone: requests may be left that nothing can serve."""
        self.has_lost_capacity = True

    def lose_weights(self, machine: int) -> None:
        """The memory of a machine has lost the weights: the next load there is from the disk."""
        if machine not in self.cacheless:
            self.cacheless.append(machine)

    def crash(
        self, replica: ReplicaHandle, cause: str, *, back_ns: int = -1, is_known: bool = False
    ) -> None:
        """The replica dies now. `back_ns`: it is back after so long (-1: as configured).

        `is_known`: it is given up, so that a group which shares experts has nothing to detect.
        """
        if self.ranks is not None and self.ranks.takes(replica):
            self.ranks.lose(replica, cause, back_ns, is_known=is_known)
            return
        for fellow in self._fellows(replica):
            if fellow is replica or fellow.state not in (S.FAILED, S.INACTIVE):
                self._crash(fellow, cause, back_ns)

    def _fellows(self, replica: ReplicaHandle) -> Sequence[ReplicaHandle]:
        """Replicas that stop and start together: those of a group that shares experts strictly."""
        wave = replica.wave
        if wave is None or not wave.holds_experts:
            return [replica]
        if self.ranks is not None and self.ranks.goes_on_without(replica):
            return [replica]
        return [other for other in self.cluster.replicas if other.wave is wave]

    def _crash(self, replica: ReplicaHandle, cause: str, back_ns: int) -> None:
        """All that knows of it hears that it is dead."""
        from emu.migration.messages import DestinationLost  # 46 classes, for runs with roles

        cluster = self.cluster
        before = replica.state
        assert before is not S.FAILED
        self.crashes += 1
        self.has_lost_capacity = True
        role = _ROLE_OF.get(before)
        if role is not None:
            self._role_at_crash[replica.replica_id] = role
        elif replica.replica_id not in self._retrying:  # else it was about to load for its role
            self._role_at_crash.pop(replica.replica_id, None)
        self._retrying.discard(replica.replica_id)
        lost: list[Request] = []
        replica.actor.tell(Crashed(lost=lost))
        lost += self._lose_relay(replica)
        watcher = cluster.watchers.get(replica.replica_id)
        if watcher is not None:
            lost += watcher.lose_source()
        if cluster.live is not None:
            lost += cluster.live.lose(replica)
        replica.actor.tell(Commanded(to=S.FAILED, writer="fault", cause=cause))
        for other in cluster.watchers.values():
            if other is not watcher:
                other.tell(DestinationLost(replica.replica_id))
        self.lost(lost, "replica_lost")
        self._come_back(replica, back_ns)

    def give_up(self, replica: ReplicaHandle) -> None:
        """Its live load has failed: KV of prompts that are done does not outlive that."""
        lost = self._lose_relay(replica)
        watcher = self.cluster.watchers.get(replica.replica_id)
        if watcher is not None:
            lost += watcher.lose_source()
        self.lost(lost, "kv_lost")

    def _lose_relay(self, replica: ReplicaHandle) -> list[Request]:
        """Hand-overs of live scaling in which the replica took part; requests lost by that."""
        cluster = self.cluster
        board = cluster.relay_of(replica)
        lost: list[Request] = []
        for old in cluster.replicas:
            relayed = board.answer(old.replica_id)
            if relayed is None:
                continue
            split = relayed.split
            is_helper = old is replica
            is_giver = relayed.source_id == replica.replica_id and not relayed.is_here
            if is_helper or is_giver:
                lost += old.actor.abandon()
            if split is None or split.first_id < 0:
                continue
            if is_helper or is_giver or split.destination_id == replica.replica_id:
                from emu.migration.messages import SplitLost

                cluster.watchers[split.first_id].tell(SplitLost(split))
        return lost

    def lost(self, requests: Sequence[Request], reason: str) -> None:
        """The KV of these requests is gone: they start again elsewhere, or fail."""
        gateway, table = self.cluster.gateway, self.table
        for request in requests:
            if request.status.is_terminal:
                continue
            if self.cluster.live is not None:
                self.cluster.live.forget(request)
            has_begun = request.first_scheduled_ns >= 0
            self.requests_lost += has_begun
            self.cluster.recorder.lost(request, reason, self.cluster.kernel.now_ns)
            is_given_up = table.on_crash == "fail" or request.retries >= table.max_retries
            if request.pin >= 0 or (has_begun and is_given_up):  # an outside router tries again
                self.cluster.terminal(request, Status.FAILED, reason)
                continue
            request.start_again(is_retry=has_begun)
            gateway.route(request)

    def _come_back(self, replica: ReplicaHandle, back_ns: int) -> None:
        if back_ns == _NEVER:
            return
        if back_ns < 0:
            if not self.table.replace:
                return
            back_ns = s_to_ns(self.table.restart_s)
        kernel, incarnation = self.cluster.kernel, replica.incarnation
        self._grounded.pop(replica.replica_id, None)

        def back() -> None:
            if replica.incarnation == incarnation and replica.state is S.FAILED:
                if not self._has_gpus(replica):
                    self._grounded[replica.replica_id] = back
                    return
                replica.actor.tell(Restarted(life=incarnation))
                self._loads.pop(replica.replica_id, None)
                self._load(replica)

        kernel.call_at(kernel.now_ns + back_ns, PRIORITY_WORLD, back)

    def _has_gpus(self, replica: ReplicaHandle) -> bool:
        """All of its GPUs can be used, and those of all that start together with it."""
        there = self._fellows(replica)
        return not any(self.gpus_down[gpu] for one in there for gpu in one.gpus)

    def gpus_back(self, gpus: Sequence[int]) -> None:
        """A fault of these GPUs is over: replicas that only waited for that are back."""
        self.gpus_down.subtract(gpus)
        for replica_id in sorted(self._grounded):
            if self._has_gpus(self.cluster.replicas[replica_id]):
                self._grounded.pop(replica_id)()

    def replace_elsewhere(self, replica: ReplicaHandle) -> None:
        """Its GPUs are gone: after `restart_s` a spare of its shape takes its role, if it must.

        Where a planner decides, that is its business; members of a group are not replaced.
        """
        cluster, incarnation = self.cluster, replica.incarnation
        if (
            not self.table.replace
            or cluster.scaler_of(replica).is_active
            or replica.wave is not None
        ):
            return

        def take_over() -> None:
            role = self._role_at_crash.get(replica.replica_id)
            if role is None or replica.incarnation != incarnation or replica.state is not S.FAILED:
                return
            for spare in cluster.replicas:
                if spare.state is S.INACTIVE and spare.replica_id not in self._role_at_crash:
                    is_free = cluster.is_spare(spare) or spare.replica_id in self._replaced
                    if is_free and cluster.are_equal(spare, replica):
                        del self._role_at_crash[replica.replica_id]
                        self._replaced.add(replica.replica_id)
                        self._replaced.discard(spare.replica_id)
                        self._role_at_crash[spare.replica_id] = role
                        self._load(spare)
                        return

        kernel = cluster.kernel
        kernel.call_at(kernel.now_ns + s_to_ns(self.table.restart_s), PRIORITY_WORLD, take_over)

    def _load(self, replica: ReplicaHandle) -> None:
        """Bring the weights back, if no planner does."""
        scaler = self.cluster.scaler_of(replica)
        role = self._role_at_crash.get(replica.replica_id)
        loads = self._loads.get(replica.replica_id, 0)
        if (
            role is None
            or scaler.is_active
            or loads >= LOADS_MAX
            or replica.state is not S.INACTIVE
        ):
            return
        self._loads[replica.replica_id] = loads + 1
        from_disk = replica.machine in self.cacheless
        if from_disk:
            self.cacheless.remove(replica.machine)  # the load fills the memory again
        scaler.restore(replica, role, from_disk=from_disk)

    def on_moved(self, replica: ReplicaHandle, before: ReplicaState) -> None:
        """A load that was given up is tried again, some times; a drain may have an end."""
        if self.ranks is not None:
            self.ranks.on_moved(replica, before)
        if before in LOADING and replica.state is S.INACTIVE:
            kernel, incarnation = self.cluster.kernel, replica.incarnation
            self._retrying.add(replica.replica_id)

            def again() -> None:
                if replica.incarnation == incarnation:
                    self._retrying.discard(replica.replica_id)
                    self._load(replica)

            later_ns = kernel.now_ns + max(1, s_to_ns(self.table.restart_s))
            kernel.call_at(later_ns, PRIORITY_WORLD, again)
        elif self.table.drain_grace_s and replica.state in DRAINING:
            kernel, since_ns = self.cluster.kernel, replica.state_since_ns
            state = replica.state

            def end_of_grace() -> None:
                if replica.state is state and replica.state_since_ns == since_ns:
                    self.expire_drain(replica)

            kernel.call_at(
                kernel.now_ns + s_to_ns(self.table.drain_grace_s), PRIORITY_WORLD, end_of_grace
            )

    def expire_drain(self, replica: ReplicaHandle) -> None:
        """After the iteration in flight, what a draining replica still holds is lost."""
        replica.actor.post(DrainExpired())

    def drain_expired(self, replica: ReplicaHandle, requests: list[Request]) -> None:
        """These were on it; what waits to leave it is lost too."""
        watcher = self.cluster.watchers.get(replica.replica_id)
        if watcher is not None:
            requests = requests + watcher.lose_source()
        self.lost(requests, "drain_expired")

    def fail_unservable(self) -> bool:
        """Nothing is scheduled any more: fail what no replica can ever serve. True if any."""
        if not self.has_lost_capacity:
            return False
        cluster = self.cluster
        unservable: list[Request] = []
        served = {r.model for r in cluster.replicas if r.state in _PROMPTS}
        unservable += cluster.gateway.take_held(served)
        for queue in cluster.queues:
            waiting = [request for request in queue if request.model not in served]
            for request in waiting:
                queue.cancel(request)
            unservable += waiting
        for watcher in cluster.watchers.values():
            heads = [*watcher.outbound.queue][:1]
            wanted = heads[0].requests if heads else []
            firsts = watcher.outbound.firsts
            if not heads and firsts:
                wanted = firsts[0].requests
            others = (r for r in cluster.replicas if r.model == watcher.source.model)
            if wanted and not any(self._could_take(r, wanted) for r in others):
                unservable += watcher.lose_source()
        stuck = self._lose_stuck_groups()
        for request in unservable:
            cluster.terminal(request, Status.FAILED, "no_replica_left")
        return bool(unservable) or stuck

    def _lose_stuck_groups(self) -> bool:
        """Members that wait for experts which will never be back: what they hold is lost."""
        stuck = [
            replica
            for replica in self.cluster.replicas
            if replica.wave is not None
            and replica.wave.lacks_experts()
            and replica.state not in (S.FAILED, S.INACTIVE)
        ]
        for replica in stuck:
            self._crash(replica, "too few experts are left", _NEVER)
        return bool(stuck)

    @staticmethod
    def _could_take(replica: ReplicaHandle, requests: list[Request]) -> bool:
        view = replica.view()
        return replica.state in _RECEIVES and view.blocks_to_reserve(requests) <= view.blocks_total
