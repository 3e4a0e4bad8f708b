"""Processes in which one file of the program reads differently; nothing is copied.

    with Patched(["tests/kernel"]) as patched:
        found = patched.found_by("emu/units.py", text, "campaign", ["0", "7"])
        found = patched.found_by("emu/units.py", text, "tests", ["tests/kernel/test_lock.py"])

A server imports the whole program, collects the tests of the named folders and forks a process for
each job, whose functions get the code of the other text (`living`): a job takes what its tests and
worlds take. Where the change is of more than functions, or of one that ran while modules were
imported, a second server takes it, which has imported what the program and its tests need of others
only; the importer of its jobs compiles the other text wherever that file is asked for. `campaign`
runs worlds until one fails and tells what it found; `tests` runs tests until one fails. Programs
that a test starts read the file as it is. A job that takes more CPU time than it may, for one test
or world or for all, or that waits and waits, hangs: that is found, too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple, TextIO

import pytest
from hypothesis import Phase, settings

from tests.living import Living

ROOT: Final = Path(__file__).resolve().parents[1]
LIMIT_S: Final = 300
"""CPU time of a job."""
ONE_S: Final = 20
"""CPU time of one of its tests or worlds."""
WAIT_S: Final = 120
"""Of a job that does nothing at all."""
_ANEW: Final = 77
"""Exit status of a job that has to import the file anew."""
_UNKNOWN: Final = "ERROR no such tests"
_OTHERS: Final = (
    *("numpy", "msgspec", "anyio", "pytest", "hypothesis", "_pytest.pytester", "pytest_timeout"),
    *("xdist", "httpx", "asyncio", "xml.dom", "rich.table", "email", "http.client"),
)


class Job(NamedTuple):
    """What a server is asked to run, in a line of JSON."""

    file: str
    other: str
    """Where its other text is."""
    kind: str
    """`campaign` or `tests`."""
    what: list[str]
    limit_s: int


class Patched:
    """The servers, for so many jobs as are asked of them."""

    def __init__(self, folders: Sequence[str] = ()) -> None:
        """`folders` have the tests that will be asked for."""
        self._folders = folders
        self._servers: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            assert server.stdin is not None and server.stdout is not None
            server.stdin.close()
            server.wait()
            server.stdout.close()

    def found_by(
        self, file: str, text: bytes, kind: str, what: Sequence[str], limit_s: int = LIMIT_S
    ) -> str:
        """The first finding of a job where `file`, below the root, has this text; empty = nothing.

        `kind` is `campaign` with seeds, or `tests` with tests, or with files and folders, of which
        tests marked slow are not run.
        """
        with tempfile.TemporaryDirectory(prefix="emu-patched-") as directory:
            other = Path(directory) / "other.py"
            other.write_bytes(text)
            job = Job(file, str(other), kind, list(what), limit_s)
            status, output = self._asked("living", job)
            if status == _ANEW:
                status, output = self._asked("anew", job)
        if status == 0:
            return ""
        if status in {-signal.SIGXCPU, -signal.SIGKILL}:
            return "hangs"
        lines = output.splitlines()
        # What a test prints may begin with anything.
        heads = ("ERROR", "seed") if kind == "campaign" else ("ERROR", "FAILED")
        told = [line for line in lines if line.startswith(heads)]
        found = (told or lines[-1:] or ["no word"])[0][:400]
        if found.startswith(_UNKNOWN):
            raise ValueError(found)
        return found

    def _asked(self, server: str, job: Job) -> tuple[int, str]:
        process = self._servers.get(server)
        if process is None:
            process = self._servers[server] = subprocess.Popen(
                [sys.executable, "-m", "tests.patched", server, *self._folders],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        status, output = json.loads(process.stdout.readline())
        return status, output


# --- in the process of a job ----------------------------------------------------------------------


def _import_other(path: str, text: bytes) -> None:
    """Compile the other text wherever a file is imported from now on."""
    as_it_is = SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        if self.path != path:
            return as_it_is(self, fullname)
        return compile(text, path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _allow(limit_s: int) -> None:
    """Let what comes take at most so long, of what is left of all."""
    _, all_s = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (min(all_s, int(time.process_time()) + 1 + limit_s), all_s)
    )


def _campaign(seeds: Sequence[str]) -> int:
    from emu.apps.chaos.trial import run_world
    from emu.apps.chaos.worlds.world import draw_world

    for seed in map(int, seeds):
        _allow(ONE_S)
        verdict = run_world(draw_world(seed), seed)
        if verdict.problems:
            print(f"seed {seed}: {verdict.problems[0]}")
            return 4
    return 0


class _Telling:
    """Says which test failed, and lets none run for ever."""

    def pytest_runtest_logstart(self) -> None:
        _allow(ONE_S)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"FAILED {report.nodeid} - {_message(report)}", flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(f"ERROR {report.nodeid} - {_message(report)}", flush=True)


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longrepr).splitlines()
    return lines[0] if lines else ""


_OPTIONS: Final = (
    *("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--capture=no"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # plugins, by the server
)


def _tests(what: Sequence[str]) -> int:
    quick = () if any("::" in name for name in what) else ("-m", "not slow")
    return int(pytest.main([*_OPTIONS, "-x", *quick, *what], plugins=[_Telling(), _Unshrunk()]))


class _Unshrunk:
    """That a property fails is enough."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("unshrunk", parent=settings.get_profile("emu"), phases=phases)
        settings.load_profile("unshrunk")


