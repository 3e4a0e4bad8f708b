"""From a batch to the rows of its trace: which layers run, on how many bytes, with which messages.

Owns the order of rows, tensor sizes, where collectives hang, the expert and PIM sections, the
placement of weights, and where the compute times of rows come from. One generator serves one kind
of replica. Does not own: the graphs (`trace.py`), which requests are in the batch.
Source: LLMServingSim 2.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.backends.astra.inputs import Memory
from emu.backends.astra.trace import (
    LOCAL,
    Location,
    Marker,
    Place,
    Row,
    Trace,
    TraceKind,
    TraceModel,
)
from emu.catalogue.model import ModelSpec
from emu.errors import InputError
from emu.latency.base import BatchShape
from emu.latency.moe_gate import Gate
from emu.latency.offload import DramFile, pim_device
from emu.latency.profile_bundle import Bundle
from emu.latency.roofline import RooflineBackend

# --------------------------------------------------------------------------------------------------
# Where the compute times of rows come from: a protocol, measured bundles, the roofline, PIM. A
# source is pure; times are integer ns of one rank.


class LayerTimes(Protocol):
    """Times of single layers."""

    @property
    def sections(self) -> Mapping[str, Sequence[str]]:
        """Layer names in order: prologue, pre_attn, post_attn, mlp_dense, mlp_moe, head."""
        ...

    def layer_ns(self, layer: str, tokens: int, logits: int) -> int:
        """A layer whose time follows from counts. 0 = this layer takes no time here."""
        ...

    def attention_ns(self, shape: BatchShape) -> int:
        """The attention of one layer; 0 if the batch has nothing for it."""
        ...

    def expert_ns(self, tokens: int, activated: int, batch_tokens: int) -> int:
        """The experts of one rank: tokens that come to it, experts of it that are used.

        `batch_tokens` are those of the whole batch, for sources that route by themselves.
        `activated` is the number of these experts.
        """
        ...


def counts(shape: BatchShape) -> tuple[int, int]:
    """(tokens, rows of logits) of a step, padded to the group's largest member.

    Every request makes a row of logits, even in the middle of its prompt; padding counts as so
    many decodes.
    """
    tokens = shape.new_tokens
    pad = max(0, shape.padded_tokens - tokens)
    items = len(shape.prefill_new) + shape.decode_count + pad
    return tokens + pad, max(shape.sequences, items)


class BundleTimes:
    """Measured layer times of one bundle and tensor-parallel degree."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.sections = bundle.architecture.sections
        self._counted: dict[tuple[str, int], int] = {}

    def layer_ns(self, layer: str, tokens: int, logits: int) -> int:
        """Look a layer up by tokens, or by rows of logits where the bundle says so."""
        bundle = self.bundle
        by_logits = bundle.architecture.category[layer] == "per_sequence"
        count = max(1, logits if by_logits else tokens)
        key = (layer, count)
        cost = self._counted.get(key)
        if cost is None:
            curve = (bundle.per_sequence if by_logits else bundle.dense)[layer]
            cost = self._counted[key] = curve.at(count)
        return cost

    def attention_ns(self, shape: BatchShape) -> int:
        """All prompts merged into one chunk, decodes at their mean history, corrected for skew."""
        table, decodes = self.bundle.attention, shape.decode_count
        new, context = sum(shape.prefill_new), sum(shape.prefill_context)
        if decodes == 0:
            return table.at(new, context, 0, 0) if new else 0
        mean, longest = shape.decode_context_sum // decodes, shape.decode_context_max
        at_mean = table.at(new, context, decodes, mean)
        skew = self.bundle.skew
        if skew is None or decodes == 1 or longest == mean:
            return at_mean
        shortest = shape.decode_context_min
        rate = min(1.0, max(0.0, (mean - shortest) / (longest - shortest)))
        alpha = skew.alpha(new, decodes, rate, longest, context)
        if alpha == 0:
            return at_mean
        at_longest = table.at(new, context, decodes, longest)
        if at_longest <= at_mean:
            return at_mean
        return max(1, round(at_mean + alpha * (at_longest - at_mean)))

    def expert_ns(self, tokens: int, activated: int, batch_tokens: int) -> int:
        """The expert table. Raises InputError if the bundle has none."""
        experts = self.bundle.experts
        if experts is None:
            raise InputError(self.bundle.directory, None, "moe.csv", "the bundle has no experts")
        return experts.at(max(1, tokens), max(1, activated))


# --------------------------------------------------------------------------------------------------
# Layer times for traces from the roofline: any model on any GPU.
#
# Owns the split of the roofline's sums, which are by component, into the rows of a trace: dense
# work by the weights of each matrix, all layers alike (a mixed model's layers carry the mean).


