"""What a run that was killed, or met a full disk, leaves: nothing, after the next run at least."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emu.errors import InputError
from emu.report.atomic import RunDirectory, partial_name, sweep
from tests.cluster.helpers import run_config

HIDDEN = ".o.0123456789abcdef"


def leave(directory: Path, name: str, *files: str) -> Path:
    path = directory / name
    path.mkdir(parents=True)
    for file in files:
        (path / file).write_text("x")
    return path


def test_the_next_run_sweeps_up(tmp_path: Path) -> None:
    dead = leave(tmp_path, f"{HIDDEN}.tmp", "requests.csv.bin.tmp", "marks.csv")
    kept = leave(tmp_path, ".o.0123456789abcdef.tmp.notes")
    foreign = leave(tmp_path, ".o.fedcba9876543210.tmp", "thesis.txt")
    run = RunDirectory(tmp_path / "o")
    assert not dead.exists()
    assert kept.exists()
    assert (foreign / "thesis.txt").exists()
    run.discard()


def test_a_live_run_is_left_alone(tmp_path: Path) -> None:
    one = RunDirectory(tmp_path / "o")
    (one.staging / "requests.csv.tmp").write_text("x")
    two = RunDirectory(tmp_path / "o")
    assert one.staging.is_dir()
    two.publish()
    one.publish()
    assert sorted(os.listdir(tmp_path)) == ["o"]


def test_results_moved_aside_by_a_run_that_was_killed_come_back(tmp_path: Path) -> None:
    leave(tmp_path, f"{HIDDEN}.old", "summary.json")
    RunDirectory(tmp_path / "p").discard()
    assert (tmp_path / "o" / "summary.json").exists()
    leave(tmp_path, f"{HIDDEN}.old", partial_name("summary.json"))
    RunDirectory(tmp_path / "p").discard()
    assert sorted(os.listdir(tmp_path)) == ["o"]


def test_a_directory_that_another_run_sweeps_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run starts beside it between mkdir and lock, and takes it for one left behind."""
    usual, swept = os.open, []

    def open_late(path: Path, flags: int) -> int:
        if not swept:
            swept.append(path)
            sweep(tmp_path)
        return usual(path, flags)

    monkeypatch.setattr(os, "open", open_late)
    run = RunDirectory(tmp_path / "o")
    assert swept
    assert run.staging != swept[0]
    run.publish()
    assert os.listdir(tmp_path) == ["o"]


def test_a_directory_above_that_another_run_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, removed = Path.mkdir, []

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        if not removed and path.name.startswith(".o."):
            removed.append(path)
            path.parent.rmdir()  # the discard of a run that had made it
        usual(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    RunDirectory(tmp_path / "runs" / "o").publish()
    assert removed
    assert (tmp_path / "runs" / "o").is_dir()


def test_a_directory_above_that_goes_while_it_is_looked_at_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mkdir finds it there, another run removes it, and pathlib then sees no directory."""
    (tmp_path / "runs").mkdir()
    usual, removed = Path.is_dir, []

    def is_dir(path: Path) -> bool:
        if not removed and path.name == "runs":
            removed.append(path)
            path.rmdir()
        return usual(path)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    RunDirectory(tmp_path / "runs" / "o").publish()
    assert removed
    assert (tmp_path / "runs" / "o").is_dir()


def test_a_place_that_takes_no_directories_is_refused_after_some_tries() -> None:
    with pytest.raises(InputError, match=r"output\.dir: cannot be written: No such file"):
        RunDirectory(Path("/proc/runs/o"))


def test_a_discarded_run_removes_the_directories_that_it_made(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "runs" / "deep" / "o").discard()
    assert os.listdir(tmp_path) == []
    (tmp_path / "runs").mkdir()
    RunDirectory(tmp_path / "runs" / "o").discard()
    assert os.listdir(tmp_path) == ["runs"]  # it was there before
    one = RunDirectory(tmp_path / "new" / "a")
    two = RunDirectory(tmp_path / "new" / "b")
    one.discard()
    two.publish()
    assert os.listdir(tmp_path / "new") == ["b"]


MANY = """
import sys
from pathlib import Path
from emu.report.atomic import RunDirectory
for index in range(400):
    RunDirectory(Path(sys.argv[1]) / f"{sys.argv[2]}-{index}").discard()
"""


@pytest.mark.slow
def test_processes_start_runs_beside_each_other(tmp_path: Path) -> None:
    """Each of 1,600 directories is made, while the one above appears and goes with them."""
    line = [sys.executable, "-c", MANY, str(tmp_path / "runs")]
    started = [subprocess.Popen([*line, name], stderr=subprocess.PIPE) for name in "abcd"]
    assert [process.communicate()[1] for process in started] == [b""] * 4
    assert [path.name for path in tmp_path.rglob("*") if path.name != "runs"] == []


KILLED = """
import os, signal, sys
from pathlib import Path
from emu.report.atomic import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
(run.staging / "requests.csv.tmp").write_text("x")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sigkill_leaves_a_directory_that_the_next_run_removes(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "o")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    run_config(tmp_path / "o", workload={"synthetic": {"requests": 2}})
    assert os.listdir(tmp_path) == ["o"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """Files may grow no further: the buffers of the recorder cannot be written, and it must go."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, usual[1]))
        with pytest.raises(OSError, match="File too large"):
            run_config(tmp_path / "o", workload={"synthetic": {"requests": 300}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == []
