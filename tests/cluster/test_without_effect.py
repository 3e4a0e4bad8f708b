"""What a configuration asks for and cannot have is told: in marks.csv, in the log, as a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emu.cluster.log_observer import EVENTS
from emu.config.load import config_from_dict
from emu.runs.runner import prepare
from tests.cluster.helpers import LINEAR, rows_of, run_config, summary_of

POOLS = [{"role": "prefill"}, {"role": "decode"}, {"role": "inactive"}]
WORK = {
    "synthetic": {
        "requests": 20,
        "arrivals": {"rate_per_s": 10.0},
        "prompt": {"distribution": "fixed", "value": 100},
        "output": {"distribution": "fixed", "value": 20},
    }
}


def marks(directory: Path, **tables: Any) -> list[tuple[str, str, str]]:
    """(kind, target, text) of a run that completes all requests."""
    run_config(
        directory,
        nodes=[{"gpus": 8}],
        **{"replicas": POOLS, "workload": WORK, "latency": LINEAR, **tables},
    )
    assert summary_of(directory)["completed"] == 20
    return [(m["kind"], m["target"], m["text"]) for m in rows_of(directory, "marks.csv")]


@pytest.mark.parametrize(
    ("replica", "command", "state"),
    [(1, "to_prefill", "decode"), (0, "to_colocated", "prefill")],
)
def test_a_command_that_does_not_apply_is_marked_and_told(
    replica: int, command: str, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [{"at_s": 0.5, "replica": replica, "command": command}]
    told = f"replica {replica} is {state}, {command} does not apply"
    assert ("command refused", f"replica {replica}", told) in marks(tmp_path, commands=commands)
    assert capsys.readouterr().err == f"warning: command at 0.5 s: {told}\n"
    assert EVENTS["command refused"] == "command.refused"


def test_a_command_that_applies_is_not_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [{"at_s": 0.5, "replica": 2, "command": "to_decode"}]
    kinds = [kind for kind, *_ in marks(tmp_path, commands=commands)]
    assert "command refused" not in kinds
    assert capsys.readouterr().err == ""


def test_what_the_run_ends_before_is_marked_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = marks(
        tmp_path,
        faults=[{"at_s": 60.0, "kind": "replica_crash", "replica": 1, "duration_s": 1.0}],
        commands=[{"at_s": 70.0, "replica": 2, "command": "to_decode"}],
    )
    told = {kind: text for kind, _, text in found}
    assert told["fault missed"].startswith("never reached: due at 60 s, the run ended at ")
    assert told["command refused"].startswith("to_decode was never reached: the run ended at ")
    assert summary_of(tmp_path)["faults_missed"] == {"replica_crash": 1}
    fault, command = capsys.readouterr().err.splitlines()
    assert fault.startswith("warning: the replica_crash at 60 s was never reached: the run ended")
    assert command.startswith("warning: command at 70 s: to_decode was never reached")


def test_a_crash_in_a_stage_to_which_no_replica_came_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [{"at_s": 0.5, "kind": "replica_crash", "stage": "shutting_decode"}]
    found = marks(tmp_path, faults=faults)
    assert ("fault missed", "replica_crash", "no replica came to shutting_decode") in found
    assert "no replica came to shutting_decode" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["replica_crash", "replica_restart"])
def test_an_inactive_replica_has_no_process_to_crash(kind: str, tmp_path: Path) -> None:
    faults = [{"at_s": 0.5, "kind": kind, "replica": 2, "duration_s": 0.2}]
    found = marks(tmp_path, faults=faults)
    assert ("fault missed", kind, "replica 2 is inactive: no process runs there") in found
    assert not any(mark[0] == "fault" for mark in found)
    states = [row["to"] for row in rows_of(tmp_path, "transitions.csv") if row["from"]]
    assert "failed" not in states


def test_the_gpu_of_an_inactive_replica_breaks_all_the_same(tmp_path: Path) -> None:
    faults = [{"at_s": 0.5, "kind": "gpu_crash", "gpu": 2, "duration_s": 0.2}]
    assert any(mark[0] == "fault" for mark in marks(tmp_path, faults=faults))


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ([{"count": 4}], True),
        ([{"count": 3}, {"role": "inactive"}], False),
    ],
)
def test_a_planner_with_nothing_to_add_is_told(pools: list[dict[str, Any]], said: bool) -> None:
    config = config_from_dict(
        {
            "nodes": [{"gpus": 8}],
            "replicas": pools,
            "workload": WORK,
            "autoscale": {"preset": "hpa"},
        }
    )
    _, workload = prepare(config, "test")
    expected = (
        "autoscale: nothing to add: no replica is inactive; "
        'declare [[replicas]] with role = "inactive"'
    )
    assert (expected in workload.notes.warnings) is said
