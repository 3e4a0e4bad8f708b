"""What one layer of a dense model computes on one tensor-parallel rank.

Owns widths and the order of layers (the names of the bundle format). Models whose kernels the
profiler does not have (experts, latent or sliding-window attention) are refused.
"""

from __future__ import annotations

from typing import Final

import msgspec

from emu.catalogue.model import ModelSpec
from emu.errors import InputError

TP_STABLE: Final = ("layernorm", "qk_norm", "final_layernorm", "sampler")
"""Layers that every rank runs whole."""


class Shapes(msgspec.Struct, frozen=True, kw_only=True):
    """Widths of one rank; elements."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    """Rows of lm_head on this rank."""
    whole_vocab: int
    gated: bool
    qk_norm: bool

    @property
    def q_width(self) -> int:
        """All query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """All key heads; values are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Output of the joint projection."""
        return self.q_width + 2 * self.kv_width

    @property
    def up_width(self) -> int:
        """Output of the first MLP projection."""
        return self.ffn * (2 if self.gated else 1)


def shapes_of(spec: ModelSpec, tp: int) -> Shapes:
    """Widths of one of `tp` ranks. Raises InputError for a model that cannot be profiled."""
    lacks = ""
    if spec.experts is not None:
        lacks = "mixtures of experts"
    elif spec.latent is not None:
        lacks = "latent attention"
    elif any(spec.window_layers):
        lacks = "sliding-window attention"
    if lacks:
        problem = f"{spec.name} has {lacks}; the profiler times dense models with full attention"
        raise InputError("profile", None, "--model", problem)
    if spec.heads % tp or spec.ffn % tp:
        problem = f"{spec.heads} heads and a width of {spec.ffn} do not divide by {tp}"
        raise InputError("profile", None, "--tp", problem)
    return Shapes(
        hidden=spec.hidden,
        heads=spec.heads // tp,
        kv_heads=max(1, spec.kv_heads // tp),
        head_dim=spec.head_dim,
        ffn=spec.ffn // tp,
        vocab=-(-spec.vocab // tp),
        whole_vocab=spec.vocab,
        gated=spec.gated_mlp,
        qk_norm=spec.qk_norm,
    )


def dense_layers(shapes: Shapes) -> list[str]:
    """Layers whose time follows from the number of tokens."""
    norm = ["qk_norm"] if shapes.qk_norm else []
    return [
        *("embedding", "layernorm", "qkv_proj", *norm, "rotary_emb"),
        *("o_proj", "gate_up_proj", "act_fn", "down_proj", "final_layernorm"),
    ]


SEQUENCE_LAYERS: Final = ("lm_head", "sampler")


def architecture(shapes: Shapes) -> dict[str, object]:
    """The order of layers of one iteration, as `architecture.yaml` of the bundle says it."""
    norm = ["qk_norm"] if shapes.qk_norm else []

    def facts(names: list[str]) -> dict[str, object]:
        return {name: {"tp_stable": True} if name in TP_STABLE else {} for name in names}

    return {
        "sequence": {
            "prologue": ["embedding"],
            "pre_attn": ["layernorm", "qkv_proj", *norm, "rotary_emb", "attention"],
            "post_attn": ["o_proj", "layernorm"],
            "mlp_dense": ["gate_up_proj", "act_fn", "down_proj"],
            "mlp_moe": [],
            "head": ["final_layernorm", "lm_head", "sampler"],
        },
        "catalog": {
            "dense": facts(dense_layers(shapes)),
            "per_sequence": facts(list(SEQUENCE_LAYERS)),
            "attention": {"attention": {}},
        },
    }
