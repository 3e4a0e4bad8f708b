"""Parity with LLMServingSim: its whole front end on the embedded executor, quirks included.

Owns a deterministic, synchronous re-run of that simulator's main loop: polls, routing, iteration
scheduling, hand-off from prefill to decode, data-parallel waves, sessions. Its only purpose is to
reproduce published runs to the nanosecond; emu's own runs use the replica actors. Schedulers and
KV pools are emu's (`scheduling/vllm.py`), so what they do is checked here against the original.
Source: LLMServingSim 2.0.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from emu.backends.astra.executor import IDLE_STEP_NS, Answer, Executor, Polling
from emu.backends.astra.rows import BundleTimes, Member, PimAttention, TraceGenerator, TraceSetup
from emu.backends.astra.trace import QUIRKS, Graph, Location, Node, NodeKind, Place, Trace, convert
from emu.config.schema import VllmTable
from emu.errors import InputError, RunError
from emu.kv.blocks import LowerTier, chunk_tokens_for
from emu.kv.memory import engine_plan
from emu.lab.parity.cluster import ParityCluster, ParityReplica, trace_model
from emu.latency.base import BatchShape
from emu.latency.moe_gate import GateShape, make_gate
from emu.latency.profile_bundle import find_bundle, read_bundle, variant_name
from emu.process.prepared import prepared
from emu.request import Request
from emu.scheduling.base import Batch, Progress, ReplicaLimits
from emu.scheduling.cohort import RunningRequest
from emu.scheduling.running import RunningSet
from emu.scheduling.vllm import VllmScheduler
from emu.units import GIB
from emu.workload.items import Line, Turn, prefix_of

# --------------------------------------------------------------------------------------------------
# One instance: its scheduler, its batches in flight, their graphs


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

    # --- batches ----------------------------------------------------------------------------
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

    # --- graphs -----------------------------------------------------------------------------
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


# --- building -----------------------------------------------------------------------------------


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
        plan = engine_plan(
            replica.spec,
            replica.memory_gib,
            tp=replica.tensor,
            pp=replica.pipeline,
            ep=replica.expert,
            block_size=table.block_size,
            kv_cache_dtype=own_options.kv_cache_dtype,
            utilization=replica.utilization or options.utilization,
        )
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
    size_gib = cluster.cxl_gib if is_cxl else cluster.host_memory_gib[replica.node]
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
    expert_dims = across if group > 1 and replica.expert > tp else first_only
    experts = replica.expert if model.experts else 1
    gate = None
    if replica.spec.experts is not None:
        shape = GateShape(model.experts, replica.spec.experts.per_token, ranks=experts)
        gate = make_gate(options.expert_routing, shape, faithful=True)
    pim = None
    if options.attention_offloading:
        device = cluster.pims[replica.node]
        if device is None:
            problem = f"node {replica.node} has none, which attention offloading needs"
            raise InputError(cluster.source, None, "cpu_mem.pim_config", problem)
        channels = device.channels(cluster.host_memory_gib[replica.node])
        pim = PimAttention(device, channels, model, tp)
    setup = TraceSetup(
        model=model,
        kind=replica.kind,
        tensor=tp,
        pipeline=replica.pipeline,
        expert=experts,
        local_experts=max(1, experts // group) if group > 1 else experts,
        tensor_dims=first_only,
        expert_dims=expert_dims,
        host=_host(replica),
        recall_place=replica.recall_place,
        placement=replica.placement,
        repeats_blocks=options.block_copy or not model.experts,
        skipped_layers=("rotary_emb",) if "TPU" in replica.hardware else (),
    )
    return TraceGenerator(setup, times, gate, pim)


def _host(replica: ParityReplica) -> Place:
    return Place(Location.REMOTE, replica.node)


# --------------------------------------------------------------------------------------------------
# The main loop


_NS_PER_S: Final = 1_000_000_000
_WAITING_WEIGHT: Final = 4
_DEFAULT_REQUESTS: Final = 16
_DEFAULT_TOKENS: Final = 64
"""Prompt and output of the requests that every instance is given without a workload."""


class _Session(msgspec.Struct):
    """Sub-requests that are still to come."""

    turns: list[Turn]
    first_id: int
    at: int = 0


class ParityResult(msgspec.Struct, frozen=True):
    """What a run brought."""

    clock_ns: int
    rows: list[ParityRow]
    polls: int
    preemptions: int
    recomputed_tokens: int


def read_requests(path: Path, limit: int = 0) -> list[Line]:
    """The lines of a workload; `limit` 0 = all."""
    lines = msgspec.json.Decoder(prepared(Line)).decode_lines(path.read_bytes())
    return lines[:limit] if limit else lines


class ParityRun:
    """The front end: answers the polls of the executor's loop."""

    def __init__(
        self,
        cluster: ParityCluster,
        instances: Sequence[Instance],
        lines: Sequence[Line] | None,
        options: ParityOptions,
    ) -> None:
        """`lines` None: the requests of the original without a workload."""
        self.cluster = cluster
        self.options = options
        self.instances = list(instances)
        self._by_npu: dict[int, Instance] = {}
        for instance in self.instances:
            for npu in range(instance.replica.first_npu, instance.replica.last_npu + 1):
                self._by_npu[npu] = instance
        self._entries = [i for i in self.instances if i.replica.kind != "DECODE"]
        self._decoders = [i for i in self.instances if i.replica.kind == "DECODE"]
        self._turn = {"prefill": 0, "decode": 0}
        self._pending: list[tuple[int, int, Request]] = []
        """A heap of (arrival, number): equal arrivals keep the order of their release."""
        self._numbers = itertools.count()
        self._sessions: dict[int, _Session] = {}
        self._random = random.Random(42)
        replicas = [i.replica for i in self.instances]
        # Idle start NPUs are asked at every event, even inside the collectives of others.
        watched = len(replicas) > 1 or any(r.pipeline > 1 for r in replicas)
        offloads = any(i.options.attention_offloading for i in self.instances)
        memories = cluster.pim_memories if offloads else cluster.memories
        self.executor = Executor(cluster.network, memories, every_message=watched)
        self._has_workload = lines is not None
        if lines is None:
            self._queue_defaults()
        else:
            self._read(lines)
        self._waves: dict[str, dict[int, Flight]] = {}
        """Data-parallel groups: batches that wait for the other members, by instance."""
        self._released: dict[int, Mapping[int, Graph]] = {}
        """Graphs of a complete wave for a member that did not complete it."""
        self._overrun: list[int] = []
        """Requests of one output token that a decode instance gives a second one."""
        self._last_tokens: dict[int, int] = {}
        self._gaps: dict[int, list[int]] = {}
        self._done_npus: dict[int, list[int]] = {i.replica.index: [] for i in self.instances}
        self._finished: set[int] = set()
        self._prefills_are_done = False

    # --- workload ---------------------------------------------------------------------------
    def _read(self, lines: Sequence[Line]) -> None:
        next_id = 0
        for line in lines:
            if line.sub_requests is None:
                self._release(next_id, line, line.arrival_time_ns)
                next_id += 1
            elif line.sub_requests:
                if any(turn.after is not None for turn in line.sub_requests):
                    problem = "LLMServingSim plays sub-requests one after another"
                    raise InputError("workload", None, "sub_requests.after", problem)
                self._sessions[next_id] = _Session(line.sub_requests, next_id)
                self._release(next_id, line.sub_requests[0], line.arrival_time_ns)
                next_id += len(line.sub_requests)

    def _queue_defaults(self) -> None:
        """16 requests for every instance from the start, past the router."""
        for instance in self.instances:
            for number in range(_DEFAULT_REQUESTS):
                request = Request(
                    request_id=instance.replica.index * _DEFAULT_REQUESTS + number,
                    arrival_ns=0,
                    prompt_tokens=_DEFAULT_TOKENS,
                    output_tokens=_DEFAULT_TOKENS,
                    max_output_tokens=_DEFAULT_TOKENS,
                )
                instance.scheduler.enqueue(request, 0)

    def _release(self, request_id: int, item: Line | Turn, arrival_ns: int) -> None:
        request = Request(
            request_id=request_id,
            arrival_ns=arrival_ns,
            prompt_tokens=item.input_toks,
            output_tokens=item.output_toks,
            max_output_tokens=item.output_toks,
            prefix=prefix_of(item),
        )
        heapq.heappush(self._pending, (arrival_ns, next(self._numbers), request))
        if not self.options.late_arrivals:
            self.executor.wake_at(max(arrival_ns, self.executor.now_ns))

    def _continue_session(self, request: Request, now_ns: int) -> None:
        for session in self._sessions.values():
            if session.first_id + session.at == request.request_id:
                turn = session.turns[session.at]
                session.at += 1
                if session.at < len(session.turns):
                    due = now_ns + turn.tool_duration_ns
                    self._release(request.request_id + 1, session.turns[session.at], due)
                else:
                    del self._sessions[session.first_id]
                return

    # --- routing ----------------------------------------------------------------------------
    def _choose(self, role: str, candidates: Sequence[Instance]) -> Instance:
        """Least load from a rotating start: the first strictly smaller score wins."""
        start, count = self._turn[role], len(candidates)
        policy = self.options.request_routing
        if policy == "rand":
            return candidates[self._random.randrange(count)]
        if policy == "rr":
            self._turn[role] = start + 1
            return candidates[start % count]
        best, best_score = 0, float("inf")
        for offset in range(count):
            index = (start + offset) % count
            scheduler = candidates[index].scheduler
            load = _WAITING_WEIGHT * scheduler.waiting_count + scheduler.running_count
            score = load / candidates[index].table.requests_max
            if score < best_score:
                best, best_score = index, score
        self._turn[role] = (best + 1) % count
        return candidates[best]

    def _route(self, now_ns: int) -> None:
        while self._pending and self._pending[0][0] <= now_ns:
            _, _, request = heapq.heappop(self._pending)
            instance = self._choose("prefill", self._entries)
            if not instance.table.caches_prefixes:
                request.prefix = None
            if instance.replica.kind == "PREFILL" and request.output_tokens == 1:
                # The original hands it on all the same, and one decode too many is run.
                request.output_tokens = request.max_output_tokens = 2
                self._overrun.append(request.request_id)
            instance.scheduler.enqueue(request, now_ns)

    def _hand_off(self, source: Instance, request: Request, now_ns: int) -> None:
        computed = request.computed_tokens
        source.scheduler.detach(request)
        source.scheduler.release(request)
        request.computed_tokens = computed
        instance = self._choose("decode", self._decoders)
        request.held = None
        if not instance.scheduler.reserve([request]):
            raise RunError(
                f"at {now_ns} ns decode instance {instance.replica.index} has no room for request "
                f"{request.request_id}; the original stops here, too"
            )
        instance.scheduler.activate([request], now_ns)

    # --- polls ------------------------------------------------------------------------------
    def next_ns(self, now_ns: int) -> int:
        """The next arrival, for runs without the idle grid."""
        return max(now_ns + 1, self._pending[0][0]) if self._pending else -1

    def answer(self, npu: int, iteration: int, now_ns: int) -> Answer | Mapping[int, Graph]:
        """One poll, in the order of the original's main loop."""
        instance = self._by_npu[npu]
        self._route(now_ns)
        flight = instance.report(iteration - 1, npu)
        if flight is not None:
            self._complete(instance, flight, now_ns)
        graphs = self._schedule(instance, npu, iteration, now_ns)
        if graphs is not None:
            return graphs
        return self._rest(instance, npu)

    def _complete(self, instance: Instance, flight: Flight, now_ns: int) -> None:
        if flight.batch is None:
            return
        scheduler = instance.scheduler
        receivers = list(scheduler.token_receivers(flight.batch))
        progress: Progress = scheduler.complete(flight.batch, 1, now_ns, 0)
        for request in receivers:
            last = self._last_tokens.get(request.request_id)
            if last is None:
                self._gaps[request.request_id] = []
            else:
                self._gaps[request.request_id].append(now_ns - last)
            self._last_tokens[request.request_id] = now_ns
        if instance.replica.kind == "PREFILL":
            for request in progress.first_tokens:
                self._hand_off(instance, request, now_ns)
            return
        for request in progress.finished:
            instance.done.append(self._row(instance, request, now_ns))
            self._continue_session(request, now_ns)

    def _row(self, instance: Instance, request: Request, now_ns: int) -> ParityRow:
        latency = now_ns - request.arrival_ns
        ttft = request.first_token_ns - request.arrival_ns
        output = 1 if request.request_id in self._overrun else request.output_tokens
        steps = output - 1
        index, number = instance.replica.index, request.request_id
        if not self._has_workload:
            # There the column says which instance the request was numbered for.
            owner, number = divmod(number, _DEFAULT_REQUESTS)
            if owner == index:
                index = number % len(self.instances)
        return ParityRow(
            index,
            number,
            request.prompt_tokens,
            output,
            request.arrival_ns,
            now_ns,
            latency,
            request.prefill_scheduled_ns - request.arrival_ns,
            ttft,
            (latency - ttft) // steps if steps else 0,
            self._gaps.pop(request.request_id),
        )

    def _schedule(
        self, instance: Instance, npu: int, iteration: int, now_ns: int
    ) -> Mapping[int, Graph] | None:
        replica = instance.replica
        has_room = len(instance.flights) < replica.pipeline
        if npu == replica.first_npu and has_room:
            flight = instance.form(now_ns, npu)
            if flight is not None:
                if replica.group:
                    return self._enter_wave(instance, flight)
                flight.graphs = instance.graphs(flight)
                return flight.graphs
        else:
            flight = instance.join(iteration, npu)
            if flight is not None:
                if flight.graphs is None:
                    flight.fired.remove(npu)
                return flight.graphs
        released = self._released.pop(replica.index, None)
        if released is not None:
            return released
        wave = self._waves.get(replica.group)
        if wave and replica.index not in wave and has_room:
            # A member with nothing to do keeps pace with a batch of one token.
            return self._enter_wave(instance, instance.form_dummy(npu))
        return None

    # --- data-parallel groups -----------------------------------------------------------------
    def _members(self, group: str) -> list[Instance]:
        return [i for i in self.instances if i.replica.group == group]

    def _enter_wave(self, instance: Instance, flight: Flight) -> Mapping[int, Graph] | None:
        """Put a batch into the group's wave; its graphs if that completes the wave."""
        group = instance.replica.group
        wave = self._waves.setdefault(group, {})
        wave[instance.replica.index] = flight
        members = self._members(group)
        if len(wave) < len(members):
            return None
        del self._waves[group]
        largest = max(each.shape.new_tokens for each in wave.values())
        graphs: dict[int, Graph] = {}
        for member in members:
            each = wave[member.replica.index]
            each.shape.padded_tokens = largest
            graphs.update(member.graphs(each))
        for index, each in wave.items():
            each.graphs = graphs
            if index != instance.replica.index:
                # The NPU that formed it has claimed it already and is answered at its next poll.
                self._released[index] = graphs
        return graphs

    # --- the end ----------------------------------------------------------------------------
    def _is_empty(self, instance: Instance) -> bool:
        scheduler = instance.scheduler
        return not (scheduler.waiting_count or scheduler.running_count or instance.flights)

    def _rest(self, instance: Instance, npu: int) -> Answer:
        replica = instance.replica
        if self._pending or self._sessions or not self._is_empty(instance):
            return Answer.PASS
        if replica.group and not all(self._is_empty(m) for m in self._members(replica.group)):
            return Answer.PASS
        if replica.kind == "DECODE" and not self._prefills_are_done:
            prefills = sum(i.replica.kind == "PREFILL" for i in self.instances)
            self._prefills_are_done = len(self._finished) >= prefills
            if not self._prefills_are_done:
                return Answer.PASS
        reported = self._done_npus[replica.index]
        if npu not in reported:
            reported.append(npu)
        if len(reported) >= min(2, replica.num_npus):
            self._finished.add(replica.index)
        if len(self._finished) == len(self.instances):
            return Answer.EXIT
        return Answer.DONE

    def run(self) -> ParityResult:
        """Run to the end."""
        replicas = [i.replica for i in self.instances]
        ends = [r.last_npu for r in replicas if r.npus_owned > 1]
        polling = Polling(
            self.executor,
            [r.first_npu for r in replicas],
            ends,
            idle_step_ns=IDLE_STEP_NS if self.options.idle_grid else 0,
            stagger=self.options.end_npu_stagger,
        )
        first = max(1, self._pending[0][0]) if self._pending else 1
        interval_ns = int(self.options.log_interval_s * _NS_PER_S)
        event = Node(0, NodeKind.COMP, duration_ns=min(interval_ns, first))
        graphs = [Graph(npu, [event]) for npu in range(self.executor.npu_count)]
        clock = polling.run(self, graphs)
        rows = [row for instance in self.instances for row in instance.done]
        return ParityResult(
            clock,
            rows,
            polling.polls,
            sum(i.preemptions for i in self.instances),
            sum(i.recomputed_tokens for i in self.instances),
        )
