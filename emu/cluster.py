"""The world of one run: builds the actors from a plan, runs them, and keeps the books.

Owns what is shared by all actors: the kernel, the gateway, the replicas, their watchers, the
carrier of transfers, and the recorder. Decides nothing; every decision is made in the room that
it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from emu.actor import Kernel
from emu.autoscale.kv_reject import KvRejecter
from emu.batching.base import ReplicaLimits
from emu.batching.fcfs import PrefillQueue
from emu.batching.registry import make_scheduler
from emu.catalogue import sizes
from emu.commands import Commander, check_commands
from emu.config.schema import FaultTable
from emu.energy import energy_j
from emu.errors import RunError
from emu.faults.injector import Injector
from emu.faults.recovery import Recovery
from emu.gateway import Gateway, Source
from emu.kvtiers import TierBook
from emu.latency.base import LatencyBackend
from emu.latency.registry import LatencyContext, make_latency
from emu.migration.live import LiveMigrator
from emu.migration.relay import RelayBoard
from emu.migration.transfer import MigratingBatch
from emu.migration.watcher import Watcher
from emu.network.carrier import Carrier
from emu.network.placement import Grid
from emu.plan import Plan, ReplicaPlan, groups_of
from emu.recording import Recorder
from emu.replica.replica import Replica
from emu.replica.states import GPU_ROLE, ReplicaState, Writer
from emu.replica.tiering import TierTraffic
from emu.replica.turns import run_replica
from emu.replica.wave import WaveGroup
from emu.replica.world import BatchSink
from emu.replica.zigzag import abandon
from emu.report.summary import RunFacts
from emu.request import Request, Status
from emu.routing.policies import make_router
from emu.scaling import make_scaler
from emu.units import ms_to_ns, s_to_ns

S = ReplicaState
_START = {
    "colocated": S.COLOCATED,
    "prefill": S.PREFILL,
    "decode": S.DECODE,
    "inactive": S.INACTIVE,
}


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
        self.recorder = recorder
        self.gaps = recorder.gaps
        self.batches: BatchSink | None = recorder.trace
        self.history = recorder.history
        self.network = Carrier(self.kernel, plan.topology)
        self.relay = RelayBoard(self.network, lambda: self.replicas)
        self.scarce_decode = False
        self.tokens_in_migration = 0
        self._stuck: dict[int, Watcher] = {}
        self._batch_ids = 0
        self._backends: list[tuple[LatencyContext, LatencyBackend]] = []
        self.tiers = TierBook(plan)
        is_fcfs = any(r.scheduler.policy == "fcfs" for r in plan.replicas)
        has_roles = not any(r.role == "colocated" for r in plan.replicas)
        self.queue = PrefillQueue() if is_fcfs and has_roles else None
        self.replicas: list[Replica] = [
            self._make_replica(r, has_prefixes=has_prefixes, leap=leap) for r in plan.replicas
        ]
        for name, members in groups_of(plan.replicas).items():
            first = members[0]
            is_shared = first.model.experts is not None and first.expert_parallel > 1
            wave = WaveGroup(name, shares_experts=is_shared)
            for member in members:
                wave.join(self.replicas[member.replica_id])
        self.watchers: dict[int, Watcher] = {}
        for replica, its_plan in zip(self.replicas, plan.replicas, strict=True):
            if its_plan.role != "colocated":
                self._make_watcher(replica, its_plan)
        self.gateway = Gateway(
            self.kernel,
            source,
            make_router(
                config.router.policy, seed=config.seed, pool="prefill", match=self._prefix_match
            ),
            self.replicas,
            config.router,
            config.recovery,
            max_model_tokens=max(r.max_model_tokens for r in plan.replicas),
            queue=self.queue,
            on_release=self._released,
            on_terminal=self._ended,
            cancel=self.cancel,
        )
        check_commands(config.commands, len(self.replicas), plan.source)
        self.commander = Commander(self.kernel, self.replicas, config.commands)
        self.rejecter: KvRejecter | None = None
        if config.kv_reject is not None and config.kv_reject.enabled:
            self.rejecter = KvRejecter(self.kernel, self.replicas, config.kv_reject)
        self.live: LiveMigrator | None = None
        if config.migration.rebalance or config.migration.drain:
            decoding = next((r for r in plan.replicas if r.role == "decode"), plan.replicas[0])
            self.live = LiveMigrator(
                self,
                config.migration,
                block_size=decoding.scheduler.block_size,
                kv_bytes_per_token=decoding.kv_bytes_per_token,
            )
        self.scaler = make_scaler(self, plan, self.replicas)
        self.attempts_max = config.recovery.max_retries
        self.recovery = Recovery(self)
        self.faults = Injector(self, self.recovery)
        self.faults.start()
        self.kernel.story = self._story
        self.kernel.last_resort = self.recovery.fail_unservable

    def _make_replica(self, plan: ReplicaPlan, *, has_prefixes: bool, leap: bool | None) -> Replica:
        table = plan.scheduler
        limits = ReplicaLimits(
            num_blocks=plan.num_blocks,
            block_size=table.block_size,
            max_model_tokens=plan.max_model_tokens,
            pipeline_stages=plan.pipeline_parallel,
            prefix_caching=table.prefix_caching and has_prefixes,
            leap=table.leap if leap is None else leap,
        )
        latency = self._latency(plan)
        if latency.foreign or plan.data_parallel_group:
            limits = msgspec.structs.replace(limits, leap=False)
        scheduler = make_scheduler(
            table,
            limits,
            queue=self.queue,
            preemptions_max=self.config.limits.preemptions_per_request,
            tiers=self.tiers.of(plan),
            ahead=plan.schedules_ahead,
        )
        replica = Replica(
            plan.replica_id,
            self,
            scheduler,
            latency,
            state=_START[plan.role],
            grid=Grid(plan.gpus, plan.tensor_parallel),
            machine=plan.machine,
            stages=plan.pipeline_parallel,
        )
        experts, gate = plan.model.experts, plan.latency.expert_routing
        if experts is not None and plan.latency.backend == "profile" and gate != "balanced":
            replica.expert_tokens = np.zeros(experts.count, dtype=np.int64)
        pool = getattr(scheduler, "block_pool", None)
        if pool is not None and pool.tiers:
            replica.tier_traffic = TierTraffic(self.network, plan.gpus, self.tiers.kinds, pool)
        if self.config.power is not None:
            replica.standby_limit_ns = s_to_ns(self.config.power.gpu_standby_s)
        replica.layers = plan.model.layers
        replica.activation_token_bytes = plan.model.hidden * sizes.weight_bytes(
            1, sizes.activation_dtype(plan.model, plan.dtype)
        )
        return replica

    def _latency(self, plan: ReplicaPlan) -> LatencyBackend:
        """Replicas of the same kind share one backend and its tables."""
        context = plan.latency_context(self.config)
        for known, backend in self._backends:
            if known == context:
                return backend
        backend = make_latency(context)
        self._backends.append((context, backend))
        return backend

    def _make_watcher(self, replica: Replica, plan: ReplicaPlan) -> None:
        watcher = Watcher(
            replica,
            self,
            policy=self.config.router.decode_policy,
            block_size=plan.scheduler.block_size,
            kv_bytes_per_token=plan.kv_bytes_per_token,
            layers=plan.model.layers,
            layerwise=self.config.network.kv_transfer == "layerwise",
            lease_ns=ms_to_ns(self.config.recovery.lease_ms),
        )
        replica.handoff = watcher
        self.watchers[replica.replica_id] = watcher

    # --- running ------------------------------------------------------------------------------
    async def run(self) -> Outcome:
        """Run to the end of the workload (or an error, which is returned, not raised)."""
        kernel = self.kernel
        for replica in self.replicas:
            kernel.spawn(run_replica(replica), name=replica.name)
        for replica_id, watcher in self.watchers.items():
            kernel.spawn(watcher.run(), name=f"watcher {replica_id}")
        if self.rejecter is not None:
            kernel.spawn(self.rejecter.run(), name="kv rejecter")
        if self.live is not None and self.config.migration.rebalance:
            kernel.spawn(self.live.rebalance(), name="rebalancer")
        if self.scaler.is_active:
            kernel.spawn(self.scaler.run(), name="planner")
            self.scaler.changed.notify()
        kernel.spawn(self.gateway.run(), name="gateway")
        interval_ms = self.config.output.timeseries_interval_ms
        if interval_ms > 0:
            kernel.sample_every(max(1, round(interval_ms * 1e6)), self._sample)
        limit_s = self.config.limits.simulated_s
        error: BaseException | None = None
        try:
            await kernel.run(limit_ns=s_to_ns(limit_s) if limit_s else None)
        except Exception as raised:  # the rim decides what to do with it
            error = raised
        except KeyboardInterrupt as raised:
            error = raised
        finally:
            unclosed = await self._close_backends()
        error = error or unclosed
        if interval_ms > 0 and error is None:
            self._sample(kernel.now_ns)  # what happened since the last full interval
        self._close_books()
        return Outcome(error, kernel.now_ns, kernel.events, f"{kernel.digest:016x}")

    async def _close_backends(self) -> RunError | None:
        """End the programs that latency backends have started, however the run ended."""
        problem: RunError | None = None
        backends = [getattr(backend, "inner", backend) for _, backend in self._backends]
        closing = [backend for backend in backends if hasattr(backend, "aclose")]
        if not closing:
            return None
        import anyio

        with anyio.CancelScope(shield=True):
            for backend in closing:
                try:
                    await backend.aclose()
                except RunError as raised:
                    problem = problem or raised
        return problem

    def _close_books(self) -> None:
        self.scaler.close()
        now_ns = self.kernel.now_ns
        for replica in self.replicas:
            spent = replica.state_ns.get(replica.state, 0) + now_ns - replica.state_since_ns
            replica.state_ns[replica.state] = spent
            replica.state_since_ns = now_ns

    def _sample(self, at_ns: int) -> None:
        self.recorder.sample(at_ns, self)

    # --- World --------------------------------------------------------------------------------
    def terminal(self, request: Request, status: Status, reason: str = "") -> None:
        """A request's one terminal event."""
        if self.live is not None and self.live.moving:
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

    def refuses(self, source: Replica, destination: Replica) -> bool:
        """A fault makes this destination refuse what it has room for."""
        transfers = self.faults.transfers
        if not transfers.windows:
            return False
        return transfers.refuses(source.replica_id, destination.replica_id)

    def offer_later(self, watcher: Watcher, attempts: int) -> None:
        """A batch that was refused everywhere is offered again."""
        if watcher.is_pausing:
            return
        watcher.is_pausing = True

        def offer() -> None:
            watcher.is_pausing = False
            watcher.inbox.poke()

        self.faults.transfers.offer_later(offer, attempts)

    def inject(self, fault: FaultTable) -> None:
        """A fault strikes at its time, or now. Raises InputError if it cannot."""
        self.faults.inject(fault)

    def on_capacity(self, replica: Replica) -> None:
        """Watchers that wait for a destination look again, and routers at its load."""
        replica.touch()
        if self.rejecter is not None:
            self.rejecter.changed.notify()
        if self.live is not None:
            self.live.changed.notify()
            if self.config.migration.drain:
                for other in self.replicas:
                    if other.state is S.SHUTTING_DECODE:
                        self.live.drain(other)
        self.scaler.changed.notify()
        if self._stuck:
            for source_id in sorted(self._stuck):  # who got stuck first must not matter
                self._stuck[source_id].inbox.poke()

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
        self.recorder.moved(replica, before, writer, cause, at_ns)
        self.relay.on_moved(replica, before)
        self.scaler.on_moved(replica, before)
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
        self.scaler.changed.notify()

    def _ended(self, request: Request) -> None:
        self.recorder.ended(request, self.kernel.now_ns)
        self.recorder.terminal(request)

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
        """A live load failed: what the replica has begun goes back to the queue."""
        abandon(replica)

    # --- MigrationWorld -----------------------------------------------------------------------
    def decode_replicas(self) -> Sequence[Replica]:
        """All replicas, ascending id (watchers check the state themselves)."""
        return self.replicas

    def set_stuck(self, watcher: Watcher, *, is_stuck: bool) -> None:
        """Keep the list of watchers that wait for a destination."""
        source_id = watcher.source.replica_id
        if is_stuck:
            self._stuck[source_id] = watcher
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

    # --- cancellation -------------------------------------------------------------------------
    def cancel(self, request: Request) -> None:
        """The client has left, at whatever stage the request is."""
        reason = "client_left"
        if request.holder_id < 0:
            if self.queue is not None and self.queue.cancel(request):
                self.terminal(request, Status.CANCELLED, reason)
            elif request in self.gateway.held:
                self.gateway.held.remove(request)
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
        self.replicas[request.holder_id].cancel(request, Status.CANCELLED, reason)

    # --- seeing -------------------------------------------------------------------------------
    def _prefix_match(self, replica_id: int, request: Request) -> int:
        replica = self.replicas[replica_id]
        match = getattr(replica.scheduler, "prefix_match", None)
        if match is None:
            return 0
        replica.settle()
        return int(match(request))

    def _story(self) -> list[str]:
        lines = [f"{self.gateway.outstanding} requests are outstanding"]
        for replica in self.replicas:
            scheduler = replica.scheduler
            lines.append(
                f"{replica.name}: {replica.state.value}, {scheduler.waiting_count} waiting, "
                f"{scheduler.running_count} running, {scheduler.blocks_used}/"
                f"{scheduler.blocks_total} blocks, lock held by {replica.lock.holder or 'nobody'}"
            )
            lines += [f"  {line}" for line in replica.story[-5:]]
        for watcher in self.watchers.values():
            if watcher.queue or watcher.in_flight is not None or watcher.partials.own():
                lines.append(watcher.describe())
        return lines

    def leaks(self) -> list[str]:
        """What is left in the books at the end of a complete run; must be empty."""
        lines = []
        if self.gateway.outstanding:
            lines.append(f"{self.gateway.outstanding} requests without a terminal event")
        if self.tokens_in_migration:
            lines.append(f"{self.tokens_in_migration} tokens in migration")
        for replica in self.replicas:
            scheduler = replica.scheduler
            if scheduler.blocks_used or scheduler.running_count or scheduler.waiting_count:
                lines.append(
                    f"{replica.name}: {scheduler.blocks_used} blocks, "
                    f"{scheduler.running_count} running, {scheduler.waiting_count} waiting"
                )
            lines += [f"{replica.name}: {line}" for line in scheduler.recount()]
        return lines

    def expert_loads(self) -> list[tuple[int, list[int]]]:
        """(replica, tokens of each expert) where a gate spreads them unevenly."""
        return [
            (replica.replica_id, replica.expert_tokens.tolist())
            for replica in self.replicas
            if replica.expert_tokens is not None
        ]

    def _energy_j(self) -> dict[str, float] | None:
        power = self.config.power
        if power is None:
            return None
        moved = self.network.moved_bytes
        return energy_j(power, self.plan, self.replicas, moved, self.kernel.now_ns)

    def run_facts(self) -> RunFacts:
        """What only the cluster knows of the run, for the summary."""
        gpu_ns: dict[str, int] = {}
        idle_ns = 0
        for replica in self.replicas:
            gpus = len(replica.gpus)
            serving_ns = 0
            for state, spent_ns in replica.state_ns.items():
                role = GPU_ROLE[state]
                if role:
                    gpu_ns[role] = gpu_ns.get(role, 0) + spent_ns * gpus
                if role in ("prefill", "decode", "colocated"):
                    serving_ns += spent_ns
            idle_ns += max(0, serving_ns - replica.busy_ns) * gpus
        return RunFacts(
            end_ns=self.kernel.now_ns,
            gpu_ns=gpu_ns,
            idle_gpu_ns=idle_ns,
            bytes_moved=self.network.moved_bytes,
            scale_ups=self.scaler.scale_ups,
            scale_downs=self.scaler.scale_downs,
            loads=self.scaler.loads,
            host_cache_bytes=self.scaler.host_cache_bytes(),
            faults=self.faults.struck,
            faults_missed=self.faults.missed,
            energy_j=self._energy_j(),
        )