# --- servers --------------------------------------------------------------------------------------


def _serve(answers: TextIO, do: Callable[[Job], int]) -> None:
    """Take jobs in lines of JSON, do each in a process of its own, answer with its status."""
    for line in sys.stdin:
        job = Job(*json.loads(line))
        with tempfile.TemporaryFile("w+b") as output, tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            if child == 0:
                _become_job(job, output.fileno(), folder)
                status = 1
                try:
                    status = do(job)
                except BaseException as error:
                    print(f"ERROR {type(error).__name__}: {error}")
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            status = _ended(child)
            output.seek(0)
            told = output.read().decode("utf-8", "replace")
        print(json.dumps([status, told[-4000:]]), file=answers, flush=True)


def _become_job(job: Job, output: int, folder: str) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (job.limit_s, job.limit_s))
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, output, output)):
        os.dup2(file, number)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = folder


def _ended(child: int) -> int:
    """How a job ended, with all that it has started. One that does nothing is killed."""
    end = os.pidfd_open(child)
    used_s = -1.0
    while not select.select([end], [], [], WAIT_S)[0]:
        now_s = _used_s(child)
        if now_s == used_s:
            os.killpg(child, signal.SIGKILL)
        used_s = now_s
    os.close(end)
    _, ended = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended)


def _used_s(child: int) -> float:
    """CPU time of a process and of those that it waited for."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _serve_anew(answers: TextIO) -> None:
    """Jobs that import the program."""
    for name in _OTHERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    def do(job: Job) -> int:
        _import_other(str(ROOT / job.file), Path(job.other).read_bytes())
        return (_campaign if job.kind == "campaign" else _tests)(job.what)

    _serve(answers, do)


class _Living:
    """Jobs of a process that has imported all and collected the tests."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._program = Living(ROOT / "emu")

    def serve(self, folders: Sequence[str]) -> None:
        """Import, then take jobs."""
        with self._program.watched():
            for name in _modules_of(ROOT / "emu"):
                importlib.import_module(name)
            if folders:
                plugins = [self, _Telling(), _Unshrunk()]
                pytest.main([*_OPTIONS, *folders], plugins=plugins)
            else:
                self._take(lambda _: 5)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of the tests."""
        self._take(lambda what: _chosen(session, what))
        return True

    def _take(self, tests: Callable[[list[str]], int]) -> None:
        sys.setprofile(None)
        self._program.find()

        def do(job: Job) -> int:
            path, text = ROOT / job.file, Path(job.other).read_bytes()
            if not self._program.swap(str(path), path.read_bytes(), text):
                return _ANEW
            return _campaign(job.what) if job.kind == "campaign" else tests(job.what)

        _serve(self._answers, do)


def _modules_of(package: Path) -> list[str]:
    names = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def _chosen(session: pytest.Session, what: Sequence[str]) -> int:
    """Run some of the tests that were collected until one fails, in the order asked for."""
    by_name: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        by_name.setdefault(item.nodeid, []).append(item)
        if item.get_closest_marker("slow") is None:
            for place in (item.location[0], *map(str, Path(item.location[0]).parents)):
                by_name.setdefault(place, []).append(item)
    chosen = [item for name in what for item in by_name.get(name.rstrip("/"), ())]
    if not chosen:
        print(f"{_UNKNOWN}: {what[:3]}")
        return 4
    session.config.option.maxfail = 1
    hook = session.config.hook
    for item, following in zip(chosen, [*chosen[1:], None], strict=True):
        hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            break
    hook.pytest_sessionfinish(session=session, exitstatus=int(bool(session.testsfailed)))
    return int(bool(session.testsfailed))


def main() -> int:
    """One of the two servers."""
    server, *folders = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed while tests are collected is no answer
    if server == "anew":
        _serve_anew(answers)
    else:
        _Living(answers).serve(folders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
