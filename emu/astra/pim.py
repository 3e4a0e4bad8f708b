"""Attention in memory (PIM): device figures, time of a request's pieces, and their channels.

Owns the figures that follow from a memory device's description (INI, as DRAM simulators use
them), the linear model of attention in memory, and the distribution of requests over channels.
Source: LLMServingSim 2.0.
"""

from __future__ import annotations

import configparser
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.astra.memory import Memory
from emu.astra.nodes import Location, Place
from emu.astra.trace import Marker, Row, TraceModel
from emu.errors import InputError

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
