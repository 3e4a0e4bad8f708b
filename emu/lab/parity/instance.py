"""One instance of the original: its scheduler, its batches in flight, their graphs.

Owns the options of a parity run that an instance needs, and how instances are made of a cluster
file. Schedulers and KV pools are emu's (`scheduling/vllm.py`), so what they do is checked here
against the original.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from emu.backends.astra.convert import QUIRKS, convert
from emu.backends.astra.graph import Graph, Location, Place
from emu.backends.astra.layer_times import BundleTimes
from emu.backends.astra.pim import Member, PimAttention
from emu.backends.astra.rows import TraceGenerator, TraceSetup
from emu.backends.astra.trace import Trace
from emu.config.schema import VllmTable
from emu.errors import InputError
from emu.kv.memory import Demand, engine_plan
from emu.kv.tiers import LowerTier, chunk_tokens_for
from emu.lab.parity.cluster import ParityCluster, ParityReplica, trace_model
from emu.latency.base import BatchShape
from emu.latency.moe_gate import GateShape, make_gate
from emu.latency.profile.bundle import find_bundle, read_bundle, variant_name
from emu.request import Request
from emu.scheduling.base import Batch, Progress, ReplicaLimits
from emu.scheduling.cohort import RunningRequest
from emu.scheduling.running import RunningSet
from emu.scheduling.vllm import VllmScheduler
from emu.units import GIB

_TIER_TOKENS = 256


class OriginalRunningSet(RunningSet):
    """`RunningSet` whose batches end as in the original, which differs with pipeline stages only.

    The original advances a request's computed tokens when a batch is formed and asks for them when
    a batch ends. With several batches in flight the end of an earlier one therefore counts what a
    later one has still to compute: a prompt is complete, and its first token there, while its last
    chunk runs. Source: LLMServingSim 2.0.
    """

    def token_receivers(self, batch: Batch) -> Iterable[Request]:
        """Members of the batch that get an output token at its end."""
        if self.limits.pipeline_stages == 1:
            return super().token_receivers(batch)
        requests = [running.request for running, _, _ in self.records.get(batch.batch_id, ())]
        return [
            request
            for request in requests
            if request.request_id in self.requests
            and request.computed_tokens >= request.reached_tokens
        ]

    def end_record(
        self, running: RunningRequest, new: int, target: int, now_ns: int, progress: Progress
    ) -> bool:
        """The outcome of a member, judged by what it has computed in all batches."""
        if self.limits.pipeline_stages > 1:
            target = running.request.computed_tokens
        return super().end_record(running, new, target, now_ns, progress)


class ParityOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The original's command line, as far as it changes results."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    block_size: int = 16
    utilization: float = 0.9
    prefix_caching: bool = True
    chunked_prefill: bool = True
    reserve_full_isl: bool = True
    prefix_storage: Literal["none", "cpu", "cxl"] = "none"
    prefix_sharing: bool = False
    attention_offloading: bool = False
    sub_batches: bool = False
    local_offloading: bool = False
    expert_routing: str = "balanced"
    request_routing: Literal["load", "rr", "rand"] = "load"
    block_copy: bool = True
    """Off, a model with experts runs one block only, as the original does then."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    log_interval_s: float = 1.0
    """The first event comes after so long, or with the first arrival if that is earlier."""
    idle_grid: bool = True
    """An idle clock moves in steps of 1 ms."""
    late_arrivals: bool = True
    """An arrival is noticed at the next event, not at its own instant."""
    end_npu_stagger: bool = True
    """The last NPU of a replica starts at the event after the one at which the first starts."""
    quirks: tuple[str, ...] = QUIRKS
    """What the converter loses (`convert.QUIRKS`)."""
    pim_prompt_length: bool = True
    """Attention in memory costs the prompt's length, whatever has been generated since."""


class Flight(msgspec.Struct):
    """A batch in flight, or the one-token batch of a group member without work."""

    flight_id: int
    batch: Batch | None
    shape: BatchShape
    recall_bytes: int = 0
    members: list[Member] = msgspec.field(default_factory=list)
    graphs: Mapping[int, Graph] | None = None
    """None until the group's wave is complete."""
    fired: list[int] = msgspec.field(default_factory=list)
    ended: list[int] = msgspec.field(default_factory=list)


class ParityRow(msgspec.Struct, frozen=True):
    """A row of the original's result file. Times are ns."""

    instance: int
    request_id: int
    prompt_tokens: int
    output_tokens: int
    arrival_ns: int
    end_ns: int
    latency_ns: int
    queuing_ns: int
    ttft_ns: int
    tpot_ns: int
    itl_ns: list[int]


