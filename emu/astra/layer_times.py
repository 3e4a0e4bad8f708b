"""Where the compute times of a trace's rows come from.

Owns the protocol that the trace generator asks, and its adapter to measured bundles. A source is
pure; times are integer ns of one rank. Rules of the bundle look-ups:
LLMServingSim 2.0.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.astra.inputs import Memory
from emu.astra.trace import Location, Marker, Place, Row, TraceModel
from emu.catalogue.model import ModelSpec
from emu.errors import InputError
from emu.latency.base import BatchShape
from emu.latency.profile_bundle import Bundle
from emu.latency.roofline import RooflineBackend


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

ATTENTION_LINES: Final = {
    "DDR4_8GB_3200": (333.2538, 30675.2739),
    "HBM2_1GB_2000": (242.0548, 14513.5015),
    "LPDDR4X_2GB_4266": (432.4458, 33918.1734),
    "LPDDR5_2GB_6400": (282.4338, 15996.7018),
}
"""(ns per prompt token, ns) of one request on one channel, by device; published fits."""


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
    """Read an INI file, named after a device of `ATTENTION_LINES`. Raises InputError."""
    name = path.stem.removesuffix("_pim")
    if name not in ATTENTION_LINES:
        problem = f"no attention figures for {name!r}; known: {', '.join(ATTENTION_LINES)}"
        raise InputError(str(path), None, "", problem)
    slope, intercept = ATTENTION_LINES[name]
    parser = configparser.ConfigParser(inline_comment_prefixes=("#", ";"))
    try:
        parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
    except OSError as error:
        raise InputError(str(path), None, "", error.strerror or str(error)) from None
    except configparser.Error as error:
        raise InputError(str(path), None, "", str(error).splitlines()[0]) from None

    def get(section: str, key: str) -> float:
        try:
            return float(parser[section][key])
        except KeyError:
            raise InputError(str(path), None, f"{section}.{key}", "missing") from None
        except ValueError:
            raise InputError(str(path), None, f"{section}.{key}", "not a number") from None

    width, bus = get("dram_structure", "device_width"), get("system", "bus_width")
    page_bytes = get("dram_structure", "columns") * width / 8
    bank_mib = page_bytes * get("dram_structure", "rows") / 2**20
    banks = get("dram_structure", "bankgroups") * get("dram_structure", "banks_per_group")
    rank_mib = bank_mib * banks * (bus / width)
    ranks = max(1, get("system", "channel_size") // rank_mib)
    return PimDevice(
        channel_gib=ranks * rank_mib / 1024,
        bus_bits=int(bus),
        megatransfers_per_s=get("other", "data_rate"),
        latency_ns=get("timing", "CL") * get("timing", "tCK"),
        slope_ns=slope,
        intercept_ns=intercept,
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
