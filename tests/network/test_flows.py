"""The flow table by example: every figure is worked out by hand beside it."""

from __future__ import annotations

import gc

import pytest

from emu.errors import InvariantViolation
from emu.network.audit import Books
from emu.network.flows import END, FlowTable, TransferSpec
from emu.network.links import Flow
from tests.network.rates import rate_of, start, utilization

NIC = 12_500_000_000
"""100 Gb/s: 12.5 bytes a nanosecond."""


def ends(table: FlowTable, until: int = 10**15) -> dict[int, int]:
    return {e.flow_id: e.at_ns for e in table.advance(until) if e.mark == END}


def walk(table: FlowTable) -> list[tuple[int, int, int]]:
    seen = []
    while (at := table.next_event_ns()) is not None:
        seen += [(e.at_ns, e.flow_id, e.mark) for e in table.advance(at)]
        table.recount()
    return seen


def test_two_sources_one_destination_a_third_joins_half_way():
    """Acceptance example: migrations of 20 and 10 blocks of 8 MiB, and one of 4 blocks later.

    Links 0, 1, 2: egress of sources A, B, C; link 3: ingress of D; each 12.5 bytes/ns, 5 us latency.

    t = 0          A: 20 x 8 388 608 = 167 772 160 bytes, B: 83 886 080 bytes. D's ingress is the
                   bottleneck: 6.25 bytes/ns each.
    t = 5 000 000  A and B have carried 6.25 x 5 000 000 = 31 250 000 bytes each; left: A 136 522 160,
                   B 52 636 080. C joins with 33 554 432 bytes: 12.5/3 bytes/ns each.
                   C needs 33 554 432 x 3 / 12.5 = 8 053 063.68 -> 8 053 064 ns.
    t = 13 053 064 C ends. A and B have carried 8 053 064 x 12.5/3 = 33 554 433 1/3 more; left:
                   A 102 967 726 2/3, B 19 081 646 2/3; 6.25 bytes/ns each.
                   B needs 19 081 646 2/3 / 6.25 = 3 053 063.466.. -> 3 053 064 ns.
    t = 16 106 128 B ends. A has carried 3 053 064 x 6.25 = 19 081 650 more; left 83 886 076 2/3;
                   12.5 bytes/ns. It needs 6 710 886.133.. -> 6 710 887 ns.
    t = 22 817 015 A ends. (All bytes / 12.5 = 22 817 013.76: under 1 ns lost at each end.)
    Each end is reported 5 000 ns later.
    """
    table = FlowTable([NIC] * 4)
    block = 8 * 2**20
    start(table, 1, (0, 3), 20 * block, 0, latency_ns=5_000)
    start(table, 2, (1, 3), 10 * block, 0, latency_ns=5_000)
    assert rate_of(table, 1) == rate_of(table, 2) == 6.25e9
    start(table, 3, (2, 3), 4 * block, 5_000_000, latency_ns=5_000)
    assert table.delivered_bytes(1, 5_000_000) == 31_250_000
    assert rate_of(table, 3) == NIC / 3
    assert walk(table) == [
        (13_058_064, 3, END),
        (16_111_128, 2, END),
        (22_822_015, 1, END),
    ]


def test_opposite_directions_do_not_disturb_each_other():
    """KV out of a GPU and weights into it use different links."""
    table = FlowTable([NIC] * 4)
    start(table, 1, (0, 3), 1_250_000, 0)
    start(table, 2, (2, 1), 1_250_000, 0)
    assert ends(table) == {1: 100_000, 2: 100_000}


def test_what_one_bottleneck_leaves_goes_to_the_others():
    """Link 0 (6 B/ns) holds flow 1 and 2; link 1 (12 B/ns) holds 2 and 3: 3, 3 and 9 B/ns."""
    table = FlowTable([6_000_000_000, 12_000_000_000])
    start(table, 1, (0,), 3_000, 0)
    start(table, 2, (0, 1), 6_000, 0)
    start(table, 3, (1,), 18_000, 0)
    assert [rate_of(table, i) for i in (1, 2, 3)] == [3e9, 3e9, 9e9]
    # 1 ends at 1000. Then 2 could have 6 on link 0 and has 6 = 12/2 on link 1: both 6 B/ns.
    # 2 has 3000 left: ends at 1500. 3 had 9000 + 3000; 6000 left at 12 B/ns: 2000.
    assert ends(table) == {1: 1_000, 2: 1_500, 3: 2_000}


