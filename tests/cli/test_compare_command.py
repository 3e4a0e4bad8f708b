"""`emu compare`: runs side by side, a run against a measurement."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.cli.helpers import SMALL, emu, refused


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("compare")
    config = directory / "c.toml"
    config.write_text(SMALL)
    for name, base_us in (("a", 5000), ("b", 10_000)):
        done = emu(config, "-q", "-o", directory / name, "--set", f"latency.base_us={base_us}")
        assert done.returncode == 0, done.stderr
    return directory / "a", directory / "b"


def test_two_runs_side_by_side(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    done = emu("compare", *runs, "--html", page, NO_COLOR="1", COLUMNS="120")
    assert done.returncode == 0, done.stderr
    assert "TTFT p99" in done.stdout
    assert "paired by request" in done.stdout
    assert "\x1b" not in done.stdout
    assert "</html>" in page.read_text()
    again = emu("compare", *runs, NO_COLOR="1", COLUMNS="120")
    assert done.stdout.startswith(again.stdout)


def test_a_run_against_its_own_requests_differs_by_nothing(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    measured = tmp_path / "requests.jsonl"
    with (runs[0] / "requests.csv").open(newline="") as file, measured.open("w") as out:
        for row in csv.DictReader(file):
            line = {
                "request_id": f"bench-{row['request_id']}",
                "input_toks": int(row["prompt_toks"]),
                "output_toks": int(row["decode_toks"]),
                "arrival_time": int(row["arrival_ns"]) / 1e9,
                "queued_ts": int(row["arrival_ns"]) / 1e9,
                "first_token_ts": int(row["first_token_ns"]) / 1e9,
                "last_token_ts": int(row["last_token_ns"]) / 1e9,
            }
            out.write(json.dumps(line) + "\n")
    done = emu("compare", runs[0], "--measured", measured, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stdout
    assert "0.00 %" in done.stdout


def test_mistakes_are_one_line(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert "expected 2 to 10 runs" in refused(emu("compare", runs[0]))
    assert "no summary.json" in refused(emu("compare", runs[0], tmp_path))
    line = refused(emu("compare", *runs, "--measured", tmp_path / "m.jsonl"))
    assert line == "compare: --measured: takes one run"
    absent = tmp_path / "absent"
    assert refused(emu("compare", runs[0], "--measured", absent)).startswith(f"{absent}: ")
