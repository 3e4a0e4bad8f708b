"""The world of one run: owns the actors, runs them, and is what they tell and ask.

Owns what is shared by all actors: the kernel, the gateway, the replicas, their watchers, the
carrier of transfers, and the recorder. Decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from emu.autoscale.ports import Waiting
from emu.autoscale.scaler import Scaler
from emu.catalogue.flops import model_flops
from emu.cluster.backends import SharedBackends
from emu.cluster.build import (
    Shared,
    build_columns,
    build_dispatch,
    build_doors,
    build_intake,
    build_own_policies,
    build_queue,
    build_rejecter,
    build_replica,
    fault_handlers,
    tell_decisions,
)
from emu.cluster.build_waves import join_waves
from emu.cluster.commands import Commander, check_commands
from emu.cluster.control_loops import Scalers
from emu.cluster.ending import Outcome, StallGuard, ended
from emu.cluster.gateway import Gateway, Requests, Source
from emu.cluster.gpu_sharing import GpuSharing
from emu.cluster.plan import Plan, groups_of
from emu.cluster.ports import PLAIN, LiveMove, Ports, Relay, StateChange
from emu.cluster.recorder import Recorder
from emu.cluster.tier_book import TierBook
from emu.config.schema import FaultTable
from emu.faults.injector import Injector
from emu.faults.recovery import Recovery
from emu.kernel.clock import Actor, Kernel
from emu.network.carrier import Carrier
from emu.network.topology import Topology
from emu.replica.actor import ReplicaActor
from emu.replica.events import Asked, Cancelled
from emu.replica.ports import BatchSink
from emu.replica.relay_board import RelayBoard
from emu.replica.replica import Replica
from emu.replica.split_batch import SplitBatch
from emu.replica.states import RECEIVING, ReplicaState, Writer
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status
from emu.scheduling.fcfs import PrefillQueue
from emu.units import s_to_ns

if TYPE_CHECKING:
    from emu.autoscale.kv_reject import KvRejecter
    from emu.faults.ports import SharedExperts
    from emu.migration.live import LiveMigrator
    from emu.migration.transfer import MigratingBatch
    from emu.migration.watcher import Watcher

S = ReplicaState


class Cluster:
    """Implements `World`; what concerns one model is in its pool."""

    def __init__(
        self,
        plan: Plan,
        source: Requests,
        recorder: Recorder,
        ports: Ports = PLAIN,
        kernel: Kernel | None = None,
    ) -> None:
        """`ports`: `tokens` and `leap` are read here, the others by the recorder."""
        self.plan = plan
        self.config = plan.config
        limits = plan.config.limits
        self.kernel = kernel or Kernel(events_per_instant_max=limits.events_per_instant)
        self.recorder = recorder
        self.gaps = recorder.gaps
        self.batches: BatchSink | None = recorder.batch_sink()
        self.on_formed = recorder.on_formed
        self.streams = ports.tokens is not None
        self._tokens = ports.tokens
        self.history = recorder.history
        self.network = Carrier(self.kernel, plan.topology)
        self.backends = SharedBackends()
        self.tiers = TierBook(plan)
        self.replicas: list[Replica] = []
        self.watchers: dict[int, Watcher] = {}
        self.scalers: list[Scaler] = []
        self.live: LiveMigrator | None = None
        self._draining: list[ReplicaHandle] | None = None
        """Replicas that shut down their decodes; None = to be found again."""
        self._batch_ids = 0
        self.own_policies = build_own_policies(plan, self.kernel, self.replicas, self.watchers)
        shared = Shared(
            plan,
            self.kernel,
            self.network,
            self.backends,
            self.tiers,
            self,
            self.own_policies,
            source.has_prefixes,
            self._leaps(ports.leap),
            {},
        )
        self.pools = [
            ModelPool(self, index, name, queue=build_queue(plan, name))
            for index, name in enumerate(plan.models)
        ]
        self.pool_of = [self.pools[plan.model_indices[r.served]] for r in plan.replicas]
        """By replica."""
        self._tell_recorder()
        self._make_replicas(shared)
        self._make_gateway(shared, source)
        check_commands(self.config.commands, len(self.replicas), plan.source)
        self.commander = Commander(self.kernel, self.replicas, self.config.commands, self.note)
        self._make_loops(shared)
        self._make_recovery()

    def _leaps(self, leap: bool | None) -> bool | None:
        """Whether replicas may leap (None: as configured); a history of steps is told so."""
        if self.history is not None and self.history.follows_steps:
            self.history.links(self.plan.topology)
            self.network.tell_history(self.history)
            return False
        return False if self.streams else leap

    def _tell_recorder(self) -> None:
        """What the recorder has to know beforehand."""
        recorder, plan = self.recorder, self.plan
        if recorder.log is not None:
            recorder.log.use_clock(lambda: self.kernel.now_ns)
        specs = {replica.served: replica.model for replica in plan.replicas}
        recorder.requests.add_columns(build_columns(plan))
        recorder.requests.count_flops([model_flops(specs[name]) for name in plan.models])

    def _make_replicas(self, shared: Shared) -> None:
        """The replicas with their actors, groups, shared GPUs and watchers."""
        plan = self.plan
        for its_plan, pool in zip(plan.replicas, self.pool_of, strict=True):
            replica = build_replica(shared, its_plan, pool)
            self.replicas.append(replica)
            pool.members.append(replica)
        self.sharing = GpuSharing(
            plan,
            self.replicas,
            [pool.members for pool in self.pools],
            self.scalers,
            lambda model: self.pools[model].waiting().outstanding,
        )
        self.actors = [ReplicaActor(replica, self) for replica in self.replicas]
        self.waves = join_waves(plan, self.replicas)
        if any(its_plan.role != "colocated" for its_plan in plan.replicas):
            from emu.cluster.build_migration import build_watchers

            self.watchers |= build_watchers(shared, self.replicas, self.pools, self.history)
        self._is_shared = [r.shared for r in plan.replicas]

    def _make_gateway(self, shared: Shared, source: Source) -> None:
        policies = self.own_policies
        self.gateway = Gateway(
            self.kernel,
            source,
            [
                build_dispatch(shared, pool, self.actors, match=self.prefix_match, holds=self.holds)
                for pool in self.pools
            ],
            self.replicas,
            self.config.router,
            self.config.recovery,
            on_release=self._released if policies is None else self._released_seen,
            on_terminal=self._ended if policies is None else self._ended_seen,
            cancel=self.cancel,
            on_routed=self.recorder.on_routed,
            intake=build_intake(shared.plan),
            doors=build_doors(shared.plan),
            admission=None if policies is None else policies.admission(),
            clients=self.config.workload.concurrency or self.config.workload.max_in_flight,
            is_paced=self.config.workload.max_in_flight > 0,
        )

    def _make_loops(self, shared: Shared) -> None:
        """What rebalances running requests, and the control loops of each model."""
        if self.config.migration.rebalance or self.config.migration.drain:
            from emu.cluster.build_migration import build_live

            self.live = build_live(shared, self)
        for pool in self.pools:
            pool.rejecter = build_rejecter(
                shared, pool.members, on_capacity=self.on_capacity, on_changed=self.on_rejected
            )
        own = None if self.own_policies is None else self.own_policies.make
        self.scalers += Scalers(self.plan, self.replicas, own).make(self.pools)
        for pool, scaler in zip(self.pools, self.scalers, strict=True):
            pool.scaler = scaler
        self._is_scaled = self.scalers[0].is_active
        if self.history is not None and self.history.follows_steps:
            rejecters = [pool.rejecter for pool in self.pools]
            tell_decisions(self.history, self.kernel, self.scalers, rejecters, self.live)
        if self.own_policies is not None:
            self.own_policies.keep_history()

    def _make_recovery(self) -> None:
        """Faults, and what happens after them."""
        self.recovery = Recovery(self)
        if any(replica.shared for replica in self.plan.replicas):
            self.recovery.lose_capacity()  # to another model: one may never find the GPUs it needs
        self.faults = Injector(self, self.recovery, fault_handlers)
        self.faults.start()
        self.kernel.ask_at_rest(self.story, self.recovery.fail_unservable)

    async def run(self) -> Outcome:
        """Run to the end of the workload (or an error, which is returned, not raised)."""
        kernel = self.kernel
        self.recorder.started(self.replicas)
        on_actor = self.recorder.on_actor
        for actor in self.living():
            kernel.start(actor)
            if on_actor is not None:
                on_actor(actor.name)
        interval_ms = self.config.output.timeseries_interval_ms
        if interval_ms > 0:
            kernel.sample_every(max(1, round(interval_ms * 1e6)), self._sample)
        if self.config.limits.stalled_s:
            bound_ns = s_to_ns(self.config.limits.stalled_s)
            guard = StallGuard(
                kernel,
                self.gateway,
                self.replicas,
                self.network,
                lambda: sum(scaler.loads_given_up for scaler in self.scalers),
                bound_ns,
                self.story,
            )
            kernel.watch_every(guard.period_ns, guard.look)
        limit_s = self.config.limits.simulated_s
        running = kernel.run(limit_ns=s_to_ns(limit_s) if limit_s else None)
        error = await ended(running, self.backends.aclose)
        if interval_ms > 0 and error is None:
            self._sample(kernel.now_ns)  # what happened since the last full interval
        self._close_books()
        return Outcome(error, kernel.now_ns, kernel.events, f"{kernel.digest:016x}")

    def living(self) -> list[Actor]:
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
            replica.counters.note_time(replica.state, now_ns)
        self.faults.close()
        self.commander.close()

    def warnings(self) -> list[str]:
        """After a run: what was asked for and had no effect."""
        refused = [f"command at {line}" for line in self.commander.refused]
        return [*self.faults.without_effect, *refused]

    def _sample(self, at_ns: int) -> None:
        self.recorder.sample(
            at_ns,
            self.replicas,
            self._is_shared,
            self.gateway,
            self.watchers.values(),
            self.network,
        )

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

    def refuses(
        self, source: ReplicaHandle, destination: ReplicaHandle, requests: list[Request]
    ) -> bool:
        """A fault makes this destination refuse what it has room for."""
        transfers = self.faults.transfers
        if not transfers.windows:
            return False
        if not destination.view().has_room(requests):
            return False
        return transfers.refuses(source.replica_id, destination.replica_id)

    def drain_expired(self, replica: ReplicaHandle, requests: list[Request]) -> None:
        """A draining replica's time is over: what it held, and its outbound KV, is lost."""
        self.recovery.drain_expired(replica, requests)

    @property
    def topology(self) -> Topology:
        """Machines, GPUs and links."""
        return self.plan.topology

    def is_spare(self, replica: ReplicaHandle) -> bool:
        """The plan gives it no role."""
        return self.plan.replicas[replica.replica_id].role == "inactive"

    def are_equal(self, one: ReplicaHandle, other: ReplicaHandle) -> bool:
        """Both have the same shape: one can take the other's role."""
        plans = self.plan.replicas
        return plans[one.replica_id].shape == plans[other.replica_id].shape

    def inject(self, fault: FaultTable) -> None:
        """A fault strikes at its time, or now. Raises InputError if it cannot."""
        self.faults.inject(fault)

    def on_capacity(self, replica: ReplicaHandle) -> None:
        """Watchers that wait for a destination look again, and routers at its load."""
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

    def on_rejected(self, replica: ReplicaHandle, is_rejected: bool) -> None:
        """A replica stops receiving KV because it is far fuller than the rest, or no longer."""
        self.recorder.rejected(replica, is_rejected=is_rejected, at_ns=self.kernel.now_ns)

    def on_draining(self, replica: ReplicaHandle) -> None:
        """Move a decode away from a replica that shuts down, if so configured."""
        if self.live is not None and self.config.migration.drain:
            self.live.drain(replica)

    def on_live_migration(
        self,
        request: Request,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        started_ns: int,
        stop_ns: int,
    ) -> None:
        """A running request has moved."""
        self.recorder.moved_live(LiveMove(request, source, destination, started_ns, stop_ns))

    def on_tokens(self, replica_id: int, receivers: list[Request]) -> None:
        """Called only where the history or the port wants every token."""
        if self._tokens is not None:
            self._tokens(replica_id, receivers)

    def on_moved(
        self, replica: ReplicaHandle, before: ReplicaState, writer: Writer, cause: str, at_ns: int
    ) -> None:
        """A replica's state changed: record it; routing and watchers may go on."""
        pool = self.pool_of[replica.replica_id]
        self._draining = None
        pool.replica_moved()
        self.recorder.moved(StateChange(replica, before, writer, cause, at_ns))
        pool.relay.on_moved(replica.replica_id, before, replica.state)
        self.sharing.on_moved(replica, before)
        pool.scaler.on_moved(replica, before, writer)
        self.faults.on_moved(replica, before)
        self.gateway.replica_moved(pool.index)
        self.on_capacity(replica)

    def on_relayed(
        self, source: ReplicaHandle, old: ReplicaHandle, requests: list[Request], start_layer: int
    ) -> None:
        """A batch has been handed to a helper."""
        self.recorder.relayed(Relay(source, old, requests, start_layer, self.kernel.now_ns))

    def _released(self, request: Request) -> None:
        self.recorder.released(request)
        if self._is_scaled:
            self.pools[request.model].scaler.look()

    def _ended(self, request: Request) -> None:
        self.recorder.terminal(request, self.kernel.now_ns)
        if self._is_scaled:
            self.pools[request.model].scaler.request_ended()

    def _released_seen(self, request: Request) -> None:
        """With policies of a user's own: they have books, and may want to be told."""
        assert self.own_policies is not None
        self._released(request)
        self.own_policies.arrived(request)

    def _ended_seen(self, request: Request) -> None:
        assert self.own_policies is not None
        self._ended(request)
        self.own_policies.ended(request)

    def expert_groups(self) -> dict[str, SharedExperts]:
        """Groups that share experts as [engine] says, by name."""
        from emu.faults.ports import SharedExperts  # only the loss of a rank asks

        return {
            name: SharedExperts(
                [member.replica_id for member in members], members[0].latency_context(self.config)
            )
            for name, members in groups_of(self.plan.replicas).items()
            if members[0].experts is not None
        }

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

    def scaler_of(self, replica: ReplicaHandle) -> Scaler:
        """What loads the replica's weights."""
        return self.pool_of[replica.replica_id].scaler

    def relay_of(self, replica: ReplicaHandle) -> RelayBoard:
        """Where the replica's model relays batches."""
        return self.pool_of[replica.replica_id].relay

    def on_transfer(
        self,
        batch: MigratingBatch,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        ended_ns: int,
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
            from emu.migration.messages import SplitLost

            self.watchers[split.first_id].tell(SplitLost(split))

    def on_reply(self, asked: Asked, value: int) -> None:
        """A replica answers a live migration or a fault."""
        if asked.by == "injector":
            self.faults.answered(asked.number, value)
        else:
            assert self.live is not None
            self.live.answered(asked.number)

    def cancel(self, request: Request) -> None:
        """The client has left, at whatever stage the request is."""
        reason = "client_left"
        if request.holder_id < 0:
            if (
                request in self.gateway.taking
                or request.request_id in self.gateway.at_doors
                or any(q.cancel(request) for q in self.queues)
                or self.gateway.cancel_held(request)
            ):
                self.terminal(request, Status.CANCELLED, reason)
            return
        watcher = self.watchers.get(request.holder_id)
        if request.status is Status.MIGRATING:
            moving = {} if self.live is None else self.live.moving
            if moving.get(request.holder_id) is request or (
                watcher is not None and watcher.cancel(request)
            ):
                self.terminal(request, Status.CANCELLED, reason)
                return
            if watcher is not None:
                return
        leave = Cancelled(request=request, status=Status.CANCELLED, reason=reason)
        self.actors[request.holder_id].post(leave)

    def holds(self, replica_id: int, request: Request) -> bool:
        """Whether a replica holds what a feature would load for the request."""
        return self.replicas[replica_id].view().holds(request)

    def prefix_match(self, replica_id: int, request: Request) -> int:
        """Prompt tokens of the request that a replica has in its cache."""
        return self.replicas[replica_id].view().prefix_match(request)

    def story(self) -> list[str]:
        """Where everything stands: what a run that is stuck shows."""
        lines = [f"{self.gateway.outstanding} requests are outstanding"]
        for replica in self.replicas:
            view = replica.view()
            lines.append(
                f"{replica.name}: {replica.state.value}, {view.waiting_count} waiting, "
                f"{view.running_count} running, {view.blocks_used}/"
                f"{view.blocks_total} blocks, lock held by {replica.lock.holder or 'none'}"
            )
            lines += [f"  {line}" for line in replica.history[-5:]]
        for watcher in self.watchers.values():
            if watcher.outbound.batches() or watcher.outbound.splits():
                lines.append(watcher.describe())
        return lines


class ModelPool:
    """The replicas of one served model, and what they share; all of them if there is one model.

    Owns the queue of prompts, the relay of live scaling, the list of receivers and of watchers that
    wait for one, and the control loops of the model. It is the world that watchers and the planner
    see (`MigrationWorld`, `ScalerWorld`): another model's replicas are not in it, its GPUs and
    links are.
    """

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
        self.members: list[ReplicaHandle] = []
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
        self.on_sent = cluster.recorder.on_sent
        self.lost = cluster.lost
        self.stuck: dict[int, Watcher] = {}
        """Those that wait for a destination, by source."""
        self._receivers: list[ReplicaHandle] | None = None
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

    def replica_moved(self) -> None:
        """A replica has changed its state."""
        self._receivers = None

    def poke(self) -> None:
        """Blocks or a lock are free: watchers that wait for a destination look again."""
        for source_id in sorted(self.stuck):  # the order of getting stuck must not matter
            self.stuck[source_id].look()

    def waiting(self) -> Waiting:
        """What waits now."""
        gateway = self.cluster.gateway
        held = [r for r in gateway.held if self.is_only or r.model == self.index]
        requests, tokens = len(held), sum(r.prompt_tokens for r in held)
        if self.queue is not None:
            requests += len(self.queue)
            tokens += self.queue.waiting_prefill_tokens
        else:
            for replica in self.members:
                view = replica.view()
                requests += view.waiting_count
                tokens += view.waiting_tokens
        outstanding = gateway.outstanding
        if not self.is_only:
            outstanding = gateway.dispatches[self.index].outstanding
        return Waiting(requests, tokens, outstanding)

    def is_placeable(self, replica: ReplicaHandle) -> bool:
        """No replica of another model is on its GPUs."""
        return self.cluster.sharing.is_free(replica)

    @property
    def placements(self) -> int:
        """Changes whenever GPUs that models share are taken or given back."""
        return self.cluster.sharing.version

    def wants_room(self, replicas: int) -> None:
        """So many replicas find no GPUs: other models give up spares and what they can spare."""
        self.cluster.sharing.make_room(self.index, replicas)

    def note(self, kind: str, target: str, text: str) -> None:
        """A line in the run's timeline."""
        self.cluster.note(kind, target if self.is_only else target or self.name, text)

    def give_up(self, replica: ReplicaHandle) -> None:
        """A live load has failed: KV that waits there, and batches handed over, are lost."""
        self.cluster.recovery.give_up(replica)

    def receivers(self) -> Sequence[ReplicaHandle]:
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
