"""What the actions of a replica do: its actor applies them with these, in their order.

Each function takes the replica, the world around it and one action; none reads the actor. What
reaches a replica because of an action goes through its actor like any other message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from emu.kernel.clock import Kernel
from emu.network.ports import Network
from emu.replica import actions as act
from emu.replica.events import ActivationArrived, Asked, LockGranted
from emu.replica.relay_board import Relayed
from emu.replica.replica import Replica
from emu.replica.split_batch import SplitBatch
from emu.replica.states import WAVES, ReplicaState, Writer, move
from emu.request import Request, Status


class World(Protocol):
    """The cluster, as the actor of a replica sees it: receivers of its actions."""

    kernel: Kernel

    @property
    def network(self) -> Network:
        """The links."""
        ...

    @property
    def replicas(self) -> Sequence[Replica]:
        """All of them, by id."""
        ...

    def terminal(self, request: Request, status: Status, reason: str = "") -> None:
        """The request's one terminal event."""
        ...

    def lost(self, requests: Sequence[Request], reason: str) -> None:
        """The KV of these requests is gone: they start again elsewhere, or fail."""
        ...

    def drop_split(self, split: SplitBatch) -> None:
        """A replica that was to receive or compute a part of the batch has lost it."""
        ...

    def drain_expired(self, replica: Replica, requests: list[Request]) -> None:
        """A draining replica's time is over: what it held, and its outbound KV, is lost."""
        ...

    def requeue(self, requests: list[Request]) -> None:
        """Waiting requests that this replica will not serve go back to the router."""
        ...

    def on_relayed(
        self, source: Replica, old: Replica, requests: list[Request], start_layer: int
    ) -> None:
        """A batch was handed to a helper after `start_layer` layers."""
        ...

    def on_capacity(self, replica: Replica) -> None:
        """Blocks or the lock of a replica have become free (watchers may be waiting)."""
        ...

    def on_draining(self, replica: Replica) -> None:
        """A shutting decode replica has work left (it may be moved instead of waited for)."""
        ...

    def on_reply(self, asked: Asked, value: int) -> None:
        """A replica answers what was asked: the owner of the question hears it now."""
        ...

    def cancel(self, request: Request) -> None:
        """The client has left, at whatever stage the request is."""
        ...

    def on_moved(
        self, replica: Replica, before: ReplicaState, writer: Writer, cause: str, at_ns: int
    ) -> None:
        """A replica changed its state."""
        ...


def hand_off(replica: Replica, world: World, action: act.HandOff) -> None:
    """KV of prompts that have ended leaves."""
    assert replica.outbox is not None
    replica.outbox.append(action.requests, action.prefill_ns)


def hand_off_first(replica: Replica, world: World, action: act.HandOffFirst) -> None:
    """KV of a batch's first layers leaves."""
    assert replica.outbox is not None
    replica.outbox.append_first(action.split)


def hand_off_second(replica: Replica, world: World, action: act.HandOffSecond) -> None:
    """KV of a batch's other layers leaves."""
    assert replica.outbox is not None
    replica.outbox.append_second(action.split, action.survivors)


def requeue(replica: Replica, world: World, action: act.Requeue) -> None:
    """Requests go back to the router."""
    world.requeue(action.requests)


def lose(replica: Replica, world: World, action: act.Lose) -> None:
    """The KV of requests is gone."""
    world.lost(action.requests, action.reason)


def expire_drain(replica: Replica, world: World, action: act.ExpireDrain) -> None:
    """The time to drain is over."""
    world.drain_expired(replica, action.requests)


def forward_cancel(replica: Replica, world: World, action: act.ForwardCancel) -> None:
    """A cancellation follows a request that has moved on."""
    if not action.request.status.is_terminal:
        world.cancel(action.request)


def drain(replica: Replica, world: World, action: act.Drain) -> None:
    """What is left here may be moved."""
    world.on_draining(replica)


def reply(replica: Replica, world: World, action: act.Reply) -> None:
    """The owner of a question hears the answer."""
    world.on_reply(action.asked, action.value)


def change_state(replica: Replica, world: World, action: act.Move) -> None:
    """The state changes, unless another actor has decided meanwhile."""
    writer, before = action.writer, action.expected
    if writer == "loop" and replica.state is not before:
        return
    at_ns = world.kernel.now_ns
    move(replica, before, action.to, writer=writer, cause=action.cause, at_ns=at_ns)
    replica.counters.note_time(before, at_ns)
    replica.note_state()
    if replica.wave is not None and replica.state not in WAVES:
        replica.wave.withdraw(replica.replica_id)
    world.on_moved(replica, before, writer, action.cause, at_ns)
    replica.actor.look()


def close_lock(replica: Replica, world: World, action: act.CloseLock) -> None:
    """The replica's own lock is asked for."""
    replica.gate.close(lambda: replica.actor.tell(LockGranted()))


def open_lock(replica: Replica, world: World, action: act.OpenLock) -> None:
    """The replica's own lock is given back."""
    if replica.gate.open():
        world.on_capacity(replica)


def send_activation(replica: Replica, world: World, action: act.SendActivation) -> None:
    """A batch in the middle of its layers goes to a helper."""
    old = world.replicas[action.helper_id]
    relayed, life = action.relayed, old.incarnation

    def arrived() -> None:
        assert replica.relaying.board is not None
        replica.relaying.board.arrived(relayed)
        old.actor.tell(ActivationArrived(life=life))

    world.network.send(
        replica.grid,
        old.grid,
        action.size_bytes,
        kind="activation",
        on_done=arrived,
        pair=(replica.replica_id, old.replica_id),
        on_failed=lambda reason: lose_activation(replica, world, old, relayed, reason),
    )


def lose_activation(
    replica: Replica, world: World, old: Replica, relayed: Relayed, reason: str
) -> None:
    """The activation did not arrive: the batch is computed again from the start."""
    board = replica.relaying.board
    if board is None or board.answer(old.replica_id) is not relayed:
        return
    requests = old.actor.abandon()
    if relayed.split is not None:
        world.drop_split(relayed.split)
    world.lost(requests, reason)


def report_relayed(replica: Replica, world: World, action: act.ReportRelayed) -> None:
    """A batch was handed to a helper."""
    world.on_relayed(replica, world.replicas[action.helper_id], action.requests, action.start_layer)


def release_helper(replica: Replica, world: World, action: act.ReleaseHelper) -> None:
    """A helper may help others."""
    assert replica.relaying.board is not None
    replica.relaying.board.release(replica.replica_id)


def wake_elder(replica: Replica, world: World, action: act.WakeElder) -> None:
    """Another replica looks at what has been handed over."""
    world.replicas[action.replica_id].actor.look()


Effect = Callable[[Replica, World, Any], None]
EFFECTS: Final[Mapping[type[act.Action], Effect]] = {
    act.HandOff: hand_off,
    act.HandOffFirst: hand_off_first,
    act.HandOffSecond: hand_off_second,
    act.Requeue: requeue,
    act.Lose: lose,
    act.ExpireDrain: expire_drain,
    act.ForwardCancel: forward_cancel,
    act.Drain: drain,
    act.Reply: reply,
    act.Move: change_state,
    act.CloseLock: close_lock,
    act.OpenLock: open_lock,
    act.SendActivation: send_activation,
    act.ReportRelayed: report_relayed,
    act.ReleaseHelper: release_helper,
    act.WakeElder: wake_elder,
}
"""How each action is applied, but for those that the actor knows (`ReplicaActor.perform`)."""
