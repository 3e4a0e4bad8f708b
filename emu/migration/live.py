"""The actor of live migrations: which decodes move where, and the hands of those that do.

One migration at a time for each source; how one goes is its machine (`live_move.py`). Two users:
draining (a replica that shuts down moves its decodes instead of waiting for them) and rebalancing
(from the fullest to the emptiest replica, off by default).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from emu.config.schema import MigrationTable
from emu.kernel.clock import PARK, Actor, Kernel
from emu.kernel.priorities import PRIORITY_REBALANCER
from emu.migration import live_move as msg
from emu.migration.live_move import LiveMove
from emu.network.ports import Network, Transfer
from emu.policy.own import OwnMigration
from emu.policy.views import ReplicaView
from emu.replica.events import (
    Asked,
    KvDelivered,
    LiveMoves,
    Released,
    StopAsked,
    StopUndone,
    Unreserved,
)
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status
from emu.units import ms_to_ns

S = ReplicaState
RETRY_NS: Final = 10_000_000
"""A source waits so long after a migration that failed."""
MOVES_MAX: Final = 100
"""Rebalancing moves one request so often at most: a circuit breaker, whatever the rule says."""
WAITS_MAX: Final = 8
"""The rule is applied so often again while what could move waits for a token."""


class LiveWorld(Protocol):
    """What live migrations need of the cluster."""

    kernel: Kernel

    @property
    def replicas(self) -> Sequence[ReplicaHandle]:
        """All of them, by id."""
        ...

    @property
    def network(self) -> Network:
        """The links."""
        ...

    def on_capacity(self, replica: ReplicaHandle) -> None:
        """Blocks of a replica have become free."""
        ...

    def on_live_migration(
        self,
        request: Request,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        started_ns: int,
        stop_ns: int,
    ) -> None:
        """A live migration has ended well; the request stood still for `stop_ns`."""
        ...


class Use(NamedTuple):
    """Use of a replica's KV, for the rebalancing rule."""

    replica_id: int
    part: float


def choose_pair(uses: Sequence[Use], gap: float) -> tuple[int, int] | None:
    """(fullest, emptiest) if they differ by more than `gap`; ties to the lowest id."""
    if len(uses) < 2:
        return None
    fullest = max(uses, key=lambda use: (use.part, -use.replica_id))
    emptiest = min(uses, key=lambda use: (use.part, use.replica_id))
    if fullest.part - emptiest.part <= gap:
        return None
    return fullest.replica_id, emptiest.replica_id


def _lowers(request: Request, source: ReplicaHandle, destination: ReplicaHandle) -> bool:
    """True if, with the request over there, the fuller of both is less full than before."""
    one, other = source.view(), destination.view()
    needed = other.blocks_to_reserve([request])
    return (other.blocks_used + needed) / other.blocks_total < one.blocks_used / one.blocks_total


OnChoice = Callable[[Request, ReplicaHandle, ReplicaHandle], None]
"""Told of (request, source, destination) of a move that is to lower the imbalance."""


class ReplicaSide:
    """A replica in the life that it has when a migration is asked for."""

    __slots__ = ("life", "replica")

    def __init__(self, replica: ReplicaHandle) -> None:
        self.replica = replica
        self.life = replica.incarnation

    @property
    def is_alive(self) -> bool:
        """It is in the same life."""
        return self.replica.incarnation == self.life

    @property
    def takes_kv(self) -> bool:
        """Its state lets it decode what arrives."""
        return self.replica.state in (S.DECODE, S.SHUTTING_DECODE)

    def reserve(self, request: Request) -> bool:
        """Blocks for all that the request has reached."""
        return self.replica.actor.reserve([request])

    def tokens_of(self, request: Request) -> int:
        """Tokens of the request whose KV it has, or -1 if the request does not run there."""
        for resident in self.replica.view().residents():
            if resident is request:
                return request.reached_tokens
        return -1


class Moving:
    """A live migration under way: its machine, its two replicas and its transfer."""

    __slots__ = ("destination", "move", "source", "transfer")

    def __init__(self, move: LiveMove, source: ReplicaHandle, destination: ReplicaHandle) -> None:
        self.move = move
        self.source = source
        self.destination = destination
        self.transfer: Transfer | None = None


