"""A process in which one file of the program reads differently; nothing is copied.

    python -m tests.patched emu/units.py /tmp/other.py campaign 300
    python -m tests.patched emu/units.py /tmp/other.py tests tests/kernel

The importer compiles the other text wherever that file is asked for. `campaign` runs worlds until
one fails and prints what it found, with exit status 4; `tests` runs the fast tests of a folder until
one fails. Programs that a test starts read the file as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]


def found_by(file: str, text: bytes, job: str, what: str, limit_s: float | None = None) -> str:
    """The first finding of a job where `file`, below the root, has this text; empty = nothing.

    `job` is `campaign` with a number of seeds, or `tests` with a folder.
    """
    with tempfile.TemporaryDirectory(prefix="emu-patched-") as directory:
        other = Path(directory) / "other.py"
        other.write_bytes(text)
        call = [sys.executable, "-m", "tests.patched", file, str(other), job, what]
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                call,
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "hangs"
    if done.returncode == 0:
        return ""
    lines = (done.stdout + done.stderr).splitlines()
    told = [line for line in lines if line.startswith(("FAILED", "ERROR", "seed"))] or lines[-1:]
    return (told or ["no word"])[0][:160]


def _patch(file: Path, other: Path) -> None:
    path, text = str(file), other.read_bytes()
    as_it_is = SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        if self.path != path:
            return as_it_is(self, fullname)
        return compile(text, path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _campaign(seeds: int) -> int:
    from emu.apps.chaos.trial import run_world
    from emu.apps.chaos.worlds.world import draw_world

    for seed in range(seeds):
        verdict = run_world(draw_world(seed), seed)
        if verdict.problems:
            print(f"seed {seed}: {verdict.problems[0]}")
            return 4
    return 0


def main() -> int:
    file, other, job, what = sys.argv[1:]
    _patch(ROOT / file, Path(other))
    if job == "campaign":
        return _campaign(int(what))
    import pytest

    options = ("-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "--no-header")
    return int(pytest.main([*options, what]))


if __name__ == "__main__":
    sys.exit(main())
