"""Chakra files: bytes as the reference describes them, round trips, and files that are broken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.backends.astra.chakra import AttributeProto, GlobalMetadata, NodeProto
from emu.backends.astra.etfile import (
    describe_file,
    encode_graph,
    read_messages,
    read_records,
    write_graph,
)
from emu.backends.astra.graph import LOCAL, Graph, Location, Node, NodeKind, Place
from emu.backends.astra.oneshot import on_kept_dims
from emu.errors import InputError
from tests.astra.readback import read_graph

FIELDS = {
    "Node": {
        "id": 1, "name": 2, "type": 3, "ctrl_deps": 4, "data_deps": 5, "start_time_micros": 6,
        "duration_micros": 7, "inputs": 8, "outputs": 9, "attr": 10,
    },
    "GlobalMetadata": {"version": 1, "attr": 2},
}  # fmt: skip


def test_field_numbers_are_those_of_the_format():
    for message, name in ((NodeProto, "Node"), (GlobalMetadata, "GlobalMetadata")):
        assert {f.name: f.number for f in message.DESCRIPTOR.fields} == FIELDS[name]
    values = AttributeProto.DESCRIPTOR.oneofs_by_name["value"].fields
    assert [field.number for field in values] == list(range(3, 33))
    assert [values[i].name for i in (0, 6, 24, 25, 26)] == [
        "double_val", "int64_val", "bool_val", "bool_list", "string_val",
    ]  # fmt: skip


def test_bytes_of_a_compute_node_by_hand():
    node = Node(3, NodeKind.COMP, "ab", deps=(1, 300), duration_ns=5000)
    records = list(read_records(encode_graph(Graph(0, [node])), "x"))
    assert (
        records[1]
        == bytes.fromhex(
            "0803"  # id 3
            "1202" + "6162"  # name
            "1805"  # type 5 = COMP in the fork
            "2a03" + "01ac02"  # data_deps, packed
            "388827"  # duration 5000
            "520e0a09"
            + b"is_cpu_op".hex()
            + "d80100"  # bool_val false is written: it is in a oneof
        )
    )
    upstream = list(read_records(encode_graph(Graph(0, [node]), "upstream"), "x"))
    assert upstream[1] == records[1].replace(b"\x18\x05", b"\x18\x04")


def test_metadata_comes_first_and_keeps_the_trace():
    records = list(read_records(encode_graph(Graph(0), trace_text="rows"), "x"))
    metadata = GlobalMetadata.FromString(records[0])
    assert [(a.name, a.string_val) for a in metadata.attr] == [
        ("schema", "1.0.2-chakra.0.0.4"),
        ("input_file", "rows"),
    ]
    assert len(records) == 1


ids = st.integers(0, 2**40)
size = st.integers(0, 2**50)
places = st.one_of(
    st.just(LOCAL),
    st.builds(
        Place,
        st.sampled_from([Location.REMOTE, Location.CXL]),
        st.integers(0, 9),
        st.integers(0, 70),
    ),
)
nodes = st.one_of(
    st.builds(
        Node, ids, st.just(NodeKind.COMP), st.text(max_size=9),
        deps=st.lists(ids, max_size=4).map(tuple), duration_ns=size,
    ),
    st.builds(
        Node, ids, st.sampled_from([NodeKind.MEM_LOAD, NodeKind.MEM_STORE, NodeKind.PIM_COMP]),
        duration_ns=size, size_bytes=size, place=places,
    ),
    st.builds(
        Node, ids, st.just(NodeKind.COLL), size_bytes=size, collective=st.sampled_from([0, 2, 6, 7]),
        involved=st.one_of(st.none(), st.lists(st.booleans(), max_size=3).map(tuple)),
    ),
    st.builds(
        Node, ids, st.sampled_from([NodeKind.SEND, NodeKind.RECV]), size_bytes=size,
        source=st.integers(0, 99), destination=st.integers(0, 99), tag=st.integers(0, 2**31 - 1),
    ),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(nodes, max_size=8))
def test_graphs_round_trip(tmp_path_factory, drawn):
    path = tmp_path_factory.mktemp("et") / "w.0.et"
    graph = Graph(0, drawn)
    write_graph(path, graph)
    assert read_graph(path) == graph
    assert path.read_bytes() == encode_graph(read_graph(path))


def test_dialects_disagree_on_node_types(tmp_path):
    path = tmp_path / "w.0.et"
    write_graph(path, Graph(0, [Node(0, NodeKind.COLL, size_bytes=8)]), "upstream")
    assert read_graph(path, dialect="upstream").nodes[0].kind is NodeKind.COLL
    assert read_graph(path, dialect="fork").nodes[0].kind is NodeKind.RECV
    pim = Graph(0, [Node(0, NodeKind.PIM_COMP, "p")])
    with pytest.raises(InputError, match="cannot be expressed"):
        encode_graph(pim, "upstream")


def test_printer_shows_every_node(tmp_path):
    path = tmp_path / "w.0.et"
    graph = Graph(
        0,
        [
            Node(0, NodeKind.MEM_LOAD, "in", size_bytes=40, place=Place(Location.REMOTE, 1)),
            Node(7, NodeKind.COMP, "qkv", deps=(0,), duration_ns=99),
        ],
    )
    write_graph(path, graph)
    lines = list(describe_file(path))
    assert lines[0].startswith("# w.0.et: 2 nodes")
    assert "MEM_LOAD" in lines[1]
    assert "tensor_size=40" in lines[1]
    assert "qkv duration=99 deps=[0]" in lines[2]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "the file is empty"),
        (b"\x05ab", "byte 0: a record of 5 bytes is announced, 2 are left"),
        (b"\x80", "byte 0: the file ends inside a length"),
        (b"\xff" * 12, "byte 0: not a length"),
        (b"\x00\x02\xff\xff", "record 1: not a Chakra message"),
    ],
)
def test_broken_files_are_input_errors(tmp_path, data, problem):
    path = tmp_path / "w.0.et"
    path.write_bytes(data)
    with pytest.raises(InputError, match=problem):
        read_messages(path)


def test_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_messages(tmp_path / "none.et")


def test_sizes_of_memory_are_on_the_published_programs_finer_clock(tmp_path):
    """Its memory bandwidth is a whole number, so 1000 times the bytes take 1000 times as long."""
    path = tmp_path / "g.et"
    load = Node(0, NodeKind.MEM_LOAD, "load", size_bytes=16)
    write_graph(path, Graph(0, [load]), "upstream")
    [shown] = list(describe_file(path, "upstream"))[1:]
    assert "tensor_size=16000" in shown
    assert read_graph(path, dialect="upstream").nodes[0].size_bytes == 16


def test_a_graph_that_ends_with_a_send_is_closed_for_the_published_program(tmp_path):
    comp = Node(4, NodeKind.COMP, "c", duration_ns=9)
    send = Node(7, NodeKind.SEND, "s", (4,), size_bytes=8, source=0, destination=1)
    path = tmp_path / "g.0.et"
    write_graph(path, Graph(0, [comp, send]), "upstream")
    _, messages = read_messages(path)
    assert [(m.id, list(m.data_deps), m.duration_micros) for m in messages] == [
        (4, [], 9), (7, [4], 0), (8, [7], 0),
    ]  # fmt: skip
    assert [node.node_id for node in read_graph(path, dialect="upstream").nodes] == [4, 7]
    write_graph(path, Graph(0, [comp, send]))
    assert len(read_messages(path)[1]) == 2


def test_dimensions_of_one_npu_are_left_out_of_flags_too():
    node = Node(0, NodeKind.COLL, "c", size_bytes=8, involved=(False, True, False))
    assert on_kept_dims(Graph(0, [node]), (False, True, True)).nodes[0].involved == (True, False)
    short = Node(0, NodeKind.COLL, "c", size_bytes=8, involved=(True,))
    assert on_kept_dims(Graph(0, [short]), (True, False)).nodes[0].involved == (True,)
    assert on_kept_dims(Graph(0, [node]), (True, True, True)).nodes[0] is node
