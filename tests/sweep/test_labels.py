"""Tables and charts of a sweep name what was asked, in its order."""

from __future__ import annotations

from pathlib import Path

import pytest

from emu.apps.sweeps.labels import in_order, key_label, plot_names, shown_figures
from emu.apps.sweeps.page import write_page
from emu.apps.sweeps.results import columns_of
from emu.cli import main
from emu.report.page.pages import breakable
from tests.sweep.helpers import BASE, SEARCH, swept, write

SPLIT = BASE.replace(
    "[latency]", '[[replicas]]\nrole = "prefill"\n[[replicas]]\nrole = "decode"\n[latency]'
)


def test_the_percentile_of_a_condition_is_shown(tmp_path: Path) -> None:
    text = SEARCH.replace("p99_ttft_ms < 900", "p95_ttft_ms < 900")
    result = swept(tmp_path, text.replace("tolerance = 0.05", "tolerance = 0.3"))
    columns = columns_of(result)
    shown = shown_figures(result, columns)
    assert shown[:2] == ["p95_ttft_ms", "p99_tpot_ms"]
    assert "p99_ttft_ms" not in shown
    assert plot_names(result) == ("output_throughput", "p95_ttft_ms")
    page = write_page(result).read_text()
    assert "p95_ttft_ms over workload" in page
    assert "p99_ttft_ms" not in page
    rates = [result.rows[index].point.values[result.keys[0]] for index in in_order(result)]
    assert rates == sorted(rates)
    assert rates != [row.point.values[result.keys[0]] for row in result.rows]


def test_groups_are_called_by_their_role_and_gpus_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path,
        'base = "base.toml"\n[grid]\n"replicas.0.count" = [1, 2]\n"replicas.1.count" = [1, 3]\n',
        SPLIT,
    )
    assert main(["sweep", str(path), "-j", "1", "-o", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "decode count" in shown and "GPUs" in shown
    page = (tmp_path / "out" / "report.html").read_text()
    assert "labels: prefill count, decode count" in page
    rows = (tmp_path / "out" / "results.csv").read_text().splitlines()
    at = rows[0].split(",").index("gpus")
    assert [row.split(",")[at] for row in rows[1:]] == ["2", "4", "3", "5"]


def test_groups_have_no_role_where_points_differ_in_them(tmp_path: Path) -> None:
    points = '[[list]]\n"replicas" = [{count = 2}]\n[[list]]\n"replicas.0.count" = 1\n'
    text = f'base = "base.toml"\n{points}'
    result = swept(tmp_path, text)
    assert result.roles == []
    assert [row.result.gpus for row in result.rows] == [2, 1]


def test_keys_are_told_apart() -> None:
    keys = ["replicas.0.count", "replicas.1.count", "scheduler.a", "router.a"]
    assert key_label(keys[0], keys, ["colocated", "colocated"]) == "colocated 0 count"
    assert key_label(keys[1], keys, ["prefill", "decode"]) == "decode count"
    assert key_label("scheduler.a", keys, []) == "scheduler.a"
    assert key_label("scheduler.b", keys, []) == "b"


def test_names_break_between_their_parts() -> None:
    assert breakable("p95_ttft_ms") == "p95_<wbr>ttft_<wbr>ms"
    assert breakable("a.<b>") == "a.<wbr>&lt;b&gt;"
