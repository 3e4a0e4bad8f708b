"""Everything of a model's layers but attention over context: operations and their shapes on a rank.

For T tokens in the batch. Values are integer ns by component, so that sums are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from emu.catalogue import sizes
from emu.catalogue.layers import Experts
from emu.catalogue.model import ModelSpec
from emu.latency.kernels.machine import CollectiveNs
from emu.latency.kernels.operations import Ops
from emu.units import NS_PER_S, ceil_div

if TYPE_CHECKING:
    from emu.latency.experts.parts import LayerParts
    from emu.latency.experts.routed import RoutedExperts
    from emu.latency.moe_gate import Gate


_LATENT_KERNELS: Final = 6
"""Norms of both latents, two quantizations of inputs, a copy, the second product."""
_NONE: Final[frozenset[str]] = frozenset()
_QUANTIZATIONS: Final = 2
"""Of the inputs of an expert that all tokens pass."""


class TokenCost(NamedTuple):
    """Cost of T tokens in some layers, by component, in ns."""

    dense: int = 0
    moe: int = 0
    norm: int = 0
    rotary: int = 0
    embedding: int = 0
    collectives: int = 0
    pipeline: int = 0

    def plus(self, other: TokenCost, times: int = 1) -> TokenCost:
        """Element by element."""
        return TokenCost(*[a + times * b for a, b in zip(self, other, strict=True)])


class HeadCost(NamedTuple):
    """Cost of making logits and choosing a token for some rows, in ns."""

    lm_head: int
    sampler: int
    collectives: int


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


class LayerCosts:
    """Costs of a model's layers on one rank of `tp` x `ep`."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        collective_ns: CollectiveNs,
        tp: int,
        ep: int,
        dtype: str,
        gate: Gate | None = None,
        routed: RoutedExperts | None = None,
        *,
        fuses_shared: bool = False,
    ) -> None:
        """`routed`: routed experts that several replicas share; None = plainly (see `_moe_s`).

        `fuses_shared`: the shared expert is one more of the routed ones, which all tokens choose.
        """
        self.spec = spec
        self.gate = gate
        self.routed = routed
        self.sums_groups = False
        """Tokens of a group that is not padded meet by all-reduces (`EngineModel.sums_groups`)."""
        self._is_timed_alone = routed is not None and routed.exchanges
        """Products are those of `experts/deepgemm.py`, without the kernels between them."""
        self.ops = ops
        self.collective_ns = collective_ns
        self.tp = tp
        self.ep = ep
        self.linear = sizes.linear_dtype(spec, dtype)
        self.expert = sizes.expert_dtype(spec, dtype)
        self.plain = sizes.activation_dtype(spec, dtype)
        self.element = ops.activation_bytes
        moe = spec.experts
        mixtures = [index for index in range(spec.layers) if spec.is_moe_layer(index)]
        self.kept = spec.kept_wide(mixtures[-1] if mixtures else spec.layers - 1)
        """Parts that stay wide in the last layer with experts, else in the last."""
        self._fused = moe.shared_ffn // moe.ffn if fuses_shared and moe is not None else 0
        """Shared experts that run in the kernels of the routed ones."""
        self.heads = ceil_div(spec.heads, tp)
        self.kv_heads = sizes.kv_heads_per_rank(spec, tp)

    def stored(self, part: str, kept: frozenset[str]) -> str:
        """Type of a part of a layer ("mixer", "output", "mlp", "shared") that keeps some wide."""
        return self.plain if part in kept else self.linear

    def layer(self, tokens: int, is_moe: bool, kept: frozenset[str] = _NONE) -> TokenCost:
        """One layer; `kept`: parts of it that a quantized checkpoint keeps wide."""
        spec, ops = self.spec, self.ops
        stream = tokens * spec.hidden * self.element
        # Read input and residual, write both.
        norm_s = spec.norms_per_layer * ops.elementwise_s(4 * stream)
        width = (self.heads + self.kv_heads) * spec.head_dim * self.element
        if spec.qk_norm:
            norm_s += ops.elementwise_s(2 * tokens * width)
        if spec.wide_qk_norm:  # squares first; then all is read again, scaled and written
            norm_s += ops.elementwise_s(tokens * width) + ops.elementwise_s(2 * tokens * width)
        rotary_s = 0.0 if spec.position_rows else ops.elementwise_s(2 * tokens * width)
        dense_s = self._attention_products_s(tokens, kept)
        moe_s = 0.0
        if is_moe:
            moe_s = self._moe_s(tokens, kept)
        else:
            dense_s += self._mlp_s(tokens, spec.ffn, self.stored("mlp", kept))
        return TokenCost(
            dense=_ns(dense_s),
            moe=_ns(moe_s),
            norm=_ns(norm_s),
            rotary=_ns(rotary_s),
            collectives=self._layer_collectives_ns(tokens, stream, is_moe),
        )

    def _attention_products_s(self, tokens: int, kept: frozenset[str]) -> float:
        spec, gemm, dtype = self.spec, self.ops.gemm_s, self.stored("mixer", kept)
        mla = spec.latent
        if mla is None:
            width = (self.heads + 2 * self.kv_heads) * spec.head_dim
            return gemm(tokens, width, spec.hidden, dtype) + gemm(
                tokens, spec.hidden, self.heads * spec.head_dim, dtype
            )
        total = gemm(tokens, mla.kv_width + mla.q_lora_rank, spec.hidden, dtype)
        query_inner = mla.q_lora_rank or spec.hidden
        total += gemm(tokens, self.heads * mla.qk_head_dim, query_inner, dtype)
        expanded = self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        total += gemm(tokens, expanded, mla.kv_lora_rank, dtype)
        if self._is_timed_alone:
            # What goes into the latent space and out of it are two products, of 16 bits.
            total += _LATENT_KERNELS * self.ops.element_s
            total += expanded * mla.kv_lora_rank / self.ops.memory_rate
        return total + gemm(
            tokens, spec.hidden, self.heads * mla.v_head_dim, self.stored("output", kept)
        )

    def _mlp_s(self, tokens: int, ffn: int, dtype: str) -> float:
        spec, ops = self.spec, self.ops
        ffn = ceil_div(ffn, self.tp)
        parts = 2 if spec.gated_mlp else 1
        return (
            ops.gemm_s(tokens, parts * ffn, spec.hidden, dtype)
            + ops.elementwise_s((parts + 1) * tokens * ffn * self.element)
            + ops.gemm_s(tokens, spec.hidden, ffn, dtype)
        )

    def _moe_s(self, tokens: int, kept: frozenset[str]) -> float:
        spec, ops = self.spec, self.ops
        moe = spec.experts
        assert moe is not None
        fused = self._fused and ("shared" in kept) == ("experts" in kept)
        if spec.wide_router:
            total = ops.single_s(tokens, moe.count, spec.hidden)
        else:
            total = ops.gemm_s(tokens, moe.count, spec.hidden, self.plain)
        total += self.plain_routed_s(tokens, kept)
        return total if fused else total + self.shared_s(tokens, kept)

    def plain_routed_s(self, tokens: int, kept: frozenset[str]) -> float:
        """`routed_s` of the experts that all layers with experts have."""
        spec, moe = self.spec, self.spec.experts
        assert moe is not None
        kinds = self.plain if "experts" in kept else self.expert, spec.hidden
        # One kernel has weights of one type.
        fused = self._fused if ("shared" in kept) == ("experts" in kept) else 0
        return self.routed_s(tokens, moe, *kinds, gated=spec.gated_mlp, fused=fused)

    def routed_s(
        self, tokens: int, moe: Experts, kind: str, width: int, *, gated: bool, fused: int = 0
    ) -> float:
        """Routed experts of so many tokens of each data-parallel replica that shares them.

        `kind`: type of their weights; `width`: of their input. `fused`: shared experts beside them.
        """
        if self.routed is not None:
            return self.routed.times(self.ops, tokens).experts_s
        return self.ops.experts_s(
            tokens * max(1, self.ep // self.tp),
            count=moe.count,
            per_token=moe.per_token,
            hidden=width,
            ffn=ceil_div(moe.ffn, max(1, self.tp // self.ep)),
            matrices=3 if gated else 2,
            dtype=kind,
            ep=self.ep,
            gate=self.gate,
            shared=fused,
        )

    def layer_parts(self, tokens: int, mean: int = 0, largest: int = 0) -> LayerParts:
        """One layer with shared experts, in the order of its parts; times as in `layer`."""
        from emu.latency.experts.parts import LayerParts  # only where something overlaps

        spec, routed = self.spec, self.routed
        assert spec.experts is not None
        assert routed is not None
        kept = self.kept
        moe_s = self._moe_s(tokens, kept)
        around_s = (sum(self.layer(tokens, True, kept)[:4]) - _ns(moe_s)) / NS_PER_S
        products_s = self._attention_products_s(tokens, kept)
        last_s = self._last_products_s(tokens)
        rest_s = around_s - products_s  # norms and rotary
        gate_s = self.ops.gemm_s(tokens, spec.experts.count, spec.hidden, self.plain)
        times, carried = routed.of_group(self.ops, tokens, mean, largest)
        return LayerParts(
            before_s=products_s - last_s + rest_s / 2,
            after_s=last_s + rest_s / 2 + gate_s,
            shared_s=self.shared_s(tokens, kept),
            experts_s=times.experts_s,
            dispatch_s=carried.dispatch_s,
            combine_s=carried.combine_s,
            processors=times.processors,
        )

    def _last_products_s(self, tokens: int) -> float:
        """Products behind core attention: of values out of the latent space, and the output."""
        spec, gemm, mla = self.spec, self.ops.gemm_s, self.spec.latent
        width = self.heads * (spec.head_dim if mla is None else mla.v_head_dim)
        dtype = self.stored("mixer", self.kept)
        if mla is None:
            return gemm(tokens, spec.hidden, width, dtype)
        last_s = gemm(tokens, spec.hidden, width, self.stored("output", self.kept))
        expanded = self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        part = mla.v_head_dim / (mla.qk_nope_head_dim + mla.v_head_dim)
        return last_s + part * gemm(tokens, expanded, mla.kv_lora_rank, dtype)

    def shared_s(self, tokens: int, kept: frozenset[str]) -> float:
        """Experts that every token passes."""
        moe = self.spec.experts
        if moe is None or not moe.shared_ffn:
            return 0.0
        between_s = _QUANTIZATIONS * self.ops.element_s if self._is_timed_alone else 0.0
        gate_s = self.shared_gate_s(tokens) if moe.shared_gate else 0.0
        shared_s = self._mlp_s(tokens, moe.shared_ffn, self.stored("shared", kept))
        return shared_s + between_s + gate_s

    def shared_gate_s(self, tokens: int) -> float:
        """The gate of such experts: a product of one column, its sigmoid, its product, the sum."""
        stream = tokens * self.spec.hidden * self.element
        moved_s = self.ops.elementwise_s(2 * stream) + self.ops.elementwise_s(3 * stream)
        return (
            self.ops.gemm_s(tokens, 1, self.spec.hidden, self.plain) + moved_s + self.ops.element_s
        )

    def _layer_collectives_ns(self, tokens: int, stream_bytes: int, is_moe: bool) -> int:
        total = 0
        if self.tp > 1:
            total += self.collective_ns("all-reduce", stream_bytes, self.tp)
            if self.spec.wide_qk_norm:
                # Sums of squares of queries and of keys, one number of 32 bits for each token.
                sums_bytes = max(16, stream_bytes // (self.spec.hidden * self.element) * 8)
                total += self.collective_ns("all-reduce", sums_bytes, self.tp)
        if is_moe and self.ep > self.tp:
            total += self.exchange_ns(tokens)
        elif self.tp > 1:
            total += self.collective_ns("all-reduce", stream_bytes, self.tp)
        return total

    def exchange_ns(self, tokens: int) -> int:
        """Tokens of all replicas of a group meet at the experts, and return to their owners."""
        if self.routed is not None and self.routed.exchanges:
            return _ns(self.routed.times(self.ops, tokens).exchange_s)
        stream_bytes = tokens * self.spec.hidden * self.element
        group = self.ep // self.tp
        return self.collective_ns("all-gather", stream_bytes, group) + self.collective_ns(
            "reduce-scatter", stream_bytes * group, group
        )

    def embedding(self, tokens: int) -> TokenCost:
        """Look-up before the first layer; a split table needs an all-reduce."""
        stream = tokens * self.spec.hidden * self.element
        reduce_ns = self.collective_ns("all-reduce", stream, self.tp) if self.tp > 1 else 0
        return TokenCost(embedding=_ns(self.ops.elementwise_s(2 * stream)), collectives=reduce_ns)

    def final_norm(self, tokens: int) -> TokenCost:
        """The norm after the last layer."""
        stream = tokens * self.spec.hidden * self.element
        return TokenCost(norm=_ns(self.ops.elementwise_s(4 * stream)))

    def send(self, tokens: int) -> TokenCost:
        """Hidden states to the next stage."""
        return TokenCost(
            pipeline=self.collective_ns("send", tokens * self.spec.hidden * self.element, 2)
        )

    def head(self, rows: int) -> HeadCost:
        """Logits of some rows, gathered from all ranks, and a token from each."""
        columns = ceil_div(self.spec.vocab, self.tp)
        gather_ns = 0
        if self.tp > 1:
            gather_ns = self.collective_ns("all-gather", rows * columns * self.element, self.tp)
        return HeadCost(
            lm_head=_ns(self.ops.gemm_s(rows, columns, self.spec.hidden, self.plain)),
            sampler=_ns(self.ops.sampler_s(rows, self.spec.vocab)),
            collectives=gather_ns,
        )
