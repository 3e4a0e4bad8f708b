"""Machines, links, paths."""

from __future__ import annotations

import pytest

from emu.catalogue.gpu import GpuSpec
from emu.config.schema import NodeTable
from emu.errors import InputError
from emu.network.topology import LinkKind, Topology, build_topology

A100 = GpuSpec(
    name="A100", memory_gib=80, memory_gbytes_per_s=2039, tflops_fp16=312, nvlink_gbps=2400
)
L4 = GpuSpec(name="L4", memory_gib=24, memory_gbytes_per_s=300, tflops_fp16=121, pcie_gbps=128)


def build(*nodes: NodeTable, **options) -> Topology:
    return build_topology(nodes, [node.gpu for node in nodes], **options)


def names(topology: Topology, path: tuple[int, ...]) -> list[str]:
    return [topology.links[index].name for index in path]


def test_numbering_follows_the_tables():
    topology = build(NodeTable(count=2, gpu=A100, gpus=4), NodeTable(gpu=L4, gpus=2, leaf="b"))
    assert [gpu.kind for gpu in topology.gpus] == ["A100"] * 8 + ["L4"] * 2
    assert [machine.gpus for machine in topology.machines] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [machine.table for machine in topology.machines] == [0, 0, 1]
    assert [gpu.machine for gpu in topology.gpus] == [0] * 4 + [1] * 4 + [2] * 2
    assert [link.index for link in topology.links] == list(range(len(topology.links)))
    assert len({link.name for link in topology.links}) == len(topology.links)


def test_paths_nvlink_pcie_nic():
    topology = build(NodeTable(count=2, gpu=A100, gpus=2), NodeTable(gpu=L4, gpus=2))
    assert topology.path(0, 0) == ()
    assert names(topology, topology.path(0, 1)) == ["gpu0.nvlink.out", "gpu1.nvlink.in"]
    assert names(topology, topology.path(1, 2)) == ["gpu1.nic.out", "gpu2.nic.in"]
    assert names(topology, topology.path(4, 5)) == ["gpu4.pcie.up", "gpu5.pcie.down"]
    assert names(topology, topology.nic_path(0, 1)) == ["gpu0.nic.out", "gpu1.nic.in"]
    assert names(topology, topology.host_to_gpu_path(3)) == ["machine1.host.read", "gpu3.pcie.down"]
    assert names(topology, topology.gpu_to_host_path(3)) == ["gpu3.pcie.up", "machine1.host.write"]
    assert names(topology, topology.ssd_to_host_path(5)) == ["gpu5.ssd.read", "machine2.host.write"]


def test_a_nic_may_be_behind_the_pcie_link_that_gpus_share():
    node = NodeTable(count=2, gpu=L4, gpus=2, pcie_shared_by=2, nic_over_pcie=True)
    topology = build(node, NodeTable(gpu=L4, gpus=1))
    both = ["gpu1.nic.out", "gpu2.nic.in"]
    assert names(topology, topology.path(1, 2)) == ["gpu0.pcie.up", *both, "gpu2.pcie.down"]
    assert names(topology, topology.path(4, 1)) == ["gpu4.nic.out", "gpu1.nic.in", "gpu0.pcie.down"]
    remote = names(topology, topology.host_to_remote_path(0, 3))
    assert remote == ["machine0.host.read", "gpu1.nic.out", "gpu3.nic.in", "gpu2.pcie.down"]


def test_rates_come_from_the_node_or_else_from_the_gpu():
    node = NodeTable(gpu=A100, gpus=1, nic_gbps=0.1, ssd_gbps=14, host_memory_gbytes_per_s=204.8)
    topology = build(node, NodeTable(gpu=A100, gpus=1, nvlink_gbps=1600, pcie_gbps=128))
    rates = {link.name: link.bytes_per_s for link in topology.links}
    assert rates["gpu0.nvlink.out"] == 300_000_000_000
    assert rates["gpu0.pcie.down"] == 32_000_000_000
    assert rates["gpu0.nic.in"] == 12_500_000
    assert rates["gpu0.ssd.read"] == 1_750_000_000
    assert rates["machine0.host.read"] == 204_800_000_000
    assert rates["gpu1.nvlink.in"] == 200_000_000_000
    assert rates["gpu1.pcie.up"] == 16_000_000_000
    assert topology.link_rates == list(rates.values())


