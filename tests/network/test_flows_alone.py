"""A transfer that has its links to itself needs no flow, and reports are the same."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from emu.network.flows import END, FlowTable
from tests.network.rates import rate_of
from tests.network.test_flows_model import PROFILE, drive, worlds

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
                table.start(number, links, size, now, latency_ns=latency_ns)
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


def test_a_second_transfer_on_a_link_shares_it_from_then_on():
    """Alone 12.5 bytes/ns for 100 ns, then half of it: 1 250 + 6.25 x 200 = 2 500 bytes."""
    table = FlowTable([NIC, NIC])
    table.start(1, (0, 1), 2_500, 0)
    assert table.next_event_ns() == 200
    table.start(2, (1,), 12_500, 100)
    assert table.next_event_ns() == 300
    assert [(e.at_ns, e.flow_id, e.mark) for e in table.advance(300)] == [(300, 1, END)]
    assert rate_of(table, 2) == NIC


def test_a_link_is_free_when_the_last_byte_has_left_not_at_the_report():
    table = FlowTable([NIC])
    table.start(1, (0,), 1_250, 0, latency_ns=1_000)
    table.start(2, (0,), 1_250, 100, latency_ns=1_000)
    assert [(e.at_ns, e.flow_id) for e in table.advance(2_000)] == [(1_100, 1), (1_200, 2)]


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 99), st.integers(0, 99))
def test_a_link_that_fails_holds_up_who_was_alone_on_it(size_bytes, down_ns):
    table = FlowTable([10**9])  # a byte a nanosecond
    table.start(1, (0,), 100 + size_bytes, 0)
    table.set_rate(0, 0, down_ns)
    assert table.next_event_ns() is None
    assert table.delivered_bytes(1, 1_000) == down_ns
    table.set_rate(0, 10**9, 1_000)
    assert [e.at_ns for e in table.advance(10_000)] == [1_000 + 100 + size_bytes - down_ns]
