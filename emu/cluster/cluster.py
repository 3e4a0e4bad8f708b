"""The world of one run: owns the actors, runs them, and is what they tell and ask.

Owns what is shared by all actors: the kernel, the gateway, the replicas, their watchers, the
carrier of transfers, and the recorder. Decides nothing; every decision is made in the room that
it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from emu.autoscale.scaler import Scaler
from emu.cluster.audit import story
from emu.cluster.backends import SharedBackends
from emu.cluster.build import (
    build_dispatches,
    build_insight,
    build_intake,
    build_live,
    build_queue,
    build_rejecter,
    build_replica,
    build_watchers,
    fault_handlers,
    join_waves,
)
from emu.cluster.commands import Commander, check_commands
from emu.cluster.gateway import Gateway, Source
from emu.cluster.kv_tiers import TierBook
from emu.cluster.plan import Plan
from emu.cluster.pool import ModelPool
from emu.cluster.recorder import Recorder
from emu.cluster.scaling import Scalers
from emu.cluster.sharing import GpuSharing
from emu.cluster.stall import StallGuard
from emu.config.schema import FaultTable
from emu.faults.injector import Injector
from emu.faults.recovery import Recovery
from emu.kernel.clock import Actor, Kernel
from emu.migration.messages import SplitLost
from emu.migration.transfer import MigratingBatch
from emu.network.carrier import Carrier
from emu.network.topology import Topology
from emu.plugins import blamed, make_plugin
from emu.replica.actor import ReplicaActor
from emu.replica.events import Cancelled
from emu.replica.ports import BatchSink
from emu.replica.relay_board import RelayBoard
from emu.replica.replica import Replica
from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState, Writer
from emu.request import Request, Status
from emu.scheduling.fcfs import PrefillQueue
from emu.units import s_to_ns

S = ReplicaState


class Outcome(msgspec.Struct):
    """How a run ended."""

    error: BaseException | None
    end_ns: int
    events: int
    digest: str


class Cluster:
    """Implements `World`; what concerns one model is in its pool."""

    streams = False

    def __init__(
        self,
        plan: Plan,
        source: Source,
        recorder: Recorder,
        *,
        has_prefixes: bool,
        kernel: Kernel | None = None,
        leap: bool | None = None,
    ) -> None:
        config = plan.config
        self.plan = plan
        self.config = config
        self.kernel = kernel or Kernel(events_per_instant_max=config.limits.events_per_instant)
        if recorder.log is not None:
            recorder.log.use_clock(lambda: self.kernel.now_ns)
        self.recorder = recorder
        self.gaps = recorder.gaps
        self.batches: BatchSink | None = recorder.trace
        self.history = recorder.history
        self.network = Carrier(self.kernel, plan.topology)
        if self.history is not None and self.history.follows_steps:
            leap = False
            self.history.links(plan.topology)
            self.network.tell_history(self.history)
        self._draining: list[Replica] | None = None
        """Replicas that shut down their decodes; None = to be found again."""
        self._batch_ids = 0
        self.backends = SharedBackends()
        self.tiers = TierBook(plan)
        self.insight = build_insight(self)
        released, ended = self._released, self._ended
        if self.insight is not None:
            released, ended = self._released_seen, self._ended_seen
        self.replicas: list[Replica] = []
        names = plan.models
        self.pools = [
            ModelPool(self, index, name, queue=build_queue(plan, name))
            for index, name in enumerate(names)
        ]
        self.pool_of = [self.pools[names.index(r.served)] for r in plan.replicas]
        """By replica."""
        for its_plan, pool in zip(plan.replicas, self.pool_of, strict=True):
            replica = build_replica(self, pool, its_plan, has_prefixes=has_prefixes, leap=leap)
            self.replicas.append(replica)
            pool.members.append(replica)
        self.sharing = GpuSharing(plan, self.pools)
        self.sharing.start(self.replicas)
        self.actors = [ReplicaActor(replica, self) for replica in self.replicas]
        join_waves(plan, self.replicas)
        self.watchers = build_watchers(self)
        self.gateway = Gateway(
            self.kernel,
            source,
            build_dispatches(self),
            self.replicas,
            config.router,
            config.recovery,
            on_release=released,
            on_terminal=ended,
            cancel=self.cancel,
            intake=build_intake(self),
            admission=None if self.insight is None else self.insight.admission(),
            clients=config.workload.concurrency,
        )
        check_commands(config.commands, len(self.replicas), plan.source)
        self.commander = Commander(self.kernel, self.replicas, config.commands)
        self.live = build_live(self)
        for pool in self.pools:
            pool.rejecter = build_rejecter(self, pool)
        own = make_plugin if self.insight is None else self.insight.make
        Scalers(plan, self.replicas, own).make(self.pools)
        self.scalers = [pool.scaler for pool in self.pools]
        self._is_scaled = self.scalers[0].is_active
        self.recovery = Recovery(self)
        self.faults = Injector(self, self.recovery, fault_handlers)
        self.faults.start()
        self.kernel.ask_at_rest(partial(story, self), self.recovery.fail_unservable)

    # --- running ------------------------------------------------------------------------------
    async def run(self) -> Outcome:
        """Run to the end of the workload (or an error, which is returned, not raised)."""
        kernel = self.kernel
        for actor in self._actors():
            kernel.start(actor)
        interval_ms = self.config.output.timeseries_interval_ms
        if interval_ms > 0:
            kernel.sample_every(max(1, round(interval_ms * 1e6)), self._sample)
        if self.config.limits.stalled_s:
            guard = StallGuard(self, s_to_ns(self.config.limits.stalled_s))
            kernel.watch_every(guard.period_ns, guard.look)
        limit_s = self.config.limits.simulated_s
        error: BaseException | None = None
        try:
            await kernel.run(limit_ns=s_to_ns(limit_s) if limit_s else None)
        except (Exception, SystemExit) as raised:  # the rim decides what to do with it
            error = blamed(raised)
            if isinstance(error, SystemExit):
                raise
        except KeyboardInterrupt as raised:
            error = raised
        finally:
            unclosed = await self.backends.aclose()
        error = error or unclosed
        if interval_ms > 0 and error is None:
            self._sample(kernel.now_ns)  # what happened since the last full interval
        self._close_books()
        return Outcome(error, kernel.now_ns, kernel.events, f"{kernel.digest:016x}")

    def _actors(self) -> list[Actor]:
        """All actors, in the order of their first steps."""
        actors: list[Actor] = [*self.actors, *self.watchers.values()]
        actors += [pool.rejecter for pool in self.pools if pool.rejecter is not None]
        if self.live is not None and self.config.migration.rebalance:
            actors.append(self.live)
        actors += [scaler for scaler in self.scalers if scaler.is_active]
        return [*actors, self.gateway]

    def _close_books(self) -> None:
        for scaler in self.scalers:
            scaler.close()
        now_ns = self.kernel.now_ns
        for replica in self.replicas:
            replica.note_time(replica.state, now_ns)

    def _sample(self, at_ns: int) -> None:
        self.recorder.sample(at_ns, self)

    # --- World --------------------------------------------------------------------------------
    def terminal(self, request: Request, status: Status, reason: str = "") -> None:
        """A request's one terminal event."""
        if self.live is not None:
            self.live.forget(request)
        self.gateway.terminal(request, status, reason)

    def requeue(self, requests: list[Request]) -> None:
        """Waiting requests whose replica will not serve them are routed again."""
        for request in requests:
            if self.live is not None:
                self.live.forget(request)
            self.recorder.rerouted(request, self.kernel.now_ns)
            self.gateway.route(request)

    def lost(self, requests: Sequence[Request], reason: str) -> None:
        """The KV of these requests is gone: they start again elsewhere, or fail."""
        self.recovery.lost(requests, reason)

    def refuses(self, source: Replica, destination: Replica, requests: list[Request]) -> bool:
        """A fault makes this destination refuse what it has room for."""
        transfers = self.faults.transfers
        if not transfers.windows:
            return False
        destination.settle()
        scheduler = destination.scheduler
        free = scheduler.blocks_total - scheduler.blocks_used
        if scheduler.blocks_to_reserve(requests) > free:
            return False
        return transfers.refuses(source.replica_id, destination.replica_id)

    def drain_expired(self, replica: Replica, requests: list[Request]) -> None:
        """A draining replica's time is over: what it held, and its outbound KV, is lost."""
        self.recovery.drain_expired(replica, requests)

    @property
    def topology(self) -> Topology:
        """Machines, GPUs and links."""
        return self.plan.topology

    def is_spare(self, replica: Replica) -> bool:
        """The plan gives it no role."""
        return self.plan.replicas[replica.replica_id].role == "inactive"

    def are_equal(self, one: Replica, other: Replica) -> bool:
        """Both have the same shape: one can take the other's role."""
        plans = self.plan.replicas
        return plans[one.replica_id].shape == plans[other.replica_id].shape

    def inject(self, fault: FaultTable) -> None:
        """A fault strikes at its time, or now. Raises InputError if it cannot."""
        self.faults.inject(fault)

    def on_capacity(self, replica: Replica) -> None:
        """Watchers that wait for a destination look again, and routers at its load."""
        if not replica.is_touched:
            replica.touch()
        pool = self.pool_of[replica.replica_id]
        if pool.rejecter is not None:
            pool.rejecter.look()
        if self.live is not None:
            self.live.look()
            if self.config.migration.drain:
                if self._draining is None:
                    self._draining = [r for r in self.replicas if r.state is S.SHUTTING_DECODE]
                for other in self._draining:
                    self.live.drain(other)
        if self._is_scaled:
            pool.scaler.look()
        if pool.stuck:
            pool.poke()

    def on_rejected(self, replica: Replica, is_rejected: bool) -> None:
        """A replica stops receiving KV because it is far fuller than the rest, or no longer."""
        self.recorder.rejected(replica, is_rejected=is_rejected, at_ns=self.kernel.now_ns)

    def on_draining(self, replica: Replica) -> None:
        """Move a decode away from a replica that shuts down, if so configured."""
        if self.live is not None and self.config.migration.drain:
            self.live.drain(replica)

    def on_live_migration(
        self, request: Request, source: Replica, destination: Replica, started_ns: int, stop_ns: int
    ) -> None:
        """A running request has moved."""
        self.recorder.moved_live(request, source, destination, started_ns, stop_ns)

    def on_tokens(self, replica: Replica, receivers: Iterable[Request]) -> None:
        """Never called off line; live mode overrides this."""

    def on_moved(
        self, replica: Replica, before: ReplicaState, writer: Writer, cause: str, at_ns: int
    ) -> None:
        """A replica's state changed: record it; routing and watchers may go on."""
        pool = self.pool_of[replica.replica_id]
        self._draining = None
        pool.replica_moved()
        self.recorder.moved(replica, before, writer, cause, at_ns)
        pool.relay.on_moved(replica, before)
        self.sharing.on_moved(replica, before)
        pool.scaler.on_moved(replica, before, writer)
        self.faults.on_moved(replica, before)
        self.gateway.replica_moved(pool.index)
        self.on_capacity(replica)

    def on_relayed(
        self, source: Replica, old: Replica, requests: list[Request], start_layer: int
    ) -> None:
        """A batch has been handed to a helper."""
        self.recorder.relayed(source, old, requests, start_layer, self.kernel.now_ns)

    def _released(self, request: Request) -> None:
        self.recorder.released(request)
        if self._is_scaled:
            self.pools[request.model].scaler.look()

    def _ended(self, request: Request) -> None:
        self.recorder.terminal(request, self.kernel.now_ns)

    def _released_seen(self, request: Request) -> None:
        """With policies of a user's own: they have books, and may want to be told."""
        assert self.insight is not None
        self._released(request)
        self.insight.arrived(request)

    def _ended_seen(self, request: Request) -> None:
        assert self.insight is not None
        self._ended(request)
        self.insight.ended(request)

    def note(self, kind: str, target: str, text: str) -> None:
        """A line in the run's timeline."""
        self.recorder.noted(self.kernel.now_ns, kind, target, text)

    @property
    def tokens_in_migration(self) -> int:
        """Prompt tokens that wait for or are under migration."""
        return sum(watcher.outbound.tokens for watcher in self.watchers.values())

    @property
    def queues(self) -> Sequence[PrefillQueue]:
        """The queues that prefill replicas pull from: of each model, or none."""
        return self.gateway.queues

    def scaler_of(self, replica: Replica) -> Scaler:
        """What loads the replica's weights."""
        return self.pool_of[replica.replica_id].scaler

    def relay_of(self, replica: Replica) -> RelayBoard:
        """Where the replica's model relays batches."""
        return self.pool_of[replica.replica_id].relay

    def on_transfer(
        self, batch: MigratingBatch, source: Replica, destination: Replica, ended_ns: int
    ) -> None:
        """A migration has ended."""
        self.recorder.transferred(batch, source, destination, ended_ns)

    def next_batch_id(self) -> int:
        """Ids of migrating batches."""
        self._batch_ids += 1
        return self._batch_ids

    def drop_split(self, split: SplitBatch) -> None:
        """A part of a batch whose KV is in two halves is lost."""
        if split.first_id >= 0:
            self.watchers[split.first_id].tell(SplitLost(split))

    # --- cancellation -------------------------------------------------------------------------
    def cancel(self, request: Request) -> None:
        """The client has left, at whatever stage the request is."""
        reason = "client_left"
        if request.holder_id < 0:
            if (
                request in self.gateway.taking
                or any(q.cancel(request) for q in self.queues)
                or self.gateway.cancel_held(request)
            ):
                self.terminal(request, Status.CANCELLED, reason)
            return
        watcher = self.watchers.get(request.holder_id)
        if request.status is Status.MIGRATING and watcher is not None:
            if watcher.cancel(request):
                self.terminal(request, Status.CANCELLED, reason)
            return
        if (
            request.status is Status.MIGRATING
            and self.live is not None
            and self.live.moving.get(request.holder_id) is request
        ):
            self.terminal(request, Status.CANCELLED, reason)
            return
        leave = Cancelled(request=request, status=Status.CANCELLED, reason=reason)
        self.actors[request.holder_id].post(leave)

    # --- seeing -------------------------------------------------------------------------------
    def holds_adapter(self, replica_id: int, request: Request) -> bool:
        """Whether the request's LoRA adapter is on a replica's GPU."""
        adapters = self.replicas[replica_id].scheduler.adapters
        return adapters is not None and adapters.holds(request.adapter)

    def prefix_match(self, replica_id: int, request: Request) -> int:
        """Prompt tokens of the request that a replica has in its cache."""
        replica = self.replicas[replica_id]
        replica.settle()
        return replica.scheduler.prefix_match(request)
