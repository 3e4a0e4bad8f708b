"""The `astra-sim` latency backend: an iteration as ASTRA-Sim counts it.

Owns the way from a batch shape to graphs and back to a duration, for one kind of replica: by the
embedded executor (no program needed, `foreign` is False), by a real program (`measure` is
awaited), or from stored counts. All NPUs of the replica start together; the members of a
data-parallel group that share experts are simulated with equal batches. Host time is added as
in the other backends.

The fast backends (profile, roofline) are the same sum in closed form: `profile` and this one with
`compute = "profile"` agree to the nanosecond (a test says where). What only this one can do is
weights and KV in other memories, attention in memory, the quirks of `latency.faithful`, and a
real program in the executor's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from emu.backends.astra.chain import Chain
from emu.backends.astra.convert import QUIRKS, convert
from emu.backends.astra.counts import CountStore, shape_key
from emu.backends.astra.graph import Graph
from emu.backends.astra.iteration import run_once
from emu.backends.astra.memories import Memories
from emu.backends.astra.rows import TraceGenerator
from emu.backends.astra.trace import Trace
from emu.errors import InputError
from emu.latency.base import COMPONENTS, BatchShape, stepped_decode_run
from emu.latency.profile.rows import LAYER_COMPONENT
from emu.network.rounds import CollectiveSystem

STAGGER: Final = "end_npu_stagger"
"""The last NPU starts at the first event of the others, as under the program's polling."""

_MEASURED_MAX: Final = 1 << 16


class Calculates(Protocol):
    """A program that runs graphs."""

    async def ends_ns(self, graphs: Sequence[Graph]) -> list[int]:
        """When each NPU ends, all starting at 0."""
        ...

    async def aclose(self) -> None:
        """End it."""
        ...


def check_faithful(names: Sequence[str]) -> None:
    """Refuse unknown quirks. Raises InputError."""
    known = (*QUIRKS, STAGGER)
    for name in names:
        if name not in known:
            problem = f"unknown name {name!r}; known: {', '.join(known)}"
            raise InputError("[latency]", None, "faithful", problem)


