"""What an engine keeps of a GPU's memory beside weights and KV blocks.

How an engine finds that out is its own rule (`emu/engines/`).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from emu.catalogue.model import ModelSpec


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank."""

    rotary_bytes: int
    layers_bytes: int
    """Peak of the layers in the run that measures."""
    sampler_bytes: int
    """Peak of the sampler in it, with the hidden states that are still held."""
    context_bytes: int
    encoder_bytes: int = 0
    """Peak of a tower in it, before the layers run."""
    encoded_bytes: int = 0
    """What the tower has made, held while layers and sampler run. Not in `total_bytes`: in its
    place comes the cache of a feature that encodes."""

    @property
    def total_bytes(self) -> int:
        """What KV blocks cannot have."""
        peak = max(self.layers_bytes, self.sampler_bytes, self.encoder_bytes)
        return self.rotary_bytes + peak + self.context_bytes


class MemoryRule(Protocol):
    """How an engine divides a GPU's memory when it starts."""

    @property
    def null_blocks(self) -> int:
        """Blocks of the pool that no request ever gets."""
        ...

    @property
    def shares_free(self) -> bool:
        """The part of the memory that a configuration names is one of what weights and the engine
        leave; else of all."""
        ...

    def kept(
        self,
        spec: ModelSpec,
        *,
        tp: int,
        element_bytes: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> EngineMemory:
        """The engine's part of the memory of one rank of `tp`."""
        ...
