"""A transfer that has its links to itself needs no flow, and reports are the same."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from emu.network.flows import END, FlowTable, TransferSpec
from tests.network.rates import rate_of, start
from tests.network.test_flows_model import PROFILE, RATES, drive, paths, worlds

NIC = 12_500_000_000


@PROFILE
@given(worlds(), st.booleans())
def test_looking_changes_nothing(world, has_latency):
    """A look gives all transfers flows: the reports are the same without."""
    rates, operations = world
    reports = []
    for is_watched in (False, True):
        table = FlowTable(rates)
        seen: list = []
        for number, (now, what, arguments) in enumerate(operations):
            drive(table, now, seen, audit=is_watched)
            if what == "start":
                links, size, _, _ = arguments
                latency_ns = 1_000 * (number % 3) if has_latency else 0
                start(table, number, links, size, now, latency_ns=latency_ns)
            elif what == "cancel":
                if arguments[0] in table:
                    table.cancel(arguments[0], now)
            else:
                table.set_rate(*arguments, now)
            if is_watched:
                table.recount()
        for link, rate in enumerate(rates):
            table.set_rate(link, rate, operations[-1][0])
        drive(table, math.inf, seen, audit=is_watched)
        reports.append([(e.at_ns, e.flow_id, e.mark) for e in seen])
    assert reports[0] == reports[1]


@st.composite
def worlds_of_parts(draw):
    """Transfers of several parts, and what befalls their links."""
    links = draw(st.integers(2, 8))
    rates = draw(st.lists(st.sampled_from(RATES[3:]), min_size=links, max_size=links))
    operations = []
    now = 0
    for _ in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from([0, 1, 2, 4, 250, 1_000, 4_321]))
        what = draw(st.sampled_from(["start", "start", "start", "cancel", "rate", "delay", "cut"]))
        if what == "start":
            sizes = st.sampled_from([0, 1, 12, 13, 12_500, 12_501, 50_000])
            parts = draw(st.lists(st.tuples(paths(links), sizes), min_size=1, max_size=4))
            operations.append((now, what, (parts, draw(st.integers(0, 2)) * 700)))
        elif what == "cancel":
            operations.append((now, what, (draw(st.integers(0, 10)),)))
        elif what == "cut":
            operations.append((now, what, (draw(st.booleans()),)))
        else:
            to = st.sampled_from([0, *RATES[3:]] if what == "rate" else [0, 90, 4_000])
            operations.append((now, what, (draw(st.integers(0, links - 1)), draw(to))))
    return rates, operations


@PROFILE
@given(worlds_of_parts(), st.lists(st.integers(0, 11)))
def test_a_transfer_of_parts_is_alone_as_flows_would_be(world, looks):
    """A limit at its size keeps a transfer from being alone: reports and books are the same."""
    rates, operations = world
    found = []
    for has_flows, looked in ((True, range(12)), (False, looks), (False, ())):
        table = FlowTable(rates)
        seen: list = []
        delivered = []
        for number, (now, what, arguments) in enumerate(operations):
            drive(table, now, seen, audit=False)
            seen.extend(table.advance(now))
            if what == "start":
                parts, latency_ns = arguments
                size = sum(size for _, size in parts)
                spec = TransferSpec("kv", latency_ns, (0, number % 2))
                spec.limit_bytes = size if has_flows else None
                table.start_group(number, parts, now, spec)
            elif what == "cancel" and arguments[0] in table:
                delivered.append(table.cancel(arguments[0], now))
            elif what == "cut":
                table.set_partition((0, 0), *arguments, now)
            elif what == "rate":
                table.set_rate(*arguments, now)
            elif what == "delay":
                table.set_extra_latency(*arguments, now)
            if number in looked:
                table.recount()
                open_ids = [one for one in range(number + 1) if one in table]
                told = {one: table.delivered_bytes(one, now) for one in open_ids}
                delivered += list(told.items()) if number in looks else []
        last_ns = operations[-1][0]
        table.set_partition((0, 0), False, last_ns)
        for link, rate in enumerate(rates):
            table.set_rate(link, rate, last_ns)
        drive(table, math.inf, seen, audit=False)
        found.append(([(e.at_ns, e.flow_id) for e in seen], table.books(10**12), delivered))
    assert found[0] == found[1]
    assert found[0][:2] == found[2][:2]


def test_a_transfer_of_parts_on_free_links_has_no_flows():
    table = FlowTable([NIC] * 4)
    table.start_group(1, [((0, 1), 2_500), ((2, 3), 1_250)], 0, TransferSpec())
    transfer = table.transfer(1)
    assert transfer is not None
    assert not transfer.flows
    start(table, 2, (2,), 1_250, 150)  # the second part has ended: its links are free
    assert [(e.at_ns, e.flow_id) for e in table.advance(300)] == [(200, 1), (250, 2)]


def test_a_second_transfer_on_a_link_shares_it_from_then_on():
    """Alone 12.5 bytes/ns for 100 ns, then half of it: 1 250 + 6.25 x 200 = 2 500 bytes."""
    table = FlowTable([NIC, NIC])
    start(table, 1, (0, 1), 2_500, 0)
    assert table.next_event_ns() == 200
    start(table, 2, (1,), 12_500, 100)
    assert table.next_event_ns() == 300
    assert [(e.at_ns, e.flow_id, e.mark) for e in table.advance(300)] == [(300, 1, END)]
    assert rate_of(table, 2) == NIC


def test_a_link_is_free_when_the_last_byte_has_left_not_at_the_report():
    table = FlowTable([NIC])
    start(table, 1, (0,), 1_250, 0, latency_ns=1_000)
    start(table, 2, (0,), 1_250, 100, latency_ns=1_000)
    assert [(e.at_ns, e.flow_id) for e in table.advance(2_000)] == [(1_100, 1), (1_200, 2)]


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 99), st.integers(0, 99))
def test_a_link_that_fails_holds_up_who_was_alone_on_it(size_bytes, down_ns):
    table = FlowTable([10**9])  # a byte a nanosecond
    start(table, 1, (0,), 100 + size_bytes, 0)
    table.set_rate(0, 0, down_ns)
    assert table.next_event_ns() is None
    assert table.delivered_bytes(1, 1_000) == down_ns
    table.set_rate(0, 10**9, 1_000)
    assert [e.at_ns for e in table.advance(10_000)] == [1_000 + 100 + size_bytes - down_ns]
