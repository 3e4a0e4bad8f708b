"""Load times from the flow model (BlitzScale 6.5 to 6.10)."""

from __future__ import annotations

import anyio
import pytest

from emu.autoscale.loader import ActiveLoad, Loader, LoadWorld, Weights
from emu.autoscale.orders import Load, Target
from emu.autoscale.stripes import stripe_bytes
from emu.catalogue import sizes
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.config.schema import NodeTable
from emu.kernel.clock import Kernel
from emu.network.carrier import Carrier
from emu.network.grids import Grid
from emu.network.topology import build_topology
from emu.units import MIB

NIC, PCIE, SSD, NVLINK = 100e9 / 8, 128e9 / 8, 10e9 / 8, 1600e9 / 8
MODELS = {
    "meta-llama/Llama-2-7b": (1, 10.8, 0.84, 1.08, 0.07),
    "meta-llama/Meta-Llama-3-8B": (1, 12.8, 1.00, 1.28, 0.08),
    "mistralai/Mistral-Small-24B-Base-2501": (2, 18.9, 1.47, 1.89, 0.12),
    "Qwen/Qwen2.5-72B": (4, 29.1, 2.27, 2.91, 0.18),
}
"""TP, seconds from SSD, over PCIe, RDMA, NVLink: the table of section 6.10."""


class Story:
    """What happened in a run of one load."""

    def __init__(self) -> None:
        self.loaded_s: dict[int, float] = {}
        self.segments: list[tuple[float, int, int]] = []
        self.hops: list[tuple[int, int]] = []
        """(giver, taker) of each transfer, in the order in which they were begun."""


def _load(
    load: Load, *, model: str, tp: int, machines: int = 4, pin_bytes_per_s: float = 0.0
) -> Story:
    """Replicas of `tp` GPUs on machines of 8, nothing else on the links."""
    node = NodeTable(count=machines, nvlink_gbps=1600, pcie_gbps=128, nic_latency_us=0)
    topology = build_topology([node], [lookup_gpu("A800-SXM4-80GB")])
    spec = lookup_model(model)
    segments = sizes.weight_segments(spec, tp)
    weights = [
        Weights(Grid(tuple(range(i, i + tp)), tp), segments, (sum(segments),) * tp)
        for i in range(0, 8 * machines, tp)
    ]
    story = Story()

    async def main() -> None:
        kernel = Kernel()

        def on_loaded(active: ActiveLoad, target: Target) -> None:
            story.hops = [pair for pair, _, _ in active.hops]
            story.loaded_s[target.replica] = kernel.now_ns / 1e9
            if len(story.loaded_s) == len(load.targets):
                kernel.stop()

        world = LoadWorld(
            kernel,
            Carrier(kernel, topology),
            topology,
            weights,
            lambda replica, count: story.segments.append((kernel.now_ns / 1e9, replica, count)),
            on_loaded,
        )
        Loader(world, pin_bytes_per_s=pin_bytes_per_s).start(load)

        await kernel.run()

    anyio.run(main)
    return story


def _rank_bytes(model: str, tp: int) -> int:
    return sum(sizes.weight_segments(lookup_model(model), tp))


def _targets(*replicas: int) -> tuple[Target, ...]:
    return tuple(Target(replica, "prefill") for replica in replicas)


@pytest.mark.parametrize("model", MODELS)
def test_the_table_of_section_6_10(model: str) -> None:
    """Within 1 % of bytes / rate; the table itself is rounded to a hundredth of a second."""
    tp, ssd_s, pcie_s, rdma_s, nvlink_s = MODELS[model]
    size = _rank_bytes(model, tp)
    other = 8 // tp  # first replica of the next machine
    host = _load(Load("host", _targets(1)), model=model, tp=tp).loaded_s[1]
    disk = _load(Load("disk", _targets(1)), model=model, tp=tp).loaded_s[1]
    p2p = _load(Load("p2p", _targets(other), (0,)), model=model, tp=tp).loaded_s[other]
    nvlink = _load(Load("nvlink", _targets(1), (0,)), model=model, tp=tp).loaded_s[1]
    assert host == pytest.approx(size / PCIE, rel=0.01)
    assert disk == pytest.approx(size / SSD + size / PCIE, rel=0.01)
    assert p2p == pytest.approx(size / NIC, rel=0.01)
    assert nvlink == pytest.approx(size / NVLINK, rel=0.01)
    assert host == pytest.approx(pcie_s, abs=0.01)
    assert p2p == pytest.approx(rdma_s, abs=0.01)
    assert nvlink == pytest.approx(nvlink_s, abs=0.006)
    assert disk - host == pytest.approx(ssd_s, rel=0.01)


