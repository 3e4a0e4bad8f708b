"""The worked example of live scaling (BlitzScale section 4.9), by the real actors and by the core.

L = 8 layers, 15 ms each on both replicas; the embedding is usable at 40 ms, layer j at 40 + 40 j,
the head at 400 ms. Ten equal batches A..J are queued at 0; one New, one Old (idle at 0).
"""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from emu.cluster.audit import leaks
from emu.cluster.cluster import Cluster
from emu.cluster.plan import make_plan
from emu.cluster.recorder import Recorder
from emu.config.load import config_from_dict
from emu.config.schema import CommandTable
from emu.kernel.priorities import PRIORITY_NETWORK
from emu.replica.events import Commanded, SegmentArrived, WeightsArrived
from emu.replica.states import ReplicaState as S
from emu.workload.opened import open_workload
from tests.csvfile import csv_rows

MS = 1_000_000
PROMPT = 64
COMPLETIONS_MS = [160, 250, 305, 335, 395, 455, 515, 575, 635, 695]


def _model(directory: Path) -> str:
    """Eight tiny layers."""
    path = directory / "tiny.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 8,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "vocab_size": 512,
                "max_position_embeddings": 4096,
                "torch_dtype": "float16",
            }
        )
    )
    return str(path)


def _cluster(
    directory: Path,
    old: int,
    new: int,
    *,
    requests: int = 10,
    output: int = 1,
    layer_us: int = 15_000,
) -> Cluster:
    """Replicas `old` and `new`, and one that decodes, on links that cost nothing."""
    trace = directory / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"arrival_time_ns": 0, "input_toks": PROMPT, "output_toks": output}) + "\n"
            for _ in range(requests)
        )
    )
    roles = {old: "prefill", new: "inactive", 3 - old - new: "decode"}
    config = config_from_dict(
        {
            "model": {"name": "tiny", "hf_config": _model(directory)},
            "nodes": [
                {
                    "gpu": "A100-SXM4-80GB",
                    "gpus": 3,
                    "nvlink_gbps": 1e9,
                    "nic_gbps": 1e9,
                    "nic_latency_us": 0,
                    "pcie_gbps": 0.02,
                }
            ],
            "replicas": [{"role": roles[i]} for i in range(3)],
            "workload": {"path": str(trace)},
            "scheduler": {
                "policy": "fcfs",
                "block_size": 64,
                "num_blocks": 100,
                "max_batch_prefill_tokens": PROMPT,
            },
            "latency": {
                "backend": "linear",
                "base_us": 8 * layer_us,
                "per_token_us": 0,
                "per_context_token_us": 0,
            },
            "network": {"kv_transfer": "blocking"},
            "output": {"dir": str(directory / "out"), "report": False},
        }
    )
    plan = make_plan(config)
    workload = open_workload(
        config.workload, base_dir=Path(), seed=1, holds=lambda *_: "", config_source="test"
    )
    cluster = Cluster(plan, workload, Recorder(directory, config.output))
    for replica in cluster.replicas:
        replica.relaying.activation_token_bytes = 0  # the example neglects the transfer
    return cluster


def _arrive_by_clock(cluster: Cluster, new: int, step_us: int = 40_000) -> None:
    """Segments arrive at 40, 80, ... 400 ms, instead of over the links."""
    replica = cluster.replicas[new]
    cluster.scalers[0].load_by_hand = lambda _: None  # type: ignore[method-assign]

    def arrive(count: int) -> None:
        if replica.state is not S.NEW_PREFILL:
            return
        replica.actor.tell(SegmentArrived(count=count))
        if count == 10:
            replica.actor.tell(WeightsArrived(to=None))

    for index in range(10):
        cluster.kernel.call_at(
            (index + 1) * step_us * 1000, PRIORITY_NETWORK, lambda count=index + 1: arrive(count)
        )


def _command(cluster: Cluster, replica: int, command: str) -> None:
    """A manual command, before anything else happens."""
    table = CommandTable(at_s=0, replica=replica, command=command)
    assert cluster.commander.issue(cluster.replicas[replica], table)


def _run(directory: Path, old: int, new: int, **options: int) -> Cluster:
    made: list[Cluster] = []

    async def main() -> None:
        cluster = _cluster(directory, old, new, **options)
        made.append(cluster)
        _arrive_by_clock(cluster, new)
        _command(cluster, new, "to_new_prefill")
        _command(cluster, old, "to_old_prefill")
        outcome = await cluster.run()
        cluster.recorder.close()
        cluster.recorder.requests.finish()
        if outcome.error is not None:
            raise outcome.error

    anyio.run(main)
    return made[0]


