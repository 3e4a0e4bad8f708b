"""The slots of a replica's LoRA adapters, and what a step's adapters take. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final, final

from emu.latency.base import BatchShape, Work
from emu.latency.kernels.operations import Ops
from emu.request import Request
from emu.scheduling.parts import Part
from emu.units import NS_PER_S

WEIGHT_BYTES: Final = 2
"""Of one weight of an adapter."""


@final
class LoraWork(Work):
    """What LoRA adapters add to an iteration."""

    def __init__(self, adapters: int, tokens: int, cold_loads: int, host_loads: int) -> None:
        self.adapters = adapters
        """Different adapters of its members."""
        self.tokens = tokens
        """New tokens of members with an adapter."""
        self.cold_loads = cold_loads
        """Adapters that are read from the disk first."""
        self.host_loads = host_loads
        """Adapters that are copied from host memory first."""


@final
class Adapters(Part):
    """Slots of a replica's adapters: which are on the GPU, which in host memory, which in use.

    Rules of vLLM: at most `slots` different adapters among the running requests; an adapter that a
    step needs and that has no slot takes that of the least recently used one that no member of the
    step needs; the host keeps `host_slots` copies, the least recently used leaves, with its slot.
    An adapter is loaded in the step that first runs it, and the whole batch waits.

    Invariants: adapters with a slot have a copy on the host; those in use are at most `slots`.
    """

    forbids_cohort = "which adapters a step loads depends on its members, one by one"

    slots: int
    host_slots: int
    cold_loads: int
    """Loads from the disk so far."""
    host_loads: int
    """Loads from host memory."""
    hits: int
    """Members of steps, once for each step and adapter, that had a slot already."""

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

    def may_run(self, request: Request) -> bool:
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

    def work(self, members: Sequence[tuple[Request, int]]) -> LoraWork:
        """What the adapters of a batch's members add to it; those without a slot get one."""
        needed: dict[str, None] = {}
        tokens = 0
        for request, new in members:
            if request.adapter:
                needed[request.adapter] = None
                tokens += new
        cold, warm = self.take(needed)
        return LoraWork(len(needed), tokens, cold, warm)

    def _leaves_host(self, names: list[str]) -> str:
        oldest = next(name for name in self._host if name not in names)
        del self._host[oldest]
        return oldest

    def clear(self) -> None:
        """The process has ended: nothing is loaded."""
        self._on_gpu.clear()
        self._host.clear()

    def holds(self, request: Request) -> bool:
        """Whether the request would find its adapter here."""
        return request.adapter in self._on_gpu or request.adapter in self._in_use

    def recount(self, running: Sequence[Request], present: Iterable[Request]) -> list[str]:
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


@final
class LoraPricer:
    """Prices the loads and the thin products of adapters."""

    component: ClassVar[str] = "lora"

    def __init__(
        self,
        rank: int,
        host_ns: int,
        cold_ns: int,
        ops: Ops,
        matrices: Sequence[tuple[int, int, int]],
    ) -> None:
        """`matrices`: (inputs, outputs, how many in the model) of one rank; loads take `host_ns`
        from host memory, `cold_ns` from the disk."""
        self._rank = rank
        self._host_ns = host_ns
        self._cold_ns = cold_ns
        self._ops = ops
        self._matrices = tuple(matrices)
        self._known: dict[tuple[int, int], int] = {}

    def added_ns(self, shape: BatchShape) -> int:
        """Loads and products of the adapters of a batch."""
        lora = next((work for work in shape.works if isinstance(work, LoraWork)), None)
        if lora is None or not lora.adapters:
            return 0
        return (
            lora.cold_loads * self._cold_ns
            + lora.host_loads * self._host_ns
            + self._products_ns(lora.tokens, lora.adapters)
        )

    def _products_ns(self, tokens: int, adapters: int) -> int:
        found = self._known.get((tokens, adapters))
        if found is None:
            rank, ops, seconds = self._rank, self._ops, 0.0
            for inputs, outputs, count in self._matrices:
                more_bytes = (adapters - 1) * rank * (inputs + outputs) * WEIGHT_BYTES
                seconds += count * (
                    ops.gemm_s(tokens, rank, inputs, "bfloat16")
                    + ops.gemm_s(tokens, outputs, rank, "bfloat16")
                    + more_bytes / ops.memory_rate
                )
            found = self._known[tokens, adapters] = round(seconds * NS_PER_S)
        return found
