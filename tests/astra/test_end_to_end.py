"""`emu run` with a program: the stand-in through the whole command line, and nothing left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from emu.cli import main
from tests.astra.test_process import program
from tests.patience import PATIENCE_S, until

CONFIG = """
[[nodes]]
gpu = "A100-SXM4-80GB"
gpus = 2

[[replicas]]
{replica}

[latency]
backend = "astra-sim"
timeout_s = 600
{latency}

[workload.synthetic]
requests = {requests}

[workload.synthetic.output]
distribution = "fixed"
value = 6

[output]
dir = "out"
"""
ROOT = Path(__file__).parents[2]


def configure(directory, latency, replica="", requests=3):
    path = directory / "cluster.toml"
    path.write_text(CONFIG.format(latency=latency, replica=replica, requests=requests))
    return path


def emulate(path, out):
    status = main(["run", str(path), "-q", "--no-report", "-o", str(out)])
    return status, (out / "requests.csv").read_bytes() if status == 0 else b""


def survivors(directory):
    """Ids of processes that were started through files of this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
            except OSError:  # it has just ended
                continue
            is_stand_in = b"standin.py" in line and b"-astra-sim" in line
            if is_stand_in and os.fsencode(f"MARK={directory}") in environment:
                found.append(entry.name)
    return found


@pytest.fixture
def marked(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path))
    return tmp_path


REPLICAS = ["", "tensor_parallel = 2", "pipeline_parallel = 2", "count = 2"]


@pytest.mark.parametrize("replica", REPLICAS)
def test_a_run_with_a_program_is_repeated_from_its_counts(marked, replica, capsys):
    program(marked, "fork")
    asked = configure(marked, 'binary = "./run_fork"\ncache = "counts.sqlite"', replica)
    status, first = emulate(asked, marked / "first")
    assert (status, survivors(marked)) == (0, [])
    assert (marked / "counts.sqlite").is_file()
    again = configure(marked, 'replay = "counts.sqlite"', replica)
    assert emulate(again, marked / "second") == (0, first)
    # One more request makes batches that the file does not have.
    other = configure(marked, 'replay = "counts.sqlite"', replica, requests=9)
    assert emulate(other, marked / "third")[0] == 3
    error = capsys.readouterr().err
    assert "counts.sqlite: no count for the batch" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("replica", ["", "pipeline_parallel = 2"])
def test_counts_need_no_file(marked, replica):
    program(marked, "fork")
    stored = configure(marked, 'binary = "./run_fork"\ncache = "counts.sqlite"', replica)
    first = emulate(stored, marked / "first")
    assert emulate(configure(marked, 'binary = "./run_fork"', replica), marked / "second") == first


def test_a_bare_name_is_looked_up_on_the_path(marked, monkeypatch):
    program(marked, "fork")
    monkeypatch.setenv("PATH", f"{marked}{os.pathsep}{os.environ['PATH']}")
    assert emulate(configure(marked, 'binary = "run_fork"'), marked / "out")[0] == 0


def test_replicas_of_two_kinds_share_a_file_of_counts(marked):
    program(marked, "fork")
    replica = "[[replicas]]\n[replicas.latency]\nround_tokens_to = 16"
    path = configure(marked, 'binary = "./run_fork"\ncache = "c.sqlite"', replica)
    first = emulate(path, marked / "first")
    assert first[0] == 0
    assert emulate(path, marked / "second") == first


@pytest.mark.parametrize(
    ("binary", "problem"),
    [
        ("./missing", "no program that may be run"),
        ("no-such-program", "no program that may be run"),
    ],
)
def test_a_missing_program_is_one_line(marked, capsys, binary, problem):
    assert emulate(configure(marked, f'binary = "{binary}"'), marked / "out")[0] == 2
    error = capsys.readouterr().err
    assert "latency.binary" in error
    assert problem in error
    assert error.count("\n") == 1


def test_a_program_that_crashes_ends_the_run(marked, capsys):
    program(marked, "crash")
    assert emulate(configure(marked, 'binary = "./run_crash"'), marked / "out")[0] == 3
    assert "about to crash" in capsys.readouterr().err
    assert survivors(marked) == []


@pytest.mark.parametrize("mode", ["fork", "silent", "stubborn"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_behind(marked, mode, number):
    program(marked, mode)
    path = configure(marked, f'binary = "./run_{mode}"', requests=100_000)
    command = [sys.executable, "-m", "emu", str(path), "-q", "--no-report", "-o", marked / "out"]
    run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: survivors(marked) or run.poll() is not None)
        run.send_signal(number)
        _, error = run.communicate(timeout=PATIENCE_S)
    finally:
        run.kill()
    assert (run.returncode, survivors(marked)) == (130, [])
    assert "Traceback" not in error


def test_a_killed_run_takes_the_program_with_it(marked):
    # No process is left to end the program; its pipes close, and it ends with its next line.
    program(marked, "fork")
    path = configure(marked, 'binary = "./run_fork"', requests=100_000)
    command = [sys.executable, "-m", "emu", str(path), "-q", "--no-report", "-o", marked / "out"]
    run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        until(lambda: survivors(marked))
    finally:
        run.kill()
        run.wait()
    until(lambda: not survivors(marked))
