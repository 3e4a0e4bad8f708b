"""Measuring real kernels on the GPU at hand: a profile bundle for the `profile` backend.

    python -m emu.apps.profiler --model meta-llama/Llama-3.1-8B --out bundles     (or: emu profile)

Needs PyTorch (extra `profiler`), and of this package only the catalogue: `python -m
emu.apps.profiler` works in an environment with torch, numpy, pyyaml and msgspec alone.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import yaml

from emu.catalogue.lookup import device_words, gpu_of_device, lookup_model, model_from_file
from emu.catalogue.model import ModelSpec
from emu.errors import InputError, install_hint

# --- grid: which points are measured, coarse ones first -------------------------------------------
# Pure. A look-up interpolates along each axis, so every level of the grid is a usable table by
# itself; when the time budget ends, what was measured until then stands.

COARSE, FINE, FINEST = 0, 1, 2
_LEVELS: Final = (COARSE, FINE, FINEST)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Largest iteration to profile."""

    max_tokens: int = 2048
    """New tokens of one iteration."""
    max_sequences: int = 256
    max_context: int = 16384
    """Tokens of history."""


AttentionPoint = tuple[int, int, int, int]
"""(new prompt tokens, their history, decodes, history of each)."""


def token_counts(limits: Limits, level: int) -> list[int]:
    """Token counts of the dense layers: doubling, then by tiles of products, then finer."""
    top = limits.max_tokens
    if level == COARSE:
        return _doubling(1, top)
    if level == FINE:
        return _up_to(top, [*range(1, 17), *range(24, 129, 8), *range(160, 513, 32)]) + _up_to(
            top, list(range(576, top + 1, 64))
        )
    return _up_to(top, [*range(1, 17), *range(20, 65, 4), *range(80, top + 1, 16)])


def sequence_counts(limits: Limits, level: int) -> list[int]:
    """Rows of logits."""
    top = limits.max_sequences
    if level == COARSE:
        return _doubling(1, top)
    fine = _up_to(top, [*range(1, 17), *range(20, 65, 4), *range(80, top + 1, 16)])
    return fine if level == FINEST else fine[::2]


def attention_points(limits: Limits, level: int) -> Iterator[AttentionPoint]:
    """Prompt alone, decodes alone, and both."""
    step = {COARSE: 4, FINE: 2, FINEST: 2}[level]
    contexts = _geometric(64 if level == COARSE else 16, limits.max_context, step)
    decodes = _geometric(1, limits.max_sequences, 2)
    chunks = _geometric(16, limits.max_tokens, step)
    for chunk in chunks:
        for history in [0, *contexts]:
            yield chunk, history, 0, 0
    for count in decodes:
        for context in contexts:
            yield 0, 0, count, context
    # Both together: every fourth point of each axis at first, the rest only at the finest level.
    thin = 2 if level != FINEST else 1
    for chunk in chunks[::thin]:
        for history in [0, *contexts[thin::thin]]:
            for count in decodes[::thin]:
                for context in contexts[::thin]:
                    yield chunk, history, count, context


def in_levels(limits: Limits) -> Iterator[tuple[int, str, AttentionPoint | int]]:
    """(level, table, point), each point once, coarse levels first; tables: dense, per_sequence,
    attention."""
    done: set[tuple[str, AttentionPoint | int]] = set()
    for level in _LEVELS:
        points: list[tuple[str, AttentionPoint | int]] = []
        points += (("dense", count) for count in token_counts(limits, level))
        points += (("per_sequence", count) for count in sequence_counts(limits, level))
        points += (("attention", point) for point in attention_points(limits, level))
        for point in points:
            if point not in done:
                done.add(point)
                yield level, *point


def _doubling(first: int, top: int) -> list[int]:
    return _geometric(first, top, 2)


def _geometric(first: int, top: int, factor: int) -> list[int]:
    """first, first x factor ... and the top itself."""
    values = []
    value = first
    while value < top:
        values.append(value)
        value *= factor
    return [*values, top]


def _up_to(top: int, values: list[int]) -> list[int]:
    return sorted({value for value in values if value <= top})


# --- kernels: the operations of one layer as PyTorch calls ----------------------------------------
# Matrix products and attention are the library's own kernels (cuBLAS; FlashAttention 2, or where
# that is not there whatever `scaled_dot_product_attention` takes), as engines use them. Norms,
# rotary embedding and the activation are single fused kernels in engines; here each is one library
# kernel that moves as many bytes (`STAND_INS`), which is all that their time consists of. A batch
# of prompts and decodes is two attention kernels, one after the other.

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


# --- one measurement, within a time budget --------------------------------------------------------
# The coarse grid is measured whatever the budget; finer points follow until it is spent. A point
# whose KV does not fit into the device's memory is left out, and `meta.yaml` says how many.

# --------------------------------------------------------------------------------------------------
# The tables of a measurement, and what is known about it, in the files of a bundle.
#
#     OUT/HARDWARE/MODEL/VARIANT/meta.yaml, architecture.yaml
#     OUT/HARDWARE/MODEL/VARIANT/tpN/{dense,per_sequence,attention}.csv
#
# The format is the one that `emu/latency/profile_bundle.py` reads.

