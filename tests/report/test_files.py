"""Atomic results, transitions, marks, timeseries."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from emu.errors import InputError, RunError
from emu.report.atomic import RunDirectory, partial_name, write_bytes, write_text, writing
from emu.report.runfiles import MarkLog, TransitionLog
from emu.report.timeseries import ReplicaSeries, Sample, TimeseriesWriter


def names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


def test_a_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.json", "old")

    def broken(_from: object, _to: object) -> None:
        raise OSError(28, "No space left on device", "a.json")

    monkeypatch.setattr("emu.report.atomic.os.replace", broken)
    with pytest.raises(RunError, match=r"^cannot write a\.json: No space left on device$"):
        write_bytes(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_writing_names_the_file() -> None:
    with pytest.raises(RunError, match="cannot write x"), writing(Path("x")):
        raise OSError


def test_results_appear_at_once(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "run"
    run = RunDirectory(final)
    (run.staging / "requests.csv").write_text("1")
    assert not final.exists()
    run.publish()
    assert names(final) == ["requests.csv"]
    assert names(final.parent) == ["run"]


def test_an_earlier_run_is_replaced_as_a_whole(tmp_path: Path) -> None:
    final = tmp_path / "run"
    final.mkdir()
    (final / "requests.csv").write_text("old")
    (final / "trace.json.gz").write_text("old")
    run = RunDirectory(final)
    (run.staging / "requests.csv").write_text("new")
    run.publish()
    assert names(final) == ["requests.csv"]
    assert names(tmp_path) == ["run"]


def test_other_files_in_the_directory_survive(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "summary.json").write_text("old")
    (tmp_path / "report.html").write_text("old")
    run = RunDirectory(tmp_path)
    (run.staging / "summary.json").write_text("new")
    run.publish()
    assert names(tmp_path) == ["notes.txt", "summary.json"]
    assert (tmp_path / "summary.json").read_text() == "new"


def test_partial_results_never_carry_a_final_name(tmp_path: Path) -> None:
    final = tmp_path / "run"
    final.mkdir()
    (final / "summary.json").write_text("old")
    run = RunDirectory(final)
    for name in ("timeseries.csv", "requests.partial.csv", "trace.json.gz", "summary.json"):
        (run.staging / name).write_text("x")
    run.publish_partial()
    assert names(final) == [
        "requests.partial.csv",
        "summary.partial.json",
        "timeseries.partial.csv",
        "trace.partial.json.gz",
    ]
    assert partial_name("x") == "x.partial"


def test_discarded_run_leaves_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    (run.staging / "requests.csv").write_text("1")
    run.discard()
    assert names(tmp_path) == []


def test_output_that_is_a_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(InputError, match=r"output\.dir: is a file, expected a directory"):
        RunDirectory(tmp_path / "f")
    with pytest.raises(InputError, match=r"output\.dir: cannot be written"):
        RunDirectory(tmp_path / "f" / "run")


def test_transitions_and_marks_quote_what_they_must(tmp_path: Path) -> None:
    log = TransitionLog(tmp_path / "transitions.csv")
    log.record(0, 3, "", "prefill", "config", "start")
    log.record(7, 3, "prefill", "shutting_prefill", "planner", 'surplus, "0.3"')
    assert log.rows == 2
    log.close()
    log.close()
    with (tmp_path / "transitions.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["time_ns", "replica", "from", "to", "writer", "cause"],
        ["0", "3", "", "prefill", "config", "start"],
        ["7", "3", "prefill", "shutting_prefill", "planner", 'surplus, "0.3"'],
    ]
    marks = MarkLog(tmp_path / "marks.csv")
    marks.record(5, "fault", "replica 3", "replica_crash")
    marks.close()
    assert (tmp_path / "marks.csv").read_text() == (
        "time_ns,kind,target,text\n5,fault,replica 3,replica_crash\n"
    )


def test_timeseries_turns_totals_into_rates(tmp_path: Path) -> None:
    series = TimeseriesWriter(tmp_path / "t.csv", ("prefill", "decode"), ("kv",))
    series.add(Sample(time_ns=0, replicas={"prefill": 2, "decode": 1}, total_blocks=90))
    series.add(
        Sample(
            time_ns=500_000_000,
            replicas={"decode": 3},
            waiting=4,
            waiting_prefill_tokens=400,
            running=2,
            migrating=1,
            used_blocks=30,
            total_blocks=90,
            prefill_tokens=1_000,
            decode_tokens=50,
            completed=2,
            preemptions=1,
            flows={"kv": 3},
            flow_bytes={"kv": 2**30},
        )
    )
    series.add(Sample(time_ns=500_000_000, replicas={}, completed=99))
    series.close()
    with (tmp_path / "t.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["replicas_prefill"] == "2"
    assert first["prefill_tokens_per_s"] == "0"
    assert second == {
        "time_ns": "500000000",
        "replicas_prefill": "0",
        "replicas_decode": "3",
        "waiting": "4",
        "waiting_prefill_tokens": "400",
        "running": "2",
        "used_blocks": "30",
        "total_blocks": "90",
        "migrating": "1",
        "prefill_tokens_per_s": "2000",
        "decode_tokens_per_s": "100",
        "completed": "2",
        "preemptions": "1",
        "flows_kv": "3",
        "kv_bytes_per_s": str(2**31),
    }


def test_replica_series_writes_changes_only(tmp_path: Path) -> None:
    series = ReplicaSeries(tmp_path / "r.csv")
    for time_ns, used in ((0, 0), (1, 0), (2, 5), (3, 5), (4, 0)):
        series.add(time_ns, 0, "decode", 1, 0, used, 9)
        series.add(time_ns, 1, "decode", 0, 0, 0)
    series.close()
    assert (tmp_path / "r.csv").read_text().splitlines()[1:] == [
        "0,0,decode,1,0,0,9",
        "0,1,decode,0,0,0,0",
        "2,0,decode,1,0,5,9",
        "4,0,decode,1,0,0,9",
    ]
