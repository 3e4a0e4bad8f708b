"""Input files of both programs."""

import json

import pytest
import yaml

from emu.backends.astra.inputs import (
    InputSetup,
    memory_table,
    network_text,
    system_table,
    write_inputs,
)
from emu.backends.astra.memories import Memories, Memory
from emu.errors import InputError
from emu.network.dimensions import NetworkDim
from emu.network.rounds import CollectiveSystem

SYSTEM = CollectiveSystem(
    dims=tuple(NetworkDim(npus=n, gib_per_s=16.0, latency_ns=20_000.0) for n in (2, 4)),
    local_mem_gbytes_per_s=1597,
)
MEMORIES = Memories(
    remote=Memory(memory_type="PER_NODE_MEMORY_EXPANSION", gbytes_per_s=256, pim_channels=64),
    cxl=Memory(memory_type="MEMORY_POOL", gbytes_per_s=60, latency_ns=250, devices=4),
    local=Memory(memory_type="PER_NPU_MEMORY_EXPANSION", gbytes_per_s=1597),
)


def setup(**kw):
    return InputSetup(network=SYSTEM, memories=MEMORIES, **kw)


def test_the_forks_network_file():
    assert yaml.safe_load(network_text(setup())) == {
        "topology": ["FullyConnected", "FullyConnected"],
        "npus_count": [2, 4],
        "bandwidth": [16.0, 16.0],
        "latency": [20_000.0, 20_000.0],
    }


def test_the_forks_system_file():
    table = system_table(setup())
    assert table["endpoint-delay"] == 10
    assert table["preferred-dataset-splits"] == 1
    assert table["all-to-all-implementation"] == ["ring", "ring"]
    assert table["local-mem-bw"] == 1597
    assert table["scheduling-policy"] == "LIFO"
    assert table["collective-optimization"] == "localBWAware"


def test_the_forks_memory_file():
    assert memory_table(setup()) == {
        "remote_mem": {
            "memory-type": "PER_NODE_MEMORY_EXPANSION",
            "mem-bw": 256,
            "mem-latency": 0,
            "num-devices": 1,
            "pim-channels": 64,
        },
        "cxl_mem": {
            "memory-type": "MEMORY_POOL",
            "mem-bw": 60,
            "mem-latency": 250,
            "num-devices": 4,
        },
        "local_mem": {
            "memory-type": "PER_NPU_MEMORY_EXPANSION",
            "mem-bw": 1597,
            "mem-latency": 0,
        },
    }


def test_the_published_program_gets_a_finer_clock():
    up = setup(dialect="upstream")
    network = yaml.safe_load(network_text(up))
    assert network["bandwidth"] == [0.016, 0.016]
    assert network["latency"] == [20_000_000.0] * 2
    assert system_table(up)["endpoint-delay"] == 10_000
    assert system_table(up)["local-mem-bw"] == 1.597
    assert memory_table(up)["memory-type"] == "PER_NPU_MEMORY_EXPANSION"
    one = InputSetup(
        network=CollectiveSystem(dims=(NetworkDim(npus=1, gib_per_s=1, latency_ns=0),)),
        memories=Memories(),
        dialect="upstream",
    )
    assert memory_table(one) == {"memory-type": "NO_MEMORY_EXPANSION"}
    with pytest.raises(InputError, match="more than one NPU in every dimension"):
        network_text(one)


def test_files_are_written_and_groups_only_if_there_are_any(tmp_path):
    files = write_inputs(setup(), tmp_path)
    assert files.groups is None
    assert json.loads(files.system.read_text())["boost-mode"] == 0
    files = write_inputs(setup(groups={"a": [0, 3]}), tmp_path)
    assert files.groups is not None
    assert json.loads(files.groups.read_text()) == {"a": [0, 3]}
    with pytest.raises(InputError, match=r"comm_group.json: a: NPU 8 does not exist"):
        write_inputs(setup(groups={"a": [8]}), tmp_path)
    with pytest.raises(InputError, match="whole numbers as names"):
        write_inputs(setup(groups={"a": [1]}, dialect="upstream"), tmp_path)