def test_weights_divide_in_proportion():
    table = FlowTable([12_000_000_000])
    start(table, 1, (0,), 9_000, 0, weight=3)
    start(table, 2, (0,), 9_000, 0, weight=1)
    # 9 and 3 B/ns; 1 ends at 1000, 2 has 6000 left at 12 B/ns.
    assert ends(table) == {1: 1_000, 2: 1_500}


def test_the_first_whole_nanosecond_not_before_the_exact_end():
    """10 bytes at 3 B/ns take 3.33 ns -> 4; 9 bytes take exactly 3."""
    table = FlowTable([3_000_000_000] * 2)
    start(table, 1, (0,), 10, 0)
    start(table, 2, (1,), 9, 0)
    assert ends(table) == {1: 4, 2: 3}


@pytest.mark.parametrize("sharers", [3, 7, 11, 13, 31, 37, 41])
def test_equal_shares_end_exactly_even_where_the_share_is_no_decimal(sharers):
    """k flows of 1250 bytes at 12.5/k bytes/ns: 100 k ns, and no flow is a nanosecond late."""
    table = FlowTable([NIC])
    for number in range(sharers):
        start(table, number, (0,), 1_250, 0)
    assert ends(table) == dict.fromkeys(range(sharers), 100 * sharers)


def test_equal_instants_are_reported_in_order_of_starting():
    table = FlowTable([NIC] * 3)
    for number in (5, 3, 4):
        start(table, number, (number - 3,), 12_500, 0)
    assert [e.flow_id for e in table.advance(1_000)] == [5, 3, 4]


def test_marks_report_layers_as_their_last_byte_arrives():
    """3 layers of 1000 bytes after 500 of embedding at 12.5 B/ns, with 7 ns latency."""
    table = FlowTable([NIC])
    start(table, 1, (0,), 3_500, 0, marks=(500, 1_500, 2_500, 3_500), latency_ns=7, tag="w")
    events = table.advance(10**6)
    assert [(e.at_ns, e.mark) for e in events] == [
        (47, 0),
        (127, 1),
        (207, 2),
        (287, 3),
        (287, END),
    ]
    assert {e.tag for e in events} == {"w"}


def test_a_group_ends_and_passes_marks_with_its_slowest_part():
    """Two ranks of 1250 bytes; rank 1's egress is shared with another flow until 200 ns."""
    table = FlowTable([NIC] * 4)
    table.start_group(1, [((0, 2), 1_250), ((1, 3), 1_250)], 0, TransferSpec(marks=(1_250,)))
    start(table, 2, (1,), 1_250, 0)
    # Rank 0: 100 ns, half at 50. Rank 1: 6.25 B/ns until flow 2 ends with it at 200; half at 100.
    assert walk(table) == [(100, 1, 0), (200, 1, END), (200, 2, END)]


def test_nothing_to_move_is_reported_at_once():
    table = FlowTable([NIC])
    start(table, 1, (0,), 0, 10, latency_ns=5)
    start(table, 2, (), 1_000, 10, marks=(500,))
    assert table.next_event_ns() == 10
    assert [(e.at_ns, e.flow_id, e.mark) for e in table.advance(15)] == [
        (10, 2, 0),
        (10, 2, END),
        (15, 1, END),
    ]
    table.recount()


def test_sender_with_a_part_ready_stops_there_and_frees_the_links():
    """Layer-wise: 2 x 1250 bytes; the second half is ready only at 500 ns."""
    table = FlowTable([NIC])
    start(table, 1, (0,), 2_500, 0, limit_bytes=1_250)
    assert table.next_event_ns() == 100
    assert table.advance(100) == []
    assert utilization(table, 0) == 0.0
    assert table.delivered_bytes(1, 300) == 1_250
    table.recount()
    table.extend(1, 2_500, 500)
    assert ends(table) == {1: 600}


def test_extending_before_the_limit_is_reached_leaves_no_gap():
    table = FlowTable([NIC])
    start(table, 1, (0,), 2_500, 0, limit_bytes=1_250)
    table.extend(1, 1_000, 20)
    table.extend(1, 2_500, 40)
    assert ends(table) == {1: 200}


def test_nothing_ready_at_the_start_waits_for_the_first_layer():
    table = FlowTable([NIC])
    start(table, 1, (0,), 2_500, 0, limit_bytes=0)
    assert table.next_event_ns() is None
    table.extend(1, 2_500, 70)
    assert ends(table) == {1: 270}


