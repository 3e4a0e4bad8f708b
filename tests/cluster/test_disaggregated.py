"""Whole worlds with prefill and decode replicas: hand-computed migrations, limits, role changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from emu.cluster.audit import leaks
from emu.cluster.cluster import Cluster
from emu.cluster.recorder import Recorder
from emu.config.load import config_from_dict
from emu.network.flows import TransferSpec
from emu.runs.runner import prepare
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload

KV_TOKEN = 131_072  # Llama-3.1-8B in bfloat16: 2 x 8 heads x 128 x 32 layers x 2 bytes
NIC = 12_500_000_000  # 100 Gbit/s in bytes per second
LATENCY_NS = 5_000


def two_machines(prefill: int, decode: int) -> dict[str, Any]:
    """Every replica on a machine of its own: all KV goes over NICs."""
    return {
        "nodes": [{"count": prefill + decode, "gpus": 1, "gpu": "A100-SXM4-80GB"}],
        "replicas": [
            {"role": "prefill", "count": prefill},
            {"role": "decode", "count": decode},
        ],
        "latency": LINEAR,
        "network": {"kv_transfer": "blocking"},
    }


def transfer_ns(size_bytes: int) -> int:
    """Alone on the links, plus the latency of one message."""
    return -(-size_bytes * 10**9 // NIC) + LATENCY_NS


def test_the_gap_between_prefill_and_decode_is_bytes_over_bandwidth(tmp_path: Path) -> None:
    path = workload(
        tmp_path / "w.jsonl", [{"input_toks": 100, "output_toks": 3, "arrival_time_ns": 0}]
    )
    run_config(tmp_path / "out", **two_machines(1, 1), workload={"path": path})
    (row,) = rows_of(tmp_path / "out")
    # prefill 5 ms + 100 x 50 us = 10 ms; 101 tokens are 7 pages of 16 = 112 tokens of KV
    gap_ns = transfer_ns(112 * KV_TOKEN)
    assert gap_ns == 1_174_406 + 5_000
    assert int(row["first_token_ns"]) == 10_000_000
    assert int(row["migration_ns"]) == gap_ns
    assert int(row["last_token_ns"]) == 10_000_000 + gap_ns + 5_150_000 + 5_151_000
    assert int(row["max_gap_ns"]) == gap_ns + 5_150_000  # the gap includes the migration
    assert (row["instance_id"], row["decode_instance_id"]) == ("0", "1")
    assert row["migrations"] == "1"


def test_rates_of_the_time_series_add_up_to_the_totals(tmp_path: Path) -> None:
    rows = [
        {"input_toks": 100, "output_toks": 30, "arrival_time_ns": index * 70_000_000}
        for index in range(20)
    ]
    path = workload(tmp_path / "w.jsonl", rows)
    run_config(
        tmp_path / "out",
        **two_machines(1, 1),
        workload={"path": path},
        output={"timeseries_interval_ms": 100},
    )
    samples = rows_of(tmp_path / "out", "timeseries.csv")
    spans_s = np.diff([0, *(int(row["time_ns"]) for row in samples)]) / 1e9
    for column, total in (
        ("kv_bytes_per_s", 20 * 112 * KV_TOKEN),
        ("prefill_tokens_per_s", 20 * 100),
        ("decode_tokens_per_s", 20 * 30),
    ):
        rates = [int(row[column]) for row in samples]
        assert sum(1 for rate in rates if rate) > 10
        assert float(np.dot(rates, spans_s)) == pytest.approx(total, rel=0.01), column


def test_a_request_of_one_token_never_migrates(tmp_path: Path) -> None:
    path = workload(
        tmp_path / "w.jsonl", [{"input_toks": 100, "output_toks": 1, "arrival_time_ns": 0}]
    )
    run_config(tmp_path / "out", **two_machines(1, 1), workload={"path": path})
    (row,) = rows_of(tmp_path / "out")
    assert row["migrations"] == "0"
    assert row["decode_instance_id"] == "0"


def test_two_sources_take_turns_at_one_destination(tmp_path: Path) -> None:
    # Both prompts end at 10 ms. The destination takes one inbound batch at a time: the second
    # transfer begins when the first has been delivered.
    rows = [{"input_toks": 100, "output_toks": 3, "arrival_time_ns": 0} for _ in range(2)]
    path = workload(tmp_path / "w.jsonl", rows)
    run_config(tmp_path / "out", **two_machines(2, 1), workload={"path": path})
    one = transfer_ns(112 * KV_TOKEN)
    assert [int(row["migration_ns"]) for row in rows_of(tmp_path / "out")] == [one, 2 * one]


def test_contention_to_the_nanosecond(tmp_path: Path) -> None:
    # Two sources (GPUs 0, 1), one destination (GPU 2). Batch A leaves source 0 at 10 ms alone:
    # S = 112 x 131072 B = 14 680 064 B at C = 12.5 B/ns.
    # Half way, when S/2 have moved (at 10 ms + S/2/C = 587 202.56 ns -> we start it at 587 202),
    # a third flow of 5 000 000 B joins from GPU 0 to GPU 3: the egress of GPU 0 is shared, C/2
    # each. A has S - 587 202 x 12.5 = 7 340 039 B left, the third flow 5 000 000 B.
    #   The third flow ends first: 5 000 000 / 6.25 = 800 000 ns later, at 1 387 202 ns.
    #   A has moved 5 000 000 B meanwhile and has 2 340 039 B left, now at C: 187 203.12 ns.
    # A's last byte: 10 ms + 587 202 + 800 000 + 187 203.12 -> 1 574 406 ns after its start, and
    # 5 000 ns of latency. Batch B (source 1) then has the links of GPU 2 for itself.
    size = 112 * KV_TOKEN
    joined_ns = 587_202
    left = size - joined_ns * 25 // 2
    assert left == 7_340_039
    a_ns = joined_ns + 800_000 + -(-(left - 5_000_000) * 2 // 25) + LATENCY_NS
    assert a_ns == 1_579_406
    rows = [{"input_toks": 100, "output_toks": 3, "arrival_time_ns": 0} for _ in range(2)]
    tables = two_machines(2, 2)
    tables["workload"] = {"path": workload(tmp_path / "w.jsonl", rows)}
    config = config_from_dict({**tables, "output": {"dir": str(tmp_path), "report": False}})
    plan, source = prepare(config, "test")
    recorder = Recorder(tmp_path, config.output)

    async def main() -> None:
        cluster = Cluster(plan, source, recorder)
        network = cluster.network
        # Only GPU 2 may receive: close the other decode replica.
        assert cluster.replicas[3].lock.try_acquire("test")

        def join() -> None:
            path = plan.topology.path(0, 3)
            network.carry([(path, 5_000_000)], TransferSpec("weights"), lambda: None)

        cluster.kernel.call_at(10_000_000 + joined_ns, 0, join)
        outcome = await cluster.run()
        assert outcome.error is None
        assert leaks(cluster) == []
        network.table.recount()

    anyio.run(main, backend_options={"use_uvloop": True})
    recorder.close()
    recorder.requests.finish()
    waits = [int(row["migration_ns"]) for row in rows_of(tmp_path)]
    assert waits == [a_ns, a_ns + transfer_ns(size)]


def test_layerwise_transfer_hides_all_but_the_last_layers(tmp_path: Path) -> None:
    rows = [{"input_toks": 1000, "output_toks": 3, "arrival_time_ns": 0}]
    path = workload(tmp_path / "w.jsonl", rows)
    tables = two_machines(1, 1)
    for mode in ("blocking", "layerwise"):
        tables["network"] = {"kv_transfer": mode}
        run_config(tmp_path / mode, **tables, workload={"path": path})
    blocking, layerwise = (
        int(rows_of(tmp_path / mode)[0]["migration_ns"]) for mode in ("blocking", "layerwise")
    )
    # 55 ms of prefill against 10.6 ms of transfer: one of 32 layers is left to move
    size = 63 * 16 * KV_TOKEN
    assert blocking == transfer_ns(size)
    assert layerwise == transfer_ns(size // 32)
    moved = [summary_of(tmp_path / mode)["bytes_moved"]["kv"] for mode in ("blocking", "layerwise")]
    assert moved == [size, size]


def test_the_global_queue_is_first_come_first_served(tmp_path: Path) -> None:
    rows = [
        {"input_toks": 300, "output_toks": 4, "arrival_time_ns": index * 1_000_000}
        for index in range(40)
    ]
    path = workload(tmp_path / "w.jsonl", rows)
    tables = two_machines(2, 2)
    tables["scheduler"] = {"policy": "fcfs", "block_size": 64, "max_batch_prefill_tokens": 1000}
    run_config(tmp_path / "out", **tables, workload={"path": path})
    first = [int(row["first_token_ns"]) for row in rows_of(tmp_path / "out")]
    assert first == sorted(first)


@pytest.mark.parametrize(
    ("policy", "autoscale", "filled"),
    [
        ("first_free", {}, {"1"}),
        ("least_used", {}, {"1", "2", "3"}),
        ("auto", {}, {"1", "2", "3"}),
        ("auto", {"autoscale": {"executor": "none"}}, {"1"}),
    ],
)
def test_destination_policies(
    tmp_path: Path, policy: str, autoscale: dict[str, Any], filled: set[str]
) -> None:
    rows = [
        {"input_toks": 100, "output_toks": 400, "arrival_time_ns": index * 20_000_000}
        for index in range(8)
    ]
    path = workload(tmp_path / "w.jsonl", rows)
    tables = two_machines(1, 3)
    tables["router"] = {"decode_policy": policy}
    run_config(tmp_path / "out", **tables, **autoscale, workload={"path": path})
    assert {row["decode_instance_id"] for row in rows_of(tmp_path / "out")} == filled


def commanded(tmp_path: Path, commands: list[dict[str, Any]], **tables: Any) -> list[str]:
    """Run with manual commands; the transitions as `replica from to`."""
    rows = [
        {"input_toks": 200, "output_toks": 60, "arrival_time_ns": index * 15_000_000}
        for index in range(120)
    ]
    path = workload(tmp_path / "w.jsonl", rows)
    run_config(tmp_path / "out", workload={"path": path}, commands=commands, **tables)
    assert summary_of(tmp_path / "out")["completed"] == 120
    return [
        f"{row['replica']} {row['from']} {row['to']}"
        for row in rows_of(tmp_path / "out", "transitions.csv")
        if row["from"]
    ]


def test_a_prefill_replica_mutates_to_decode_and_keeps_its_queued_batches(tmp_path: Path) -> None:
    moves = commanded(
        tmp_path, [{"at_s": 0.5, "replica": 0, "command": "to_decode"}], **two_machines(2, 1)
    )
    assert moves == ["0 prefill mutating_to_decode", "0 mutating_to_decode decode"]
    used = {row["decode_instance_id"] for row in rows_of(tmp_path / "out")}
    assert "0" in used


def test_shutting_and_reviving(tmp_path: Path) -> None:
    moves = commanded(
        tmp_path,
        [
            {"at_s": 0.3, "replica": 0, "command": "deactivate"},
            {"at_s": 0.8, "replica": 0, "command": "to_prefill"},
            {"at_s": 0.9, "replica": 3, "command": "deactivate"},
            {"at_s": 1.6, "replica": 3, "command": "to_decode"},
        ],
        **two_machines(2, 2),
    )
    assert moves == [
        "0 prefill shutting_prefill",
        "0 shutting_prefill shutting_null",
        "0 shutting_null prefill",
        "3 decode shutting_decode",
        "3 shutting_decode shutting_null",
        "3 shutting_null aus_decode",
        "3 aus_decode decode",
    ]


def test_draining_moves_decodes_instead_of_waiting(tmp_path: Path) -> None:
    rows = [{"input_toks": 100, "output_toks": 500, "arrival_time_ns": 0} for _ in range(6)]
    path = workload(tmp_path / "w.jsonl", rows)
    ends = {}
    for drain in (False, True):
        run_config(
            tmp_path / str(drain),
            **two_machines(1, 2),
            migration={"drain": drain},
            workload={"path": path},
            commands=[{"at_s": 0.5, "replica": 1, "command": "deactivate"}],
        )
        closed = rows_of(tmp_path / str(drain), "transitions.csv")[-1]
        assert closed["to"] == "shutting_null"
        ends[drain] = int(closed["time_ns"])
        assert summary_of(tmp_path / str(drain))["completed"] == 6
    assert ends[True] < 0.5 * ends[False]
    moved = [row for row in rows_of(tmp_path / "True") if int(row["migrations"]) == 2]
    assert len(moved) == 6
    assert all(row["decode_instance_id"] == "2" for row in moved)


def test_kv_rejection_locks_a_hot_replica(tmp_path: Path) -> None:
    rows = [
        {"input_toks": 400, "output_toks": 300, "arrival_time_ns": index * 5_000_000}
        for index in range(60)
    ]
    path = workload(tmp_path / "w.jsonl", rows)
    tables = two_machines(2, 4)
    tables["scheduler"] = {"num_blocks": 1000}
    tables["router"] = {"decode_policy": "first_free"}
    for name, table in [("off", None), ("on", {"period_ms": 10})]:
        extra = {} if table is None else {"kv_reject": table}
        run_config(tmp_path / name, **tables, **extra, workload={"path": path})

    def spread(name: str) -> int:
        return len({row["decode_instance_id"] for row in rows_of(tmp_path / name)})

    assert spread("on") > spread("off")


def test_leaping_and_stepping_agree_with_roles_commands_and_cancellations(tmp_path: Path) -> None:
    rows = [
        {
            "input_toks": 50 + 37 * (index % 11),
            "output_toks": 1 + 23 * (index % 9),
            "arrival_time_ns": index * 9_000_000,
            **({"cancel_after_ns": 300_000_000} if index % 7 == 3 else {}),
        }
        for index in range(80)
    ]
    path = workload(tmp_path / "w.jsonl", rows)
    tables = two_machines(2, 2)
    for leap in (True, False):
        tables["scheduler"] = {"leap": leap, "num_blocks": 120}
        run_config(
            tmp_path / str(leap),
            **tables,
            workload={"path": path},
            migration={"rebalance": True, "rebalance_gap": 0.05},
            kv_reject={},
            commands=[{"at_s": 0.4, "replica": 1, "command": "to_decode"}],
        )
    for name in ("requests.csv", "summary.json", "timeseries.csv", "transitions.csv"):
        one, other = (tmp_path / str(leap) / name for leap in (True, False))
        assert one.read_bytes() == other.read_bytes(), name


def test_a_client_that_leaves_during_its_prompt_is_not_decoded_for(tmp_path: Path) -> None:
    """Requests of the queue of all replicas are held by the replica that reads their prompt."""
    line = {"arrival_time_ns": 0, "input_toks": 1000, "output_toks": 50}
    path = workload(tmp_path / "w.jsonl", [{**line, "cancel_after_ns": 1_000_000}])
    tables = two_machines(1, 1) | {"scheduler": {"policy": "fcfs"}}
    run_config(tmp_path / "out", **tables, workload={"path": path})
    (row,) = rows_of(tmp_path / "out")
    assert (row["status"], row["reason"]) == ("cancelled", "client_left")
    assert int(row["decode_toks"]) <= 1


def test_a_client_that_leaves_while_its_request_moves_is_heard(tmp_path: Path) -> None:
    """Decode replicas have an outbound queue of their own, in which a live move is not found."""
    line = {"arrival_time_ns": 0, "input_toks": 50, "output_toks": 500}
    other = {"arrival_time_ns": 0, "input_toks": 5000, "output_toks": 500}
    path = workload(tmp_path / "w.jsonl", [{**line, "cancel_after_ns": 800_000_000}, other])
    # The first copy is there by then; the last one, for which the request stops, hangs.
    hang = {"at_s": 0.602, "kind": "transfer_hang", "probability": 1.0, "duration_s": 5.0}
    run_config(
        tmp_path / "out",
        **two_machines(1, 2),
        migration={"drain": True},
        recovery={"transfer_timeout_ms": 1000.0},
        workload={"path": path},
        faults=[hang],
        commands=[{"at_s": 0.6, "replica": 1, "command": "deactivate"}],
    )
    row, _ = rows_of(tmp_path / "out")
    assert (row["status"], row["reason"]) == ("cancelled", "client_left")


def test_a_client_that_tries_again_is_as_patient_as_before(tmp_path: Path) -> None:
    lines = [
        {"arrival_time_ns": 0, "input_toks": 10, "output_toks": 2},
        {
            "arrival_time_ns": 0,
            "input_toks": 10,
            "output_toks": 500,
            "cancel_after_ns": 300_000_000,
        },
    ]
    path = workload(tmp_path / "w.jsonl", lines)
    tables = two_machines(1, 1) | {"router": {"policy": "load", "max_outstanding": 1}}
    run_config(tmp_path / "out", **tables, workload={"path": path}, recovery={"client_retries": 1})
    first, last = rows_of(tmp_path / "out")[1:]
    assert [first["status"], last["status"]] == ["rejected", "cancelled"]
    assert 700_000_000 < int(last["last_token_ns"]) < 820_000_000  # with its iteration
