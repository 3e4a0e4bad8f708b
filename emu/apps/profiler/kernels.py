"""The operations of one layer as PyTorch calls.

Matrix products and attention are the library's own kernels (cuBLAS; FlashAttention 2, or where
that is not there whatever `scaled_dot_product_attention` takes), as engines use them. Norms,
rotary embedding and the activation are single fused kernels in engines; here each is one library
kernel that moves as many bytes (`STAND_INS`), which is all that their time consists of. A batch
of prompts and decodes is two attention kernels, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final

from emu.apps.profiler.grid import AttentionPoint
from emu.apps.profiler.shapes import Shapes
from emu.apps.profiler.timers import Call

if TYPE_CHECKING:
    from torch import Tensor
    from torch import dtype as Dtype

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

    def __init__(self, torch: ModuleType, shapes: Shapes, *, device: str, dtype: Dtype) -> None:
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
        self._pool: Tensor = None
        self._has_flash = self._find_flash()

    def _values(self, *size: int) -> Tensor:
        return self._torch.randn(*size, **self._options)

    @property
    def attention_kernel(self) -> str:
        """Which kernels attend."""
        if self._has_flash:
            return "aten flash attention, grouped heads"
        return "scaled_dot_product_attention; over a history, keys for every query head"

    def _weight(self, rows: int, columns: int) -> Tensor:
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

    def _kv(self, sequences: int, tokens: int, start: int = 0) -> tuple[Tensor, Tensor]:
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

    def _of_every_head(self, part: Tensor) -> Tensor:
        return part.repeat_interleave(self.shapes.heads // self.shapes.kv_heads, dim=1)

    def _flash(
        self, query: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool
    ) -> Callable[[], tuple[Tensor, ...]]:
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
