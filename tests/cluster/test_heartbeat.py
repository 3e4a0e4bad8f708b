"""A line at an interval of simulated time."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from emu.cli import main

CONFIG = """\
[latency]
backend = "linear"
[[replicas]]
[workload.synthetic]
requests = 40
[workload.synthetic.arrivals]
rate_per_s = 4.0
[output]
report = false
heartbeat_s = 2
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.usefixtures("place")
def test_a_line_tells_what_happened_since_the_last_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Its rates are those of the time series, added up."""
    assert main(["run", "c.toml", "-q", "-o", "runs/a"]) == 0
    lines = capsys.readouterr().err.splitlines()
    with Path("runs/a/timeseries.csv").open() as file:
        rows = {int(row["time_ns"]): row for row in csv.DictReader(file)}
    assert lines[0].startswith("2 s: ") and lines[1].startswith("4 s: ")
    found = re.match(
        r"4 s: ([\d,]+) prompt tokens/s, ([\d,]+) output tokens/s, (\d+) running", lines[1]
    )
    assert found is not None
    told = [int(text.replace(",", "")) for text in found.groups()]
    both = [rows[3_000_000_000], rows[4_000_000_000]]
    for value, column in zip(told, ("prefill_tokens_per_s", "decode_tokens_per_s"), strict=False):
        assert value == pytest.approx(sum(float(row[column]) for row in both) / 2, abs=1)
    assert told[2] == int(both[1]["running"])
    before = Path("runs/a/requests.csv").read_bytes()
    assert main(["run", "c.toml", "-q", "-o", "runs/b", "--set", "output.heartbeat_s=0"]) == 0
    assert capsys.readouterr().err == "" and Path("runs/b/requests.csv").read_bytes() == before


@pytest.mark.usefixtures("place")
def test_it_is_an_event_of_the_log_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "c.toml", "-q", "--log-format", "json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    beats = [event for event in events if event["event"] == "cluster.beat"]
    assert [beat["at_ns"] for beat in beats[:2]] == [2_000_000_000, 4_000_000_000]
    assert beats[1]["output_tokens_per_s"] > 0 and beats[1]["kv_share"] > 0


@pytest.mark.usefixtures("place")
def test_an_interval_that_no_sample_meets_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ("output.heartbeat_s=1.5", "output.timeseries_interval_ms=0"):
        assert main(["run", "c.toml", "-q", "--set", more]) == 2
        assert "heartbeat_s: expected a multiple of timeseries" in capsys.readouterr().err