class Instance:
    """One model replica of the original."""

    def __init__(
        self,
        replica: ParityReplica,
        scheduler: VllmScheduler,
        generator: TraceGenerator,
        options: ParityOptions,
    ) -> None:
        self.replica = replica
        self.scheduler = scheduler
        self.table = scheduler.table
        self.generator = generator
        self.options = replica.options(options)
        self.flights: dict[int, Flight] = {}
        self.done: list[ParityRow] = []
        self.preemptions = 0
        self.recomputed_tokens = 0
        self._next_id = 0

    def form(self, now_ns: int, npu: int) -> Flight | None:
        """Ask the scheduler for the next batch; the NPU that asked has claimed it."""
        batch = self.scheduler.schedule(now_ns)
        if batch is None:
            return None
        self.preemptions += len(batch.preempted)
        flight = Flight(self._next_id, batch, batch.shape)
        flight.recall_bytes = sum(recall.size_bytes for recall in batch.recalls)
        if self.generator.pim is not None:
            flight.members = self._members(batch)
        self._add(flight, npu)
        return flight

    def form_dummy(self, npu: int) -> Flight:
        """One decode with a history of one token."""
        shape = BatchShape(
            decode_count=1,
            decode_context_sum=1,
            decode_context_max=1,
            decode_context_min=1,
            sequences=1,
        )
        flight = Flight(self._next_id, None, shape)
        self._add(flight, npu)
        return flight

    def _add(self, flight: Flight, npu: int) -> None:
        flight.fired.append(npu)
        self.flights[flight.flight_id] = flight
        self._next_id += 1

    def _members(self, batch: Batch) -> list[Member]:
        chunks = {id(chunk.request): chunk for chunk in batch.chunks}
        members: list[Member] = []
        residents: list[Request] = list(self.scheduler.residents())
        receiving = {id(request) for request in self.scheduler.token_receivers(batch)}
        for request in residents:
            chunk = chunks.get(id(request))
            if chunk is not None:
                new, context = chunk.new_tokens, chunk.context_tokens
            elif id(request) in receiving:
                new, context = 1, request.reached_tokens - 1
            else:
                continue
            is_prefilling = request.first_token_ns < 0
            by_prompt = self.options.pim_prompt_length or is_prefilling
            members.append(
                Member(
                    request.prompt_tokens if by_prompt else context,
                    request.arrival_ns,
                    new,
                    context,
                    is_prefilling,
                )
            )
        return members

    def join(self, iteration: int, npu: int) -> Flight | None:
        """The batch that this NPU runs next, claimed for it."""
        flight = self.flights.get(iteration)
        if flight is None or npu in flight.fired:
            return None
        flight.fired.append(npu)
        return flight

    def report(self, flight_id: int, npu: int) -> Flight | None:
        """An NPU has ended a batch; the batch, once its first and last NPU have."""
        flight = self.flights.get(flight_id)
        if flight is None or npu in flight.ended:
            return None
        flight.ended.append(npu)
        first, last = self.replica.first_npu, self.replica.last_npu
        if first in flight.ended and last in flight.ended:
            del self.flights[flight_id]
            return flight
        return None

    def trace(self, flight: Flight) -> Trace:
        """The rows of a batch."""
        if self.options.sub_batches and len(flight.members) > 1:
            sides = _split(flight.members)
            shapes = (_shape_of(sides[0]), _shape_of(sides[1]))
            return self.generator.interleaved_trace(shapes, sides, recall_bytes=flight.recall_bytes)
        return self.generator.trace(
            flight.shape, recall_bytes=flight.recall_bytes, members=flight.members
        )

    def graphs(self, flight: Flight) -> dict[int, Graph]:
        """The graphs of a batch by NPU."""
        graphs = convert(
            self.trace(flight),
            self.replica.first_npu,
            self.replica.num_npus,
            local_offloading=self.options.local_offloading,
            named=False,
            quirks=self.options.quirks,
        )
        return {graph.npu: graph for graph in graphs}


def _split(members: Sequence[Member]) -> tuple[list[Member], list[Member]]:
    """Largest first to the lighter side; each side in order of arrival."""
    sides: tuple[list[Member], list[Member]] = ([], [])
    load = [0, 0]
    for member in sorted(members, key=lambda m: -m.new_tokens):
        side = 0 if load[0] <= load[1] else 1
        sides[side].append(member)
        load[side] += member.new_tokens
    for own in sides:
        own.sort(key=lambda m: m.arrival_ns)
    return sides


def _shape_of(members: Sequence[Member]) -> BatchShape:
    shape = BatchShape(sequences=len(members))
    contexts = [m.context_tokens for m in members if m.new_tokens == 1]
    for member in members:
        if member.new_tokens > 1:
            shape.prefill_new.append(member.new_tokens)
            shape.prefill_context.append(member.context_tokens)
    if contexts:
        shape.decode_count = len(contexts)
        shape.decode_context_sum = sum(contexts)
        shape.decode_context_max = max(contexts)
        shape.decode_context_min = min(contexts)
    return shape


