"""Which replica is on which GPUs, at the start of a run.

Does not do: anything later than the start; the planner reuses these lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice

from emu.config.schema import ReplicaTable
from emu.errors import InputError
from emu.network.topology import Topology


def place(
    replicas: Sequence[ReplicaTable], topology: Topology, *, source: str = "config"
) -> list[list[int]]:
    """The GPUs of every replica, table by table, replica by replica.

    Replicas with `gpus` are put there; the others take free GPUs in order, or with `place =
    "spread"` those of the machine with the fewest replicas of their table (of equal ones the
    machine with the most free GPUs, then the first). A replica stays in one NVLink domain if there
    is one with room, else in one machine, else each tensor-parallel group does if it can. All GPUs
    of a replica are of one kind. Raises InputError naming the key.
    """
    taken: dict[int, str] = {}
    shared: dict[int, str] = {}
    explicit: dict[int, list[list[int]]] = {}
    for table, replica in enumerate(replicas):
        if replica.gpus:
            explicit[table] = _place_given(
                table, replica, topology, taken, shared if replica.shared else {}, source
            )
    kinds = dict.fromkeys(gpu.kind for gpu in topology.gpus)
    free_by_kind = {kind: _FreeGpus(topology, kind, taken) for kind in kinds}
    lists: list[list[int]] = []
    for table, replica in enumerate(replicas):
        key = f"replicas.{table}"
        if replica.shared and table not in explicit:
            raise InputError(source, None, f"{key}.shared", "needs `gpus`: which may be shared?")
        if table in explicit:
            lists.extend(explicit[table])
            continue
        mates: dict[int, int] = {}
        for position in range(replica.count):
            gpus = None
            if replica.place == "spread":
                gpus = _place_spread(replica, free_by_kind, mates)
            if gpus is None:  # packed, or larger than a machine
                gpus = _place_free(replica, free_by_kind)
            if gpus is None:
                raise InputError(source, None, key, _shortage(replica, position, topology, taken))
            for gpu in gpus:
                taken[gpu] = key
            lists.append(gpus)
    return lists


def _place_given(
    table: int,
    replica: ReplicaTable,
    topology: Topology,
    taken: dict[int, str],
    shared: dict[int, str],
    source: str,
) -> list[list[int]]:
    """`shared`: GPUs of other tables that may be taken once more."""
    key = f"replicas.{table}.gpus"

    def refuse(problem: str) -> InputError:
        return InputError(source, None, key, problem)

    size = replica.tensor_parallel * replica.pipeline_parallel
    if len(replica.gpus) != size * replica.count:
        raise refuse(
            f"{len(replica.gpus)} GPUs given, {size * replica.count} needed "
            f"({replica.count} replicas of {size})"
        )
    for gpu in replica.gpus:
        if not 0 <= gpu < len(topology.gpus):
            raise refuse(f"no GPU {gpu}: the nodes have GPUs 0 to {len(topology.gpus) - 1}")
        if gpu in taken and (gpu not in shared or shared[gpu] == key):
            raise refuse(f"GPU {gpu} is already taken by {taken[gpu]}")
        if replica.gpu and topology.gpus[gpu].kind != replica.gpu:
            raise refuse(f"GPU {gpu} is a {topology.gpus[gpu].kind}, not a {replica.gpu}")
        taken[gpu] = key
        if replica.shared:
            shared[gpu] = key
    groups = [replica.gpus[start : start + size] for start in range(0, len(replica.gpus), size)]
    for group in groups:
        kinds = list(dict.fromkeys(topology.gpus[gpu].kind for gpu in group))
        if len(kinds) > 1:
            raise refuse(f"one replica on GPUs of different kinds: {', '.join(kinds)}")
    return [list(group) for group in groups]


class _Group:
    """GPUs that are near each other: a machine, an NVLink domain, or what is in both."""

    __slots__ = ("free_count", "gpus", "index", "passed")

    def __init__(self, index: int = -1) -> None:
        self.index = index
        """Of the machine; -1: the group may span several."""
        self.gpus: list[int] = []
        """Ascending."""
        self.free_count = 0
        self.passed = 0
        """None of so many GPUs at the front is free."""


class _FreeGpus:
    """Free GPUs of one kind and the groups that they are in. What is taken is never given back.

    The groups are asked in the order of their first free GPU, which a heap keeps for each size:
    placing all replicas of a cluster costs so much for each GPU, however many there are.
    """

    def __init__(self, topology: Topology, kind: str, taken: Mapping[int, str]) -> None:
        # Machine and domain differ either way round: a domain may span machines or split one.
        near: dict[tuple[int, int], _Group] = {}
        domains: dict[int, _Group] = {}
        machines: dict[int, _Group] = {}
        self._groups_of: dict[int, list[_Group]] = {}
        self._all = _Group()
        for gpu in topology.gpus:
            if gpu.kind != kind or gpu.index in taken:
                continue
            place = machine, domain = gpu.machine, gpu.nvlink_domain
            groups = [
                self._all,
                near.get(place) or near.setdefault(place, _Group(machine)),
                machines.get(machine) or machines.setdefault(machine, _Group(machine)),
            ]
            if gpu.nvlink_out >= 0:
                groups.append(domains.get(domain) or domains.setdefault(domain, _Group()))
            self._groups_of[gpu.index] = groups
            for group in groups:
                group.gpus.append(gpu.index)
                group.free_count += 1
        self._machines = list(machines.values())
        self._families = [list(family.values()) for family in (near, domains, machines)]
        self._heaps: dict[int, list[list[tuple[int, int]]]] = {}

    @property
    def count(self) -> int:
        """How many are free."""
        return self._all.free_count

    def take(self, gpus: Sequence[int]) -> None:
        """These are free no more."""
        for gpu in gpus:
            for group in self._groups_of.pop(gpu):
                group.free_count -= 1

    def together(self, size: int) -> list[int] | None:
        """The first `size` in one NVLink domain and machine, else domain, else machine."""
        heaps = self._heaps.get(size)
        if heaps is None:
            heaps = self._heaps[size] = [
                [(group.gpus[0], place) for place, group in enumerate(family)]
                for family in self._families
            ]
            for heap in heaps:
                heapify(heap)
        for heap, family in zip(heaps, self._families, strict=True):
            while heap:
                first, place = heap[0]
                group = family[place]
                if group.free_count < size:
                    heappop(heap)
                    continue
                found = self._first(group, size)
                if found[0] == first:
                    return found
                heapreplace(heap, (found[0], place))
        return None

    def apart(self, size: int, mates: Mapping[int, int]) -> tuple[int, list[int]] | None:
        """(machine, its first `size`) where there are the fewest of `mates`; None: no room.

        A machine of several NVLink domains gives one with room, if it has such.
        """
        roomy = [group for group in self._machines if group.free_count >= size]
        if not roomy:
            return None
        chosen = min(roomy, key=lambda group: (mates.get(group.index, 0), -group.free_count))
        near = (
            group
            for group in self._families[0]
            if group.index == chosen.index and group.free_count >= size
        )
        return chosen.index, self._first(next(near, chosen), size)

    def first(self, size: int) -> list[int]:
        """The first `size`, wherever they are."""
        return self._first(self._all, size)

    def _first(self, group: _Group, size: int) -> list[int]:
        gpus, groups_of = group.gpus, self._groups_of
        while gpus[group.passed] not in groups_of:
            group.passed += 1
        if size == 1:
            return [gpus[group.passed]]
        free = (gpus[i] for i in range(group.passed, len(gpus)) if gpus[i] in groups_of)
        return list(islice(free, size))


def _place_free(replica: ReplicaTable, free_by_kind: Mapping[str, _FreeGpus]) -> list[int] | None:
    """Take the first free GPUs that suit, by kind in order of appearance; None = none."""
    size = replica.tensor_parallel * replica.pipeline_parallel
    for kind, free in free_by_kind.items():
        if (replica.gpu and kind != replica.gpu) or free.count < size:
            continue
        gpus = free.together(size)
        if gpus is not None:
            free.take(gpus)
            return gpus
        gpus = []
        for _ in range(replica.pipeline_parallel):
            group = free.together(replica.tensor_parallel)
            if group is None:
                group = free.first(replica.tensor_parallel)
            free.take(group)
            gpus.extend(group)
        return gpus
    return None


def _place_spread(
    replica: ReplicaTable, free_by_kind: Mapping[str, _FreeGpus], mates: dict[int, int]
) -> list[int] | None:
    """Take GPUs of the machine with the fewest `mates` (by machine, counted here); None = none."""
    size = replica.tensor_parallel * replica.pipeline_parallel
    for kind, free in free_by_kind.items():
        if replica.gpu and kind != replica.gpu:
            continue
        found = free.apart(size, mates)
        if found is not None:
            machine, gpus = found
            mates[machine] = mates.get(machine, 0) + 1
            free.take(gpus)
            return gpus
    return None


def _shortage(
    replica: ReplicaTable, position: int, topology: Topology, taken: dict[int, str]
) -> str:
    size = replica.tensor_parallel * replica.pipeline_parallel
    kinds = dict.fromkeys(gpu.kind for gpu in topology.gpus)
    if replica.gpu and replica.gpu not in kinds:
        return f"no node has a GPU {replica.gpu!r}; there are {', '.join(kinds)}"
    free = sum(gpu.index not in taken and replica.gpu in ("", gpu.kind) for gpu in topology.gpus)
    what = f"{replica.gpu} GPUs" if replica.gpu else "GPUs of one kind"
    return (
        f"not enough GPUs: replica {position + 1} of {replica.count} needs {size} {what}, "
        f"{free} of {len(topology.gpus)} are free"
    )
