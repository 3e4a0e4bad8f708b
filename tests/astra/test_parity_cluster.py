"""LLMServingSim's cluster files: what they mean, and one clear error for what they cannot mean."""

import json

import pytest

from emu.backends.astra.graph import LOCAL, Location, Place
from emu.errors import InputError
from emu.lab.parity.cluster import read_cluster
from emu.lab.parity.instance import ParityOptions


def instance(**changes):
    base = {
        "model_name": "meta-llama/Llama-3.1-8B", "hardware": "RTXPRO6000", "pd_type": None,
        "npu_mem": {"mem_size": 96, "mem_bw": 1597, "mem_latency": 3},
    }  # fmt: skip
    return {**base, **changes}


def cluster(tmp_path, *instances, **changes):
    host = {"mem_size": 512, "mem_bw": 256, "mem_latency": 0}
    node = {"num_instances": len(instances), "cpu_mem": host, "instances": list(instances)}
    table = {"num_nodes": 1, "link_bw": 16, "link_latency": 20000, "nodes": [node], **changes}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(table))
    return path


def test_placement_is_read_as_loosely_as_the_original_does(tmp_path):
    placement = {
        "default": {"weights": "CPU:7", "kv_evict_loc": "cxl"},
        "blocks": [{"blocks": " 5-3, x, 40, 1", "weights": "cxl:1"}, {"blocks": "8", "kv_loc": "npu"}],
        "layers": {"o_proj": {"kv_loc": "npu"}, "lm_head": {"weights": "npu"}},
    }  # fmt: skip
    cxl = {"mem_size": 64, "mem_bw": 60, "mem_latency": 250, "num_devices": 2}
    path = cluster(tmp_path, instance(placement=placement), cxl_mem=cxl)
    replica = read_cluster(path).replicas[0]
    host, second = Place(Location.REMOTE, 0), Place(Location.CXL, 1)
    assert replica.placement.default == host
    assert replica.placement.blocks == {1: second, 3: second, 4: second, 5: second, 8: host}
    # A rule for a layer that is silent about weights still beats the block's.
    assert replica.placement.layers == {"o_proj": host, "lm_head": LOCAL}
    assert replica.recall_place == Place(Location.CXL, 0)


def test_an_instance_may_have_switches_of_its_own(tmp_path):
    path = cluster(tmp_path, instance(enable_local_offloading=True), instance())
    read = read_cluster(path)
    own, other = (replica.options(ParityOptions()) for replica in read.replicas)
    assert (own.local_offloading, other.local_offloading) == (True, False)
    assert read.memories.local.latency_ns == 3


@pytest.mark.parametrize(
    ("instances", "changes", "problem"),
    [
        ([instance(pd_type="both")], {}, "pd_type: 'both' is none of prefill, decode, null"),
        ([instance(num_npus=3, tp_size=2)], {}, "3 NPUs are not tp_size 2"),
        ([instance(tp_size=2), instance()], {}, "does not hold 3 NPUs"),
        ([instance(ep_size=2)], {}, "2 on 1 ranks needs a dp_group"),
        ([instance(pp_size=64)], {}, "64 stages for 32 layers"),
        (
            [instance(dp_group="a", tp_size=2), instance(dp_group="a")],
            {},
            "tp_size: differs within dp_group 'a'",
        ),
        (
            [instance(placement={"default": {"weights": "cxl:3"}})],
            {},
            "cxl:3 is not one of the 0 devices",
        ),
        ([instance(placement={"default": {"weights": "disk"}})], {}, "none of npu, cpu, cxl"),
        ([instance()], {"link_bw": [1, 2]}, "2 values for 1 network dimensions"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, instances, changes, problem):
    with pytest.raises(InputError, match=problem):
        read_cluster(cluster(tmp_path, *instances, **changes))


def test_missing_keys_are_named(tmp_path):
    broken = instance()
    del broken["npu_mem"]["mem_bw"]
    with pytest.raises(InputError, match="mem_bw: the key is missing"):
        read_cluster(cluster(tmp_path, broken))
