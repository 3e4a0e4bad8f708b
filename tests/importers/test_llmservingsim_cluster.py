"""Cluster files of LLMServingSim as our configuration."""

from __future__ import annotations

import copy
import json

import msgspec
import pytest

from emu.backends.llmservingsim.convert import import_cluster
from emu.cluster.plan import make_plan
from emu.config import kinds
from emu.config.load import config_from_text
from emu.config.schema import Config
from emu.errors import InputError
from tests.shared_data import SHARED

FILES = sorted((SHARED / "llmservingsim-clusters").glob("*.json"))

INSTANCE = {
    "model_name": "meta-llama/Llama-3.1-8B",
    "hardware": "RTX4090",
    "npu_mem": {"mem_size": 24, "mem_bw": 1008, "mem_latency": 0},
    "pd_type": None,
}
CLUSTER = {
    "num_nodes": 1,
    "link_bw": 16,
    "link_latency": 1000,
    "nodes": [
        {
            "num_instances": 1,
            "cpu_mem": {"mem_size": 64, "mem_bw": 50, "mem_latency": 0},
            "instances": [INSTANCE],
        }
    ],
}
MOE = "Qwen/Qwen3-30B-A3B-Instruct-2507"


def cluster(*instances, nodes=1, **top):
    """A cluster whose nodes have these instances (keys that differ from INSTANCE)."""
    made = copy.deepcopy(CLUSTER) | top
    node = made["nodes"][0]
    node["instances"] = [{**copy.deepcopy(INSTANCE), **keys} for keys in instances]
    node["num_instances"] = len(instances)
    made["nodes"] = [copy.deepcopy(node) for _ in range(nodes)]
    made["num_nodes"] = nodes
    return made


@pytest.fixture
def convert(tmp_path):
    def convert(made, **options) -> tuple[Config, str]:
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(made))
        text = import_cluster(path, **options)
        return kinds.convert(msgspec.toml.decode(text)), text

    return convert


@pytest.fixture
def refused(tmp_path):
    def refused(made) -> str:
        path = tmp_path / "cluster.json"
        path.write_text(made if isinstance(made, str) else json.dumps(made))
        with pytest.raises(InputError) as caught:
            import_cluster(path)
        return str(caught.value).removeprefix(f"{path}: ")

    return refused


def test_every_figure_has_its_place(convert):
    made = cluster({"npu_mem": {"mem_size": 24, "mem_bw": 900, "mem_util": 0.8}})
    made["cxl_mem"] = {"mem_size": 256, "mem_bw": 60, "mem_latency": 250, "num_devices": 2}
    config, _ = convert(made)
    (node,), (replica,) = config.nodes, config.replicas
    assert (node.gpu.name, node.gpu.memory_gib, node.gpu.memory_gbytes_per_s) == (
        "RTX4090",
        24,
        900,
    )
    assert (node.gpus, node.host_memory_gib, node.host_memory_gbytes_per_s) == (1, 64, 50)
    assert node.nvlink_gbps == node.nic_gbps == 16 * 2**30 * 8 / 1e9
    assert (node.nvlink_latency_ns, node.nic_latency_us) == (1000, 1)
    assert (node.cxl_gib, node.cxl_gbytes_per_s, node.cxl_latency_ns, node.cxl_devices) == (
        256, 60, 250, 2,
    )  # fmt: skip
    assert replica.scheduler == {"gpu_memory_utilization": 0.8}
    assert config.model.name == "meta-llama/Llama-3.1-8B"
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (128, 2048)
    assert config.latency.backend == "roofline"


@pytest.mark.parametrize(
    ("given", "tp", "pp"),
    [
        ({}, 1, 1),
        ({"num_npus": 4}, 4, 1),
        ({"num_npus": 4, "pp_size": 2}, 2, 2),
        ({"tp_size": 2}, 2, 1),
        ({"tp_size": 2, "pp_size": 2}, 2, 2),
        ({"num_npus": 4, "tp_size": 2}, 2, 2),
        ({"num_npus": 4, "tp_size": 2, "pp_size": 2}, 2, 2),
    ],
)
def test_parallel_degrees_are_inferred(convert, given, tp, pp):
    config, _ = convert(cluster(given))
    (replica,) = config.replicas
    assert (replica.tensor_parallel, replica.pipeline_parallel) == (tp, pp)
    assert config.nodes[0].gpus == tp * pp


