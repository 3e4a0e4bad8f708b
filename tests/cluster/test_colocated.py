"""Whole worlds of colocated replicas: hand-computed times, books, determinism, sessions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from emu.errors import InputError
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload
from tests.shared_data import SHARED, needs_shared

ROOT = Path(__file__).resolve().parents[2]


def test_one_request_alone_takes_the_sum_of_its_iterations(tmp_path: Path) -> None:
    path = workload(
        tmp_path / "w.jsonl", [{"input_toks": 100, "output_toks": 3, "arrival_time_ns": 7}]
    )
    run_config(tmp_path / "out", latency=LINEAR, workload={"path": path})
    (row,) = rows_of(tmp_path / "out")
    # prefill: 5000 us + 100 x 50 us; decode: 5000 + 50 + context 100 resp. 101 us
    assert row["ttft_ns"] == str(10_000_000)
    assert row["latency_ns"] == str(10_000_000 + 5_150_000 + 5_151_000)
    assert row["tpot_ns"] == str((5_150_000 + 5_151_000) // 2)
    assert row["first_token_ns"] == str(10_000_007)
    assert row["status"] == "completed"


def test_a_run_interrupted_before_its_first_step_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A coroutine that was made and never awaited would warn, and warnings are errors here.
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("emu.world.completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_config(tmp_path / "out", latency=LINEAR)
    assert list(tmp_path.iterdir()) == []


def test_an_arrival_in_the_middle_of_a_leap_joins_after_the_iteration_in_flight(
    tmp_path: Path,
) -> None:
    # r0: prefill ends at 10 ms, decodes of 5.150, 5.151, ... ms. r1 arrives at 12 ms: the
    # iteration in flight ends at 15.150 ms, then a mixed one: 5 ms + (20 + 1) x 50 us + 101 us.
    path = workload(
        tmp_path / "w.jsonl",
        [
            {"input_toks": 100, "output_toks": 50, "arrival_time_ns": 0},
            {"input_toks": 20, "output_toks": 1, "arrival_time_ns": 12_000_000},
        ],
    )
    run_config(tmp_path / "out", latency=LINEAR, workload={"path": path})
    second = rows_of(tmp_path / "out")[1]
    assert int(second["first_token_ns"]) == 15_150_000 + 5_000_000 + 21 * 50_000 + 101_000
    assert int(second["queue_ns"]) == 15_150_000 - 12_000_000


def test_an_arrival_at_the_very_end_of_an_iteration_is_seen_by_the_next(tmp_path: Path) -> None:
    path = workload(
        tmp_path / "w.jsonl",
        [
            {"input_toks": 100, "output_toks": 50, "arrival_time_ns": 0},
            {"input_toks": 20, "output_toks": 1, "arrival_time_ns": 10_000_000},
        ],
    )
    run_config(tmp_path / "out", latency=LINEAR, workload={"path": path})
    assert rows_of(tmp_path / "out")[1]["queue_ns"] == "0"


def test_many_requests_at_time_zero_are_all_served(tmp_path: Path) -> None:
    rows = [{"input_toks": 10, "output_toks": 5, "arrival_time_ns": 0} for _ in range(50)]
    path = workload(tmp_path / "w.jsonl", rows)
    run_config(tmp_path / "out", replicas=[{"count": 4}], workload={"path": path})
    assert summary_of(tmp_path / "out")["completed"] == 50
    used = {row["instance_id"] for row in rows_of(tmp_path / "out")}
    assert used == {"0", "1", "2", "3"}


def test_a_session_asks_on_when_its_turn_has_ended_and_the_tool_has_run(tmp_path: Path) -> None:
    turns = [
        {"input_toks": 10, "output_toks": 2, "tool_duration_ns": 1_000_000},
        {"input_toks": 12, "output_toks": 2, "tool_duration_ns": 0},
    ]
    path = workload(
        tmp_path / "w.jsonl",
        [
            {"session_id": "s", "arrival_time_ns": 5, "sub_requests": turns},
            {"input_toks": 8, "output_toks": 1, "arrival_time_ns": 6},
        ],
    )
    run_config(tmp_path / "out", latency=LINEAR, workload={"path": path})
    rows = rows_of(tmp_path / "out")
    first, other, second = rows
    assert (first["session_id"], first["sub_request_index"]) == ("s", "0")
    assert (second["session_id"], second["sub_request_index"]) == ("s", "1")
    assert other["session_id"] == ""
    assert int(second["arrival_ns"]) == int(first["last_token_ns"]) + 1_000_000


def test_a_client_that_leaves_frees_its_blocks_at_any_stage(tmp_path: Path) -> None:
    rows = [
        {
            "input_toks": 500,
            "output_toks": 200,
            "arrival_time_ns": index * 1_000_000,
            "cancel_after_ns": index * 7_000_000,
        }
        for index in range(60)
    ]
    path = workload(tmp_path / "w.jsonl", rows)
    run_config(  # leaks would raise
        tmp_path / "out", latency=LINEAR, workload={"path": path}, scheduler={"num_blocks": 200}
    )
    summary = summary_of(tmp_path / "out")
    assert summary["cancelled"] > 20
    assert summary["completed"] + summary["cancelled"] == 60


def test_admission_limits_reject_with_a_reason(tmp_path: Path) -> None:
    rows = [{"input_toks": 50, "output_toks": 20, "arrival_time_ns": 0} for _ in range(10)]
    rows.append({"input_toks": 900, "output_toks": 20, "arrival_time_ns": 10**12})
    path = workload(tmp_path / "w.jsonl", rows)
    run_config(
        tmp_path / "out",
        workload={"path": path},
        router={"max_outstanding": 4, "max_prompt_tokens": 800},
    )
    reasons = [row["reason"] for row in rows_of(tmp_path / "out") if row["status"] == "rejected"]
    assert reasons == ["overloaded"] * 6 + ["prompt_too_long"]


def test_a_request_that_no_replica_could_hold_is_named_with_the_limit(tmp_path: Path) -> None:
    path = workload(
        tmp_path / "w.jsonl",
        [
            {"input_toks": 10, "output_toks": 5, "arrival_time_ns": 0},
            {"input_toks": 1000, "output_toks": 500, "arrival_time_ns": 0},
        ],
    )
    with pytest.raises(InputError) as error:
        run_config(tmp_path / "out", workload={"path": path}, scheduler={"num_blocks": 50})
    assert error.value.line == 2
    assert "800 tokens" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "policy", ["load", "round_robin", "random", "least_outstanding", "prefix_aware"]
)
def test_every_router_gives_each_replica_its_share(tmp_path: Path, policy: str) -> None:
    run_config(
        tmp_path / "out",
        replicas=[{"count": 4}],
        router={"policy": policy},
        workload={
            "synthetic": {"requests": 400, "arrivals": {"process": "poisson", "rate_per_s": 40}}
        },
    )
    counts: dict[str, int] = {}
    for row in rows_of(tmp_path / "out"):
        counts[row["instance_id"]] = counts.get(row["instance_id"], 0) + 1
    assert sorted(counts) == ["0", "1", "2", "3"]
    assert min(counts.values()) >= 40


def test_stale_signals_change_routing_and_nothing_else_breaks(tmp_path: Path) -> None:
    load = {"synthetic": {"requests": 300, "arrivals": {"rate_per_s": 60}}}
    for name, delay in [("fresh", 0), ("stale", 2000)]:
        run_config(
            tmp_path / name,
            replicas=[{"count": 4}],
            router={"signal_delay_ms": delay},
            workload=load,
        )
    fresh, stale = summary_of(tmp_path / "fresh"), summary_of(tmp_path / "stale")
    assert fresh["completed"] == stale["completed"] == 300
    assert stale["p99_ttft_ms"] > fresh["p99_ttft_ms"]


def test_pipeline_stages_overlap_micro_batches(tmp_path: Path) -> None:
    rows = [{"input_toks": 100, "output_toks": 20, "arrival_time_ns": 0} for _ in range(8)]
    path = workload(tmp_path / "w.jsonl", rows)
    for stages in (1, 2):
        run_config(
            tmp_path / str(stages),
            replicas=[{"pipeline_parallel": stages}],
            scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 400},
            workload={"path": path},
            latency=LINEAR,
        )
    assert summary_of(tmp_path / "2")["completed"] == 8


OUTPUTS = ("requests.csv", "summary.json", "timeseries.csv", "transitions.csv", "trace.json.gz")


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "[[replicas]]\ncount = 3\n[router]\npolicy = 'random'\n"
        "[workload.synthetic]\nrequests = 200\nprefix_groups = 5\nprefix_tokens = 64\n"
        "[workload.synthetic.sessions]\nturns_max = 3\n"
        "[output]\ntrace = true\nreport = false\n"
    )
    for seed, cwd in [("0", tmp_path), ("12345", ROOT)]:
        subprocess.run(
            [sys.executable, "-m", "emu", str(config), "-q", "-o", str(tmp_path / seed)],
            check=True,
            cwd=cwd,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        )
    for name in OUTPUTS:
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "12345" / name).read_bytes(), (
            name
        )


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 8])
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("workloads/example_trace.jsonl", 0),
        ("workloads/sharegpt-llama-3.1-8b-300-sps10.jsonl", 0),
        ("workloads/workload_me2_01_mixed.jsonl", 0),
        ("traces/AzureLLMInferenceTrace_conv.csv", 1000),
        pytest.param("traces/AzureLLMInferenceTrace_conv.csv", 4000, marks=pytest.mark.nightly),
        ("traces/AzureLLMInferenceTrace_code.csv", 1000),
        pytest.param("traces/AzureLLMInferenceTrace_code.csv", 0, marks=pytest.mark.nightly),
        ("traces/mooncake_conversation.jsonl", 300),
        pytest.param("traces/mooncake_conversation.jsonl", 1500, marks=pytest.mark.nightly),
        ("traces/mooncake_synthetic.jsonl", 200),
        pytest.param("traces/mooncake_synthetic.jsonl", 800, marks=pytest.mark.nightly),
    ],
)
def test_real_workloads_run_and_leave_empty_books(
    tmp_path: Path, name: str, limit: int, replicas: int
) -> None:
    run_config(  # books that are not zero at the end raise
        tmp_path / "out",
        nodes=[{"gpu": "H100-SXM5-80GB"}],
        replicas=[{"count": replicas}],
        workload={"path": str(SHARED / name), "limit": limit, "oversized": "reject"},
    )
    rows = rows_of(tmp_path / "out")
    summary = summary_of(tmp_path / "out")
    assert len(rows) == summary["completed"] + summary["rejected"] > 0
    assert all(row["status"] in ("completed", "rejected") for row in rows)
    assert all(int(row["decode_toks"]) == int(row["output_toks"]) for row in rows if row["ttft_ns"])


def test_the_turns_of_a_session_whose_client_left_end_with_it(tmp_path: Path) -> None:
    turns = [{"input_toks": 100, "output_toks": 50, "cancel_after_ns": 20_000_000}]
    turns += [{"input_toks": 10, "output_toks": 5}] * 2
    path = workload(
        tmp_path / "w.jsonl", [{"session_id": "s", "arrival_time_ns": 0, "sub_requests": turns}]
    )
    run_config(tmp_path / "out", latency=LINEAR, workload={"path": path})
    rows = rows_of(tmp_path / "out")
    assert [row["status"] for row in rows] == ["cancelled"] * 3
    assert [row["reason"] for row in rows] == ["client_left", "session_ended", "session_ended"]


def test_an_interval_of_zero_takes_no_sample_of_the_cluster(tmp_path: Path) -> None:
    path = workload(
        tmp_path / "w.jsonl", [{"input_toks": 9, "output_toks": 2, "arrival_time_ns": 0}]
    )
    for interval_ms, taken in ((0, 0), (1e7, 1)):  # the second one's is that of the end
        output = {"timeseries_interval_ms": interval_ms, "report": False}
        run_config(tmp_path / str(taken), output=output, latency=LINEAR, workload={"path": path})
        assert len(rows_of(tmp_path / str(taken), "timeseries.csv")) == taken


def test_a_request_is_served_where_an_outside_router_placed_it(tmp_path: Path) -> None:
    """Replica 0 as any other; one that there is not, or that serves no prompts, has no answer."""
    chosen = [2, 0, 1, 0, 0, 3, -1]
    rows = [
        {"input_toks": 10, "output_toks": 2, "arrival_time_ns": at, "replica": replica}
        for at, replica in enumerate(chosen)
    ]
    run_config(
        tmp_path / "out",
        latency=LINEAR,
        nodes=[{"gpus": 3}],
        replicas=[{"count": 3}],
        workload={"path": workload(tmp_path / "w.jsonl", rows)},
    )
    found = rows_of(tmp_path / "out")
    assert [row["instance_id"] for row in found[:5]] == ["2", "0", "1", "0", "0"]
    assert (found[5]["status"], found[5]["reason"]) == ("failed", "endpoint_not_serving")
    assert {row["status"] for row in found[:5] + found[6:]} == {"completed"}
    assert found[6]["instance_id"] == "1", "the least loaded"
