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
_GB200_NVLINK: Final = 900e9
# DeepEP V1, normal kernels, 4,096 tokens, 4 of 8 groups (docs/legacy.md). Rates there count the
# tokens of the own node: less those, EP 32 and 64 reach this part of the NIC.
_NORMAL_NIC: Final = (0.882, 0.865)
NORMAL_PROCESSORS: Final = 24
"""Streaming multiprocessors that the normal kernels hold (DeepSeek's prefill)."""
# Over NVLink: GB/s of the link, one way -> GB/s of the tokens of all ranks, own included. H800:
# docs/legacy.md; H200 (8 ranks) and GB200 (4): the tables of SGLang's wide groups in
# aiconfigurator-core 0.12.0, 16,384 tokens. So many processors do not fill a faster link.
_NORMAL_NEAR: Final = ((200.0, 153.0, 158.0), (450.0, 251.0, 263.0), (900.0, 338.0, 390.0))
# DeepEP V1, low-latency kernels, 128 tokens, 8 experts each, fp8 out, bf16 back (docs/legacy.md):
# ranks -> us. Over the network a kernel without bytes takes what `_LEAST_NIC_S` says, the mean of
# 2 to 8 machines of H200 (the tables of SGLang's wide groups in aiconfigurator-core 0.12.0); the
# rest is bytes.
_LOW_LATENCY: Final = (
    (16, 118.0, 195.0),
    (32, 155.0, 273.0),
    (64, 173.0, 314.0),
    (128, 192.0, 369.0),
    (256, 194.0, 360.0),
)
_LEAST_NIC_S: Final = (25e-6, 30e-6)
_TABLE_SKEW: Final = 1.0 + 2.4 / math.sqrt(128 * 8)
"""Rows of the busiest rank beside the mean in that table: DeepEP's test draws experts at random, of
32 to 128 normal variables the largest is 2.1 to 2.6 deviations above the mean."""
# The same over NVLink: GB/s of the link, one way -> GB/s of the copies that leave the rank, and us
# without bytes. H800: docs/legacy.md, 8 ranks. H200 (8) and GB200 (4): the same wide tables, 1,024
# tokens; the combination of Hopper does not fill a faster link.
_LOW_LATENCY_NEAR: Final = ((200.0, 107.0, 129.0), (450.0, 266.0, 220.0), (900.0, 471.0, 587.0))
_LEAST_NVLINK_S: Final = ((200.0, 15.0, 15.0), (450.0, 12.0, 13.0), (900.0, 17.0, 18.0))
_COPIES: Final = (128 * 8 * 7_392.0, 128 * 8 * 14_336.0)
"""Bytes of DeepEP's table, out and back."""
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
        near_rates = _near(_NORMAL_NEAR, wire.nvlink_bytes_per_s / 1e9)
        self._token_s = tuple(
            max(
                remote * size / (wire.nic_bytes_per_s * nic),
                near * size / nvlink,
            )
            for size, nic, nvlink in zip(
                (wire.dispatch_bytes, wire.combine_bytes), _NORMAL_NIC, near_rates, strict=True
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
        copies = wire.choice.per_token
        sizes = (copies * wire.dispatch_bytes, copies * wire.combine_bytes)
        self._is_near = wire.nodes == 1 and not wire.is_apart
        if self._is_near:
            link = wire.nvlink_bytes_per_s / 1e9  # it carries no less to more ranks
            self._least_s = _pair(_LEAST_NVLINK_S, link, 1e-6)
            rates = _near(_LOW_LATENCY_NEAR, link)
            leaving = 1.0 - 1.0 / wire.ranks
            sizes = (leaving * sizes[0], leaving * sizes[1])
        else:
            self._least_s = _LEAST_NIC_S
            scale = wire.nic_bytes_per_s / _NIC
            out_s, back_s = _pair(_LOW_LATENCY, wire.ranks, 1e-6)
            rates = (
                scale * _COPIES[0] / (out_s - _LEAST_NIC_S[0]),
                scale * _COPIES[1] / (back_s - _LEAST_NIC_S[1]),
            )
        self._token_s = (sizes[0] / rates[0], sizes[1] / rates[1])

    def times_s(self, tokens: float, skew: float) -> tuple[float, float]:
        """A message's latency and its bytes.

        Over NVLink the processors that send set the pace of the dispatch, and each rank sends as
        many: in the traces of SGLang's 48 GB200 (`emu/config/tables/experts.py`) it takes 162 us
        with placed experts and 166 without.
        """
        busiest = skew if self._is_near else max(1.0, skew / _TABLE_SKEW)
        out = 1.0 if self._is_near else busiest
        return (
            self._least_s[0] + tokens * out * self._token_s[0],
            self._least_s[1] + tokens * busiest * self._token_s[1],
        )


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


def _pair(rows: Sequence[Sequence[float]], at: float, unit: float) -> tuple[float, float]:
    """Both ways."""
    return _between(rows, at, 1) * unit, _between(rows, at, 2) * unit


def _near(rows: Sequence[Sequence[float]], link: float) -> tuple[float, float]:
    """Bytes a second both ways over NVLink of so many GB/s; in proportion beyond the table."""
    beyond = link / min(max(link, rows[0][0]), rows[-1][0])
    return _pair(rows, link, 1e9 * beyond)


def _between(rows: Sequence[Sequence[float]], at: float, column: int) -> float:
    """A column of a table by its first, evenly in its logarithm, flat beyond its ends."""
    if at <= rows[0][0]:
        return rows[0][column]
    for low, high in itertools.pairwise(rows):
        if at <= high[0]:
            part = math.log(at / low[0]) / math.log(high[0] / low[0])
            return low[column] + part * (high[column] - low[column])
    return rows[-1][column]
