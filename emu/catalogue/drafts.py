"""A drafter: which layers, weights and KV it adds to a target model.

Owns `Draft` and the rules by vLLM's method: a head of EAGLE's kind or for
multi-token prediction is decoder layers of the target's own kind behind a projection of the
target's hidden states (and, with MTP and EAGLE, the embedded token), and shares embedding and
output matrix with the target. A draft model is a whole model. Pure.
"""

from __future__ import annotations

import msgspec

from emu.catalogue import sizes
from emu.catalogue.model import ModelSpec


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter, and how it hangs on its target."""

    spec: ModelSpec
    """Its layers as a model; embedding and head are those that it passes."""
    input_params: int = 0
    """Projection of hidden states in front of the layers, and its norms."""
    shares_embedding: bool = True
    """Embedding and output matrix are the target's."""
    tensor_parallel: int = 1
    expert_parallel: int = 0
    """Ranks that share its experts; 0 = as many as `tensor_parallel`."""

    @property
    def is_head(self) -> bool:
        """Layers on top of the target's, not a model of its own."""
        return self.shares_embedding

    def weight_bytes(self, dtype: str) -> int:
        """Bytes on one rank beside the target's."""
        spec, tp = self.spec, self.tensor_parallel
        total = sum(
            sizes.layer_weight_bytes(spec, index, tp, self.expert_parallel, dtype)
            for index in range(spec.layers)
        )
        total += sizes.weight_bytes(self.input_params // tp, sizes.activation_dtype(spec, dtype))
        if not self.shares_embedding:
            total += sizes.embedding_bytes(spec, tp, dtype) + sizes.head_bytes(spec, tp, dtype)
        return total

    def kv_bytes_token(self, kv_dtype: str, tp: int = 1) -> int:
        """KV bytes of one token in all its layers on one of `tp` ranks."""
        return sizes.kv_bytes_per_token_rank(self.spec, kv_dtype, tp)


def head_layers(target: ModelSpec, count: int) -> ModelSpec:
    """A model of `count` layers like the target's last one that attends to all tokens."""
    like = next(
        (
            index
            for index in range(target.layers - 1, -1, -1)
            if (layer := target.layer(index)).latent is not None
            or (layer.attention is not None and not layer.attention.window_tokens)
        ),
        target.layers - 1,
    )
    return msgspec.structs.replace(
        target,
        layers=count,
        moe_layers=(target.is_moe_layer(like),) * count if target.moe_layers else (),
        window=0,
        window_layers=(),
        special_layers=(target.special_layers[like],) * count if target.special_layers else (),
        unquantized=(target.unquantized[like],) * count if target.unquantized else (),
        extra_params=0,
        tower=None,
        mtp_layers=0,
    )


def mtp_draft(target: ModelSpec, tp: int) -> Draft:
    """The published layers for multi-token prediction: a projection of 2 H to H and three norms."""
    hidden = target.hidden
    layers = target.mtp_layers
    return Draft(
        spec=head_layers(target, layers),
        input_params=layers * (2 * hidden * hidden + 3 * hidden),
        tensor_parallel=tp,
    )


def eagle_draft(target: ModelSpec, own: ModelSpec | None, inputs: int, tp: int) -> Draft:
    """A head that reads `inputs` hidden states a token, with layers of its own or the target's."""
    spec = head_layers(target, 1)
    if own is not None:
        spec = msgspec.structs.replace(own, vocab=target.vocab, hidden=target.hidden)
    hidden = target.hidden
    return Draft(spec=spec, input_params=inputs * hidden * hidden, tensor_parallel=tp)


def model_draft(spec: ModelSpec, tp: int) -> Draft:
    """A model of its own."""
    return Draft(spec=spec, shares_embedding=False, tensor_parallel=tp)
