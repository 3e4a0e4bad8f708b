"""Traces and graphs: text form, node counts, sizes, dependencies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.backends.astra.convert import convert
from emu.backends.astra.graph import LOCAL, Location, NodeKind, Place
from emu.backends.astra.iteration import run_once
from emu.backends.astra.memories import Memories, Memory
from emu.backends.astra.rows import Placement, TraceGenerator, TraceSetup, stage_sizes
from emu.backends.astra.trace import Marker, Row, Trace, TraceModel, format_trace
from emu.latency.base import BatchShape
from emu.latency.moe_gate import GateShape, make_gate
from emu.network.dimensions import NetworkDim
from emu.network.rounds import CollectiveSystem
from tests.astra.readback import parse_trace

LLAMA = TraceModel(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256
)
QWEN = TraceModel(
    layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144, vocab=151936,
    experts=128, expert_ffn=768,
)  # fmt: skip


class Times:
    """Round layer times, so that sums can be done in the head."""

    def __init__(self, model, qk_norm=False):
        norm = ("qk_norm",) if qk_norm else ()
        self.sections = {
            "prologue": ("embedding",),
            "pre_attn": ("layernorm", "qkv_proj", *norm, "rotary_emb", "attention"),
            "post_attn": ("o_proj", "layernorm"),
            "mlp_dense": () if model.experts else ("gate_up_proj", "act_fn", "down_proj"),
            "mlp_moe": ("moe",) if model.experts else (),
            "head": ("final_layernorm", "lm_head", "sampler"),
        }

    def layer_ns(self, layer, tokens, logits):
        return 100

    def attention_ns(self, shape):
        return 1_000

    def attention_run_ns(self, shape, steps):
        return np.full(steps, 1_000, dtype=np.int64)

    def expert_ns(self, tokens, activated, batch_tokens):
        return 5_000


def generator(model, **kw):
    setup = TraceSetup(model=model, **kw)
    gate = None
    if model.experts:
        gate = make_gate("balanced", GateShape(model.experts, 8, ranks=setup.expert))
    return TraceGenerator(setup, Times(model, qk_norm=bool(model.experts)), gate)


PREFILL = BatchShape(prefill_new=[512], prefill_context=[0], sequences=1)


def count(graph, kind):
    return sum(node.kind is kind for node in graph.nodes)


def test_llama_with_tensor_parallel_4():
    trace = generator(LLAMA, tensor=4).trace(PREFILL)
    assert len(trace.rows) == 1 + 32 * 9 + 3
    graphs = convert(trace, 0, 4)
    assert [graph.npu for graph in graphs] == [0, 1, 2, 3]
    for graph in graphs:
        assert count(graph, NodeKind.COMP) == 292
        assert count(graph, NodeKind.COLL) == 64
        assert count(graph, NodeKind.MEM_LOAD) == count(graph, NodeKind.MEM_STORE) == 1
        assert len(graph.nodes) == 358
        sizes = {node.size_bytes for node in graph.nodes if node.kind is NodeKind.COLL}
        assert sizes == {512 * 4096 * 2}
        assert graph.nodes[0].size_bytes == 512 * 4
        assert graph.nodes[-1].size_bytes == 512 * 4
    ids = [node.node_id for graph in graphs for node in graph.nodes]
    assert ids == list(range(4 * 358))


def test_qwen_with_expert_parallel_2():
    flags = {"tensor_dims": None, "expert_dims": None}
    trace = generator(QWEN, tensor=2, expert=2, local_experts=2, **flags).trace(PREFILL)
    # Seven layers, two expert sections with one layer each, and the end marker, per block.
    assert len(trace.rows) == 1 + 48 * (7 + 2 * 2 + 1) + 3
    for graph in convert(trace, 0, 2):
        assert count(graph, NodeKind.COMP) == 1 + 48 * 8 + 3
        collectives = [node for node in graph.nodes if node.kind is NodeKind.COLL]
        assert len(collectives) == 48 * 3
        by_kind = {kind: [n for n in collectives if n.collective == kind] for kind in (0, 2, 7)}
        assert {n.size_bytes for n in by_kind[0]} == {512 * 2048 * 2}
        assert {n.size_bytes for n in by_kind[2]} == {1_114_112}
        assert {n.size_bytes for n in by_kind[7]} == {2_097_152}


def test_pipeline_stages_hand_the_hidden_state_on():
    assert stage_sizes(5, 3) == [2, 2, 1]
    assert stage_sizes(32, 4) == [8, 8, 8, 8]
    trace = generator(LLAMA, tensor=2, pipeline=2).trace(PREFILL)
    assert trace.boundaries == (1 + 16 * 9,)
    graphs = convert(trace, 4, 4)
    assert [graph.npu for graph in graphs] == [4, 5, 6, 7]
    send, receive = graphs[1].nodes[-1], graphs[3].nodes[0]
    assert (send.kind, receive.kind) == (NodeKind.SEND, NodeKind.RECV)
    for node in (send, receive):
        assert (node.source, node.destination) == (5, 7)
        assert node.size_bytes == 512 * 4096 * 2
    assert send.tag == receive.tag
    assert send.tag != graphs[0].nodes[-1].tag
    assert count(graphs[2], NodeKind.MEM_LOAD) == 0
    assert count(graphs[0], NodeKind.MEM_STORE) == 0


def test_prefill_replica_sends_each_layers_kv_to_its_receiver():
    trace = generator(LLAMA, kind="PREFILL").trace(PREFILL)
    prefill, receiver = convert(trace, 0, 1)
    sends = [node for node in prefill.nodes if node.kind is NodeKind.SEND]
    assert [node.size_bytes for node in sends] == [2_097_152] * 32 + [2048]
    assert [node.kind for node in receiver.nodes] == [NodeKind.RECV] * 33
    assert [node.tag for node in receiver.nodes] == [node.tag for node in sends]
    assert len({node.tag for node in sends}) == 33
    assert count(prefill, NodeKind.MEM_STORE) == 0


def test_offloaded_weights_are_loaded_and_waited_for():
    cxl = Place(Location.CXL, 1)
    trace = generator(LLAMA, placement=Placement(layers={"lm_head": cxl})).trace(PREFILL)
    (graph,) = convert(trace, 0, 1)
    loads = [n for n in graph.nodes if n.kind is NodeKind.MEM_LOAD and n.place == cxl]
    assert [node.size_bytes for node in loads] == [4096 * 128256 * 2]
    assert not loads[0].deps
    head = next(n for n in graph.nodes if n.name.startswith("COMP_NODE_lm_head"))
    assert loads[0].node_id in head.deps
    everything = convert(trace, 0, 1, local_offloading=True)[0]
    assert count(everything, NodeKind.MEM_LOAD) == 1 + 292 - 32 * 3 - 1


def test_recalled_kv_holds_the_first_layer_up():
    trace = generator(LLAMA).trace(PREFILL, recall_bytes=99)
    (graph,) = convert(trace, 0, 1)
    assert graph.nodes[0].size_bytes == 99
    first = next(node for node in graph.nodes if node.kind is NodeKind.COMP)
    assert set(first.deps) == {0, 1}


def pim_trace(pieces):
    rows = [Row("embedding", 10, output_bytes=8)]
    rows.append(Row("PIM", marker=Marker.PIM, index=0))
    rows += [Row("attention", 7, Place(Location.REMOTE, 0, 0))] * pieces
    rows += [Row("PIM", marker=Marker.PIM_END), Row("sampler", 20)]
    return Trace("COLOCATED", rows)


def test_pim_pieces_lie_between_the_layers_around_them():
    (graph,) = convert(pim_trace(2), 0, 1)
    first, last = (node for node in graph.nodes if node.kind is NodeKind.COMP)
    pieces = [node for node in graph.nodes if node.kind is NodeKind.PIM_COMP]
    assert all(list(node.deps) == [first.node_id] for node in pieces)
    assert set(last.deps) == {first.node_id, *(node.node_id for node in pieces)}
    (faithful,) = convert(pim_trace(0), 0, 1, quirks=["pim_chain"])
    assert list(faithful.nodes[2].deps) == []


def test_experts_of_later_ranks_wait_for_the_dispatch_unless_faithful():
    trace = generator(QWEN, tensor=2, expert=2, local_experts=2).trace(PREFILL)

    def waits(quirks):
        graph = convert(trace, 0, 2, quirks=quirks)[1]
        dispatch = next(n for n in graph.nodes if n.kind is NodeKind.COLL and n.collective == 2)
        expert = next(n for n in graph.nodes if n.name.startswith("COMP_NODE_moe"))
        return dispatch.node_id in expert.deps

    assert waits([])
    assert not waits(["expert_dispatch"])


def test_a_lone_npu_takes_the_sum_of_its_rows():
    memory = Memory(memory_type="PER_NODE_MEMORY_EXPANSION", gbytes_per_s=256)
    system = CollectiveSystem(dims=(NetworkDim(npus=1, gib_per_s=16, latency_ns=0),))
    ends = run_once(system, Memories(remote=memory), convert(generator(LLAMA).trace(PREFILL), 0, 1))
    assert ends == {0: 8 + 260 * 100 + 32 * 1_000 + 8}


# --- text ---------------------------------------------------------------------------------------

TEXT = """COLOCATED\t\tmodel_parallel_NPU_group: 1
3
Layername   comp_time  input_loc input_size weight_loc weight_size output_loc output_size comm_type comm_size misc
embedding_0 5000 REMOTE:0 40 LOCAL 1000 LOCAL 80 NONE 0 NONE
o_proj_1    7000 LOCAL 80 LOCAL 500 LOCAL 80 ALLREDUCE:1,0 80 NONE
sampler_2   900 LOCAL 160 LOCAL 0 REMOTE:0 40 NONE 0 BATCH_2
"""


def test_text_of_the_reference_is_read():
    trace = parse_trace(TEXT)
    assert [row.name for row in trace.rows] == ["embedding", "o_proj", "sampler"]
    assert trace.rows[0].input_place == Place(Location.REMOTE, 0)
    assert trace.rows[1].involved == (True, False)
    assert trace.rows[1].comm_bytes == 80
    assert trace.rows[2].batch == 2
    assert trace.rows[2].weight_place == LOCAL


def test_columns_are_aligned():
    lines = format_trace(parse_trace(TEXT)).splitlines()
    assert lines[3].startswith("embedding_0".ljust(30) + "5000".ljust(15) + "REMOTE:0")
    assert lines[4].index("ALLREDUCE:1,0") == 30 + 15 * 7


@pytest.mark.parametrize("quirks", [(), ("expert_dispatch",)])
def test_generated_traces_survive_the_text(quirks):
    for trace in (
        generator(LLAMA, tensor=2, pipeline=2).trace(PREFILL, recall_bytes=7),
        generator(QWEN, tensor=2, expert=2, local_experts=2, expert_dims=(True, False)).trace(
            PREFILL
        ),
        pim_trace(3),
    ):
        back = parse_trace(format_trace(trace))
        assert format_trace(back) == format_trace(trace)
        assert convert(back, 0, 4, quirks=quirks) == convert(trace, 0, 4, quirks=quirks)


names = st.sampled_from(["a", "b_c", "moe"])
places = st.sampled_from(
    [LOCAL, Place(Location.REMOTE, 1), Place(Location.CXL, 2), Place(Location.REMOTE, 0, 5)]
)
sizes = st.integers(0, 2**40)
ordinary = st.builds(
    Row, names, sizes, places, sizes, places, sizes, places, sizes,
    st.sampled_from(["NONE", "ALLREDUCE", "ALLTOALL"]), sizes,
    st.one_of(st.none(), st.tuples(st.booleans(), st.booleans())), st.integers(0, 2),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(ordinary, max_size=5))
def test_rows_round_trip(rows):
    assert parse_trace(format_trace(Trace("DECODE", rows))).rows == rows
