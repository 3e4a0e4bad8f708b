"""requests.csv: order, columns, exact latencies, memory, partial results."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.errors import InvariantViolation
from emu.report.records import COLUMNS, RequestLog
from emu.request import Request, Status
from tests.csvfile import csv_rows
from tests.made import request_with

CONTRACT = [
    "request_id",
    "arrival_ns",
    "first_token_ns",
    "last_token_ns",
    "prompt_toks",
    "decode_toks",
    "ttft_ns",
    "tpot_ns",
    "latency_ns",
    "prefix_hit_len",
    "npu_cache_hit",
    "storage_cache_hit",
    "instance_id",
    "session_id",
    "sub_request_index",
    "decode_instance_id",
    "queue_ns",
    "preemptions",
    "migrations",
    "status",
    "reason",
]


def make(request_id: int, arrival_ns: int = 0, **fields) -> Request:
    return request_with(
        request_id=request_id,
        arrival_ns=arrival_ns,
        prompt_tokens=fields.pop("prompt_tokens", 10),
        output_tokens=fields.pop("output_tokens", 5),
        max_output_tokens=5,
        **fields,
    )


def end(request: Request, status: Status = Status.COMPLETED, **fields) -> Request:
    request.status = status
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def test_contract_columns_come_first() -> None:
    assert list(COLUMNS[: len(CONTRACT)]) == CONTRACT


def test_a_row_says_what_happened(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.csv")
    request = make(17, 1_000, session_id='a,"b"', sub_request_index=2, tenant="t", priority=3)
    log.released(request)
    assert request.row == 0
    end(
        request,
        first_scheduled_ns=1_500,
        first_token_ns=3_000,
        last_token_ns=10_001,
        generated_tokens=5,
        replica_id=1,
        decode_replica_id=2,
        prefix_hit_tokens=8,
        npu_hit_tokens=6,
        storage_hit_tokens=2,
        preemptions=1,
        migrations=1,
        migration_ns=400,
        recomputed_tokens=7,
        max_gap_ns=5_000,
        execution_ns=6_000,
        retries=1,
        taken_ns=1_250,
    )
    log.terminal(request)
    stats = log.finish()
    assert csv_rows(tmp_path / "requests.csv") == [
        {
            "request_id": "17",
            "arrival_ns": "1000",
            "first_token_ns": "3000",
            "last_token_ns": "10001",
            "prompt_toks": "10",
            "decode_toks": "5",
            "ttft_ns": "2000",
            "tpot_ns": "1750",  # 7001 // 4
            "latency_ns": "9001",
            "prefix_hit_len": "8",
            "npu_cache_hit": "6",
            "storage_cache_hit": "2",
            "instance_id": "1",
            "session_id": 'a,"b"',
            "sub_request_index": "2",
            "decode_instance_id": "2",
            "queue_ns": "500",
            "preemptions": "1",
            "migrations": "1",
            "status": "completed",
            "reason": "",
            "output_toks": "5",
            "tenant": "t",
            "priority": "3",
            "execution_ns": "6000",
            "migration_ns": "400",
            "recomputed_toks": "7",
            "max_gap_ns": "5000",
            "retries": "1",
            "intake_ns": "250",
        }
    ]
    assert {name: column.tolist() for name, column in stats.columns.items()} == {
        "ttft": [2_000],
        "tpot": [1_750],
        "e2e": [9_001],
        "queue": [500],
        "arrival": [1_000],
        "wait": [900],
        "prompt": [10],
    }
    assert (stats.prompt_tokens, stats.output_tokens, stats.last_token_ns) == (10, 5, 10_001)


def test_one_token_has_tpot_zero_and_a_request_without_token_has_no_times(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.csv")
    one, none = make(0), make(1, 5)
    log.released(one)
    log.released(none)
    log.terminal(end(none, Status.REJECTED, reason="overloaded"))
    log.terminal(
        end(one, first_scheduled_ns=0, first_token_ns=9, last_token_ns=9, generated_tokens=1)
    )
    stats = log.finish()
    first, second = csv_rows(tmp_path / "requests.csv")
    assert (first["tpot_ns"], first["latency_ns"]) == ("0", "9")
    assert [second[key] for key in ("ttft_ns", "tpot_ns", "latency_ns", "queue_ns")] == [""] * 4
    assert second["instance_id"] == second["sub_request_index"] == ""
    assert stats.by_status == {"completed": 1, "cancelled": 0, "rejected": 1, "failed": 0}
    assert stats.by_reason == {"rejected: overloaded": 1}
    assert len(stats.columns["ttft"]) == 1


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(12)), st.lists(st.sampled_from(list(Status)[4:]), min_size=12))
def test_rows_leave_in_order_whatever_the_order_of_ends(order, statuses) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.csv"
        log = RequestLog(path)
        requests = [make(100 + index, index) for index in range(12)]
        for request in requests:
            log.released(request)
        for done, index in enumerate(order, start=1):
            status = statuses[index]
            tokens = 2 if status is Status.COMPLETED else 0
            end(requests[index], status, generated_tokens=tokens)
            if tokens:
                end(requests[index], first_scheduled_ns=20, first_token_ns=30, last_token_ns=31)
            log.terminal(requests[index])
            written = 0
            while written in order[:done]:
                written += 1
            assert log.rows_waiting == done - written
        stats = log.finish()
        rows = csv_rows(path)
        assert [int(row["request_id"]) for row in rows] == [100 + index for index in range(12)]
        assert [row["status"] for row in rows] == [status.name.lower() for status in statuses[:12]]
        # An independent recount from the file gives the statistics (I17).
        completed = [row for row in rows if row["status"] == "completed"]
        assert stats.by_status["completed"] == len(completed)
        for name, column in (("ttft", "ttft_ns"), ("e2e", "latency_ns"), ("queue", "queue_ns")):
            assert sorted(stats.columns[name].tolist()) == sorted(int(r[column]) for r in completed)
        assert sorted(item.name for item in Path(folder).iterdir()) == ["requests.csv"]


def test_a_second_end_or_an_unfinished_request_is_an_invariant(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.csv")
    first, second, third = make(0), make(1), make(2)
    with pytest.raises(InvariantViolation, match="never released"):
        log.terminal(end(make(9), Status.FAILED))
    for request in (first, second, third):
        log.released(request)
    with pytest.raises(InvariantViolation, match="ended in status created"):
        log.terminal(first)
    for request in (first, third):
        log.terminal(end(request, Status.CANCELLED))
        with pytest.raises(InvariantViolation, match="ended twice"):
            log.terminal(request)
    with pytest.raises(InvariantViolation, match="1 of 3 requests never ended; the first is row 1"):
        log.finish()
    assert not (tmp_path / "requests.csv").exists()
    log.discard()
    assert list(tmp_path.iterdir()) == []


def test_interrupted_run_keeps_its_rows_under_a_partial_name(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.csv")
    requests = [make(index) for index in range(4)]
    for request in requests:
        log.released(request)
    for index in (3, 0, 2):
        log.terminal(end(requests[index], Status.FAILED, reason="crash"))
    stats = log.finish(partial=True)
    assert [item.name for item in tmp_path.iterdir()] == ["requests.partial.csv"]
    assert [r["request_id"] for r in csv_rows(tmp_path / "requests.partial.csv")] == ["0", "2", "3"]
    assert stats.by_status["failed"] == 3


def test_memory_follows_requests_in_flight_not_the_run(tmp_path: Path) -> None:
    """20,000 finished requests leave nothing behind; percentiles are still exact."""
    log = RequestLog(tmp_path / "requests.csv")
    in_flight: list[Request] = []
    rng = np.random.default_rng(1)
    ttfts = rng.integers(1, 10**9, 22_000)

    def serve(count: int) -> None:
        for _ in range(count):
            request = make(log.released_count, log.released_count * 1_000)
            log.released(request)
            in_flight.append(request)
            if len(in_flight) > 50:
                done = in_flight.pop(int(rng.integers(0, 50)))
                start = done.arrival_ns
                first = start + int(ttfts[done.request_id])
                end(done, first_scheduled_ns=start, first_token_ns=first)
                end(done, last_token_ns=first + 4_000, generated_tokens=5)
                log.terminal(done)

    serve(2_000)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    serve(20_000)
    gc.collect()
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 300_000
    assert peak - before < 3_000_000
    for request in in_flight:
        end(request, Status.CANCELLED)
        log.terminal(request)
    stats = log.finish()
    kept = [index for index in range(22_000) if index not in {r.request_id for r in in_flight}]
    assert np.percentile(stats.columns["ttft"], 99) == np.percentile(ttfts[kept], 99)
