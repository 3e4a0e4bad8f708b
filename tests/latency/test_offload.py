"""Weights and attention outside the GPU: stalls and PIM times worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cluster.backends import make_latency
from emu.config.schema import (
    NetworkTable,
    NodeTable,
    PlacedTensors,
    PlacementRule,
    PlacementTable,
    RooflineTable,
)
from emu.errors import InputError
from emu.latency.base import BatchShape
from emu.latency.context import LatencyContext
from emu.latency.offload.backend import _cut
from emu.latency.offload.pim import DEVICES, PimAttention, pim_device
from emu.latency.offload.weights import (
    Device,
    Placement,
    WeightLoads,
    bytes_by_device,
    device_of,
    parse_layers,
    row_bytes,
)
from tests.latency.shapes import decodes

LLAMA = lookup_model("meta-llama/Llama-3.1-8B", "test", "model")
MOE = lookup_model("Qwen/Qwen3-30B-A3B-Instruct-2507", "test", "model")


def context(model=LLAMA, **keys) -> LatencyContext:
    node = keys.pop("node", NodeTable(gpu="H100-SXM5-80GB", cxl_gib=64, cxl_devices=4))
    values = {
        "table": RooflineTable(host_overhead=False),
        "network": NetworkTable(),
        "model": model,
        "gpu": lookup_gpu("H100-SXM5-80GB", "test", "gpu"),
        "node": node,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "expert_parallel": 0,
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "gpus_per_machine": 8,
        "seed": 1,
        "hands_off": False,
    }
    return LatencyContext(**{**values, **keys})


DECODE = BatchShape(
    decode_count=2,
    decode_context_sum=300,
    decode_context_max=200,
    decode_context_min=100,
    sequences=2,
)


def loads_of(table: PlacementTable, devices: dict[str, Device], tp: int = 1) -> WeightLoads:
    placement = Placement(table, LLAMA.layers, "test", "replicas.0")
    return WeightLoads(placement, devices, LLAMA, tp, tp, "auto")


def test_weights_of_rows():
    sizes = {name: row_bytes(LLAMA, name, 1, 1, "auto") for name in ("qkv_proj", "o_proj")}
    assert sizes == {"qkv_proj": 4096 * (4096 + 2 * 1024) * 2, "o_proj": 4096 * 4096 * 2}
    assert row_bytes(LLAMA, "gate_up_proj", 2, 1, "auto") == 2 * 4096 * 7168 * 2
    assert row_bytes(LLAMA, "moe", 1, 1, "auto") == 0
    # Gate, and a half of the 128 experts of three matrices each.
    assert row_bytes(MOE, "moe", 1, 2, "auto") == 2048 * 128 * 2 + 64 * 3 * 2048 * 768 * 2
    everything = bytes_by_device(
        Placement(PlacementTable(), LLAMA.layers, "test", ""), LLAMA, 1, 1, "auto"
    )
    assert everything == {"gpu": 16_060_522_496}


def test_a_row_waits_for_its_own_load_only():
    """qkv of layer 0: 50,331,648 B at 10 B/ns and 100 ns latency are there at 5,033,264 ns; its
    row would have begun at 1,000. Layer 1's come 5,033,264 later, on the same device."""
    rule = PlacementTable(tensors=PlacedTensors(qkv_proj="cpu"))
    loads = loads_of(rule, {"cpu": Device(10.0, 100)})
    rows = [("layernorm", 0, 1_000), ("qkv_proj", 0, 50_000), ("o_proj", 0, 10_000_000)]
    assert loads.stall_ns(rows) == 5_033_264 - 1_000
    rows.append(("qkv_proj", 1, 50_000))
    # The second is there at 10,066,528, after the row before it ended at 15,083,264: no stall more.
    assert loads.stall_ns(rows) == 5_033_264 - 1_000
    rows[2] = ("o_proj", 0, 1_000)
    assert loads.stall_ns(rows) == 2 * 5_033_264 - (1_000 + 50_000 + 1_000)


def test_devices_load_side_by_side_and_ranks_queue_up():
    rules = [PlacementRule(layers="0", weights="cxl:0"), PlacementRule(layers="1", weights="cxl:1")]
    rows = [("o_proj", 0, 5), ("o_proj", 1, 5)]
    own = 4096 * 4096 * 2 // 10
    devices = {"cxl:0": Device(10.0, 0), "cxl:1": Device(10.0, 0)}
    assert loads_of(PlacementTable(blocks=rules), devices).stall_ns(rows) == own
    same = [PlacementRule(layers="0-1", weights="cxl:0")]
    assert loads_of(PlacementTable(blocks=same), devices).stall_ns(rows) == 2 * own - 5
    # Two ranks load half each from one device: together as long.
    two = loads_of(PlacementTable(blocks=same), devices, tp=2)
    assert two.stall_ns(rows) == pytest.approx(2 * own - 5, abs=4)


