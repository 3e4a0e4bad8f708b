"""Collectives inside a machine, each worked out by hand from coefficients that are easy to read."""

from __future__ import annotations

import msgspec
import pytest

from emu.catalogue.lookup import lookup_gpu
from emu.latency.coefficients import Links, kernels_of
from emu.latency.kernels.machine import collective_s, machine_collective

KIB, MIB = 1 << 10, 1 << 20
LINKS = Links(
    small_us=4.0, small_rank_us=1.0, small_rate=0.8,
    large_us=20.0, large_rank_us=3.0, large_rate=0.95,
    host_rank_us=10.0, host_rate=0.5, host_fade=2.0, host_small=1.5,
)  # fmt: skip
RATE = 100e9
"""Of the link, bytes per second."""


@pytest.mark.parametrize(
    ("kind", "size", "ranks", "is_pcie", "us"),
    [
        ("all-reduce", 8 * KIB, 1, False, 0),
        # At once: each reads what all others have, at four fifths of the rate.
        ("all-reduce", 8 * KIB, 2, False, 4 + 8192 / 80e3),
        ("all-reduce", 8 * KIB, 4, False, 4 + 2 * 1 + 3 * 8192 / 80e3),
        ("all-reduce", 512 * KIB, 4, False, 4 + 2 * 1 + 3 * 524_288 / 80e3),
        ("all-reduce", 256 * KIB, 8, False, 4 + 6 * 1 + 7 * 262_144 / 80e3),
        # In two shots, with twice the time of each rank: two times 7/8 of all.
        ("all-reduce", 256 * KIB + 8, 8, False, 4 + 6 * 2 + 2 * 7 / 8 * 262_152 / 80e3),
        ("all-reduce", 512 * KIB + 8, 4, False, 4 + 2 * 2 + 2 * 3 / 4 * 524_296 / 80e3),
        # NCCL's where it is sooner, and always above 8 MiB.
        ("all-reduce", 8 * MIB, 2, False, 20 + 8 * MIB / 95e3),
        ("all-reduce", 8 * MIB, 8, False, 20 + 6 * 3 + 2 * 7 / 8 * 8 * MIB / 95e3),
        ("all-reduce", 64 * MIB, 4, False, 20 + 2 * 3 + 2 * 3 / 4 * 64 * MIB / 95e3),
        # Half of that at the start; each sends what it has to all others, or its part of all.
        ("all-gather", MIB, 4, False, 13 + 3 * MIB / 95e3),
        ("reduce-scatter", MIB, 4, False, 13 + 0.75 * MIB / 95e3),
        # Two on PCIe reach each other. More go through the host, slower the more there are, and
        # faster up to 1 MiB.
        ("all-reduce", 8 * KIB, 2, True, 4 + 8192 / 80e3),
        ("all-reduce", MIB, 4, True, 40 + 1.5 * MIB / (95e3 * 0.5 * 1.5)),
        ("all-reduce", MIB + 8, 4, True, 40 + 1.5 * (MIB + 8) / (95e3 * 0.5)),
        ("all-reduce", 4 * MIB, 8, True, 80 + 1.75 * 4 * MIB / (95e3 * 0.5 / 4)),
        ("all-gather", 2 * MIB, 4, True, 20 + 3 * 2 * MIB / (95e3 * 0.5)),
        ("reduce-scatter", 2 * MIB, 4, True, 20 + 0.75 * 2 * MIB / (95e3 * 0.5)),
    ],
)  # fmt: skip
def test_a_collective_takes(kind: str, size: int, ranks: int, is_pcie: bool, us: float) -> None:
    found_s = collective_s(
        LINKS, kind=kind, size_bytes=size, ranks=ranks, bytes_per_s=RATE, is_pcie=is_pcie
    )
    assert found_s * 1e6 == pytest.approx(us, rel=1e-9)


def test_links_are_those_of_the_machine_and_messages_take_a_step() -> None:
    gpu = lookup_gpu("H100")
    kernels = msgspec.structs.replace(kernels_of(gpu), nvlink=LINKS, pcie=LINKS, surfaces="")
    fast = machine_collective(gpu, kernels, nvlink_gbps=800)
    assert fast("all-reduce", 8 * KIB, 4) == round(1e3 * (4 + 2 + 3 * 8192 / 80e3))
    assert fast("send", 8 * MIB, 2) == 1_000 + round(8 * MIB / 95)
    slow = machine_collective(gpu, kernels, nvlink_gbps=0, pcie_gbps=800)
    assert slow("all-reduce", MIB, 4) == round(1e3 * (40 + 1.5 * MIB / 71.25e3))
    assert slow("send", 8 * MIB, 2) == 4_000 + round(8 * MIB / 95)
    told = machine_collective(gpu, kernels, send_ns=lambda kind, size_bytes, ranks: size_bytes * 7)
    assert told("send", 5, 2) == 35


def test_a_small_all_reduce_beyond_a_board_takes_longer() -> None:
    times = []
    for name in ("GB200", "B200"):
        gpu = lookup_gpu(name)
        kernels = msgspec.structs.replace(kernels_of(gpu), nvlink=LINKS, surfaces="")
        one = machine_collective(gpu, kernels, nvlink_gbps=800)
        sizes = (8 * KIB, 8 * MIB, 8 * MIB + 8)
        times.append([one("all-reduce", size, ranks) for ranks in (4, 8) for size in sizes])
    more = [round(a - b, -1) for a, b in zip(*times, strict=True)]
    assert more == [0, 0, 0, 6_500, 6_500, 0]