def make_instances(
    cluster: ParityCluster, profiles: Path, options: ParityOptions
) -> list[Instance]:
    """All instances. Raises InputError where a bundle is missing."""
    tiers: dict[int, LowerTier] = {}
    instances: list[Instance] = []
    for replica in cluster.replicas:
        own_options = replica.options(options)
        table = _table(replica, options)
        bundle = read_bundle(
            find_bundle(
                profiles,
                hardware=replica.hardware,
                model=replica.spec.name,
                variant=variant_name("bfloat16", own_options.kv_cache_dtype),
            ),
            replica.tensor,
        )
        demand = Demand(
            tp=replica.tensor,
            pp=replica.pipeline,
            ep=replica.expert,
            block_size=table.block_size,
            kv_cache_dtype=own_options.kv_cache_dtype,
            utilization=replica.utilization or options.utilization,
        )
        plan = engine_plan(replica.spec, replica.memory_gib, demand)
        limits = ReplicaLimits(
            num_blocks=plan.num_blocks,
            block_size=table.block_size,
            max_model_tokens=replica.spec.max_position,
            pipeline_stages=replica.pipeline,
            prefix_caching=table.prefix_caching,
            leap=False,
        )
        own = _tiers(cluster, replica, table, options, tiers, plan.kv_bytes_token_rank)
        scheduler = VllmScheduler(table, limits, tiers=own, running_set=OriginalRunningSet)
        generator = _generator(cluster, replica, BundleTimes(bundle), own_options)
        instances.append(Instance(replica, scheduler, generator, options))
    return instances


def _table(replica: ParityReplica, options: ParityOptions) -> VllmTable:
    own = replica.overrides
    tokens = own.get("max_num_batched_tokens", options.max_num_batched_tokens)
    limit = replica.spec.max_position
    return VllmTable(
        block_size=own.get("block_size", options.block_size),
        max_num_seqs=own.get("max_num_seqs", options.max_num_seqs),
        max_num_batched_tokens=min(tokens, limit) if tokens else limit,
        long_prefill_token_threshold=own.get(
            "long_prefill_token_threshold", options.long_prefill_token_threshold
        ),
        chunked_prefill=own.get("enable_chunked_prefill", options.chunked_prefill),
        prefix_caching=own.get("enable_prefix_caching", options.prefix_caching),
        reserve_full_sequence=own.get("reserve_full_isl", options.reserve_full_isl),
    )


def _tiers(
    cluster: ParityCluster, replica: ParityReplica, table: VllmTable,
    options: ParityOptions, shared: dict[int, LowerTier], bytes_per_token_rank: int,
) -> list[LowerTier]:  # fmt: skip
    if options.prefix_storage == "none" or not table.prefix_caching:
        return []
    is_cxl = options.prefix_storage == "cxl"
    place = -1 if is_cxl else replica.node
    if options.prefix_sharing and place in shared:
        return [shared[place]]
    size_gib = cluster.cxl_gib if is_cxl else cluster.hosts[replica.node].memory_gib
    if size_gib <= 0:
        name = "cxl_mem" if is_cxl else "cpu_mem"
        raise InputError(cluster.source, None, name, "there is none to keep prefixes in")
    tier = LowerTier(
        options.prefix_storage,
        capacity_bytes=int(size_gib * GIB),
        chunk_tokens=chunk_tokens_for(table.block_size, _TIER_TOKENS),
        bytes_per_token=bytes_per_token_rank * replica.num_npus,
        shared=options.prefix_sharing,
    )
    shared[place] = tier
    return [tier]


def _generator(
    cluster: ParityCluster, replica: ParityReplica, times: BundleTimes, options: ParityOptions
) -> TraceGenerator:
    model = trace_model(replica.spec, options.kv_cache_dtype)
    dims = len(cluster.network.dims)
    tp = replica.tensor
    group = sum(r.group == replica.group for r in cluster.replicas) if replica.group else 1
    first_only = (True, *[False] * (dims - 1)) if dims > 1 else None
    across = (tp > 1, *[False] * (dims - 2), True) if dims > 1 else None
    experts = replica.expert if model.experts else 1
    gate = None
    if replica.spec.experts is not None:
        shape = GateShape(model.experts, replica.spec.experts.per_token, ranks=experts)
        gate = make_gate(options.expert_routing, shape, faithful=True)
    pim = None
    if options.attention_offloading:
        host = cluster.hosts[replica.node]
        if host.pim is None:
            problem = f"node {replica.node} has none, which attention offloading needs"
            raise InputError(cluster.source, None, "cpu_mem.pim_config", problem)
        pim = PimAttention(host.pim, host.pim.channels(host.memory_gib), model, tp)
    setup = TraceSetup(
        model=model,
        kind=replica.kind,
        tensor=tp,
        pipeline=replica.pipeline,
        expert=experts,
        local_experts=max(1, experts // group) if group > 1 else experts,
        tensor_dims=first_only,
        expert_dims=across if group > 1 and replica.expert > tp else first_only,
        host=_host(replica),
        recall_place=replica.recall_place,
        placement=replica.placement,
        repeats_blocks=options.block_copy or not model.experts,
        skipped_layers=("rotary_emb",) if "TPU" in replica.hardware else (),
    )
    return TraceGenerator(setup, times, gate, pim)


def _host(replica: ParityReplica) -> Place:
    return Place(Location.REMOTE, replica.node)
