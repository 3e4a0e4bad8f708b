"""Decode attention in memory (PIM): devices, and how long a layer's attention takes there.

Owns the figures of a memory with attention units and the linear model of it: one request on one
channel takes (slope x tokens + intercept) / split, where `split` = min(channels, KV heads) pieces
of a request run side by side. Pieces go to the least loaded channels, longest first, so a layer
takes as long as the longest request or as all work spread over the channels, whichever is more.

The length that counts is the tokens whose KV exists. LLMServingSim takes the length of the prompt
and never adds the output (LLMServingSim 2.0, defect 8).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from emu.catalogue.model import ModelSpec
from emu.errors import InputError


class PimDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of memory."""

    channel_gib: float
    idle_w: float
    """Of one channel."""
    peak_w: float
    slope_ns: float
    """For each token, with 4 query heads to a KV head."""
    intercept_ns: float
    """For 4096 query elements."""


DEVICES: Final = {
    "DDR4_8GB_3200": PimDevice(
        channel_gib=8, idle_w=0.623, peak_w=3.803, slope_ns=333.2538, intercept_ns=30675.2739
    ),
    "HBM2_1GB_2000": PimDevice(
        channel_gib=1, idle_w=0.16, peak_w=0.76, slope_ns=242.0548, intercept_ns=14513.5015
    ),
    "LPDDR4X_2GB_4266": PimDevice(
        channel_gib=2, idle_w=0.07, peak_w=0.771, slope_ns=432.4458, intercept_ns=33918.1734
    ),
    "LPDDR5_2GB_6400": PimDevice(
        channel_gib=2, idle_w=0.071, peak_w=0.877, slope_ns=282.4338, intercept_ns=15996.7018
    ),
}
"""Published figures and fits (LLMServingSim 2.0)."""


def pim_device(name: str, source: str, key: str) -> PimDevice:
    """A device by name, or from an INI file that is named after one. Raises InputError."""
    stem = Path(name).stem.removesuffix("_pim")
    known = DEVICES.get(stem)
    if known is None:
        problem = f"no attention figures for {stem!r}; known: {', '.join(DEVICES)}"
        raise InputError(source, None, key, problem)
    return _read_ini(Path(name), known) if name.endswith(".ini") else known


def _read_ini(path: Path, known: PimDevice) -> PimDevice:
    """Capacity and power from a DRAM simulator's file; the fit stays that of the name."""
    file = DramFile(path)
    return msgspec.structs.replace(
        known,
        channel_gib=file.channel_gib(),
        idle_w=file.number("other", "idle_power") / 1000,
        peak_w=file.number("other", "peak_power") / 1000,
    )


class DramFile:
    """A memory's description in INI, as DRAM simulators use them. Raises InputError."""

    def __init__(self, path: Path) -> None:
        import configparser  # no other run needs it

        self._source = str(path)
        self._parser = configparser.ConfigParser(inline_comment_prefixes=("#", ";"))
        try:
            self._parser.read_string(path.read_text(encoding="utf-8"), source=self._source)
        except OSError as error:
            raise InputError(self._source, None, "", error.strerror or str(error)) from None
        except UnicodeDecodeError as error:
            raise InputError(self._source, None, "", str(error)) from None
        except configparser.Error as error:
            raise InputError(self._source, None, "", str(error).splitlines()[0]) from None

    def number(self, section: str, key: str) -> float:
        """A number of the file."""
        try:
            return float(self._parser[section][key])
        except KeyError:
            raise InputError(self._source, None, f"{section}.{key}", "missing") from None
        except ValueError:
            raise InputError(self._source, None, f"{section}.{key}", "not a number") from None

    def channel_gib(self) -> float:
        """Memory of one channel."""
        width, bus = self._size("dram_structure", "device_width"), self._size("system", "bus_width")
        page_bytes = self._size("dram_structure", "columns") * width / 8
        bank_mib = page_bytes * self._size("dram_structure", "rows") / 2**20
        banks = self._size("dram_structure", "bankgroups")
        banks *= self._size("dram_structure", "banks_per_group")
        rank_mib = bank_mib * banks * (bus / width)
        ranks = max(1.0, self._size("system", "channel_size") // rank_mib)
        return ranks * rank_mib / 1024

    def _size(self, section: str, key: str) -> float:
        size = self.number(section, key)
        if not size > 0:
            raise InputError(self._source, None, f"{section}.{key}", "expected a number above 0")
        return size


class PimAttention:
    """Decode attention of one kind of replica in the memory of its machine."""

    def __init__(self, device: PimDevice, memory_gib: float, model: ModelSpec) -> None:
        self.channels = max(1, int(memory_gib // device.channel_gib))
        self.split = min(self.channels, model.kv_heads)
        self._slope = device.slope_ns * (model.heads / model.kv_heads) / 4
        self._intercept = device.intercept_ns * model.heads * model.head_dim / 4096

    def piece_ns(self, tokens: int) -> int:
        """One piece of one request."""
        return int((self._slope * tokens + self._intercept) / self.split)

    def layer_ns(self, count: int, context_sum: int, context_max: int) -> int:
        """One layer's attention of `count` decodes. `context_sum` counts their tokens."""
        if not count:
            return 0
        work = self._slope * context_sum + self._intercept * count
        return max(self.piece_ns(context_max), int(work / self.channels))

    def work_ns(self, count: int, context_sum: int) -> int:
        """Time of all channels together, for energy. `context_sum` counts the decodes' tokens."""
        return int(self._slope * context_sum + self._intercept * count)
