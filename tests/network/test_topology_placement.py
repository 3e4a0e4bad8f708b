"""Which replica is on which GPUs, and which GPUs a transfer connects."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.catalogue.gpu import GpuSpec
from emu.config.schema import NodeTable, ReplicaTable
from emu.errors import InputError
from emu.network.grids import Grid, shard_paths, shard_shares
from emu.network.placement import place
from emu.network.topology import build_topology
from emu.units import cut_by

A100 = GpuSpec(
    name="A100", memory_gib=80, memory_gbytes_per_s=2039, tflops_fp16=312, nvlink_gbps=2400
)
H100 = GpuSpec(
    name="H100", memory_gib=80, memory_gbytes_per_s=3350, tflops_fp16=989, nvlink_gbps=3600
)


def cluster(*nodes: NodeTable):
    return build_topology(nodes, [node.gpu for node in nodes])


TWO_OF_FOUR = cluster(NodeTable(count=2, gpu=A100, gpus=4))


def replicas(tensor_parallel=1, **keys) -> ReplicaTable:
    return ReplicaTable(tensor_parallel=tensor_parallel, **keys)


def test_replicas_take_gpus_in_order():
    tables = [replicas(count=3), replicas(2, count=2)]
    # GPU 3 stays free: a pair on 3 and 4 would span two machines.
    assert place(tables, TWO_OF_FOUR) == [[0], [1], [2], [4, 5], [6, 7]]


def test_holes_are_filled_by_whoever_fits():
    tables = [replicas(count=3), replicas(2), replicas()]
    assert place(tables, TWO_OF_FOUR) == [[0], [1], [2], [4, 5], [3]]


def test_given_gpus_are_kept_free_for_those_who_named_them():
    tables = [replicas(count=2), replicas(2, gpus=[1, 0])]
    assert place(tables, TWO_OF_FOUR) == [[2], [3], [1, 0]]


def test_spread_replicas_are_dealt_over_the_machines():
    tables = [replicas(count=3, place="spread"), replicas(2, count=2, place="spread")]
    # Machine 0 has one GPU less to spare after the first table: pairs begin on machine 1.
    assert place(tables, TWO_OF_FOUR) == [[0], [4], [1], [5, 6], [2, 3]]


def test_what_is_larger_than_a_machine_cannot_be_spread():
    tables = [replicas(8, place="spread")]
    assert place(tables, TWO_OF_FOUR) == [list(range(8))]


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4])), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_no_machine_holds_more_of_a_spread_group_than_it_must(machines, groups):
    needed = sum(count * size for count, size in groups)
    topology = cluster(NodeTable(count=max(machines, -(-needed // 8) + len(groups)), gpu=A100))
    places = place(
        [replicas(size, count=count, place="spread") for count, size in groups], topology
    )
    for count, _ in groups:
        mine, places = places[:count], places[count:]
        of_machines = [gpus[0] // 8 for gpus in mine]
        most = max(of_machines.count(machine) for machine in of_machines)
        assert most == -(-count // len(topology.machines))


def test_given_gpus_are_dealt_over_the_count():
    tables = [replicas(2, count=2, gpus=[0, 1, 6, 7])]
    assert place(tables, TWO_OF_FOUR) == [[0, 1], [6, 7]]


def test_stages_go_to_different_machines_but_ranks_stay_together():
    tables = [replicas(count=1), replicas(3, pipeline_parallel=2)]
    assert place(tables, TWO_OF_FOUR) == [[0], [1, 2, 3, 4, 5, 6]]


def test_replica_prefers_one_nvlink_domain():
    halves = cluster(NodeTable(gpu=A100, gpus=8, nvlink_domain=4))
    assert place([replicas(), replicas(4)], halves) == [[0], [4, 5, 6, 7]]
    assert place([replicas(), replicas(5)], halves) == [[0], [1, 2, 3, 4, 5]]


def test_domain_over_machines_beats_no_domain():
    rack = cluster(NodeTable(count=4, gpu=A100, gpus=2, nvlink_domain=4))
    assert place([replicas(), replicas(4)], rack) == [[0], [4, 5, 6, 7]]


def test_group_larger_than_a_machine_spans_machines():
    assert place([replicas(6)], TWO_OF_FOUR) == [[0, 1, 2, 3, 4, 5]]


def test_kind_of_gpu():
    mixed = cluster(NodeTable(gpu=A100, gpus=2), NodeTable(gpu=H100, gpus=4))
    assert place([replicas(gpu="H100"), replicas()], mixed) == [[2], [0]]
    # A replica never mixes kinds: four of one kind are H100s.
    assert place([replicas(4)], mixed) == [[2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("tables", "field", "problem"),
    [
        ([replicas(count=9)], "replicas.0", "replica 9 of 9 needs 1 GPUs of one kind, 0 of 8"),
        ([replicas(), replicas(8)], "replicas.1", "needs 8 GPUs of one kind, 7 of 8 are free"),
        ([replicas(gpu="B200")], "replicas.0", "no node has a GPU 'B200'; there are A100"),
        ([replicas(gpus=[8])], "replicas.0.gpus", "no GPU 8: the nodes have GPUs 0 to 7"),
        ([replicas(gpus=[-1])], "replicas.0.gpus", "no GPU -1"),
        ([replicas(2, gpus=[1, 1])], "replicas.0.gpus", "already taken by replicas.0.gpus"),
        (
            [replicas(gpus=[1]), replicas(gpus=[1])],
            "replicas.1.gpus",
            "GPU 1 is already taken by replicas.0.gpus",
        ),
        ([replicas(2, gpus=[1])], "replicas.0.gpus", "1 GPUs given, 2 needed (1 replicas of 2)"),
        ([replicas(gpu="H100", gpus=[1])], "replicas.0.gpus", "GPU 1 is a A100, not a H100"),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(tables, field, problem):
    with pytest.raises(InputError) as caught:
        place(tables, TWO_OF_FOUR, source="c.toml")
    assert caught.value.field == field
    assert problem in caught.value.problem


def test_given_gpus_of_two_kinds_are_refused():
    mixed = cluster(NodeTable(gpu=A100, gpus=1), NodeTable(gpu=H100, gpus=1))
    with pytest.raises(InputError, match="different kinds: A100, H100"):
        place([replicas(2, gpus=[0, 1])], mixed)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)), max_size=5),
    st.integers(1, 3),
)
def test_every_gpu_has_at_most_one_replica(shapes, machines):
    topology = cluster(NodeTable(count=machines, gpu=A100, gpus=4))
    tables = [
        replicas(tensor, count=count, pipeline_parallel=stages) for tensor, count, stages in shapes
    ]
    needed = sum(tensor * count * stages for tensor, count, stages in shapes)
    try:
        lists = place(tables, topology)
    except InputError:
        # In whatever shapes, GPUs of one kind are refused only when too few are left.
        assert needed > 4 * machines
        return
    used = [gpu for gpus in lists for gpu in gpus]
    assert len(used) == len(set(used)) == needed


def shard_moves(src: Grid, dst: Grid, size_bytes: int) -> list[tuple[int, int, int]]:
    """(source GPU, destination GPU, bytes) of each piece."""
    pieces = shard_shares(src, dst)
    sizes = cut_by([share for _, _, share in pieces], size_bytes)
    return [(*pair, size) for (*pair, _), size in zip(pieces, sizes, strict=True)]


def test_equal_shapes_talk_rank_to_rank():
    moves = shard_moves(Grid((0, 1), 2), Grid((6, 7), 2), 1_001)
    assert moves == [(0, 6, 500), (1, 7, 501)]


def test_half_the_ranks_receive_from_two_each():
    moves = shard_moves(Grid((0, 1, 2, 3), 4), Grid((8, 9), 2), 400)
    assert moves == [(0, 8, 100), (1, 8, 100), (2, 9, 100), (3, 9, 100)]


def test_stages_and_ranks_are_cut_on_their_own_axis():
    """Two stages of one rank hold half the layers, all heads; the other side half the heads."""
    moves = shard_moves(Grid((0, 1), 1), Grid((8, 9), 2), 400)
    assert moves == [(0, 8, 100), (0, 9, 100), (1, 8, 100), (1, 9, 100)]


def test_paths_of_a_transfer_are_the_parts_of_a_flow():
    parts = shard_paths(Grid((0, 1), 2), Grid((4, 5), 2), 1_000, TWO_OF_FOUR)
    assert parts == [(TWO_OF_FOUR.path(0, 4), 500), (TWO_OF_FOUR.path(1, 5), 500)]


@settings(deadline=None, max_examples=60)
@given(*[st.integers(1, 6)] * 4, st.integers(0, 10**12))
def test_pieces_add_up(src_stages, src_ranks, dst_stages, dst_ranks, size):
    src = Grid(tuple(range(src_stages * src_ranks)), src_ranks)
    dst = Grid(tuple(range(100, 100 + dst_stages * dst_ranks)), dst_ranks)
    moves = shard_moves(src, dst, size)
    assert sum(part for _, _, part in moves) == size
    for gpu in src.gpus:
        sent = sum(part for source, _, part in moves if source == gpu)
        assert abs(sent - size / len(src.gpus)) <= len(moves)


def plain_place(tables, topology) -> list[list[int]]:
    """All GPUs looked at for each replica: what `place` does, slower."""
    taken: set[int] = set()
    lists = []
    for table in tables:
        for _ in range(table.count):
            free = [gpu.index for gpu in topology.gpus if gpu.index not in taken]
            size = table.tensor_parallel * table.pipeline_parallel
            gpus = plain_together(free, size, topology)
            if gpus is None:
                gpus = []
                for _ in range(table.pipeline_parallel):
                    group = plain_together(free, table.tensor_parallel, topology)
                    group = group or free[: table.tensor_parallel]
                    free = [gpu for gpu in free if gpu not in group]
                    gpus += group
            taken.update(gpus)
            lists.append(gpus)
    return lists


def plain_together(free, size, topology):
    def near(gpu):
        return gpu.machine, gpu.nvlink_domain

    for key, has in (
        (near, lambda gpu: True),
        (lambda gpu: gpu.nvlink_domain, lambda gpu: gpu.nvlink_out >= 0),
        (lambda gpu: gpu.machine, lambda gpu: True),
    ):
        groups: dict = {}
        for index in free:
            if has(topology.gpus[index]):
                groups.setdefault(key(topology.gpus[index]), []).append(index)
        for group in groups.values():
            if len(group) >= size:
                return group[:size]
    return None


@given(
    nodes=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([2, 4, 8]), st.sampled_from([0, 2, 4, 8, 16])),
        min_size=1,
        max_size=3,
    ),
    sizes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=5
    ),
)
@settings(max_examples=60)
def test_placement_is_that_of_looking_at_all_gpus_for_each_replica(nodes, sizes):
    try:
        topology = cluster(
            *(
                NodeTable(count=count, gpu=A100, gpus=gpus, nvlink_domain=domain)
                for count, gpus, domain in nodes
            )
        )
    except InputError:  # domains that do not fit the machines
        return
    tables = []
    left = len(topology.gpus)
    for count, tp, pp in sizes:
        fits = min(count, left // (tp * pp))
        left -= fits * tp * pp
        if fits:
            tables.append(replicas(tp, count=fits, pipeline_parallel=pp))
    assert place(tables, topology) == plain_place(tables, topology)
