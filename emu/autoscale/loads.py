"""Weights on their way, and weights in the memory of machines.

Owns the flows of every load under way (`Loader`), and which machines keep a copy from which
replicas can load (`HostCache`). Calls back when a target is complete; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, Literal

import msgspec

from emu.autoscale.snapshot import Load, Method, Target
from emu.config.schema import AutoscaleTable
from emu.kernel.clock import PRIORITY_NETWORK, Kernel
from emu.network.carrier import Carried, Carrier
from emu.network.grids import Grid, shard_paths
from emu.network.topology import LinkPath, Topology
from emu.units import GIB, MIB, ms_to_ns, s_to_ns

# --------------------------------------------------------------------------------------------------
# Weights in the memory of machines: which replicas can load from there, and what it costs in
# bytes.
#
# `cache`: a machine keeps the weights while one of its replicas has them, and for a time after (the
# original counts from the last load: `cache_ttl_from_load`). `host`: every machine always has them.
# `pool`: one machine has one copy, from which all others load over the network. Otherwise none
# does: some replica always holds a copy on its GPUs, from which all others load, so that the pool
# needs no host memory at all (BlitzScale's O(1) caching).
#
# A machine's memory may be limited (`HostMemory`). With `cache`, a copy that does not fit takes the
# place of others: of those used longest ago, or (`size_use`) of those used least for their size, as
# GreedyDual-Size-Frequency ranks them. Pinned copies stay. What does not fit at all is not kept.


class HostMemory:
    """Memory for weights of all machines, shared by the copies of all models."""

    def __init__(
        self,
        limits: Mapping[int, int],
        eviction: Literal["use", "size_use"] = "use",
    ) -> None:
        """`limits`: bytes by machine; a machine that is not there has no limit."""
        self._limits = limits
        self._eviction = eviction
        self._caches: list[HostCache] = []
        self._clock: dict[int, float] = dict.fromkeys(limits, 0.0)
        """Rank of what was evicted last, by machine: the age that all others start from."""

    def add(self, cache: HostCache) -> None:
        """Copies of a model will be kept here."""
        self._caches.append(cache)

    def free_bytes(self, machine: int, now_ns: int) -> int:
        """What is not taken by any copy; far more than any copy without a limit."""
        if machine not in self._limits:
            return 1 << 62
        held = sum(c.copy_bytes for c in self._caches if c.holds(machine, now_ns))
        return self._limits[machine] - held

    def make_room(self, asking: HostCache, machine: int, now_ns: int) -> bool:
        """Evict until the copy fits; False (and nothing is evicted) if it cannot."""
        short = asking.copy_bytes - self.free_bytes(machine, now_ns)
        victims: list[HostCache] = []
        for cache in self._ranked(machine, now_ns):
            if short <= 0:
                break
            victims.append(cache)
            short -= cache.copy_bytes
        if short > 0:
            return False
        for cache in victims:
            self._clock[machine] = max(self._clock[machine], cache.rank(machine))
            cache.evict(machine, now_ns)
        return True

    def rank_of_use(self, cache: HostCache, machine: int, uses: int, now_ns: int) -> float:
        """What a copy is worth after so many uses; the least worthy leaves first."""
        if self._eviction == "use":
            return float(now_ns)
        return self._clock.get(machine, 0.0) + uses * GIB / max(1, cache.copy_bytes)

    def _ranked(self, machine: int, now_ns: int) -> list[HostCache]:
        held = [
            (cache.rank(machine), index, cache)
            for index, cache in enumerate(self._caches)
            if not cache.is_pinned and cache.holds(machine, now_ns)
        ]
        return [cache for _, _, cache in sorted(held, key=lambda entry: entry[:2])]

    def place_pool(self) -> None:
        """`pool`: give each model's copy a machine, the largest first, where most is free."""
        wanted = [c for c in self._caches if c.is_pooled]
        for cache in sorted(wanted, key=lambda c: -c.copy_bytes):
            free = [(-self.free_bytes(machine, 0), machine) for machine in cache.machines]
            most, machine = min(free, default=(0, -1))
            if free and -most >= cache.copy_bytes:
                if machine not in self._limits:  # without limits: in turn
                    machine = cache.machines[self._caches.index(cache) % len(cache.machines)]
                cache.home = machine


