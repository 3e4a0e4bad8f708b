"""Where replicas are and what they have, without anything that the engine computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from emu.config.schema import SglangTable

if TYPE_CHECKING:
    from emu.cluster.plan import Plan, ReplicaPlan


class FrontEnd(msgspec.Struct, frozen=True):
    """Constants of an API server, ns."""

    intake_ns: int
    wait_ns: int
    """Of the tokenizer, for more prompts."""
    token_ns: int
    """Encoding a token of a prompt."""
    event_ns: int
    """An output event: a token, or a group of tokens."""
    id_ns: int
    """More for each token that the request of an event has, after its first."""
    group_tokens: int
    """Tokens of a request in an event, after its first."""
    rounds: int
    """Over all connections, that a first token waits for at most; 0 = no limit."""
    output_ns: int
    """From the end of a step to the client, besides."""


class Experts(msgspec.Struct, frozen=True):
    """How a group shares its experts."""

    ranks: int
    slots: int
    """Of a layer on each rank."""
    redundant: int
    """Slots of a layer beyond its experts, on all ranks."""
    expert_bytes: int
    """One expert of every layer; 0 = not restated."""
    placed: tuple[tuple[frozenset[int], ...], ...]
    """Experts of each rank, by layer, as they lie when the run begins."""
    bytes_per_s: tuple[tuple[str, float], ...]
    """At which a GPU reads experts, by where from."""


class Seat(msgspec.Struct, frozen=True):
    """One replica, as it was placed."""

    replica: int
    role: str
    gpus: tuple[int, ...]
    machine: int
    tensor_parallel: int
    stages: int
    blocks: int
    layers: int
    kv_token_bytes: int
    kv_copies: int
    """Ranks that hold the same of it: all of them what is latent, some a head of few."""
    page_tokens: int
    """Tokens of the pages in which KV moves."""
    state_bytes: int
    """Of the states of a sequence, which move with its KV."""
    rank_bytes: int
    """Weights of one rank by the model's shape; 0 = not restated."""
    layer_bytes: int
    """The part of them that every token passes, at two bytes a weight; 0 = not restated."""
    place: tuple[str, int, int]
    """GPU, table of `[[nodes]]`, and over how many machines it spreads."""
    memory_rate: float
    """Of one GPU, bytes per nanosecond."""
    flop_rate: float
    """Of one GPU at sixteen bits, operations per nanosecond."""
    watts: tuple[float, float]
    """Of one GPU: idle power, limit."""
    max_tokens: int
    latency: Any
    """Its `[latency]` table."""
    scheduler: Any
    """Its `[scheduler]` table."""
    group: str
    """Its data-parallel group, or none."""
    experts: Experts | None
    """What it shares with its group."""
    shares_experts: bool
    """It does, plainly or as those say."""
    hidden: int
    """Width of its model."""
    placement_ns: int
    """Between two placements of its group's experts; 0 = they stay."""
    served: str
    """The name of its model."""
    is_plain: bool
    """Iterations have nothing that costs besides: of features, drafts, or weights elsewhere."""
    is_beside: bool
    """What its iterations have besides is restated by `beside`: adapters, masks, free drafts."""
    drafts: int
    """Of a sequence in a step; 0 = none, or a tree of them."""
    is_outside: bool
    """Some of its weights are in the memory of the machine, and it is plain otherwise."""
    adapter_ns: tuple[int, int]
    """An adapter's way from the memory of the machine, and from its disk before that."""
    passes_over: bool
    """Its scheduler may take a request from behind one that cannot be held (blocks, adapters)."""
    is_hybrid: bool
    """Some layers keep states, or a window: hits and pieces end where those do."""
    is_ahead: bool
    """Its engine forms each batch while the one before it runs."""
    is_offloaded: bool
    """Weights or attention are in the memory of the machine."""
    token_flops: tuple[int, int, int]
    """Operations for a token, a pair of tokens, a token that comes out; 0 = not restated."""
    front: FrontEnd | None
    """Its API server, if clients reach it through one."""
    variation: tuple[float, float, int] | None
    """Of its steps: standard deviation, part with a pause, mean of all pauses (ns)."""


