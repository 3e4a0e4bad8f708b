"""Groups of layers that share a block table, as vLLM's hybrid KV cache manager forms them.

Layers of one model may keep different things: all tokens, a window, a chunk, a state of fixed
size. vLLM cuts the memory into blocks of equal bytes and lets each *group* of alike layers take
blocks for itself; a block id belongs to one group at a time. This module owns the rules by which
layers become groups and pages become equal (vLLM 0.33, `v1/core/kv_cache_planning.py` and
`platforms/interface.py`); which block a sequence gets is decided in `emu/kv/grouped.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from emu.catalogue import sizes
from emu.catalogue.layers import Layer
from emu.catalogue.model import ModelSpec
from emu.errors import InputError
from emu.units import ceil_div

Keeps = Literal["all", "window", "chunk", "state"]
_STATE_BLOCK_TOKENS: Final = 16
_LATENT_STATE_BLOCK_TOKENS: Final = 128
"""Least tokens that a block is a multiple of where latent attention stands beside states."""
_ALIKE_RATIO: Final = 1.5
"""Buckets of layers up to this far apart in size form groups of the larger size, padded."""


class KvGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table."""

    keeps: Keeps
    limit_tokens: int = 0
    """Window or chunk; 0 for the others."""
    layers: int
    block_tokens: int
    """Tokens of one block of this group."""

    def skipped_tokens(self, processed_tokens: int) -> int:
        """Leading tokens that no later token of a sequence will read."""
        if self.keeps == "window":
            return max(0, processed_tokens - self.limit_tokens + 1)
        if self.keeps == "chunk":
            return processed_tokens // self.limit_tokens * self.limit_tokens
        if self.keeps == "state":
            return max(0, processed_tokens - 1)
        return 0

    def computed_tokens_to_skip(self, tokens: int) -> int:
        """The least number of computed tokens that leaves so many behind (of groups that do)."""
        if self.keeps == "window":
            return tokens + self.limit_tokens - 1
        if self.keeps == "chunk":
            return ceil_div(tokens, self.limit_tokens) * self.limit_tokens
        assert self.keeps == "state"
        return tokens + 1

    def blocks_held(self, tokens: int, in_flight_tokens: int) -> int:
        """Most blocks of a window or chunk of a sequence of so many tokens (vLLM's admission)."""
        whole = ceil_div(tokens, self.block_tokens)
        if self.keeps == "window":
            reach = min(self.limit_tokens - 1 + in_flight_tokens, tokens)
            return min(whole, ceil_div(reach, self.block_tokens) + 1)
        if self.keeps == "chunk":
            reach = min(self.limit_tokens + in_flight_tokens, tokens)
            return min(whole, ceil_div(reach, self.block_tokens))
        return whole


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How the KV memory of one rank is cut up."""

    groups: tuple[KvGroup, ...]
    block_bytes: int
    """Bytes of one block id: its page in every layer of the largest group."""
    block_tokens: int
    """Tokens that prefix hits and prompt chunks align to: a common multiple of the groups'."""
    hash_tokens: int
    """Tokens of one cache key: a common divisor of the groups'."""

    @property
    def is_uniform(self) -> bool:
        """All layers keep all tokens: the plain block pool serves."""
        return len(self.groups) == 1 and self.groups[0].keeps == "all"

    @property
    def has_states(self) -> bool:
        """Some layers keep a state."""
        return any(group.keeps == "state" for group in self.groups)

    def blocks_for(self, tokens: int, *, in_flight_tokens: int, draft_tokens: int = 0) -> int:
        """Most blocks that a sequence of so many tokens holds at once.

        `in_flight_tokens`: tokens of the steps planned but not confirmed (the batch limit times the
        batches in flight). The figure that vLLM reserves before it admits a prompt.
        """
        total = 0
        for group in self.groups:
            whole = group.blocks_held(tokens, in_flight_tokens)
            if group.keeps == "state":
                whole = min(whole, 1 + draft_tokens)
            total += whole
        return total


class _Bucket(msgspec.Struct):
    """Layers that keep the same, before they are dealt to groups."""

    keeps: Keeps
    limit_tokens: int
    token_bytes: int
    """Of one layer; 0 for states."""
    state_bytes: int
    layers: list[int] = []
    page_bytes_sum: int = 0
    """Sum over the layers of bytes a token, where they differ (latent attention with indexers)."""

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.layers)


