"""Model FLOPs of a request: the arithmetic of its tokens, whatever a system spends on them.

Two for each parameter that a token is multiplied with (routed experts as far as chosen, the
output matrix for generated tokens only), two for each element of queries, keys and values that
attention multiplies (a token attends to itself and to what its layer lets it see before), and the
recurrence of state-space layers. Norms, activations and softmax are left out, as is the rule; so
is work that is done again (MFU of PaLM, arXiv 2204.02311).
"""

from __future__ import annotations

from collections import Counter

import msgspec

from emu.catalogue import sizes
from emu.catalogue.model import ModelSpec


class ModelFlops(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs by token and by pair of tokens of one model, on all its GPUs together."""

    token: int
    """Of each token that is computed, without attention."""
    output: int
    """Of the output matrix, for each generated token."""
    pairs: tuple[tuple[int, int, int], ...]
    """(window, chunk, FLOPs of a pair) of layers alike; a window or chunk of 0 has no limit."""

    @property
    def sees_all(self) -> bool:
        """No layer limits what a token sees."""
        return not any(window or chunk for window, chunk, _ in self.pairs)

    def sums(self, tokens: int, pairs: int, outputs: int) -> int:
        """FLOPs of so many tokens, pairs of tokens and generated tokens, where layers see all."""
        pair = sum(flops for _, _, flops in self.pairs)
        return self.token * tokens + pair * pairs + self.output * outputs

    def span(self, first: int, last: int) -> int:
        """FLOPs of the tokens at positions [first, last), without the output matrix."""
        total = self.token * (last - first)
        for window, chunk, flops in self.pairs:
            total += flops * (_seen(last, window, chunk) - _seen(first, window, chunk))
        return total

    def request(self, prompt_tokens: int, hit_tokens: int, outputs: int) -> tuple[int, int]:
        """FLOPs of the prompt with its first token, and of the tokens after that.

        `hit_tokens` of the prompt were found in a cache. Nothing without a first token.
        """
        if outputs <= 0:
            return 0, 0
        prompt = self.span(hit_tokens, prompt_tokens) + self.output
        rest = outputs - 1
        return prompt, self.span(prompt_tokens, prompt_tokens + rest) + self.output * rest


def _seen(tokens: int, window: int, chunk: int) -> int:
    """Pairs of the first so many tokens with what each of them sees, itself included."""
    if chunk:
        whole, rest = divmod(tokens, chunk)
        return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
    if window and tokens > window:
        return window * (window + 1) // 2 + (tokens - window) * window
    return tokens * (tokens + 1) // 2


def model_flops(spec: ModelSpec) -> ModelFlops:
    """FLOPs of a model by token and by pair of tokens."""
    tables = sizes.embedding_params(spec) + sizes.head_params(spec)
    token = 2 * (sizes.active_parameter_count(spec) - tables - spec.extra_params)
    pairs: Counter[tuple[int, int]] = Counter()
    for index in range(spec.layers):
        layer = spec.layer(index)
        attention, latent, indexer = layer.attention, layer.latent, layer.indexer
        if attention is not None:
            width = attention.head_dim + attention.value_dim
            reach = attention.window_tokens, attention.chunk_tokens
            pairs[reach] += 2 * attention.heads * width
        if latent is not None:
            width = latent.qk_head_dim + latent.v_head_dim
            reach = indexer.topk_tokens if indexer is not None else 0, 0
            pairs[reach] += 2 * layer.latent_heads * width
        if indexer is not None and indexer.owns_keys:
            pairs[0, 0] += 2 * indexer.heads * indexer.head_dim
        if layer.state is not None:
            token += layer.state.flops_per_token
    return ModelFlops(
        token=token,
        output=2 * spec.vocab * spec.hidden,
        pairs=tuple((*reach, flops) for reach, flops in sorted(pairs.items())),
    )