def test_pages_are_pinned_before_a_read_from_disk_and_for_no_other_load() -> None:
    """All GPUs at the same time."""
    model, tp, rate = "meta-llama/Meta-Llama-3-8B", 2, 4e9
    size = _rank_bytes(model, tp)
    for method, late_s in (("disk", size / rate), ("host", 0.0)):
        plain, pinned = (
            _load(Load(method, _targets(1)), model=model, tp=tp, pin_bytes_per_s=pin).loaded_s[1]
            for pin in (0.0, rate)
        )
        assert pinned - plain == pytest.approx(late_s, abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_a_chain_costs_its_first_hop_and_a_chunk_for_each_other(count: int) -> None:
    """I17: node i never before node i-1."""
    model, tp = "meta-llama/Meta-Llama-3-8B", 1
    chain = [8 * (i % 3 + 1) + i // 3 for i in range(count)]
    story = _load(Load("chain", _targets(*chain), (0,)), model=model, tp=tp)
    p2p_s = _rank_bytes(model, tp) / NIC
    times = [story.loaded_s[replica] for replica in chain]
    assert times == sorted(times)
    for index, at_s in enumerate(times):
        assert at_s == pytest.approx(p2p_s + index * MIB / NIC, rel=1e-6)


@pytest.mark.parametrize("lanes", [2, 4])
def test_lanes_divide_the_time(lanes: int) -> None:
    model, tp = "meta-llama/Meta-Llama-3-8B", 1
    targets = [8 * column + lane for column in (1, 2) for lane in range(lanes)]
    story = _load(Load("tanz", _targets(*targets), tuple(range(lanes))), model=model, tp=tp)
    size = _rank_bytes(model, tp)
    p2p_s = size / NIC
    expected_s = p2p_s / lanes + lanes * 64 * MIB / NVLINK
    assert max(story.loaded_s.values()) == pytest.approx(expected_s, rel=0.02)
    assert min(story.loaded_s.values()) >= p2p_s / lanes * 0.999


def test_the_ring_of_a_machine_is_a_stripe_behind_each_lane() -> None:
    """And each machine of a lane two MiB behind the one before it."""
    model, tp, lanes = "meta-llama/Meta-Llama-3-8B", 1, 2
    targets = [8 * column + lane for column in (1, 2) for lane in range(lanes)]
    story = _load(Load("tanz", _targets(*targets), tuple(range(lanes))), model=model, tp=tp)
    longest = max(stripe_bytes(_rank_bytes(model, tp), lane, lanes) for lane in range(lanes))
    for column in (1, 2):
        at_s = max(story.loaded_s[8 * column + lane] for lane in range(lanes))
        expected_s = longest / NIC + (column - 1) * 2 * MIB / NIC + 64 * MIB / NVLINK
        assert at_s == pytest.approx(expected_s, rel=2e-6)


def test_a_stripe_goes_around_its_machine_from_one_neighbor_to_the_next() -> None:
    targets = [8 * column + lane for column in (1, 2) for lane in range(3)]
    story = _load(
        Load("tanz", _targets(*targets), (0, 1, 2)), model="meta-llama/Meta-Llama-3-8B", tp=1
    )
    assert story.hops == [
        *((0, 8), (8, 9), (9, 10), (8, 16), (16, 17), (17, 18)),
        *((1, 9), (9, 10), (10, 8), (9, 17), (17, 18), (18, 16)),
        *((2, 10), (10, 8), (8, 9), (10, 18), (18, 16), (16, 17)),
    ]


def test_segments_arrive_in_order_as_the_bytes_do() -> None:
    model, tp = "meta-llama/Meta-Llama-3-8B", 1
    story = _load(Load("p2p", _targets(8), (0,)), model=model, tp=tp)
    segments = sizes.weight_segments(lookup_model(model), tp)
    counts = [count for _, _, count in story.segments]
    assert counts == list(range(1, len(segments) + 1))
    passed = 0
    for (at_s, _, _), segment in zip(story.segments, segments, strict=True):
        passed += segment
        assert at_s == pytest.approx(passed / NIC, rel=1e-6)


def test_a_node_of_lanes_has_a_segment_when_every_stripe_has_brought_its_part() -> None:
    model, tp = "meta-llama/Meta-Llama-3-8B", 1
    story = _load(Load("tanz", _targets(8, 9), (0, 1)), model=model, tp=tp)
    for replica in (8, 9):
        counts = [count for _, which, count in story.segments if which == replica]
        assert counts == sorted(counts)
        assert counts[-1] >= len(sizes.weight_segments(lookup_model(model), tp)) - 1


def test_stripes_deal_out_every_byte_once() -> None:
    for lanes in (1, 2, 3, 8):
        for offset in (0, 1, 64 * MIB, 64 * MIB * 7 + 5, 10**10):
            parts = [stripe_bytes(offset, lane, lanes) for lane in range(lanes)]
            assert sum(parts) == offset