class HostCache:
    """Books of the host copies of one model."""

    def __init__(
        self,
        table: AutoscaleTable,
        machines: Iterable[int],
        copy_bytes: int,
        *,
        memory: HostMemory | None = None,
        is_pinned: bool = False,
    ) -> None:
        """`copy_bytes`: one whole copy of the weights. Pinned: on every machine, for good."""
        self._loader = table.loader
        self._is_used = (
            table.executor == "serverless"
            or table.multicast == "none"
            or (table.loader == "pool" and table.executor != "none")
        )
        self._ttl_ns = s_to_ns(table.host_cache_ttl_s)
        self._counts_from_load = "cache_ttl_from_load" in table.faithful
        self.machines: Sequence[int] = sorted(set(machines))
        self._users: dict[int, list[int]] = {machine: [] for machine in self.machines}
        self._touched_ns: dict[int, int] = {}
        self._can_expire = self._is_used and table.loader == "cache" and not is_pinned
        self._held = 0
        """Machines with a copy that can expire, as of `_since_ns`: kept, because to ask all of
        them whenever one replica has loaded would be quadratic in the replicas of a start."""
        self._expiry_ns: dict[int, int] = {}
        """When a machine's copy expires; only of machines on which no replica uses it."""
        self._expiries: list[tuple[int, int]] = []
        """Heap of (expiry, machine); an entry counts if `_expiry_ns` still says so."""
        self._uses: dict[int, int] = {}
        self._ranks: dict[int, float] = {}
        self.copy_bytes = copy_bytes
        self.is_pinned = is_pinned
        self.home = -1
        """pool: the machine that has the copy; -1 = none has room."""
        self.evictions = 0
        self.bytes_max = 0
        self._integral = 0
        self._since_ns = 0
        self._memory = memory or HostMemory({})
        self._memory.add(self)

    @property
    def is_pooled(self) -> bool:
        """One machine keeps one copy for all."""
        return self._is_used and self._loader == "pool"

    def loaded(self, machine: int, replica_id: int, now_ns: int) -> None:
        """A replica of the machine has the weights now."""
        self._account(now_ns)
        is_kept = self._loader != "cache" or not self._is_used or self.holds(machine, now_ns)
        if is_kept or self._memory.make_room(self, machine, now_ns):
            users = self._users[machine]
            if not users and self._expiry_ns.pop(machine, None) is None:
                self._held += self._can_expire
            if replica_id not in users:
                users.append(replica_id)
            self._touched_ns[machine] = now_ns
            uses = self._uses[machine] = self._uses.get(machine, 0) + 1
            self._ranks[machine] = self._memory.rank_of_use(self, machine, uses, now_ns)
        self.bytes_max = max(self.bytes_max, self._present() * self.copy_bytes)

    def unloaded(self, machine: int, replica_id: int, now_ns: int) -> None:
        """It has dropped them."""
        self._account(now_ns)
        if replica_id in self._users[machine]:
            self._users[machine].remove(replica_id)
            if not self._counts_from_load:
                self._touched_ns[machine] = now_ns
            if self._can_expire and not self._users[machine]:
                self._let_expire(machine, now_ns)

    def _let_expire(self, machine: int, now_ns: int) -> None:
        """The last replica that used the copy has dropped it."""
        expiry_ns = self._touched_ns[machine] + self._ttl_ns
        if expiry_ns <= now_ns:
            self._held -= 1
            return
        self._expiry_ns[machine] = expiry_ns
        heappush(self._expiries, (expiry_ns, machine))

    def lose(self, machine: int, now_ns: int) -> None:
        """A machine's copy is gone (a fault); the next load there brings it back."""
        self._account(now_ns)
        self._touched_ns.pop(machine, None)
        if machine == self.home:
            self.home = -1
        users = self._users.get(machine, [])  # none: no replica is there
        if users or self._expiry_ns.pop(machine, None) is not None:
            self._held -= self._can_expire
        users.clear()

    def evict(self, machine: int, now_ns: int) -> None:
        """Its place is needed for another model's copy."""
        self.evictions += 1
        self._uses.pop(machine, None)
        self.lose(machine, now_ns)

    def rank(self, machine: int) -> float:
        """What the machine's copy is worth; the least worthy leaves first."""
        return self._ranks.get(machine, 0.0)

    def holds(self, machine: int, now_ns: int) -> bool:
        """Whether the machine's memory has the copy."""
        if not self._is_used or machine not in self._users:
            return False
        if self.is_pinned or machine == self.home or self._loader == "host":
            return True
        if self._loader != "cache":
            return False
        if self._users[machine]:
            return True
        return machine in self._touched_ns and now_ns - self._touched_ns[machine] < self._ttl_ns

    def cached_machines(self, now_ns: int) -> tuple[int, ...]:
        """Machines whose memory holds the weights."""
        if not self._is_used:
            return ()
        return tuple(machine for machine in self.machines if self.holds(machine, now_ns))

    def _present(self) -> int:
        """Machines that hold a copy, as of `_since_ns`."""
        if not self._is_used:
            return 0
        if self.is_pinned or self._loader == "host":
            return len(self.machines)
        return self._held if self._can_expire else int(self.home in self._users)

    def _account(self, now_ns: int) -> None:
        """Bytes x time, exact: a copy that expires between two events is cut where it expires."""
        while self._expiries and self._expiries[0][0] <= now_ns:
            expiry_ns, machine = heappop(self._expiries)
            if self._expiry_ns.get(machine) == expiry_ns:
                del self._expiry_ns[machine]
                self._add_up(expiry_ns)
                self._held -= 1
        self._add_up(now_ns)
        self.bytes_max = max(self.bytes_max, self._present() * self.copy_bytes)

    def _add_up(self, now_ns: int) -> None:
        """What is held now has been held since the last time."""
        self._integral += self.copy_bytes * self._present() * max(0, now_ns - self._since_ns)
        self._since_ns = now_ns

    def mean_bytes(self, now_ns: int) -> float:
        """Mean of the bytes held from the start to now."""
        self._account(now_ns)
        return self._integral / now_ns if now_ns else 0.0