@pytest.mark.parametrize(
    ("given", "tp", "pp"),
    [
        ({"npu_num": 1, "npu_group": 1}, 1, 1),
        ({"npu_num": 2}, 2, 1),
        ({"npu_num": 4, "npu_group": 2}, 2, 2),
    ],
)
def test_the_first_format_groups_gpus_into_stages(convert, given, tp, pp):
    config, text = convert(cluster(given))
    (replica,) = config.replicas
    assert (replica.tensor_parallel, replica.pipeline_parallel) == (tp, pp)
    assert "not carried over" not in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"npu_num": 2, "num_npus": 2}, "npu_num: the first format's key beside num_npus"),
        ({"npu_num": 2, "npu_group": 1, "pp_size": 1}, "npu_group: the first format's key beside"),
        ({"npu_num": 3, "npu_group": 2}, "npu_group: 3 GPUs cannot be cut into 2 equal groups"),
        ({"npu_group": 2}, "npu_group: needs npu_num"),
    ],
)
def test_the_first_format_is_not_mixed_with_the_later_one(refused, given, said):
    assert said in refused(cluster(given))


def test_expert_ranks_default_to_the_tensor_degree_of_an_expert_model(convert):
    config, _ = convert(cluster({"model_name": MOE, "tp_size": 2}))
    assert config.replicas[0].expert_parallel == 2
    dense, text = convert(cluster({"tp_size": 2, "ep_size": 2}))
    assert dense.replicas[0].expert_parallel == 0
    assert "expert_parallel" not in text


def test_data_parallel_groups_share_their_experts(convert):
    member = {"model_name": MOE, "tp_size": 2, "ep_size": 4, "dp_group": "A"}
    config, _ = convert(cluster(member, nodes=2, link_bw=[128, 16], link_latency=[500, 20000]))
    (node,), (replica,) = config.nodes, config.replicas
    assert (node.count, node.gpus, replica.count) == (2, 2, 2)
    assert (replica.expert_parallel, replica.data_parallel_group) == (4, "A")
    assert node.nvlink_gbps == 8 * node.nic_gbps
    assert (node.nvlink_latency_ns, node.nic_latency_us) == (500, 20)


def test_equal_instances_become_one_table_and_others_their_own(convert):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 0, "enable_chunked_prefill": False}
    types = {"dtype": "float16", "kv_cache_dtype": "fp8"}
    config, _ = convert(cluster({}, {}, {"pd_type": None, **limits}, types))
    assert [replica.count for replica in config.replicas] == [2, 1, 1]
    assert config.replicas[1].scheduler == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 131072,  # no limit: the longest sequence of the model
        "chunked_prefill": False,
    }
    assert config.replicas[2].model == {"dtype": "float16", "kv_cache_dtype": "fp8"}
    assert config.nodes[0].gpus == 4


def test_roles(convert):
    config, _ = convert(cluster({"pd_type": "prefill"}, {"pd_type": "decode"}))
    assert [replica.role for replica in config.replicas] == ["prefill", "decode"]


def test_different_gpus_of_a_node_become_machines_and_replicas_name_their_gpus(convert):
    other = {"hardware": "H100", "npu_mem": {"mem_size": 80, "mem_bw": 3350}, "tp_size": 2}
    config, text = convert(cluster({}, other, {}))
    assert [(node.gpu.name, node.gpus) for node in config.nodes] == [("RTX4090", 2), ("H100", 2)]
    assert [replica.gpus for replica in config.replicas] == [[0], [2, 3], [1]]
    assert "one of several parts of a node" in text
    plan = make_plan(config_from_text(text, "cluster.toml"))
    assert [replica.gpu.name for replica in plan.replicas] == ["RTX4090", "H100", "RTX4090"]


def test_another_model_is_an_override(convert):
    config, _ = convert(cluster({}, {"model_name": "Qwen/Qwen3-8B"}))
    assert [replica.model for replica in config.replicas] == [{}, {"name": "Qwen/Qwen3-8B"}]


