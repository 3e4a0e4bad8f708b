"""Defects that were found in other emulators, each with a test that it is not here.

Defects in reading workloads (rows skipped in silence, units guessed) have their tests in tests/workload.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
from pathlib import Path

import pytest

from emu.config.load import config_from_dict
from emu.errors import InputError
from emu.runs.runner import execute
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of, workload

ROOT = Path(__file__).resolve().parents[2]


def test_a_workload_without_a_usable_row_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,0,472,Conversation log\n"
    )
    with pytest.raises(InputError, match="Response tokens"):
        run_config(tmp_path / "out", workload={"path": str(path)})


def test_skipped_rows_are_counted_in_the_summary(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,0,472,Conversation log\n6,ChatGPT,100,5,105,Conversation log\n"
    )
    run_config(tmp_path / "out", workload={"path": str(path)})
    summary = summary_of(tmp_path / "out")
    assert summary["completed"] == 1
    assert sum(summary["rows_skipped"].values()) == 1


def calls_for(requests: int, directory: Path) -> int:
    config = config_from_dict(
        {
            "replicas": [{"count": 4}],
            "latency": LINEAR,
            "workload": {"synthetic": {"requests": requests, "arrivals": {"rate_per_s": 8}}},
            "output": {"dir": str(directory), "report": False},
        }
    )
    profile = cProfile.Profile()
    profile.runcall(execute, config, "test")
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_the_work_for_a_request_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    calls_for(10, tmp_path / "imports")
    base, small, large = (calls_for(n, tmp_path / str(n)) for n in (10, 500, 2500))
    assert (large - base) / (small - base) < 1.15 * (2500 - 10) / (500 - 10)


def test_prefill_and_decode_pools_do_not_share_a_counter(tmp_path: Path) -> None:
    run_config(
        tmp_path / "out",
        replicas=[{"role": "prefill", "count": 4}, {"role": "decode", "count": 4}],
        router={"policy": "round_robin", "decode_policy": "least_used"},
        workload={"synthetic": {"requests": 200, "arrivals": {"rate_per_s": 40}}},
    )
    rows = rows_of(tmp_path / "out")
    assert {row["instance_id"] for row in rows} == {"0", "1", "2", "3"}
    assert {row["decode_instance_id"] for row in rows if int(row["decode_toks"]) > 1} == {
        "4", "5", "6", "7",
    }  # fmt: skip


@pytest.mark.parametrize(
    "policy", ["load", "round_robin", "random", "least_outstanding", "prefix_aware"]
)
def test_ties_are_broken_the_same_way_in_every_run(tmp_path: Path, policy: str) -> None:
    rows = [{"input_toks": 64, "output_toks": 8, "arrival_time_ns": 0} for _ in range(40)]
    path = workload(tmp_path / "w.jsonl", rows)
    for name in ("a", "b"):
        run_config(
            tmp_path / name,
            replicas=[{"count": 5}],
            router={"policy": policy},
            workload={"path": path},
        )
    first, second = ((tmp_path / name / "requests.csv").read_bytes() for name in "ab")
    assert first == second


def test_a_run_replayed_from_its_own_rows_gives_the_same_rows(tmp_path: Path) -> None:
    run_config(
        tmp_path / "a",
        replicas=[{"count": 3}],
        workload={"synthetic": {"requests": 200, "arrivals": {"rate_per_s": 30}}},
    )
    run_config(
        tmp_path / "b",
        replicas=[{"count": 3}],
        workload={"path": str(tmp_path / "a" / "requests.csv"), "format": "csv"},
    )
    columns = ("arrival_ns", "first_token_ns", "last_token_ns", "prompt_toks", "instance_id")
    first, second = (
        [[row[column] for column in columns] for row in rows_of(tmp_path / name)] for name in "ab"
    )
    assert first == second


def test_gpu_time_is_the_sum_of_the_lifetimes_in_the_transitions(tmp_path: Path) -> None:
    rows = [
        {"input_toks": 200, "output_toks": 60, "arrival_time_ns": index * 15_000_000}
        for index in range(120)
    ]
    run_config(
        tmp_path / "out",
        latency=LINEAR,
        replicas=[{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}],
        workload={"path": workload(tmp_path / "w.jsonl", rows)},
        commands=[
            {"at_s": 0.5, "replica": 0, "command": "deactivate"},
            {"at_s": 1.0, "replica": 0, "command": "deactivate"},
        ],
    )
    summary = summary_of(tmp_path / "out")
    end_ns = round(summary["simulated_s"] * 1e9)
    active: dict[str, int] = {}
    total_ns = 0
    for row in rows_of(tmp_path / "out", "transitions.csv"):
        at_ns, replica = int(row["time_ns"]), row["replica"]
        if row["to"] == "inactive":
            total_ns += at_ns - active.pop(replica)
        else:
            active.setdefault(replica, at_ns)
    total_ns += sum(end_ns - since_ns for since_ns in active.values())
    assert summary["gpu_seconds"]["total"] == pytest.approx(total_ns / 1e9, abs=1e-5)
    assert total_ns < 4 * end_ns


@pytest.mark.slow
def test_memory_does_not_follow_the_tokens(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "[[replicas]]\ncount = 8\n[workload.synthetic]\nrequests = 19366\n"
        "arrivals = {rate_per_s = 5.5}\noutput = {median = 150.0, max = 1000}\n"
    )
    script = (
        "from emu.cli import main\n"
        f"status = main(['run', {str(config)!r}, '-q', '--no-report', '-o', {str(tmp_path / 'o')!r}])\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "peak = next(line for line in lines if line.startswith('VmHWM'))\n"
        "print(status, peak.split()[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    status, peak_kib = done.stdout.split()[-2:]
    assert status == "0"
    assert int(peak_kib) < 250 * 1024
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert summary["p99_itl_ms"] > 0


def test_pressure_on_the_kv_cache_ends_in_answers_not_in_a_livelock(tmp_path: Path) -> None:
    rows = [{"input_toks": 120, "output_toks": 200, "arrival_time_ns": 0} for _ in range(30)]
    run_config(
        tmp_path / "out",
        latency=LINEAR,
        scheduler={"num_blocks": 41},  # two of them fit, barely
        workload={"path": workload(tmp_path / "w.jsonl", rows)},
    )
    summary = summary_of(tmp_path / "out")
    assert summary["completed"] == 30
    assert 0 < summary["preemptions"] < 30 * 20
