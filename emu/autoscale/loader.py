"""Weights on their way: from a planned load to flows on the links, and from bytes to layers.

Owns the flows of every load under way. A hop of a chain forwards what the hop before it brings, a
chunk behind. Which layers a replica has follows from the bytes that have passed: the marks of its
flows stand at the ends of the segments (embedding, each layer, head). Calls back when a target is
complete; decides nothing.

    nvlink   source -> T1 -> T2 ...  inside a machine, 256 MiB behind each other
    p2p      source -> target
    chain    like nvlink over the NICs, 1 MiB behind each other
    tanz     lane i: source i -> node i of the first machine -> node i of the next ..., each lane
             a stripe of the weights (64 MiB pieces dealt in turn), 2 MiB behind each other; the
             nodes of a machine pass the stripes on in a ring, 64 MiB behind
    host     memory of the machine -> GPU;  disk: SSD -> memory, then memory -> GPU
    remote   memory of another machine -> its NICs, one for each GPU -> GPU
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from emu.autoscale.orders import Load, Method, Target
from emu.autoscale.stripes import STRIPE_BYTES, StripeJoin, stripe_bytes
from emu.kernel.clock import Kernel
from emu.kernel.priorities import PRIORITY_NETWORK
from emu.network.carrier import Carried, Carrier
from emu.network.flows import TransferSpec
from emu.network.grids import Grid, shard_paths
from emu.network.topology import LinkPath, Topology
from emu.units import MIB, ms_to_ns, s_to_ns

CHAIN_CHUNK_BYTES: Final = MIB
NVLINK_CHUNK_BYTES: Final = 256 * MIB
LANE_CHUNK_BYTES: Final = 2 * MIB

Parts = list[tuple[LinkPath, int]]


class Weights(msgspec.Struct, frozen=True):
    """Weights of one replica."""

    grid: Grid
    segments: tuple[int, ...]
    """Bytes of one rank in loading order: embedding, layers, head."""
    gpu_bytes: tuple[int, ...]
    """Bytes of each GPU (they differ between pipeline stages)."""

    @property
    def total_bytes(self) -> int:
        """All GPUs together."""
        return sum(self.gpu_bytes)

    def marks(self) -> list[int]:
        """Offsets in a transfer of all GPUs in parallel at which each segment is complete."""
        rank_bytes = sum(self.segments)
        marks, passed = [], 0
        for segment in self.segments:
            passed += segment
            marks.append(self.total_bytes * passed // rank_bytes)
        return marks


class ActiveLoad(msgspec.Struct, eq=False):
    """One load under way."""

    load: Load
    started_ns: int
    open_targets: list[int]
    """Replicas that do not have all weights yet."""
    flows: list[Carried] = msgspec.field(default_factory=list)
    hops: list[tuple[tuple[int, int], Carried, Carried | None]] = msgspec.field(
        default_factory=list
    )
    """(giver and taker, flow, the flow that feeds it), in the order in which they began."""
    is_cancelled: bool = False
    then: dict[int, Callable[[], None]] = msgspec.field(default_factory=dict)
    """What begins when a target is complete."""

    def stuck_pairs(self) -> list[tuple[int, int]]:
        """Pairs between which bytes have not all come although the giver has them all."""
        return [
            pair
            for pair, flow, feeder in self.hops
            if not flow.is_over and (feeder is None or feeder.is_over)
        ]


class Hop(msgspec.Struct):
    """One flow of a load, from a replica or a machine's copy to a replica."""

    pair: tuple[int, int]
    """From which replica to which; -1: from a machine's own copy."""
    marks: Sequence[int] = ()
    on_mark: Callable[[int], None] | None = None
    feeder: Carried | None = None
    """The flow whose bytes it forwards, `lag_bytes` behind."""
    lag_bytes: int = 0


class LoadWorld(msgspec.Struct):
    """What the loader needs of the cluster."""

    kernel: Kernel
    carrier: Carrier
    topology: Topology
    weights: Mapping[int, Weights]
    """By replica."""
    on_segments: Callable[[int, int], None]
    """(replica, segments ready)."""
    on_loaded: Callable[[ActiveLoad, Target], None]