def test_experts_load_when_their_turn_comes():
    placement = Placement(
        PlacementTable(tensors=PlacedTensors(moe="cpu")), MOE.layers, "test", "replicas.0"
    )
    loads = WeightLoads(placement, {"cpu": Device(100.0, 7)}, MOE, 1, 1, "auto")
    size = row_bytes(MOE, "moe", 1, 1, "auto")
    rows = [("attention", 0, 10**9), ("moe", 0, 10), ("attention", 1, 10**9), ("moe", 1, 10)]
    assert loads.stall_ns(rows) == 2 * (7 + size // 100)


def test_pcie_limits_host_memory_for_each_gpu():
    node = NodeTable(host_memory_gbytes_per_s=200, host_memory_latency_ns=5)
    cpu = device_of("cpu", node, 400, "test", "key")  # 50 GB/s for a GPU
    assert cpu.load_ns(1_000_000, 1) == 20_000
    assert cpu.load_ns(1_000_000, 8) == 8 * 5_005  # the memory is the limit for eight of them


@pytest.mark.parametrize("pipeline", [1, 4])
@pytest.mark.parametrize("model", [LLAMA, MOE], ids=["dense", "moe"])
def test_backend_with_offload_keeps_its_promises(model, pipeline):
    table = PlacementTable(weights="cxl:2", tensors=PlacedTensors(lm_head="gpu"))
    node = NodeTable(gpu="H100-SXM5-80GB", cxl_gib=64, cxl_devices=4, pim="LPDDR5_2GB_6400")
    keys = {"node": node, "pipeline_parallel": pipeline}
    plain = make_latency(context(model, **keys))
    latency = make_latency(
        context(
            model,
            placement=table,
            table=RooflineTable(host_overhead=False, attention_offload=True),
            **keys,
        )
    )
    assert latency.iteration_ns(DECODE) > plain.iteration_ns(DECODE)
    assert sum(latency.stage_ns(DECODE)) == latency.iteration_ns(DECODE)
    assert len(latency.stage_ns(DECODE)) == pipeline
    parts = latency.components_ns(DECODE)
    assert sum(parts.values()) == latency.iteration_ns(DECODE)
    assert parts["memory"] > 0
    ends = latency.decode_run_ns(DECODE, 5)
    assert np.all(np.diff(ends) > 0)
    assert ends[0] == latency.iteration_ns(DECODE)


def test_rows_of_a_stage_are_those_of_its_layers():
    """What stands before the layers is the first stage's, what stands behind them the last one's."""
    blocks = [("block", layer, 10 + layer) for layer in range(8)]
    rows = [("embedding", -1, 1), *blocks, ("lm_head", -1, 2), ("sampler", -1, 3)]
    assert _cut(rows, 1) == [rows]
    assert _cut(rows, 4) == [rows[:3], rows[3:5], rows[5:7], rows[7:]]
    assert _cut(rows, 2) == [rows[:5], rows[5:]]


def test_weights_on_the_gpu_change_nothing():
    same = make_latency(context(placement=PlacementTable()))
    assert same.iteration_ns(DECODE) == make_latency(context()).iteration_ns(DECODE)


def test_pim_of_the_reference():
    """DDR4, 32 heads, 8 KV heads, 128 wide, in 8 pieces: 9,166.47 ns at 128 tokens, 46,490.90 at
    1,024 (LLMServingSim 2.0)."""
    pim = PimAttention(DEVICES["DDR4_8GB_3200"], 512, LLAMA)
    assert (pim.channels, pim.split) == (64, 8)
    assert (pim.piece_ns(128), pim.piece_ns(1024)) == (9_166, 46_490)
    assert pim.layer_ns(1, 1024, 1024) == 46_490
    # 100 requests of 800 pieces on 64 channels: more work than the longest alone.
    work = 100 * (333.2538 * 1024 + 30_675.2739)
    assert pim.layer_ns(100, 102_400, 1024) == int(work / 64)


def test_what_does_not_exist_is_said(tmp_path):
    assert parse_layers("0-2, 7", 8, "t", "k") == [0, 1, 2, 7]
    for text in ("8", "3-1", "x", ""):
        with pytest.raises(InputError):
            parse_layers(text, 8, "t", "k")
    node = NodeTable(cxl_gib=1, cxl_devices=2)
    for name in ("cxl:2", "disk", "cxl:x"):
        with pytest.raises(InputError):
            device_of(name, node, 100, "t", "k")
    with pytest.raises(InputError, match="cxl_gib"):
        device_of("cxl", NodeTable(), 100, "t", "k")
    with pytest.raises(InputError, match="no attention figures"):
        pim_device("DDR9", "t", "k")
    with pytest.raises(InputError, match="needs a machine whose memory computes"):
        make_latency(context(table=RooflineTable(attention_offload=True)))
    broken = tmp_path / "DDR4_8GB_3200_pim.ini"
    broken.write_text("[system]\nbus_width = 64\n")
    with pytest.raises(InputError, match=r"dram_structure\.device_width: missing"):
        pim_device(str(broken), "t", "k")
    broken.write_text("[system]\nbus_width = 64\n[dram_structure]\ndevice_width = 0\n")
    with pytest.raises(
        InputError, match=r"dram_structure\.device_width: expected a number above 0"
    ):
        pim_device(str(broken), "t", "k")


@pytest.mark.parametrize(
    ("channel_mib", "device_width", "gib"),
    [(8192, 8, 8), (20_000, 8, 16), (100, 8, 8), (8192, 4, 8)],
)
def test_a_channel_is_as_large_as_its_ranks(
    channel_mib: int, device_width: int, gib: float, tmp_path: Path
) -> None:
    """1,024 columns of 8 bits are a page of 1 KiB, 65,536 rows a bank of 64 MiB, 16 banks a device
    of 1 GiB; 8 devices of 8 bits on a bus of 64 are a rank of 8 GiB, as are 16 of 4 bits with half the page."""
    file = tmp_path / "DDR4_8GB_3200_pim.ini"
    file.write_text(
        "[dram_structure]\nbankgroups = 4\nbanks_per_group = 4\nrows = 65536\n"
        f"columns = 1024\ndevice_width = {device_width}\n"
        f"[system]\nchannel_size = {channel_mib}\nbus_width = 64\n"
        "[other]\nidle_power = 620\npeak_power = 3900 ; mW\n"
    )
    found, known = pim_device(str(file), "t", "k"), DEVICES["DDR4_8GB_3200"]
    assert found.channel_gib == gib
    assert (found.idle_w, found.peak_w) == (0.62, 3.9)
    assert (found.slope_ns, found.intercept_ns) == (known.slope_ns, known.intercept_ns)


def test_local_loads_wait_for_nobody_and_cost_what_is_not_hidden():
    table = PlacementTable(local_loads=True)
    placement = Placement(table, LLAMA.layers, "test", "replicas.0")
    assert placement.devices == ["gpu"]
    loads = WeightLoads(
        placement, {"gpu": Device(100, 0, is_shared=False)}, LLAMA, 1, 1, "bfloat16"
    )
    embedding, qkv = (row_bytes(LLAMA, name, 1, 1, "bfloat16") // 100 for name in ROWS_HERE)
    # The embedding is read before it runs; by then the projection's weights are there.
    assert qkv < embedding
    assert loads.stall_ns([("embedding", -1, 5), ("qkv_proj", 0, 5)]) == embedding
    assert loads.stall_ns([("attention", 0, 5), ("qkv_proj", 0, 5)]) == qkv - 5


ROWS_HERE = ("embedding", "qkv_proj")


def test_halves_need_attention_in_memory():
    table = RooflineTable(host_overhead=False, sub_batch_interleaving=True)
    with pytest.raises(InputError, match="attention_offload"):
        make_latency(context(table=table))


def test_halves_hide_attention_only_where_it_is_long():
    node = NodeTable(gpu="H100-SXM5-80GB", pim="DDR4_8GB_3200", host_memory_gib=64)
    table = RooflineTable(host_overhead=False, attention_offload=True)
    halves = RooflineTable(host_overhead=False, attention_offload=True, sub_batch_interleaving=True)
    whole, split = (make_latency(context(table=t, node=node)) for t in (table, halves))

    assert split.iteration_ns(decodes(2, 100)) > whole.iteration_ns(decodes(2, 100))
    assert split.iteration_ns(decodes(64, 16000)) < whole.iteration_ns(decodes(64, 16000))
    # One member cannot be cut.
    assert split.iteration_ns(decodes(1, 100)) == whole.iteration_ns(decodes(1, 100))
