"""A cluster that is watched while it scales: the properties of BlitzScale section 8, as they happen.

The names are the reference's. Each is checked against what can be seen from outside (bytes that
arrived over links, times, batches), not against the books that it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from emu.autoscale.demand import scan
from emu.autoscale.orders import Load
from emu.cluster.cluster import Cluster
from emu.migration.transfer import MigratingBatch, kv_bytes
from emu.replica.events import KvDelivered
from emu.replica.flight.layered import Layered
from emu.replica.layer_scheduler import LayerScheduler, LayerTask
from emu.replica.live_scaling import layered_of
from emu.replica.replica import Replica
from emu.replica.split_batch import SplitBatch
from emu.replica.states import TRANSITIONS, Marker, ReplicaState
from emu.request import Request
from tests.made import takes_the_place_of_compiled_code

S = ReplicaState
MS = 1_000_000
NEW = (S.NEW_PREFILL, S.REFRACTORY_PREFILL)
CLOSED = (
    S.INACTIVE,
    S.LOADING_PREFILL,
    S.LOADING_DECODE,
    S.PREFILL,
    S.NEW_PREFILL,
    S.OLD_PREFILL,
    S.REFRACTORY_PREFILL,
    S.SHUTTING_PREFILL,
)
"""I5: states in which a replica holds its own lock."""
RDMA = ("p2p", "chain", "tanz")
ROUNDING_BYTES = 64
"""A mark is passed in the nanosecond in which its last byte is."""


class WatchedZag(LayerScheduler):
    """Notes which layer of which batch ran when, and looks at the limits at each admission."""

    watcher: Watched
    replica: Replica

    def __init__(self, layers: int, started_ns: int) -> None:
        super().__init__(layers, started_ns)
        self.removed: dict[int, tuple[LayerTask, int]] = {}
        """By row of a request: the batch that left with it, and its place among those pending."""

    def admit(self, batch: Any) -> LayerTask:
        task = super().admit(batch)
        elapsed_ms = (self.replica.clock.now_ns - self.started_ns) // MS
        allowed = 4 if elapsed_ms < 200 else 3 if elapsed_ms < 400 else 2
        if len(self.pending) > allowed:
            self.watcher.problem(f"I11: {len(self.pending)} outstanding after {elapsed_ms} ms")
        self.watcher.admitted += 1
        return task

    def start(self, task: LayerTask, now_ns: int, cost_ns: int) -> None:
        layer = task.layers_done
        if layer >= self.watcher.layers_there(self.replica):
            self.watcher.problem(f"I8: layer {layer} of {self.replica.name} runs unloaded")
        self.watcher.layers_run.setdefault(id(task), []).append(layer)
        self.watcher.keep.append(task)
        super().start(task, now_ns, cost_ns)

    def remove(self, task: LayerTask) -> None:
        unfinished = [t for t in self.pending if t.layers_done < self.layers]
        if self.replica.state is S.NEW_PREFILL:
            self.position = unfinished.index(task) if task in unfinished else -1
        else:
            self.position = list(self.pending).index(task)
        for chunk in task.batch.chunks:
            self.removed[chunk.request.row] = (task, self.position)
        super().remove(task)

    def pop_done(self) -> LayerTask | None:
        task = super().pop_done()
        if task is not None:
            ran = self.watcher.layers_run.get(id(task), [])
            if ran != list(range(self.layers)):
                self.watcher.problem(f"I8: a batch completed here after layers {ran}")
            if any(other.seq < task.seq for other in self.pending):
                self.watcher.problem("I9: finished here out of order")
            self.watcher.completed_here += 1
        return task


class Watched(Cluster):
    """A cluster whose invariants are looked at after every change of a state, and more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        takes_the_place_of_compiled_code()
        self.problems: list[str] = []
        self.layers_run: dict[int, list[int]] = {}
        self.keep: list[LayerTask] = []
        """So that ids stay unique."""
        self.admitted = self.completed_here = self.relayed = self.halves_met = 0
        self.relayed_from: dict[str, int] = {}
        self.chains_done = 0
        self.last_id = -1
        """A request that comes long after all others."""
        self.rested = False
        self._gpu_bytes: dict[int, int] = {}
        """Weights that have come over links into each GPU, in loads under way or done."""
        self._partial: dict[int, list[MigratingBatch]] = {}
        self._split: dict[int, SplitBatch] = {}
        self._gpu_of: dict[int, int] = {}
        super().__init__(*args, **kwargs)
        self._watch_links()
        self._watch_loads()
        self._watch_ticks()
        for replica in self.replicas:
            self._watch_deliveries(replica)

    def problem(self, text: str) -> None:
        """Note what must not be."""
        self.problems.append(f"{self.kernel.now_ns / MS:.3f} ms: {text}")

    # --- states ---------------------------------------------------------------------------------
    def on_moved(self, replica: Replica, before: S, *rest: Any) -> None:
        super().on_moved(replica, before, *rest)
        if replica.state is S.NEW_PREFILL:
            zag = WatchedZag(replica.relaying.layers, self.kernel.now_ns)
            zag.watcher, zag.replica = self, replica
            replica.flight = Layered(replica.books, zag)
        self.check(replica, before)

    def check(self, replica: Replica, before: S) -> None:
        """I3, I5, I10, I14 after a change of a state."""
        states = [r.state for r in self.replicas]
        board = self.pools[0].relay
        if states.count(S.OLD_PREFILL) != board.zigzag_active + board.relay_deactive:
            self.problem("I10: olds differ from zigzag + deactive")
        if board.zigzag_active > sum(state in NEW for state in states):
            self.problem("I10: more zigzags than new replicas")
        if not any(state in NEW for state in states) and board.zigzag_active:
            self.problem("I10: zigzag without a new replica")
        if (before, replica.state) not in TRANSITIONS:
            self.problem(f"I14: {before.value} -> {replica.state.value}")
        for r in self.replicas:
            used = r.scheduler.blocks_used
            if not 0 <= used <= r.scheduler.blocks_total:
                self.problem(f"I3: {used} blocks at {r.name}")
            if r.state in CLOSED and r.lock.holder != r.name:
                self.problem(f"I5: {r.name} {r.state.value} is open")
            if r.state is S.DECODE and r.lock.holder == r.name:
                self.problem(f"I5: {r.name} decodes and is closed")
        if before is S.SHUTTING_NULL and replica.state is not S.INACTIVE:
            # I15: a spare serves again with the weights that it has, at once.
            if not replica.model_loaded or replica.replica_id in self.loading():
                self.problem(f"I15: {replica.name} is reused without its weights")
            if replica.state not in (S.PREFILL, S.AUS_PREFILL, S.DECODE, S.AUS_DECODE, S.FAILED):
                self.problem(f"I15: a spare became {replica.state.value}")

    # --- loads ----------------------------------------------------------------------------------
    def loading(self) -> list[int]:
        """Destinations of loads under way."""
        return [r for active in self.scalers[0].loader.active for r in active.open_targets]

    def _watch_links(self) -> None:
        topology = self.network.topology
        for gpu in topology.gpus:
            for link in (gpu.nic_in, gpu.nvlink_in, gpu.pcie_down):
                if link >= 0:
                    self._gpu_of[link] = gpu.index
        carry = self.network.carry

        def watched(parts: Any, spec: Any, on_done: Callable[[], None], **more: Any) -> Any:
            def done() -> None:
                for path, size in parts:
                    gpu = self._gpu_of.get(path[-1]) if len(path) else None
                    if gpu is not None:
                        self._gpu_bytes[gpu] = self._gpu_bytes.get(gpu, 0) + size
                on_done()

            return carry(parts, spec, done if spec.kind == "weights" else on_done, **more)

        self.network.carry = watched  # type: ignore[method-assign]

    def _watch_loads(self) -> None:
        scaler = self.scalers[0]
        load, loaded = scaler._load, scaler.loader._world.on_loaded
        finished: dict[int, list[int]] = {}

        def order(load_: Load) -> None:
            for target in load_.targets:
                if target.replica in self.loading():
                    self.problem(f"I13: {target.replica} is loaded twice")
                for gpu in self.replicas[target.replica].gpus:
                    self._gpu_bytes[gpu] = 0
            books = scaler.under_way.nvl if load_.method == "nvlink" else scaler.under_way.rdma
            for source in load_.sources:
                if books.get(source, Marker.NONE) is not Marker.NONE:
                    self.problem(f"I13: marked {source} sends ({load_.method})")
                if not self.replicas[source].model_loaded:
                    self.problem(f"I13: {source} sends what it does not have")
                is_pruned = scaler.table.prune_sources and load_.method in RDMA
                if is_pruned and self.replicas[source].state is S.PREFILL:
                    self.problem(f"I13: prefill {source} sends")
            load(load_)

        def complete(active: Any, target: Any) -> None:
            replica = target.replica
            weights = scaler.loader._world.weights[replica]
            if active.load.method != "delay":
                for gpu, size in zip(weights.grid.gpus, weights.gpu_bytes, strict=True):
                    if self._gpu_bytes[gpu] != size:
                        self.problem(
                            f"I17: GPU {gpu} got {self._gpu_bytes[gpu]} of {size} bytes "
                            f"({active.load.method})"
                        )
            done = finished.setdefault(id(active), [])
            done.append(replica)
            self._actives.append(active)
            if active.load.method in ("chain", "nvlink"):
                chain = [t.replica for t in active.load.targets]
                if done != chain[: len(done)]:
                    self.problem(f"I17: chain {chain} completed as {done}")
                self.chains_done += len(done) > 1
            loaded(active, target)

        self._actives: list[Any] = []
        scaler._load = order  # type: ignore[method-assign]
        scaler.loader._world.on_loaded = complete

    def layers_there(self, replica: Replica) -> int:
        """Transformer layers whose bytes have arrived, from the flows into the GPUs."""
        if replica.model_loaded:
            return replica.relaying.layers
        weights = self.scalers[0].loader._world.weights[replica.replica_id]
        here = self._arrived(replica)
        passed, layers = weights.segments[0], 0
        for segment in weights.segments[1:-1]:
            passed += segment
            layers += here + ROUNDING_BYTES >= passed
        return layers

    def _arrived(self, replica: Replica) -> int:
        """Bytes of one rank that are there (of lanes: all stripes, also behind a gap)."""
        table, now_ns = self.network.table, self.kernel.now_ns
        weights = self.scalers[0].loader._world.weights[replica.replica_id]
        rank_bytes = sum(weights.segments)
        gpus = weights.grid.gpus
        for active in self.scalers[0].loader.active:
            if replica.replica_id not in active.open_targets:
                continue
            coming = sum(self._gpu_bytes[gpu] for gpu in gpus)
            for flow in active.flows:
                if flow.flow_id in table and self._goes_to(flow, gpus):
                    coming += table.delivered_bytes(flow.flow_id, now_ns)
            return coming * rank_bytes // weights.total_bytes
        return rank_bytes

    def _goes_to(self, carried: Any, gpus: Sequence[int]) -> bool:
        transfer = self.network.table._transfers[carried.flow_id]
        lasts = [flow.links[-1] for flow in transfer.flows if flow.links]
        links = {id(self.network.table.links[link]): gpu for link, gpu in self._gpu_of.items()}
        return any(links.get(id(last)) in gpus for last in lasts)

    # --- the planner ----------------------------------------------------------------------------
    def _watch_ticks(self) -> None:
        scaler, tick = self.scalers[0], self.scalers[0].look_and_plan

        def watched() -> int:
            before = scan(scaler.snapshot())
            orders: list[Load] = []
            load = scaler._load

            def noted(load_: Load) -> None:
                orders.append(load_)
                load(load_)

            scaler._load = noted  # type: ignore[method-assign]
            wake_ns = tick()
            scaler._load = load  # type: ignore[method-assign]
            after = scan(scaler.snapshot())
            overshoot = any(o.method == "tanz" for o in orders)
            table = scaler.table
            for kind, was, now, least, most in (
                ("prefill", before.prefill, after.prefill, table.min_prefill, table.max_prefill),
                ("decode", before.decode, after.decode, table.min_decode, table.max_decode),
            ):
                if now < 1:
                    self.problem(f"I12: no {kind} left")
                if was - now > 1 and was <= most:
                    self.problem(f"I12: {kind} {was} -> {now} in one turn")
                if now > max(most, was) and not overshoot:
                    self.problem(f"I12: {now} {kind} > {most}")
                if now < min(least, was):
                    self.problem(f"I12: {now} {kind} < {least}")
            return wake_ns

        scaler.look_and_plan = watched  # type: ignore[method-assign]

    # --- relays and halves ------------------------------------------------------------------------
    def on_relayed(
        self, source: Replica, old: Replica, requests: list[Request], start_layer: int
    ) -> None:
        super().on_relayed(source, old, requests, start_layer)
        layered = layered_of(source.flight)
        assert layered is not None
        zag = layered.layers
        assert isinstance(zag, WatchedZag)
        task, position = zag.removed[requests[0].row]
        ran = self.layers_run.get(id(task), [])
        if ran != list(range(start_layer)):
            self.problem(f"I8: relayed after layers {ran}, the rest starts at {start_layer}")
        is_new = source.state is S.NEW_PREFILL
        if is_new and position != 0:
            self.problem(f"I9: batch {position} of the pending ones is handed over")
        if not is_new and position == 0:
            self.problem("I9: the head is handed over by a Refractory")
        self.relayed += 1
        self.relayed_from[source.state.value] = self.relayed_from.get(source.state.value, 0) + 1
        relayed = self.pools[0].relay.answer(old.replica_id)
        assert relayed is not None
        if relayed.split is not None:
            for request in requests:
                self._split[request.request_id] = relayed.split
                self._partial[request.request_id] = []

    def on_transfer(
        self, batch: MigratingBatch, source: Replica, destination: Replica, ended_ns: int
    ) -> None:
        for request in batch.requests:
            if request.request_id in self._partial:
                self._partial[request.request_id].append(batch)
        super().on_transfer(batch, source, destination, ended_ns)

    def _watch_deliveries(self, replica: Replica) -> None:
        actor = self.actors[replica.replica_id]
        post = actor.post

        def watched(event: object) -> None:
            if not isinstance(event, KvDelivered):
                post(event)
                return
            for request in event.requests:
                split = self._split.pop(request.request_id, None)
                halves = self._partial.pop(request.request_id, [])
                if split is None:
                    continue
                whole = kv_bytes(split.requests, 64, self.plan.replicas[0].kv_bytes_per_token)
                first = [half for half in halves if half.requests == split.requests]
                if len(halves) != 2:
                    self.problem(f"I8: delivered after {len(halves)} halves")
                elif halves[0].kv_bytes + halves[1].kv_bytes > whole or not first:
                    self.problem("I8: the halves hold other bytes than the whole")
                elif whole * split.start_layer // split.layers not in [h.kv_bytes for h in first]:
                    self.problem("I8: the first half is not its part of the layers")
                self.halves_met += 1
            if replica.state not in (S.DECODE, S.SHUTTING_DECODE, S.AUS_DECODE):
                self.problem(f"I5: KV arrives at {replica.name} {replica.state.value}")
            post(event)

        actor.post = watched  # type: ignore[method-assign]

    # --- quiet ------------------------------------------------------------------------------------
    def _released(self, request: Request) -> None:
        if request.request_id == self.last_id:
            self._look_at_rest(request)
        super()._released(request)

    def _look_at_rest(self, request: Request) -> None:
        """I3, I6, I7, I10, I14 long after everything has ended."""
        board = self.pools[0].relay
        counters = (board.olds, board.zigzag_active, board.relay_deactive)
        if counters != (0, 0, 0):
            self.problem(f"I10: olds, zigzag, deactive are {counters} at rest")
        for replica in self.replicas:
            if replica.state in (*NEW, S.OLD_PREFILL, S.LOADING_PREFILL, S.LOADING_DECODE):
                self.problem(f"I14: {replica.name} is {replica.state.value} for ever")
            if replica.scheduler.blocks_used:
                self.problem(f"I3: {replica.name} holds {replica.scheduler.blocks_used} blocks")
            if replica.unfinished_migrations:
                self.problem(f"I6: {replica.name} waits for migrations")
        if self.tokens_in_migration:
            self.problem(f"I7: {self.tokens_in_migration} tokens in migration at rest")
        self.rested = True
