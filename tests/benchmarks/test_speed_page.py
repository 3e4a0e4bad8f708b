"""docs/lab/speed-details.md says what docs/figures/speed.json holds, and a mistake in a file of peers is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers import case_of, line_of, read_peers
from benchmarks.speed_figure import by_cluster, speed_svg
from benchmarks.write_speed import BLOCKS, FIGURE, KEPT, PAGE, SHORT, SHORT_BLOCKS, rendered


def test_the_page_and_its_figure_are_current() -> None:
    kept = json.loads(KEPT.read_text())
    for page in (PAGE, SHORT):
        assert rendered(page.read_text(), kept) == page.read_text(), "run: make bench-docs"
    assert FIGURE.read_text() == speed_svg(kept["bench"]["cases"]), "run: make bench-docs"


def test_every_table_has_its_place() -> None:
    text = PAGE.read_text()
    for name in BLOCKS:
        assert text.count(f"<!-- speed: {name} -->") == 1
    assert text.count("<!-- end of speed -->") == len(BLOCKS)
    for name in SHORT_BLOCKS:
        assert SHORT.read_text().count(f"<!-- speed: {name} -->") == 1


def test_the_quoted_cases_are_those_of_make_bench() -> None:
    from benchmarks.cases import all_cases

    kept = json.loads(KEPT.read_text())["bench"]["cases"]
    assert sorted(row["case"] for row in kept) == sorted(case.name for case in all_cases())


def test_the_figure_draws_every_series() -> None:
    text = FIGURE.read_text()
    rows = json.loads(KEPT.read_text())["bench"]["cases"]
    series = 2 + len(by_cluster(rows))
    assert text.count('id="points-') == text.count('id="curve-') == series


PEER = '[[peer]]\nname = "a"\nshape = "{shape}"\nrequests = {requests}\ncommand = ["true"]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[peer]\n", "peers.toml"),
        ('[[peer]]\nname = "a"\n', "shape is missing"),
        (PEER.format(shape="9 replicas", requests=5), "shape is one of"),
        (PEER.format(shape="1 replica", requests=0), "requests is 1 to 19366"),
    ],
)
def test_a_mistake_in_the_file_of_peers_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "peers.toml"
    path.write_text(text)
    with pytest.raises(SystemExit) as told:
        read_peers(path)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_a_peer_runs_beside_the_same_case(tmp_path: Path) -> None:
    path = tmp_path / "peers.toml"
    path.write_text(PEER.format(shape="4P+4D", requests=700))
    (peer,) = read_peers(path)
    case = case_of(peer)
    assert case.requests == 700
    assert 'role = "prefill"' in case.config
    cost = {"cpu_s": 2.0, "wall_s": 3.0, "peak_mib": 100.0}
    row = {**peer, "peer": cost, "emu": {**cost, "cpu_s": 0.5}}
    assert line_of(row) == "| a | 4P+4D | 700 | 350 | 2.00 | 3.00 | 100 | 1,400 |  |"
    row["compiled"] = {**cost, "cpu_s": 0.25}
    assert line_of(row) == "| a | 4P+4D | 700 | 350 | 2.00 | 3.00 | 100 | 1,400 | 2,800 |"


def test_a_peer_starts_where_its_file_says(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / "peers.toml"
    text = PEER.format(shape="4P+4D", requests=700)
    path.write_text(text)
    assert read_peers(path)[0]["directory"] == str(tmp_path / "files")
    path.write_text(text + 'directory = ".."\n')
    assert read_peers(path)[0]["directory"] == str(tmp_path)
