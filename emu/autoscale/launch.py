"""Loads that have been ordered: states of their targets, markers, host copies, and their ends.

Owns the markers (which replica sends or receives weights), the loader and the host cache. State,
marker and
weights are set at the moment of the decision, by compare-and-set, so that the next look of the
planner sees them. Decides nothing; `Scaler` is the loop on top of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from emu.autoscale.actions import Load, Role, Target
from emu.autoscale.loads import ActiveLoad, HostCache, Loader, LoadWorld, Weights
from emu.autoscale.snapshot import Site
from emu.config.schema import AutoscaleTable
from emu.kernel.clock import PRIORITY_PLANNER, Kernel
from emu.network.carrier import Carrier
from emu.network.topology import Topology
from emu.replica.events import Commanded, LoadGivenUp, SegmentArrived, WeightsArrived
from emu.replica.replica import Replica
from emu.replica.states import LOADING, Marker, ReplicaState, Writer
from emu.units import s_to_ns

S = ReplicaState
_LOADING_STATE: Final = {
    "prefill": S.LOADING_PREFILL,
    "decode": S.LOADING_DECODE,
    "new_prefill": S.NEW_PREFILL,
    "colocated": S.LOADING_COLOCATED,
}
_MARKERS: Final = {
    "nvlink": Marker.NVL_CASTING,
    "p2p": Marker.RDMA_LOADING,
    "chain": Marker.RDMA_CASTING,
    "tanz": Marker.TANZ_CASTING,
}
AVOIDED_DEADLINES: Final = 10
"""A pair whose load was given up is left out of plans for so many load deadlines."""
_LOCAL: Final = ("host", "remote", "disk", "delay")
_READY: Final = {
    "prefill": S.PREFILL,
    "decode": S.AUS_DECODE,
    "colocated": S.COLOCATED,
}


class ScalerWorld(Protocol):
    """The cluster, as the control loop sees it."""

    kernel: Kernel
    scarce_decode: bool

    @property
    def tokens_in_migration(self) -> int:
        """Prompt tokens whose KV waits for a migration or is under way."""
        ...

    @property
    def replicas(self) -> Sequence[Replica]:
        """All of them, by id."""
        ...

    @property
    def members(self) -> Sequence[Replica]:
        """Those of the model that this loop scales, ascending id."""
        ...

    @property
    def is_only(self) -> bool:
        """The cluster serves no other model."""
        ...

    @property
    def placements(self) -> int:
        """Changes whenever GPUs that models share are taken or given back."""
        ...

    def is_placeable(self, replica: Replica) -> bool:
        """No replica of another model is on its GPUs."""
        ...

    def wants_room(self, replicas: int) -> None:
        """So many replicas find no GPUs; 0 = none lacks any."""
        ...

    @property
    def network(self) -> Carrier:
        """The links."""
        ...

    def waiting(self) -> tuple[int, int, int]:
        """(requests, prompt tokens) that no replica has begun, and requests in the system."""
        ...

    def note(self, kind: str, target: str, text: str) -> None:
        """Write a line into the run's timeline."""
        ...

    def give_up(self, replica: Replica) -> None:
        """A live load has failed: KV that waits there, and batches handed over, are lost."""
        ...