@pytest.mark.parametrize(("old", "new"), [(0, 1), (1, 0), (2, 0)])
def test_ten_batches_complete_at_the_times_of_section_4_9(
    tmp_path: Path, old: int, new: int
) -> None:
    cluster = _run(tmp_path, old, new)
    first_ms = [int(row["first_token_ns"]) / MS for row in csv_rows(tmp_path / "requests.csv")]
    assert first_ms == COMPLETIONS_MS
    assert leaks(cluster) == []
    relays = [
        (int(mark["time_ns"]) // MS, mark["text"])
        for mark in csv_rows(tmp_path / "marks.csv")
        if mark["kind"] == "relay"
    ]
    given = [
        (40, 0, 0),
        (160, 2, 1),
        (260, 5, 2),
        (305, 6, 3),
        (335, 4, 4),
        (395, 4, 5),
        (455, 0, 7),
    ]
    assert relays == [
        (at_ms, f"to replica {old} after {layers} layers: requests {request}")
        for at_ms, layers, request in given
    ]
    moves = {
        (int(row["replica"]), row["to"]): int(row["time_ns"]) // MS
        for row in csv_rows(tmp_path / "transitions.csv")
    }
    assert moves[new, "new_prefill"] == 0
    assert moves[new, "refractory_prefill"] == 400
    assert moves[new, "prefill"] == 635
    assert moves[old, "old_prefill"] == 0
    assert moves[old, "prefill"] == 575
    board = cluster.pools[0].relay
    assert (board.zigzag_active, board.relay_deactive, board.olds) == (0, 0, 0)


def test_who_computes_what(tmp_path: Path) -> None:
    """G and I complete on the new replica, J on the former old one; the others where handed to."""
    _run(tmp_path, 0, 1)
    rows = csv_rows(tmp_path / "requests.csv")
    assert [int(row["instance_id"]) for row in rows] == [0, 0, 0, 0, 0, 0, 1, 0, 1, 0]


def test_halves_of_a_split_batch_meet_at_one_decode_replica(tmp_path: Path) -> None:
    cluster = _run(tmp_path, 0, 1, output=5)
    rows = csv_rows(tmp_path / "requests.csv")
    assert [int(row["first_token_ns"]) // MS for row in rows] == COMPLETIONS_MS
    assert {row["decode_instance_id"] for row in rows} == {"2"}
    assert {row["status"] for row in rows} == {"completed"}
    assert {row["migrations"] for row in rows} == {"1"}
    assert leaks(cluster) == []
    # Prompt pages only: 2 pages of 64 tokens hold prompt + 1; all layers of each batch once.
    kv_per_token = cluster.plan.replicas[0].kv_bytes_per_token
    assert cluster.network.moved_bytes["kv"] == 10 * 2 * 64 * kv_per_token


def test_it_ends_without_an_old_replica(tmp_path: Path) -> None:
    made: list[Cluster] = []

    async def main() -> None:
        cluster = _cluster(tmp_path, 0, 1, requests=3)
        made.append(cluster)
        _arrive_by_clock(cluster, 1)
        _command(cluster, 1, "to_new_prefill")
        cluster.replicas[0].actor.tell(
            Commanded(to=S.SHUTTING_PREFILL, writer="planner", cause="test")
        )
        outcome = await cluster.run()
        cluster.recorder.close()
        cluster.recorder.requests.finish()
        if outcome.error is not None:
            raise outcome.error

    anyio.run(main)
    cluster = made[0]
    assert cluster.replicas[1].state is S.PREFILL
    assert cluster.pools[0].relay.zigzag_active == 0
    assert leaks(cluster) == []


def test_weights_of_a_manual_command_come_from_host_memory(tmp_path: Path) -> None:
    """Layer by layer at the rate of the PCIe link."""
    made: list[Cluster] = []

    async def main() -> None:
        cluster = _cluster(tmp_path, 0, 1)
        made.append(cluster)
        _command(cluster, 1, "to_new_prefill")
        _command(cluster, 0, "to_old_prefill")
        outcome = await cluster.run()
        cluster.recorder.close()
        cluster.recorder.requests.finish()
        if outcome.error is not None:
            raise outcome.error

    anyio.run(main)
    cluster = made[0]
    size_bytes = sum(cluster.scalers[0].loader._world.weights[1].segments)
    loaded_ns = [
        int(m["time_ns"]) for m in csv_rows(tmp_path / "marks.csv") if m["kind"] == "loaded"
    ]
    assert loaded_ns == [pytest.approx(size_bytes * 8 / 0.02e9 * 1e9, rel=1e-6)]
