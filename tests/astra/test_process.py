"""The process client against the stand-in: three dialects, every failure, no survivor."""

import os
import stat
import sys
from pathlib import Path

import anyio
import pytest

from emu.backends.astra.client import Command, open_astra, run_oneshot
from emu.backends.astra.driver import Driver, write_first
from emu.backends.astra.graph import Graph, Node, NodeKind
from emu.backends.astra.inputs import InputFiles
from emu.backends.astra.polling import Answer
from emu.errors import InputError, RunError
from tests.patience import PATIENCE_S, until

STAND_IN = Path(__file__).with_name("standin.py")


def graph(npu, ns=5):
    return Graph(npu, [Node(0, NodeKind.COMP, "work", duration_ns=ns)])


def program(directory, mode):
    """An executable file that starts the stand-in in a mode."""
    path = directory / f"run_{mode}"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" {mode} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def command(directory, mode, **kw):
    nowhere = directory / "none"
    files = InputFiles(network=nowhere, system=nowhere, memory=nowhere)
    prefix = write_first(directory, [graph(0), graph(1)])
    return Command(binary=program(directory, mode), files=files, workload=prefix, **kw)


class Front:
    """Gives NPU 0 some batches, then ends the run."""

    def __init__(self, batches, at_exit):
        self.batches = batches
        self.at_exit = at_exit
        self.seen = []

    def answer(self, npu, iteration, now_ns):
        self.seen.append((npu, iteration, now_ns))
        if npu != 0:
            return Answer.DONE
        if len(self.seen) == 1:
            return Answer.PASS
        if iteration < self.batches:
            return {0: graph(0)}
        self.at_exit()
        return Answer.EXIT

    def next_ns(self, now_ns):
        return -1


def converse(directory, mode, batches=2, timeout_s=PATIENCE_S, exit_s=PATIENCE_S, **kw):
    clients = []

    def at_exit():
        clients[0]._timeout_s = exit_s

    front = Front(batches, at_exit)

    async def main():
        dialect = mode if mode in ("waiting", "ticks") else "fork"
        start = command(directory, mode, **kw)
        async with open_astra(start, directory, dialect=dialect, timeout_s=timeout_s) as client:
            clients.append(client)
            return await Driver(client, front, directory).run()

    return anyio.run(main), front


@pytest.mark.parametrize("mode", ["fork", "waiting", "ticks"])
def test_a_conversation_in_each_dialect(tmp_path, mode):
    clock, front = converse(tmp_path, mode)
    size = (tmp_path / "batch0.0.et").stat().st_size
    assert clock == 1_005_000 + 2 * size
    assert front.seen == [(0, 0, 5_000), (0, 0, 1_005_000), (0, 1, 1_005_000 + size), (0, 2, clock)]
    log = (tmp_path / "standin.log").read_text().splitlines()
    assert log == ["pass", str(tmp_path / "batch0"), str(tmp_path / "batch1"), "exit"]


def test_a_clock_hint_is_sent_only_where_it_is_understood(tmp_path):
    async def main(mode):
        start = command(tmp_path, mode)
        async with open_astra(start, tmp_path, dialect=mode) as client:
            await client.report()
            await client.wait(77)
            await client.report()
            await client.exit()
        return (tmp_path / "standin.log").read_text().splitlines()[0]

    assert anyio.run(main, "ticks") == "pass 77"
    assert anyio.run(main, "waiting") == "pass"


def test_end_npus_are_asked_first_and_sleep_after_done(tmp_path):
    _, front = converse(tmp_path, "fork", start_npus=[0], end_npus=[1])
    assert [npu for npu, _, _ in front.seen].count(1) == 1
    assert front.seen[0][0] == 1


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (
            "crash",
            "ended in the middle of the run with status 7; its last lines:(.|\n)*about to crash",
        ),
        ("killed", "ended in the middle of the run with signal SIGKILL"),
        ("early", "ended its run before it was told to"),
        ("silent", "has said nothing for 0.5 s; it printed nothing"),
        ("unreadable", r"its report cannot be read(.|\n)*iteration \?\?"),
        ("garbage", "no report in 1000 lines(.|\n)*lorem ipsum"),
        ("endless", "a line of more than 1048576 bytes"),
        ("remain", "ended with unfinished graphs"),
        ("bad_status", "ended with status 3"),
        ("lingers", "did not end within 0.5 s"),
        ("chatters", "does not end within 1000 lines"),
        ("raves", "a line of more than 1048576 bytes"),
        ("wrong_iteration", "NPU 0 reports iteration 9, it has been given 0 graphs"),
    ],
)
def test_every_failure_is_one_clear_error(tmp_path, mode, problem, monkeypatch):
    monkeypatch.setattr("emu.backends.astra.client.NOISE_LINES_MAX", 1000)
    limits = {"silent": {"timeout_s": 0.5}, "lingers": {"exit_s": 0.5}}
    with pytest.raises(RunError, match=problem):
        converse(tmp_path, mode, **limits.get(mode, {}))


