"""The rows of a batch: which layers run, on how many bytes, with which messages.

Owns the order of rows, tensor sizes, where collectives hang, the expert and PIM sections, and the
placement of weights. One generator serves one kind of replica. Does not own: the compute times of
rows (`layer_times.py`), the graphs (`graph.py`), which requests are in the batch.
Source: LLMServingSim 2.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from emu.backends.astra.graph import LOCAL, Location, Place
from emu.backends.astra.layer_times import LayerTimes, counts
from emu.backends.astra.pim import Member, PimAttention
from emu.backends.astra.trace import Marker, Row, Trace, TraceKind, TraceModel
from emu.latency.base import BatchShape
from emu.latency.moe_gate import Gate

_REDUCED: Final = ("o_proj", "down_proj")
"""Layers whose output is summed over the tensor-parallel ranks."""
_SAMPLE_BYTES: Final = 4


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where weights lie: by layer name, else by block, else the default."""

    default: Place = LOCAL
    blocks: Mapping[int, Place] = msgspec.field(default_factory=dict)
    layers: Mapping[str, Place] = msgspec.field(default_factory=dict)

    def of(self, layer: str, block: int = -1) -> Place:
        """Place of a layer's weights; `block` -1 for layers outside the blocks."""
        found = self.layers.get(layer)
        return found if found is not None else self.blocks.get(block, self.default)

    @property
    def is_uniform(self) -> bool:
        """All blocks are alike."""
        return not self.blocks


class TraceSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of replica. Degrees are counts, flags say which network dimensions take part."""

    model: TraceModel
    kind: TraceKind = "COLOCATED"
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Ranks of the whole expert group."""
    local_experts: int = 1
    """Ranks of it that belong to this replica."""
    tensor_dims: tuple[bool, ...] | None = None
    expert_dims: tuple[bool, ...] | None = None
    host: Place = Place(Location.REMOTE, 0)
    recall_place: Place = Place(Location.REMOTE, 0)
    """Where recalled KV comes from."""
    placement: Placement = msgspec.field(default_factory=Placement)
    repeats_blocks: bool = True
    """False: blocks that are alike are run once instead of once a layer, as the original does for
    experts without its block copy."""
    skipped_layers: tuple[str, ...] = ()


def stage_sizes(layers: int, stages: int) -> list[int]:
    """Blocks of each stage: even; what is left over goes to the stages just before the last."""
    each, left = divmod(layers, stages)
    sizes = [each] * stages
    for i in range(left):
        sizes[-2 - i] += 1
    return sizes


class TraceGenerator:
    """Makes the traces of one kind of replica."""

    def __init__(
        self,
        setup: TraceSetup,
        times: LayerTimes,
        gate: Gate | None = None,
        pim: PimAttention | None = None,
    ) -> None:
        self.setup = setup
        self.times = times
        self.pim = pim
        self.gate = gate
        model = setup.model
        self.is_moe = model.experts > 0
        assert not self.is_moe or gate is not None
        sections = times.sections
        # What the rows of a step read (`_Step`): layers before and behind the attention, the MLP.
        self.before = [n for n in sections["pre_attn"] if n not in setup.skipped_layers]
        self.after = [*sections["post_attn"]]
        self.mlp = [*sections["mlp_moe" if self.is_moe else "mlp_dense"]]
        self.sizes = _Sizes(setup)

    def trace(
        self, shape: BatchShape, *, recall_bytes: int = 0, members: Sequence[Member] = ()
    ) -> Trace:
        """The trace of one batch. `members` are needed for attention in memory only."""
        if shape.start_layer or shape.layers >= 0:
            return self._partial_trace(shape)
        step = _Step(self, shape, members)
        rows: list[Row] = []
        if recall_bytes:
            place = self.setup.recall_place
            rows.append(Row("kv_load", weight_place=place, weight_bytes=recall_bytes))
        start = len(rows)
        rows += step.prologue()
        first_block = len(rows) - start
        blocks = self._blocks(step)
        edges = [first_block]
        for block in blocks:
            rows += block
            edges.append(len(rows) - start)
        rows += step.head()
        boundaries: list[int] = []
        done = 0
        for size in stage_sizes(len(blocks), self.setup.pipeline)[:-1]:
            done += size
            boundaries.append(edges[done])
        return Trace(self.setup.kind, rows, self.setup.pipeline, tuple(boundaries))

    def _partial_trace(self, shape: BatchShape) -> Trace:
        """Some of the layers only, in one stage; what enters or leaves in the middle stays here."""
        layers = self.setup.model.layers
        step = _Step(self, shape, ())
        end = layers if shape.layers < 0 else min(layers, shape.start_layer + shape.layers)
        rows = step.prologue() if shape.start_layer == 0 else []
        for block in self._blocks(step)[shape.start_layer : end]:
            rows += block
        if end == layers:
            rows += step.head()
        return Trace(self.setup.kind, rows)

    def _blocks(self, step: _Step) -> list[list[Row]]:
        layers = self.setup.model.layers
        if self.setup.placement.is_uniform:
            return [step.block(0)] * (layers if self.setup.repeats_blocks else 1)
        return [step.block(index) for index in range(layers)]

    def interleaved_trace(
        self, shapes: tuple[BatchShape, BatchShape], members: tuple[Sequence[Member], ...],
        *, recall_bytes: int = 0,
    ) -> Trace:  # fmt: skip
        """Two sub-batches that take turns: one computes while the other waits for memory."""
        steps = [
            _Step(self, shape, members_of, batch)
            for batch, (shape, members_of) in enumerate(zip(shapes, members, strict=True), start=1)
        ]
        rows: list[Row] = []
        if recall_bytes:
            place = self.setup.recall_place
            rows.append(Row("kv_load", weight_place=place, weight_bytes=recall_bytes))
        for step in steps:
            rows += step.prologue() + step.attention_half(0)
        layers = self.setup.model.layers
        alike = self.setup.placement.is_uniform and not self.setup.repeats_blocks
        for index in range(min(1, layers - 1) if alike else layers - 1):
            for step in steps:
                rows += step.mlp_half(index) + step.attention_half(index + 1)
        for step in steps:
            rows += step.mlp_half(layers - 1) + step.head()
        return Trace(self.setup.kind, rows)


