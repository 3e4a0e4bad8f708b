"""Data-parallel groups: members begin their iterations together, and no member waits forever."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emu.backends.llmservingsim.convert import import_cluster
from emu.config.load import load_config
from emu.errors import InputError
from emu.latency.base import BatchShape
from emu.replica.states import ReplicaState
from emu.replica.wave import WaveGroup
from emu.runs.runner import adjust, execute
from emu.testing import Bench
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload
from tests.shared_data import SHARED, needs_shared

MOE = "Qwen/Qwen3-30B-A3B-Instruct-2507"


def ask(at_us: int, prompt: int, output: int) -> dict[str, Any]:
    return {"input_toks": prompt, "output_toks": output, "arrival_time_ns": at_us * 1000}


def group(path: Path, rows: list[dict[str, Any]], **tables: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "nodes": [{"gpus": 2}],
        "replicas": [{"count": 2, "data_parallel_group": "A"}],
        "router": {"policy": "round_robin"},
        "latency": LINEAR,
        "workload": {"path": workload(path, rows)},
    }
    content.update(tables)
    return content


def test_two_members_step_together(tmp_path: Path) -> None:
    """Iterations cost 5,000 us + 50 us a token + 1 us a token of context.

    wave  begins  member 0                      member 1
    1          0  100 tokens, until 10,000      10 tokens, until 5,500
    2     10,000  decode at 100, until 15,150   decode at 10, until 15,060
    3     15,150  decode at 101, until 20,301   decode at 11, until 20,211
    4     20,301  decode at 102, until 25,453   one token to keep pace, until 25,352
    5     25,453  decode at 103, until 30,606   10 tokens, until 30,953
    """
    rows = [ask(0, 100, 5), ask(0, 10, 3), ask(22_000, 10, 1)]
    tables = group(tmp_path / "w.jsonl", rows, router={"policy": "least_outstanding"})
    run_config(tmp_path / "run", **tables)
    found = rows_of(tmp_path / "run")
    assert [row["instance_id"] for row in found] == ["0", "1", "1"]
    ends = [(int(r["first_token_ns"]) // 1000, int(r["last_token_ns"]) // 1000) for r in found]
    assert ends == [(10_000, 30_606), (5_500, 20_211), (30_953, 30_953)]


def test_members_that_share_experts_wait_in_every_layer(tmp_path: Path) -> None:
    """A long and a short prompt end together: both are padded, and wait for each other."""
    rows = [ask(0, 1500, 1), ask(0, 20, 1)]
    tables = group(
        tmp_path / "w.jsonl",
        rows,
        model={"name": MOE},
        nodes=[{"gpus": 2, "gpu": "H100-SXM5-80GB"}],
        replicas=[{"count": 2, "data_parallel_group": "A", "expert_parallel": 2}],
        latency={"host_overhead": False},
    )
    run_config(tmp_path / "shared", **tables)
    long, short = (int(row["ttft_ns"]) for row in rows_of(tmp_path / "shared"))
    assert long == short
    tables["replicas"] = [{"count": 2, "data_parallel_group": "A", "expert_parallel": 1}]
    run_config(tmp_path / "own", **tables)
    long, short = (int(row["ttft_ns"]) for row in rows_of(tmp_path / "own"))
    assert long > short  # every member has all experts: only padding ties them


def member(replica_id: int) -> Any:
    """100 ns a token, and 7 a token of attention."""
    latency: Any = SimpleNamespace(
        iteration_ns=lambda shape: 107 * shape.new_tokens,
        components_ns=lambda shape: {
            "attention_prefill": 7 * sum(shape.prefill_new),
            "attention_decode": 7 * shape.decode_count,
        },
        foreign=False,
    )
    bench = Bench(ReplicaState.COLOCATED)
    replica: Any = bench.replica
    replica.replica_id = replica.books.replica_id = replica_id
    replica.pace.latency = latency
    replica.actor = SimpleNamespace(look=lambda: None)
    return replica


@pytest.mark.doubles
def test_batches_beyond_the_graphs_are_not_padded() -> None:
    """Members then compute their own tokens, the experts those of all, and they end together."""
    wave = WaveGroup("A", shares_experts=True, padded_tokens_max=256)
    members = [member(0), member(1)]
    for each in members:
        wave.join(each)
    for prompt, padded, of_group, wait_ns in [(256, 256, 0, 7 * 248), (257, 0, 133, 107 * 249)]:
        gone: list[tuple[int, int]] = []
        shapes = [BatchShape(prefill_new=[prompt], prefill_context=[0]), BatchShape(decode_count=8)]
        for each, shape in zip(members, shapes, strict=True):
            name = each.replica_id
            wave.enter(name, shape, lambda wait_ns, name=name, to=gone: to.append((name, wait_ns)))
        assert gone == [(0, 0), (1, wait_ns)]
        for shape in shapes:
            assert (shape.padded_tokens, shape.group_tokens) == (padded, of_group)
            assert shape.group_tokens_max == (257 if of_group else 0)


@pytest.mark.doubles
def test_engines_that_pad_captured_steps_alone_pad_no_wave_with_prompts() -> None:
    wave = WaveGroup("A", shares_experts=True, pads_prompts=False)
    members = [member(0), member(1)]
    for each in members:
        wave.join(each)
    for tokens, padded, of_group in [(1, 8, 0), (90, 0, 49)]:
        first = BatchShape(decode_count=1) if tokens == 1 else BatchShape([tokens], [0])
        shapes = [first, BatchShape(decode_count=8)]
        for each, shape in zip(members, shapes, strict=True):
            wave.enter(each.replica_id, shape, lambda wait_ns: None)
        assert [(s.padded_tokens, s.group_tokens) for s in shapes] == [(padded, of_group)] * 2


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_uneven_members_drain(tmp_path: Path, stages: int, seed: int) -> None:
    """The known hang of the original: several stages, members with unequal work."""
    tables = group(
        tmp_path / "w.jsonl",
        [],
        nodes=[{"gpus": 3 * stages}],
        replicas=[{"count": 3, "data_parallel_group": "A", "pipeline_parallel": stages}],
        router={"policy": "random"},
        seed=seed,
        workload={
            "synthetic": {
                "requests": 25,
                "arrivals": {"process": "gamma", "rate_per_s": 6, "cv": 3},
                "output": {"distribution": "uniform", "min": 1, "max": 60},
                "prompt": {"distribution": "uniform", "min": 1, "max": 3000},
            }
        },
    )
    run_config(tmp_path / "run", **tables)
    assert summary_of(tmp_path / "run")["completed"] == 25


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("restart_s", [0.2, 1000])
def test_others_go_on_when_a_member_crashes(tmp_path: Path, stages: int, restart_s: float) -> None:
    rows = [ask(40_000 * i, 300, 40) for i in range(20)]
    tables = group(
        tmp_path / "w.jsonl",
        rows,
        nodes=[{"gpus": 3 * stages}],
        replicas=[{"count": 3, "data_parallel_group": "A", "pipeline_parallel": stages}],
        faults=[{"at_s": 0.41, "kind": "replica_crash", "replica": 1}],
        recovery={"restart_s": restart_s},
    )
    run_config(tmp_path / "run", **tables)
    found = summary_of(tmp_path / "run")
    assert found["completed"] == 20
    assert sum(found["faults"].values()) == 1


def test_a_group_of_prefill_replicas_feeds_decodes(tmp_path: Path) -> None:
    rows = [ask(1000 * i, 200 + 50 * i, 8) for i in range(12)]
    tables = group(
        tmp_path / "w.jsonl",
        rows,
        nodes=[{"gpus": 4}],
        replicas=[
            {"count": 2, "role": "prefill", "data_parallel_group": "P"},
            {"count": 2, "role": "decode", "data_parallel_group": "D"},
        ],
    )
    run_config(tmp_path / "run", **tables)
    assert summary_of(tmp_path / "run")["completed"] == 12


@pytest.mark.parametrize(
    ("replicas", "key", "problem"),
    [
        (
            [{"expert_parallel": 4, "tensor_parallel": 2}],
            "replicas.0.expert_parallel",
            "exceeds tensor_parallel 2",
        ),
        (
            [
                {"data_parallel_group": "A"},
                {"data_parallel_group": "A", "tensor_parallel": 2},
            ],
            "replicas.1.data_parallel_group",
            "differ in tensor_parallel",
        ),
        (
            [{"count": 3, "data_parallel_group": "A", "expert_parallel": 4}],
            "replicas.0.expert_parallel",
            "4 ranks cannot be spread over 3 members",
        ),
    ],
)
def test_what_cannot_be_a_group_is_said(
    tmp_path: Path, replicas: list[dict[str, Any]], key: str, problem: str
) -> None:
    tables = group(
        tmp_path / "w.jsonl",
        [ask(0, 10, 1)],
        model={"name": MOE},
        nodes=[{"gpus": 8}],
        replicas=replicas,
    )
    with pytest.raises(InputError) as error:
        run_config(tmp_path / "run", **tables)
    assert key in str(error.value)
    assert problem in str(error.value)


def imported(directory: Path, cluster: str, requests: Path) -> list[dict[str, str]]:
    """Run a cluster file of LLMServingSim with its measured layer times."""
    file = directory / "cluster.toml"
    clusters, profiles = SHARED / "llmservingsim-clusters", SHARED / "profiles"
    file.write_text(import_cluster(clusters / f"{cluster}.json", profiles))
    keys = [f'workload.path="{requests}"', "latency.host_overhead=false", "output.report=false"]
    execute(adjust(load_config(file, keys), seed=None, output=directory / "run"), cluster)
    return rows_of(directory / "run")


@needs_shared
def test_dense_group_reproduces_the_published_run(tmp_path: Path) -> None:
    mine = imported(
        tmp_path, "single_node_dp_instance", SHARED / "workloads" / "example_trace.jsonl"
    )
    published = SHARED / "llmservingsim-outputs" / "example_dp_run.csv"
    with published.open(newline="") as file:
        theirs = {row["request id"]: row for row in csv.DictReader(file)}
    # Its idle clock moves in steps of 1 ms: where a request finds the group idle, ours is earlier.
    for row in mine:
        other = theirs[row["request_id"]]
        assert int(row["ttft_ns"]) == int(other["TTFT"])
        assert int(row["last_token_ns"]) == int(other["end_time"])


@needs_shared
def test_expert_group_reproduces_the_worked_example(tmp_path: Path) -> None:
    """LLMServingSim 2.0; there the two input loads of 8 ns queue up."""
    requests = tmp_path / "w.jsonl"
    rows = [{"input_toks": 512, "output_toks": 3, "arrival_time_ns": 1000}] * 2
    requests.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in imported(tmp_path, "single_node_moe_dp_ep_instance", requests):
        assert int(row["ttft_ns"]) == 37_970_454
        assert int(row["latency_ns"]) == 37_970_454 + (6_606_366 - 8) + 6_606_406
