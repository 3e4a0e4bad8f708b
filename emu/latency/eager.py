"""What the host does for a layer when an engine runs eagerly: neither compiled nor captured.

Owns the count of calls by kind of layer, read in vLLM's model code. Each module of a layer (a
norm, a product, rotary, attention, an activation, the fused experts) is a call from Python
through the engine's dispatch; a plain tensor operation between them is a launch of PyTorch's own.
What a call takes is a constant of the engine (`EngineModel.eager_call_ns`, `launch_ns`). Kernels
run behind the host, so that an eager step takes the longer of the two.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from emu.catalogue.model import ModelSpec

_ROUTER_OPERATIONS: Final = {"phimoe": 24}
"""By model type: routers that are written in tensor operations (two rounds of max, mask, softmax
and gather) instead of one fused kernel."""
_EXPERT_OPERATIONS: Final = 6
"""Alignment of tokens to experts (2), two products, activation, sum."""


class EagerCalls(NamedTuple):
    """Calls of the host for some layers."""

    modules: int
    operations: int

    def host_ns(self, call_ns: int, launch_ns: int) -> int:
        """Host time at so much for a module and for a plain operation."""
        return self.modules * call_ns + self.operations * launch_ns


def eager_calls(spec: ModelSpec, tp: int) -> EagerCalls:
    """Calls of all layers of a model on one of `tp` ranks."""
    attention, plain = _attention_calls(spec)
    modules = spec.layers * (attention + spec.norms_per_layer)
    operations = spec.layers * plain
    if spec.norm_bias:  # a LayerNorm does not take the residual with it
        operations += spec.layers * 2
    if tp > 1:  # after attention and after the MLP
        modules += spec.layers * 2
    mixtures = spec.moe_layer_count
    modules += (spec.layers - mixtures) * _MLP_MODULES
    if spec.experts is not None:
        router = _ROUTER_OPERATIONS.get(spec.model_type, 1)
        modules += mixtures * 2  # gate, fused experts
        operations += mixtures * (router + _EXPERT_OPERATIONS)
        if spec.experts.shared_ffn:
            modules += mixtures * _MLP_MODULES
            operations += mixtures
    return EagerCalls(modules, operations)


_MLP_MODULES: Final = 3
"""First product (or both in one), activation, second product."""


def _attention_calls(spec: ModelSpec) -> tuple[int, int]:
    """(modules, plain operations) of one layer's attention."""
    modules = 3  # queries, keys and values in one product; attention with its KV write; output
    modules += 0 if spec.position_rows else 1  # rotary
    if spec.qk_norm or spec.wide_qk_norm:
        modules += 2
    if spec.latent is not None:  # down, norm and up for queries and keys; two products around
        return modules + 4, 2
    return modules, 0
