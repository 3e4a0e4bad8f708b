"""Weights in the memory of machines: who can load from there, and what it costs in bytes.

`cache`: a machine keeps the weights while one of its replicas has them, and for a time after (the
original counts from the last load: `cache_ttl_from_load`). `host`: every machine always has
them. Otherwise none does: some replica always holds a copy on its GPUs, from which all others
load, so that the pool needs no host memory at all (BlitzScale's O(1) caching).
"""

from __future__ import annotations

from collections.abc import Iterable

from emu.config.schema import AutoscaleTable
from emu.units import s_to_ns


class HostCache:
    """Books of the host copies of one model."""

    def __init__(self, table: AutoscaleTable, machines: Iterable[int], copy_bytes: int) -> None:
        """`copy_bytes`: one whole copy of the weights."""
        self._loader = table.loader
        self._is_used = table.executor == "serverless" or table.multicast == "none"
        self._ttl_ns = s_to_ns(table.host_cache_ttl_s)
        self._counts_from_load = "cache_ttl_from_load" in table.faithful
        self._machines = sorted(set(machines))
        self._users: dict[int, list[int]] = {machine: [] for machine in self._machines}
        self._touched_ns: dict[int, int] = {}
        self.copy_bytes = copy_bytes
        self.bytes_max = 0
        self._integral = 0
        self._since_ns = 0

    def loaded(self, machine: int, replica_id: int, now_ns: int) -> None:
        """A replica of the machine has the weights now."""
        self._account(now_ns)
        if replica_id not in self._users[machine]:
            self._users[machine].append(replica_id)
        self._touched_ns[machine] = now_ns
        self._account(now_ns)

    def unloaded(self, machine: int, replica_id: int, now_ns: int) -> None:
        """It has dropped them."""
        self._account(now_ns)
        if replica_id in self._users[machine]:
            self._users[machine].remove(replica_id)
            if not self._counts_from_load:
                self._touched_ns[machine] = now_ns

    def lose(self, machine: int, now_ns: int) -> None:
        """A machine's copy is gone (a fault); the next load there brings it back."""
        self._account(now_ns)
        self._touched_ns.pop(machine, None)
        if machine in self._users:  # else no replica is there
            self._users[machine].clear()

    def cached_machines(self, now_ns: int) -> tuple[int, ...]:
        """Machines whose memory holds the weights."""
        if not self._is_used or self._loader in ("disk", "delay"):
            return ()
        if self._loader == "host":
            return tuple(self._machines)
        return tuple(
            machine
            for machine in self._machines
            if self._users[machine]
            or (machine in self._touched_ns and now_ns - self._touched_ns[machine] < self._ttl_ns)
        )

    def _account(self, now_ns: int) -> None:
        """Bytes x time, exact: a copy that expires between two events is cut where it expires."""
        since_ns = self._since_ns
        if self._is_used and self._loader == "host":
            self._integral += len(self._machines) * self.copy_bytes * (now_ns - since_ns)
        elif self._is_used and self._loader == "cache":
            for machine in self._machines:
                until_ns = now_ns
                if not self._users[machine]:
                    if machine not in self._touched_ns:
                        continue
                    until_ns = min(now_ns, self._touched_ns[machine] + self._ttl_ns)
                self._integral += self.copy_bytes * max(0, until_ns - since_ns)
        self._since_ns = now_ns
        present = len(self.cached_machines(now_ns)) * self.copy_bytes
        self.bytes_max = max(self.bytes_max, present)

    def mean_bytes(self, now_ns: int) -> float:
        """Mean of the bytes held from the start to now."""
        self._account(now_ns)
        return self._integral / now_ns if now_ns else 0.0
