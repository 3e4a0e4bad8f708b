"""summary.json: figures against an independent count, the load verdict, the terminal's tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from emu.catalogue.flops import ModelFlops
from emu.config.schema import SloTable
from emu.errors import InputError
from emu.process.console import PIPE_COLUMNS
from emu.report.gap_file import VALUES_MAX, read_gaps, write_gaps
from emu.report.itl import GapLog
from emu.report.load_verdict import growth, judge_load
from emu.report.records import RequestLog, RequestStats
from emu.report.summary import RunFacts, build_summary, read_summary, write_summary
from emu.report.table import figures, latency_cells, number, plain_summary, print_summary
from emu.request import Request, Status
from tests.made import request_with

S = 1_000_000_000
MS = 1_000_000


def stats_of(
    tmp_path: Path, requests: list[Request], flops: list[ModelFlops] | None = None
) -> RequestStats:
    log = RequestLog(tmp_path / "requests.csv")
    log.count_flops(flops or [])
    for request in requests:
        log.released(request)
    for request in requests:
        log.terminal(request)
    return log.finish()


def completed(
    index: int, arrival_ns: int, wait_ns: int, ttft_ns: int, gap_ns: int, tokens: int = 11
) -> Request:
    first = arrival_ns + ttft_ns
    return request_with(
        request_id=index,
        arrival_ns=arrival_ns,
        prompt_tokens=100,
        output_tokens=tokens,
        max_output_tokens=tokens,
        status=Status.COMPLETED,
        first_scheduled_ns=arrival_ns + wait_ns,
        first_token_ns=first,
        last_token_ns=first + gap_ns * (tokens - 1),
        generated_tokens=tokens,
        prefix_hit_tokens=25,
        npu_hit_tokens=20,
        storage_hit_tokens=5,
    )


def test_figures_of_a_small_run(tmp_path: Path) -> None:
    requests = [
        completed(0, 0, 0, 100 * MS, 10 * MS),
        completed(1, 1 * S, 0, 300 * MS, 20 * MS),
        completed(2, 2 * S, 0, 200 * MS, 40 * MS),
        request_with(
            request_id=3,
            arrival_ns=2 * S,
            prompt_tokens=9,
            output_tokens=9,
            max_output_tokens=9,
            status=Status.REJECTED,
            reason="overloaded",
        ),
        request_with(
            request_id=4,
            arrival_ns=2 * S,
            prompt_tokens=9,
            output_tokens=9,
            max_output_tokens=9,
            status=Status.CANCELLED,
            reason="client",
        ),
    ]
    gaps = GapLog()
    for gap in (10, 20, 40):
        gaps.add_gap(gap * MS, 10)
    facts = RunFacts(
        end_ns=3 * S,
        gpu_ns={"colocated": 6 * S, "loading": 2 * S},
        idle_gpu_ns=S,
        bytes_moved={"kv": 1000, "weights": 7},
        energy_j={"gpu": 1.5},
        rows_skipped={"no output": 2},
        workload_rows=7,
        loads={"host": 2, "disk": 1},
        host_cache_bytes={"mean": 5, "max": 9, "copy": 3},
        faults={"straggler": 1},
        faults_missed={"replica_crash": 2},
    )
    slo = SloTable(ttft_ms=250, tpot_ms=20)
    summary = build_summary(stats_of(tmp_path, requests), gaps.finish(), facts, slo)
    assert (summary.completed, summary.rejected, summary.cancelled, summary.failed) == (3, 1, 1, 0)
    assert summary.reasons == {"cancelled: client": 1, "rejected: overloaded": 1}
    assert summary.duration == pytest.approx(2.6)
    assert summary.request_throughput == pytest.approx(3 / 2.6, abs=1e-6)
    assert summary.output_throughput == pytest.approx(33 / 2.6, abs=1e-6)
    assert summary.total_token_throughput == pytest.approx(333 / 2.6, abs=1e-6)
    assert (summary.mean_ttft_ms, summary.median_ttft_ms, summary.max_ttft_ms) == (200, 200, 300)
    assert summary.p90_ttft_ms == pytest.approx(np.percentile([100, 300, 200], 90))
    assert summary.std_ttft_ms == pytest.approx(np.std([100, 300, 200]), abs=1e-6)
    assert summary.mean_tpot_ms == pytest.approx(70 / 3, abs=1e-6)
    assert (summary.mean_itl_ms, summary.max_itl_ms) == (pytest.approx(70 / 3, abs=1e-6), 40)
    assert summary.mean_e2el_ms == pytest.approx((200 + 500 + 600) / 3, abs=1e-6)
    # Four requests count (the cancelled one does not): two of them met TTFT, two TPOT, one both.
    assert (summary.slo.ttft_attainment, summary.slo.tpot_attainment) == (0.5, 0.5)
    assert summary.slo.joint_attainment == 0.25
    assert summary.slo.e2e_attainment is None
    assert summary.request_goodput == pytest.approx(1 / 2.6, abs=1e-6)
    assert summary.gpu_seconds.total == 8
    assert (summary.gpu_seconds.loading, summary.gpu_seconds.idle) == (2, 1)
    assert summary.kv_bytes_moved == 1000
    assert summary.loads == {"disk": 1, "host": 2}
    assert summary.host_cache_bytes == {"mean": 5, "max": 9, "copy": 3}
    rows = {name: text for name, text, _ in figures(summary)}
    assert (rows["Faults"], rows["Faults missed"]) == ("straggler x1", "replica_crash x2")
    assert summary.prefix_hit_rate == 0.25
    assert summary.prefix_hit_tokens == {"total": 75, "npu": 60, "storage": 15}

    write_summary(tmp_path / "summary.json", summary)
    text = (tmp_path / "summary.json").read_text()
    names = list(json.loads(text))
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p90", "p95", "p99"):
            assert f"{statistic}_{metric}_ms" in names
    assert names[:3] == ["partial", "partial_reason", "completed"]
    assert read_summary(tmp_path / "summary.json") == summary
    write_summary(tmp_path / "again.json", summary)
    assert (tmp_path / "again.json").read_text() == text


def test_nothing_completed_gives_zeros_not_errors(tmp_path: Path) -> None:
    summary = build_summary(stats_of(tmp_path, []), GapLog().finish(), RunFacts(), SloTable())
    assert (summary.completed, summary.duration, summary.mean_ttft_ms) == (0, 0.0, 0.0)
    assert summary.request_goodput is None
    assert summary.load.verdict == "unknown"


def test_bad_summary_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_summary(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"completed": "x"}')
    with pytest.raises(InputError, match="not a summary of emu"):
        read_summary(tmp_path / "bad.json")


def wave(waits: list[int], service_ns: int = 2 * S, rejected: int = 0) -> list[Request]:
    made = [
        completed(i, i * S // 10, wait, wait + 100 * MS, (service_ns - 100 * MS) // 10)
        for i, wait in enumerate(waits)
    ]
    last = made[-1].arrival_ns
    return made + [
        request_with(
            request_id=9_000 + i,
            arrival_ns=last,
            prompt_tokens=1,
            output_tokens=1,
            max_output_tokens=1,
            status=Status.REJECTED,
        )
        for i in range(rejected)
    ]


@pytest.mark.parametrize(
    ("waits", "rejected", "verdict"),
    [
        ([0] * 100, 0, "stable"),
        ([50 * MS, 0] * 50, 0, "stable"),
        ([50 * MS, 0] * 50, 20, "stable"),
        ([i * 20 * MS for i in range(100)], 0, "overloaded"),
        ([500 * MS, 900 * MS, 100 * MS, 700 * MS] * 25, 0, "backlogged"),
        ([500 * MS, 900 * MS, 100 * MS, 700 * MS] * 25, 20, "overloaded"),
        # A burst that drained again: waits rise and fall.
        ([i * 40 * MS for i in range(50)] + [(50 - i) * 40 * MS for i in range(50)], 0, "backlogged"),
    ],
)  # fmt: skip
def test_load_verdict(tmp_path: Path, waits: list[int], rejected: int, verdict: str) -> None:
    load = judge_load(stats_of(tmp_path, wave(waits, rejected=rejected)))
    assert load.verdict == verdict


def test_growth_is_the_part_of_the_load_that_was_too_much(tmp_path: Path) -> None:
    """10 requests/s arrive, 8 are served: waits grow by 0.2 s per second, hand-made."""
    waits = [int(i * 0.02 * S) for i in range(200)]
    load = judge_load(stats_of(tmp_path, wave(waits)))
    assert load.wait_growth_s_per_s == pytest.approx(0.2, abs=1e-6)
    assert load.arrival_rate_per_s == pytest.approx(10, abs=1e-6)
    slope, error = growth(np.array([0.0, 1, 2, 3]), np.array([1.0, 3, 2, 4]))
    assert slope == pytest.approx(0.8)
    assert error == pytest.approx(0.18**0.5)  # residuals -0.3, 0.9, -0.9, 0.3
    assert growth(np.array([1.0, 1, 1]), np.array([1.0, 2, 3])) == (0.0, 0.0)


def test_gap_file_keeps_the_curve(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    gaps = GapLog()
    values = rng.lognormal(16, 0.5, 50_000).astype(np.int64)
    gaps.add_gaps(values.tolist(), at_ns=7 * S)
    write_gaps(tmp_path / "itl.json", gaps.finish())
    content = read_gaps(tmp_path / "itl.json")
    assert content.samples == sum(content.counts) == 50_000
    assert len(content.values_ns) < VALUES_MAX
    assert content.values_ns == sorted(content.values_ns)
    middle = np.searchsorted(np.cumsum(content.counts), 25_000)
    assert content.values_ns[middle] == pytest.approx(np.median(values), rel=0.006)
    assert sum(count for _, _, count in content.heat) == 50_000
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(InputError, match="not a gap file"):
        read_gaps(tmp_path / "bad.json")
    with pytest.raises(InputError):
        read_gaps(tmp_path / "none.json")


def test_tables_show_the_figures_and_never_read_markup(tmp_path: Path) -> None:
    requests = wave([0] * 10, rejected=2)
    requests[-1].reason = "no [red]room[/red]"
    summary = build_summary(
        stats_of(tmp_path, requests),
        GapLog().finish(),
        RunFacts(gpu_ns={"colocated": S}, bytes_moved={"kv": 10**10}, partial="interrupted"),
        SloTable(ttft_ms=450),
    )
    console = Console(width=120, record=True, force_terminal=False)
    with console.capture() as capture:
        print_summary(summary, console)
    text = capture.get()
    for word in ("TTFT", "p99", "10 completed, 2 rejected", "Goodput", "stable", "interrupted"):
        assert word in text
    assert "no [red]room[/red]" in text
    assert "10.00 GB" in text
    assert plain_summary(summary) == text.removesuffix("\n")
    summary.partial_reason = "x" * PIPE_COLUMNS
    assert plain_summary(summary) is None, "rich wraps it"


def test_nothing_measured_is_a_dash_and_zeros_of_energy_are_left_out(tmp_path: Path) -> None:
    facts = RunFacts(energy_j={"base": 3_000.0, "gpu": 0.0})
    summary = build_summary(stats_of(tmp_path, []), GapLog().finish(), facts, SloTable())
    assert latency_cells(summary, "ttft") == latency_cells(summary, "itl") == ["-"] * 7
    lines = {name: text for name, text, _ in figures(summary)}
    assert lines["Energy"] == "3.00 kJ (base 3.00)"
    assert lines["Load"] == "unknown"


def test_numbers_are_short() -> None:
    assert [number(v) for v in (0.0, 0.01234, 1.5, 123.456, 12345.6, 2000)] == [
        "0.00",
        "0.0123",
        "1.50",
        "123.5",
        "12,346",
        "2,000",  # a count
    ]


@pytest.mark.parametrize("window", [0, 10**6])
def test_mfu_is_the_arithmetic_of_the_requests_over_the_peak(tmp_path: Path, window: int) -> None:
    """The sums of models whose layers see all, and request by request where one does not."""
    model = ModelFlops(token=2_000_000, output=500, pairs=((window, 0, 70),))
    requests = [completed(0, 0, 0, 100 * MS, 10 * MS), completed(1, 0, 0, 100 * MS, MS, tokens=1)]
    requests[0].prefix_hit_tokens = 40
    prompts = [model.request(100, 40, 11), model.request(100, 25, 1)]  # 25: of the helper
    prompt, output = (sum(column) for column in zip(*prompts, strict=True))
    facts = RunFacts(peak_flops=(2.0 * (prompt + output), 8.0 * (prompt + output)))
    stats = stats_of(tmp_path, requests, [model])
    mfu = build_summary(stats, GapLog().finish(), facts, SloTable()).mfu
    assert mfu is not None
    assert (mfu.of_busy, mfu.of_held) == (0.5, 0.125)
    assert mfu.prompt_tflop == round(prompt / 1e12, 6) > 0
    assert mfu.output_tflop == round(output / 1e12, 6) > 0
