"""The world of one run: owns the actors, runs them, and is what they tell and ask.

Owns what is shared by all actors: the kernel, the gateway, the replicas, their watchers, the
carrier of transfers, and the recorder. Decides nothing; every decision is made in the room that
it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from emu.cluster.audit import story
from emu.cluster.build import (
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
from emu.cluster.recorder import Recorder
from emu.cluster.scaling import make_scaler
from emu.cluster.stall import StallGuard
from emu.config.schema import FaultTable
from emu.faults.injector import Injector
from emu.faults.recovery import Recovery
from emu.kernel.actor import Actor
from emu.kernel.clock import Kernel
from emu.latency.shared import SharedBackends
from emu.migration.messages import SplitLost
from emu.migration.transfer import MigratingBatch
from emu.migration.watcher import Watcher
from emu.network.carrier import Carrier
from emu.network.topology import Topology
from emu.plugins import blamed, make_plugin
from emu.replica.actor import ReplicaActor
from emu.replica.events import Cancelled
from emu.replica.ports import BatchSink
from emu.replica.relay_board import RelayBoard
from emu.replica.replica import Replica
from emu.replica.split_batch import SplitBatch
from emu.replica.states import RECEIVING, ReplicaState, Writer
from emu.request import Request, Status
from emu.routing.policies import make_router
from emu.units import s_to_ns

S = ReplicaState


class Outcome(msgspec.Struct):
    """How a run ended."""

    error: BaseException | None
    end_ns: int
    events: int
    digest: str


class Cluster:
    """Implements `World`, `MigrationWorld` and what the control loops need."""

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
        self.relay = RelayBoard(lambda: self.replicas, self.next_batch_id)
        self.scarce_decode = False
        self._stuck: dict[int, Watcher] = {}
        self._receivers: list[Replica] | None = None
        """Replicas that may receive KV; None = to be found again."""
        self._draining: list[Replica] | None = None
        """Replicas that shut down their decodes; None = to be found again."""
        self._batch_ids = 0
        self.backends = SharedBackends()
        self.tiers = TierBook(plan)
        self.queue = build_queue(plan)
        self.insight = build_insight(self)
        released, ended = self._released, self._ended
        if self.insight is not None:
            released, ended = self._released_seen, self._ended_seen
        self.replicas: list[Replica] = [
            build_replica(self, r, has_prefixes=has_prefixes, leap=leap) for r in plan.replicas
        ]
        self.actors = [ReplicaActor(replica, self) for replica in self.replicas]
        join_waves(plan, self.replicas)
        self.watchers = build_watchers(self)
        self.gateway = Gateway(
            self.kernel,
            source,
            make_router(
                config.router.policy,
                seed=config.seed,
                pool="prefill",
                match=self._prefix_match,
                own=make_plugin if self.insight is None else self.insight.make,
            ),
            self.replicas,
            self.actors,
            config.router,
            config.recovery,
            max_model_tokens=max(r.max_model_tokens for r in plan.replicas),
            queue=self.queue,
            on_release=released,
            on_terminal=ended,
            cancel=self.cancel,
            intake=build_intake(self),
            admission=None if self.insight is None else self.insight.admission(),
        )
        check_commands(config.commands, len(self.replicas), plan.source)
        self.commander = Commander(self.kernel, self.replicas, config.commands)
        self.rejecter = build_rejecter(self)
        self.live = build_live(self)
        own = make_plugin if self.insight is None else self.insight.make
        self.scaler = make_scaler(self, plan, self.replicas, own)
        self._is_scaled = self.scaler.is_active
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
        if self.rejecter is not None:
            actors.append(self.rejecter)
        if self.live is not None and self.config.migration.rebalance:
            actors.append(self.live)
        if self.scaler.is_active:
            actors.append(self.scaler)
        return [*actors, self.gateway]

    def _close_books(self) -> None:
        self.scaler.close()
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
        if self.rejecter is not None:
            self.rejecter.look()
        if self.live is not None:
            self.live.look()
            if self.config.migration.drain:
                if self._draining is None:
                    self._draining = [r for r in self.replicas if r.state is S.SHUTTING_DECODE]
                for other in self._draining:
                    self.live.drain(other)
        if self._is_scaled:
            self.scaler.look()
        if self._stuck:
            for source_id in sorted(self._stuck):  # the order of getting stuck must not matter
                self._stuck[source_id].look()

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
        self._receivers = self._draining = None
        self.recorder.moved(replica, before, writer, cause, at_ns)
        self.relay.on_moved(replica, before)
        self.scaler.on_moved(replica, before, writer)
        self.faults.on_moved(replica, before)
        self.gateway.replica_moved()
        self.on_capacity(replica)

    def on_relayed(
        self, source: Replica, old: Replica, requests: list[Request], start_layer: int
    ) -> None:
        """A batch has been handed to a helper."""
        self.recorder.relayed(source, old, requests, start_layer, self.kernel.now_ns)

    # --- ScalerWorld --------------------------------------------------------------------------
    def _released(self, request: Request) -> None:
        self.recorder.released(request)
        if self._is_scaled:
            self.scaler.look()

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

    def waiting(self) -> tuple[int, int, int]:
        """Requests and prompt tokens that no replica has begun, and requests in the system."""
        gateway = self.gateway
        requests, tokens = len(gateway.held), sum(r.prompt_tokens for r in gateway.held)
        if self.queue is not None:
            requests += len(self.queue)
            tokens += self.queue.waiting_prefill_tokens
        else:
            for replica in self.replicas:
                requests += replica.scheduler.waiting_count
                tokens += replica.scheduler.waiting_tokens
        return requests, tokens, gateway.outstanding

    def note(self, kind: str, target: str, text: str) -> None:
        """A line in the run's timeline."""
        self.recorder.noted(self.kernel.now_ns, kind, target, text)

    def give_up(self, replica: Replica) -> None:
        """A live load has failed: KV that waits there, and batches handed over, are lost."""
        self.recovery.give_up(replica)

    # --- MigrationWorld -----------------------------------------------------------------------
    def receivers(self) -> Sequence[Replica]:
        """Replicas whose state lets them receive KV, ascending id."""
        if self._receivers is None:
            self._receivers = [r for r in self.replicas if r.state in RECEIVING]
        return self._receivers

    @property
    def tokens_in_migration(self) -> int:
        """Prompt tokens whose KV waits for a migration or is under way."""
        return sum(watcher.outbound.tokens for watcher in self.watchers.values())

    def searched(self, *, is_found: bool) -> None:
        """Without a destination, idle decode replicas are not to be dropped now."""
        self.scarce_decode = not is_found

    def set_stuck(self, source_id: int, *, is_stuck: bool) -> None:
        """Keep the list of watchers that wait for a destination."""
        if is_stuck:
            self._stuck[source_id] = self.watchers[source_id]
        else:
            self._stuck.pop(source_id, None)

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
                or (self.queue is not None and self.queue.cancel(request))
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
    def _prefix_match(self, replica_id: int, request: Request) -> int:
        replica = self.replicas[replica_id]
        replica.settle()
        return replica.scheduler.prefix_match(request)