def seats_of(plan: Plan) -> list[Seat]:
    """Where replicas are and what they have, without anything that the engine computes."""
    tables = [i for i, node in enumerate(plan.config.nodes) for _ in range(node.count)]
    return [
        Seat(
            replica=replica.replica_id,
            role=replica.role,
            gpus=replica.gpus,
            machine=replica.machine,
            tensor_parallel=replica.tensor_parallel,
            stages=replica.pipeline_parallel,
            blocks=replica.num_blocks,
            layers=replica.model.layers,
            kv_token_bytes=replica.kv_bytes_per_token,
            kv_copies=_kv_copies(replica),
            page_tokens=replica.page_tokens,
            state_bytes=replica.state_bytes,
            rank_bytes=weights_of_rank(replica),
            layer_bytes=_layer_bytes(replica),
            place=(replica.gpu.name, tables[replica.machine], len(_machines(replica, plan))),
            memory_rate=replica.gpu.memory_gbytes_per_s,
            flop_rate=replica.gpu.tflops_fp16 * 1e3,
            watts=(replica.gpu.idle_w, replica.gpu.tdp_w),
            max_tokens=replica.max_model_tokens,
            latency=replica.latency,
            scheduler=replica.scheduler,
            group=replica.data_parallel_group,
            experts=_experts(replica, plan),
            shares_experts=replica.model.experts is not None and replica.expert_parallel > 1,
            hidden=replica.model.hidden,
            placement_ns=0 if replica.experts is None else round(1e9 * replica.experts.interval_s),
            served=replica.served,
            is_plain=kind == "plain",
            is_beside=kind == "beside",
            drafts=_drafts(replica),
            is_outside=kind == "outside",
            adapter_ns=_adapter_ns(replica, plan),
            passes_over=_passes_over(replica),
            is_hybrid=replica.kv_layout is not None or _keeps_states(replica),
            is_ahead=replica.schedules_ahead,
            is_offloaded=replica.placement is not None or replica.latency.attention_offload,
            token_flops=_token_flops(replica),
            front=_front(replica),
            variation=_variation(replica),
        )
        for replica in plan.replicas
        for kind in (_kind(replica, plan),)
    ]


def _keeps_states(replica: ReplicaPlan) -> bool:
    """States stand in SGLang's prefix cache."""
    scheduler = replica.scheduler
    has_states = any(layer.state is not None for layer in replica.model.special_layers)
    return isinstance(scheduler, SglangTable) and scheduler.caches_prefixes and has_states


def _experts(replica: ReplicaPlan, plan: Plan) -> Experts | None:
    """Where experts lie is taken as it is: `tests/latency/experts` judges how they are placed."""
    model, ranks = replica.model, replica.expert_parallel
    if not replica.data_parallel_group or model.experts is None or ranks <= 1:
        return None
    setting, count = replica.experts, model.experts.count
    if setting is not None and setting.is_apart:
        return None
    redundant = 0 if setting is None else setting.redundant
    slots = (count + redundant) // ranks
    placed: list[list[list[int]]] = []
    if setting is not None and plan.config.recovery.ep_fault == "mask":
        from emu.latency.experts.routed import make_balance

        balance = make_balance(replica.latency_context(plan.config), setting)
        in_order = [list(range(rank * slots, (rank + 1) * slots)) for rank in range(ranks)]
        placed = [in_order] if balance is None else [list(map(list, one)) for one in balance.placed]
    width = 0 if model.expert_dtype or model.linear_dtype else _width(replica)
    matrices = 3 if model.gated_mlp else 2
    moe_layers = sum(model.is_moe_layer(index) for index in range(model.layers))
    node = [n for n in plan.config.nodes for _ in range(n.count)][replica.machine]
    pcie = node.pcie_gbps if node.pcie_gbps > 0 else replica.gpu.pcie_gbps
    gbps = {"host": pcie, "peer": node.nic_gbps, "disk": node.ssd_gbps}
    return Experts(
        ranks=ranks,
        slots=slots,
        redundant=redundant,
        expert_bytes=width * moe_layers * matrices * model.hidden * model.experts.ffn,
        placed=tuple(tuple(map(frozenset, layer)) for layer in placed),
        bytes_per_s=tuple((where, rate * 1e9 / 8) for where, rate in gbps.items()),
    )


def _front(replica: ReplicaPlan) -> FrontEnd | None:
    engine = replica.engine
    if engine is None or replica.front_end is None:
        return None
    return FrontEnd(
        intake_ns=engine.intake_ns,
        wait_ns=engine.batch_wait_ns,
        token_ns=engine.prompt_token_ns,
        event_ns=engine.output_event_ns,
        id_ns=engine.output_id_ns if replica.pipeline_parallel == 1 else 0,
        group_tokens=replica.bound.model.stream_interval if replica.bound else 1,
        rounds=engine.first_token_rounds,
        output_ns=engine.output_ns,
    )


def _variation(replica: ReplicaPlan) -> tuple[float, float, int] | None:
    if not replica.latency.jitter or replica.bound is None:
        return None
    engine = replica.bound.model
    mean_ns = round(engine.straggler_part * engine.straggler_ns)
    return engine.jitter_step, engine.straggler_part, mean_ns


def _kind(replica: ReplicaPlan, plan: Plan) -> str:
    """What its iterations have besides tokens: nothing, what is restated, or weights elsewhere."""
    parts = len(replica.latency_context(plan.config).parts)
    if replica.model.tower is not None:
        return ""
    if replica.placement is not None:
        return "" if parts else "outside"
    table = msgspec.structs.asdict(replica.scheduler)
    restated = bool(table.get("enable_lora")) + bool(table.get("guided_share"))
    restated += bool(_drafts(replica)) and table["speculative_config"].draft_step_us <= 0
    return ("beside" if parts else "plain") if parts == restated else ""