class AstraBackend:
    """Implements `LatencyBackend` for one kind of replica."""

    name = "astra-sim"

    def __init__(
        self,
        generator: TraceGenerator,
        network: CollectiveSystem,
        memories: Memories,
        *,
        members: int = 1,
        host_ns: Callable[[BatchShape], int] | None = None,
        faithful: Sequence[str] = (),
        calculator: Calculates | None = None,
        store: CountStore | None = None,
        replay_only: bool = False,
    ) -> None:
        """`members`: replicas of the data-parallel group that are simulated together."""
        check_faithful(faithful)
        self._generator = generator
        self.network = network
        self.memories = memories
        self._members = members
        self._host_ns = host_ns
        self._faithful = tuple(faithful)
        self._calculator = calculator
        self._store = store
        self.replays = replay_only
        """Knows stored shapes only."""
        self._setup = generator.setup
        self._num_npus = self._setup.tensor * self._setup.pipeline
        self.foreign = calculator is not None and not replay_only
        self._chain: Chain | None = None
        """Answers for whole batches in the executor's place, where it can."""
        changes = {STAGGER, "expert_dispatch"} & set(self._faithful)
        if members == 1 and not changes and Chain.fits(generator, network):
            self._chain = Chain(generator, network, memories)
        self._measured: dict[str, tuple[int, ...]] = {}
        """What a program without a store has said in this run."""

    def trace(self, shape: BatchShape) -> Trace:
        """The rows of an iteration."""
        return self._generator.trace(shape)

    def graphs(self, shape: BatchShape, *, named: bool = False) -> list[Graph]:
        """The graphs of all NPUs, of all members of the group."""
        trace = self.trace(shape)
        quirks = [name for name in self._faithful if name in QUIRKS]
        graphs: list[Graph] = []
        for member in range(self._members):
            first = member * self._num_npus
            graphs += convert(trace, first, self._num_npus, named=named, quirks=quirks)
        return graphs

    def _stages(self, ends: Sequence[int] | Mapping[int, int], stages: int) -> tuple[int, ...]:
        """Duration of each stage from the ends of its NPUs (any member's)."""
        per_stage = self._num_npus // stages
        latest = [
            max(
                ends[member * self._num_npus + stage * per_stage + rank]
                for member in range(self._members)
                for rank in range(per_stage)
            )
            for stage in range(stages)
        ]
        return tuple(
            max(0, end - begin) for begin, end in zip([0, *latest[:-1]], latest, strict=True)
        )

    def _embedded(self, shape: BatchShape) -> tuple[int, ...]:
        if self._chain is not None and not _is_partial(shape):
            return (self._chain.end_ns(shape),)
        late = STAGGER in self._faithful
        ends = run_once(self.network, self.memories, self.graphs(shape), last_waits=late)
        return self._stages(ends, 1 if _is_partial(shape) else self._setup.pipeline)

    def _cycles(self, shape: BatchShape) -> tuple[int, ...]:
        if self._store is None:
            return self._measured[shape_key(shape)] if self.foreign else self._embedded(shape)
        if self.replays or self.foreign:
            return self._store.require(shape)
        known = self._store.get(shape)
        if known is None:
            known = self._embedded(shape)
            self._store.put(shape, known)
        return known

    async def measure(self, shape: BatchShape) -> int:
        """Duration of an iteration, from the program unless its count is stored."""
        assert self._calculator is not None
        store, key = self._store, shape_key(shape)
        known = self._measured.get(key) if store is None else store.get(shape)
        if known is None:
            ends = await self._calculator.ends_ns(self.graphs(shape))
            known = self._stages(ends, 1 if _is_partial(shape) else self._setup.pipeline)
            if store is not None:
                store.put(shape, known)
            else:
                if len(self._measured) >= _MEASURED_MAX:
                    self._measured.clear()
                self._measured[key] = known
        return max(1, sum(known) + self._host(shape))

    async def aclose(self) -> None:
        """End the program, save the counts."""
        try:
            if self._calculator is not None:
                await self._calculator.aclose()
        finally:
            if self._store is not None:
                self._store.close()

    def _host(self, shape: BatchShape) -> int:
        return self._host_ns(shape) if self._host_ns is not None else 0

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration over all stages."""
        return max(1, sum(self._cycles(shape)) + self._host(shape))

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """Duration on each stage; host time is counted on the first."""
        stages = list(self._cycles(shape))
        stages[0] += self._host(shape)
        stages[-1] = max(1, stages[-1]) if sum(stages) == 0 else stages[-1]
        return tuple(stages)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """One execution a step, but for chains, in which only attention differs."""
        if self._chain is None or self._store is not None or self.foreign or _is_partial(shape):
            return stepped_decode_run(self, shape, steps)
        costs = np.maximum(self._chain.run_ns(shape, steps) + self._host(shape), 1)
        ends: NDArray[np.int64] = np.cumsum(costs)
        return ends

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """Compute rows by layer; what is left is communication, with one NPU memory."""
        parts = dict.fromkeys(COMPONENTS, 0)
        total = self.iteration_ns(shape)
        parts["cpu_overhead"] = min(total, self._host(shape))
        expert_rows: dict[int, int] = {}
        for row in self.trace(shape).rows:
            if row.name == "attention":
                is_prompt = bool(shape.prefill_new)
                parts["attention_prefill" if is_prompt else "attention_decode"] += row.comp_ns
            elif row.name == "moe":
                # Ranks work side by side: each layer's slowest counts, all are alike here.
                expert_rows[row.comp_ns] = expert_rows.get(row.comp_ns, 0) + 1
            else:
                parts[LAYER_COMPONENT.get(row.name, "dense")] += row.comp_ns
        ranks = max(1, min(self._setup.local_experts, self._setup.tensor))
        parts["moe"] = sum(ns * count for ns, count in expert_rows.items()) // ranks
        left = total - sum(parts.values())
        parts["collectives" if self._num_npus * self._members > 1 else "memory"] += left
        return parts


def _is_partial(shape: BatchShape) -> bool:
    return bool(shape.start_layer) or shape.layers >= 0
