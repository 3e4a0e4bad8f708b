"""The compiled build: which modules it may hold, and that none is found among the sources."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import builds

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def compiled_names() -> list[str]:
    found = re.search(r'COMPILED = """(.*?)"""', SETUP, re.DOTALL)
    assert found is not None
    return found[1].split()


@pytest.mark.parametrize("name", compiled_names())
def test_a_module_of_the_group_is_one_that_mypyc_builds_right(name: str) -> None:
    """No Struct (keywords of a class statement are dropped), nothing that is weakly referenced
    (an extension object would leave dangling references behind), no wait in a handler."""
    tree = ast.parse((ROOT / "emu" / f"{name}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            assert not any("Struct" in base or "Mapping" in base for base in bases), node.name
            assert not node.keywords, node.name
        if isinstance(node, ast.Import):
            assert "weakref" not in [alias.name for alias in node.names]
        if isinstance(node, ast.Try):
            parts = [*node.handlers, *node.finalbody]
            waits = [n for part in parts for n in ast.walk(part) if isinstance(n, ast.Await)]
            assert not waits, f"line {node.lineno}"


def test_the_group_is_listed_once_and_large() -> None:
    names = compiled_names()
    lines = [
        (ROOT / "emu" / f"{name}.py").read_text(encoding="utf-8").count("\n") for name in names
    ]
    assert len(names) == len(set(names))
    assert sum(lines) > 12_000


def test_a_checkout_has_no_extensions_among_its_sources() -> None:
    if importlib.util.find_spec("emu__mypyc"):
        pytest.skip("this is the compiled build")
    assert not list((ROOT / "emu").rglob("*.so"))


def test_an_edited_source_is_not_run_from_an_older_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "emu").mkdir()
    (tmp_path / "setup.py").write_text("")
    source = tmp_path / "emu" / "clock.py"
    source.write_text("now_ns = 1\n")
    monkeypatch.setattr(builds, "ROOT", tmp_path)
    monkeypatch.setattr(builds, "MARK", tmp_path / "mark")
    assert "make compile" in builds.status()
    builds.MARK.write_text(builds.sources_digest())
    assert "compiled" in builds.status()
    source.write_text("now_ns = 2\n")
    assert builds.status().startswith("build: pure Python")


def test_a_build_says_why_it_cannot_be_compiled() -> None:
    """`EMU_COMPILE=1` without a compiler is an error in a line; `auto` goes on without."""
    command = [sys.executable, str(ROOT / "setup.py"), "--version"]
    env = {"PATH": "/nonexistent", "CC": "no-such-compiler"}
    done = subprocess.run(command, cwd=ROOT, env={**env, "EMU_COMPILE": "1"}, capture_output=True)
    assert done.returncode == 1
    assert b"there is no C compiler (no-such-compiler)" in done.stderr
    done = subprocess.run(
        command, cwd=ROOT, env={**env, "EMU_COMPILE": "auto"}, capture_output=True
    )
    assert done.returncode == 0
    assert b"a pure Python build" in done.stderr
    done = subprocess.run(
        command, cwd=ROOT, env={**env, "EMU_COMPILE": "maybe"}, capture_output=True
    )
    assert done.returncode == 1
