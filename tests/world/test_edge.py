"""Applications compose the core at its edge: none inherits from it, few reach behind the edge."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.sources import parsed

ROOT = Path(__file__).resolve().parents[2] / "emu"
ABOVE = ("apps", "lab")
MADE_TO_INHERIT = {
    "emu.world.Observer",
    "emu.scheduling.running.RunningSet",  # the laboratory runs another simulator's order
}
"""Bases and protocols of the core that are made for what stands above it, beside structs of options."""
BEHIND = {"backends", "commands", "plan", "prepare"}
"""Modules of emu.cluster that applications may name: values and facts before a world is built."""


def imported(tree: ast.Module) -> dict[str, str]:
    """Names that a module imports from emu, as `module.name`."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("emu")
        for alias in node.names
    }


def trees() -> Iterator[tuple[str, ast.Module]]:
    for floor in ABOVE:
        for path in sorted((ROOT / floor).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            yield name, parsed(path)


def test_no_class_above_the_core_inherits_from_one_of_it() -> None:
    found: dict[str, list[str]] = {}
    for name, tree in trees():
        names = imported(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                inner = base.value if isinstance(base, ast.Subscript) else base
                origin = names.get(ast.unparse(inner), "")
                if origin and origin.split(".")[1] not in (*ABOVE, "options"):
                    found.setdefault(origin, []).append(f"{name}: {node.name}")
    assert {o: w for o, w in found.items() if o not in MADE_TO_INHERIT} == {}


def test_applications_know_the_cluster_by_its_edge() -> None:
    found = {
        (name, origin)
        for name, tree in trees()
        for origin in imported(tree).values()
        if origin.startswith("emu.cluster.") and origin.split(".")[2] not in BEHIND
    }
    assert found == set()
