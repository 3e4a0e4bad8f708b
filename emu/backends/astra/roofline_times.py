"""Layer times for traces from the roofline: any model on any GPU.

Owns the split of the roofline's sums, which are by component, into the rows of a trace: dense
work by the weights of each matrix, all layers alike (a mixed model's layers carry the mean).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from emu.catalogue.model import ModelSpec
from emu.latency.base import BatchShape
from emu.latency.roofline import RooflineBackend


class RooflineTimes:
    """`LayerTimes` of a roofline that was built without collectives, host time and stages."""

    def __init__(self, backend: RooflineBackend, spec: ModelSpec) -> None:
        self._backend = backend
        self._layers = spec.layers
        is_moe = spec.experts is not None
        self._sections: dict[str, tuple[str, ...]] = {
            "prologue": ("embedding",),
            "pre_attn": ("layernorm", "qkv_proj", "rotary_emb", "attention"),
            "post_attn": ("o_proj",),
            "mlp_dense": () if is_moe else ("gate_up_proj", "down_proj"),
            "mlp_moe": ("moe",) if is_moe else (),
            "head": ("final_layernorm", "lm_head", "sampler"),
        }
        query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shares = {"qkv_proj": query + 2 * key, "o_proj": query}
        if not is_moe:
            shares |= {"gate_up_proj": 2 * spec.ffn, "down_proj": spec.ffn}
        self._shares = shares
        self._known: dict[tuple[int, int], dict[str, int]] = {}

    @property
    def sections(self) -> Mapping[str, Sequence[str]]:
        """Layer names in order."""
        return self._sections

    def _components(self, tokens: int, logits: int) -> dict[str, int]:
        key = (tokens, logits)
        found = self._known.get(key)
        if found is None:
            shape = BatchShape(prefill_new=[tokens], prefill_context=[0], sequences=logits)
            found = self._known[key] = self._backend.components_ns(shape)
        return found

    def layer_ns(self, layer: str, tokens: int, logits: int) -> int:
        """A layer's part of its component."""
        parts = self._components(tokens, logits)
        if layer in ("embedding", "lm_head", "sampler"):
            return parts[layer]
        if layer == "layernorm":
            return parts["norm"] // self._layers
        if layer == "final_layernorm":
            # What the division among the layers left over.
            return parts["norm"] % self._layers
        if layer == "rotary_emb":
            return parts["rotary"] // self._layers
        dense = parts["dense"] // self._layers
        total = sum(self._shares.values())
        before = 0
        for name, share in self._shares.items():
            if name == layer:
                return dense * (before + share) // total - dense * before // total
            before += share
        return 0

    def attention_ns(self, shape: BatchShape) -> int:
        """One layer's attention."""
        return self._backend.attention_ns(shape) // self._layers

    def attention_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """The same for each of so many decode iterations in a row."""
        found: NDArray[np.int64] = self._backend.attention_run_ns(shape, steps) // self._layers
        return found

    def expert_ns(self, tokens: int, activated: int, batch_tokens: int) -> int:
        """One layer's experts on one rank; the roofline spreads the batch evenly by itself."""
        return self._components(max(1, batch_tokens), 1)["moe"] // self._layers
