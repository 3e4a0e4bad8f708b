"""The arithmetic scale, and the division of links by itself."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from emu.network.flows import FlowTable
from emu.network.links import SLACK_UNITS, UNITS_PER_BYTE, rate_units
from tests.network.rates import start, utilization


def test_a_rate_in_bytes_per_second_is_exact():
    assert Fraction(rate_units(12_500_000_000), UNITS_PER_BYTE) == Fraction(125, 10)
    assert Fraction(rate_units(1), UNITS_PER_BYTE) == Fraction(1, 10**9)


def test_equal_shares_among_up_to_32_are_exact():
    for sharers in range(1, 33):
        assert rate_units(1) % sharers == 0


def test_slack_exceeds_the_rounding_of_eleven_days_among_a_thousand():
    assert SLACK_UNITS > 10**15 * 1_000


def test_slack_is_finer_than_any_distance_on_small_clusters():
    """A flow of weight 3 beside seven of weight 1 on 3 333 333 333 B/s has 1e-10 byte left at 1 ns."""
    table = FlowTable([3_333_333_333])
    for number in range(7):
        start(table, number, (0,), 1, 0)
    start(table, 7, (0,), 1, 0, weight=3)
    assert next((e.flow_id, e.at_ns) for e in table.advance(100)) == (7, 2)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=5),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), st.integers(1, 9)
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_shares_fit_and_are_max_min_fair_whatever_the_rates(rates, flows):
    table = FlowTable(rates)
    for number, (path, weight) in enumerate(flows):
        links = list(dict.fromkeys(link % len(rates) for link in path))
        start(table, number, links, 10**15, 0, weight=weight)
    table.recount()
    for link in range(len(rates)):
        assert utilization(table, link) <= 1
