"""The memory planner: how many KV blocks a replica has beside its weights.

Owns one rule (`engine_plan`), a pure function of a model, a GPU and the parallel degrees. It
budgets like vLLM (a part of the memory, less the weights, goes to KV) with LLMServingSim's charge
for the weights: every rank is charged embedding and head whatever its pipeline stage, and no head
norms or biases. Where that simulator's rule would be physically wrong, the physical figure counts
instead: KV heads are replicated when there are more ranks than heads, latent KV is held by every
rank, an uneven pipeline is judged by its fullest stage, tied embeddings are held once, quantized
weights take what they take.

The charge is an upper bound of the physical weights, which `emu/catalogue/sizes.py` computes
exactly; a plan carries both. The rule models neither activations nor the context; `reserve_bytes`
is for them, and an engine's own rule (`engine_memory.py`) says how much it keeps.
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.catalogue import sizes
from emu.catalogue.drafts import Draft
from emu.catalogue.model import ModelSpec
from emu.errors import InputError
from emu.units import GIB, ceil_div


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything derived from memory, for the block pool and for `emu validate`."""

    memory_bytes: int
    """Of one GPU."""
    usable_bytes: int
    """What weights and KV may take of one GPU."""
    weight_bytes_rank: int
    """Charged to every rank by the rule."""
    physical_weight_bytes: tuple[int, ...]
    """Really held by a rank of each pipeline stage."""
    kv_dtype: str
    kv_bytes_token_rank: int
    """Of one token on the fullest rank."""
    kv_bytes_token: int
    """Of one token over all layers, each head once: what a migration moves."""
    kv_bytes_block_rank: int
    kv_bytes_rank: int
    """Left for KV on one rank."""
    block_size: int
    num_blocks: int
    reserve_bytes: int = 0
    """Kept by the engine on one rank: activations, caches, libraries."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the replica can hold."""
        return self.num_blocks * self.block_size


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica asks of the memory of its GPUs."""

    tp: int = 1
    pp: int = 1
    ep: int = 0
    """Ranks that share the experts; 0 = `tp`."""
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    utilization: float = 0.9
    reserve_bytes: int = 0
    """What the engine keeps beside the weights and the KV."""
    outside_bytes: int = 0
    """Weights of a rank that are kept somewhere else."""
    exact_weights: bool = False
    """A rank is charged what it really holds."""
    block_bytes: int = 0
    """Of one block where the layers of a hybrid model share them (`KvLayout`); 0 = every layer
    keeps every token."""
    draft: Draft | None = None
    """Weights and KV of a drafter, on ranks of the last stage; a given `block_bytes` holds them."""
    slot_bytes: int = 0
    """What features keep on every rank in place of KV blocks."""
    of_free: bool = False
    """`utilization` is the part for KV of what all of these leave (TensorRT-LLM)."""


PLAIN: Final = Demand()


def engine_plan(
    spec: ModelSpec, memory_gib: float, asked: Demand = PLAIN, source: str = "memory"
) -> MemoryPlan:
    """KV blocks of one replica of `tp` x `pp` ranks.

    InputError (at `source`): the weights do not fit, or not one block is left.
    """
    tp, pp, dtype, draft = asked.tp, asked.pp, asked.dtype, asked.draft
    drafter_bytes = 0 if draft is None else draft.weight_bytes(dtype)
    *others, last = sizes.stage_weight_bytes(spec, tp, pp, asked.ep, dtype)
    on_stages = (*others, last + drafter_bytes)
    charged = (
        max(on_stages)
        if asked.exact_weights
        else engine_weight_bytes(spec, tp, pp, asked.ep, dtype) + drafter_bytes
    )
    weights = max(drafter_bytes, charged - asked.outside_bytes)
    kv_dtype = sizes.kv_dtype(spec, dtype, asked.kv_cache_dtype)
    per_token, whole_token = _token_bytes(spec, kv_dtype, tp, pp, draft)
    plan = MemoryPlan(
        memory_bytes=int(memory_gib * GIB),
        usable_bytes=int(memory_gib * GIB * asked.utilization),
        weight_bytes_rank=weights,
        physical_weight_bytes=on_stages,
        kv_dtype=kv_dtype,
        kv_bytes_token_rank=per_token,
        kv_bytes_token=whole_token,
        kv_bytes_block_rank=asked.block_bytes or per_token * asked.block_size,
        kv_bytes_rank=0,
        reserve_bytes=asked.reserve_bytes,
        block_size=asked.block_size,
        num_blocks=0,
    )
    if weights > plan.memory_bytes:
        needs = f"{spec.name} needs {weights / GIB:.1f} GiB on each of {tp * pp} GPUs"
        raise _too_large(needs, memory_gib, source)
    kept = weights + asked.reserve_bytes + asked.slot_bytes
    kv_bytes, usable_bytes = plan.usable_bytes - kept, plan.usable_bytes
    if asked.of_free:
        kv_bytes = int((plan.memory_bytes - kept) * asked.utilization)
        usable_bytes = weights + max(0, kv_bytes)
    plan = msgspec.structs.replace(plan, usable_bytes=usable_bytes, kv_bytes_rank=kv_bytes)
    return _with_blocks(plan, source)


def _token_bytes(
    spec: ModelSpec, kv_dtype: str, tp: int, pp: int, draft: Draft | None
) -> tuple[int, int]:
    """KV of a token, a drafter's too: on the fullest rank, and whole."""
    on_rank = sizes.kv_bytes_per_token_rank(spec, kv_dtype, tp, pp)
    whole = sizes.kv_bytes_per_token(spec, kv_dtype)
    if draft is None:
        return on_rank, whole
    last = sum(
        sizes.layer_kv_bytes_per_token(spec.layer(index), kv_dtype, tp)
        for index in sizes.stage_layers(spec, pp)[-1]
    )
    last += draft.kv_bytes_token(kv_dtype, draft.tensor_parallel)
    return max(on_rank, last), whole + draft.kv_bytes_token(kv_dtype)


