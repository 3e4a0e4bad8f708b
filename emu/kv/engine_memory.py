"""What an engine keeps of a GPU's memory beside weights and KV blocks, as vLLM finds it out.

Owns the arithmetic of vLLM's start: it loads the weights, runs the model once with as many tokens
as a step may have and the sampler with as many rows as there may be sequences, and gives what its
share of the memory leaves then to KV blocks. The larger of the two peaks counts, because the
sampler runs when the layers have given back what they used. Pure.

Held for the whole run: the rotary cache (by the positions of the model's config, whatever
`max_model_tokens` is) and what libraries take outside the allocator. One block is never given out.

Not modeled: encoders of multimodal models, speculative decoding.
"""

from __future__ import annotations

import msgspec

from emu.catalogue.model import ModelSpec
from emu.units import ceil_div

NULL_BLOCKS = 1
"""Blocks of the pool that no request ever gets."""
_MANY_ROWS = 128


class MemoryRule(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of one engine, bytes."""

    context_bytes: int
    parallel_bytes: int
    """Communicators, with more than one rank."""
    logit_bytes: int
    logit_bytes_many: int
    """For each logit, above 128 rows."""
    expert_chunk_tokens: int


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank."""

    rotary_bytes: int
    layers_bytes: int
    """Peak of the layers in the run that measures."""
    sampler_bytes: int
    """Peak of the sampler in it, with the hidden states that are still held."""
    context_bytes: int

    @property
    def total_bytes(self) -> int:
        """What KV blocks cannot have."""
        peak = max(self.layers_bytes, self.sampler_bytes)
        return self.rotary_bytes + peak + self.context_bytes


def engine_memory(
    spec: ModelSpec,
    rule: MemoryRule,
    *,
    tp: int,
    element_bytes: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> EngineMemory:
    """The engine's part of the memory of one rank of `tp`."""
    tokens = max_num_batched_tokens
    hidden = spec.hidden * element_bytes
    widest = ceil_div(spec.ffn, tp)
    layers = tokens * (3 * widest * element_bytes + 2 * hidden)
    if spec.experts is not None:
        moe = spec.experts
        chunk = min(tokens, rule.expert_chunk_tokens)
        row = max(2 * ceil_div(moe.ffn, tp) * element_bytes, hidden)
        layers = max(layers, 2 * chunk * moe.per_token * row + 2 * tokens * hidden)
    rows = min(max_num_seqs, tokens)
    each = rule.logit_bytes if rows <= _MANY_ROWS else rule.logit_bytes_many
    # Logits are gathered: every rank holds those of the whole vocabulary.
    sampler = each * rows * spec.vocab + 2 * tokens * hidden
    rotary = spec.latent.qk_rope_head_dim if spec.latent is not None else spec.head_dim
    return EngineMemory(
        rotary_bytes=0 if spec.position_rows else spec.max_position * rotary * element_bytes,
        layers_bytes=layers,
        sampler_bytes=sampler,
        context_bytes=rule.context_bytes + (rule.parallel_bytes if tp > 1 else 0),
    )
