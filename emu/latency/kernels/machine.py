"""Collectives inside a machine, as engines run them.

A small all-reduce is one kernel that reads the peers' memory: at once (every rank reads all) or
in two shots (reduce-scatter and all-gather in one kernel). A large one is NCCL's. Between more
than two GPUs on PCIe, peers are not reached directly: everything goes through the host, whose
links all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from emu.catalogue.gpu import GpuSpec
from emu.latency.coefficients import Kernels, Links
from emu.latency.kernels.factors import factors_named
from emu.units import NS_PER_S, gbps_to_bytes_per_s

_ONE_SHOT_BYTES: Final = {2: 1 << 62, 4: 512 << 10, 8: 256 << 10}
_HOST_SMALL_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 8 << 20
"""Limit of the engine's own kernel."""
_BOARD_GPUS: Final = {"GB200": 4, "GB300": 4}
"""GPUs of a rack whose memory a peer maps: those of its own board."""
_BEYOND_BOARD_S: Final = 6.5e-6
"""More for a small all-reduce of a rack's ranks on several boards, where no kernel reads the peers'
memory (NCCL, or multicast through the switches). DeepSeek-R1 on GB200, decode servers of eight:
SGLang's 3 rows of 4 to 16 clients miss 8 to 10 us of each, TensorRT-LLM's 5 of 3 to 48 clients -1
to 9. Fitted to both; fitted to one, the median |error| of the other's TPOT falls from 8 to 3 %."""


def collective_s(
    links: Links, *, kind: str, size_bytes: int, ranks: int, bytes_per_s: float, is_pcie: bool
) -> float:
    """One collective; sizes as in `ops.CollectiveNs`. `bytes_per_s` is the link's rate."""
    if ranks <= 1:
        return 0.0
    share = (ranks - 1) / ranks
    extra = ranks - 2
    if is_pcie and ranks > 2:
        rate = bytes_per_s * links.large_rate * links.host_rate
        rate *= (4.0 / ranks) ** links.host_fade
        if size_bytes <= _HOST_SMALL_BYTES:
            rate *= links.host_small
        fixed_us = links.host_rank_us * ranks
    else:
        rate = bytes_per_s * links.large_rate
        fixed_us = links.large_us + links.large_rank_us * extra
    if kind == "all-gather":
        return 0.5e-6 * fixed_us + share * ranks * size_bytes / rate
    if kind == "reduce-scatter":
        return 0.5e-6 * fixed_us + share * size_bytes / rate
    assert kind == "all-reduce"
    large_s = fixed_us * 1e-6 + 2.0 * share * size_bytes / rate
    if size_bytes > _SMALL_BYTES or (is_pcie and ranks > 2):
        return large_s
    limit = _ONE_SHOT_BYTES[2 if ranks == 2 else 4 if ranks <= 4 else 8]
    shots = 1 if size_bytes <= limit else 2
    moved = (ranks - 1) * size_bytes if shots == 1 else 2.0 * share * size_bytes
    fixed_us = links.small_us + links.small_rank_us * extra * shots
    return min(large_s, fixed_us * 1e-6 + moved / (bytes_per_s * links.small_rate))


CollectiveNs = Callable[[str, int, int], int]
"""(kind, bytes, ranks) -> ns. Kinds: all-reduce (bytes of the whole vector), all-gather (bytes
that one rank contributes), reduce-scatter (bytes of the whole vector), send (one message)."""
_NVLINK_STEP_NS: Final = 1_000
_PCIE_STEP_NS: Final = 4_000


def machine_collective(
    gpu: GpuSpec,
    kernels: Kernels,
    *,
    nvlink_gbps: float | None = None,
    pcie_gbps: float | None = None,
    send_ns: CollectiveNs | None = None,
) -> CollectiveNs:
    """Collectives inside a machine as engines run them, over NVLink, or PCIe without it.

    `send_ns` answers for messages between stages; None = at the links' rate.
    """
    nvlink = gpu.nvlink_gbps if nvlink_gbps is None else nvlink_gbps
    is_pcie = nvlink <= 0
    links = kernels.pcie if is_pcie else kernels.nvlink
    gbps = (gpu.pcie_gbps if pcie_gbps is None else pcie_gbps) if is_pcie else nvlink
    rate = gbps_to_bytes_per_s(gbps)
    step_ns = _PCIE_STEP_NS if is_pcie else _NVLINK_STEP_NS
    factors = factors_named(kernels.surfaces)
    board = _BOARD_GPUS.get(gpu.kind, 1 << 30)

    def collective_ns(kind: str, size_bytes: int, ranks: int) -> int:
        if kind == "send":
            if send_ns is not None:
                return send_ns(kind, size_bytes, ranks)
            return step_ns + round(size_bytes / (rate * links.large_rate) * NS_PER_S)
        seconds = collective_s(
            links, kind=kind, size_bytes=size_bytes, ranks=ranks, bytes_per_s=rate, is_pcie=is_pcie
        )
        if kind == "all-reduce":
            seconds *= factors.of("all-reduce", (ranks,), size_bytes)
            if ranks > board and size_bytes <= _SMALL_BYTES:
                seconds += _BEYOND_BOARD_S
        return round(seconds * NS_PER_S)

    return collective_ns
