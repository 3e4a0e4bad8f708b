"""The operations of one layer as PyTorch calls.

Matrix products and attention are the library's own kernels (cuBLAS; FlashAttention 2, or where
that is not there whatever `scaled_dot_product_attention` takes), as engines use them. Norms,
rotary embedding and the activation are single fused kernels in engines; here each is one library
kernel that moves as many bytes (`STAND_INS`), which is all that their time consists of. A batch of
prompts and decodes is two attention kernels, one after the other.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, Protocol

import msgspec

from emu.catalogue.model import ModelSpec
from emu.errors import InputError
from emu.tools.profiler.grid import AttentionPoint

# --------------------------------------------------------------------------------------------------
# What one layer of a dense model computes on one tensor-parallel rank.
#
# Owns widths and the order of layers (the names of the bundle format). Models whose kernels the
# profiler does not have (experts, latent or sliding-window attention) are refused.

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


def architecture(shapes: Shapes) -> dict[str, Any]:
    """The order of layers of one iteration, as `architecture.yaml` of the bundle says it."""
    norm = ["qk_norm"] if shapes.qk_norm else []

    def facts(names: list[str]) -> dict[str, Any]:
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


# --------------------------------------------------------------------------------------------------
# How long one call takes on the device: the median of several, caches cold, launches hidden.
#
# On a GPU each call is preceded by writes over a buffer larger than the last-level cache: what a
# layer reads is then in memory, as it is in a running model, where other layers lie between two
# uses of a weight. They are repeated until they take `_LEAD_US`, so that the host has enqueued all
# launches of the call before the device reaches the first. The time between two events without
# anything in between is taken off. Before all this the device is kept busy until its clocks are up.

Call = Callable[[], Any]

_LEAD_US: Final = 300.0
"""Longer than the host takes to launch what one layer needs (some 10 us for each of a few)."""
_AWAKE_S: Final = 0.3


class Timer(Protocol):
    """Times calls on one device."""

    def time_us(self, call: Call) -> float:
        """Median duration of one call, us."""
        ...


class CpuTimer:
    """Wall clock of synchronous calls: for miniatures on a CPU."""

    def __init__(self, repeats: int = 3) -> None:
        self.repeats = repeats

    def time_us(self, call: Call) -> float:
        """Median of a few calls after one that warms up."""
        call()
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)


class CudaTimer:
    """Events on the current CUDA stream."""

    def __init__(self, torch: Any, repeats: int = 5) -> None:
        self._torch = torch
        self.repeats = repeats
        cache_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
        self._over = torch.empty(max(4 * cache_bytes, 256 << 20), dtype=torch.int8, device="cuda")
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        self._events = pairs
        self._writes = 1
        self._empty_us = 0.0
        self._keep_busy(_AWAKE_S)
        self._writes = math.ceil(_LEAD_US / max(1.0, self._median_us(self._over.zero_)))
        self._empty_us = min(self._median_us(_nothing) for _ in range(3))

    def _keep_busy(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._over.zero_()
            self._torch.cuda.synchronize()

    def time_us(self, call: Call) -> float:
        """Median after two calls that warm up; at least 0.1."""
        call()
        call()
        return max(0.1, self._median_us(call))

    def _median_us(self, call: Call) -> float:
        for start, end in self._events:
            for _ in range(self._writes):
                self._over.zero_()
            start.record()
            call()
            end.record()
        self._torch.cuda.synchronize()
        times: list[float] = [start.elapsed_time(end) * 1000 for start, end in self._events]
        return statistics.median(times) - self._empty_us


def _nothing() -> None:
    """The time between two events."""


# --- The operations of one layer as PyTorch calls -------------------------------------------------

STAND_INS: Final = {
    "layernorm": "add_ and layer_norm: residual and RMSNorm",
    "final_layernorm": "add_ and layer_norm: residual and RMSNorm",
    "qk_norm": "layer_norm over heads",
    "rotary_emb": "one mul_ over queries and keys",
    "act_fn": "glu: SiLU and product",
    "sampler": "float and argmax: greedy",
}


class Kernels:
    """Calls for one rank's shapes; weights are made once, inputs for each point."""

    def __init__(self, torch: Any, shapes: Shapes, *, device: str, dtype: Any) -> None:
        self._torch = torch
        self.shapes = shapes
        self._options = {"device": device, "dtype": dtype}
        self._device = device
        s = shapes
        self._weights = {
            "qkv_proj": self._weight(s.qkv_width, s.hidden),
            "o_proj": self._weight(s.hidden, s.q_width),
            "gate_up_proj": self._weight(s.up_width, s.hidden),
            "down_proj": self._weight(s.hidden, s.ffn),
            "lm_head": self._weight(s.vocab, s.hidden),
        }
        self._scale = self._values(s.hidden)
        self._head_scale = self._values(s.head_dim)
        self._table = self._values(s.whole_vocab, s.hidden)
        self._pool: Any = None
        self._has_flash = self._find_flash()

    def _values(self, *size: int) -> Any:
        return self._torch.randn(*size, **self._options)

    @property
    def attention_kernel(self) -> str:
        """Which kernels attend."""
        if self._has_flash:
            return "aten flash attention, grouped heads"
        return "scaled_dot_product_attention; over a history, keys for every query head"

    def _weight(self, rows: int, columns: int) -> Any:
        return self._values(rows, columns).mul_(columns**-0.5)

    def layer(self, name: str, count: int) -> Call:
        """A token-wise layer on `count` tokens, or a layer of the head on `count` rows."""
        makers: dict[str, Callable[[int], Call]] = {
            "embedding": self._embedding,
            "layernorm": self._norm,
            "final_layernorm": self._norm,
            "qk_norm": self._qk_norm,
            "rotary_emb": self._rotary,
            "act_fn": self._activation,
            "sampler": self._sampler,
        }
        return makers[name](count) if name in makers else self._product(name, count)

    def _product(self, name: str, count: int) -> Call:
        weight = self._weights[name]
        x = self._values(count, weight.shape[1])
        linear = self._torch.nn.functional.linear
        return lambda: linear(x, weight)

    def _embedding(self, count: int) -> Call:
        ids = self._torch.randint(0, self.shapes.whole_vocab, (count,), device=self._device)
        embed, table = self._torch.nn.functional.embedding, self._table
        return lambda: embed(ids, table)

    def _norm(self, count: int) -> Call:
        x, residual = (
            self._values(count, self.shapes.hidden),
            self._values(count, self.shapes.hidden),
        )
        norm, scale = self._torch.nn.functional.layer_norm, self._scale
        size = (self.shapes.hidden,)

        def call() -> None:
            residual.add_(x)
            norm(residual, size, scale)

        residual.zero_()
        x.mul_(1e-3)
        return call

    def _qk_norm(self, count: int) -> Call:
        s = self.shapes
        x = self._values(count, s.heads + s.kv_heads, s.head_dim)
        norm, scale = self._torch.nn.functional.layer_norm, self._head_scale
        return lambda: norm(x, (s.head_dim,), scale)

    def _rotary(self, count: int) -> Call:
        s = self.shapes
        x = self._values(count, s.heads + s.kv_heads, s.head_dim)
        cos = self._values(count, 1, s.head_dim).sign_()
        return lambda: x.mul_(cos)

    def _activation(self, count: int) -> Call:
        x = self._values(count, self.shapes.up_width)
        functional = self._torch.nn.functional
        return (lambda: functional.glu(x)) if self.shapes.gated else (lambda: functional.relu(x))

    def _sampler(self, count: int) -> Call:
        logits = self._values(count, self.shapes.whole_vocab)
        return lambda: logits.float().argmax(dim=-1)

    # --- attention ----------------------------------------------------------------------------
    def kv_tokens(self, point: AttentionPoint) -> int:
        """Tokens of KV that a point reads."""
        chunk, history, decodes, context = point
        return (chunk + history if chunk else 0) + decodes * (context + 1)

    def attention(self, point: AttentionPoint) -> Call:
        """A prompt chunk over its history, then decodes over theirs."""
        chunk, history, decodes, context = point
        calls = []
        if chunk:
            calls.append(self._prompt(chunk, history))
        if decodes:
            # Behind the prompt's KV: what that has read is in the cache.
            start = chunk + history if chunk else 0
            calls.append(self._decode(decodes, context + 1, start))
        if len(calls) == 1:
            return calls[0]

        def both() -> None:
            for call in calls:
                call()

        return both

    def reserve(self, tokens: int) -> None:
        """Memory for the KV of so many tokens, shared by all points."""
        self._pool = self._values(2, tokens, self.shapes.kv_heads, self.shapes.head_dim)

    def _kv(self, sequences: int, tokens: int, start: int = 0) -> tuple[Any, Any]:
        """Keys and values, (sequences, tokens, heads, width), from a place in the pool on."""
        s = self.shapes
        keys, values = (
            half[start : start + sequences * tokens].view(sequences, tokens, s.kv_heads, s.head_dim)
            for half in self._pool
        )
        return keys, values

    def _prompt(self, chunk: int, history: int) -> Call:
        s = self.shapes
        query = self._values(1, chunk, s.heads, s.head_dim)
        keys, values = self._kv(1, chunk + history)
        if self._has_flash:
            return self._flash(query, keys, values, is_causal=True)
        query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
        attend = self._torch.nn.functional.scaled_dot_product_attention
        if not history:
            return lambda: attend(query, keys, values, is_causal=True, enable_gqa=True)
        bias = import_module("torch.nn.attention.bias")
        mask = bias.causal_lower_right(chunk, chunk + history)
        # Masks of this kind know no grouped heads: every query head gets keys of its own.
        keys, values = (self._of_every_head(part) for part in (keys, values))
        return lambda: attend(query, keys, values, attn_mask=mask)

    def _decode(self, decodes: int, tokens: int, start: int = 0) -> Call:
        s = self.shapes
        query = self._values(decodes, 1, s.heads, s.head_dim)
        keys, values = self._kv(decodes, tokens, start)
        if self._has_flash:
            return self._flash(query, keys, values, is_causal=False)
        query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
        attend = self._torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(query, keys, values, enable_gqa=True)

    def _of_every_head(self, part: Any) -> Any:
        return part.repeat_interleave(self.shapes.heads // self.shapes.kv_heads, dim=1)

    def _flash(self, query: Any, keys: Any, values: Any, *, is_causal: bool) -> Call:
        """The library's flash kernel with grouped heads: FlashAttention 2, as engines have it."""
        flash = self._torch.ops.aten._flash_attention_forward
        new, whole = query.shape[1], keys.shape[1]
        return lambda: flash(query, keys, values, None, None, new, whole, 0.0, is_causal, False)

    def _find_flash(self) -> bool:
        """Whether that kernel is there, takes these shapes, and masks to the lower right."""
        if self._device != "cuda":
            return False
        s, torch = self.shapes, self._torch
        query = self._values(1, 16, s.heads, s.head_dim)
        keys = self._values(1, 32, s.kv_heads, s.head_dim)
        try:
            found = self._flash(query, keys, keys, is_causal=True)()[0].transpose(1, 2)
        except (RuntimeError, TypeError, AttributeError):
            return False
        whole = self._of_every_head(keys.transpose(1, 2)).float()
        seen = torch.ones(16, 32, dtype=torch.bool, device=self._device).tril(diagonal=16)
        attend = torch.nn.functional.scaled_dot_product_attention
        expected = attend(query.transpose(1, 2).float(), whole, whole, attn_mask=seen)
        return bool(torch.allclose(found.float(), expected, atol=0.05))