# --------------------------------------------------------------------------------------------------
# Weights on their way: from a planned load to flows on the links, and from bytes to layers.
#
# Owns the flows of every load under way. A hop of a chain forwards what the hop before it brings, a
# chunk behind. Which layers a replica has follows from the bytes that have passed: the marks of its
# flows stand at the ends of the segments (embedding, each layer, head). Calls back when a target is
# complete; decides nothing.
#
#     nvlink   source -> T1 -> T2 ...  inside a machine, 256 MiB behind each other
#     p2p      source -> target
#     chain    like nvlink over the NICs, 1 MiB behind each other
#     tanz     lane i: source i -> node i of the first machine -> node i of the next ..., each lane
#              a stripe of the weights (64 MiB pieces dealt in turn), 2 MiB behind each other; the
#              nodes of a machine pass the stripes on in a ring, 64 MiB behind
#     host     memory of the machine -> GPU;  disk: SSD -> memory, then memory -> GPU
#     remote   memory of another machine -> its NICs, one for each GPU -> GPU


CHAIN_CHUNK_BYTES: Final = MIB
NVLINK_CHUNK_BYTES: Final = 256 * MIB
STRIPE_BYTES: Final = 64 * MIB
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


class LoadWorld(msgspec.Struct):
    """What the loader needs of the cluster."""

    kernel: Kernel
    carrier: Carrier
    topology: Topology
    weights: Sequence[Weights]
    """By replica."""
    on_segments: Callable[[int, int], None]
    """(replica, segments ready)."""
    on_loaded: Callable[[ActiveLoad, Target], None]