def kv_layout(
    spec: ModelSpec,
    kv_dtype: str,
    *,
    dtype: str = "auto",
    tp: int = 1,
    block_size: int = 16,
    stages: int = 1,
    layers: Sequence[int] | None = None,
    draft_tokens: int = 0,
    keep_windows: bool = True,
    source: str = "memory",
) -> KvLayout:
    """The groups of a model's layers on one rank. `stages`: of the pipeline. Groups are those of
    the whole model, and a block is as large as the fullest stage needs. `layers`: of these only.

    `keep_windows` False counts windowed and chunked layers as keeping all tokens, as vLLM does
    with `--disable-hybrid-kv-cache-manager` and, unless asked, for Llama 4. InputError (at
    `source`): layers with states need the manager.
    """
    chosen = range(spec.layers) if layers is None else layers
    buckets = _buckets(spec, chosen, kv_dtype, dtype, tp, draft_tokens, keep_windows)
    if not buckets:
        raise InputError(source, None, "model", f"{spec.name} keeps no KV cache and no states")
    if len(buckets) == 1 and buckets[0].keeps != "state":
        only = buckets[0]
        group = KvGroup(
            keeps=only.keeps,
            limit_tokens=only.limit_tokens,
            layers=only.count,
            block_tokens=block_size,
        )
        return KvLayout(
            groups=(group,),
            block_bytes=only.page_bytes_sum * block_size,
            block_tokens=block_size,
            hash_tokens=block_size,
        )
    states = [bucket for bucket in buckets if bucket.keeps == "state"]
    attention = [bucket for bucket in buckets if bucket.keeps != "state"]
    if not attention:
        raise InputError(source, None, "model", f"{spec.name} has no attention, which emu needs")
    if states:
        block_size = _block_beside_states(spec, states, attention, block_size)
    return _grouped(buckets, block_size, sizes.stage_layers(spec, stages))


def _buckets(
    spec: ModelSpec,
    layers: Sequence[int],
    kv_dtype: str,
    dtype: str,
    tp: int,
    draft_tokens: int,
    keep_windows: bool,
) -> list[_Bucket]:
    """What the layers keep, alike ones together, in order of first appearance."""
    found: dict[tuple[Keeps, int, int, int], _Bucket] = {}
    latent = any(spec.layer(index).latent is not None for index in layers)
    for index in layers:
        layer = spec.layer(index)
        token_bytes = sizes.layer_kv_bytes_per_token(layer, kv_dtype, tp)
        state_bytes = sizes.layer_state_bytes(spec, layer, dtype, tp, draft_tokens)
        if token_bytes:
            keeps, limit_tokens = _kept(layer) if keep_windows else ("all", 0)
            # Latent layers with and without an indexer's keys differ in bytes but share a table.
            key_bytes = 0 if latent else token_bytes
            bucket = found.setdefault(
                (keeps, limit_tokens, key_bytes, 0),
                _Bucket(keeps, limit_tokens, token_bytes, 0),
            )
            bucket.layers.append(index)
            bucket.token_bytes = max(bucket.token_bytes, token_bytes)
            bucket.page_bytes_sum += token_bytes
        if state_bytes:
            bucket = found.setdefault(
                ("state", 0, 0, state_bytes), _Bucket("state", 0, 0, state_bytes)
            )
            bucket.layers.append(index)
    return list(found.values())


def _kept(layer: Layer) -> tuple[Keeps, int]:
    if layer.attention is None:
        return "all", 0
    if layer.attention.window_tokens:
        return "window", layer.attention.window_tokens
    if layer.attention.chunk_tokens:
        return "chunk", layer.attention.chunk_tokens
    return "all", 0


def _block_beside_states(
    spec: ModelSpec, states: list[_Bucket], attention: list[_Bucket], block_size: int
) -> int:
    """Tokens of a block whose attention page is at least as large as the largest state."""
    unit = max(block_size, _STATE_BLOCK_TOKENS)
    if spec.latent is not None:
        unit = max(unit, _LATENT_STATE_BLOCK_TOKENS)
    state_bytes = max(bucket.state_bytes for bucket in states)
    token_bytes = max(bucket.token_bytes for bucket in attention)
    return unit * ceil_div(state_bytes, unit * token_bytes)


def _block_tokens(bucket: _Bucket, block_size: int, page_bytes: int) -> int:
    """A narrower layer gets more tokens into the page, or wastes the rest of it."""
    if not bucket.token_bytes:
        return block_size
    ratio, rest = divmod(page_bytes, bucket.token_bytes * block_size)
    return block_size if rest else block_size * ratio


def _grouped(buckets: list[_Bucket], block_size: int, stages: Sequence[range]) -> KvLayout:
    """Equal pages, then groups of equal size; layers of a bucket are dealt round-robin. A rank of a
    pipeline has pages for its own layers of each group."""
    page_bytes = max(max(bucket.token_bytes * block_size, bucket.state_bytes) for bucket in buckets)
    counts = [bucket.count for bucket in buckets]
    size = max(counts) if max(counts) < _ALIKE_RATIO * min(counts) else min(counts)
    groups, fullest = [], 1
    for bucket in buckets:
        dealt = ceil_div(bucket.count, size)
        for index in range(dealt):
            own = bucket.layers[index::dealt]
            of_stages = [sum(layer in stage for layer in own) for stage in stages]
            fullest = max(fullest, *of_stages)
            groups.append(
                KvGroup(
                    keeps=bucket.keeps,
                    limit_tokens=bucket.limit_tokens,
                    layers=len(own),
                    block_tokens=_block_tokens(bucket, block_size, page_bytes),
                )
            )
    return KvLayout(
        groups=tuple(groups),
        block_bytes=page_bytes * fullest,
        block_tokens=math.lcm(*(group.block_tokens for group in groups)),
        hash_tokens=math.gcd(*(group.block_tokens for group in groups)),
    )
