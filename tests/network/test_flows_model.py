"""The flow table against an independent model, on random links, flows and faults."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from emu.network.flows import END, FlowTable
from emu.network.links import UNITS_PER_BYTE
from tests.network.flow_reference import Reference, RefFlow, progressive_filling
from tests.network.rates import rate_of, start

RATES = [1, 7, 1_000, 12_500_000_000, 200_000_000_000, 16_000_000_000, 999_999_937, 3_333_333_333]
PROFILE = settings(deadline=None, max_examples=60)


@st.composite
def paths(draw, links):
    return tuple(draw(st.lists(st.integers(0, links - 1), min_size=1, max_size=4, unique=True)))


@st.composite
def worlds(draw):
    links = draw(st.integers(1, 6))
    rates = draw(st.lists(st.sampled_from(RATES[3:]), min_size=links, max_size=links))
    operations = []
    now = 0
    for _ in range(draw(st.integers(1, 14))):
        # Few distinct gaps, so that equal instants are common.
        now += draw(st.sampled_from([0, 0, 1, 250, 1_000, 4_321]))
        what = draw(st.sampled_from(["start", "start", "start", "cancel", "rate"]))
        if what == "start":
            size = draw(st.sampled_from([1, 1_000, 12_500, 50_000, 65_536, 99_991]))
            marks = sorted(draw(st.lists(st.integers(1, size), max_size=3)))
            operation = (draw(paths(links)), size, draw(st.integers(1, 3)), tuple(marks))
        elif what == "cancel":
            operation = (draw(st.integers(0, 10)),)
        else:
            operation = (draw(st.integers(0, links - 1)), draw(st.sampled_from([0, *RATES[3:]])))
        operations.append((now, what, operation))
    return rates, operations


def drive(table: FlowTable, until: float, seen: list, audit: bool = True) -> None:
    while (at := table.next_event_ns()) is not None and at <= until:
        seen.extend(table.advance(at))
        if audit:
            table.recount()


# Once ended a nanosecond early: 1e-10 byte was within the tolerance.
THIRDS = ([3_333_333_333], [(0, "start", ((0,), 1, w, ())) for w in (1, 1, 1, 1, 1, 1, 1, 3)])


@PROFILE
@example(THIRDS)
@given(worlds())
def test_times_shares_and_bytes_equal_those_of_the_model(world):
    rates, operations = world
    table, model = FlowTable(rates), Reference(rates)
    seen: list = []
    operations = [*operations, *((10**6, "rate", (i, r)) for i, r in enumerate(rates))]
    for number, (now, what, arguments) in enumerate(operations):
        drive(table, now, seen)
        seen.extend(table.advance(now))
        model.run_until(now)
        if what == "start":
            links, size, weight, marks = arguments
            start(table, number, links, size, now, weight=weight, marks=marks)
            model.flows[number] = RefFlow(links, size, weight, marks)
        elif what == "rate":
            table.set_rate(*arguments, now)
            model.capacity[arguments[0]] = Fraction(arguments[1], 10**9)
        elif model.active():
            chosen = sorted(model.active())[arguments[0] % len(model.active())]
            carried = table.cancel(chosen, now)
            assert carried == math.floor(model.flows[chosen].done)
            model.flows[chosen].cancelled = True
        table.recount()
        flows = model.active()
        expected = progressive_filling(flows, model.capacity)
        for key in flows:
            exact = float(expected[key]) * 1e9
            assert math.isclose(rate_of(table, key), exact, rel_tol=1e-12)
            assert table.delivered_bytes(key, now) == math.floor(flows[key].done)
    drive(table, math.inf, seen)
    model.run_until(math.inf)
    found = sorted((e.flow_id, e.mark, e.at_ns) for e in seen)
    wanted = []
    for key, flow in model.flows.items():
        wanted += [(key, mark, at) for mark, at in enumerate(flow.mark_ns)]
        if flow.end_ns is not None:
            wanted.append((key, END, flow.end_ns))
    assert found == sorted(wanted)
    assert [e.at_ns for e in seen] == sorted(e.at_ns for e in seen)
    assert len(table) == 0, "every link is up again at the end"
    started, carried, lost = (
        sum(books.values())
        for books in (table.started_bytes, table.carried_bytes, table.lost_bytes)
    )
    assert started == carried + lost == sum(flow.size for flow in model.flows.values())


@PROFILE
@given(worlds())
def test_when_the_owner_looks_does_not_change_what_happens(world):
    """Advancing at every event, or only once at the end, gives the same reports."""
    rates, operations = world
    results = []
    for eager in (True, False):
        table = FlowTable(rates)
        seen: list = []
        for number, (now, what, arguments) in enumerate(operations):
            if eager:
                drive(table, now, seen)
            if what == "start":
                links, size, weight, marks = arguments
                start(table, number, links, size, now, weight=weight, marks=marks, latency_ns=5_000)
            elif what == "rate":
                table.set_rate(*arguments, now)
        for link, rate in enumerate(rates):
            table.set_rate(link, rate, 10**6)
        seen.extend(table.advance(10**12))
        results.append([(e.at_ns, e.flow_id, e.mark) for e in seen])
    assert results[0] == results[1]


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 41), st.lists(st.sampled_from(RATES[3:]), min_size=2, max_size=5))
def test_no_drift_over_thousands_of_rate_changes(sharers, rates):
    """After 2,000 changes each of k flows has carried exactly a k-th, and ends on the nanosecond."""
    table, changes, step = FlowTable([rates[0]]), 2_000, 977
    carried = Fraction(0)
    size = 10**9
    for number in range(sharers):
        start(table, number, (0,), size * 10**6, 0, marks=(size,))
    seen: list = []
    expected_ns = None
    for turn in range(changes):
        now = turn * step
        seen.extend(table.advance(now))
        rate = Fraction(rates[turn % len(rates)], 10**9 * sharers)
        table.set_rate(0, rates[turn % len(rates)], now)
        if expected_ns is None and carried + rate * step >= size:
            expected_ns = now + math.ceil((size - carried) / rate)
        carried += rate * step
    end = changes * step
    seen.extend(table.advance(end))
    for flow in table._open_flows():
        error = carried - Fraction(flow.done_at(end), UNITS_PER_BYTE)
        assert 0 <= error < Fraction(end, UNITS_PER_BYTE)
    assert [e.at_ns for e in seen] == ([] if expected_ns is None else [expected_ns] * sharers)


@PROFILE
@given(worlds(), st.integers(2, 4))
def test_a_faster_link_never_makes_the_whole_later(world, factor):
    rates, operations = world
    makespans = []
    for scale in (1, factor):
        table = FlowTable([rates[0] * scale])
        for number, (now, what, arguments) in enumerate(operations):
            if what == "start":
                start(table, number, (0,), arguments[1], now)
        makespans.append(max((e.at_ns for e in table.advance(10**9)), default=0))
        assert len(table) == 0
    # Each end is rounded up to a nanosecond before the rest speeds up.
    assert makespans[1] <= makespans[0] + len(operations)


@PROFILE
@given(
    st.lists(
        st.sampled_from([4_000_000_000, 12_500_000_000, 25_000_000_000]), min_size=2, max_size=6
    ),
    st.integers(1, 4),
    st.lists(
        st.tuples(
            st.integers(0, 20_000), st.integers(0, 5), st.sampled_from([0, 10**9, 12_500_000_000])
        ),
        max_size=8,
    ),
)
def test_a_chain_under_faults_keeps_order_and_bytes(rates, chunks, faults):
    """I17: node i never ends before node i - 1, every byte arrives once, whatever the links do."""
    table = FlowTable([*rates, 12_500_000_000])
    size = 100_000
    lag = size // (4 * chunks)
    for hop in range(len(rates)):
        start(
            table,
            hop,
            (hop,),
            size,
            0,
            after=hop - 1 if hop else None,
            lag_bytes=lag,
            kind="weights",
        )
    start(table, 99, (0, len(rates)), 30_000, 500)
    seen: list = []
    now = 500
    for at, link, rate in sorted(faults):
        now = max(at, now)
        drive(table, now, seen)
        table.set_rate(link % len(rates), rate, now)
        table.recount()
        done = [
            table.delivered_bytes(hop, now) if hop in table else size for hop in range(len(rates))
        ]
        assert done == sorted(done, reverse=True)
    for link, rate in enumerate(rates):
        table.set_rate(link, rate, now)
    drive(table, math.inf, seen)
    ends = {e.flow_id: e.at_ns for e in seen}
    hop_ends = [ends[hop] for hop in range(len(rates))]
    assert all(a < b for a, b in itertools.pairwise(hop_ends))
    assert table.carried_bytes == {"weights": size * len(rates), "kv": 30_000}
