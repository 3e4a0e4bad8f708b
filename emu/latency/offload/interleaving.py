"""Sub-batch interleaving: two halves of a batch take turns on the GPU.

While one half's decodes attend in memory, the other half's rows run on the GPU. Order:
both halves up to their first attention; then, layer by layer and half by half, the rows from one
attention to the next; at last the head. A half goes on when its own attention is over. Each half
reads all weights, so this pays only where attention in memory takes longer than the rows.

Rules: LLMServingSim 2.0. A batch is split by the tokens of its members, the largest first, to the
lighter half. Single histories are not known here: the decodes of a half share them evenly, and
the longest may be in either.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from emu.latency.base import BatchShape
from emu.latency.offload.weights import RowTime


class HalfCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one half, ns; those of a layer are of each layer."""

    before: int
    """Before the first layer."""
    enter: int
    """From a layer's start to its attention."""
    in_memory: int
    """Attention of decodes."""
    on_gpu: int
    """Attention of prompts, after that in memory."""
    leave: int
    """From attention to the layer's end."""
    after: int
    """After the last layer."""


def half_costs(rows: Sequence[RowTime], *, in_memory: int, on_gpu: int) -> HalfCosts:
    """Sort the rows of an iteration by where they stand; the attention row itself is replaced.

    `in_memory` and `on_gpu` are ns of attention.
    """
    parts = dict.fromkeys(("before", "enter", "leave", "after"), 0)
    part = "before"
    for name, layer, ns in rows:
        if layer > 0:
            continue  # all layers are alike
        if layer == 0 and part == "before":
            part = "enter"
        elif layer < 0 and part != "before":
            part = "after"
        if name == "attention":
            part = "leave"
        else:
            parts[part] += ns
    return HalfCosts(in_memory=in_memory, on_gpu=on_gpu, **parts)


def interleaved_ns(halves: Sequence[HalfCosts], layers: int) -> int:
    """Duration of an iteration."""
    now_ns = 0
    ready_ns: list[int] = []
    for half in halves:
        now_ns += half.before + half.enter
        ready_ns.append(now_ns + half.in_memory)
    for layer in range(layers):
        for index, half in enumerate(halves):
            now_ns = max(now_ns, ready_ns[index]) + half.on_gpu + half.leave
            now_ns += half.after if layer == layers - 1 else half.enter
            ready_ns[index] = now_ns + half.in_memory
    return now_ns


def split_shape(shape: BatchShape) -> tuple[BatchShape, BatchShape]:
    """Two halves of a batch with two members or more."""
    halves = (BatchShape(), BatchShape())
    tokens = [0, 0]
    chunks = zip(shape.prefill_new, shape.prefill_context, strict=True)
    for new, context in sorted(chunks, key=lambda chunk: -chunk[0]):
        side = int(tokens[1] < tokens[0])
        halves[side].prefill_new.append(new)
        halves[side].prefill_context.append(context)
        tokens[side] += new
    count = shape.decode_count
    # Decodes of one token each fill the lighter half, then alternate, the first half first.
    to_second = min(count, max(0, (tokens[0] - tokens[1] + count) // 2))
    counts = (count - to_second, to_second)
    for half, decodes in zip(halves, counts, strict=True):
        if decodes:
            half.decode_count = decodes
            half.decode_context_sum = shape.decode_context_sum * decodes // count
            half.decode_context_max = shape.decode_context_max
            half.decode_context_min = shape.decode_context_min
        half.sequences = decodes + len(half.prefill_new)
    return halves
