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
from emu.latency.engine import EngineModel

_ROUTER_OPERATIONS: Final = {"phimoe": 24}
"""By model type: routers that are written in tensor operations (two rounds of max, mask, softmax
and gather) instead of one fused kernel."""
_EXPERT_OPERATIONS: Final = 6
"""Alignment of tokens to experts (2), two products, activation, sum."""


class EagerCalls(NamedTuple):
    """Calls of the host for some layers."""

    modules: int
    operations: int
    latent: int = 0
    """Layers with latent attention."""
    mixtures: int = 0
    """Layers whose experts are several calls."""
    states: int = 0
    """Layers with a state of fixed size."""

    def host_ns(self, model: EngineModel) -> int:
        """Host time of an engine."""
        return (
            self.modules * model.eager_call_ns
            + self.operations * model.launch_ns
            + self.latent * model.eager_latent_ns
            + self.mixtures * model.eager_experts_ns
            + self.states * model.eager_state_ns
        )


def eager_calls(spec: ModelSpec, tp: int, *, one_call: bool = False) -> EagerCalls:
    """Calls of all layers of a model on one of `tp` ranks.

    `one_call`: routing and experts of a layer are one kernel.
    """
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
        modules += mixtures * (_ONE_CALL_MODULES if one_call else 2)  # gate, fused experts
        operations += mixtures * (router + _EXPERT_OPERATIONS)
        if spec.experts.shared_ffn:
            modules += mixtures * _MLP_MODULES
            operations += mixtures
    latent = spec.layers if spec.latent is not None else 0
    states = sum(layer.state is not None for layer in spec.special_layers)
    return EagerCalls(modules, operations, latent, 0 if one_call else mixtures, states)


_ONE_CALL_MODULES: Final = 6
"""Gate, its cast, quantization of the input, routing with experts, scaling, sum."""
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