class Launches:
    """Loads under way and their books."""

    def __init__(
        self,
        world: ScalerWorld,
        table: AutoscaleTable,
        *,
        sites: Sequence[Site],
        weights: Sequence[Weights],
        topology: Topology,
        load_deadline_ns: int,
        cache: HostCache,
    ) -> None:
        self.table = table
        self.scale_ups = 0
        self.loads: dict[str, int] = {}
        """Replicas whose weights have arrived, by method."""
        self.loads_given_up = 0
        self.rdma: dict[int, Marker] = {}
        self.nvl: dict[int, Marker] = {}
        self.cache = cache
        self.stale: list[Callable[[int], bool]] = []
        """Faults: whether the copy in a machine's memory turns out not to be there."""
        self._world = world
        self._sites = sites
        self._deadline_ns = load_deadline_ns
        self._avoided: dict[tuple[int, int], int] = {}
        """Between which replicas loads did not end in time, and until when plans leave it out."""
        self._sending: list[tuple[ActiveLoad, tuple[int, ...]]] = []
        self._awaited: list[tuple[ActiveLoad, list[int]]] = []
        """Loads that a blocking planner waits for, with the targets that are not through."""
        self.loader = Loader(
            LoadWorld(
                world.kernel, world.network, topology, weights, self._on_segments, self._on_loaded
            ),
            load_delay_ms=table.load_delay_ms,
        )
        for replica in world.members:
            if replica.model_loaded:
                self.cache.loaded(replica.machine, replica.replica_id, 0)

    @property
    def is_active(self) -> bool:
        """Something may ever be scaled (else only manual commands load weights)."""
        return self.table.executor != "none"

    def host_cache_bytes(self) -> dict[str, int]:
        """Weights in host memory from the start to now: mean, most, and one copy."""
        if not self.is_active:
            return {}
        cache = self.cache
        mean = cache.mean_bytes(self._world.kernel.now_ns)
        return {"mean": round(mean), "max": cache.bytes_max, "copy": cache.copy_bytes}

    def close(self) -> None:
        """The run is over: what the host copies took goes into the timeline."""
        if self.is_active:
            use = self.host_cache_bytes()
            self._world.note("host_cache", "", f"mean {use['mean']} bytes, max {use['max']} bytes")

    def restore(self, replica: Replica, role: Role, *, from_disk: bool) -> None:
        """Weights of a replica that is back after a crash, where no planner brings them."""
        load = Load("disk" if from_disk else "host", (Target(replica.replica_id, role),))
        self._load(load, writer="recovery")

    def distrust(self, is_gone: Callable[[int], bool]) -> Callable[[], None]:
        """From now on a machine's copy is not there if `is_gone` says so; the result ends that."""
        self.stale.append(is_gone)
        return lambda: self.stale.remove(is_gone)

    def load_by_hand(self, replica: Replica) -> None:
        """A manual `to_new_prefill`: the weights come from the machine's memory, layer by layer."""
        self.loader.start(Load("host", (Target(replica.replica_id, "new_prefill"),)))

    def sending(self) -> list[int]:
        """Replicas from which weights are being copied."""
        return [source for _, sources in self._sending for source in sources]

    def _load(self, load: Load, writer: Writer = "planner") -> None:
        world = self._world
        taken = [
            t.replica for t in load.targets if world.replicas[t.replica].state is not S.INACTIVE
        ]
        if taken:  # what changed since the plan was made: its weights have nowhere to go
            names = ", ".join(map(str, taken))
            world.note("load dropped", load.method, f"replicas {names} are not inactive any more")
            return
        if load.method == "host" and self.stale:
            machine = self._sites[load.targets[0].replica].machine
            if any(is_gone(machine) for is_gone in self.stale):
                load = msgspec.structs.replace(load, method="disk")
        for target in load.targets:
            replica = world.replicas[target.replica]
            to = _LOADING_STATE[target.role]
            cause = f"weights come by {load.method}"
            replica.actor.tell(Commanded(to=to, writer=writer, cause=cause))
            self.scale_ups += writer == "planner"  # a replica that comes back is no order of it
        self._mark(load)
        cold_ns = s_to_ns(self.table.cold_start_s) if load.method in _LOCAL else 0
        active = self.loader.start(load, after_ns=cold_ns)
        self._sending.append((active, load.sources))
        if load.method == "tanz" or (load.method == "chain" and load.is_live):
            self._awaited.append((active, [target.replica for target in load.targets]))
        if self._deadline_ns:
            world.kernel.call_at(
                world.kernel.now_ns + self._deadline_ns,
                PRIORITY_PLANNER,
                lambda: self._on_deadline(active),
            )

    def _on_deadline(self, active: ActiveLoad) -> None:
        """Too late: it is given up, and plans take other ways for a while."""
        if active.is_cancelled or not active.open_targets:
            return
        until_ns = self._world.kernel.now_ns + AVOIDED_DEADLINES * self._deadline_ns
        for pair in active.stuck_pairs():
            self._avoided[pair] = until_ns
        self._abort(active, "load deadline")

    def avoided(self) -> tuple[tuple[int, int], ...]:
        """Pairs that plans leave out now."""
        now_ns = self._world.kernel.now_ns
        return tuple(pair for pair, until_ns in self._avoided.items() if until_ns > now_ns)

    def _mark(self, load: Load) -> None:
        marker = _MARKERS.get(load.method)
        if marker is None:
            return
        is_nvlink = load.method == "nvlink"
        books = self.nvl if is_nvlink else self.rdma
        for source in load.sources:
            assert source not in books, f"replica {source} sends twice"
            books[source] = Marker.NVLINK_SENDING if is_nvlink else Marker.RDMA_SENDING
        for target in load.targets:
            assert target.replica not in self.rdma, f"replica {target.replica} loads twice"
            assert target.replica not in self.nvl, f"replica {target.replica} loads twice"
            books[target.replica] = marker
            if load.method == "tanz":
                self.nvl[target.replica] = marker

    def _take_up(self, active: ActiveLoad) -> None:
        """Books of a load that is under way."""
        load = active.load
        self._mark(load)
        for target in load.targets:
            if target.replica not in active.open_targets:
                self._unmark(target.replica)
        self._sending.append((active, load.sources))
        if load.method == "tanz" or (load.method == "chain" and load.is_live):
            self._awaited.append((active, list(active.open_targets)))

    def _on_segments(self, replica_id: int, segments: int) -> None:
        replica = self._world.replicas[replica_id]
        if self.table.note_layers:
            self._world.note("layers", f"replica {replica_id}", f"{segments} segments are there")
        replica.actor.tell(SegmentArrived(count=segments))

    def _on_loaded(self, active: ActiveLoad, target: Target) -> None:
        """All weights are there."""
        world = self._world
        replica = world.replicas[target.replica]
        state = replica.state
        if state not in LOADING and state is not S.NEW_PREFILL:
            return  # crashed meanwhile
        now_ns = world.kernel.now_ns
        self.cache.loaded(replica.machine, replica.replica_id, now_ns)
        method = active.load.method
        self.loads[method] = self.loads.get(method, 0) + 1
        took_s = (now_ns - active.started_ns) / 1e9
        world.note("loaded", f"replica {replica.replica_id}", f"{method} in {took_s:.3f} s")
        if not active.open_targets:
            self._end_of_sending(active)
        if state is S.NEW_PREFILL:
            replica.actor.tell(WeightsArrived(to=None))
            return
        self._unmark(replica.replica_id)
        to = _READY[target.role]
        if target.role == "decode" and self.table.executor == "serverless":
            to = S.MUTATING_TO_DECODE
        replica.actor.tell(WeightsArrived(to=to))

    def _end_of_sending(self, active: ActiveLoad) -> None:
        for entry in list(self._sending):
            if entry[0] is active:
                self._sending.remove(entry)
                books = self.nvl if active.load.method == "nvlink" else self.rdma
                for source in entry[1]:
                    books.pop(source, None)

    def _unmark(self, replica_id: int) -> None:
        self.rdma.pop(replica_id, None)
        self.nvl.pop(replica_id, None)
        for entry in list(self._awaited):
            if replica_id in entry[1]:
                entry[1].remove(replica_id)
            if not entry[1]:
                self._awaited.remove(entry)

    def _abort(self, active: ActiveLoad, cause: str) -> None:
        """Give a load up: its targets are inactive again, what they held goes elsewhere."""
        if active.is_cancelled:  # its deadline says nothing about a later load of the same replica
            return
        open_targets = list(active.open_targets)
        self.loads_given_up += 1
        self.loader.cancel(active)
        self._end_of_sending(active)
        for replica_id in open_targets:
            replica = self._world.replicas[replica_id]
            self._unmark(replica_id)
            if replica.state in LOADING or replica.state is S.NEW_PREFILL:
                is_live = replica.state is S.NEW_PREFILL
                why = f"load given up: {cause}"
                replica.actor.tell(LoadGivenUp(cause=why))
                if is_live:
                    self._world.give_up(replica)
                    order = Commanded(to=S.INACTIVE, writer="transfer", cause=why)
                    replica.actor.tell(order)
