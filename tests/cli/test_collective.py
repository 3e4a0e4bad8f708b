"""`emu collective` and the keys of [network] that say how collectives run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.latency.collectives import collectives


def collective(*arguments):
    command = [sys.executable, "-m", "emu", "collective", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_prints_cycles_by_hand():
    # Three rounds of 256 bytes each way; 1 GiB/s is 1.0737 bytes a ns.
    done = collective("all-gather", "1024", "--dims", "Ring:4:1:100", "--json")
    assert json.loads(done.stdout)["cycles"] == 10 + 3 * (int(100 + 1024 / 1.073741824) + 10)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("all-reduce", "64", "--dims", "Torus:4:1:1"), "--dims"),
        (("all-reduce", "64", "--dims", "Ring:4:1"), "expected TOPOLOGY"),
        (("all-reduce", "64", "--dims", "Ring:3:1:1", "--algorithm", "halvingDoubling"), "power"),
        (("all-reduce", "64", "--algorithm", "ring,ring"), "--algorithm"),
        (("all-reduce", "64", "--binary", "/no/such/program"), "--binary"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(arguments, problem):
    done = collective(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1


def config(tensor_parallel=4, **network):
    return config_from_dict(
        {
            "replicas": [{"tensor_parallel": tensor_parallel}],
            "network": network,
        }
    )


def cost_ns(**network):
    made = config(**network)
    plan = make_plan(made).replicas[0]
    return collectives(plan.latency_context(made))("all_reduce", 1 << 20, 4)


def test_every_key_of_the_network_changes_what_a_collective_costs():
    plain = cost_ns(link_latency_ns=500)
    for changed in (
        {"topology": ["Ring"], "collective_algorithm": "direct"},
        {"collective_splits": 4},
        {"collective_algorithms": {"all-reduce": "direct"}},
        {"collective_algorithms": {"all-reduce": "doubleBinaryTree"}},
        {"congestion": True, "topology": ["Switch"]},
        {"endpoint_delay_ns": 500},
    ):
        assert cost_ns(link_latency_ns=500, **changed) != plain, changed


@pytest.mark.parametrize(
    ("tensor_parallel", "network", "key"),
    [
        (4, {"collective_algorithms": {"all-reduce": "star"}}, "network.collective_algorithms"),
        (16, {"congestion": True}, "network.congestion"),
        (4, {"congestion": True, "collective_algorithm": "oneDirect"}, "network.collective_alg"),
        (
            4,
            {"congestion": True, "collective_algorithms": {"all-reduce": "direct2"}},
            "network.collective_algorithms: direct2",
        ),
        (
            4,
            {"collective_algorithm": "doubleBinaryTree"},
            "network.collective_algorithm: .* all-gather",
        ),
    ],
)
def test_what_a_run_would_refuse_is_refused_before(tensor_parallel, network, key):
    made = config_from_dict(
        {
            "nodes": [{"count": 2}],
            "replicas": [{"tensor_parallel": tensor_parallel}],
            "network": network,
        }
    )
    with pytest.raises(InputError, match=key):
        make_plan(made)


def test_an_algorithm_that_needs_a_power_of_two_names_its_key(tmp_path: Path):
    made = config_from_dict(
        {
            "model": {"name": "Qwen/Qwen2.5-32B"},
            "nodes": [{"gpus": 5}],
            "replicas": [{"tensor_parallel": 5}],
            "network": {"collective_algorithm": "halvingDoubling"},
        }
    )
    with pytest.raises(InputError, match=r"network\.collective_algorithm: .*power of two"):
        make_plan(made)


def test_experts_that_do_not_fill_machines_evenly_name_their_key():
    group = {"count": 3, "data_parallel_group": "A", "pipeline_parallel": 2, "expert_parallel": 3}
    made = config_from_dict(
        {
            "model": {"name": "mistralai/Mixtral-8x7B-v0.1"},
            "nodes": [{"count": 3, "gpus": 2}],
            "replicas": [group],
        }
    )
    with pytest.raises(InputError, match=r"replicas\.expert_parallel: 3 ranks do not fill"):
        make_plan(made)


def test_the_executor_of_astra_sim_refuses_splits_before_the_run():
    made = config_from_dict(
        {
            "replicas": [{"tensor_parallel": 4}],
            "latency": {"backend": "astra-sim", "compute": "roofline"},
            "network": {"collective_splits": 2},
        }
    )
    with pytest.raises(InputError, match=r"network\.collective_splits: the executor"):
        make_plan(made)


def test_memory_that_the_executor_of_astra_sim_cannot_have_is_refused_before_the_run():
    made = config_from_dict(
        {
            "nodes": [{"cxl_gib": 64.0, "cxl_gbytes_per_s": 0.5}],
            "latency": {"backend": "astra-sim", "compute": "roofline"},
        }
    )
    with pytest.raises(InputError, match=r"\[\[nodes\]\]: cxl: bandwidth must be at least 1 GB/s"):
        make_plan(made)
