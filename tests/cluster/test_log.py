"""The log tells the life of requests and replicas, at simulated times, and is off unless asked for."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from emu.config.load import load_config
from emu.log import make_log
from emu.runs.runner import adjust, execute

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
