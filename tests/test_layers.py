"""Imports point one way: each package imports only from packages before it in ORDER.

Lazy and type-only imports count, and there is no exception.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.sources import nodes

ROOT = Path(__file__).resolve().parents[1] / "emu"

ORDER = (
    *("errors", "documents", "log", "units", "rng", "plugins", "request", "policy", "process"),
    *(
        "kernel",
        "config",
        "options",
        "catalogue",
        "workload",
        "network",
        "kv",
        "routing",
        "latency",
    ),
    *(
        "scheduling",
        "features",
        "engines",
        "backends",
        "replica",
        "migration",
        "autoscale",
        "faults",
        "report",
        "cluster",
    ),
    *("world", "runs", "testing", "api", "apps", "lab", "cli", "entry", "__init__", "__main__"),
)
TOP_LEVEL_MODULES_MAX = 11


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("emu."):
            found.append((node.lineno, node.module.split(".")[1]))
        elif isinstance(node, ast.ImportFrom) and node.module == "emu":
            found += [
                (node.lineno, alias.name) for alias in node.names if (ROOT / alias.name).exists()
            ]
        elif isinstance(node, ast.Import):
            found += [
                (node.lineno, alias.name.split(".")[1])
                for alias in node.names
                if alias.name.startswith("emu.")
            ]
    return found


FILES = sorted(ROOT.rglob("*.py"))


def test_every_package_has_a_place_in_the_order() -> None:
    assert {package_of(path) for path in FILES} == set(ORDER)


def test_imports_point_one_way() -> None:
    for path in FILES:
        package = package_of(path)
        for line, target in imports_of(path):
            assert ORDER.index(target) <= ORDER.index(package), (
                f"{path}:{line}: {package} imports {target}"
            )


SHARED = ("shared",)
"""Parts of emu.apps that several applications use."""
BRIDGES: set[tuple[str, str]] = set()
"""Applications that still import another one: this set only shrinks."""


def test_each_application_is_an_island() -> None:
    found = set()
    for path in sorted((ROOT / "apps").rglob("*.py")):
        own = path.relative_to(ROOT / "apps").parts[0].removesuffix(".py")
        for name in re.findall(r"\bemu\.apps\.(\w+)", path.read_text(encoding="utf-8")):
            if name not in (own, *SHARED):
                found.add((own, name))
    assert found == BRIDGES


def test_few_modules_stand_at_the_top() -> None:
    assert len(list(ROOT.glob("*.py"))) <= TOP_LEVEL_MODULES_MAX


def test_the_page_on_architecture_gives_the_same_order() -> None:
    page = (ROOT.parent / "docs" / "lab" / "architecture.md").read_text(encoding="utf-8")
    row = re.search(r"^Order of packages: (.*?)$^$", page, re.MULTILINE | re.DOTALL)
    assert row is not None
    assert " ".join(row.group(1).split()) == ", ".join(
        f"`{name}`" for name in ORDER if not name.startswith("__")
    )


# --- modules --------------------------------------------------------------------------------------
def module_graph() -> dict[str, set[str]]:
    """Imports between modules of emu, lazy and type-only ones included."""
    names = {}
    for path in FILES:
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.add(inner if inner in names else node.module)
        graph[name] = {other for other in found if other in names and other != name}
    return graph


def cycles(graph: dict[str, set[str]]) -> set[str]:
    """Groups of modules each of which reaches all others of its group."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for other in graph[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    reach = {name: reached(name) for name in graph}
    in_cycle = [name for name in sorted(graph) if name in reach[name]]
    return {
        " ".join(other for other in in_cycle if other in reach[name] and name in reach[other])
        for name in in_cycle
    }


def test_no_modules_import_each_other() -> None:
    """Types included: a group of modules that need each other is one module."""
    assert cycles(module_graph()) == set()


def test_a_cycle_is_seen() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert cycles(graph) == {"a b c"}