def test_a_missing_graph_is_reported(tmp_path):
    async def main():
        start = command(tmp_path, "fork")
        async with open_astra(start, tmp_path) as client:
            await client.report()
            await client.give(tmp_path / "nothing")
            await client.report()

    with pytest.raises(RunError, match="does not find a graph"):
        anyio.run(main)


def test_a_missing_program_is_an_input_error(tmp_path):
    files = InputFiles(network=tmp_path, system=tmp_path, memory=tmp_path)

    async def main(path):
        start = Command(binary=path, files=files, workload=tmp_path)
        async with open_astra(start, tmp_path):
            raise AssertionError("started")

    with pytest.raises(InputError, match=r"latency.binary: no such program: .*/none"):
        anyio.run(main, tmp_path / "none")
    plain = tmp_path / "plain.txt"
    plain.write_text("not a program")
    with pytest.raises(InputError, match="not a program that may be run"):
        anyio.run(main, plain)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("mode", ["fork", "silent", "stubborn"])
def test_a_cancelled_run_leaves_no_process(tmp_path, mode, monkeypatch):
    monkeypatch.setattr("emu.backends.astra.client._GRACE_S", 0.3)
    pids = []

    async def cancel(scope):
        while not (tmp_path / "standin.ready").exists():  # noqa: ASYNC110 (a file of a process)
            await anyio.sleep(0.01)
        scope.cancel()

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(cancel, group.cancel_scope)
            start = command(tmp_path, mode)
            async with open_astra(start, tmp_path, timeout_s=PATIENCE_S) as client:
                pids.append(client._process.pid)
                while True:
                    await client.report()
                    await client.wait()

    anyio.run(main)
    assert len(pids) == 1
    assert not is_running(pids[0])


def test_what_a_wrapper_has_started_ends_with_it(tmp_path):
    path = program(tmp_path, "fork")
    # A shell that stays in between, and a child that keeps running behind its back.
    path.write_text(
        f'#!/bin/sh\nsleep 3600 & echo $! > "{tmp_path}/child"\n'
        f'"{sys.executable}" "{STAND_IN}" fork "$@"\nexit 0\n'
    )

    async def main():
        files = InputFiles(network=tmp_path, system=tmp_path, memory=tmp_path)
        prefix = write_first(tmp_path, [graph(0)])
        start = Command(binary=path, files=files, workload=prefix)
        async with open_astra(start, tmp_path) as client:
            await client.report()

    anyio.run(main)
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child) or is_zombie(child))


def is_zombie(pid):
    """Ended, but its status has not been asked for yet (where init does not)."""
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_a_failing_front_end_leaves_no_process(tmp_path):
    pids = []

    async def main():
        async with open_astra(command(tmp_path, "fork"), tmp_path) as client:
            pids.append(client._process.pid)
            await client.report()
            raise ValueError("the front end's own fault")

    with pytest.raises(ValueError, match="own fault"):
        anyio.run(main)
    assert not is_running(pids[0])


def test_the_one_shot_program(tmp_path, monkeypatch):
    monkeypatch.setattr("emu.backends.astra.client.NOISE_LINES_MAX", 1000)

    async def main(mode):
        timeout_s = 0.5 if "silent" in mode else PATIENCE_S
        return await run_oneshot(command(tmp_path, mode), tmp_path, timeout_s=timeout_s, npus=2)

    assert anyio.run(main, "oneshot") == {0: 1000, 1: 2000}
    with pytest.raises(RunError, match="NPU 1 never finished"):
        anyio.run(main, "oneshot_missing")
    with pytest.raises(RunError, match="ended with status 5"):
        anyio.run(main, "oneshot_crash")
    with pytest.raises(RunError, match="does not end within 1000 lines"):
        anyio.run(main, "oneshot_endless")
    with pytest.raises(RunError, match=r"has said nothing for 0\.5 s"):
        anyio.run(main, "oneshot_silent")
