"""The compiled build: which modules it may hold, and that none is found among the sources."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from emu.process import archived, compiled, sources
from emu.process.compiled import CODE, beside

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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A package with a build of three modules, of which `middle` uses `low`, and `high` derives
    from a class of `middle` that takes no subclasses in Python; `apart` uses none of them."""
    package = tmp_path / "emu"
    shutil.copytree(ROOT / "emu" / "process", package / "process")
    shutil.copy(ROOT / "emu" / "__init__.py", package)
    texts = {
        "low": "LOW = 1\n",
        "middle": "from emu.low import LOW\nclass Base: ...\nclass Other: ...\n",
        "high": "from emu.middle import Base\nclass High(Base): ...\n",
        "apart": "APART = 1\n",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    place = Path(beside(str(tmp_path)))
    place.mkdir(parents=True)
    modules = {f"emu.{name}": package / f"{name}.py" for name in texts}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "ROOT", tmp_path)
        uses = sources.graph_of(modules, modules)
    (place / "graph.json").write_text(json.dumps(uses))
    lines = []
    for name, path in modules.items():
        facts = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        at = str(path.relative_to(tmp_path))
        lines.append(f"{name}\t{at}\t1\t{facts.st_mtime_ns}\t{facts.st_size}\t{digest}\n")
    (place / "modules.txt").write_text("".join(lines))
    return tmp_path


def what_runs(checkout: Path, compiled: str = "auto") -> str:
    """What `import emu` takes of the build, and the line that tells of edited sources."""
    code = "import emu; from emu.process.compiled import build; b = build(); print(b, b.notice())"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=checkout,
        env={"PYTHONPATH": str(checkout), "EMU_COMPILE": compiled},
        capture_output=True,
        text=True,
    )
    return (done.stdout or done.stderr).strip()


def test_a_checkout_runs_its_build(checkout: Path) -> None:
    assert what_runs(checkout) == what_runs(checkout, "1") == "compiled (4 modules)"
    assert what_runs(checkout, "0") == "pure Python"


def test_an_edited_module_and_its_users_run_as_they_stand(checkout: Path) -> None:
    (checkout / "emu" / "low.py").write_text("LOW = 2\n")
    assert what_runs(checkout).startswith(
        "compiled (1 of 4 modules; pure Python: emu.low, emu.middle, emu.high)"
        " emu/low.py was edited since the build: 3 of 4"
    )
    assert what_runs(checkout, "1").startswith("EMU_COMPILE=1, but emu/low.py was edited")


def test_a_module_that_takes_no_subclasses_goes_with_those_that_derive_from_it(
    checkout: Path,
) -> None:
    with (checkout / "emu" / "high.py").open("a") as source:
        source.write("# a remark\n")
    assert "pure Python: emu.middle, emu.high)" in what_runs(checkout)


def test_what_an_edited_source_derives_from_is_read_in_that_source(checkout: Path) -> None:
    source = "from emu.middle import Other\nclass Apart(Other): ...\n"
    (checkout / "emu" / "apart.py").write_text(source)
    assert "pure Python: emu.middle, emu.high, emu.apart)" in what_runs(checkout)
    (checkout / "emu" / "apart.py").write_text("if\n")
    assert "pure Python: emu.apart)" in what_runs(checkout)
    (checkout / "emu" / "apart.py").unlink()
    assert "pure Python: emu.apart)" in what_runs(checkout)


def test_a_source_that_was_only_touched_stays_compiled(checkout: Path) -> None:
    os.utime(checkout / "emu" / "low.py", ns=(1, 1))
    assert what_runs(checkout) == "compiled (4 modules)"


def test_no_build_is_no_error_unless_it_was_asked_for(checkout: Path) -> None:
    shutil.rmtree(checkout / "build")
    assert what_runs(checkout) == "pure Python"
    assert (
        what_runs(checkout, "1")
        == "EMU_COMPILE=1, but no compiled build is installed (make compile)"
    )


def test_a_wheel_names_what_it_has_beside_its_sources(checkout: Path) -> None:
    shutil.rmtree(checkout / "build")
    (checkout / "emu" / "build.json").write_text('{"compiled": ["emu.low", "emu.apart"]}')
    assert what_runs(checkout) == "compiled (2 modules)"
    assert what_runs(checkout, "0") == "pure Python"


