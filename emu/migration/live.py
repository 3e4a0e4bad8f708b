"""Live migration of running decodes: their KV moves while they go on, then a short stop.

As in Llumnix (OSDI'24): the blocks that exist are copied while the request decodes; what it has
produced meanwhile is copied in further, ever shorter rounds; when little is left the request
stops at the end of an iteration, the rest moves, and it goes on at the destination. The handoff
is the same as everywhere: hold, reserve, transfer, activate, release. The stop is part of the
request's `migration_ns`.

Two users: draining (a replica that shuts down moves its decodes instead of waiting for them) and
rebalancing (from the fullest to the emptiest replica, off by default).

A migration is given up, at no cost to the request, when the request ends, is preempted or
cancelled, or when the destination has no room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from emu.actor import RANK_CONTROL, Event, Kernel
from emu.config.schema import MigrationTable
from emu.migration.transfer import Network
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from emu.units import ceil_div, ms_to_ns

S = ReplicaState
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
        self._world = world
        self._table = table
        self._block_size = block_size
        self._token_bytes = kv_bytes_per_token

    async def rebalance(self) -> None:
        """The actor of the rebalancing policy: looks once a period, while something changes."""
        kernel, period_ns = self._world.kernel, ms_to_ns(self._table.rebalance_period_ms)
        while True:
            await self.changed.wait()
            await kernel.sleep_until((kernel.now_ns // period_ns + 1) * period_ns, RANK_CONTROL)
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
        open_ = [r for r in self._world.replicas if r.state is S.DECODE and r is not source]
        if open_:
            for replica in open_:
                replica.settle()
            target = min(open_, key=lambda r: (r.scheduler.blocks_used, r.replica_id))
            self.start(source, target)

    def start(self, source: Replica, destination: Replica) -> None:
        """Move the request that was admitted last, unless one is already on its way."""
        if source.replica_id in self.moving:
            return
        candidates = [r for r in source.scheduler.residents() if r.generated_tokens > 0]
        if not candidates:
            return
        request = candidates[-1]
        self.moving[source.replica_id] = request
        self._world.kernel.spawn(
            self._migrate(request, source, destination),
            name=f"live migration of request {request.request_id}",
        )

    # --- one migration ------------------------------------------------------------------------
    async def _migrate(self, request: Request, source: Replica, destination: Replica) -> None:
        started_ns = self._world.kernel.now_ns
        reserved = destination.reserve([request])
        is_done = False
        if reserved:
            copied = await self._copy_rounds(request, source, destination)
            if copied >= 0:
                is_done = await self._stop_and_move(
                    request, source, destination, copied, started_ns
                )
            if not is_done:
                destination.unreserve([request])
        self.moving.pop(source.replica_id, None)
        self.finished += is_done
        self.given_up += not is_done
        self.changed.notify()
        source.inbox.poke()

    async def _copy_rounds(self, request: Request, source: Replica, destination: Replica) -> int:
        """Copy while it decodes; tokens copied, or -1 if it no longer runs at the source."""
        copied = 0
        for _ in range(ROUNDS_MAX):
            tokens = self._tokens(request, source)
            if tokens < 0:
                return -1
            left = self._bytes(copied, tokens)
            if ceil_div(tokens, self._block_size) - copied // self._block_size <= STOP_BLOCKS:
                return copied
            await self._transfer(source, destination, left)
            copied = tokens // self._block_size * self._block_size
        return copied

    async def _stop_and_move(
        self, request: Request, source: Replica, destination: Replica, copied: int, started_ns: int
    ) -> bool:
        kernel = self._world.kernel
        stopped = Event(kernel, f"the stop of request {request.request_id}")
        source.stop(request, stopped.set)
        await stopped.wait()
        if request.status is not Status.MIGRATING:
            return False  # ended, was preempted or cancelled before it could stop
        stop_began_ns = kernel.now_ns
        # The reservation was for fewer tokens: take what it needs now, or stay.
        destination.unreserve([request])
        if destination.state not in (S.DECODE, S.SHUTTING_DECODE) or not destination.reserve(
            [request]
        ):
            source.resume(request)
            return False
        await self._transfer(source, destination, self._bytes(copied, request.reached_tokens))
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

    async def _transfer(self, source: Replica, destination: Replica, size_bytes: int) -> None:
        kernel = self._world.kernel
        arrived = Event(kernel, "the end of a live migration's transfer")
        done: Callable[[], None] = arrived.set
        self._world.network.send(
            source.grid,
            destination.grid,
            size_bytes,
            kind="kv",
            on_done=done,
            pair=(source.replica_id, destination.replica_id),
        )
        await arrived.wait()
