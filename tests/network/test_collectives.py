"""Collective costs without congestion: by hand, against the reference's figures, and as laws."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.errors import InputError
from emu.network.chunks import chunk_sizes, pipeline_ns
from emu.network.collectives import (
    Collectives,
    CollectiveSystem,
    collective_ns,
    ends_ns,
)
from emu.network.dimensions import NetworkDim, coordinates, group_of, message_between_ns
from emu.network.rounds import KINDS, Parsed, parse_algorithm
from tests.csvfile import csv_rows
from tests.network.collective_table import TABLE, frontend, table_rows, table_system


def test_ring_all_reduce_by_hand():
    # 1 byte/ns links, memory 1 byte/ns: m = 400, net = 100 + 400, reduction 3 * 400.
    dim = NetworkDim(topology="Ring", npus=4, gib_per_s=1e9 / 2**30, latency_ns=100)
    system = CollectiveSystem(dims=(dim,), local_mem_gbytes_per_s=1.0)
    assert collective_ns(system, "all-reduce", 1600) == 10 * 7 + 6 * 500 + 3 * 1200
    assert collective_ns(system, "reduce-scatter", 1600) == 10 * 4 + 3 * (500 + 1200)
    assert collective_ns(system, "all-gather", 400) == 10 * 4 + 3 * 500
    assert collective_ns(system, "all-to-all", 1600) == 10 * 7 + 6 * 500


@pytest.mark.parametrize(
    ("npus", "kind", "size", "algorithm", "cycles"),
    [
        (2, "all-reduce", 4096, "ring", 40_271),
        (4, "all-reduce", 4096, "ring", 120_424),
        (2, "all-reduce", 4_194_304, "ring", 288_109),
        (2, "all-gather", 1_114_112, "ring", 84_869),
        (2, "reduce-scatter", 2_097_152, "ring", 83_023),
        (4, "all-to-all", 16_384, "ring", 121_498),
        (4, "all-reduce", 16_384, "direct", 40_512),
    ],
)
def test_reference_values(npus, kind, size, algorithm, cycles):
    system = frontend(npus, algorithm=algorithm)
    assert collective_ns(system, kind, size) == cycles
    assert ends_ns(system, kind, size, [7] * npus) == [cycles + 7] * npus


def test_a_late_rank_delays_its_ring_as_in_the_program():
    system = frontend(2)
    assert ends_ns(system, "all-reduce", 4096, [1_000, 31_000]) == [51_152, 71_271]
    assert ends_ns(system, "all-reduce", 4096, [1_000, 1_500]) == [41_271, 41_771]
    late = ends_ns(frontend(4), "all-reduce", 4096, [1_000, 1_000, 71_000, 1_000])
    assert late == [191_424, 131_247, 151_306, 171_365]


def test_small_collectives_are_padded_to_one_byte_a_rank():
    assert chunk_sizes("all-reduce", 3, 1, 8) == [8]
    assert chunk_sizes("all-gather", 3, 1, 8) == [3]
    assert chunk_sizes("all-reduce", 20, 4, 8) == [8, 8, 8, 8]
    assert chunk_sizes("reduce-scatter", 1001, 4, 8) == [250] * 5


def test_chunks_overlap_in_different_dimensions_and_queue_in_the_same():
    # Queue 0 takes 10, queue 1 takes 4: the last of three chunks leaves queue 0 at 30.
    assert pipeline_ns([[(0, 10), (1, 4)]] * 3, 2, 1) == 34
    # Back through queue 0: it joins behind the chunks that are still to enter.
    assert pipeline_ns([[(0, 10), (1, 4), (0, 10)]] * 2, 2, 1) == 40
    assert pipeline_ns([[(0, 10)]] * 4, 1, 2) == 20


def test_no_active_dimension_costs_nothing():
    assert collective_ns(frontend(2, 2), "all-reduce", 4096, [False, False]) == 0
    assert collective_ns(frontend(1), "all-reduce", 4096) == 0
    # A flag list that is too short leaves the rest out.
    assert collective_ns(frontend(2, 2), "all-reduce", 4096, [True]) == 40_271


def test_convenience_fills_dimensions_from_the_first():
    collectives = Collectives(frontend(2, 4))
    assert collectives.shape(2) == (2, 1)
    assert collectives.shape(8) == (2, 4)
    assert collectives.shape(4) == (2, 2)
    assert collectives.collective_ns("all-reduce", 4096, 1) == 0
    assert collectives.collective_ns("all-reduce", 4096, 2) == 40_271
    assert collectives.message_ns(4_194_304) == 264_140
    with pytest.raises(InputError, match="3 ranks do not fill dimensions of 2 x 4"):
        collectives.collective_ns("all-reduce", 4096, 3)


def test_impossible_algorithms_are_refused():
    with pytest.raises(InputError, match="power of two"):
        collective_ns(frontend(6, algorithm="halvingDoubling"), "all-reduce", 4096)
    with pytest.raises(InputError, match="no all-to-all"):
        collective_ns(frontend(4, algorithm="halvingDoubling"), "all-to-all", 4096)


def test_messages_and_groups_on_a_grid():
    dims = frontend(2, 3).dims
    assert coordinates(5, dims) == (1, 2)
    assert group_of(5, dims, [0]) == (4, 5)
    assert group_of(5, dims, [1]) == (1, 3, 5)
    assert group_of(3, dims, [0, 1]) == (0, 1, 2, 3, 4, 5)
    assert message_between_ns(dims, 0, 4, 8192) == 20_476
    ring = NetworkDim(topology="Ring", npus=6, gib_per_s=16.0, latency_ns=100)
    assert [ring.hops(0, k) for k in range(6)] == [0, 1, 2, 3, 2, 1]


@settings(max_examples=60, deadline=None)
@given(
    npus=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 1 << 22),
    algorithm=st.sampled_from(["ring", "direct", "halvingDoubling"]),
    late=st.integers(0, 100_000),
    data=st.data(),
)
def test_staggered_recursion_contains_the_simultaneous_sum(npus, kind, size, algorithm, late, data):
    if algorithm == "halvingDoubling" and kind == "all-to-all":
        algorithm = "direct"
    system = frontend(*npus, algorithm=algorithm)
    total = 1
    for n in npus:
        total *= n
    if total == 1:
        return
    together = collective_ns(system, kind, size)
    assert ends_ns(system, kind, size, [0] * total) == [together] * total
    slow = data.draw(st.integers(0, total - 1))
    starts = [late if rank == slow else 0 for rank in range(total)]
    ends = ends_ns(system, kind, size, starts)
    assert min(ends) >= together
    assert max(ends) <= together + late
    assert min(ends) > late


@pytest.mark.shared
@pytest.mark.skipif(not TABLE.exists(), reason="needs ../shared/data/astra-sim-cycles.csv")
def test_every_unaware_row_of_the_table_to_the_cycle():
    rows = table_rows("unaware")
    assert len(rows) >= 300
    for row in rows:
        cycles = collective_ns(table_system(row), row["collective"], int(row["size_bytes"]))
        assert cycles == int(row["cycles"]), row


MEASURED = Path(__file__).parent / "measured_collectives.csv"


def test_further_counts_of_the_program_to_the_cycle():
    # Random systems and algorithms, counted by the published program; `involved` one flag a
    # dimension, empty = all.
    rows = csv_rows(MEASURED)
    assert len(rows) > 50
    for row in rows:
        system = table_system(row)
        system = msgspec.structs.replace(
            system,
            endpoint_delay_ns=int(row["endpoint_delay_ns"]),
            optimization=row["optimization"],
        )
        flags = [flag == "1" for flag in row["involved"]] or None
        cycles = collective_ns(system, row["collective"], int(row["size_bytes"]), flags)
        assert cycles == int(row["cycles"]), row


@settings(max_examples=60, deadline=None)
@given(
    npus=st.sampled_from([2, 3, 4, 8]),
    kind=st.sampled_from(KINDS),
    size=st.integers(8, 1 << 20),
    starts=st.lists(st.integers(0, 100_000), min_size=8, max_size=8),
)
def test_direct_packet_by_packet_is_the_sum_of_its_rounds(npus, kind, size, starts):
    system = frontend(npus, algorithm="direct")
    together = ends_ns(system, kind, size, [5] * npus)
    assert together == [5 + collective_ns(system, kind, size)] * npus
    windowed = frontend(npus, algorithm=f"direct{npus - 1}")
    assert collective_ns(windowed, kind, size) == collective_ns(system, kind, size)
    late = ends_ns(system, kind, size, starts[:npus])
    assert min(late) >= max(starts[:npus])
    assert max(late) <= max(starts[:npus]) + collective_ns(system, kind, size)


def test_names_of_algorithms():
    assert parse_algorithm("oneDirect12") == Parsed("direct", 12, True)
    for name in ("direct0", "ring4", "oneDoubleBinaryTree", "", "direct-1"):
        with pytest.raises(InputError, match="is not one of ring, direct, halvingDoubling"):
            parse_algorithm(name)
    with pytest.raises(InputError, match="doubleBinaryTree has no all-gather"):
        collective_ns(frontend(4, algorithm="doubleBinaryTree"), "all-gather", 64)
    with pytest.raises(InputError, match="power of two ranks, not 6"):
        collective_ns(frontend(6, algorithm="doubleBinaryTree"), "all-reduce", 64)


def test_a_tree_by_hand():
    # Four ranks: 3 is the root, 1 below it, 0 and 2 are leaves. 4096 bytes take 20,238 ns.
    system = frontend(4, algorithm="doubleBinaryTree")
    net, delay, reduce = 20_238, 10, 3 * int(4096 / 1597)
    top = delay + net + delay + reduce
    root = top + net + delay + reduce
    below = root + net + delay + reduce
    assert ends_ns(system, "all-reduce", 4096, [0] * 4) == [
        below + net + delay, below, below + net + delay, root,
    ]  # fmt: skip