def test_bundles_are_used_where_there_are_some(convert, tmp_path):
    (tmp_path / "RTX4090" / "meta-llama" / "Llama-3.1-8B" / "bf16" / "tp1").mkdir(parents=True)
    config, _ = convert(cluster({}), profiles=tmp_path)
    assert (config.latency.backend, config.latency.path) == ("profile", str(tmp_path))
    config, text = convert(cluster({}, {"tp_size": 2}), profiles=tmp_path)
    assert config.latency.backend == "roofline"
    assert config.replicas[0].latency == {"backend": "profile", "path": str(tmp_path)}
    assert config.replicas[1].latency == {}
    assert "# no bundle for meta-llama/Llama-3.1-8B on RTX4090, TP 2" in text


def test_what_is_left_behind_is_said(convert):
    placement = {"default": {"weights": "npu"}, "blocks": [{"blocks": "0-3", "weights": "cxl:1"}]}
    made = cluster({"placement": placement, "enable_local_offloading": True, "color": "red"})
    made["nodes"][0]["instances"][0]["npu_mem"]["mem_utl"] = 0.5
    config, text = convert(made)
    left = [line for line in text.splitlines() if line.startswith("# not carried over")]
    assert left == [
        "# not carried over: nodes[0].instances[0].npu_mem.mem_utl, a key that has no meaning",
        "# not carried over: nodes[0].instances[0].color, a key that has no meaning",
    ]
    table = config.replicas[0].placement
    assert table is not None
    assert table.local_loads
    assert table.weights == "gpu"
    assert [(rule.layers, rule.weights) for rule in table.blocks] == [("0-3", "cxl:1")]
    _, text = convert(cluster({"placement": {"default": {"weights": "npu", "kv_loc": "npu"}}}))
    assert "not carried over" not in text


def test_halves_of_a_batch(convert):
    made = cluster({"enable_attn_offloading": True, "enable_sub_batch_interleaving": True})
    made["nodes"][0]["cpu_mem"]["pim_config"] = "DDR4_8GB_3200_pim"
    config, text = convert(made)
    assert config.replicas[0].latency["sub_batch_interleaving"] is True
    assert "not carried over" not in text


def test_attention_in_memory(convert):
    made = cluster({"enable_attn_offloading": True})
    made["nodes"][0]["cpu_mem"]["pim_config"] = "DDR4_8GB_3200_pim"
    config, _ = convert(made)
    assert config.nodes[0].pim == "DDR4_8GB_3200"
    assert config.replicas[0].latency["attention_offload"] is True


POWER = {
    "base_node_power": 60,
    "npu": {
        "RTX4090": {
            "idle_power": 35, "standby_power": 300, "active_power": 600, "standby_duration": 18,
        }
    },
    "cpu": {"idle_power": 10, "active_power": 200, "util": 0.15},
    "dram": {"dimm_size": 32, "idle_power": 2.0, "energy_per_bit": 6.0},
    "link": {"num_links": 1, "idle_power": 5, "energy_per_bit": 4.0},
    "nic": {"num_nics": 1, "idle_power": 20},
    "storage": {"num_devices": 2, "idle_power": 5},
}  # fmt: skip