def test_a_cxl_pool_is_as_fast_as_its_devices_together():
    node = NodeTable(
        gpu=L4, gpus=1, cxl_gib=8, cxl_gbytes_per_s=30.5, cxl_devices=3, cxl_latency_ns=250
    )
    topology = build(node, NodeTable(gpu=L4, gpus=1))
    pool = {link.name: link for link in topology.links if ".cxl." in link.name}
    assert sorted(pool) == ["machine0.cxl.read", "machine0.cxl.write"]
    assert {(link.bytes_per_s, link.latency_ns) for link in pool.values()} == {
        (91_500_000_000, 250)
    }
    read, write = topology.cxl_to_gpu_path(0), topology.gpu_to_cxl_path(0)
    assert names(topology, read) == ["machine0.cxl.read", "gpu0.pcie.down"]
    assert names(topology, write) == ["gpu0.pcie.up", "machine0.cxl.write"]
    assert topology.machines[1].cxl_read == topology.machines[1].cxl_write == -1


def test_pcie_link_shared_by_two():
    topology = build(NodeTable(gpu=A100, gpus=4, pcie_shared_by=2))
    assert [gpu.pcie_down for gpu in topology.gpus] == [
        topology.gpus[0].pcie_down,
        topology.gpus[0].pcie_down,
        topology.gpus[2].pcie_down,
        topology.gpus[2].pcie_down,
    ]
    assert sum(link.kind is LinkKind.PCIE_UP for link in topology.links) == 2


def test_nvlink_domain_may_split_a_machine_or_span_machines():
    halves = build(NodeTable(gpu=A100, gpus=4, nvlink_domain=2))
    assert halves.has_nvlink(0, 1)
    assert not halves.has_nvlink(1, 2)
    assert names(halves, halves.path(1, 2)) == ["gpu1.pcie.up", "gpu2.pcie.down"]
    rack = build(NodeTable(count=4, gpu=A100, gpus=2, nvlink_domain=4))
    assert names(rack, rack.path(0, 3)) == ["gpu0.nvlink.out", "gpu3.nvlink.in"]
    assert names(rack, rack.path(3, 4)) == ["gpu3.nic.out", "gpu4.nic.in"]
    # Machines of different tables never share a domain, however few GPUs the first has.
    mixed = build(
        NodeTable(gpu=A100, gpus=2, nvlink_domain=4), NodeTable(gpu=A100, gpus=2, nvlink_domain=4)
    )
    assert not mixed.has_nvlink(1, 2)


def test_leaf_uplinks_only_between_leaves_and_only_when_limited():
    nodes = [NodeTable(gpu=A100, gpus=2, count=2, leaf="a"), NodeTable(gpu=A100, gpus=2, leaf="b")]
    free = build(*nodes)
    assert names(free, free.path(0, 4)) == ["gpu0.nic.out", "gpu4.nic.in"]
    limited = build(*nodes, leaf_uplink_gbps=400)
    assert names(limited, limited.path(0, 2)) == ["gpu0.nic.out", "gpu2.nic.in"]
    assert names(limited, limited.path(0, 4)) == [
        "gpu0.nic.out",
        "leaf.a.uplink",
        "leaf.b.downlink",
        "gpu4.nic.in",
    ]
    assert limited.links[limited.path(0, 4)[1]].bytes_per_s == 50_000_000_000


def test_latency_is_one_message_of_the_slower_nic():
    topology = build(
        NodeTable(gpu=A100, gpus=2, nic_latency_us=2.5, host_memory_latency_ns=90),
        NodeTable(gpu=A100, gpus=2, nic_latency_us=7),
    )
    assert topology.latency_ns(topology.path(0, 2)) == 7_000
    assert topology.latency_ns(topology.path(0, 1)) == 0
    assert topology.latency_ns(topology.host_to_gpu_path(0)) == 90
    assert topology.latency_ns(()) == 0


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"nvlink_gbps": -2.0}, "nodes.1.nvlink_gbps"),
        ({"pcie_gbps": 0.0}, "nodes.1.pcie_gbps"),
        ({"nvlink_domain": 3}, "nodes.1.nvlink_domain"),
        ({"count": 1_000_000}, "nodes.1.count"),
        ({"gpus": 1_000_000}, "nodes.1.gpus"),
    ],
)
def test_impossible_links_are_refused_by_name(keys, field):
    with pytest.raises(InputError) as caught:
        build(NodeTable(gpu=A100), NodeTable(gpu=A100, **keys), source="c.toml")
    assert caught.value.source == "c.toml"
    assert caught.value.field == field
