"""report.html: self-contained, small, quick, safe, degrades; drawn without error by a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from emu.errors import InputError
from emu.report.atomic import partial_name
from emu.report.charts import run_charts, slowest_rows
from emu.report.html import plotly_js, report_html, write_report
from emu.report.rundata import read_run
from emu.report.timeline import segments
from tests.browser import look_at
from tests.report.fabricate import fabricate

ALL_CHARTS = [
    "cdf-ttft",
    "cdf-tpot",
    "cdf-itl",
    "cdf-e2e",
    "heat-ttft",
    "heat-tpot",
    "heat-itl",
    "heat-e2e",
    "states",
    "queue",
    "queue-tokens",
    "running",
    "tokens",
    "blocks",
    "preemptions",
    "flows",
    "flow-bytes",
    "kv-replicas",
    "gpu-time",
    "prefix-hits",
    "slowest",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fabricate(tmp_path_factory.mktemp("run"))


def test_page_holds_every_chart_and_is_self_contained(run: Path) -> None:
    assert [chart.chart_id for chart in run_charts(read_run(run))] == ALL_CHARTS
    path = write_report(run)
    assert path == run / "report.html"
    text = path.read_text()
    own = text.replace(plotly_js(), "")
    assert not re.search(r"""(src|href)=["'](https?:)?//""", own)
    for words in ("TTFT p99", "Objectives met", "Load", "GPU time", "weights are here", "Skip to"):
        assert words in own
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', own, re.S).group(1))
    assert [figure["id"] for figure in figures] == [f"chart-{name}" for name in ALL_CHARTS]
    ids = re.findall(r'\bid="([^"]+)"', own)
    assert len(ids) == len(set(ids))
    # Data never becomes markup: neither in a table nor inside the script element.
    assert "prefill &lt;above&gt; bound" in own
    assert "replica_crash </script>" not in own


def test_same_files_same_bytes_whatever_the_clock_of_the_run(run: Path) -> None:
    first = report_html(read_run(run))
    content = json.loads((run / "run.json").read_text())
    content["wall_s"] = 99.0
    (run / "run.json").write_text(json.dumps(content))
    assert report_html(read_run(run)) == first


def test_states_are_stretches_with_writer_and_cause(run: Path) -> None:
    data = read_run(run)
    parts = segments(data.transitions, 320 * 10**9)
    assert [(p.state, p.start_ns // 10**9, p.end_ns // 10**9) for p in parts if p.replica == 5] == [
        ("inactive", 0, 40),
        ("loading_prefill", 40, 48),
        ("prefill", 48, 200),
        ("shutting_prefill", 200, 210),
        ("inactive", 210, 320),
    ]
    chart = next(chart for chart in run_charts(data) if chart.chart_id == "states")
    names = [trace["name"] for trace in chart.data]
    assert names == [
        "inactive", "loading_prefill", "prefill", "decode", "shutting_prefill", "failed",
        "fault", "recovery",
    ]  # fmt: skip
    failed = next(trace for trace in chart.data if trace["name"] == "failed")
    assert (failed["base"], failed["x"], failed["y"]) == ([90.0], [40.0], [3])
    assert failed["customdata"] == [[130.0, "fault", "replica_crash"]]


def test_slowest_rows_add_up_to_their_latency(run: Path) -> None:
    rows = slowest_rows(read_run(run))
    assert len(rows) == 25
    for row in rows:
        stages = sum(row[stage] for stage in ("queue", "prefill", "migration", "decode"))
        assert stages == pytest.approx(row["e2e"])
    assert [row["e2e"] for row in rows] == sorted((row["e2e"] for row in rows), reverse=True)


def test_missing_files_only_cost_their_charts(run: Path, tmp_path: Path) -> None:
    for name in ("timeseries", "replicas", "transitions", "marks", "itl", "run", "requests"):
        copy = tmp_path / name
        shutil.copytree(run, copy)
        for file in copy.glob(f"{name}.*"):
            file.unlink()
        charts = [chart.chart_id for chart in run_charts(read_run(copy))]
        assert set(charts) <= set(ALL_CHARTS)
        assert len(charts) >= 12
        assert "emu" in report_html(read_run(copy))
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(run / "summary.json", alone)
    assert [c.chart_id for c in run_charts(read_run(alone))] == ["gpu-time", "prefix-hits"]
    with pytest.raises(InputError, match=r"no summary\.json"):
        write_report(tmp_path)


def test_damaged_files_name_file_line_and_column(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    lines = (copy / "requests.csv").read_text().splitlines()
    bad = lines[2].split(",")
    bad[1] = "soon"
    (copy / "requests.csv").write_text("\n".join([*lines[:2], ",".join(bad)]))
    with pytest.raises(InputError, match=r"requests\.csv:3: arrival_ns: expected an integer"):
        read_run(copy)
    (copy / "requests.csv").write_text("\n".join([lines[0], lines[1][:40]]))
    with pytest.raises(InputError, match=r"requests\.csv:2: \d+ fields, the header has"):
        read_run(copy)
    (copy / "requests.csv").write_text("a,b\n")
    with pytest.raises(InputError, match=r"requests\.csv:1: request_id: no such column"):
        read_run(copy)


def test_partial_results_say_so(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    summary = json.loads((copy / "summary.json").read_text())
    summary.update(partial=True, partial_reason="interrupted <b>")
    (copy / "summary.json").write_text(json.dumps(summary))
    for name in ("summary.json", "requests.csv"):
        (copy / name).rename(copy / partial_name(name))
    path = write_report(copy)
    assert path.name == "report.partial.html"
    assert "Partial results: interrupted &lt;b&gt;" in path.read_text()


def test_what_has_no_tile_stands_in_a_table(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    summary = json.loads((copy / "summary.json").read_text())
    summary.update(cancelled=3, rejected=2, reasons={"cancelled: <left>": 3, "rejected: full": 2})
    (copy / "summary.json").write_text(json.dumps(summary))
    text = write_report(copy).read_text()
    assert "2 rejected, 3 cancelled</span>" in text
    for words in ("3 cancelled: &lt;left&gt;", "2 rejected: full", "replica_crash x1"):
        assert f"<td>{words}</td>" in text


@pytest.mark.slow
def test_hundred_thousand_requests_stay_small(tmp_path: Path) -> None:
    fabricate(tmp_path, requests=100_000)
    path = write_report(tmp_path)
    assert path.stat().st_size < 15 * 2**20


def test_charts_are_imported_without_plotly() -> None:
    code = "import sys, emu.report.html as h; h.plotly_js(); print('plotly' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_chart_without_error(run: Path, tmp_path: Path, scheme: str) -> None:
    result = look_at(write_report(run).read_text(), tmp_path, scheme)
    assert result["problems"] == []
    assert result["drawn"] == str(len(ALL_CHARTS))
    assert result["svgs"] == [f"chart-{name}" for name in sorted_by_page(ALL_CHARTS)]
    assert result["wide"] <= 1280
    assert result["tabs"] == len(ALL_CHARTS)
    assert result["back"] == {"dark": "rgb(20, 23, 27)", "light": "rgb(255, 255, 255)"}[scheme]


def sorted_by_page(names: list[str]) -> list[str]:
    """Charts stand in their sections: the KV map belongs to the replicas, before the load."""
    moved = [name for name in names if name != "kv-replicas"]
    moved.insert(moved.index("states") + 1, "kv-replicas")
    return moved
