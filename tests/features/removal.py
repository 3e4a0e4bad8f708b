"""A copy of the program without one feature, looked at.

    python -m tests.features.removal NAME [--whole]

Copies the tree, removes the module, its line, its tests and the files that it lists, writes the
generated pages anew (prose that names such a file names the quick-start), and runs mypy and a
sample of the tests there (`--whole`: all of them). What it removes is all that names the feature, or one of these fails.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from emu.config.features import FEATURES

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("emu", "tests", "docs", "configs", "benchmarks", "deploy")
SAMPLE = (
    *("tests/features", "tests/config", "tests/test_layers.py", "tests/scheduling"),
    *("tests/docs/test_docs.py", "tests/routing", "tests/cli/test_entry.py"),
)
_QUIET = ("-q", "-x", "-p", "no:cacheprovider")
NAMES = tuple(line.rpartition(".")[2] for line in FEATURES)


def without(name: str, copy: Path) -> None:
    """The tree without a feature, at `copy`."""
    feature = importlib.import_module(f"emu.features.{name}").FEATURE
    copy.mkdir(parents=True, exist_ok=True)
    for folder in COPIED:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy / path.name)
    package = copy / "emu" / "features" / name
    if package.is_dir():
        shutil.rmtree(package)
    else:
        package.with_suffix(".py").unlink()
    registry = copy / "emu" / "config" / "features.py"
    text = registry.read_text(encoding="utf-8")
    line = f'    "emu.features.{name}",\n'
    assert text.count(line) == 1
    registry.write_text(text.replace(line, ""), encoding="utf-8")
    setup = copy / "setup.py"  # its modules in the compiled group
    modules = setup.read_text(encoding="utf-8")
    setup.write_text(re.sub(rf" ?features/{name}/\w+", "", modules), encoding="utf-8")
    for path in [*(copy / "tests" / "features").glob(f"test_*{name}*.py")]:
        path.unlink()
    for listed in feature.files:
        (copy / listed).unlink()
        for page in [*copy.glob("*.md"), *(copy / "docs").rglob("*.md")]:
            prose = page.read_text(encoding="utf-8")
            page.write_text(prose.replace(listed, "configs/quickstart.toml"), encoding="utf-8")


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of Python in the copy, which sees no other `emu`."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["EMU_COMPILE"] = "0"  # a copy of sources, whatever runs this
    return subprocess.run(
        [sys.executable, *command],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def failing(copy: Path, tests: tuple[str, ...]) -> str:
    """What these tests, but the slow ones, say in a copy; empty if they pass."""
    done = run(copy, "-m", "pytest", *_QUIET, "-m", "not slow", *tests)
    return f"{done.stdout[-3000:]}{done.stderr[-2000:]}" if done.returncode else ""


def problems(copy: Path, tests: tuple[str, ...]) -> str:
    """What fails in a copy; empty if nothing does."""
    steps: list[tuple[str, ...]] = [("-m", "emu.cli.docs")]
    steps.append(("-m", "mypy", "--cache-dir", str(copy / ".mypy")))
    configs = sorted((copy / "configs").glob("*.toml"))
    steps += [
        ("-m", "emu", "validate", str(config))
        for config in configs
        if not config.name.startswith("sweep")
    ]
    for step in steps:
        done = run(copy, *step)
        if done.returncode:
            return f"{' '.join(step)}\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    return failing(copy, tests)


def main() -> int:
    """Remove one feature and look; 1 if something fails."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        without(options.name, copy)
        found = problems(copy, ("tests",) if options.whole else SAMPLE)
    print(found or f"{options.name}: nothing else needs it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
