"""The log tells the life of requests and replicas, at simulated times, and is off unless asked for."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from emu.config.load import load_config
from emu.log import make_log
from emu.runs.runner import adjust, execute
from tests.csvfile import csv_rows

ROOT = Path(__file__).resolve().parents[2]


def logged(directory: Path, level: str) -> list[dict[str, object]]:
    path = ROOT / "configs" / "experiments" / "chaos-decode-crash.toml"
    config = adjust(load_config(path, ["workload.limit=700"]), seed=None, output=directory)
    stream = io.StringIO()
    execute(config, str(path), report=False, log=make_log(level, "json", stream))  # type: ignore[arg-type]
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_it_tells_the_life_of_requests_and_replicas(tmp_path: Path) -> None:
    events = logged(tmp_path / "out", "info")
    names = {str(event["event"]) for event in events}
    assert names >= {"request.arrived", "request.ended", "replica.moved", "migration.finished"}
    assert names >= {"fault.struck", "load.completed", "request.lost"}
    times = [int(str(event["at_ns"])) for event in events]
    assert times == sorted(times)
    arrived = [e["request_id"] for e in events if e["event"] == "request.arrived"]
    ended = [e["request_id"] for e in events if e["event"] == "request.ended"]
    assert sorted(arrived) == sorted(ended) == list(range(700))  # type: ignore[type-var]


def fields_of_docs() -> dict[str, tuple[str, set[str], set[str]]]:
    """By event: its level, the fields that it always has, those that it may have."""
    text = (ROOT / "docs" / "reference" / "outputs.md").read_text(encoding="utf-8")
    found = {}
    for line in text.partition("## The log")[2].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and cells[1].startswith("`"):
            always, _, sometimes = cells[3].partition(";")
            for name in re.findall(r"`([a-z_.]+)`", cells[1]):
                names = [set(re.findall(r"`(\w+)`", cell)) for cell in (always, sometimes)]
                found[name] = (cells[2], *names)
    return found


def check_schema(events: list[dict[str, object]]) -> None:
    documented = fields_of_docs()
    for event in events:
        level, always, sometimes = documented[str(event["event"])]
        keys = set(event) - {"at_ns", "event", "level"}
        assert event["level"] == level
        assert always <= keys <= always | sometimes, event


def test_a_request_is_followed_from_its_arrival_to_its_end(tmp_path: Path) -> None:
    events = logged(tmp_path / "out", "info")
    check_schema(events)
    lives: dict[object, list[str]] = {}
    for event in events:
        ids = event.get("request_ids", [event.get("request_id")])
        for one in ids:  # type: ignore[attr-defined]
            lives.setdefault(one, []).append(str(event["event"]))
    usual = ["arrived", "routed", "scheduled", "first_token", "started", "finished", "ended"]
    assert [name.partition(".")[2] for name in lives[0]] == usual
    struck = [life for life in lives.values() if "request.lost" in life]
    assert struck
    for life in struck:
        assert life.count("request.routed") == 2
        assert life.count("request.first_token") == 1
    rows = {int(row["request_id"]): row for row in csv_rows(tmp_path / "out" / "requests.csv")}
    for event in events:
        if event["event"] in ("request.ended", "request.first_token"):
            row = rows[int(str(event["request_id"]))]
            assert str(event["ttft_ns"]) == row["ttft_ns"]
            if event["event"] == "request.first_token":
                assert 0 <= int(row["first_token_ns"]) - int(str(event["at_ns"])) < 10**7


def test_a_replica_is_followed_through_its_states(tmp_path: Path) -> None:
    path = ROOT / "configs" / "experiments" / "tutorial-autoscale.toml"
    keys = ["workload.limit=60", f"output.dir='{tmp_path / 'out'}'"]
    stream = io.StringIO()
    execute(load_config(path, keys), str(path), report=False, log=make_log("debug", "json", stream))
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    check_schema(events)
    assert {e["event"] for e in events} >= {"plan.made", "load.completed", "batch.ended"}
    actors = [e["actor"] for e in events if e["event"] == "actor.started"]
    assert {"replica 0", "replica 7", "gateway"} <= set(actors)
    assert len(actors) == len(set(actors))
    assert sum(e["event"] == "request.queued" for e in events) == 60  # a common queue
    states = {e["replica_id"]: e["state"] for e in events if e["event"] == "replica.started"}
    assert sorted(states) == list(range(8))
    for event in events:
        if event["event"] == "replica.moved":
            assert states[event["replica_id"]] == event["from"]
            states[event["replica_id"]] = event["to"]
        elif event["event"] in ("request.scheduled", "request.first_token"):
            assert states[event["replica_id"]] not in ("inactive", "failed")


def test_a_level_leaves_out_what_is_below_it(tmp_path: Path) -> None:
    names = {event["event"] for event in logged(tmp_path / "out", "warning")}
    assert names == {"fault.struck", "request.lost"}


def test_the_log_changes_no_result(tmp_path: Path) -> None:
    for level in ("off", "debug"):
        logged(tmp_path / level, level)
    for name in ("requests.csv", "transitions.csv", "summary.json"):
        one, other = (tmp_path / level / name for level in ("off", "debug"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_go_to_standard_error(tmp_path: Path, form: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "emu", str(ROOT / "configs" / "quickstart.toml")),
            *("--set", "workload.limit=5", "--output", str(tmp_path / "out"), "--quiet"),
            *("--log-level", "info", "--log-format", form),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    assert len([line for line in done.stderr.splitlines() if "request.ended" in line]) == 5


def test_a_run_without_a_log_does_not_load_structlog(tmp_path: Path) -> None:
    script = (
        "import sys, emu\n"
        f"emu.run({str(ROOT / 'configs' / 'quickstart.toml')!r}, {{'workload.limit': 5}}, "
        f"output={str(tmp_path / 'out')!r}, report=False)\n"
        "assert 'structlog' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