@pytest.fixture
def archive(checkout: Path) -> Path:
    """The checkout, whose build has none of its modules compiled: their code is in the archive."""
    place = Path(beside(str(checkout)))
    for name in ("modules.txt", "graph.json"):
        (place / name).write_text("" if name == "modules.txt" else "{}")
    package = checkout / "emu" / "pack" / "__init__.py"
    package.parent.mkdir()
    package.write_text("from emu.low import LOW\n")
    modules = {"emu.low": str(checkout / "emu" / "low.py"), "emu.pack": str(package)}
    archived.write(str(place / CODE), str(checkout), modules)
    return checkout


def what_is_low(checkout: Path, *options: str) -> str:
    """What two modules say, and which loader brought them."""
    code = (
        "import emu.pack, emu.low; print(emu.pack.LOW, emu.low.__file__, "
        "*(type(m.__spec__.loader).__name__ for m in (emu.pack, emu.low)), *emu.pack.__path__)"
    )
    done = subprocess.run(
        [sys.executable, *options, "-S", "-c", code],
        cwd=checkout,
        env={"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    return (done.stdout or done.stderr).strip().replace(f"{checkout}{os.sep}", "")


def test_code_of_python_modules_comes_out_of_the_archive(archive: Path) -> None:
    assert what_is_low(archive) == "1 emu/low.py _Loader _Loader emu/pack"


def test_a_source_that_was_edited_is_read_itself(archive: Path) -> None:
    (archive / "emu" / "low.py").write_text("LOW = 2\n")
    assert what_is_low(archive) == "2 emu/low.py _Loader SourceFileLoader emu/pack"
    assert what_is_low(archive, "-O").startswith("2 emu/low.py SourceFileLoader SourceFile")
    file = Path(beside(str(archive)), CODE)
    before = file.read_bytes()
    sources_of = {name: str(archive / "emu" / f"{name}.py") for name in ("low", "apart")}
    archived.write(str(file), str(archive), {f"emu.{n}": path for n, path in sources_of.items()})
    assert file.read_bytes() != before
    assert what_is_low(archive) == "2 emu/low.py SourceFileLoader _Loader emu/pack"


def test_an_archive_is_of_the_checkout_that_made_it(archive: Path, tmp_path: Path) -> None:
    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    shutil.copytree(archive, moved)  # with the times of the sources
    (archive / "emu" / "low.py").write_text("LOW = 3\n")
    assert what_is_low(moved) == "1 emu/low.py SourceFileLoader SourceFileLoader emu/pack"


def test_a_build_says_why_it_cannot_be_compiled() -> None:
    """`EMU_COMPILE=1` without a compiler is an error in a line; `auto` goes on without."""
    command = [sys.executable, str(ROOT / "setup.py"), "compile"]
    env = {"PATH": "/nonexistent", "CC": "no-such-compiler"}
    done = subprocess.run(command, cwd=ROOT, env={**env, "EMU_COMPILE": "1"}, capture_output=True)
    assert done.returncode == 1
    assert b"there is no C compiler (no-such-compiler)" in done.stderr
    done = subprocess.run(
        command, cwd=ROOT, env={**env, "EMU_COMPILE": "auto"}, capture_output=True
    )
    assert done.returncode == 0
    assert b"emu runs as pure Python, because" in done.stderr
    done = subprocess.run(
        command, cwd=ROOT, env={**env, "EMU_COMPILE": "maybe"}, capture_output=True
    )
    assert done.returncode == 1


def test_a_build_of_an_earlier_layout_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extension for each module: none of them is in the one that is looked for now."""
    place = Path(beside(str(tmp_path)))
    (place / "emu" / "kernel").mkdir(parents=True)
    (place / "modules.txt").write_text("emu.units\temu/units.py\t1\t0\t0\t-\n")
    monkeypatch.setattr(compiled, "PACKAGE", str(tmp_path / "emu"))
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setenv("EMU_COMPILE", "")
    compiled.take()
    assert not sys.meta_path
