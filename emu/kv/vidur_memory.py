"""Vidur's rule of memory: slots for requests of the greatest length, weights of the layers only.

It serves the schedulers that come from there, where `scheduler.memory_margin_fraction` asks for it.
"""

from __future__ import annotations

import math

from emu.catalogue import sizes
from emu.catalogue.model import ModelSpec
from emu.errors import InputError
from emu.kv.memory import PLAIN, Demand, MemoryPlan
from emu.units import GIB, ceil_div


def vidur_layer_params(spec: ModelSpec, tp: int = 1) -> int:
    """Parameters of one layer on one rank as Vidur counts them. InputError: not a dense model."""
    if spec.experts is not None or spec.latent is not None:
        raise InputError(
            spec.source, None, spec.name, "Vidur's memory rule knows dense models only"
        )
    head_dim = spec.hidden // spec.heads
    heads, kv_heads = spec.heads // tp, ceil_div(spec.kv_heads, tp)
    attention = spec.hidden * head_dim * (2 * heads + 2 * kv_heads)
    return attention + (3 if spec.gated_mlp else 2) * spec.hidden * spec.ffn // tp


def vidur_plan(
    spec: ModelSpec,
    memory_gib: float,
    asked: Demand = PLAIN,
    max_tokens: int = 4096,
    source: str = "memory",
) -> tuple[MemoryPlan, int]:
    """KV blocks by Vidur's rule, and the requests of a batch that have a slot of `max_tokens`.

    Half precision, whatever the model has. Of `asked` it reads `tp`, `pp`, `block_size` and
    `utilization`.

    The KV of a slot counts all layers even when a stage holds a part of them, and the slots are
    multiplied by the stages afterwards; the factors cancel, the floor between them does not.
    InputError (at `source`): not one request fits.
    """
    tp, pp = asked.tp, asked.pp
    weights = 2 * vidur_layer_params(spec, tp) * (spec.layers // pp)
    head_dim = spec.hidden // spec.heads
    per_token = 4 * head_dim * ceil_div(spec.kv_heads, tp) * spec.layers
    usable = memory_gib * GIB * asked.utilization
    batch = math.floor((usable - weights) / (per_token * max_tokens))
    if batch < 1:
        raise InputError(
            source,
            None,
            "KV cache",
            f"no request of {max_tokens} tokens fits beside {weights / GIB:.1f} GiB of weights "
            f"in {usable / GIB:.1f} GiB",
        )
    plan = MemoryPlan(
        memory_bytes=int(memory_gib * GIB),
        usable_bytes=int(usable),
        weight_bytes_rank=weights,
        physical_weight_bytes=sizes.stage_weight_bytes(spec, tp, pp),
        kv_dtype="float16",
        kv_bytes_token_rank=per_token,
        kv_bytes_token=sizes.kv_bytes_per_token(spec, "float16"),
        kv_bytes_block_rank=per_token * asked.block_size,
        kv_bytes_rank=int(usable) - weights,
        block_size=asked.block_size,
        num_blocks=max_tokens // asked.block_size * batch * pp,
    )
    return plan, batch
