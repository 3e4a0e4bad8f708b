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

import hashlib
import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.backends.astra.calculator import Calculator, OneShotCalculator
from emu.backends.astra.etfile import Dialect
from emu.backends.astra.executor import Chain, run_once
from emu.backends.astra.inputs import InputSetup, Memories, Memory
from emu.backends.astra.rows import (
    BundleTimes,
    LayerTimes,
    RooflineTimes,
    TraceGenerator,
    TraceSetup,
)
from emu.backends.astra.trace import QUIRKS, Graph, Trace, TraceModel, convert
from emu.catalogue import sizes
from emu.config.schema import AstraTable
from emu.errors import InputError, RunError
from emu.latency.base import COMPONENTS, BatchShape, stepped_decode_run
from emu.latency.coefficients import scaled
from emu.latency.context import LatencyContext, collective_system, link_dims
from emu.latency.engine import host_costs, step_overhead_ns
from emu.latency.moe_gate import GateShape, make_gate
from emu.latency.profile import LAYER_COMPONENT
from emu.latency.profile_bundle import find_bundle, read_bundle, variant_name
from emu.latency.roofline import RooflineBackend
from emu.network.rounds import CollectiveSystem, NetworkDim

# --------------------------------------------------------------------------------------------------
# Counts that ASTRA-Sim has given, kept by batch shape: to be reused, or replayed without it.
#
# Owns a SQLite file with one table: a fingerprint of everything that the counts depend on beside
# the batch (model, degrees, network, memories, layer times, program), the canonical batch shape,
# and the cycles of each pipeline stage. Shapes that cost the same are one: the order of prompt
# chunks does not matter, and of the decodes only count, sum and extremes of their contexts.
#
# The file may be shared by processes; a run reads what it knows once and writes what it learns.

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS counts (
    fingerprint TEXT NOT NULL,
    shape TEXT NOT NULL,
    cycles TEXT NOT NULL,
    PRIMARY KEY (fingerprint, shape)
) WITHOUT ROWID
"""
_COMMIT_EVERY: Final = 256


def shape_key(shape: BatchShape) -> str:
    """The canonical text of a shape."""
    chunks = sorted(zip(shape.prefill_new, shape.prefill_context, strict=True))
    prompts = "+".join(f"{new}@{context}" for new, context in chunks) or "-"
    decodes = (
        f"{shape.decode_count}x{shape.decode_context_sum}"
        f"[{shape.decode_context_min},{shape.decode_context_max}]"
        if shape.decode_count
        else "-"
    )
    layers = f"{shape.start_layer}:{shape.layers}"
    return f"p={prompts} d={decodes} n={shape.sequences} pad={shape.padded_tokens} l={layers}"


def fingerprint(*parts: Any) -> str:
    """A short text that differs when anything in `parts` (Structs, plain values) differs."""
    data = msgspec.json.encode([msgspec.to_builtins(part, str_keys=True) for part in parts])
    return hashlib.sha256(data).hexdigest()[:32]


class CountStore:
    """One file of counts, for one fingerprint."""

    def __init__(self, path: Path, system: str, *, must_exist: bool = False) -> None:
        """Raises InputError for a file that is missing (`must_exist`) or is no such file."""
        self.path = path
        self._system = system
        self._unsaved: list[tuple[str, str, str]] = []
        self.hits = 0
        self.misses = 0
        if must_exist and not path.is_file():
            raise InputError(str(path), None, "latency.replay", "no such file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path)
        except (OSError, sqlite3.Error) as error:
            raise InputError(str(path), None, "", f"cannot be opened: {error}") from None
        try:
            self._db.execute(_SCHEMA)
            rows = self._db.execute(
                "SELECT shape, cycles FROM counts WHERE fingerprint = ?", (system,)
            )
            self._known = {shape: _cycles(text) for shape, text in rows}
        except (sqlite3.Error, ValueError) as error:
            self._db.close()
            raise InputError(str(path), None, "", f"not a file of counts: {error}") from None

    def __len__(self) -> int:
        return len(self._known)

    def get(self, shape: BatchShape) -> tuple[int, ...] | None:
        """Cycles of each stage, or None."""
        found = self._known.get(shape_key(shape))
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def require(self, shape: BatchShape) -> tuple[int, ...]:
        """Cycles of each stage. Raises RunError that says which shape is missing."""
        found = self.get(shape)
        if found is None:
            others = self._count_others()
            hint = f" (it has {others} for other systems)" if others and not self._known else ""
            raise RunError(
                f"{self.path}: no count for the batch {shape_key(shape)}; "
                f"the file has {len(self._known)} for this system{hint}"
            )
        return found

    def put(self, shape: BatchShape, cycles: Sequence[int]) -> None:
        """Remember the counts of a shape."""
        key = shape_key(shape)
        self._known[key] = tuple(cycles)
        text = ",".join(map(str, cycles))
        self._unsaved.append((self._system, key, text))
        if len(self._unsaved) >= _COMMIT_EVERY:
            self.save()

    def save(self) -> None:
        """Make everything durable. Raises RunError.

        Nothing is open between two calls: replicas of several kinds share the file in one run.
        """
        rows, self._unsaved = self._unsaved, []
        if not rows:
            return
        try:
            with self._db:
                self._db.executemany("INSERT OR REPLACE INTO counts VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise RunError(f"{self.path}: counts cannot be stored: {error}") from None

    def _count_others(self) -> int:
        (count,) = self._db.execute("SELECT COUNT(*) FROM counts").fetchone()
        return int(count)

    def close(self) -> None:
        """Save and close."""
        try:
            self.save()
        finally:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _cycles(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


# --- The `astra-sim` latency backend --------------------------------------------------------------

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
        if members == 1 and STAGGER not in self._faithful and Chain.fits(generator, network):
            self._chain = Chain(generator, network, memories)
        self._measured: dict[str, tuple[int, ...]] = {}
        """What a program without a store has said in this run."""

    # --- graphs -----------------------------------------------------------------------------
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

    # --- cycles -----------------------------------------------------------------------------
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

    # --- the protocol -----------------------------------------------------------------------
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


# --------------------------------------------------------------------------------------------------
# The `astra-sim` backend of a replica, from the configuration.
#
# Owns the choice of layer times, the network and memories of one replica (or of the members of a
# data-parallel group that share its experts), and where counts come from: embedded executor,
# program, cache or replay.


def _keys(context: LatencyContext) -> AstraTable:
    table = context.table
    assert isinstance(table, AstraTable)
    return table


def check_astra(context: LatencyContext) -> None:
    """Refuse what the program cannot run. Raises InputError."""
    tp, ep = context.tensor_parallel, _expert_ranks(context)
    if ep > tp and ep % tp:
        problem = f"{ep} ranks do not fill tensor_parallel {tp} evenly"
        raise InputError(context.source, None, "replicas.expert_parallel", problem)
    _memories(context).check(f"{context.source}: [[nodes]]")


def _expert_ranks(context: LatencyContext) -> int:
    has_experts = context.model.experts is not None
    return (context.expert_parallel or context.tensor_parallel) if has_experts else 1


def make_astra(context: LatencyContext) -> AstraBackend:
    """The backend of one kind of replica. Raises InputError for what it lacks."""
    check_astra(context)
    table, tp, pp = _keys(context), context.tensor_parallel, context.pipeline_parallel
    experts, ep = context.model.experts, _expert_ranks(context)
    members = max(1, ep // tp)
    dims, tensor_dims, expert_dims = _network(context, members)
    network = collective_system(context, dims)
    memories = _memories(context)
    setup = TraceSetup(
        model=_trace_model(context),
        tensor=tp,
        pipeline=pp,
        expert=ep,
        local_experts=max(1, ep // members),
        tensor_dims=tensor_dims,
        expert_dims=expert_dims,
    )
    gate = None
    if experts is not None:
        shape = GateShape(experts.count, experts.per_token, ep, context.seed)
        gate = make_gate(table.expert_routing, shape)
    costs = host_costs(table.host_overhead, table.step_overhead_us)

    def host_ns(shape: BatchShape) -> int:
        return step_overhead_ns(costs, shape.sequences)

    return AstraBackend(
        TraceGenerator(setup, _times(context), gate),
        network,
        memories,
        members=members,
        host_ns=host_ns,
        faithful=table.faithful,
        calculator=_calculator(context, network, memories),
        store=_store(context, setup, network, memories),
        replay_only=bool(table.replay),
    )


def _network(
    context: LatencyContext, members: int
) -> tuple[tuple[NetworkDim, ...], tuple[bool, ...] | None, tuple[bool, ...] | None]:
    """Dimensions (tensor, pipeline, group) and the flags of tensor and expert collectives."""
    tp, pp = context.tensor_parallel, context.pipeline_parallel
    inner, outer = link_dims(context)
    here = context.gpus_per_machine
    sizes_of = [(tp, tp), (pp, tp * pp), (members, tp * pp * members)]
    dims = [
        msgspec.structs.replace(inner if reach <= here else outer, npus=size)
        for size, reach in sizes_of
    ]
    while len(dims) > 1 and dims[-1].npus == 1:
        dims.pop()
    if len(dims) == 1:
        return tuple(dims), None, None
    tensor = (True, *[False] * (len(dims) - 1))
    expert = (tp > 1, False, True) if members > 1 else tensor
    return tuple(dims), tensor, expert


def _memories(context: LatencyContext) -> Memories:
    node = context.node
    return Memories(
        remote=Memory(
            memory_type="PER_NODE_MEMORY_EXPANSION",
            gbytes_per_s=node.host_memory_gbytes_per_s,
            latency_ns=node.host_memory_latency_ns,
        ),
        cxl=Memory(
            memory_type="MEMORY_POOL",
            gbytes_per_s=node.cxl_gbytes_per_s,
            latency_ns=node.cxl_latency_ns,
            devices=node.cxl_devices,
        )
        if node.cxl_gib
        else None,
        local=Memory(
            memory_type="PER_NPU_MEMORY_EXPANSION",
            gbytes_per_s=context.gpu.memory_gbytes_per_s,
        ),
    )


def _trace_model(context: LatencyContext) -> TraceModel:
    model = context.model
    dtype = sizes.activation_dtype(model, context.dtype)
    experts = model.experts
    return TraceModel(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn,
        vocab=model.vocab,
        element_bytes=sizes.weight_bytes(1, dtype),
        kv_element_bytes=sizes.weight_bytes(1, context.kv_cache_dtype),
        experts=experts.count if experts else 0,
        expert_ffn=experts.ffn if experts else 0,
    )


def _times(context: LatencyContext) -> LayerTimes:
    table, model = _keys(context), context.model
    if table.compute == "profile":
        if not table.path:
            problem = 'compute = "profile" needs a bundle'
            raise InputError("config", None, "latency.path", problem)
        directory = find_bundle(
            table.path,
            hardware=table.hardware or context.gpu.name,
            model=model.name,
            variant=variant_name(
                sizes.activation_dtype(model, context.dtype), context.kv_cache_dtype
            ),
        )
        return BundleTimes(read_bundle(directory, context.tensor_parallel))
    backend = RooflineBackend(
        model,
        context.gpu,
        tp=context.tensor_parallel,
        ep=context.expert_parallel,
        dtype=context.dtype,
        kv_cache_dtype=context.kv_cache_dtype,
        kernels=scaled(
            context.kernels.coefficients(context.gpu),
            table.compute_efficiency,
            table.memory_efficiency,
        ),
        collective_ns=_no_collectives,
        round_tokens_to=table.round_tokens_to,
    )
    return RooflineTimes(backend, model)


def _no_collectives(kind: str, size_bytes: int, ranks: int) -> int:
    """Collectives are nodes of the graphs here."""
    return 0


def _calculator(
    context: LatencyContext, network: CollectiveSystem, memories: Memories
) -> Calculates | None:
    table = _keys(context)
    if not table.binary or table.replay:
        return None
    found = shutil.which(table.binary)
    if found is None:
        problem = f"no program that may be run: {table.binary}"
        raise InputError(context.source, None, "latency.binary", problem)
    binary = Path(found).absolute()
    npus = 1
    for dim in network.dims:
        npus *= dim.npus
    if table.dialect != "oneshot":
        setup = input_setup(network, memories)
        return Calculator(binary, setup, npus, dialect=table.dialect, timeout_s=table.timeout_s)
    setup = input_setup(network, memories, "upstream")
    kept = [dim.npus > 1 for dim in network.dims]
    return OneShotCalculator(binary, setup, max(2, npus), kept=kept, timeout_s=table.timeout_s)


def input_setup(
    network: CollectiveSystem, memories: Memories, dialect: Dialect = "fork"
) -> InputSetup:
    """What a program's input files say."""
    if dialect == "fork":
        return InputSetup(network=network, memories=memories)
    # The published program takes no dimension of one NPU; a lone NPU is given a neighbor.
    kept = [index for index, dim in enumerate(network.dims) if dim.npus > 1]
    dims = tuple(network.dims[index] for index in kept)
    if not dims:
        kept, dims = [0], (msgspec.structs.replace(network.dims[0], npus=2),)
    algorithms = tuple(network.algorithm(index) for index in kept)
    system = msgspec.structs.replace(network, dims=dims, algorithms=algorithms)
    return InputSetup(network=system, memories=memories, dialect="upstream")


def _store(
    context: LatencyContext, setup: TraceSetup, network: CollectiveSystem, memories: Memories
) -> CountStore | None:
    table = _keys(context)
    path = table.replay or table.cache
    if not path:
        return None
    system = fingerprint(
        setup,
        network,
        memories,
        context.gpu,
        {
            "model": context.model.name,
            "dtype": [context.dtype, context.kv_cache_dtype],
            "compute": [table.compute, table.path, table.hardware, table.round_tokens_to],
            "efficiency": [table.compute_efficiency, table.memory_efficiency],
            "routing": [table.expert_routing, context.seed],
            "faithful": table.faithful,
        },
    )
    return CountStore(Path(path), system, must_exist=bool(table.replay))