class _Sizes:
    """Bytes of a layer's tensors on one rank."""

    def __init__(self, setup: TraceSetup) -> None:
        model, p = setup.model, setup.tensor
        fp = model.element_bytes
        hidden, width = model.hidden, model.head_dim
        q, k = model.heads * width, model.kv_heads * width
        qkv, ffn, vocab = (q + 2 * k) // p, model.ffn // p, model.vocab // p
        heads, kv_heads = model.heads // p, model.kv_heads // p
        expert = setup.expert
        norm = (hidden * fp, hidden * fp, hidden * fp)
        rotary = (heads + kv_heads) * width * fp
        qk = (q + k) // p * fp
        self.per_token: dict[str, tuple[int, int, int]] = {
            "embedding": (fp * 2, vocab * hidden * fp, hidden * fp),
            "layernorm": norm,
            "final_layernorm": norm,
            "qk_norm": (qk, 2 * width * fp, qk),
            "qkv_proj": (hidden * fp, hidden * qkv * fp, qkv * fp),
            "rotary_emb": (rotary, 0, rotary),
            "attention": (heads * width * fp, 0, heads * width * fp),
            "o_proj": (q // p * fp, q // p * hidden * fp, hidden * fp),
            "gate_up_proj": (hidden * fp, hidden * 2 * ffn * fp, 2 * ffn * fp),
            "act_fn": (2 * ffn * fp, 0, ffn * fp),
            "down_proj": (ffn * fp, ffn * hidden * fp, hidden * fp),
            "moe": (
                hidden * fp,
                hidden * model.experts * fp
                + model.experts // expert * 3 * hidden * model.expert_ffn * fp,
                hidden * fp,
            ),
            "lm_head": (hidden * fp, hidden * vocab * fp, vocab * fp),
            "sampler": (vocab * fp, 0, _SAMPLE_BYTES),
        }
        """(input per token, weight, output per token)."""
        self.kv_per_context = 2 * kv_heads * width * fp
        self.kv_sent_per_token = (
            2 * model.kv_heads * width * model.kv_element_bytes
        )  # divided by the ranks once the tokens are known


class _Step:
    """Rows of one batch (or sub-batch)."""

    def __init__(
        self,
        generator: TraceGenerator,
        shape: BatchShape,
        members: Sequence[Member],
        batch: int = 0,
    ) -> None:
        self.generator = generator
        self.setup = generator.setup
        self.shape = shape
        self.members = members
        self.batch = batch
        self.tokens, self.logits = counts(shape)

    def layer(self, name: str, block: int = -1) -> Row:
        """A row whose time follows from the token count."""
        tokens = self.tokens
        sizes = self.generator.sizes.per_token[name]
        row = Row(
            name,
            self.generator.times.layer_ns(name, tokens, self.logits),
            LOCAL,
            tokens * sizes[0],
            self.setup.placement.of(name, block),
            sizes[1],
            LOCAL,
            tokens * sizes[2],
        )
        row.batch = self.batch
        if name in _REDUCED and self.setup.tensor > 1:
            row.comm = "ALLREDUCE"
            row.comm_bytes = row.output_bytes
            row.involved = self.setup.tensor_dims
        elif name == "qkv_proj" and self.setup.kind == "PREFILL":
            row.comm_bytes = self.generator.sizes.kv_sent_per_token * tokens // self.setup.tensor
        return row

    def prologue(self) -> list[Row]:
        """Everything before the first block; its input comes from the host."""
        rows = [self.layer(name) for name in self.generator.times.sections["prologue"]]
        rows[0].input_place = self.setup.host
        return rows

    def head(self) -> list[Row]:
        """Everything after the last block; its output goes to the host."""
        rows = [self.layer(name) for name in self.generator.times.sections["head"]]
        rows[-1].output_place = self.setup.host
        return rows

    def block(self, index: int) -> list[Row]:
        """All rows of one transformer block."""
        return self.attention_half(index) + self.mlp_half(index)

    def attention_half(self, index: int) -> list[Row]:
        """Up to and including the attention."""
        rows: list[Row] = []
        for name in self.generator.before:
            if name == "attention":
                rows += self.attention()
            else:
                rows.append(self.layer(name, index))
        return rows

    def attention(self) -> list[Row]:
        """The attention, on the NPU and in memory."""
        shape, rows = self.shape, []
        if self.generator.pim is not None:
            rows = self.generator.pim.rows(self.members, self.setup.host.device, self.batch)
            shape = BatchShape(prefill_new=shape.prefill_new, prefill_context=shape.prefill_context)
        if not shape.prefill_new and not shape.decode_count:
            return rows
        row = self.layer_without_time("attention")
        row.comp_ns = self.generator.times.attention_ns(shape)
        context = sum(shape.prefill_context) + shape.decode_context_sum
        row.input_bytes += self.generator.sizes.kv_per_context * context
        rows.append(row)
        return rows

    def layer_without_time(self, name: str) -> Row:
        """Sizes only."""
        sizes = self.generator.sizes.per_token[name]
        row = Row(name, input_bytes=self.tokens * sizes[0], weight_bytes=sizes[1])
        row.output_bytes = self.tokens * sizes[2]
        row.batch = self.batch
        return row

    def mlp_half(self, index: int) -> list[Row]:
        """Behind the attention."""
        rows = [self.layer(name, index) for name in self.generator.after]
        if self.generator.is_moe:
            return rows + self.experts(index)
        return rows + [self.layer(name, index) for name in self.generator.mlp]

    def experts(self, index: int) -> list[Row]:
        """Dispatch, the experts of each local rank, combine."""
        setup, model = self.setup, self.setup.model
        assert self.generator.gate is not None
        routing = self.generator.gate.route(max(1, self.tokens), 0)
        dispatch = combine = "NONE"
        dispatch_bytes = combine_bytes = 0
        if setup.expert > 1:
            dispatch, combine = "ALLGATHER", "REDUCESCATTER"
            share = max(1, self.tokens // setup.expert)
            dispatch_bytes = share * (model.hidden + model.experts) * model.element_bytes
            combine_bytes = self.tokens * model.hidden * model.element_bytes
        rows: list[Row] = []
        for rank in range(setup.local_experts):
            marker = Row("EXPERT", marker=Marker.EXPERT, index=rank, involved=setup.expert_dims)
            marker.comm, marker.comm_bytes = dispatch, dispatch_bytes
            rows.append(marker)
            if not routing.rank_tokens[rank]:
                continue
            for name in self.generator.mlp:
                row = self.layer_without_time(name)
                row.weight_place = setup.placement.of(name, index)
                row.comp_ns = self.generator.times.expert_ns(
                    routing.rank_tokens[rank], max(1, routing.rank_experts[rank]), self.tokens
                )
                rows.append(row)
        end = Row("EXPERT", marker=Marker.EXPERT_END, involved=setup.expert_dims)
        end.comm, end.comm_bytes = combine, combine_bytes
        rows.append(end)
        return rows
