"""Dispatch of tokens to the ranks of their experts, and combination of the results.

Owns what each library moves and how fast, for one layer and the tokens of one rank:

- DeepEP, normal kernels (prompts): a token goes once to each node over the NIC, and once to each
  rank over NVLink. The slower of both counts.
- DeepEP, low-latency kernels (decodes): a copy for each of the token's experts, its own rank's
  included, at a rate that falls with the number of ranks.
- One-sided copies inside one NVLink domain (GB200 NVL72): once to each rank.

Tokens are dispatched in the type that experts compute in, with its scales, and combined in 16 bits.
The figures are published measurements, named beside them. They are stated for 50 GB/s of network
and some NVLink, and scale with the links at hand. Times are seconds; pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from emu.latency.experts.destinations import Choice, destinations

_NIC: Final = 50e9
"""Bytes a second of the network in the tables of DeepEP (400 Gbit/s for each GPU)."""
_H800_NVLINK: Final = 200e9
"""The same of NVLink, one way (H800)."""
_GB200_NVLINK: Final = 900e9
# DeepEP V1, normal kernels, 4,096 tokens, 4 of 8 groups (docs/legacy.md). Rates there count the
# tokens of the own node: less those, EP 32 and 64 reach this part of the NIC; EP 8 this of NVLink.
_NORMAL_NIC: Final = (0.882, 0.865)
_NORMAL_NVLINK: Final = (153 / 200, 158 / 200)
NORMAL_PROCESSORS: Final = 24
"""Streaming multiprocessors that the normal kernels hold (DeepSeek's prefill)."""
# DeepEP V1, low-latency kernels, 128 tokens, 8 experts each, fp8 out, bf16 back (docs/legacy.md):
# ranks -> GB/s of all copies, own rank included.
_LOW_LATENCY: Final = (
    (8, 98.0, 127.0),
    (16, 63.0, 74.0),
    (32, 48.0, 53.0),
    (64, 43.0, 46.0),
    (128, 39.0, 39.0),
    (256, 39.0, 40.0),
)
_LEAST_NIC_S: Final = 35e-6
_LEAST_NVLINK_S: Final = 15e-6
"""A low-latency kernel without bytes. Over the network: 30 to 40 us (Perplexity's and SGLang's
remarks, not a table); over NVLink: TensorRT-LLM's first row without its launch."""
# TensorRT-LLM, one-sided all-to-all on GB200 (tech blog 18): us for 1, 32 .. 2,048 tokens of a rank
# in bf16, H 7,168, 8 experts; ranks -> dispatch, combine.
_ONE_SIDED_TOKENS: Final = (1, 32, 64, 128, 256, 512, 1024, 2048)
_ONE_SIDED_BYTES: Final = 8 * 14_336
_ONE_SIDED: Final = (
    (8, (19, 18, 22, 32, 51, 90, 166, 312), (31, 33, 34, 38, 53, 92, 176, 323)),
    (32, (20, 21, 26, 38, 62, 110, 198, 374), (31, 35, 36, 41, 60, 103, 198, 370)),
    (64, (28, 23, 29, 42, 65, 116, 209, 399), (33, 36, 38, 45, 63, 107, 199, 372)),
)


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks exchange, and over which links."""

    choice: Choice
    ranks: int
    ranks_per_node: int
    """Ranks that NVLink joins."""
    dispatch_bytes: float
    """Of one token, scales and header included."""
    combine_bytes: float
    nvlink_bytes_per_s: float
    nic_bytes_per_s: float
    is_apart: bool = False
    """Experts are on other machines than the tokens: nothing stays on a rank or a machine."""

    @property
    def nodes(self) -> int:
        """Machines, or NVLink domains."""
        return -(-self.ranks // self.ranks_per_node)


class Exchange(Protocol):
    """What a rank's tokens take to reach their experts, and to come back."""

    processors: int
    """Streaming multiprocessors that it holds while it runs."""
    row_bytes: float
    """Memory traffic of sorting a row by expert, and of bringing its result back to its token."""

    def times_s(self, tokens: float, skew: float) -> tuple[float, float]:
        """Dispatch and combination. `skew`: rows of the busiest rank beside the mean."""
        ...


def token_bytes(hidden: int, dtype: str) -> float:
    """Bytes of one token as it is dispatched: values in the type of experts, scales, header."""
    if dtype in ("fp8", "fp8_block", "int8", "mxfp4"):
        return hidden * (1.0 + 4.0 / 128.0) + _HEADER
    if dtype == "nvfp4":
        return hidden * (0.5 + 1.0 / 16.0) + _HEADER
    return 2.0 * hidden + _HEADER


_HEADER: Final = 32.0
"""Source, experts and weights of a token: 16 to 64 bytes by library."""


class Normal:
    """DeepEP's normal kernels."""

    processors = NORMAL_PROCESSORS

    def __init__(self, wire: Wire) -> None:
        nodes, ranks = wire.nodes, wire.ranks
        # A token that has arrived is copied to each of its experts here, and their results are
        # read, summed and written (what engines call scatter and gather).
        tokens_of_row = destinations(wire.choice, ranks) / wire.choice.per_token
        self.row_bytes = 2.0 * wire.dispatch_bytes + (1.0 + tokens_of_row) * wire.combine_bytes
        remote = destinations(wire.choice, nodes)
        if not wire.is_apart:
            remote *= 1.0 - 1.0 / nodes
        near = destinations(wire.choice, ranks)
        self._token_s = tuple(
            max(
                remote * size / (wire.nic_bytes_per_s * nic),
                near * size / (wire.nvlink_bytes_per_s * nvlink),
            )
            for size, nic, nvlink in zip(
                (wire.dispatch_bytes, wire.combine_bytes), _NORMAL_NIC, _NORMAL_NVLINK, strict=True
            )
        )

    def times_s(self, tokens: float, skew: float) -> tuple[float, float]:
        """Bandwidth alone: batches of prompts are large."""
        out_s, back_s = self._token_s
        return tokens * skew * out_s, tokens * skew * back_s


class LowLatency:
    """DeepEP's low-latency kernels, which compute nothing while bytes are under way."""

    processors = 0
    row_bytes = 0.0  # rows arrive sorted by expert, and the combination sums them

    def __init__(self, wire: Wire) -> None:
        self._copies = wire.choice.per_token
        self._sizes = (wire.dispatch_bytes, wire.combine_bytes)
        is_near = wire.nodes == 1 and not wire.is_apart
        scale = wire.nvlink_bytes_per_s / _H800_NVLINK if is_near else wire.nic_bytes_per_s / _NIC
        ranks = 1 if is_near else wire.ranks  # NVLink carries no less to more ranks
        out, back = (_between(_LOW_LATENCY, ranks, side) for side in (1, 2))
        self._rates = (out * 1e9 * scale, back * 1e9 * scale)
        self._least_s = _LEAST_NVLINK_S if is_near else _LEAST_NIC_S

    def times_s(self, tokens: float, skew: float) -> tuple[float, float]:
        """The longer of a message's latency and its bytes."""
        copies = tokens * skew * self._copies
        out_s, back_s = (
            max(self._least_s, copies * size / rate)
            for size, rate in zip(self._sizes, self._rates, strict=True)
        )
        return out_s, back_s


class OneSided:
    """One-sided copies inside an NVLink domain: once to each rank of a token's experts."""

    processors = 0
    row_bytes = 0.0  # rows arrive sorted by expert, and the combination sums them

    def __init__(self, wire: Wire) -> None:
        self._sizes = (wire.dispatch_bytes, wire.combine_bytes)
        # The table counts min(ranks, k) copies, all that a router without groups may send.
        self._copies = min(wire.ranks, wire.choice.per_token)
        self._scale = wire.nvlink_bytes_per_s / _GB200_NVLINK
        self._ranks = wire.ranks

    def times_s(self, tokens: float, skew: float) -> tuple[float, float]:
        """Times by the bytes that a rank sends, between the rows of the table."""
        out_s, back_s = (
            self._side_s(tokens * skew * self._copies * size, side)
            for side, size in enumerate(self._sizes)
        )
        return out_s, back_s

    def _side_s(self, moved: float, side: int) -> float:
        tokens = moved / _ONE_SIDED_BYTES / self._scale
        rows = [(ranks, _at(curves[side], tokens)) for ranks, *curves in _ONE_SIDED]
        return 1e-6 * _between(rows, self._ranks, 1)


def _at(times_us: Sequence[float], tokens: float) -> float:
    """Between two rows of the one-sided table, and beyond it at its last rate."""
    known = _ONE_SIDED_TOKENS
    if tokens <= known[0]:
        return float(times_us[0])
    at = next((i for i, count in enumerate(known) if count >= tokens), len(known) - 1)
    low, high = known[at - 1], known[at]
    slope = (times_us[at] - times_us[at - 1]) / (high - low)
    return times_us[at - 1] + slope * (tokens - low)


def _between(rows: Sequence[Sequence[float]], ranks: int, column: int) -> float:
    """A column of a table by ranks, evenly in their logarithm, flat beyond its ends."""
    if ranks <= rows[0][0]:
        return rows[0][column]
    for low, high in itertools.pairwise(rows):
        if ranks <= high[0]:
            part = math.log(ranks / low[0]) / math.log(high[0] / low[0])
            return low[column] + part * (high[column] - low[column])
    return rows[-1][column]
