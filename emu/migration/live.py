"""Live migration of running decodes: their KV moves while they go on, then a short stop.

As in Llumnix (OSDI'24): the blocks that exist are copied while the request decodes; what it has
produced meanwhile is copied in further, ever shorter rounds; when little is left the request
stops at the end of an iteration, the rest moves, and it goes on at the destination. The handoff
is the same as everywhere: hold, reserve, transfer, activate, release. The stop is part of the
request's `migration_ns`.

Two users: draining (a replica that shuts down moves its decodes instead of waiting for them) and
rebalancing (from the fullest to the emptiest replica, off by default).

A migration is given up, at no cost to the request, when the request ends, is preempted or
cancelled, when the destination has no room for it, or when it or the transfer fails. If the source
crashes after the stop, the request is lost with it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from emu.config.schema import MigrationTable
from emu.kernel.actor import PARK, Actor
from emu.kernel.clock import Kernel
from emu.kernel.priorities import PRIORITY_REBALANCER
from emu.network.base import Network, Transfer
from emu.policy.calls import OwnMigration
from emu.policy.views import ReplicaView
from emu.replica.events import KvDelivered, LiveMoves, Released, StopAsked, StopUndone, Unreserved
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from emu.units import ceil_div, ms_to_ns

S = ReplicaState
RETRY_NS: Final = 10_000_000
"""A source waits so long after a migration that failed."""
ROUNDS_MAX: Final = 8
"""Copying rounds before the stop (Llumnix needs two or three)."""
MOVES_MAX: Final = 100
"""Rebalancing moves one request so often at most: a circuit breaker, whatever the rule says."""
WAITS_MAX: Final = 8
"""The rule is applied so often again while what could move waits for a token."""
STOP_BLOCKS: Final = 2
"""The request stops when no more than so many blocks are left to copy."""


class LiveWorld(Protocol):
    """What live migrations need of the cluster."""

    kernel: Kernel
    replicas: list[Replica]

    @property
    def network(self) -> Network:
        """The links."""
        ...

    def on_capacity(self, replica: Replica) -> None:
        """Blocks of a replica have become free."""
        ...

    def on_live_migration(
        self, request: Request, source: Replica, destination: Replica, started_ns: int, stop_ns: int
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


def _lowers(request: Request, source: Replica, destination: Replica) -> bool:
    """True if, with the request over there, the fuller of both is less full than before."""
    one, other = source.scheduler, destination.scheduler
    needed = other.blocks_to_reserve([request])
    return (other.blocks_used + needed) / other.blocks_total < one.blocks_used / one.blocks_total


class Phase(enum.Enum):
    """How far a live migration has come."""

    ASKED = "asked"
    COPYING = "copying"
    STOPPING = "stopping"
    LAST_TRANSFER = "last_transfer"
    OVER = "over"


class LiveMigrator(Actor):
    """Runs live migrations, one at a time for each source; the actor of the rebalancing policy."""

    def __init__(
        self,
        world: LiveWorld,
        table: MigrationTable,
        *,
        block_size: int,
        kv_bytes_per_token: int,
        own: OwnMigration | None = None,
        see: Callable[[Replica], ReplicaView] | None = None,
    ) -> None:
        """`own`: a user's policy instead of the rule; it sees replicas as `see` shows them."""
        super().__init__(world.kernel, "rebalancer", PRIORITY_REBALANCER)
        self.moves: dict[int, LiveMove] = {}
        """The migration under way, by source."""
        self.finished = 0
        self.given_up = 0
        self.world = world
        self.block_size = block_size
        self.token_bytes = kv_bytes_per_token
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

    @property
    def moving(self) -> dict[int, Request]:
        """The request on its way, by source."""
        return {source_id: move.request for source_id, move in self.moves.items()}

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
        for replica in decoding:
            replica.settle()
        if self._own is not None and self._see is not None:
            found = self._own.choose([self._see(replica) for replica in decoding])
            if found is not None:
                self.start(self.world.replicas[found[0]], self.world.replicas[found[1]], found[2])
            return False
        uses = [
            Use(r.replica_id, r.scheduler.blocks_used / r.scheduler.blocks_total) for r in decoding
        ]
        pair = choose_pair(uses, self._table.rebalance_gap)
        if pair is None:
            return False
        source, destination = (self.world.replicas[replica] for replica in pair)
        self.start(source, destination, rebalances=True)
        if source.replica_id in self.moves:
            return False
        tokens = (
            (r.generated_tokens, self._moved.get(r.row)) for r in source.scheduler.residents()
        )
        return any(moved is not None and moved[0] == now for now, moved in tokens)

    def drain(self, source: Replica) -> None:
        """Move a decode of a replica that shuts down to the emptiest open one, if there is one."""
        if self._is_waiting(source):
            return
        open_ = [r for r in self.world.replicas if r.state is S.DECODE and r is not source]
        if open_:
            for replica in open_:
                replica.settle()
            target = min(open_, key=lambda r: (r.scheduler.blocks_used, r.replica_id))
            self.start(source, target)

    def _is_waiting(self, source: Replica) -> bool:
        """One is on its way, or was refused a moment ago."""
        now_ns, source_id = self.kernel.now_ns, source.replica_id
        return source_id in self.moves or now_ns < self._not_before.get(source_id, 0)

    def start(
        self,
        source: Replica,
        destination: Replica,
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
        source.settle()
        for request in reversed(list(source.scheduler.residents())):
            if request.generated_tokens == 0 or request_id not in (None, request.request_id):
                continue
            if not self._may_move(request, is_drain=not rebalances and self._own is None):
                continue
            if rebalances and not _lowers(request, source, destination):
                continue
            move = self.moves[source.replica_id] = LiveMove(self, request, source, destination)
            self.kernel.soon(move.begin)
            return

    def _may_move(self, request: Request, *, is_drain: bool) -> bool:
        """Moves have brought it tokens, and (a circuit breaker) there were not too many of them."""
        tokens, times = self._moved.get(request.row, (-1, 0))
        if times >= MOVES_MAX and not is_drain:
            return False
        return request.generated_tokens != tokens

    def ended(self, move: LiveMove, *, is_done: bool) -> None:
        """A migration is over: the source may move its next request."""
        self.finished += is_done
        self.given_up += not is_done
        request = move.request
        if is_done and not request.status.is_terminal:
            times = self._moved.get(request.row, (-1, 0))[1] + 1
            self._moved[request.row] = (request.generated_tokens, times)
        self.leave(move)

    def leave(self, move: LiveMove) -> None:
        """The migration holds nothing of its source any more."""
        if self.moves.get(move.source.replica_id) is move:
            del self.moves[move.source.replica_id]

    def wait_a_while(self, source: Replica) -> None:
        """After a migration that failed, the source waits before the next."""
        later_ns = self._not_before[source.replica_id] = self.kernel.now_ns + RETRY_NS
        self.kernel.call_at(later_ns, PRIORITY_REBALANCER, source.actor.look)

    def forget(self, request: Request) -> None:
        """A request has ended, or starts anew elsewhere: it does not move any more."""
        self._moved.pop(request.row, None)
        for move in self.moves.values():
            if move.request is request and not move.is_forgotten:
                move.forget()

    def lose(self, replica: Replica) -> list[Request]:
        """A replica has crashed: its transfers end; the request that it had stopped to move."""
        for move in list(self.moves.values()):
            if move.source is replica or move.destination is replica:
                move.stop_transfer()
        own = self.moves.pop(replica.replica_id, None)
        if own is None or own.request.status is not Status.MIGRATING:
            return []
        return [own.request]


class LiveMove:
    """One live migration: its phase, and what follows on each event.

    asked: the destination reserves, or it is given up. copying: up to `ROUNDS_MAX` transfers of
    what has been produced meanwhile. stopping: the source detaches the request at the end of its
    iteration. last transfer: the rest moves; then the request goes on at the destination, or, if
    anything has failed, at the source.
    """

    def __init__(
        self, migrator: LiveMigrator, request: Request, source: Replica, destination: Replica
    ) -> None:
        self.request = request
        self.source = source
        self.destination = destination
        self.phase = Phase.ASKED
        self.is_forgotten = False
        """The request has ended or gone elsewhere."""
        self._migrator = migrator
        self._world = migrator.world
        self._source_life = source.incarnation
        self._destination_life = destination.incarnation
        self._transfer: Transfer | None = None
        self._number = 0
        """Counts transfers: a notice with another number is late, or the second one."""
        self._has_arrived = False
        self._rounds = 0
        self._copied = 0
        self._tokens = 0
        self._started_ns = self._stopped_ns = -1

    def has_source(self) -> bool:
        """The source is in the life in which the migration began."""
        return self.source.incarnation == self._source_life

    def has_destination(self) -> bool:
        """The destination is in the life in which the migration began."""
        return self.destination.incarnation == self._destination_life

    # --- events -------------------------------------------------------------------------------
    def begin(self) -> None:
        """Reserve at the destination, and copy; or give up."""
        request, source = self.request, self.source
        self._started_ns = self._world.kernel.now_ns
        if self.is_forgotten or not self.destination.actor.reserve([request]):
            self.phase = Phase.OVER
            self._migrator.ended(self, is_done=False)
            if source.stages == 1:
                source.actor.look()  # a drain tries again after the iteration in flight
            return
        source.actor.tell(LiveMoves(change=1))
        self.destination.actor.tell(LiveMoves(change=1))
        self.phase = Phase.COPYING
        self._copy_round()

    def transfer_ended(self) -> None:
        """A transfer is over, well or not."""
        self._transfer = None
        has_moved = self._has_arrived and self.has_source() and self.has_destination()
        if self.phase is Phase.COPYING:
            if not has_moved:
                self._finish(is_done=False)
                return
            self._copied = self._tokens // self._migrator.block_size * self._migrator.block_size
            self._copy_round()
        elif self.phase is Phase.LAST_TRANSFER:
            self._finish(is_done=self._hand_over(has_moved=has_moved))

    def stopped(self) -> None:
        """The source has answered: the request stands still there, or has ended or gone."""
        request, source, destination = self.request, self.source, self.destination
        if (
            self.is_forgotten
            or request.status is not Status.MIGRATING
            or not self.has_source()  # ended, was preempted, cancelled or lost before it could stop
        ):
            self._finish(is_done=False)
            return
        self._stopped_ns = self._world.kernel.now_ns
        # The reservation was for fewer tokens: take what it needs now, or stay.
        if self.has_destination():
            destination.actor.tell(Unreserved(requests=[request]))
        if (
            not self.has_destination()
            or destination.state not in (S.DECODE, S.SHUTTING_DECODE)
            or not destination.actor.reserve([request])
        ):
            source.actor.tell(StopUndone(request=request))
            self._finish(is_done=False)
            return
        self.phase = Phase.LAST_TRANSFER
        self._send(self._bytes(request.reached_tokens))

    def forget(self) -> None:
        """The request has ended, or starts anew elsewhere: both sides are free at once."""
        self.is_forgotten = True
        if self.has_destination():
            self.destination.actor.tell(Unreserved(requests=[self.request]))
        if self.request.status is Status.MIGRATING and self.has_source():
            self.source.actor.tell(Released(requests=[self.request]))
        self.stop_transfer()

    def stop_transfer(self) -> None:
        """What is on its way will not arrive."""
        if self._transfer is not None:
            self._transfer.cancel()
            self._notice(self._number, has_arrived=False)

    # --- what follows ---------------------------------------------------------------------------
    def _copy_round(self) -> None:
        """Copy what is there while it decodes; ask it to stop when little is left."""
        block_size = self._migrator.block_size
        if self._rounds < ROUNDS_MAX:
            self._rounds += 1
            self._tokens = self._tokens_reached()
            if self._tokens < 0:
                self._finish(is_done=False)
                return
            if ceil_div(self._tokens, block_size) - self._copied // block_size > STOP_BLOCKS:
                self._send(self._bytes(self._tokens))
                return
        self.phase = Phase.STOPPING
        kernel = self._world.kernel
        reply = StopAsked(request=self.request, reply=lambda: kernel.soon(self.stopped))
        self.source.actor.post(reply)

    def _hand_over(self, *, has_moved: bool) -> bool:
        """The last part is there, or will never be. True if the request goes on over there."""
        request, source, destination = self.request, self.source, self.destination
        if not self.has_source() or self.is_forgotten:
            return False  # lost with it, or ended
        if not has_moved and not request.status.is_terminal:
            source.actor.tell(StopUndone(request=request))
            return False
        source.actor.tell(Released(requests=[request]))
        if request.status.is_terminal:
            return False
        stop_ns = self._world.kernel.now_ns - self._stopped_ns
        request.migrations += 1
        request.migration_ns += stop_ns
        destination.actor.post(KvDelivered(requests=[request]))
        self._world.on_live_migration(request, source, destination, self._started_ns, stop_ns)
        return True

    def _finish(self, *, is_done: bool) -> None:
        self.phase = Phase.OVER
        source, destination = self.source, self.destination
        if not is_done and self.has_destination() and not self.is_forgotten:
            destination.actor.tell(Unreserved(requests=[self.request]))
        self._migrator.leave(self)
        if not is_done and self.has_source():
            self._migrator.wait_a_while(source)
        for replica, is_alive in (
            (source, self.has_source()),
            (destination, self.has_destination()),
        ):
            if is_alive:
                replica.actor.tell(LiveMoves(change=-1))
                self._world.on_capacity(replica)
        self._migrator.look()
        self._migrator.ended(self, is_done=is_done)

    def _tokens_reached(self) -> int:
        """Tokens whose KV the source has, or -1 if the request does not run there any more."""
        self.source.settle()
        for resident in self.source.scheduler.residents():
            if resident is self.request:
                return self.request.reached_tokens
        return -1

    def _bytes(self, tokens: int) -> int:
        """KV of the blocks that are not copied yet."""
        block_size = self._migrator.block_size
        blocks = ceil_div(tokens, block_size) - self._copied // block_size
        return blocks * block_size * self._migrator.token_bytes

    def _send(self, size_bytes: int) -> None:
        self._number += 1
        number = self._number
        self._has_arrived = False
        self._transfer = self._world.network.send(
            self.source.grid,
            self.destination.grid,
            size_bytes,
            kind="kv",
            on_done=lambda: self._notice(number, has_arrived=True),
            pair=(self.source.replica_id, self.destination.replica_id),
            on_failed=lambda _: self._notice(number, has_arrived=False),
        )

    def _notice(self, number: int, *, has_arrived: bool) -> None:
        """The network reports an end; the first notice counts."""
        if number != self._number or self._transfer is None:
            return
        self._transfer = None
        self._has_arrived = has_arrived
        self._world.kernel.soon(self.transfer_ended)
