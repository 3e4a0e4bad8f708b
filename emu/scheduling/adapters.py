"""LoRA adapters of one replica: which are on the GPU, which in host memory, which are in use.

Owns the slots. Rules of vLLM: at most `slots` different adapters among the running requests; an
adapter that a step needs and that has no slot takes that of the least recently used one that no
member of the step needs; the host keeps `host_slots` copies, the least recently used leaves, with
its slot. An adapter is loaded in the step that first runs it, and the whole batch waits. Pure.

Invariants: adapters with a slot have a copy on the host; those in use are at most `slots`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from emu.request import Request


@final
class Adapters:
    """Slots of a replica's adapters."""

    slots: int
    host_slots: int
    cold_loads: int
    """Loads from the disk so far."""
    host_loads: int
    """Loads from host memory."""
    hits: int
    """Members of steps, once for each step and adapter, that had a slot already."""

    __slots__ = (
        "_host",
        "_in_use",
        "_on_gpu",
        "cold_loads",
        "hits",
        "host_loads",
        "host_slots",
        "slots",
    )

    def __init__(self, slots: int, host_slots: int) -> None:
        assert 0 < slots <= host_slots
        self.slots = slots
        self.host_slots = host_slots
        self.cold_loads = self.host_loads = self.hits = 0
        self._in_use: dict[str, int] = {}
        """Running requests by adapter."""
        self._on_gpu: dict[str, None] = {}
        """Adapters with a slot, the least recently used first."""
        self._host: dict[str, None] = {}

    # --- running requests -------------------------------------------------------------------
    def can_run(self, request: Request) -> bool:
        """Whether the request may join the running ones."""
        adapter = request.adapter
        return not adapter or adapter in self._in_use or len(self._in_use) < self.slots

    def begin(self, request: Request) -> None:
        """The request runs."""
        if request.adapter:
            self._in_use[request.adapter] = self._in_use.get(request.adapter, 0) + 1
            assert len(self._in_use) <= self.slots

    def end(self, request: Request) -> None:
        """The request runs no more."""
        if request.adapter:
            left = self._in_use[request.adapter] - 1
            if left:
                self._in_use[request.adapter] = left
            else:
                del self._in_use[request.adapter]

    # --- steps ------------------------------------------------------------------------------
    def take(self, needed: Iterable[str]) -> tuple[int, int]:
        """A step needs these adapters, each named once: loads from the disk, and from the host."""
        names = list(needed)
        cold = warm = 0
        for adapter in names:
            if adapter in self._on_gpu:
                self.hits += 1
            elif adapter in self._host:
                warm += 1
            else:
                cold += 1
            self._host.pop(adapter, None)
            self._host[adapter] = None
            if len(self._host) > self.host_slots:
                self._on_gpu.pop(self._leaves_host(names), None)
            if adapter not in self._on_gpu and len(self._on_gpu) >= self.slots:
                del self._on_gpu[next(name for name in self._on_gpu if name not in names)]
            self._on_gpu.pop(adapter, None)
            self._on_gpu[adapter] = None
        self.cold_loads += cold
        self.host_loads += warm
        return cold, warm

    def _leaves_host(self, names: list[str]) -> str:
        oldest = next(name for name in self._host if name not in names)
        del self._host[oldest]
        return oldest

    def clear(self) -> None:
        """The process has ended: nothing is loaded."""
        self._on_gpu.clear()
        self._host.clear()

    # --- seeing -----------------------------------------------------------------------------
    def holds(self, adapter: str) -> bool:
        """Whether a request with this adapter would find it here."""
        return adapter in self._on_gpu or adapter in self._in_use

    def recount(self, running: Iterable[Request]) -> list[str]:
        """Full check of the counts; one line for each thing that is wrong."""
        counted: dict[str, int] = {}
        for request in running:
            if request.adapter:
                counted[request.adapter] = counted.get(request.adapter, 0) + 1
        problems = []
        if counted != self._in_use:
            problems.append(f"adapters in use {self._in_use}, counted {counted}")
        if len(self._on_gpu) > self.slots or len(self._host) > self.host_slots:
            problems.append(
                f"{len(self._on_gpu)} adapters in {self.slots} slots, "
                f"{len(self._host)} of {self.host_slots} on the host"
            )
        if any(adapter not in self._host for adapter in self._on_gpu):
            problems.append("an adapter has a slot without a copy on the host")
        return problems
