"""Comparing runs, and runs with measurements: figures, intervals, pairing, formats."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from emu.config.schema import SloTable
from emu.errors import InputError
from emu.report.compare import compare_runs, difference_text, print_comparison, run_names
from emu.report.compare_page import write_comparison
from emu.report.itl import GapLog
from emu.report.measured import compare_measured, print_measured
from emu.report.measured_page import write_measured
from emu.report.measurement import read_measurement
from emu.report.page.pages import asset
from emu.report.records import RequestLog
from emu.report.rundata import read_run
from emu.report.settings_diff import differing
from emu.report.summary import RunFacts, build_summary, write_summary
from emu.request import Status
from tests.made import request_with
from tests.report.fabricate import fabricate
from tests.shared_data import SHARED, needs_shared

MS = 1_000_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [
        fabricate(root / "base", 1_000),
        fabricate(root / "slow", 1_000, slowness=1.25),
        fabricate(root / "again", 1_000, seed=2),
        fabricate(root / "short", 400, gaps=False),
    ]


def render(draw, *args, width: int = 160) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        draw(*args, console)
    return capture.get()


def test_same_workload_is_paired_and_a_real_difference_is_clear(runs: list[Path]) -> None:
    comparison = compare_runs(runs[:2])
    assert comparison.is_paired
    assert comparison.names == ["base", "slow"]
    row = next(row for row in comparison.rows if row.name == "TTFT mean")
    base, slow = (read_run(run).completed("ttft_ns") / MS for run in runs[:2])
    assert row.values == [pytest.approx(base.mean()), pytest.approx(slow.mean())]
    difference = row.differences[0]
    assert difference.percent == pytest.approx(100 * (slow.mean() - base.mean()) / base.mean())
    assert difference.low < difference.percent < difference.high
    assert difference.is_clear
    # Pairs: every request is slower by the same quarter, so the interval is narrow.
    assert difference.high - difference.low < 1


def test_another_seed_is_not_paired_and_not_clearly_different(runs: list[Path]) -> None:
    again = compare_runs([runs[0], runs[2]])
    assert not again.is_paired, "the ids are the same, the prompts are not"
    short = compare_runs([runs[0], runs[3]])
    assert not short.is_paired
    mean = next(row for row in short.rows if row.name == "TTFT mean").differences[0]
    assert not mean.is_clear
    assert mean.high - mean.low > 5


def test_rows_cover_the_statistics_and_the_cost(runs: list[Path]) -> None:
    comparison = compare_runs(runs[:3], seed=5)
    names = [row.name for row in comparison.rows]
    assert names[:20] == [
        f"{metric} {statistic}"
        for metric in ("TTFT", "TPOT", "ITL", "E2E")
        for statistic in ("mean", "p50", "p90", "p95", "p99")
    ]
    assert "GPU time" in names
    itl = next(row for row in comparison.rows if row.name == "ITL p99")
    assert itl.differences[0].low is None
    assert [len(row.differences) for row in comparison.rows] == [2] * len(names)
    assert compare_runs(runs[:3], seed=5) == comparison
    text = render(print_comparison, comparison)
    for words in ("TTFT mean", "again", "difference", "requests drawn from each run", "GPU time"):
        assert words in text
    assert "paired by request" in render(print_comparison, compare_runs(runs[:2]))


def test_what_does_not_fit_is_left_out_whole(runs: list[Path]) -> None:
    comparison = compare_runs(runs[:3])
    wide, narrow = (render(print_comparison, comparison, width=width) for width in (160, 80))
    interval = difference_text(comparison.rows[0].differences[0])
    assert interval in wide
    assert interval not in narrow
    assert difference_text(comparison.rows[0].differences[0], has_interval=False) in narrow
    assert "wider terminals" in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    many = render(print_comparison, compare_runs(runs), width=40)
    assert all(f"{row.name}" in many for row in comparison.rows), "names are never cut"


def test_settings_that_differ() -> None:
    one = {
        "seed": 1,
        "output": {"dir": "a"},
        "replicas": [{"count": 2, "gpus": [0, 1]}],
        "autoscale": None,
    }
    other = {
        "seed": 1,
        "output": {"dir": "b"},
        "replicas": [{"count": 4, "gpus": [0, 1]}, {"count": 1}],
        "autoscale": {"preset": "hpa", "tick_ms": 5},
    }
    assert differing([one, one, other]) == [
        ("replicas.0.count", ["2", "2", "4"]),
        ("replicas.1", ["-", "-", "given"]),
        ("autoscale", ["-", "-", "given"]),
    ]
    assert differing([{"a": [1, 2]}, {"a": [1]}, {"a": True}]) == [("a", ["[1,2]", "[1]", "true"])]
    assert differing([{}, one]) == [], "a run without run.json"


def test_settings_stand_in_table_and_page(runs: list[Path], tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place, tokens in zip(places, (512, 2048), strict=True):
        shutil.copytree(runs[0], place)
        config = {"scheduler": {"max_num_batched_tokens": tokens}}
        (place / "run.json").write_text(json.dumps({"config": config}))
    comparison = write_comparison(tmp_path / "c.html", places)
    assert comparison.settings == [("scheduler.max_num_batched_tokens", ["512", "2048"])]
    for text in (render(print_comparison, comparison), (tmp_path / "c.html").read_text()):
        assert "scheduler.max_num_batched_tokens" in text
        assert "Settings that differ" in text


def test_two_to_ten_runs(runs: list[Path]) -> None:
    for count in (1, 11):
        with pytest.raises(InputError, match=f"expected 2 to 10 runs, got {count}"):
            compare_runs([runs[0]] * count)


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    assert run_names([tmp_path / "a" / "x", tmp_path / "b" / "x"]) == ["a/x", "b/x"]
    assert run_names([tmp_path / "x", tmp_path / "x"]) == ["1: x", "2: x"]


def test_comparison_page_overlays_the_distributions(runs: list[Path], tmp_path: Path) -> None:
    comparison = write_comparison(tmp_path / "c.html", [runs[0], runs[1], runs[3]])
    text = (tmp_path / "c.html").read_text().replace(asset("echarts/echarts.min.js"), "")
    figures = json.loads(text.split('id="figures">')[1].split("</script>")[0])
    assert [figure["id"] for figure in figures][:4] == [
        "chart-cdf-ttft", "chart-cdf-tpot", "chart-cdf-itl", "chart-cdf-e2e",
    ]  # fmt: skip
    assert [one["name"] for one in figures[0]["series"]] == ["base", "slow", "short"]
    assert [one["name"] for one in figures[2]["series"]] == ["base", "slow"], "no itl.json in short"
    assert difference_text(comparison.rows[0].differences[0], has_interval=False) in text
    clear = [d for row in comparison.rows for d in row.differences if d.is_clear]
    marks = sum(text.count(f'<td class="{mark}">') for mark in ("better", "worse", "other"))
    assert marks == len(clear) > 0


# --- measurements --------------------------------------------------------------------------------
def run_of(directory: Path, rows: list[tuple[int, int, int, int, int]]) -> Path:
    """A run from (request id, arrival, ttft, latency, tokens), ns."""
    directory.mkdir(exist_ok=True)
    log = RequestLog(directory / "requests.csv")
    for request_id, arrival, ttft, latency, tokens in rows:
        request = request_with(
            request_id=request_id,
            arrival_ns=arrival,
            prompt_tokens=1,
            output_tokens=tokens,
            max_output_tokens=tokens,
            status=Status.COMPLETED,
            first_scheduled_ns=arrival,
            first_token_ns=arrival + ttft,
            last_token_ns=arrival + latency,
            generated_tokens=tokens,
        )
        log.released(request)
        log.terminal(request)
    summary = build_summary(log.finish(), GapLog().finish(), RunFacts(), SloTable())
    write_summary(directory / "summary.json", summary)
    return directory


def line(n: int, arrival: float, queued: float, first: float, last: float, tokens: int) -> str:
    return json.dumps(
        {
            "request_id": f"bench-{n}",
            "input_toks": 5,
            "output_toks": tokens,
            "arrival_time": arrival,
            "queued_ts": queued,
            "first_token_ts": first,
            "last_token_ts": last,
        }
    )


def test_anchor_is_the_arrival_only_on_the_same_clock(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(
        line(0, 1.7e9, 10.0, 11.0, 13.0, 3) + "\n\n" + line(1, 1.7e9, 12.0, 12.5, 12.5, 1)
    )
    other = read_measurement(file)
    assert other.anchor == "queued_ts"
    assert other.ttft_ms.tolist() == [1000, 500]
    assert other.tpot_ms[0] == 1000
    assert math.isnan(other.tpot_ms[1])
    assert other.e2e_ms.tolist() == [3000, 500]
    assert other.makespan_s == 3.0
    file.write_text(line(4, 9.0, 10.0, 11.0, 13.0, 3))
    same = read_measurement(file)
    assert (same.anchor, same.ttft_ms.tolist(), same.request_ids.tolist()) == (
        "arrival_time",
        [2000],
        [4],
    )


def test_one_clock_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    record = json.loads(line(4, 9.0, 10.0, 11.0, 13.0, 3))
    del record["queued_ts"]
    file.write_text(json.dumps(record))
    assert read_measurement(file).ttft_ms.tolist() == [2000]
    file.write_text(json.dumps(record | {"arrival_time": 1.7e9}))
    with pytest.raises(InputError, match="queued_ts: missing"):
        read_measurement(file)


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (["bench-7", "bench-2"], [7, 2]),
        (["bench-7", "bench-7"], [0, 1]),
        (["cmpl-8f0e", "cmpl-12"], [0, 1]),
        ([f"bench-{10**30}", "bench-2"], [0, 1]),
        ([None, 3], [0, 1]),
    ],
)
def test_ids_are_numbers_of_their_own_or_positions(tmp_path: Path, names, ids) -> None:
    file = tmp_path / "requests.jsonl"
    record = json.loads(line(0, 9.0, 10.0, 11.0, 13.0, 3))
    file.write_text("\n".join(json.dumps(record | {"request_id": name}) for name in names))
    assert read_measurement(file).request_ids.tolist() == ids


def test_pairs_are_requests_with_the_same_id(tmp_path: Path) -> None:
    second = 1_000 * MS
    run = run_of(
        tmp_path / "run",
        [(1, 0, second, 5 * second, 5), (0, 0, 2 * second, 4 * second, 1), (7, 0, 1, 2, 2)],
    )
    file = tmp_path / "requests.jsonl"
    file.write_text(line(0, 0, 0, 1, 2, 1) + "\n" + line(1, 0, 0, 2, 6, 5))
    comparison = compare_measured(run, file)
    ttft = next(row for row in comparison.paired if row.metric == "TTFT")
    assert (ttft.pairs, ttft.mean, ttft.median) == (2, 75.0, 75.0)  # 100 % and 50 %
    tpot = next(row for row in comparison.paired if row.metric == "TPOT")
    assert (tpot.pairs, tpot.mean) == (1, 0.0), "one token has no TPOT"
    assert comparison.makespan is not None
    assert comparison.makespan.measured == 6.0
    text = render(print_measured, comparison)
    assert "Request by request" in text
    assert "2 requests measured (0 left out), 3 completed here; measured from arrival_time" in text


def test_what_a_run_has_not_is_no_zero(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(line(0, 0, 0, 1, 2, 3))
    one = compare_measured(run_of(tmp_path / "one", [(0, 0, 9 * MS, 9 * MS, 1)]), file)
    assert {row.metric for row in one.rows} == {"TTFT", "E2E"}
    with pytest.raises(InputError, match="none: no completed request to compare"):
        compare_measured(run_of(tmp_path / "none", []), file)


def test_latencies_begin_where_the_measured_ones_do(tmp_path: Path) -> None:
    """`queued_ts` is the end of the iteration that was in flight when the request came."""
    run = run_of(tmp_path / "run", [(0, 0, 1_500 * MS, 3_500 * MS, 3)])
    rows = (run / "requests.csv").read_text().splitlines()
    assert rows[0].endswith(",intake_ns")
    (run / "requests.csv").write_text(f"{rows[0]}\n{rows[1].rpartition(',')[0]},{500 * MS}\n")
    file = tmp_path / "requests.jsonl"
    file.write_text(line(0, 5e9, 10.0, 11.0, 13.0, 3))
    comparison = compare_measured(run, file)
    assert comparison.anchor == "queued_ts"
    assert [row.percent for row in comparison.rows if row.statistic == "mean"] == [0.0, 0.0, 0.0]
    assert "from when the engine took them" in render(print_measured, comparison)


def test_run_and_measurement_on_one_page(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [(i, 0, (i + 1) * MS, (i + 9) * MS, 5) for i in range(5)])
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(line(i, 0.0, 0.0, 0.01 + i, 0.05 + i, 5) for i in range(5)))
    comparison = write_measured(tmp_path / "page.html", run, file)
    page = (tmp_path / "page.html").read_text()
    assert len(comparison.paired) == 3
    for text in ("cdf-ttft", "cdf-tpot", "cdf-e2e", "Request by request", ">TTFT mean<"):
        assert text in page
    assert f"<p>measurement: {file}</p><p>makespan: 4.050 s measured, " in page
    assert "measured from arrival_time" in page


def test_vllm_bench_results_detailed_and_plain(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [(0, 0, 100 * MS, 300 * MS, 3)])
    file = tmp_path / "bench.json"
    detailed = {
        "duration": 2.0,
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.1, 0.1], [], []],
        "output_lens": [3, 1, 0],
        "errors": ["", "", "timeout"],
    }
    file.write_text(json.dumps(detailed))
    bench = read_measurement(file)
    assert bench.ttft_ms.tolist() == [100, 200]
    assert bench.e2e_ms.tolist() == pytest.approx([300, 200])
    assert bench.itl_ms.tolist() == pytest.approx([100, 100])
    assert (bench.skipped, bench.makespan_s) == (1, 2.0)
    comparison = compare_measured(run, file)
    assert {row.metric for row in comparison.rows} == {"TTFT", "TPOT", "ITL", "E2E"}
    file.write_text(json.dumps({"mean_ttft_ms": 80.0, "p99_e2el_ms": 600.0, "completed": 3}))
    plain = compare_measured(run, file)
    assert [(row.metric, row.statistic, row.percent) for row in plain.rows] == [
        ("TTFT", "mean", pytest.approx(25.0)),
        ("E2E", "p99", pytest.approx(-50.0)),
    ]
    assert plain.paired == []
    assert "no single requests measured" in render(print_measured, plain)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "m.json: no measured request"),
        ("{}", "m.json: neither measured requests nor a result of vllm bench serve"),
        ('{"ttfts": [1], "itls": []}', "m.json: itls: expected an array with one entry per request"),
        ('{"ttfts": [1], "itls": [["x"]], "output_lens": [2]}', "m.json: itls.0: expected numbers"),
        ('{"ttfts": [1], "itls": [[]], "output_lens": [0]}', "m.json: no measured request"),
        ("[1]", "m.json:1: expected a JSON object"),
        ("a,b\n1,2\n", "m.json: expected requests of a real server as lines of JSON, or the result"),
        ("\n{", "m.json:2: not valid JSON: "),
        ('{"a":' * 100_000, "m.json:1: not valid JSON: "),
        (line(0, 0, 0, 1, 2, 3).replace("1,", '"x",', 1).replace('"first_token_ts": 1', '"first_token_ts": "x"'), "m.json:1: first_token_ts: expected a number, got 'x'"),
        ('{"first_token_ts": 1}', "m.json:1: last_token_ts: missing"),
        (line(0, 0, 0, 3, 2, 3), "m.json:1: first_token_ts: tokens before the request, or out of order"),
    ],
)  # fmt: skip
def test_bad_measurements_are_input_errors(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_measurement(file)
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(message)
    with pytest.raises(InputError, match="No such file"):
        read_measurement(tmp_path / "none")


TABLES = {
    # LLMServingSim's own run against real vLLM: its published errors (per cent) by statistic.
    "RTX4090-Llama-3.1-8B": {
        "TTFT": (0.56, 0.78, 0.63, 0.56, 0.25),
        "TPOT": (0.16, 0.25, 0.18, 0.24, 0.93),
        "E2E": (0.46, 0.90, 0.25, 0.27, 0.38),
        "paired": {"TTFT": (3.76, 0.74), "TPOT": (1.56, 1.31), "E2E": (0.65, 0.57)},
        "makespan": 0.05,
    },
    "RTXPRO6000-Llama-3.1-8B": {
        "TTFT": (-3.97, -8.57, -4.35, -2.37, -2.02),
        "TPOT": (-1.01, -0.03, 0.45, 0.34, 0.64),
        "E2E": (-1.79, -1.24, -1.77, -1.31, -1.62),
        "paired": {"TTFT": (10.79, 6.79), "TPOT": (1.54, 0.71), "E2E": (1.94, 1.54)},
        "makespan": -1.96,
    },
}


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize("name", TABLES)
def test_published_errors_of_another_simulator_come_out(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    folder = SHARED / "vllm-measured" / name
    limit = csv.field_size_limit(1 << 24)  # one for the whole process
    request.addfinalizer(lambda: csv.field_size_limit(limit))
    with (folder / "llmservingsim-sim.csv").open(newline="") as file:
        rows = [
            (int(r["request id"]), int(r["arrival"]), int(r["TTFT"]), int(r["latency"]), int(r["output"]))
            for r in csv.DictReader(file)
        ]  # fmt: skip
    run = run_of(tmp_path / "run", sorted(rows, key=lambda row: row[1]))
    comparison = compare_measured(run, folder / "requests.jsonl")
    assert comparison.anchor == "queued_ts"
    expected = TABLES[name]
    for metric in ("TTFT", "TPOT", "E2E"):
        found = [row.percent for row in comparison.rows if row.metric == metric]
        assert np.allclose(found, expected[metric], atol=0.0051)
    for row in comparison.paired:
        assert np.allclose((row.mean, row.median), expected["paired"][row.metric], atol=0.0051)
        assert row.pairs == 300
    assert comparison.makespan is not None
    assert comparison.makespan.percent == pytest.approx(expected["makespan"], abs=0.0051)