class Loader:
    """Starts, follows and gives up loads."""

    def __init__(
        self, world: LoadWorld, *, load_delay_ms: float = 0.0, pin_bytes_per_s: float = 0.0
    ) -> None:
        """`pin_bytes_per_s`: how fast pages are pinned before a read from disk; 0 = they are."""
        self.active: list[ActiveLoad] = []
        self._world = world
        self._delay_ns = ms_to_ns(load_delay_ms)
        self._pin_bytes_per_s = pin_bytes_per_s

    def start(self, load: Load, *, after_ns: int = 0) -> ActiveLoad:
        """Begin; `after_ns` = time until the first byte (a process that must start first)."""
        world = self._world
        now_ns = world.kernel.now_ns
        active = ActiveLoad(load, now_ns, [target.replica for target in load.targets])
        self.active.append(active)
        if after_ns:
            world.kernel.call_at(now_ns + after_ns, PRIORITY_NETWORK, lambda: self._begin(active))
        else:
            self._begin(active)
        return active

    def _begin(self, active: ActiveLoad) -> None:
        if active.is_cancelled:
            return
        method = active.load.method
        if method == "tanz":
            self._tanz(active)
        elif method in ("nvlink", "p2p", "chain"):
            load = active.load
            chunk_bytes = NVLINK_CHUNK_BYTES if method == "nvlink" else CHAIN_CHUNK_BYTES
            self._chain(active, load.sources[0], load.targets, chunk_bytes)
        elif method == "delay":
            kernel = self._world.kernel
            for target in active.load.targets:
                kernel.call_at(
                    kernel.now_ns + self._delay_ns,
                    PRIORITY_NETWORK,
                    lambda t=target: self._complete(active, t),  # type: ignore[misc]
                )
        else:
            for target in active.load.targets:
                self._from_machine(active, target, method)

    def cancel(self, active: ActiveLoad) -> None:
        """Give a load up; nothing more is reported."""
        active.is_cancelled = True
        for flow in active.flows:
            flow.cancel()
        if active in self.active:
            self.active.remove(active)

    def _complete(self, active: ActiveLoad, target: Target) -> None:
        if active.is_cancelled:
            return
        active.open_targets.remove(target.replica)
        if not active.open_targets:
            self.active.remove(active)
        self._world.on_loaded(active, target)
        if target.replica in active.then:
            active.then.pop(target.replica)()

    def _carry(
        self,
        active: ActiveLoad,
        parts: Parts,
        on_done: Callable[[], None],
        hop: Hop,
    ) -> Carried:
        topology, feeder = self._world.topology, hop.feeder
        latency_ns = max(topology.latency_ns(links) for links, _ in parts)
        spec = TransferSpec("weights", latency_ns, hop.pair, hop.marks)
        if feeder is not None:
            spec.after, spec.lag_bytes = feeder.flow_id, hop.lag_bytes
        flow = self._world.carrier.carry(parts, spec, on_done, on_mark=hop.on_mark)
        active.flows.append(flow)
        active.hops.append((hop.pair, flow, feeder))
        return flow

    def _hop(self, source: int, target: int) -> Parts:
        """GPU by GPU; replicas of different shapes exchange what each needs."""
        world = self._world
        src, dst = world.weights[source], world.weights[target]
        if len(src.grid.gpus) == len(dst.grid.gpus):
            return [
                (world.topology.path(a, b), size)
                for a, b, size in zip(src.grid.gpus, dst.grid.gpus, dst.gpu_bytes, strict=True)
            ]
        return [*shard_paths(src.grid, dst.grid, dst.total_bytes, world.topology)]

    def _chain(
        self, active: ActiveLoad, source: int, targets: Sequence[Target], chunk_bytes: int
    ) -> None:
        """Each target forwards to the next while it receives."""
        world = self._world
        before, flow = source, None
        fed: list[int] = []
        for index, target in enumerate(targets):
            parts = self._hop(before, target.replica)
            sizes = [size for _, size in parts]
            if flow is not None and sizes != fed:
                # Replicas of different shapes: what GPU i receives is not what it passes on.
                rest = targets[index:]
                active.then[before] = lambda b=before, r=rest: self._chain(  # type: ignore[misc]
                    active, b, r, chunk_bytes
                )
                return
            flow = self._carry(
                active,
                parts,
                lambda t=target: self._complete(active, t),  # type: ignore[misc]
                Hop(
                    (before, target.replica),
                    world.weights[target.replica].marks(),
                    lambda mark, t=target: world.on_segments(t.replica, mark + 1),  # type: ignore[misc]
                    flow,
                    chunk_bytes,
                ),
            )
            before, fed = target.replica, sizes

    def _from_machine(self, active: ActiveLoad, target: Target, method: Method) -> None:
        world = self._world
        topology = world.topology
        weights = world.weights[target.replica]
        gpus = list(zip(weights.grid.gpus, weights.gpu_bytes, strict=True))

        def from_host() -> None:
            if active.is_cancelled:
                return
            paths = [
                topology.host_to_remote_path(active.load.machine, gpu)
                if method == "remote"
                else topology.host_to_gpu_path(gpu)
                for gpu, _ in gpus
            ]
            self._carry(
                active,
                [(path, size) for path, (_, size) in zip(paths, gpus, strict=True)],
                lambda: self._complete(active, target),
                Hop(
                    (-1, target.replica),
                    weights.marks(),
                    lambda mark: world.on_segments(target.replica, mark + 1),
                ),
            )

        if method != "disk":
            from_host()
            return

        def from_disk() -> None:
            if active.is_cancelled:
                return
            self._carry(
                active,
                [(topology.ssd_to_host_path(gpu), size) for gpu, size in gpus],
                from_host,
                Hop((-1, target.replica)),
            )

        if not self._pin_bytes_per_s:
            from_disk()
            return
        pin_ns = s_to_ns(max(weights.gpu_bytes) / self._pin_bytes_per_s)
        world.kernel.call_at(world.kernel.now_ns + pin_ns, PRIORITY_NETWORK, from_disk)

    def _tanz(self, active: ActiveLoad) -> None:
        lanes = len(active.load.sources)
        targets = active.load.targets
        columns = [targets[i : i + lanes] for i in range(0, len(targets), lanes)]
        nodes = (*active.load.sources, *[target.replica for target in targets])
        if len({self._world.weights[node].gpu_bytes for node in nodes}) > 1:
            # Stripes need replicas of one shape; others get whole copies, lane by lane.
            for lane, source in enumerate(active.load.sources):
                own = [column[lane] for column in columns]
                self._chain(active, source, own, CHAIN_CHUNK_BYTES)
            return
        joins = {t.replica: StripeJoin(lanes, self._on_stripes(active, t)) for t in targets}
        for lane, source in enumerate(active.load.sources):
            before, feeder = source, None
            for column in columns:
                target = column[lane]
                hop = Hop((before, target.replica), feeder=feeder, lag_bytes=LANE_CHUNK_BYTES)
                feeder = ring = self._stripe(active, lane, hop, joins[target.replica])
                for step in range(1, lanes):
                    giver = column[(lane + step - 1) % lanes].replica
                    taker = column[(lane + step) % lanes].replica
                    hop = Hop((giver, taker), feeder=ring, lag_bytes=STRIPE_BYTES)
                    ring = self._stripe(active, lane, hop, joins[taker])
                before = target.replica

    def _on_stripes(self, active: ActiveLoad, target: Target) -> Callable[[int, bool], None]:
        world = self._world
        segments = len(world.weights[target.replica].segments)

        def passed(mark_count: int, is_end: bool) -> None:
            if is_end:
                self._complete(active, target)
            else:
                world.on_segments(target.replica, min(mark_count, segments))

        return passed

    def _stripe(self, active: ActiveLoad, lane: int, hop: Hop, join: StripeJoin) -> Carried:
        """A lane's stripe of the weights goes one hop further."""
        lanes, (giver, taker) = len(active.load.sources), hop.pair
        weights = self._world.weights[taker]
        rank_bytes = sum(weights.segments)
        own = stripe_bytes(rank_bytes, lane, lanes)
        parts = [(path, size * own // rank_bytes) for path, size in self._hop(giver, taker)]
        total = sum(size for _, size in parts)
        marks, passed = list[int](), 0
        for segment in weights.segments:
            passed += segment
            marks.append(total * stripe_bytes(passed, lane, lanes) // own if own else 0)
        hop.marks, hop.on_mark = marks, lambda mark: join.mark(lane, mark + 1)
        return self._carry(active, parts, lambda: join.end(lane), hop)
