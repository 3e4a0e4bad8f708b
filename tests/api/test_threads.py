"""Runs in several threads of one process, and the types that they share."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from emu.process.prepared import prepared

ROOT = Path(__file__).resolve().parents[2]
RUNS = """
import sys, threading
import emu.api
together, failed = threading.Barrier(8), []
def run(index):
    together.wait()
    try:
        emu.api.run({"workload": {"synthetic": {"requests": 2}}}, output=f"{sys.argv[1]}/{index}")
    except BaseException as error:
        failed.append(error)
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(f"{failed}" if failed else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_eight_threads_may_begin_their_first_runs_together(attempt: int, tmp_path: Path) -> None:
    """In processes of their own: the race of two first conversions is a segmentation fault."""
    line = [sys.executable, "-c", RUNS, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode != -signal.SIGSEGV, attempt
    assert done.returncode == 0, done.stderr
    tables = [(tmp_path / str(index) / "requests.csv").read_bytes() for index in range(8)]
    assert tables == [tables[0]] * 8


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_eight_threads_twenty_times(tmp_path: Path) -> None:
    for attempt in range(20):
        line = [sys.executable, "-c", RUNS, str(tmp_path / str(attempt))]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (attempt, done.stderr)


STARTS = """
import os, sys
from pathlib import Path
from emu.report.atomic import RunDirectory
place, me, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for index in range(count):
    one = RunDirectory(place / str(index % 7) / f"{me}-{index}")
    (one.staging / "summary.json").write_text("{}")
    (one.publish if index % 3 else one.discard)()
"""


def start_beside_each_other(place: Path, count: int) -> list[int]:
    """Exit statuses of four processes that begin and end so many runs in the same directories."""
    line = [sys.executable, "-c", STARTS, str(place)]
    started = [subprocess.Popen([*line, str(me), str(count // 4)]) for me in range(4)]
    return [process.wait() for process in started]


@pytest.mark.slow
def test_processes_start_beside_each_other(tmp_path: Path) -> None:
    assert start_beside_each_other(tmp_path, 200) == [0] * 4
    assert len(list(tmp_path.rglob("summary.json"))) == 4 * len([i for i in range(50) if i % 3])
    assert list(tmp_path.rglob(".*")) == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_thousand_starts_beside_each_other(tmp_path: Path) -> None:
    assert start_beside_each_other(tmp_path, 10_000) == [0] * 4


def test_one_thread_at_a_time_describes_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [msgspec.defstruct(f"Kind{index}", [("value", int)]) for index in range(8)]
    together, inside, seen = threading.Barrier(8), [], []
    usual = msgspec.json.Decoder

    def slow(kind: type) -> object:
        inside.append(kind)
        seen.append(len(inside))
        for _ in range(1000):  # others may run here
            pass
        inside.remove(kind)
        return usual(kind)

    def use(kind: type) -> None:
        together.wait()
        for one in (*kinds[kinds.index(kind) :], *kinds):
            assert prepared(one) is one

    monkeypatch.setattr(msgspec.json, "Decoder", slow)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use, args=(kind,)) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert set(seen) == {1}
    assert len(seen) >= len(kinds)


def typed(call: ast.Call) -> ast.expr | None:
    """The type that a call of msgspec reads values into, if it names one."""
    name = ast.unparse(call.func)
    if name == "msgspec.convert":
        given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "type")]
    elif name.startswith("msgspec.") and name.endswith((".Decoder", ".decode")):
        rest = call.args[0:1] if name.endswith(".Decoder") else call.args[1:2]
        given = [*rest, *(k.value for k in call.keywords if k.arg == "type")]
    else:
        return None
    return given[0] if given else None


def test_every_type_that_msgspec_reads_into_is_prepared() -> None:
    found = []
    for path in sorted((ROOT / "emu").rglob("*.py")):
        if path.name == "prepared.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            kind = typed(node) if isinstance(node, ast.Call) else None
            if kind is not None and not ast.unparse(kind).startswith("prepared("):
                found.append(f"{path.relative_to(ROOT)}:{kind.lineno}: {ast.unparse(kind)}")
    assert found == []