def _kv_copies(replica: ReplicaPlan) -> int:
    model, ranks = replica.model, replica.tensor_parallel
    layers = [model.layer(index) for index in range(model.layers)]
    kept = [0.0, 0.0]
    for layer in layers:
        if layer.latent is not None:
            wide = layer.latent.kv_lora_rank + layer.latent.qk_rope_head_dim
            wide += 0 if layer.indexer is None else layer.indexer.head_dim
            kept[0] += wide
            kept[1] += ranks * wide
        elif layer.attention is not None:
            wide = layer.attention.kv_heads
            kept[0] += wide
            kept[1] += ranks * max(1, -(-wide // ranks))
    return max(1, int(kept[1] / kept[0])) if kept[0] else 1


def _drafts(replica: ReplicaPlan) -> int:
    """Drafts that are looked up, or made in no time, one after the other."""
    drafts = msgspec.structs.asdict(replica.scheduler).get("speculative_config")
    if drafts is None or drafts.eagle_topk > 1:
        return 0
    is_free = drafts.method == "ngram" or drafts.draft_step_us == 0
    return int(drafts.num_speculative_tokens) if is_free else 0


def _adapter_ns(replica: ReplicaPlan, plan: Plan) -> tuple[int, int]:
    """Two thin matrices of 16 bits beside each matrix of a layer; the disk has them unsplit."""
    table = msgspec.structs.asdict(replica.scheduler)
    model = replica.model
    if not table.get("enable_lora"):
        return 0, 0
    sizes = []
    for ranks in (replica.tensor_parallel, 1):
        q = -(-model.heads // ranks) * model.head_dim
        kv = max(1, -(-model.kv_heads // ranks)) * model.head_dim
        ffn, hidden = -(-model.ffn // ranks), model.hidden
        ends = 2 * (hidden + q) + 2 * (hidden + kv)
        ends += (3 if model.gated_mlp else 2) * (hidden + ffn)
        sizes.append(2 * table["max_lora_rank"] * model.layers * ends)
    node = [n for n in plan.config.nodes for _ in range(n.count)][replica.machine]
    pcie_gbps = node.pcie_gbps if node.pcie_gbps > 0 else replica.gpu.pcie_gbps
    return round(sizes[0] * 8 / pcie_gbps), round(sizes[1] * 8 / node.ssd_gbps)


def _passes_over(replica: ReplicaPlan) -> bool:
    table = msgspec.structs.asdict(replica.scheduler)
    return bool(table.get("skip_blocked") or table.get("enable_lora"))


def _machines(replica: ReplicaPlan, plan: Plan) -> set[int]:
    """Where its GPUs are, counted through the tables."""
    machine_of = [
        machine
        for machine, gpus in enumerate(n.gpus for n in plan.config.nodes for _ in range(n.count))
        for _ in range(gpus)
    ]
    return {machine_of[gpu] for gpu in replica.gpus}


def _is_dense(replica: ReplicaPlan) -> bool:
    model = replica.model
    is_odd = model.experts or model.latent or model.special_layers or model.tower
    return not (is_odd or model.linear_dtype or replica.pipeline_parallel > 1)


def _width(replica: ReplicaPlan) -> int:
    """Bytes of a weight; 0 = packed in some way."""
    dtype = replica.model.dtype if replica.dtype == "auto" else replica.dtype
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 0)


def _layer_weights(replica: ReplicaPlan) -> int:
    """Matrices of all layers on one rank, in whole numbers."""
    model, ranks = replica.model, replica.tensor_parallel
    heads = -(-model.heads // ranks) + max(1, -(-model.kv_heads // ranks))
    attention = 2 * model.hidden * heads * model.head_dim
    mlp = (3 if model.gated_mlp else 2) * model.hidden * -(-model.ffn // ranks)
    return model.layers * (attention + mlp)


def _layer_bytes(replica: ReplicaPlan) -> int:
    is_half = _is_dense(replica) and _width(replica) == 2
    return 2 * _layer_weights(replica) if is_half else 0


def weights_of_rank(replica: ReplicaPlan) -> int:
    """Bytes of the matrices of a dense model, split over the ranks; norms are nothing to it.

    0 = not restated.
    """
    model, ranks = replica.model, replica.tensor_parallel
    if not _is_dense(replica):
        return 0
    words = (1 if model.tied_embeddings else 2) * -(-model.vocab // ranks) + model.position_rows
    return _width(replica) * (_layer_weights(replica) + words * model.hidden)


def _token_flops(replica: ReplicaPlan) -> tuple[int, int, int]:
    """Operations for a token, for a pair of tokens, and for the token that comes out.

    Not restated are layers that limit what a token sees.
    """
    model = replica.model
    seen = [model.layer(index).attention for index in range(model.layers)]
    is_limited = any(kind is None or kind.window_tokens or kind.chunk_tokens for kind in seen)
    if is_limited or not _is_dense(replica):
        return 0, 0, 0
    attention = 2 * model.hidden * (model.heads + model.kv_heads) * model.head_dim
    mlp = (3 if model.gated_mlp else 2) * model.hidden * model.ffn
    pair = 2 * model.heads * 2 * model.head_dim
    each = model.layers
    return 2 * each * (attention + mlp), each * pair, 2 * model.vocab * model.hidden
