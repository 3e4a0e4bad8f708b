"""Every module of emu is reached from a command, the Python API (`emu.testing`) or a configuration."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.sources import parsed

ROOT = Path(__file__).parents[1]
ENTRIES = ("emu", "emu.__main__", "emu.entry", "emu.cli", "emu.api", "emu.testing")


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "emu").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def named(tree: ast.AST, names: dict[str, Path]) -> set[str]:
    """Modules that a file imports, anywhere in it, or names in a string (`emu.x:Class`)."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            stem = str(node.values[0].value)  # f"emu.cli.{module}"
            if stem.startswith("emu."):
                found |= {name for name in names if name.startswith(stem)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.partition(":")[0])
    return with_parents(found, names)


def with_parents(found: set[str], names: dict[str, Path]) -> set[str]:
    parts = [name.split(".") for name in found if name.startswith("emu")]
    every = {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}
    return every & names.keys()


def unreached(names: dict[str, Path], entries: set[str]) -> list[str]:
    seen: set[str] = set()
    waiting = sorted(entries)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += named(parsed(names[name]), names)
    return sorted(names.keys() - seen)


def entries(names: dict[str, Path]) -> set[str]:
    """Commands, the API, and classes that a shipped configuration names."""
    found = {name for name in names if name in ENTRIES or name.startswith("emu.cli.")}
    found |= {name for name in names if name.endswith(".__main__")}
    for path in (ROOT / "configs").rglob("*.toml"):
        paths = re.findall(r'"(emu(?:\.\w+)+):\w+"', path.read_text(encoding="utf-8"))
        found |= with_parents(set(paths), names)
    return found


def test_no_module_is_reached_only_by_tests() -> None:
    names = modules()
    assert unreached(names, entries(names)) == []


def test_a_module_that_nothing_imports_is_found(tmp_path: Path) -> None:
    lonely = tmp_path / "lonely.py"
    lonely.write_text("import emu.units\n", encoding="utf-8")
    names = modules() | {"emu.lonely": lonely}
    assert unreached(names, entries(names)) == ["emu.lonely"]
