"""The actor of a replica: hands events to the machine, and applies its actions.

Owns the machine: no other actor writes to it. Actions (requests that end, KV that leaves, locks,
weights, changes of state) are applied in their order, each carried out before the next; what
reaches the replica meanwhile (a request that its own change of state has set free) is handled at
once, between two handlers, never inside one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

from emu.kernel.clock import NOW, PARK, PRIORITY_WATCHER, Actor, Kernel
from emu.kernel.life import live
from emu.latency.base import BatchShape
from emu.network.ports import Network
from emu.replica import actions as act
from emu.replica.beside import live_beside
from emu.replica.events import (
    INTERRUPT,
    ActivationArrived,
    Asked,
    Event,
    LockGranted,
    Measured,
)
from emu.replica.flight.layered import UNTIL_END_OF_INSTANT
from emu.replica.inbound import reserve
from emu.replica.live_scaling import abandon, take_over
from emu.replica.relay_board import Relayed, SplitBatch
from emu.replica.replica import LOOP, Replica
from emu.replica.states import WAVES, ReplicaState, Writer, move
from emu.request import Request, Status
from emu.scheduling.base import Batch

S = ReplicaState
_END_OF_INSTANT: Final = PRIORITY_WATCHER - 1
_END: Final = act.End
_FREE_CAPACITY: Final = act.FreeCapacity


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


class ReplicaActor(Actor):
    """Mailbox, timer and hands of one replica."""

    def __init__(self, replica: Replica, world: World) -> None:
        super().__init__(world.kernel, replica.name, replica.priority)
        self.replica = replica
        self.world = world
        self.asked: BatchShape | None = None
        """What its last step has asked a backend outside simulated time."""
        replica.attach(self, self.inbox)

    # --- in -----------------------------------------------------------------------------------
    def tell(self, event: Event) -> None:
        """Handle it now; its actions are applied before the sender goes on."""
        replica = self.replica
        if replica.flight.is_joint:
            replica.flight.unroll()
        handler = replica.handlers[event.kind]
        if handler is None:
            raise replica.unexpected(event.kind, event)
        handler(replica, event)
        if replica.out:
            self.perform()
        if replica.look or replica.flight.is_cut:
            self._look_up()

    def reserve(self, requests: list[Any]) -> bool:
        """Reserve blocks for inbound KV, all or nothing: a question, answered now."""
        replica = self.replica
        if replica.flight.is_joint:
            replica.flight.unroll()
        is_reserved = reserve(replica, requests)
        if replica.look or replica.flight.is_cut:
            self._look_up()
        return is_reserved

    def take_over(self, requests: Sequence[Request], first_layer: int) -> Batch:
        """Take a batch that another replica has begun: a question, answered now."""
        return take_over(self.replica, requests, first_layer)

    def abandon(self) -> list[Request]:
        """Forget the batch that it was given; its requests, if they are still there."""
        requests = abandon(self.replica)
        if self.replica.look:
            self._look_up()
        return requests

    def look(self) -> None:
        """Something that the replica looks at has changed."""
        self.kernel.wake(self)

    def arm(self, at_ns: int) -> None:
        """Its next step is at that time, unless it is in one."""
        if not (self.is_stepping or self.is_ready):
            self.kernel.arm(self, at_ns)

    def align(self, now_ns: int) -> int:
        """When the replica looks at what comes now."""
        replica = self.replica
        flight = replica.flight
        if not flight.is_open:
            return flight.align(now_ns)
        return NOW if replica.paused_ns < 0 else replica.align(now_ns)

    def describe(self) -> str:
        """One line for the story of a run that cannot go on."""
        return f"{super().describe()}; {self.replica.flight.tells(self.kernel.now_ns)}"

    def _look_up(self) -> None:
        replica, kernel, flight = self.replica, self.kernel, self.replica.flight
        look, is_cut = replica.look, flight.is_cut
        replica.look, flight.is_cut = 0, False
        if self.is_stepping:
            return  # the step looks at everything before it ends
        if is_cut and flight.due_ns < self.due_ns and not self.is_ready:
            kernel.arm(self, flight.due_ns)
        if look == INTERRUPT and flight.due_ns != UNTIL_END_OF_INSTANT:
            kernel.interrupt(self)
        elif look:
            kernel.wake(self)

    def live(self) -> Coroutine[Any, Any, None]:
        """Its life; with a backend outside simulated time one that waits for answers."""
        ends = self.kernel.ends
        return live_beside(self, ends) if self.replica.latency.foreign else live(self, ends)

    def tick(self) -> int:
        """Take the step: until something is in flight, or there is nothing to do."""
        replica = self.replica
        due_ns = replica.go_on()
        while True:
            if replica.out:
                self.perform()
            if due_ns != LOOP:
                break
            due_ns = replica.go_on()
        replica.look, replica.flight.is_cut = 0, False
        if due_ns == UNTIL_END_OF_INSTANT:
            self.kernel.arm(self, self.kernel.now_ns, _END_OF_INSTANT)
            return PARK
        return due_ns

    # --- out ----------------------------------------------------------------------------------
    def perform(self) -> None:
        """Apply the actions of the handler that has just run."""
        replica = self.replica
        out = replica.out
        actions = out[:]
        out.clear()
        world = self.world
        for action in actions:
            kind = type(action)
            if kind is _END:  # the two that every request has need no table
                world.terminal(action.request, action.status, action.reason)  # type: ignore[attr-defined]
            elif kind is _FREE_CAPACITY:
                world.on_capacity(replica)
            else:
                _PERFORM[kind](self, action)

    def _hand_off(self, action: act.HandOff) -> None:
        assert self.replica.outbox is not None
        self.replica.outbox.append(action.requests, action.prefill_ns)

    def _hand_off_first(self, action: act.HandOffFirst) -> None:
        assert self.replica.outbox is not None
        self.replica.outbox.append_first(action.split)

    def _hand_off_second(self, action: act.HandOffSecond) -> None:
        assert self.replica.outbox is not None
        self.replica.outbox.append_second(action.split, action.survivors)

    def _requeue(self, action: act.Requeue) -> None:
        self.world.requeue(action.requests)

    def _lose(self, action: act.Lose) -> None:
        self.world.lost(action.requests, action.reason)

    def _expire_drain(self, action: act.ExpireDrain) -> None:
        self.world.drain_expired(self.replica, action.requests)

    def _forward_cancel(self, action: act.ForwardCancel) -> None:
        if not action.request.status.is_terminal:
            self.world.cancel(action.request)

    def _drain(self, action: act.Drain) -> None:
        self.world.on_draining(self.replica)

    def _reply(self, action: act.Reply) -> None:
        self.world.on_reply(action.asked, action.value)

    def _move(self, action: act.Move) -> None:
        replica, writer = self.replica, action.writer
        if writer == "loop" and replica.state is not action.expected:
            return  # another actor has decided meanwhile
        at_ns = self.kernel.now_ns
        move(replica, action.expected, action.to, writer=writer, cause=action.cause, at_ns=at_ns)
        self.on_moved(action.expected, writer, action.cause)

    def on_moved(self, before: ReplicaState, writer: Writer, cause: str) -> None:
        """The state has changed: accounts of time, the wave, then all that watch."""
        replica, at_ns = self.replica, self.kernel.now_ns
        replica.counters.note_time(before, at_ns)
        replica.note_state()
        if replica.wave is not None and replica.state not in WAVES:
            replica.wave.withdraw(replica.replica_id)
        self.world.on_moved(replica, before, writer, cause, at_ns)
        self.kernel.wake(self)

    def _close_lock(self, action: act.CloseLock) -> None:
        self.replica.gate.close(self._granted)

    def _granted(self) -> None:
        self.tell(LockGranted())

    def _open_lock(self, action: act.OpenLock) -> None:
        if self.replica.gate.open():
            self.world.on_capacity(self.replica)

    def _measure(self, action: act.Measure) -> None:
        self.asked = action.shape

    @property
    def incarnation(self) -> int:
        """Which life of the replica it is."""
        return self.replica.incarnation

    def ask(self) -> Awaitable[int]:
        """Its step is over, and it asks a backend outside simulated time, ns."""
        shape, self.asked = self.asked, None
        self.kernel.goes_out(self)
        asked: Awaitable[int] = self.replica.latency.measure(shape)  # type: ignore[attr-defined]
        return asked

    def answered(self, life: int, cost_ns: int) -> None:
        """The answer to what was asked in this life of the replica."""
        self.kernel.comes_back(self)
        self.tell(Measured(life=life, cost_ns=cost_ns))

    # --- live scaling ---------------------------------------------------------------------------
    def _send_activation(self, action: act.SendActivation) -> None:
        replica = self.replica
        old = self.world.replicas[action.helper_id]
        relayed, life = action.relayed, old.incarnation

        def arrived() -> None:
            assert replica.relaying.board is not None
            replica.relaying.board.arrived(relayed)
            old.actor.tell(ActivationArrived(life=life))

        self.world.network.send(
            replica.grid,
            old.grid,
            action.size_bytes,
            kind="activation",
            on_done=arrived,
            pair=(replica.replica_id, old.replica_id),
            on_failed=lambda reason: self._lose_activation(old, relayed, reason),
        )

    def _lose_activation(self, old: Replica, relayed: Relayed, reason: str) -> None:
        """The activation did not arrive: the batch is computed again from the start."""
        board = self.replica.relaying.board
        if board is None or board.answer(old.replica_id) is not relayed:
            return
        requests = old.actor.abandon()
        if relayed.split is not None:
            self.world.drop_split(relayed.split)
        self.world.lost(requests, reason)

    def _report_relayed(self, action: act.ReportRelayed) -> None:
        old = self.world.replicas[action.helper_id]
        self.world.on_relayed(self.replica, old, action.requests, action.start_layer)

    def _release_helper(self, action: act.ReleaseHelper) -> None:
        assert self.replica.relaying.board is not None
        self.replica.relaying.board.release(self.replica.replica_id)

    def _wake_elder(self, action: act.WakeElder) -> None:
        self.world.replicas[action.replica_id].actor.look()


_PERFORM: Final[Mapping[type[act.Action], Callable[[ReplicaActor, Any], None]]] = {
    act.HandOff: ReplicaActor._hand_off,
    act.HandOffFirst: ReplicaActor._hand_off_first,
    act.HandOffSecond: ReplicaActor._hand_off_second,
    act.Requeue: ReplicaActor._requeue,
    act.Lose: ReplicaActor._lose,
    act.ExpireDrain: ReplicaActor._expire_drain,
    act.ForwardCancel: ReplicaActor._forward_cancel,
    act.Drain: ReplicaActor._drain,
    act.Reply: ReplicaActor._reply,
    act.Move: ReplicaActor._move,
    act.CloseLock: ReplicaActor._close_lock,
    act.OpenLock: ReplicaActor._open_lock,
    act.Measure: ReplicaActor._measure,
    act.SendActivation: ReplicaActor._send_activation,
    act.ReportRelayed: ReplicaActor._report_relayed,
    act.ReleaseHelper: ReplicaActor._release_helper,
    act.WakeElder: ReplicaActor._wake_elder,
}
"""How each action is applied, but for those that `perform` knows."""
