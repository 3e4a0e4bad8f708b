"""Processes in which one file of the program reads differently; nothing is copied.

    with Patched() as patched:
        found = patched.found_by("emu/units.py", text, "campaign", ["0", "7"])
        found = patched.found_by("emu/units.py", text, "tests", ["tests/kernel"])

A server imports what the program and its tests need of others and forks a process for each job,
whose importer compiles the other text wherever that file is asked for. `campaign` runs worlds until
one fails and tells what it found; `tests` runs tests until one fails. Programs that a test starts
read the file as it is. A job that takes more CPU time than it may hangs: that is found, too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
LIMIT_S: Final = 300
"""CPU time of a job."""
_OTHERS: Final = (
    *("numpy", "msgspec", "anyio", "pytest", "hypothesis", "_pytest.pytester", "pytest_timeout"),
    *("xdist", "httpx", "asyncio", "xml.dom", "rich.table", "email", "http.client"),
)


class Patched:
    """The server, for so many jobs as are asked of it."""

    def __enter__(self) -> Patched:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.patched"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def found_by(
        self, file: str, text: bytes, job: str, what: Sequence[str], limit_s: int = LIMIT_S
    ) -> str:
        """The first finding of a job where `file`, below the root, has this text; empty = nothing.

        `job` is `campaign` with seeds, or `tests` with options, folders and tests.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.TemporaryDirectory(prefix="emu-patched-") as directory:
            other = Path(directory) / "other.py"
            other.write_bytes(text)
            asked = [file, str(other), job, list(what), limit_s]
            self._server.stdin.write(json.dumps(asked) + "\n")
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
            status, output = json.loads(answer)
        if status == 0:
            return ""
        if status == -signal.SIGXCPU:
            return "hangs"
        lines = output.splitlines()
        told = [line for line in lines if line.startswith(("FAILED", "ERROR", "seed"))]
        return (told or lines[-1:] or ["no word"])[0][:160]


def _patch(file: Path, other: Path) -> None:
    path, text = str(file), other.read_bytes()
    as_it_is = SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        if self.path != path:
            return as_it_is(self, fullname)
        return compile(text, path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _campaign(seeds: Sequence[str]) -> int:
    from emu.apps.chaos.trial import run_world
    from emu.apps.chaos.worlds.world import draw_world

    for seed in map(int, seeds):
        verdict = run_world(draw_world(seed), seed)
        if verdict.problems:
            print(f"seed {seed}: {verdict.problems[0]}")
            return 4
    return 0


def _tests(what: Sequence[str]) -> int:
    import pytest

    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header")
    loaded = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins, by the server
    return int(pytest.main([*options, *loaded, *what]))


def _do(file: str, other: str, job: str, what: Sequence[str], limit_s: int, output: int) -> int:
    """In the process of a job."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
    os.dup2(output, 1)
    os.dup2(output, 2)
    _patch(ROOT / file, Path(other))
    return (_campaign if job == "campaign" else _tests)(what)


def main() -> int:
    """The server: a job in a line of JSON, an answer in a line."""
    for name in _OTHERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        file, other, job, what, limit_s = json.loads(line)
        with tempfile.TemporaryFile("w+b") as output:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    status = _do(file, other, job, what, limit_s, output.fileno())
                except BaseException as error:
                    print(f"ERROR {type(error).__name__}: {error}")
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            _, ended = os.waitpid(child, 0)
            output.seek(0)
            told = output.read().decode("utf-8", "replace")
        print(json.dumps([os.waitstatus_to_exitcode(ended), told[-4000:]]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
