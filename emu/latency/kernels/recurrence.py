"""The gated delta rule over prompts, in its chunked form: half a dozen kernels of one layer.

Their launches, work for each token and channel, and a chain through the chunks of a sequence, which
the longest prompt of a batch makes the longest. Fitted to SGLang 0.5.14's `chunk_gated_delta_rule`
on H200 and B200 (aiconfigurator-core 0.12.0, gdn: 4 to 64 heads of 128 channels, 1 to 8 prompts of
64 to 16,384 tokens in all, 540 points each: median 12 and 5 %). H100 was left out (540 points,
10 %), and so was GB200 (8 %).
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Chunks(NamedTuple):
    """What the kernels of an architecture take."""

    launch_us: float
    channel_ps: float
    """For each token and channel of the values."""
    chain_ns: float
    """For each token of the longest prompt."""


_HOPPER: Final = Chunks(launch_us=31.7, channel_ps=17.1, chain_ns=16.4)
_CHUNKS: Final = {"blackwell": Chunks(launch_us=36.1, channel_ps=10.6, chain_ns=23.1)}
"""Other architectures take Hopper's."""


def chunked_s(architecture: str, tokens: int, longest: int, channels: int) -> float:
    """Seconds of a layer for prompts of so many tokens in all; `longest`: of one of them."""
    kernel = _CHUNKS.get(architecture, _HOPPER)
    work_s = tokens * channels * kernel.channel_ps * 1e-12
    return kernel.launch_us * 1e-6 + work_s + longest * kernel.chain_ns * 1e-9
