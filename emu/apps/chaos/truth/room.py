"""Room: how many KV blocks the memory of a GPU has, beside weights, states and what engines keep.

Restates "Memory" of docs/lab/engines.md, docs/lab/tensorrt-llm.md and docs/lab/architectures.md
("How the memory is shared") for models without a tower, a drafter or weights elsewhere. What a
rank's weights and a state take is the catalogue's, compared with the model's shape where that is
plain. A part of the memory that a configuration does not name follows from the GPU.
"""

from __future__ import annotations

from typing import Final

from emu.apps.chaos.truth.seats import weights_of_rank
from emu.apps.chaos.truth.tape import Tape, keys_of
from emu.catalogue import sizes
from emu.cluster.plan import Plan, ReplicaPlan
from emu.config.schema import SglangTable, TensorrtLlmTable, VllmTable
from emu.documents import DocumentView

_GIB: Final = 1 << 30
_NEAR: Final = 0.01
"""Norms and biases are left out of what a rank weighs by its shape."""
_SURE: Final = 1e-6
_SGLANG_SIZES: Final = (
    # Below so many GiB: tokens of a batch of prompts, largest graph of few ranks, of four and more.
    (20, 2048, 8, 8),
    (35, 2048, 24, 80),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (1 << 20, 16_384, 512, 512),
)


def judge_room(tape: Tape, plan: Plan) -> None:
    """The blocks of each kind of replica, once."""
    seen: set[tuple[int, int]] = set()
    for replica in plan.replicas:
        kind = plan.kind_of(replica)
        if kind not in seen:
            seen.add(kind)
            _judge(tape, plan, replica)