class LiveMigrator(Actor):
    """Runs live migrations, one at a time for each source; the actor of the rebalancing policy."""

    def __init__(
        self,
        world: LiveWorld,
        table: MigrationTable,
        *,
        block_size: int,
        kv_bytes_per_token: int,
        state_bytes: int = 0,
        own: OwnMigration | None = None,
        see: Callable[[ReplicaHandle], ReplicaView] | None = None,
    ) -> None:
        """`own`: a user's policy instead of the rule; it sees replicas as `see` shows them."""
        super().__init__(world.kernel, "rebalancer", PRIORITY_REBALANCER)
        self.moves: dict[int, Moving] = {}
        """The migration under way, by source."""
        self.finished = 0
        self.given_up = 0
        self._stopping: dict[int, Moving] = {}
        """Migrations whose source is asked to stop the request, by the number of the question."""
        self._questions = 0
        self.world = world
        self.block_size = block_size
        self.token_bytes = kv_bytes_per_token
        self.state_bytes = state_bytes
        self._own = own
        self._see = see
        self._not_before: dict[int, int] = {}
        self._moved: dict[int, tuple[int, int]] = {}
        """Tokens that a request had when it moved last, and how often it has moved, by row."""
        self._table = table
        self._period_ns = ms_to_ns(table.rebalance_period_ms)
        self._has_started = False
        self._waits = 0
        """Periods in a row in which what could move had not got a token yet."""
        self._is_due = False
        """The rule is to be applied when the timer comes."""
        self._on_choice: OnChoice | None = None
        self._effects: dict[type[msg.Action], Callable[[Moving, Any], None]] = {
            msg.CountMove: self._count_move,
            msg.AskStop: self._ask_stop,
            msg.UndoStop: self._undo_stop,
            msg.Release: self._release,
            msg.Unreserve: self._unreserve,
            msg.AskRoom: self._ask_room,
            msg.Send: self._send,
            msg.CancelTransfer: self._cancel_transfer,
            msg.EndSoon: self._end_soon,
            msg.Deliver: self._deliver,
            msg.Leave: self._leave,
            msg.WaitAWhile: self._wait_a_while,
            msg.LookSource: self._look_source,
            msg.Rebalance: self._look_again,
            msg.Finish: self._finish,
        }
        """How each action is applied."""

    def tell_choices(self, on_choice: OnChoice) -> None:
        """Tell of every move that rebalancing begins, with what it saw."""
        self._on_choice = on_choice

    @property
    def moving(self) -> dict[int, Request]:
        """The request on its way, by source."""
        return {source_id: moving.move.request for source_id, moving in self.moves.items()}

    def look(self) -> None:
        """Something that the rebalancing rule reads has changed."""
        if not self._is_due and self._table.rebalance:
            self.kernel.wake(self)

    def tick(self) -> int:
        """After a change, apply the rule at the next multiple of the period."""
        if self._is_due:
            self._waits = self._waits + 1 if self._rebalance() else 0
            if 0 < self._waits <= WAITS_MAX:
                return (self.kernel.now_ns // self._period_ns + 1) * self._period_ns
            self._is_due, self._waits = False, 0
        elif self._has_started:
            self._is_due = True
            return (self.kernel.now_ns // self._period_ns + 1) * self._period_ns
        self._has_started = True
        return PARK

    def _rebalance(self) -> bool:
        """Apply the rule. True if what could move must first get a token where it is."""
        decoding = [r for r in self.world.replicas if r.state is S.DECODE]
        if self._own is not None and self._see is not None:
            found = self._own.choose([self._see(replica) for replica in decoding])
            if found is not None:
                self.start(self.world.replicas[found[0]], self.world.replicas[found[1]], found[2])
            return False
        views = [(r.replica_id, r.view()) for r in decoding]
        uses = [Use(replica_id, view.blocks_used / view.blocks_total) for replica_id, view in views]
        pair = choose_pair(uses, self._table.rebalance_gap)
        if pair is None:
            return False
        source, destination = (self.world.replicas[replica] for replica in pair)
        self.start(source, destination, rebalances=True)
        if source.replica_id in self.moves:
            return False
        residents = source.view().residents()
        tokens = ((r.generated_tokens, self._moved.get(r.row)) for r in residents)
        return any(moved is not None and moved[0] == now for now, moved in tokens)

    def drain(self, source: ReplicaHandle) -> None:
        """Move a decode of a replica that shuts down to the emptiest open one, if there is one."""
        if self._is_waiting(source):
            return
        open_ = [r for r in self.world.replicas if r.state is S.DECODE and r is not source]
        if open_:
            target = min(open_, key=lambda r: (r.view().blocks_used, r.replica_id))
            self.start(source, target)

    def _is_waiting(self, source: ReplicaHandle) -> bool:
        """One is on its way, or was refused a moment ago."""
        now_ns, source_id = self.kernel.now_ns, source.replica_id
        return source_id in self.moves or now_ns < self._not_before.get(source_id, 0)

    def start(
        self,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        request_id: int | None = None,
        *,
        rebalances: bool = False,
    ) -> None:
        """Move the request that was admitted last, or the one of that id, if it decodes there.

        Nothing happens while one is already on its way. It must have got a token since its last
        move. If it `rebalances`, the fuller of the two must be less full after the move than before
        it; what a policy of the user's own names (`request_id`) is the policy's choice.
        """
        if self._is_waiting(source):
            return
        for request in reversed(source.view().residents()):
            if request.generated_tokens == 0 or request_id not in (None, request.request_id):
                continue
            if not self._may_move(request, is_drain=not rebalances and self._own is None):
                continue
            if rebalances and not _lowers(request, source, destination):
                continue
            move = LiveMove(
                request,
                ReplicaSide(source),
                ReplicaSide(destination),
                block_size=self.block_size,
                token_bytes=self.token_bytes,
                state_bytes=self.state_bytes,
            )
            moving = self.moves[source.replica_id] = Moving(move, source, destination)
            if rebalances and self._on_choice is not None:
                self._on_choice(request, source, destination)
            self.kernel.soon(partial(self.tell, moving, msg.Begun()))
            return

    def _may_move(self, request: Request, *, is_drain: bool) -> bool:
        """Moves have brought it tokens, and (a circuit breaker) there were not too many of them."""
        tokens, times = self._moved.get(request.row, (-1, 0))
        if times >= MOVES_MAX and not is_drain:
            return False
        return request.generated_tokens != tokens

    def tell(self, moving: Moving, event: msg.Event) -> None:
        """Handle an event of one migration now, and apply what follows."""
        for action in moving.move.step(event, self.kernel.now_ns):
            self._effects[type(action)](moving, action)

    def answered(self, number: int) -> None:
        """A source has looked at the stop that it was asked for: the request stands still."""
        stopped = partial(self.tell, self._stopping.pop(number), msg.Stopped())
        self.kernel.soon(stopped)

    def forget(self, request: Request) -> None:
        """A request has ended, or starts anew elsewhere: it does not move any more."""
        self._moved.pop(request.row, None)
        for moving in list(self.moves.values()):
            if moving.move.request is request and not moving.move.is_forgotten:
                self.tell(moving, msg.Forgotten())

    def lose(self, replica: ReplicaHandle) -> list[Request]:
        """A replica has crashed: its transfers end; the request that it had stopped to move."""
        for moving in list(self.moves.values()):
            if moving.source is replica or moving.destination is replica:
                self.tell(moving, msg.Cut())
        own = self.moves.pop(replica.replica_id, None)
        if own is None or own.move.request.status is not Status.MIGRATING:
            return []
        return [own.move.request]

    def _count_move(self, moving: Moving, action: msg.CountMove) -> None:
        replica = moving.source if action.is_source else moving.destination
        replica.actor.tell(LiveMoves(change=action.change))
        if action.change < 0:
            self.world.on_capacity(replica)

    def _ask_stop(self, moving: Moving, action: msg.AskStop) -> None:
        asked = Asked("migrator", self._questions)
        self._questions += 1
        self._stopping[asked.number] = moving
        moving.source.actor.post(StopAsked(request=moving.move.request, asked=asked))

    def _undo_stop(self, moving: Moving, action: msg.UndoStop) -> None:
        moving.source.actor.tell(StopUndone(request=moving.move.request))

    def _release(self, moving: Moving, action: msg.Release) -> None:
        moving.source.actor.tell(Released(requests=[moving.move.request]))

    def _unreserve(self, moving: Moving, action: msg.Unreserve) -> None:
        moving.destination.actor.tell(Unreserved(requests=[moving.move.request]))

    def _ask_room(self, moving: Moving, action: msg.AskRoom) -> None:
        self.tell(moving, msg.RoomAsked())

    def _send(self, moving: Moving, action: msg.Send) -> None:
        number, source, destination = action.number, moving.source, moving.destination
        moving.transfer = self.world.network.send(
            source.grid,
            destination.grid,
            action.size_bytes,
            kind="kv",
            on_done=partial(self.tell, moving, msg.Noticed(number, has_arrived=True)),
            pair=(source.replica_id, destination.replica_id),
            on_failed=lambda _: self.tell(moving, msg.Noticed(number, has_arrived=False)),
        )

    def _cancel_transfer(self, moving: Moving, action: msg.CancelTransfer) -> None:
        assert moving.transfer is not None
        moving.transfer.cancel()

    def _end_soon(self, moving: Moving, action: msg.EndSoon) -> None:
        self.kernel.soon(partial(self.tell, moving, msg.TransferEnded()))

    def _deliver(self, moving: Moving, action: msg.Deliver) -> None:
        source, destination, request = moving.source, moving.destination, moving.move.request
        destination.actor.post(KvDelivered(requests=[request]))
        self.world.on_live_migration(
            request, source, destination, action.started_ns, action.stop_ns
        )

    def _leave(self, moving: Moving, action: msg.Leave) -> None:
        if self.moves.get(moving.source.replica_id) is moving:
            del self.moves[moving.source.replica_id]

    def _wait_a_while(self, moving: Moving, action: msg.WaitAWhile) -> None:
        source = moving.source
        later_ns = self._not_before[source.replica_id] = self.kernel.now_ns + RETRY_NS
        self.kernel.call_at(later_ns, PRIORITY_REBALANCER, source.actor.look)

    def _look_source(self, moving: Moving, action: msg.LookSource) -> None:
        if moving.source.stages == 1:
            moving.source.actor.look()

    def _look_again(self, moving: Moving, action: msg.Rebalance) -> None:
        self.look()

    def _finish(self, moving: Moving, action: msg.Finish) -> None:
        self.finished += action.is_done
        self.given_up += not action.is_done
        request = moving.move.request
        if action.is_done and not request.status.is_terminal:
            times = self._moved.get(request.row, (-1, 0))[1] + 1
            self._moved[request.row] = (request.generated_tokens, times)
