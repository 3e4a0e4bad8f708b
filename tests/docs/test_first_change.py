"""docs/first-change.md is true: its change is made in a copy of the repository and checked there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "first-change.md"
QUIET = ("-q", "-p", "no:cacheprovider")
PARTS = ("emu", "tests", "docs", "configs", "pyproject.toml", "mkdocs.yml", "README.md")


def blocks(language: str) -> list[str]:
    """What the page shows in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)


def copy(folder: Path) -> None:
    """The repository, without what is made and what is large."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.svg", "*.png", "corpus", "golden*")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=ignored)
        else:
            shutil.copy(source, folder / part)


def told(folder: Path, *arguments: str) -> str:
    """What a command in the copy says; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with the three files of the page."""
    folder = tmp_path_factory.mktemp("change")
    copy(folder)
    (diff,) = blocks("diff")
    patch = ["git", "apply", "--whitespace=nowarn", "-"]
    subprocess.run(patch, input=diff, cwd=folder, text=True, check=True)
    module, test = blocks("python")
    (folder / "emu/routing/sticky.py").write_text(module, "utf-8")
    (folder / "tests/routing/test_sticky.py").write_text(test, "utf-8")
    return folder


def test_the_change_is_three_files_and_its_test_passes(changed: Path) -> None:
    tests = [
        *("tests/routing/test_sticky.py", "tests/routing/test_policies.py"),
        *("tests/config/test_kinds.py", "tests/config/test_bad_config.py"),
    ]
    assert "failed" not in told(changed, "pytest", *QUIET, "-x", "-m", "not slow", *tests)
    assert "ruff" not in told(changed, "ruff", "check", "emu/routing", "tests/routing")
    told(changed, "ruff", "format", "--check", "emu/routing", "emu/config", "tests/routing")


def test_the_new_router_is_in_every_list(changed: Path) -> None:
    stale = subprocess.run(
        [sys.executable, "-m", "pytest", *QUIET, "tests/config/test_docs.py"],
        cwd=changed,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert stale.returncode == 1, "the reference is of before"
    told(changed, "emu.cli.docs")
    told(changed, "pytest", *QUIET, "tests/config/test_docs.py")
    page = (changed / "docs/reference/config.md").read_text("utf-8")
    assert 'with `policy = "sticky"`' in page and "`spill_requests`" in page
    code = (
        "from emu.config.load import config_from_dict\n"
        "from emu.apps.chaos.worlds.world import draw_world\n"
        "worlds = [draw_world(seed).tables for seed in range(120)]\n"
        "names = {tables['router'].get('policy', '') for tables in worlds if 'router' in tables}\n"
        "print(sorted(names))\n"
        "config_from_dict({'router': {'policy': 'stiky'}})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=changed,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "'sticky'" in done.stdout
    assert "did you mean sticky?" in done.stderr


@pytest.mark.nightly
def test_the_types_are_right_and_the_rules_of_the_house_hold(changed: Path) -> None:
    house = ("tests/test_layers.py", "tests/docs/test_docstrings.py")
    assert "failed" not in told(changed, "pytest", *QUIET, "-x", *house)
    told(changed, "mypy", "--strict", "emu/routing/sticky.py", "tests/routing/test_sticky.py")