def test_cancel_gives_what_was_carried_and_speeds_up_the_rest():
    table = FlowTable([NIC])
    start(table, 1, (0,), 12_500, 0)
    start(table, 2, (0,), 12_500, 0)
    # At 1001 ns each has 6256.25 bytes.
    assert table.cancel(1, 1_001) == 6_256
    assert table.lost_bytes == {"kv": 6_244}
    # 6243.75 left at 12.5 B/ns: 499.5 -> 500.
    assert ends(table) == {2: 1_501}
    assert table.books(10**15) == [{"kv": Books(moved=18_756, lost=6_244, in_flight=0)}]
    table.recount()


def test_cancel_between_last_byte_and_report_reports_nothing():
    table = FlowTable([NIC])
    start(table, 1, (0,), 1_250, 0, latency_ns=50)
    assert table.cancel(1, 120) == 1_250
    assert table.advance(10_000) == []
    assert 1 not in table


def test_link_down_stalls_in_place_and_up_goes_on():
    """F10: 400 ns of 1000 done, down for 5000."""
    table = FlowTable([NIC] * 2)
    start(table, 1, (0, 1), 12_500, 0)
    table.set_rate(1, 0, 400)
    assert table.next_event_ns() is None
    assert 1 in table
    assert utilization(table, 0) == utilization(table, 1) == 0.0
    table.recount()
    table.set_rate(1, NIC, 5_400)
    assert ends(table) == {1: 6_000}


def test_what_stalls_on_a_broken_link_takes_nothing_from_the_others():
    table = FlowTable([NIC] * 2)
    start(table, 1, (0, 1), 12_500, 0)
    start(table, 2, (0,), 12_500, 0)
    table.set_rate(1, 0, 0)
    assert ends(table) == {2: 1_000}