class RooflineTimes:
    """`LayerTimes` of a roofline that was built without collectives, host time and stages."""

    def __init__(self, backend: RooflineBackend, spec: ModelSpec) -> None:
        self._backend = backend
        self._layers = spec.layers
        is_moe = spec.experts is not None
        self._sections: dict[str, tuple[str, ...]] = {
            "prologue": ("embedding",),
            "pre_attn": ("layernorm", "qkv_proj", "rotary_emb", "attention"),
            "post_attn": ("o_proj",),
            "mlp_dense": () if is_moe else ("gate_up_proj", "down_proj"),
            "mlp_moe": ("moe",) if is_moe else (),
            "head": ("final_layernorm", "lm_head", "sampler"),
        }
        query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shares = {"qkv_proj": query + 2 * key, "o_proj": query}
        if not is_moe:
            shares |= {"gate_up_proj": 2 * spec.ffn, "down_proj": spec.ffn}
        self._shares = shares
        self._known: dict[tuple[int, int], dict[str, int]] = {}

    @property
    def sections(self) -> Mapping[str, Sequence[str]]:
        """Layer names in order."""
        return self._sections

    def _components(self, tokens: int, logits: int) -> dict[str, int]:
        key = (tokens, logits)
        found = self._known.get(key)
        if found is None:
            shape = BatchShape(prefill_new=[tokens], prefill_context=[0], sequences=logits)
            found = self._known[key] = self._backend.components_ns(shape)
        return found

    def layer_ns(self, layer: str, tokens: int, logits: int) -> int:
        """A layer's part of its component."""
        parts = self._components(tokens, logits)
        if layer in ("embedding", "lm_head", "sampler"):
            return parts[layer]
        if layer == "layernorm":
            return parts["norm"] // self._layers
        if layer == "final_layernorm":
            # What the division among the layers left over.
            return parts["norm"] % self._layers
        if layer == "rotary_emb":
            return parts["rotary"] // self._layers
        dense = parts["dense"] // self._layers
        total = sum(self._shares.values())
        before = 0
        for name, share in self._shares.items():
            if name == layer:
                return dense * (before + share) // total - dense * before // total
            before += share
        return 0

    def attention_ns(self, shape: BatchShape) -> int:
        """One layer's attention."""
        return self._backend.attention_ns(shape) // self._layers

    def attention_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """The same for each of so many decode iterations in a row."""
        found: NDArray[np.int64] = self._backend.attention_run_ns(shape, steps) // self._layers
        return found

    def expert_ns(self, tokens: int, activated: int, batch_tokens: int) -> int:
        """One layer's experts on one rank; the roofline spreads the batch evenly by itself."""
        return self._components(max(1, batch_tokens), 1)["moe"] // self._layers


# --------------------------------------------------------------------------------------------------
# Attention in memory (PIM): device figures, time of a request's pieces, and their channels.
#
# Owns the figures that follow from a memory device's description (INI, as DRAM simulators use
# them), the linear model of attention in memory, and the distribution of requests over channels.
# Source: LLMServingSim 2.0.


class Member(msgspec.Struct, frozen=True):
    """A request in a batch, as far as PIM needs it."""

    prompt_tokens: int
    arrival_ns: int
    new_tokens: int
    context_tokens: int
    is_prefilling: bool


class PimDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A memory with attention units."""

    channel_gib: float
    bus_bits: int
    megatransfers_per_s: float
    latency_ns: float
    slope_ns: float
    """Per token of the prompt, for 4 query heads per KV head."""
    intercept_ns: float
    """For 4096 query elements."""

    def channels(self, memory_gib: float) -> int:
        """Channels that make up so much memory."""
        return int(memory_gib // self.channel_gib)

    def memory(self, memory_gib: float, devices: int) -> Memory:
        """The host memory made of these channels."""
        channels = self.channels(memory_gib)
        rate = channels * self.bus_bits / 8 * self.megatransfers_per_s / 1000
        return Memory(
            memory_type="PER_NODE_MEMORY_EXPANSION",
            gbytes_per_s=rate,
            latency_ns=self.latency_ns,
            devices=devices,
            pim_channels=channels,
        )


def read_pim_device(path: Path) -> PimDevice:
    """Read an INI file that is named after a device of `DEVICES`. Raises InputError."""
    fit = pim_device(path.stem, str(path), "")
    file = DramFile(path)
    return PimDevice(
        channel_gib=file.channel_gib(),
        bus_bits=int(file.number("system", "bus_width")),
        megatransfers_per_s=file.number("other", "data_rate"),
        latency_ns=file.number("timing", "CL") * file.number("timing", "tCK"),
        slope_ns=fit.slope_ns,
        intercept_ns=fit.intercept_ns,
    )


class PimAttention:
    """Makes the PIM rows of a batch for one kind of replica."""

    def __init__(self, device: PimDevice, channels: int, model: TraceModel, tensor: int) -> None:
        self.channels = channels
        self.split = min(channels, model.kv_heads)
        self._slope = device.slope_ns * (model.heads / model.kv_heads) / 4
        self._intercept = device.intercept_ns * model.heads * model.head_dim / 4096
        heads, kv_heads = model.heads // tensor, model.kv_heads // tensor
        size = model.head_dim * model.element_bytes
        self._input_bytes = (heads + 2 * kv_heads) * size // self.split
        self._output_bytes = heads * size // self.split

    def piece_ns(self, prompt_tokens: int) -> int:
        """One piece of one request. The length is that of its prompt, as in the original."""
        return int((self._slope * prompt_tokens + self._intercept) / self.split)

    def rows(self, members: Sequence[Member], node: int, batch: int = 0) -> list[Row]:
        """The PIM section: rows of all members whose prompt is complete, by channel."""
        load = [0] * self.channels
        pieces: list[list[Row]] = [[] for _ in range(self.channels)]
        decoding = [m for m in members if not m.is_prefilling]
        for member in sorted(decoding, key=lambda m: -m.prompt_tokens):
            cost = self.piece_ns(member.prompt_tokens)
            for _ in range(self.split):
                channel = load.index(min(load))
                load[channel] += member.prompt_tokens
                place = Place(Location.REMOTE, node, channel)
                row = Row("attention", cost, place, self._input_bytes)
                row.output_bytes = self._output_bytes
                row.batch = batch
                pieces[channel].append(row)
        rows: list[Row] = []
        for channel, own in enumerate(pieces):
            if own:
                rows.append(Row("PIM", marker=Marker.PIM, index=channel))
                rows += own
        rows.append(Row("PIM", marker=Marker.PIM_END))
        return rows


# --------------------------------------------------------------------------------------------------
# The rows of a batch


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
        self._gate = gate
        model = setup.model
        self._is_moe = model.experts > 0
        assert not self._is_moe or gate is not None
        sections = times.sections
        self._before = [n for n in sections["pre_attn"] if n not in setup.skipped_layers]
        self._after = [*sections["post_attn"]]
        self._mlp = [*sections["mlp_moe" if self._is_moe else "mlp_dense"]]
        self._sizes = _Sizes(setup)

    # --- traces -----------------------------------------------------------------------------
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
        self.g = generator
        self.setup = generator.setup
        self.shape = shape
        self.members = members
        self.batch = batch
        self.tokens, self.logits = counts(shape)

    def layer(self, name: str, block: int = -1) -> Row:
        """A row whose time follows from the token count."""
        tokens = self.tokens
        sizes = self.g._sizes.per_token[name]
        row = Row(
            name,
            self.g.times.layer_ns(name, tokens, self.logits),
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
            row.comm_bytes = self.g._sizes.kv_sent_per_token * tokens // self.setup.tensor
        return row

    def prologue(self) -> list[Row]:
        """Everything before the first block; its input comes from the host."""
        rows = [self.layer(name) for name in self.g.times.sections["prologue"]]
        rows[0].input_place = self.setup.host
        return rows

    def head(self) -> list[Row]:
        """Everything after the last block; its output goes to the host."""
        rows = [self.layer(name) for name in self.g.times.sections["head"]]
        rows[-1].output_place = self.setup.host
        return rows

    def block(self, index: int) -> list[Row]:
        """All rows of one transformer block."""
        return self.attention_half(index) + self.mlp_half(index)

    def attention_half(self, index: int) -> list[Row]:
        """Up to and including the attention."""
        rows: list[Row] = []
        for name in self.g._before:
            if name == "attention":
                rows += self.attention()
            else:
                rows.append(self.layer(name, index))
        return rows

    def attention(self) -> list[Row]:
        """The attention, on the NPU and in memory."""
        shape, rows = self.shape, []
        if self.g.pim is not None:
            rows = self.g.pim.rows(self.members, self.setup.host.device, self.batch)
            shape = BatchShape(prefill_new=shape.prefill_new, prefill_context=shape.prefill_context)
        if not shape.prefill_new and not shape.decode_count:
            return rows
        row = self.layer_without_time("attention")
        row.comp_ns = self.g.times.attention_ns(shape)
        context = sum(shape.prefill_context) + shape.decode_context_sum
        row.input_bytes += self.g._sizes.kv_per_context * context
        rows.append(row)
        return rows

    def layer_without_time(self, name: str) -> Row:
        """Sizes only."""
        sizes = self.g._sizes.per_token[name]
        row = Row(name, input_bytes=self.tokens * sizes[0], weight_bytes=sizes[1])
        row.output_bytes = self.tokens * sizes[2]
        row.batch = self.batch
        return row

    def mlp_half(self, index: int) -> list[Row]:
        """Behind the attention."""
        rows = [self.layer(name, index) for name in self.g._after]
        if self.g._is_moe:
            return rows + self.experts(index)
        return rows + [self.layer(name, index) for name in self.g._mlp]

    def experts(self, index: int) -> list[Row]:
        """Dispatch, the experts of each local rank, combine."""
        setup, model = self.setup, self.setup.model
        assert self.g._gate is not None
        routing = self.g._gate.route(max(1, self.tokens), 0)
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
            for name in self.g._mlp:
                row = self.layer_without_time(name)
                row.weight_place = setup.placement.of(name, index)
                row.comp_ns = self.g.times.expert_ns(
                    routing.rank_tokens[rank], max(1, routing.rank_experts[rank]), self.tokens
                )
                rows.append(row)
        end = Row("EXPERT", marker=Marker.EXPERT_END, involved=setup.expert_dims)
        end.comm, end.comm_bytes = combine, combine_bytes
        rows.append(end)
        return rows