def _too_large(needs: str, memory_gib: float, source: str) -> InputError:
    more = "raise tensor_parallel or pipeline_parallel"
    return InputError(source, None, "weights", f"{needs}, which have {memory_gib:g} GiB; {more}")


def _with_blocks(plan: MemoryPlan, source: str) -> MemoryPlan:
    """The plan with as many blocks as fit. InputError: not one does."""
    num_blocks = plan.kv_bytes_rank // plan.kv_bytes_block_rank
    if num_blocks < 1:
        problem = (
            f"no block fits: {plan.usable_bytes / GIB:.1f} GiB usable on each GPU, "
            f"{plan.weight_bytes_rank / GIB:.1f} GiB of weights, "
            f"{plan.reserve_bytes / GIB:.1f} GiB kept by the engine, "
            f"{plan.kv_bytes_block_rank} bytes for a block of {plan.block_size} tokens; "
            "raise scheduler.gpu_memory_utilization or the parallel degrees"
        )
        raise InputError(source, None, "KV cache", problem)
    return msgspec.structs.replace(plan, num_blocks=num_blocks)


def engine_weight_bytes(
    spec: ModelSpec, tp: int = 1, pp: int = 1, ep: int = 0, dtype: str = "auto"
) -> int:
    """Weights charged to every rank (LLMServingSim's formula, see the module's docstring)."""
    ep = ep or tp
    table = spec.vocab // tp * spec.hidden
    copies = 1 if spec.tied_embeddings and pp == 1 else 2
    plain = copies * table + spec.position_rows * spec.hidden + spec.hidden
    stages = sizes.stage_layers(spec, pp)
    fullest = max(sum(_block_bytes(spec, index, tp, ep, dtype) for index in s) for s in stages)
    return fullest + sizes.weight_bytes(plain, sizes.activation_dtype(spec, dtype))


def _block_bytes(spec: ModelSpec, layer_index: int, tp: int, ep: int, dtype: str) -> int:
    other = 2 * spec.hidden
    linear = sizes.attention_params(spec, tp)
    matrices = 3 if spec.gated_mlp else 2
    routed = 0
    if spec.is_moe_layer(layer_index):
        assert spec.experts is not None
        moe = spec.experts
        other += spec.hidden * moe.count
        routed = ceil_div(moe.count, ep) * matrices * spec.hidden * moe.ffn
        if tp > ep:  # what expert parallelism leaves whole, tensor parallelism splits
            routed = ceil_div(routed, tp // ep)
        linear += matrices * spec.hidden * (moe.shared_ffn // tp)
    else:
        linear += matrices * spec.hidden * (spec.ffn // tp)
    return (
        sizes.weight_bytes(linear, sizes.linear_dtype(spec, dtype))
        + sizes.weight_bytes(routed, sizes.expert_dtype(spec, dtype))
        + sizes.weight_bytes(other, sizes.activation_dtype(spec, dtype))
    )