def test_degradation_counts_from_its_instant():
    """F11: half the rate from 500 ns on: the other 6250 bytes take 1000 ns; latency + 30."""
    table = FlowTable([NIC])
    start(table, 1, (0,), 12_500, 0, latency_ns=10)
    table.set_rate(0, NIC // 2, 500)
    table.set_extra_latency(0, 30, 500)
    assert ends(table) == {1: 1_540}


def test_partition_of_a_pair_stalls_that_pair_only():
    """F12, one direction: (0, 1) is cut from 200 to 1000 ns; (1, 0) and (0, 2) are not."""
    table = FlowTable([NIC] * 6)
    start(table, 1, (0, 1), 12_500, 0, pair=(0, 1))
    start(table, 2, (2, 3), 12_500, 0, pair=(1, 0))
    table.set_partition((0, 1), True, 200)
    start(table, 3, (0, 4), 12_500, 200, pair=(0, 2))
    start(table, 4, (0, 5), 12_500, 200, pair=(0, 1))
    table.recount()
    assert rate_of(table, 3) == NIC
    assert rate_of(table, 1) == rate_of(table, 4) == 0
    table.set_partition((0, 1), False, 1_200)
    # 3 ended at 1200. Then 1 (10 000 left) and 4 (12 500) share link 0: 1 ends after 1600; 4 has
    # 2500 left then: 200 more.
    assert ends(table) == {2: 1_000, 3: 1_200, 1: 2_800, 4: 3_000}


def test_reports_do_not_overtake_when_latency_falls():
    table = FlowTable([NIC])
    table.set_extra_latency(0, 100, 0)
    start(table, 1, (0,), 1_250, 0, marks=(625,))
    table.set_extra_latency(0, 0, 60)
    assert [(e.at_ns, e.mark) for e in table.advance(10_000)] == [(150, 0), (150, END)]


def test_books_tell_kinds_apart_and_count_what_is_under_way():
    table = FlowTable([NIC] * 2)
    start(table, 1, (0, 1), 12_500, 0, kind="kv")
    start(table, 2, (0,), 25_000, 0, kind="weights")
    books = table.books(1_000)
    assert books[0] == {
        "kv": Books(moved=6_250, in_flight=6_250),
        "weights": Books(moved=6_250, in_flight=18_750),
    }
    assert books[1] == {"kv": Books(moved=6_250, in_flight=6_250)}
    assert utilization(table, 0) == 1.0
    assert utilization(table, 1) == 0.5
    assert rate_of(table, 1) == rate_of(table, 2) == NIC / 2


def test_one_call_serves_end_and_report():
    """The owner sleeps until the report, not until the internal end 5 us before it."""
    table = FlowTable([NIC])
    start(table, 1, (0,), 12_500, 0, latency_ns=5_000)
    assert table.next_event_ns() == 6_000
    assert [e.at_ns for e in table.advance(6_000)] == [6_000]
    assert table.next_event_ns() is None


def test_void_entries_do_not_pile_up():
    table = FlowTable([NIC])
    for number in range(20):
        start(table, number, (0,), 10**9, 0)
    for turn in range(2_000):
        table.set_rate(0, NIC - turn, turn)
        table.next_event_ns()
    assert len(table._events) < 400
    # Looked at again when there are as many void ones as others, and 256 more: not with each one.
    table._drop_void_events()
    assert 0 < len(table._events) <= 20
    assert table._events_max == 256 + 2 * len(table._events)


def test_recount_notices_a_wrong_share():
    table = FlowTable([NIC])
    start(table, 1, (0,), 10**6, 0)
    start(table, 2, (0,), 10**6, 0)
    table.recount()
    flow = next(table._open_flows())
    flow.rate += flow.rate // 2
    with pytest.raises(InvariantViolation, match="above capacity"):
        table.recount()
    flow.rate //= 3
    with pytest.raises(InvariantViolation, match="could have more"):
        table.recount()


def test_recount_notices_lost_bytes():
    table = FlowTable([NIC])
    start(table, 1, (0,), 10**6, 0)
    table.started_bytes["kv"] += 1
    with pytest.raises(InvariantViolation, match="1000001 started, 1000000 accounted"):
        table.recount()


def test_recount_notices_a_list_of_flows_that_is_not_that_of_its_users():
    table = FlowTable([NIC])
    start(table, 1, (0,), 10**6, 0)
    start(table, 2, (0,), 10**6, 0)
    first, second = table._open_flows()
    del table.links[0].running[second.seq]
    with pytest.raises(InvariantViolation, match=f"lists flows .{first.seq}., used by"):
        table.recount()


def test_recount_notices_a_flow_that_moves_though_it_stands():
    table = FlowTable([NIC])
    start(table, 1, (0,), 10**6, 0)
    start(table, 2, (0,), 10**6, 0, pair=(0, 1))
    table.set_partition((0, 1), True, 10)
    table.recount()
    next(flow for flow in table._open_flows() if not flow.is_running).rate = 1
    with pytest.raises(InvariantViolation, match="a stopped flow has a rate"):
        table.recount()


@pytest.mark.parametrize(("too_far_ns", "told"), [(1, ""), (3, "is beyond its limit")])
def test_recount_notices_more_than_there_is(too_far_ns, told):
    """What a flow carries in one nanosecond may be missing at its limit, and no more."""
    table = FlowTable([NIC])
    start(table, 1, (0,), 10**6, 0, limit_bytes=5_000)
    start(table, 2, (0,), 10**6, 0)
    table.recount()  # rates are dealt out
    flow = next(table._open_flows())
    assert flow.rate > 0
    flow.limit = -too_far_ns * flow.rate
    if told:
        with pytest.raises(InvariantViolation, match=told):
            table.recount()
    else:
        table.recount()


def test_recount_notices_a_flow_that_is_ahead_of_what_it_forwards():
    """5,000 bytes have come, of which the last 1,000 are not forwarded yet."""
    table = FlowTable([NIC, NIC])
    start(table, 1, (0,), 10**6, 0)
    start(table, 2, (1,), 10**6, 0, after=1, lag_bytes=1_000)
    table.advance(400)
    follower = next(flow for flow in table._open_flows() if flow.feeder is not None)
    table.recount()
    follower.done += follower.rate
    table.recount()  # a nanosecond's may be missing
    follower.done += follower.rate
    with pytest.raises(InvariantViolation, match="is ahead of its feeder"):
        table.recount()


def test_time_does_not_go_back():
    table = FlowTable([NIC])
    table.advance(10)
    with pytest.raises(AssertionError, match="time goes back"):
        table.advance(9)


def test_what_has_ended_is_freed_without_the_collector():
    """A run collects no cycles: a transfer that kept one would stay until the end."""
    table = FlowTable([NIC] * 2)
    gc.collect()
    gc.disable()
    try:
        start(table, 1, (0, 1), 1_000, 0)
        start(table, 2, (0, 1), 1_000, 0)
        table.cancel(2, 10)
        assert list(ends(table)) == [1]
        held = [o for o in gc.get_objects() if isinstance(o, Flow) and o.size_bytes == 1_000]
    finally:
        gc.enable()
    assert held == []