Times = dict[tuple[str, int], float]
"""(layer, count) -> us."""

_SIGNIFICANT: Final = 6


def write_curves(path: Path, count_name: str, times: Times) -> None:
    """dense.csv or per_sequence.csv: by layer in order of first appearance, then by count."""
    order = {layer: i for i, layer in enumerate(dict.fromkeys(layer for layer, _ in times))}
    rows = sorted(times.items(), key=lambda row: (order[row[0][0]], row[0][1]))
    lines = (f"{layer},{count},{_us(us)}" for (layer, count), us in rows)
    _write(path, f"layer,{count_name},time_us", lines)


def write_attention(path: Path, times: Mapping[AttentionPoint, float]) -> None:
    """attention.csv, in order of the axes."""
    lines = (
        f"{chunk},{history},{decodes},{context},{_us(us)}"
        for (chunk, history, decodes, context), us in sorted(times.items())
    )
    _write(path, "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", lines)


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """A mapping, keys in the order given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=False, width=100)
    path.write_text(text, encoding="utf-8")


def _us(value: float) -> str:
    return f"{value:.{_SIGNIFICANT}g}"


def _write(path: Path, header: str, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")


# --- One measurement ------------------------------------------------------------------------------


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks for."""

    model: str = "meta-llama/Llama-3.1-8B"
    hf_config: str = ""
    out: str = "bundles"
    hardware: str = ""
    tp: tuple[int, ...] = (1,)
    device: str = ""
    """cuda or cpu; empty = cuda if there is one."""
    budget_s: float = 360.0
    repeats: int = 5
    limits: Limits = Limits()


class Operations(Protocol):
    """The calls of one rank (`kernels.Kernels`)."""

    def layer(self, name: str, count: int) -> Call: ...

    def attention(self, point: AttentionPoint) -> Call: ...

    def kv_tokens(self, point: AttentionPoint) -> int: ...

    def reserve(self, tokens: int) -> None: ...


class Tables(msgspec.Struct):
    """What one rank's measurement found; us."""

    dense: Times = msgspec.field(default_factory=dict)
    per_sequence: Times = msgspec.field(default_factory=dict)
    attention: dict[AttentionPoint, float] = msgspec.field(default_factory=dict)
    left_out: int = 0
    """Points whose KV is too large."""
    level: int = COARSE
    """The finest level that is complete."""


def measure(
    shapes: Shapes,
    operations: Operations,
    timer: Timer,
    limits: Limits,
    *,
    kv_tokens_max: int,
    is_time_left: Callable[[], bool],
    out_of_memory: tuple[type[BaseException], ...] = (MemoryError,),
) -> Tables:
    """Time the points of one rank, coarse ones first, as long as there is time.

    Points of attention that need more memory than there is are left out.
    """
    tables = Tables()
    operations.reserve(kv_tokens_max)
    of_level: dict[AttentionPoint, float] = {}
    for level, table, point in in_levels(limits):
        if level != tables.level:
            tables.attention |= of_level
            tables.level, of_level = level, {}
        if level != COARSE and not is_time_left():
            # Attention is looked up by slices of the grid: one with gaps would mislead.
            tables.level -= 1
            return tables
        if table == "attention":
            assert isinstance(point, tuple)
            if operations.kv_tokens(point) > kv_tokens_max:
                tables.left_out += 1
            else:
                try:
                    of_level[point] = timer.time_us(operations.attention(point))
                except out_of_memory:
                    tables.left_out += 1
            continue
        assert isinstance(point, int)
        is_dense = table == "dense"
        found = tables.dense if is_dense else tables.per_sequence
        for layer in dense_layers(shapes) if is_dense else SEQUENCE_LAYERS:
            found[layer, point] = timer.time_us(operations.layer(layer, point))
    tables.attention |= of_level
    return tables


def profile(options: ProfileOptions) -> Path:
    """Measure and write a bundle; its directory. Raises InputError for what cannot be measured."""
    spec = _spec(options)
    shapes = {tp: shapes_of(spec, tp) for tp in options.tp}
    torch = import_torch()

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("profile", None, "--device", "PyTorch sees no CUDA device")
    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    hardware = options.hardware or hardware_name(name)
    directory = Path(options.out) / hardware / spec.name / "bf16"
    start = time.monotonic()
    known: dict[str, Any] = {}
    with torch.inference_mode():
        for index, (tp, rank) in enumerate(shapes.items(), start=1):
            deadline = start + options.budget_s * index / len(shapes)
            kernels = Kernels(torch, rank, device=device, dtype=torch.bfloat16)
            timer: Timer = CpuTimer(options.repeats)
            if device == "cuda":
                timer = CudaTimer(torch, options.repeats)
                torch.cuda.empty_cache()  # of the degree before
            tables = measure(
                rank,
                kernels,
                timer,
                options.limits,
                kv_tokens_max=_kv_tokens_max(torch, device, rank, options.limits),
                is_time_left=lambda end=deadline: time.monotonic() < end,  # type: ignore[misc]
                out_of_memory=(MemoryError, torch.cuda.OutOfMemoryError),
            )
            _write_tables(directory / f"tp{tp}", tables)
            known[f"tp{tp}"] = {
                "finest_complete_level": tables.level,
                "attention_points_left_out": tables.left_out,
            }
            known["kernels"] = {**STAND_INS, "attention": kernels.attention_kernel}
            print(_summary(tp, tables, time.monotonic() - start), file=sys.stderr, flush=True)
            del kernels, timer
    write_yaml(directory / "architecture.yaml", architecture(shapes[options.tp[0]]))
    took_s = time.monotonic() - start
    write_yaml(directory / "meta.yaml", _meta(options, spec, hardware, name, torch, took_s) | known)
    return directory