class Loader:
    """Starts, follows and gives up loads."""

    def __init__(self, world: LoadWorld, *, load_delay_ms: float = 0.0) -> None:
        self.active: list[ActiveLoad] = []
        self._world = world
        self._delay_ns = ms_to_ns(load_delay_ms)

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
        *,
        pair: tuple[int, int],
        marks: Sequence[int] = (),
        on_mark: Callable[[int], None] | None = None,
        after: Carried | None = None,
        lag_bytes: int = 0,
    ) -> Carried:
        """`pair`: from which replica to which (-1: from a machine's own copy)."""
        topology = self._world.topology
        flow = self._world.carrier.carry(
            parts,
            kind="weights",
            on_done=on_done,
            latency_ns=max(topology.latency_ns(links) for links, _ in parts),
            marks=marks,
            on_mark=on_mark,
            after=after,
            lag_bytes=lag_bytes,
            pair=pair,
        )
        active.flows.append(flow)
        active.hops.append((pair, flow, after))
        return flow

    # --- chains -----------------------------------------------------------------------------------
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
                pair=(before, target.replica),
                marks=world.weights[target.replica].marks(),
                on_mark=lambda mark, t=target: world.on_segments(t.replica, mark + 1),  # type: ignore[misc]
                after=flow,
                lag_bytes=chunk_bytes,
            )
            before, fed = target.replica, sizes

    # --- the machine's own copy -------------------------------------------------------------------
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
                pair=(-1, target.replica),
                marks=weights.marks(),
                on_mark=lambda mark: world.on_segments(target.replica, mark + 1),
            )

        if method != "disk":
            from_host()
            return
        self._carry(
            active,
            [(world.topology.ssd_to_host_path(gpu), size) for gpu, size in gpus],
            from_host,
            pair=(-1, target.replica),
        )

    # --- lanes ---------------------------------------------------------------------------------
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
        joins = {t.replica: _Join(lanes, self._on_stripes(active, t)) for t in targets}
        for lane, source in enumerate(active.load.sources):
            before, feeder = source, None
            for column in columns:
                target = column[lane]
                feeder = self._stripe(
                    active, lane, lanes, before, target, joins, feeder, LANE_CHUNK_BYTES
                )
                ring = feeder
                for step in range(1, lanes):
                    giver = column[(lane + step - 1) % lanes]
                    taker = column[(lane + step) % lanes]
                    ring = self._stripe(
                        active, lane, lanes, giver.replica, taker, joins, ring, STRIPE_BYTES
                    )
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

    def _stripe(
        self,
        active: ActiveLoad,
        lane: int,
        lanes: int,
        giver: int,
        taker: Target,
        joins: dict[int, _Join],
        after: Carried | None,
        lag_bytes: int,
    ) -> Carried:
        weights = self._world.weights[taker.replica]
        rank_bytes = sum(weights.segments)
        own = stripe_bytes(rank_bytes, lane, lanes)
        parts = [(path, size * own // rank_bytes) for path, size in self._hop(giver, taker.replica)]
        total = sum(size for _, size in parts)
        marks, passed = [], 0
        for segment in weights.segments:
            passed += segment
            marks.append(total * stripe_bytes(passed, lane, lanes) // own if own else 0)
        join = joins[taker.replica]
        return self._carry(
            active,
            parts,
            lambda: join.end(lane),
            pair=(giver, taker.replica),
            marks=marks,
            on_mark=lambda mark: join.mark(lane, mark + 1),
            after=after,
            lag_bytes=lag_bytes,
        )


def stripe_bytes(offset_bytes: int, lane: int, lanes: int) -> int:
    """How many of the first `offset_bytes` belong to a lane: pieces of 64 MiB dealt in turn."""
    turn = lanes * STRIPE_BYTES
    whole, rest = divmod(offset_bytes, turn)
    return whole * STRIPE_BYTES + min(max(rest - lane * STRIPE_BYTES, 0), STRIPE_BYTES)


class _Join:
    """A node of a lane transfer: a segment is there when every stripe has brought its part."""

    def __init__(self, lanes: int, tell: Callable[[int, bool], None]) -> None:
        self._marks = [0] * lanes
        self._open = lanes
        self._told = 0
        self._tell = tell

    def mark(self, lane: int, count: int) -> None:
        """A stripe has passed `count` segments' ends."""
        self._marks[lane] = count
        ready = min(self._marks)
        if ready > self._told:
            self._told = ready
            self._tell(ready, False)

    def end(self, lane: int) -> None:
        """A stripe is complete."""
        self._open -= 1
        if self._open == 0:
            self._tell(0, True)
