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

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from emu.config.schema import MigrationTable
from emu.kernel.clock import RANK_REBALANCER, Event, Kernel
from emu.migration.transfer import Network, Transfer
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from emu.units import ceil_div, ms_to_ns

S = ReplicaState
RETRY_NS: Final = 10_000_000
"""A source waits so long after a migration that failed."""
ROUNDS_MAX: Final = 8
"""Copying rounds before the stop (Llumnix needs two or three)."""
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


class LiveMigrator:
    """Runs live migrations, one at a time for each source."""

    def __init__(
        self,
        world: LiveWorld,
        table: MigrationTable,
        *,
        block_size: int,
        kv_bytes_per_token: int,
    ) -> None:
        self.moving: dict[int, Request] = {}
        """The request on its way, by source."""
        self.changed: Event = world.kernel.event("a change that the rebalancer reads")
        self.finished = 0
        self.given_up = 0
        self._not_before: dict[int, int] = {}
        self._destinations: dict[int, _Lives] = {}
        """By source: where blocks are reserved."""
        self._under_way: dict[int, tuple[Replica, Event, Transfer]] = {}
        """By source: the destination and the transfer that is waited for."""
        self._world = world
        self._table = table
        self._block_size = block_size
        self._token_bytes = kv_bytes_per_token

    async def rebalance(self) -> None:
        """The actor of the rebalancing policy: looks once a period, while something changes."""
        kernel, period_ns = self._world.kernel, ms_to_ns(self._table.rebalance_period_ms)
        while True:
            await self.changed.wait()
            await kernel.sleep_until((kernel.now_ns // period_ns + 1) * period_ns, RANK_REBALANCER)
            decoding = [r for r in self._world.replicas if r.state is S.DECODE]
            for replica in decoding:
                replica.settle()
            pair = choose_pair(
                [
                    Use(r.replica_id, r.scheduler.blocks_used / r.scheduler.blocks_total)
                    for r in decoding
                ],
                self._table.rebalance_gap,
            )
            if pair is not None:
                self.start(self._world.replicas[pair[0]], self._world.replicas[pair[1]])

    def drain(self, source: Replica) -> None:
        """Move a decode of a replica that shuts down to the emptiest open one, if there is one."""
        if self._is_waiting(source):
            return
        open_ = [r for r in self._world.replicas if r.state is S.DECODE and r is not source]
        if open_:
            for replica in open_:
                replica.settle()
            target = min(open_, key=lambda r: (r.scheduler.blocks_used, r.replica_id))
            self.start(source, target)

    def _is_waiting(self, source: Replica) -> bool:
        """One is on its way, or was refused a moment ago."""
        now_ns, source_id = self._world.kernel.now_ns, source.replica_id
        return source_id in self.moving or now_ns < self._not_before.get(source_id, 0)

    def start(self, source: Replica, destination: Replica) -> None:
        """Move the request that was admitted last, unless one is already on its way."""
        if self._is_waiting(source):
            return
        source.settle()
        candidates = [r for r in source.scheduler.residents() if r.generated_tokens > 0]
        if not candidates:
            return
        request = candidates[-1]
        lives = _Lives(source, destination)
        self.moving[source.replica_id] = request
        self._destinations[source.replica_id] = lives
        self._world.kernel.spawn(
            self._migrate(request, lives),
            name=f"live migration of request {request.request_id}",
        )

    # --- one migration ------------------------------------------------------------------------
    async def _migrate(self, request: Request, lives: _Lives) -> None:
        started_ns = self._world.kernel.now_ns
        is_done = False
        if not lives.is_forgotten and lives.destination.reserve([request]):
            is_done = await self._move(request, lives, started_ns)
        else:
            self._end(lives)
            if lives.source.stages == 1:
                lives.source.inbox.poke()  # a drain tries again after the iteration in flight
        self.finished += is_done
        self.given_up += not is_done

    async def _move(self, request: Request, lives: _Lives, started_ns: int) -> bool:
        """The whole way, with blocks reserved at the destination; True if it went over."""
        source, destination = lives.source, lives.destination
        source.live_moves += 1
        destination.live_moves += 1
        copied = await self._copy_rounds(request, lives)
        is_done = copied >= 0 and await self._stop_and_move(request, lives, copied, started_ns)
        if not is_done and lives.has_destination() and not lives.is_forgotten:
            destination.unreserve([request])
        self._end(lives)
        if not is_done and lives.has_source():
            self._pause(source)
        for replica, is_alive in (
            (source, lives.has_source()),
            (destination, lives.has_destination()),
        ):
            if is_alive:
                replica.live_moves -= 1
                replica.inbox.poke()
                self._world.on_capacity(replica)
        self.changed.notify()
        return is_done

    def _end(self, lives: _Lives) -> None:
        """The source may move its next request."""
        source_id = lives.source.replica_id
        if self._destinations.get(source_id) is lives:
            del self._destinations[source_id]
            self.moving.pop(source_id, None)

    def _pause(self, source: Replica) -> None:
        """After a migration that failed, the source waits a while before the next."""
        kernel = self._world.kernel
        self._not_before[source.replica_id] = kernel.now_ns + RETRY_NS
        kernel.call_at(kernel.now_ns + RETRY_NS, RANK_REBALANCER, source.inbox.poke)

    async def _copy_rounds(self, request: Request, lives: _Lives) -> int:
        """Copy while it decodes; tokens copied, or -1 if it no longer runs at the source."""
        source = lives.source
        copied = 0
        for _ in range(ROUNDS_MAX):
            tokens = self._tokens(request, source)
            if tokens < 0:
                return -1
            left = self._bytes(copied, tokens)
            if ceil_div(tokens, self._block_size) - copied // self._block_size <= STOP_BLOCKS:
                return copied
            if not await self._transfer(lives, left):
                return -1
            copied = tokens // self._block_size * self._block_size
        return copied

    async def _stop_and_move(
        self, request: Request, lives: _Lives, copied: int, started_ns: int
    ) -> bool:
        kernel = self._world.kernel
        source, destination = lives.source, lives.destination
        stopped = Event(kernel, f"the stop of request {request.request_id}")
        source.stop(request, stopped.set)
        await stopped.wait()
        if lives.is_forgotten:
            return False
        if not (request.status is Status.MIGRATING and lives.has_source()):
            return False  # ended, was preempted, cancelled or lost before it could stop
        stop_began_ns = kernel.now_ns
        # The reservation was for fewer tokens: take what it needs now, or stay.
        if lives.has_destination():
            destination.unreserve([request])
        if (
            not lives.has_destination()
            or destination.state not in (S.DECODE, S.SHUTTING_DECODE)
            or not destination.reserve([request])
        ):
            source.resume(request)
            return False
        has_moved = await self._transfer(lives, self._bytes(copied, request.reached_tokens))
        if not lives.has_source() or lives.is_forgotten:
            return False  # lost with it, or ended
        if not has_moved and not request.status.is_terminal:
            source.resume(request)
            return False
        source.release([request])
        if request.status.is_terminal:
            return False
        stop_ns = kernel.now_ns - stop_began_ns
        request.migrations += 1
        request.migration_ns += stop_ns
        destination.deliver([request])
        self._world.on_live_migration(request, source, destination, started_ns, stop_ns)
        return True

    def _tokens(self, request: Request, source: Replica) -> int:
        source.settle()
        for resident in source.scheduler.residents():
            if resident is request:
                return request.reached_tokens
        return -1

    def _bytes(self, copied: int, tokens: int) -> int:
        blocks = ceil_div(tokens, self._block_size) - copied // self._block_size
        return blocks * self._block_size * self._token_bytes

    async def _transfer(self, lives: _Lives, size_bytes: int) -> bool:
        """Until the bytes are there; False if they never will be."""
        kernel = self._world.kernel
        source, destination = lives.source, lives.destination
        ended = Event(kernel, "the end of a live migration's transfer")
        arrived: list[bool] = []

        def on_done() -> None:
            arrived.append(True)
            ended.set()

        transfer = self._world.network.send(
            source.grid,
            destination.grid,
            size_bytes,
            kind="kv",
            on_done=on_done,
            pair=(source.replica_id, destination.replica_id),
            on_failed=lambda _: ended.set(),
        )
        self._under_way[source.replica_id] = (destination, ended, transfer)
        await ended.wait()
        if self._under_way.get(source.replica_id, (None, None))[1] is ended:
            del self._under_way[source.replica_id]
        return bool(arrived) and lives.has_source() and lives.has_destination()

    def forget(self, request: Request) -> None:
        """A request has ended, or starts anew elsewhere: it does not move any more."""
        for source_id, moving in self.moving.items():
            lives = self._destinations.get(source_id)
            if moving is not request or lives is None or lives.is_forgotten:
                continue
            lives.is_forgotten = True
            if lives.has_destination():
                lives.destination.unreserve([request])
            if request.status is Status.MIGRATING and lives.has_source():
                lives.source.release([request])
            if source_id in self._under_way:
                _, ended, transfer = self._under_way[source_id]
                transfer.cancel()
                ended.set()

    def lose(self, replica: Replica) -> list[Request]:
        """A replica has crashed: its transfers end; the request that it had stopped to move."""
        for source_id, (destination, ended, transfer) in list(self._under_way.items()):
            if source_id == replica.replica_id or destination is replica:
                transfer.cancel()
                ended.set()
        request = self.moving.pop(replica.replica_id, None)
        self._destinations.pop(replica.replica_id, None)
        if request is None or request.status is not Status.MIGRATING:
            return []
        return [request]


class _Lives:
    """Two replicas, and whether both are still in the life in which a migration began."""

    def __init__(self, source: Replica, destination: Replica) -> None:
        self.source = source
        self.destination = destination
        self.is_forgotten = False
        """The request has ended or gone elsewhere."""
        self._source_life = source.incarnation
        self._destination_life = destination.incarnation

    def has_source(self) -> bool:
        """The source has not crashed since."""
        return self.source.incarnation == self._source_life

    def has_destination(self) -> bool:
        """The destination has not crashed since."""
        return self.destination.incarnation == self._destination_life
