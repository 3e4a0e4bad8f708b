"""Imports point one way: each package imports only from packages before it in ORDER.

Lazy and type-only imports count. EXCEPTIONS are the pairs that still point up; the list may only
shrink: a pair that is no longer needed fails the test until it is struck off.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "emu"

ORDER = (
    *("errors", "log", "units", "rng", "plugins", "request", "policy", "process"),
    *("kernel", "config", "catalogue", "workload", "network", "kv", "routing", "latency", "astra"),
    *("scheduling", "replica", "migration", "autoscale", "faults", "cluster", "report", "runs"),
    *(
        "api",
        "serve",
        "chaos",
        "sweeps",
        "sizing",
        "whatif",
        "tools",
        "learn",
        "fidelity",
        "cli",
        "entry",
        "__init__",
        "__main__",
    ),
)
EXCEPTIONS = {
    ("astra", "scheduling"),
    ("cluster", "report"),
    ("latency", "astra"),
}
TOP_LEVEL_MODULES_MAX = 10


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    up = set()
    for path in FILES:
        package = package_of(path)
        for line, target in imports_of(path):
            if ORDER.index(target) > ORDER.index(package):
                up.add((package, target))
                assert (package, target) in EXCEPTIONS, f"{path}:{line}: {package} imports {target}"
    assert up == EXCEPTIONS, f"no longer needed: {sorted(EXCEPTIONS - up)}"


def test_few_modules_stand_at_the_top() -> None:
    assert len(list(ROOT.glob("*.py"))) <= TOP_LEVEL_MODULES_MAX


def test_the_page_on_architecture_gives_the_same_order() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    row = re.search(r"^Order of packages: (.*)$", page, re.MULTILINE)
    assert row is not None
    assert row.group(1) == ", ".join(f"`{name}`" for name in ORDER if not name.startswith("__"))


# --- modules --------------------------------------------------------------------------------------
CYCLES = frozenset(
    {
        "emu.astra.factory emu.latency.registry",
        "emu.astra.parity emu.astra.parity_replica",
        "emu.astra.pim emu.astra.rows",
        "emu.cli emu.cli.start",
        "emu.cluster.audit emu.cluster.build emu.cluster.cluster emu.cluster.insight"
        " emu.cluster.pool emu.cluster.recorder emu.cluster.scaling emu.cluster.sharing"
        " emu.cluster.stall",
        "emu.cluster.kv_tiers emu.cluster.plan",
        "emu.kernel.actor emu.kernel.clock",
        "emu.learn.command emu.learn.live",
        "emu.network.collectives emu.network.congestion",
        "emu.replica.actions emu.replica.ports emu.replica.prerequisites"
        " emu.replica.relay_board emu.replica.replica",
        "emu.sweeps.drive emu.sweeps.pareto",
    }
)
"""Modules that import each other, types included; the list may only shrink."""


def module_graph() -> dict[str, set[str]]:
    """Imports between modules of emu, lazy and type-only ones included."""
    names = {}
    for path in FILES:
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    found = cycles(module_graph())
    assert found - CYCLES == set()
    assert CYCLES - found == set(), "no longer cycles: strike them off"