def import_torch() -> Any:
    """PyTorch, or an InputError that names the extra."""
    try:
        import torch
    except ImportError:
        problem = f"PyTorch is not installed: {install_hint('profiler')}"
        raise InputError("profile", None, "torch", problem) from None
    return torch


def hardware_name(device: str) -> str:
    """The catalogue's name of a device, or the device's own as a folder name."""
    spec = gpu_of_device(device)
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(device_words(device)))
    return spec.name if spec is not None else plain or "GPU"


def _spec(options: ProfileOptions) -> ModelSpec:
    if options.hf_config:
        return model_from_file(Path(options.hf_config), options.model)
    return lookup_model(options.model, "profile", "--model")


def _kv_tokens_max(torch: Any, device: str, shapes: Shapes, limits: Limits) -> int:
    """KV that any point may read: all sequences at the longest context, or half of what is free."""
    most = limits.max_sequences * (limits.max_context + 1) + limits.max_tokens + limits.max_context
    if device == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info()
    else:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Keys and values of two bytes; without grouped heads they are repeated once more.
    return min(most, int(free_bytes * 0.5) // (4 * shapes.kv_width))


def _write_tables(folder: Path, tables: Tables) -> None:
    write_curves(folder / "dense.csv", "tokens", tables.dense)
    write_curves(folder / "per_sequence.csv", "sequences", tables.per_sequence)
    write_attention(folder / "attention.csv", tables.attention)


def _meta(
    options: ProfileOptions, spec: ModelSpec, hardware: str, device: str, torch: Any, took_s: float
) -> dict[str, Any]:
    limits = options.limits
    return {
        "profiler": "emu",
        "gpu": device,
        "hardware": hardware,
        "profiled_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch_version": str(torch.__version__),
        "cuda_version": str(torch.version.cuda),
        "architecture": spec.model_type,
        "model": spec.name,
        "variant": "bf16",
        "tp_degrees": list(options.tp),
        "engine_effective": {
            "max_num_batched_tokens": limits.max_tokens,
            "max_num_seqs": limits.max_sequences,
        },
        "attention_grid": {"max_kv": limits.max_context},
        "measurement_iterations": options.repeats,
        "took_s": round(took_s, 1),
        "skew_fit": {"enabled": False},
    }


def _summary(tp: int, tables: Tables, took_s: float) -> str:
    return (
        f"tp{tp}: {len(tables.dense)} dense, {len(tables.per_sequence)} per sequence, "
        f"{len(tables.attention)} attention points in {took_s:.0f} s"
    )


# --- the command without the rest of emu ----------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print the directory; the exit status."""
    options = ProfileOptions()
    parser = argparse.ArgumentParser(
        prog="python -m emu.apps.profiler", description=profile.__doc__
    )
    add = parser.add_argument
    add("--model", default=options.model, help="catalogue name, or a label with --hf-config")
    add("--hf-config", default="", help="a Hugging Face config.json")
    add("--out", default=options.out, help="root of the bundles")
    add("--hardware", default="", help="name of the hardware folder; default: the device's")
    add("--tp", default="1", help="tensor-parallel degrees, comma separated")
    add("--device", default="", choices=("", "cuda", "cpu"))
    add("--budget-s", type=float, default=options.budget_s, help="finer points until then")
    add("--repeats", type=int, default=options.repeats, help="calls for each median")
    add("--max-tokens", type=int, default=options.limits.max_tokens)
    add("--max-sequences", type=int, default=options.limits.max_sequences)
    add("--max-context", type=int, default=options.limits.max_context)
    found = parser.parse_args(arguments)
    try:
        directory = profile(
            ProfileOptions(
                model=found.model,
                hf_config=found.hf_config,
                out=found.out,
                hardware=found.hardware,
                tp=degrees(found.tp),
                device=found.device,
                budget_s=found.budget_s,
                repeats=found.repeats,
                limits=Limits(
                    max_tokens=found.max_tokens,
                    max_sequences=found.max_sequences,
                    max_context=found.max_context,
                ),
            )
        )
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(directory)
    return 0


def degrees(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers. Raises InputError."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InputError("profile", None, "--tp", f"expected numbers such as 1,2, got {text!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
