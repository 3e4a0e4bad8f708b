"""The scaling experiments: tables, pictures, the page that they are put into."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from emu.apps.experiments.command import run_experiment
from emu.apps.experiments.options import ExperimentOptions
from emu.apps.experiments.pairings import _interval, _verdict
from emu.errors import InputError
from emu.report.page.panels import Bars, Line, Panel, svg

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "experiments"
SVG = "{http://www.w3.org/2000/svg}"


def picture(text: str) -> ET.Element:
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    return root


def test_a_picture_is_well_formed_whatever_the_values() -> None:
    panels = [
        Panel("a & b", "ms", "part", lines=[Line("x", [1, 10, 100], [0, 0.5, 1])], is_log_x=True),
        Panel("steps", lines=[Line("y", [0, 1], [3, 3], is_step=True)]),
        Panel("one point", lines=[Line("y", [5], [0], is_points=True)], x_max=2),
        Panel("bars", bars=[Bars("x", [0, 2]), Bars("y", [1, 0])], names=["u", "v"]),
        Panel("nothing"),
        Panel("zeros", bars=[Bars("x", [0.0])], names=[""]),
    ]
    root = picture(svg("<title>", [panels[:3], panels[3:]], ["x", "y"]))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a & b", "steps", "bars", "<title>", "x", "y"} <= set(texts)


def test_bars_are_as_high_as_their_values() -> None:
    root = picture(svg("t", [[Panel("p", bars=[Bars("x", [1, 2, 4])], names="abc")]], ["x"]))
    heights = []
    for bar in (group for group in root.iter() if group.get("id", "").startswith("bar-")):
        numbers = re.findall(r"[-\d.]+", next(bar.iter(f"{SVG}path")).get("d", ""))
        ys = [float(number) for number in numbers[1::2]]
        heights.append(max(ys) - min(ys))
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.4)
    assert heights[2] == pytest.approx(4 * heights[0], abs=0.4)


def test_steps_hold_their_value() -> None:
    root = picture(
        svg("t", [[Panel("p", lines=[Line("x", [0, 1, 2], [0, 5, 0], is_step=True)])]], ["x"])
    )
    curve = next(group for group in root.iter() if group.get("id") == "curve-0")
    numbers = re.findall(r"[-\d.]+", next(curve.iter(f"{SVG}path")).get("d", ""))
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        assert x == next_x or y == next_y, "it goes across or up, never both"


def test_the_order_is_judged_by_intervals() -> None:
    mean, half = _interval([10.0, 12.0, 14.0])
    assert mean == 12
    assert half == pytest.approx(4.30 * 2 / 3**0.5, abs=0.01)
    assert _verdict([10.0, 12.0, 14.0], [3.0, 3.1, 2.9]) == "holds"
    assert _verdict([-10.0, -12.0, -14.0], [3.0, 3.1, 2.9]) == "turned"
    assert _verdict([-1.0, 12.0, 14.0], [3.0, 3.1, 2.9]) == "holds in the mean"
    assert _verdict([-9.0, 4.0, 4.0], [3.0, 3.1, 2.9]) == "not told apart"


@pytest.mark.slow
def test_six_prints_its_tables_and_draws_layers_into_a_page(tmp_path: Path) -> None:
    """Acceptance of experiment (c): first tokens before the load is complete, 1.2 against 1.9 s."""
    page = tmp_path / "docs" / "six.md"
    page.parent.mkdir()
    page.write_text("# Six\n\n<!-- printed -->\nold\n<!-- end of printed -->\n\nAfter.\n")
    out = tmp_path / "out"
    run_experiment(
        ExperimentOptions(name="six", configs=CONFIGS, output=out, page=page, quiet=True)
    )
    text = page.read_text()
    assert text.startswith("# Six\n")
    assert text.endswith("\nAfter.\n")
    assert "old" not in text
    assert (out / "six.md").read_text() in text
    assert "![Six prefill replicas at once: layers of each](six.svg)" in text
    root = picture((page.parent / "six.svg").read_text())
    curves = [group for group in root.iter() if group.get("id", "").startswith("curve-")]
    assert len(curves) == 4 * 6
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(("| two lanes of three, live", "| host memory"))
    ]
    (nominal, host, derated, host_derated) = rows
    assert float(nominal[2]) < float(nominal[1]), "first tokens before the load is complete"
    assert float(derated[1]) == pytest.approx(1.2, abs=0.03)
    assert float(host_derated[1]) == pytest.approx(1.9, abs=0.1)
    assert float(host[1]) == pytest.approx(1.47, abs=0.02)


@pytest.mark.parametrize(
    ("name", "clusters", "seeds", "page", "problem"),
    [
        ("seven", "A", 1, None, "unknown 'seven'"),
        ("six", "C", 1, None, "expected A, B or AB"),
        ("six", "A", 101, None, "expected 1 to 100"),
        ("six", "A", 1, "missing.md", "No such file"),
        ("six", "A", 1, "plain.md", "no <!-- printed -->"),
    ],
)
def test_wrong_wishes_are_refused_before_anything_runs(
    tmp_path: Path, name: str, clusters: str, seeds: int, page: str | None, problem: str
) -> None:
    (tmp_path / "plain.md").write_text("# no marks\n")
    with pytest.raises(InputError, match=problem):
        run_experiment(
            ExperimentOptions(
                name=name,
                configs=CONFIGS,
                output=tmp_path / "out",
                clusters=clusters,
                seeds=seeds,
                page=None if page is None else tmp_path / page,
                quiet=True,
            )
        )
    assert not (tmp_path / "out").exists()
