"""Attention in memory (PIM): device figures, time of a request's pieces, and their channels.

Owns the figures that follow from a memory device's description (INI, as DRAM simulators use
them), the linear model of attention in memory, and the distribution of requests over channels.
Source: LLMServingSim 2.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from emu.backends.astra.graph import Location, Place
from emu.backends.astra.memories import Memory
from emu.backends.astra.trace import Marker, Row, TraceModel
from emu.latency.offload.pim import DramFile, pim_device


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
