"""Weights in the memory of machines: which replicas load from there, what it costs in bytes.

`cache`: a machine keeps the weights while one of its replicas has them, and for a time after (the
original counts from the last load: `cache_ttl_from_load`). `host`: every machine always has them.
`pool`: one machine has one copy, from which all others load over the network. Otherwise none
does: some replica always holds a copy on its GPUs, from which all others load, so that the pool
needs no host memory at all (BlitzScale's O(1) caching).

A machine's memory may be limited (`HostMemory`). With `cache`, a copy that does not fit takes the
place of others: of those used longest ago, or (`size_use`) of those used least for their size, as
GreedyDual-Size-Frequency ranks them. Pinned copies stay. What does not fit at all is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Literal

from emu.config.schema import AutoscaleTable, CarriedTable
from emu.units import GIB, s_to_ns


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
            table.loads_alone
            or (isinstance(table, CarriedTable) and table.multicast == "none")
            or (table.loader == "pool" and not table.is_static)
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
