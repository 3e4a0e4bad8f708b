"""Chains (pipelined multicast) and the load times of the reference table."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from emu.catalogue.gpu import GpuSpec
from emu.config.schema import NodeTable
from emu.network.flows import END, FlowTable, TransferSpec
from emu.network.topology import build_topology
from tests.network.rates import rate_of, start

NIC = 12_500_000_000
MIB = 2**20


def chain_ends(rates: list[int], size: int, chunk: int) -> list[int]:
    table = FlowTable(rates)
    for hop in range(len(rates)):
        start(table, hop, (hop,), size, 0, after=hop - 1 if hop else None, lag_bytes=chunk)
    found: dict[int, int] = {}
    while (at := table.next_event_ns()) is not None:
        found |= {e.flow_id: e.at_ns for e in table.advance(at)}
        table.recount()
    return [found[hop] for hop in range(len(rates))]


@pytest.mark.parametrize("targets", [1, 2, 3, 6, 12])
@pytest.mark.parametrize(("rate", "chunk"), [(NIC, MIB), (200_000_000_000, 256 * MIB)])
def test_chain_costs_p2p_plus_one_chunk_per_further_target(targets, rate, chunk):
    """t_i = M/B + (i - 1) * chunk/B, to a nanosecond per hop."""
    size = 16_100_000_000
    for position, end in enumerate(chain_ends([rate] * targets, size, chunk)):
        exact = Fraction((size + position * chunk) * 10**9, rate)
        assert 0 <= end - exact < position + 1


def test_chain_by_hand():
    """3 hops of 10 B/ns, 1000 bytes, chunks of 100: 100, 110, 120 ns."""
    assert chain_ends([10_000_000_000] * 3, 1_000, 100) == [100, 110, 120]


def test_slow_middle_hop_does_not_hold_back_the_ones_before_it():
    """Hops of 10, 5, 10 B/ns. Hop 0 ends at 100. Hop 1 starts at 10, needs 200: 210. Hop 2 starts
    when hop 1 has 100 bytes (at 30), runs at its 5 B/ns and has 100 bytes left at 210: 220."""
    assert chain_ends([10_000_000_000, 5_000_000_000, 10_000_000_000], 1_000, 100) == [
        100,
        210,
        220,
    ]


def test_chain_on_unequal_links_follows_the_recurrence():
    """start_i = start_(i-1) + chunk / r_(i-1); end_i = start_i + M/B_i or end_(i-1) + chunk/B_i."""
    rates, size, chunk = [25 * 10**9, 12_500_000_000, 20 * 10**9, 7 * 10**9, 50 * 10**9], 10**8, MIB
    start, rate, end = Fraction(0), None, Fraction(0)
    for position, (found, link) in enumerate(zip(chain_ends(rates, size, chunk), rates)):
        own = Fraction(link, 10**9)
        if rate is None or own < rate:
            end, follows = start + size / own, own
        else:
            end, follows = end + chunk / own, rate
        assert abs(found - end) <= position + 1
        start, rate = start + chunk / follows, follows


def test_message_shorter_than_a_chunk_is_forwarded_whole():
    assert chain_ends([10_000_000_000] * 3, 1_000, 5_000) == [100, 200, 300]


def test_hop_that_fell_behind_catches_up_and_then_follows():
    """Hop 1's link is down from 10 to 40 ns, then 20 B/ns against hop 0's 10.

    At 40 hop 0 has 400 bytes, hop 1 none: 300 behind its place, catching up at 10 B/ns: at 70 it
    has 600 of 700 - 100. From there it follows at 10 B/ns; hop 0 ends at 100, hop 1 has 900 and
    forwards the last 100 at 20 B/ns: 105.
    """
    table = FlowTable([10_000_000_000, 20_000_000_000])
    start(table, 0, (0,), 1_000, 0)
    start(table, 1, (1,), 1_000, 0, after=0, lag_bytes=100)
    table.set_rate(1, 0, 10)
    table.set_rate(1, 20_000_000_000, 40)
    assert rate_of(table, 1) == 2e10
    assert table.delivered_bytes(1, 70) == 600
    assert rate_of(table, 1) == 1e10
    table.recount()
    assert {e.flow_id: e.at_ns for e in table.advance(200)} == {0: 100, 1: 105}


def test_room_that_a_held_back_hop_leaves_goes_to_others():
    """Hop 1 could use 12 B/ns of its link but gets only 4; another flow there has the other 8."""
    table = FlowTable([4_000_000_000, 12_000_000_000])
    start(table, 0, (0,), 4_000, 0)
    start(table, 1, (1,), 4_000, 0, after=0, lag_bytes=40)
    start(table, 2, (1,), 80_000, 20)
    assert rate_of(table, 1) == 4e9
    assert rate_of(table, 2) == 8e9
    table.recount()


def test_stalled_feeder_stalls_its_followers():
    table = FlowTable([10_000_000_000] * 3)
    for hop in range(3):
        start(table, hop, (hop,), 1_000, 0, after=hop - 1 if hop else None, lag_bytes=100)
    table.set_rate(0, 0, 50)
    # What is between the hops is not forwarded before more arrives: each stays a chunk behind.
    assert [table.delivered_bytes(hop, 500) for hop in range(3)] == [500, 400, 300]
    assert table.next_event_ns() is None
    table.set_rate(0, 10_000_000_000, 1_000)
    assert [e.at_ns for e in table.advance(2_000)] == [1_050, 1_060, 1_070]


def test_feeder_that_has_no_more_ready_holds_back_its_follower_until_it_goes_on():
    """Hop 0 has 500 of 1000 bytes ready until 1000 ns; hop 1 stands at 400 meanwhile."""
    table = FlowTable([10_000_000_000, 20_000_000_000])
    start(table, 0, (0,), 1_000, 0, limit_bytes=500)
    start(table, 1, (1,), 1_000, 0, after=0, lag_bytes=100)
    assert table.advance(900) == []
    table.recount()
    assert table.delivered_bytes(1, 900) == 400
    assert table.next_event_ns() is None
    table.extend(0, 1_000, 1_000)
    # Hop 0 ends at 1050, hop 1 has 900 then and forwards the last 100 at 20 B/ns.
    assert {e.flow_id: e.at_ns for e in table.advance(2_000)} == {0: 1_050, 1: 1_055}


def test_feeder_that_is_cut_off_is_not_overtaken():
    """Hop 1 is at 220, 80 behind its place, when hop 0 stops at 400: it closes up to 300."""
    table = FlowTable([10_000_000_000, 12_000_000_000])
    start(table, 0, (0,), 1_000, 0, pair=(0, 1))
    start(table, 1, (1,), 1_000, 0, after=0, lag_bytes=100)
    start(table, 2, (1,), 120, 20)
    table.set_partition((0, 1), True, 40)
    assert rate_of(table, 1) == 12e9
    assert [e.flow_id for e in table.advance(500)] == [2]
    table.recount()
    # Attached at the last whole nanosecond before it would be level (46): 220 + 6 x 12 = 292.
    assert table.delivered_bytes(1, 500) == 292
    table.set_partition((0, 1), False, 1_000)
    # 8 bytes behind its place, at 10 B/ns both: at hop 0's end (1060) 108 are left, 12 a ns.
    assert {e.flow_id: e.at_ns for e in table.advance(2_000)} == {0: 1_060, 1: 1_069}


def test_hop_that_was_cut_off_itself_catches_up_afterwards():
    """Cut off from 30 to 60 ns at 200 bytes; hop 0 has 600 then: level with 500 + 10 t at 90."""
    table = FlowTable([10_000_000_000, 20_000_000_000])
    start(table, 0, (0,), 1_000, 0)
    start(table, 1, (1,), 1_000, 0, after=0, lag_bytes=100, pair=(1, 2))
    table.set_partition((1, 2), True, 30)
    table.recount()
    table.set_partition((1, 2), False, 60)
    assert rate_of(table, 1) == 2e10
    assert table.delivered_bytes(1, 90) == 800
    assert rate_of(table, 1) == 1e10
    assert {e.flow_id: e.at_ns for e in table.advance(200)} == {0: 100, 1: 105}


def test_hop_that_lost_its_place_to_another_flow_takes_it_again():
    """Hops of 10 and 12 B/ns; flow 2 takes half of hop 1's link from 20 to 40 ns.

    Hop 1 has 100 bytes at 20 and 220 at 40, 80 behind; at 12 B/ns it is level at 80 (700 bytes),
    has 900 at 100, when hop 0 ends, and needs 100/12 = 8.33 ns for the rest.
    """
    table = FlowTable([10_000_000_000, 12_000_000_000])
    start(table, 0, (0,), 1_000, 0)
    start(table, 1, (1,), 1_000, 0, after=0, lag_bytes=100)
    start(table, 2, (1,), 120, 20)
    assert rate_of(table, 1) == 6e9
    assert [e.at_ns for e in table.advance(40)] == [40]
    assert rate_of(table, 1) == 12e9
    table.recount()
    assert table.delivered_bytes(1, 80) == 700
    assert rate_of(table, 1) == 10e9
    assert {e.flow_id: e.at_ns for e in table.advance(200)} == {0: 100, 1: 109}


def test_cancelled_feeder_leaves_its_followers_to_be_cancelled():
    """F04: the source of a chain dies."""
    table = FlowTable([10_000_000_000] * 2)
    start(table, 0, (0,), 1_000, 0, kind="weights")
    start(table, 1, (1,), 1_000, 0, after=0, lag_bytes=100, kind="weights")
    assert table.cancel(0, 50) == 500
    table.recount()
    assert table.next_event_ns() is None
    assert table.cancel(1, 90) == 400
    table.recount()
    assert table.carried_bytes == {"weights": 900}
    assert table.lost_bytes == {"weights": 1_100}


def test_hop_after_one_that_has_ended_is_free():
    table = FlowTable([10_000_000_000] * 2)
    start(table, 0, (0,), 1_000, 0)
    table.advance(500)
    start(table, 1, (1,), 1_000, 500, after=0, lag_bytes=100)
    assert [e.at_ns for e in table.advance(1_000)] == [600]


def test_ranks_of_a_chain_follow_their_own_rank():
    """TP 2: rank 1's first hop is half as fast; the group ends with it."""
    table = FlowTable([10_000_000_000, 5_000_000_000, 10_000_000_000, 10_000_000_000])
    table.start_group(0, [((0,), 1_000), ((1,), 1_000)], 0, TransferSpec())
    behind = TransferSpec(after=0, lag_bytes=100)
    table.start_group(1, [((2,), 1_000), ((3,), 1_000)], 0, behind)
    # Rank 0: 100, 110. Rank 1: 200, then 100 bytes at 10 B/ns: 210.
    assert [(e.flow_id, e.at_ns) for e in table.advance(1_000)] == [(0, 200), (1, 210)]