def _judge(tape: Tape, plan: Plan, replica: ReplicaPlan) -> None:
    model, where = replica.model, f"T8: replica {replica.replica_id}"
    if replica.engine is None or not replica.runs_own_scheduler:
        return
    is_odd = replica.features or replica.draft or replica.placement is not None or model.tower
    shape_bytes = 0 if replica.draft else weights_of_rank(replica)
    weight_bytes = max(replica.memory.physical_weight_bytes)
    if shape_bytes:
        tape.count("room")
        if abs(weight_bytes / shape_bytes - 1) > _NEAR:
            tape.say(f"{where} has {weight_bytes} bytes of weights on a rank, not {shape_bytes}")
    if is_odd or replica.experts is not None or replica.memory.weight_bytes_rank != weight_bytes:
        return
    given = _given(plan, replica)
    free = _free_bytes(replica, given, weight_bytes)
    states = _states(replica, given, free)
    tape.count("room")
    if states is not None:
        count, each = states
        told = keys_of(replica.scheduler).get("max_mamba_cache_size", count)
        if abs(told - count) > 1:
            tape.say(f"{where} has {told} states, there is room for {count}")
        free -= told * each * (_part_of_tensorrt(replica) or 1.0)
    told, due = replica.memory.num_blocks, int(free // _block_bytes(replica))
    if abs(told - due) > 1 + _SURE * due:
        tape.say(f"{where} has room for {told} blocks, {free:.0f} bytes hold {due}")
    due = given["num_blocks"] or told - isinstance(replica.scheduler, VllmTable)
    if replica.num_blocks != due:
        tape.say(f"{where} has {replica.num_blocks} blocks, should {due}")


def _given(plan: Plan, replica: ReplicaPlan) -> DocumentView:
    """Its `[scheduler]` as it was configured."""
    own = plan.config.replicas[replica.group].scheduler
    return {**keys_of(plan.config.scheduler), **own}


def _block_bytes(replica: ReplicaPlan) -> int:
    """Keys and values of a block on a rank; of groups of layers as the plan has it."""
    model, layers = replica.model, replica.model.layers
    is_odd = model.special_layers or model.latent or replica.pipeline_parallel > 1
    if is_odd or replica.kv_layout is not None:
        return replica.memory.kv_bytes_block_rank
    heads = max(1, -(-model.kv_heads // replica.tensor_parallel))
    token = 2 * heads * model.head_dim * layers
    return sizes.weight_bytes(token, replica.kv_dtype) * int(replica.scheduler.block_size)


def _free_bytes(replica: ReplicaPlan, given: DocumentView, weight_bytes: int) -> float:
    """What is left for KV, and for states beside it, on one rank."""
    memory = replica.gpu.reported_gib * _GIB
    if isinstance(replica.scheduler, VllmTable):
        part = float(replica.scheduler.gpu_memory_utilization)
        return int(memory * part) - weight_bytes - _kept_by_vllm(replica)
    if isinstance(replica.scheduler, TensorrtLlmTable):
        return (memory - weight_bytes - _kept_by_tensorrt(replica)) * _part_of_tensorrt(replica)
    assert isinstance(replica.scheduler, SglangTable)
    engine, ranks = replica.engine, replica.tensor_parallel
    assert engine is not None
    kept = 0.9 * (engine.context_bytes + (engine.parallel_bytes if ranks > 1 else 0))
    part = given["mem_fraction_static"] or _part_of_sglang(replica, given)
    return int(memory * part) - weight_bytes - kept


def _part_of_tensorrt(replica: ReplicaPlan) -> float:
    """The part of what weights, states and buffers leave; 0 = another engine's."""
    table = replica.scheduler
    return table.free_gpu_memory_fraction if isinstance(table, TensorrtLlmTable) else 0.0


def _part_of_sglang(replica: ReplicaPlan, given: DocumentView) -> float:
    """The part of the memory for weights and KV: less an estimate of all else, in MiB."""
    gib, ranks = replica.gpu.reported_gib, replica.tensor_parallel * replica.pipeline_parallel
    _, tokens, few, many = next(size for size in _SGLANG_SIZES if gib < size[0])
    chunk = max(given["chunked_prefill_size"] or tokens, 2048)
    left = 512 + 1.5 * chunk + 2 * (few if ranks < 4 else many) + 128 * ranks
    if gib > 60:
        left = max(left, 10_240)
    return round(1 - left / (1024 * gib), 3)


def _rotary_bytes(replica: ReplicaPlan) -> int:
    model = replica.model
    if model.position_rows:
        return 0
    width = model.head_dim if model.latent is None else model.latent.qk_rope_head_dim
    return model.max_position * width * _element(replica)


def _element(replica: ReplicaPlan) -> int:
    return sizes.weight_bytes(1, sizes.activation_dtype(replica.model, replica.dtype))


def _layers_bytes(replica: ReplicaPlan, chunk: int) -> int:
    """What a step of the most tokens has at its peak: rows beside both ends of the widest matrix.

    `chunk`: tokens whose experts are computed at once.
    """
    model, tokens, element = replica.model, int(replica.scheduler.tokens_max), _element(replica)
    stream = model.hidden * element
    dense = tokens * (2 * stream + 3 * -(-model.ffn // replica.tensor_parallel) * element)
    if model.experts is None:
        return dense
    part = -(-model.experts.ffn // replica.tensor_parallel) * element
    rows = 2 * min(tokens, chunk) * model.experts.per_token
    return max(dense, rows * max(2 * part, stream) + 2 * tokens * stream)


def _kept_by_vllm(replica: ReplicaPlan) -> int:
    engine, model = replica.engine, replica.model
    assert engine is not None
    tokens = int(replica.scheduler.tokens_max)
    rows = min(tokens, int(replica.scheduler.requests_max))
    logit = engine.logit_bytes_many if rows > 128 else engine.logit_bytes
    sampler = logit * rows * model.vocab + 2 * tokens * model.hidden * _element(replica)
    peak = max(sampler, _layers_bytes(replica, engine.expert_chunk_tokens))
    peers = engine.parallel_bytes if replica.tensor_parallel > 1 else 0
    return _rotary_bytes(replica) + peak + engine.context_bytes + peers


def _kept_by_tensorrt(replica: ReplicaPlan) -> int:
    """Buffers of collectives: half of those of two ranks for each rank."""
    engine, ranks = replica.engine, replica.tensor_parallel
    assert engine is not None
    peers = engine.parallel_bytes / 2 * ranks if ranks > 1 else 0
    peak = _layers_bytes(replica, int(replica.scheduler.tokens_max))
    return _rotary_bytes(replica) + peak + engine.context_bytes + int(peers)


def _states(replica: ReplicaPlan, given: DocumentView, free: float) -> tuple[int, int] | None:
    """States that are set aside and what each takes; None where there are none."""
    model, table = replica.model, replica.scheduler
    if isinstance(table, VllmTable) or not any(one.state for one in model.special_layers):
        return None
    layers = model.special_layers
    tp = replica.tensor_parallel
    each = sum(sizes.layer_state_bytes(model, layer, replica.dtype, tp) for layer in layers)
    if not isinstance(table, SglangTable):
        return int(table.requests_max) + 1, each
    count = int(given["max_mamba_cache_size"])
    is_cached = bool(table.caches_prefixes)
    if not count and not is_cached:
        count = int(given["max_running_requests"])
    if not count:
        ratio = float(table.mamba_full_memory_ratio)
        count = int(free * ratio / (1 + ratio) / each)
    return count, each
