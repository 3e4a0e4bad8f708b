"""report.html: self-contained, small, quick, safe, degrades; drawn without error by a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
from pathlib import Path

import pytest

from emu.errors import InputError
from emu.report.atomic import partial_name
from emu.report.page.pages import asset, live_page
from emu.report.run_charts import run_charts, slowest_rows
from emu.report.run_page import report_html, write_report
from emu.report.rundata import read_run
from emu.report.state_charts import gpu_steps, run_segments, segments
from tests.browser import Browser, look_at
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
    "gpus",
    "states",
    "kv-replicas",
    "queue",
    "queue-tokens",
    "running",
    "tokens",
    "blocks",
    "preemptions",
    "flows",
    "flow-bytes",
    "gpu-time",
    "prefix-hits",
    "slowest-ttft",
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
    own = without_library(text)
    assert not re.search(r"""(src|href)=["'](https?:)?//""", own)
    for words in ("TTFT", "Objectives met", "Load", "GPU time", "weights are here", "Skip to"):
        assert words in own
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', own, re.S).group(1))
    assert [figure["id"] for figure in figures] == [f"chart-{name}" for name in ALL_CHARTS]
    ids = re.findall(r'\bid="([^"]+)"', own)
    assert len(ids) == len(set(ids))
    # Data never becomes markup: neither in a table nor inside the script element.
    assert "prefill &lt;above&gt; bound" in own
    assert len(text.encode()) < 1_500_000
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
    assert chart.spans is not None
    kinds = [kind.name for kind in chart.spans.kinds]
    assert kinds == [
        "inactive", "loading_prefill", "prefill", "decode", "shutting_prefill", "failed",
    ]  # fmt: skip
    names = chart.y.names
    assert names is not None
    failed = [row for row in chart.spans.rows if row[3] == kinds.index("failed")]
    assert [row[:3] for row in failed] == [(90.0, 130.0, names.index("3"))]
    assert chart.spans.texts[failed[0][4]] == "by fault: replica_crash"


def test_each_kind_of_event_has_a_row_and_a_mark_of_its_own(run: Path) -> None:
    chart = next(chart for chart in run_charts(read_run(run)) if chart.chart_id == "states")
    assert chart.y.names is not None
    kinds = [one.name for one in chart.series]
    assert {"fault", "recovery"} <= set(kinds)
    assert chart.y.names[: len(kinds)] == kinds
    assert len({(one.symbol, one.color) for one in chart.series}) == len(kinds)
    for row, one in enumerate(chart.series):
        assert set(one.y) == {row}


def test_gpus_by_role_add_up_to_those_in_use(run: Path) -> None:
    data = read_run(run)
    times, steps = gpu_steps(data)
    parts = run_segments(data)
    for index, time_s in enumerate(times):
        at_ns = round(time_s * 10**9)
        in_use = [
            part for part in parts
            if part.start_ns <= at_ns < part.end_ns and part.state != "inactive"
        ]  # fmt: skip
        assert sum(counts[index] for counts in steps.values()) == len(in_use), time_s


def test_an_inactive_replica_has_no_cells_in_the_map_of_its_cache(run: Path) -> None:
    chart = next(chart for chart in run_charts(read_run(run)) if chart.chart_id == "kv-replicas")
    assert chart.heat is not None
    assert chart.y.names is not None
    row = chart.y.names.index("5")
    for cell, _, _ in (one for one in chart.heat.cells if one[1] == row):
        middle = (chart.heat.x[cell] + chart.heat.x[cell + 1]) / 2
        assert 40 <= middle <= 210, "before and after, replica 5 is inactive"


def test_the_page_says_what_was_run(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    content = json.loads((copy / "run.json").read_text())
    content |= {
        "config_file": "a/<cluster>.toml",
        "command": "emu run a/<cluster>.toml --seed 7",
        "overrides": ["router.policy=random"],
    }
    content["versions"] = {"emu": "9.9", "revision": "0123456789ab"}
    (copy / "run.json").write_text(json.dumps(content))
    text = without_library(report_html(read_run(copy)))
    assert "<title>emu: &lt;cluster&gt;.toml: " in text
    for words in (
        "emu run a/&lt;cluster&gt;.toml --seed 7",
        "router.policy=random",
        "9.9 (revision",
    ):
        assert words in text
    assert 'id="statistic"' in text


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
    assert path.stat().st_size < 1_500_000


def without_library(text: str) -> str:
    """A page without the chart library, which is not ours."""
    library = asset("echarts/echarts.min.js")
    assert library in text
    return text.replace(library, "")


@pytest.mark.slow
@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_chart_without_error(run: Path, tmp_path: Path, scheme: str) -> None:
    result = look_at(write_report(run).read_text(), tmp_path, scheme)
    assert result["problems"] == []
    assert result["drawn at first"] < len(ALL_CHARTS)  # only those near the screen
    assert result["drawn"] == str(len(ALL_CHARTS))
    assert result["painted"] == [f"chart-{name}" for name in ALL_CHARTS]
    assert result["wide"] <= 1280
    assert result["tabs"] == len(ALL_CHARTS)
    assert result["back"] == {"dark": "rgb(20, 23, 27)", "light": "rgb(255, 255, 255)"}[scheme]


def test_pages_let_a_browser_run_their_own_scripts_alone(run: Path) -> None:
    for text in (write_report(run).read_text(), live_page({"token": ""})):
        head, _, rest = text.partition("</head>")
        policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', head)[0])
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'"
        scripts = re.findall(r"<script>(.*?)</script>", rest, re.DOTALL)
        digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
        allowed = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        assert rules["script-src"].split() == allowed
        assert len(scripts) == 2
        assert not re.search(r"<[^>]* on\w+=", rest.replace(scripts[0], "").replace(scripts[1], ""))


@pytest.mark.slow
def test_a_script_that_got_into_a_page_does_not_run(
    run: Path, tmp_path: Path, profile: Path
) -> None:
    foreign = (
        "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    )
    page = write_report(run).read_text().replace("<main>", f"<main>{foreign}")
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    with Browser(profile, file.as_uri()) as browser:
        browser.wait_for("document.documentElement.dataset.drawn")
        assert browser.evaluate("document.title") != "taken"