def test_power(convert):
    made = cluster({}, nodes=2)
    for node in made["nodes"]:
        node["power"] = copy.deepcopy(POWER)
    config, _ = convert(made)
    power = config.power
    assert (power.base_node_w, power.gpu_idle_w, power.gpu_standby_w) == (60, 35, 300)
    assert (power.gpu_active_w, power.gpu_standby_s, power.cpu_utilization) == (600, 18, 0.15)
    assert (power.dram_idle_w_per_dimm, power.dram_dimm_gib, power.dram_pj_per_bit) == (2, 32, 6)
    assert (power.link_idle_w, power.links, power.link_pj_per_bit) == (5, 1, 4)
    assert (power.nic_idle_w, power.nics, power.storage_idle_w) == (20, 1, 5)
    assert (power.storage_devices, power.cpu_idle_w, power.cpu_active_w) == (2, 10, 200)
    made["nodes"][1]["power"]["base_node_power"] = 61
    config, text = convert(made)
    assert config.power is None
    assert "# not carried over: power (nodes or GPUs with different figures" in text
    del made["nodes"][1]["power"]
    config, text = convert(made)
    assert config.power is None
    assert "# not carried over: power, which not every node gives" in text


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ({**CLUSTER, "num_nodes": 2}, "num_nodes: 2, but the file has 1 nodes"),
        ({**CLUSTER, "link_bw": "fast"}, "link_bw: Expected `float | array`, got `str`"),
        (cluster({}, link_bw=[16, 16]), "link_bw: 2 values for 1 network dimensions [1]"),
        (cluster({"pd_type": "both"}), "nodes[0].instances[0].pd_type: Invalid enum value 'both'"),
        (
            cluster({"hardware": "TPU-v9"}),
            "nodes[0].instances[0].hardware: unknown GPU 'TPU-v9'; ",
        ),
        (
            cluster({"model_name": "acme/Llamb-3.1-8B"}),
            "nodes[0].instances[0].model_name: unknown model 'acme/Llamb-3.1-8B'; did you mean",
        ),
        (
            cluster({"num_npus": 3, "tp_size": 2}),
            "nodes[0].instances[0].num_npus: 3 is not tp_size 2 x pp_size 1",
        ),
        (
            cluster({"num_npus": 8, "tp_size": 2, "pp_size": 2}),
            "nodes[0].instances[0].num_npus: 8 is not tp_size 2 x pp_size 2",
        ),
        (
            cluster({"num_npus": 3, "pp_size": 2}),
            "nodes[0].instances[0].num_npus: 3 cannot be cut into 2 stages",
        ),
        (
            cluster({"pp_size": 64}),
            "nodes[0].instances[0].pp_size: 64 stages, but meta-llama/Llama-3.1-8B has 32 layers",
        ),
        (
            cluster({"model_name": MOE, "ep_size": 3, "tp_size": 4}),
            f"nodes[0].instances[0].ep_size: 3 ranks cannot share the 128 experts of {MOE}",
        ),
        (
            cluster({"model_name": MOE, "ep_size": 2}),
            "nodes[0].instances[0].ep_size: 2 exceeds tp_size 1, which only members of a dp_group",
        ),
        (
            cluster({"dp_group": "A"}, {"dp_group": "A", "tp_size": 2}),
            "nodes[0].instances[1].dp_group: members of 'A' differ in tp_size, pp_size or ep_size",
        ),
        (
            cluster({"model_name": MOE, "dp_group": "A", "ep_size": 4}, {
                "model_name": MOE, "dp_group": "A", "ep_size": 4}),
            "nodes[0].instances[0].ep_size: 4 expert ranks over 2 members of 1 GPUs each",
        ),
    ],
)  # fmt: skip
def test_what_a_file_lacks_is_said_in_one_line(refused, made, problem):
    line = refused(made)
    assert line.startswith(problem)
    assert "\n" not in line


def test_a_missing_key_and_a_missing_file(refused, tmp_path):
    made = cluster({})
    del made["nodes"][0]["instances"][0]["pd_type"]
    assert "Object missing required field `pd_type`" in refused(made)
    with pytest.raises(InputError, match="cannot be read"):
        import_cluster(tmp_path / "absent.json")


@pytest.mark.skipif(not FILES, reason="the cluster files of ../shared/data are absent")
@pytest.mark.shared
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("with_profiles", [False, True])
def test_every_shared_file_makes_a_plan(path, with_profiles):
    text = import_cluster(path, SHARED / "profiles" if with_profiles else None)
    assert kinds.convert(msgspec.toml.decode(text)).nodes
    plan = make_plan(config_from_text(text, path.stem), path.stem)
    raw = json.loads(path.read_text())
    instances = [instance for node in raw["nodes"] for instance in node["instances"]]
    assert [replica.role for replica in plan.replicas] == [
        instance["pd_type"] or "colocated" for instance in instances
    ]
    assert [replica.model.name for replica in plan.replicas] == [
        instance["model_name"] for instance in instances
    ]
    bundled = {"RTXPRO6000"} if "tp2" in path.stem else {"RTXPRO6000", "RTX4090"}
    wants = "profile" if with_profiles and instances[0]["hardware"] in bundled else "roofline"
    assert {replica.latency.backend for replica in plan.replicas} == {wants}