def test_layers_of_a_chain_become_ready_one_chunk_later_down_the_chain():
    table = FlowTable([10_000_000_000] * 2)
    start(table, 0, (0,), 1_000, 0, marks=(500,))
    start(table, 1, (1,), 1_000, 0, marks=(500,), after=0, lag_bytes=100)
    assert [(e.at_ns, e.flow_id, e.mark) for e in table.advance(1_000)] == [
        (50, 0, 0),
        (60, 1, 0),
        (100, 0, END),
        (110, 1, END),
    ]


def test_lanes_divide_the_load_time():
    """Three sources send a third each to the GPUs of one machine: a third of the time."""
    size = 48 * 10**9
    alone, lanes = FlowTable([NIC] * 8), FlowTable([NIC] * 8)
    start(alone, 0, (0, 4), size, 0)
    for lane in range(3):
        start(lanes, lane, (lane, 4 + lane), size // 3, 0)
    (end,) = alone.advance(10**12)
    assert {e.at_ns for e in lanes.advance(10**12)} == {end.at_ns // 3}


# Load times of the reference (Table 1 of the BlitzScale paper): GB per rank, then SSD, PCIe,
# RDMA, NVLink in s as printed there.
TABLE = [
    (13.5, 10.8, 0.84, 1.08, 0.07),
    (16.1, 12.8, 1.00, 1.28, 0.08),
    (23.6, 18.9, 1.47, 1.89, 0.12),
    (36.4, 29.1, 2.27, 2.91, 0.18),
]


@pytest.mark.parametrize(("gbytes", "ssd_s", "pcie_s", "rdma_s", "nvlink_s"), TABLE)
def test_load_times_of_the_reference_come_out_of_the_links(gbytes, ssd_s, pcie_s, rdma_s, nvlink_s):
    gpu = GpuSpec(name="A800", memory_gib=80, memory_gbytes_per_s=2039, tflops_fp16=312)
    node = NodeTable(
        count=2, gpu=gpu, gpus=8, nic_gbps=100, pcie_gbps=128, ssd_gbps=10, nvlink_gbps=1600
    )
    topology = build_topology([node], [gpu])
    size = round(gbytes * 1e9)

    def load_s(path: tuple[int, ...]) -> float:
        table = FlowTable(topology.link_rates)
        start(table, 0, path, size, 0, kind="weights")
        (event,) = table.advance(10**12)
        return event.at_ns / 1e9

    printed_and_found = [
        (ssd_s, load_s(topology.ssd_to_host_path(0)), 1.25e9, 0.1),
        (pcie_s, load_s(topology.host_to_gpu_path(0)), 16e9, 0.01),
        (rdma_s, load_s(topology.path(0, 8)), 12.5e9, 0.01),
        (nvlink_s, load_s(topology.path(0, 1)), 200e9, 0.01),
    ]
    for printed, found, bytes_per_s, digit in printed_and_found:
        assert found == math.ceil(size * 1e9 / bytes_per_s) / 1e9
        # The table prints rounded figures, of models whose size it rounds as well.
        assert abs(found - printed) <= max(0.01 * printed, digit / 2 + 1e-9)
