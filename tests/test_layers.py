"""Imports point one way, down the floors of the house (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "emu"

FLOORS = {
    0: [
        "actor",
        "digest",
        "ranks",
        "waiting",
        "wallclock",
        "request",
        "config",
        "catalogue",
        "errors",
        "interrupts",
        "inputs",
        "units",
        "rng",
        "plugins",
        "workers",
    ],
    1: ["batching", "kv", "routing", "latency", "network", "astra", "workload"],
    2: ["replica", "migration"],
    3: ["autoscale", "commands"],
    4: [
        "cluster",
        "building",
        "books",
        "chaos",
        "faults",
        "report",
        "gateway",
        "plan",
        "kvtiers",
        "energy",
        "recording",
        "scaling",
        "tracing",
        "runner",
        "validate",
        "api",
        "progress",
        "terminal",
        "tables",
        "importers",
        "profiler",
        "calibrate",
        "batchfiles",
        "reproduce",
    ],
    5: [
        "cli",
        "exits",
        "entry",
        "serve",
        "sweep",
        "__main__",
        "__init__",
        "docs",
        "experiments",
    ],
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}


def room_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("emu."):
            found.append((node.lineno, node.module.split(".")[1]))
        elif isinstance(node, ast.Import):
            found += [
                (node.lineno, alias.name.split(".")[1])
                for alias in node.names
                if alias.name.startswith("emu.")
            ]
    return found


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in FLOOR_OF, f"{room} stands on no floor: add it to FLOORS"
    for line, target in imports_of(path):
        assert target in FLOOR_OF, f"{path}:{line}: {target} stands on no floor"
        assert FLOOR_OF[target] <= FLOOR_OF[room], (
            f"{path}:{line}: floor {FLOOR_OF[room]} imports {target} of floor {FLOOR_OF[target]}"
        )


def test_nothing_imports_the_command_line() -> None:
    for path in FILES:
        if room_of(path) in ("__main__", "cli", "docs", "entry"):
            continue
        assert all(target != "cli" for _, target in imports_of(path)), path


def test_the_page_names_every_room_on_its_floor() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| ([^|]*) \|", page, re.MULTILINE)
    named = {
        (int(floor), room.removesuffix("/").removesuffix(".py"))
        for floor, rooms in rows
        for room in re.findall(r"`([^`]+)`", rooms)
    }
    assert named == {(floor, room) for room, floor in FLOOR_OF.items() if not room.startswith("__")}
