"""Congestion-aware collectives: by hand, against the table, and against the sums without it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.errors import InputError
from emu.network.collectives import collective_ns, ends_ns
from emu.network.congestion import congested_ns, simulate_ends_ns
from emu.network.dimensions import NetworkDim
from emu.network.rounds import CollectiveSystem
from tests.network.collective_table import TABLE, frontend, table_rows, table_system

ONE_BYTE_PER_NS = 1e9 / 2**30


def one_dim(topology, npus, algorithm, **kw):
    dim = NetworkDim(topology=topology, npus=npus, gib_per_s=ONE_BYTE_PER_NS, latency_ns=100)
    return CollectiveSystem(dims=(dim,), algorithms=(algorithm,), local_mem_gbytes_per_s=1.0, **kw)


def test_switch_stores_and_forwards_by_hand():
    # Ring on a switch: two hops of 100 + 50 each instead of 2 * 100 + 50.
    system = one_dim("Switch", 4, "ring")
    assert congested_ns(system, "all-gather", 50) == 10 * 4 + 3 * 300
    assert collective_ns(system, "all-gather", 50) == 10 * 4 + 3 * 250


def test_direct_on_a_switch_queues_at_the_sender_by_hand():
    # Three messages of 50 ns leave one after the other; the last is in the switch at 100 + 150.
    system = one_dim("Switch", 4, "direct")
    assert congested_ns(system, "all-gather", 50) == 10 + (100 + 100 + 50) + (100 + 50) + 10


def test_direct_on_a_ring_shares_the_links_by_hand():
    # Rank 0 sends clockwise to 1 and 2, the other way to 3. Its link 0-1 carries its own two
    # messages and then one that comes through from 3: three times 50.
    system = one_dim("Ring", 4, "direct")
    ends = simulate_ends_ns(system, "all-gather", 50, aware=True)
    assert ends == [10 + (50 + 100 + 50) + (100 + 50) + 10] * 4


@settings(max_examples=30, deadline=None)
@given(
    algorithm=st.sampled_from(["ring", "direct", "halvingDoubling"]),
    kind=st.sampled_from(["all-reduce", "reduce-scatter", "all-gather"]),
    npus=st.sampled_from([2, 4, 8]),
    size=st.integers(8, 1 << 20),
    splits=st.sampled_from([1, 3]),
)
def test_nothing_changes_where_no_link_is_shared(algorithm, kind, npus, size, splits):
    system = frontend(npus, algorithm=algorithm, splits=splits)
    assert congested_ns(system, kind, size) == collective_ns(system, kind, size)


@settings(max_examples=30, deadline=None)
@given(
    starts=st.lists(st.integers(0, 50_000), min_size=8, max_size=8),
    kind=st.sampled_from(["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]),
    size=st.integers(1, 1 << 20),
)
def test_event_simulation_equals_the_recursion_for_staggered_ranks(starts, kind, size):
    system = frontend(2, 4)
    simulated = simulate_ends_ns(system, kind, size, aware=False, starts_ns=starts)
    assert simulated == ends_ns(system, kind, size, starts)


def test_several_dimensions_cannot_be_aware():
    with pytest.raises(InputError, match="one dimension only"):
        simulate_ends_ns(frontend(2, 2), "all-reduce", 4096, aware=True)


@pytest.mark.shared
@pytest.mark.skipif(not TABLE.exists(), reason="needs ../shared/data/astra-sim-cycles.csv")
@pytest.mark.parametrize("backend", ["aware", "unaware"])
def test_every_row_of_the_table_to_the_cycle(backend):
    rows = table_rows(backend)
    assert len(rows) >= 200
    for row in rows:
        system, size = table_system(row), int(row["size_bytes"])
        ends = simulate_ends_ns(system, row["collective"], size, aware=backend == "aware")
        assert max(ends) == int(row["cycles"]), row


def test_the_second_half_of_a_direct_all_reduce_leaves_packet_by_packet():
    # Two messages of 100 ns arrive 100 apart and are reduced for 300 each. When the packet of the
    # first is ready, both have come in: it leaves then, the other one when that is ready, too.
    system = one_dim("Switch", 3, "direct")
    arrived = [10 + (100 + 100) + (100 + 100), 10 + (100 + 100 + 100) + (100 + 100)]
    ready = [at + 10 + 300 for at in arrived]
    assert arrived[1] < ready[0]
    assert congested_ns(system, "all-reduce", 300) == ready[1] + (100 + 100) + (100 + 100) + 10
