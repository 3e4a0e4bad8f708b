"""Which module of emu uses which: what a build has to know when one of its sources was edited.

Compiled code calls the functions and knows the layout of the objects of the modules that it uses,
also of those that it knows by name in an annotation only. So a module that is not compiled leaves
none of its users compiled. `setup.py` writes the graph, `compiled.py` reads it. Imports nothing of
emu, because `setup.py` executes this file.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SEALED: Final = "sealed "
"""Before the name of a compiled module with a class that another module derives from."""


def graph_of(modules: Mapping[str, Path], compiled: Collection[str]) -> dict[str, list[str]]:
    """Which of `modules` each of them uses."""
    return {name: used_by(path, modules, compiled) for name, path in modules.items()}


def used_by(path: Path, modules: Collection[str], compiled: Collection[str]) -> list[str]:
    """Those of `modules` that a source imports, anywhere and for whatever reason.

    A compiled module with a class that the source derives from is in the list a second time as
    sealed, unless that class takes subclasses in Python.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    homes: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules:
                    found.add(inner)
                elif node.module in modules:
                    found.add(node.module)
                    homes[alias.asname or alias.name] = (node.module, alias.name)
    bases = {
        homes[name]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for name in map(_plain_name, node.bases)
        if name in homes and homes[name][0] in compiled
    }
    sealed = {f"{SEALED}{home}" for home, name in bases if not _takes_subclasses(home, name)}
    return sorted(found | sealed)


def _plain_name(base: ast.expr) -> str:
    """`Base` of `Base` and of `Base[T]`."""
    inner = base.value if isinstance(base, ast.Subscript) else base
    return inner.id if isinstance(inner, ast.Name) else ""


def _takes_subclasses(module: str, name: str) -> bool:
    """Whether a class may be derived from in Python although it is compiled."""
    tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return any(
                "allow_interpreted_subclasses=True" in ast.unparse(given)
                for given in node.decorator_list
            )
    return True


def source_of(module: str) -> Path:
    """Where the source of a module is."""
    place = ROOT.joinpath(*module.split("."))
    package = place / "__init__.py"
    return package if package.exists() else place.with_suffix(".py")


def reached_from(compiled: Iterable[str], uses: Mapping[str, Sequence[str]]) -> list[str]:
    """All modules that the compiled ones use, and themselves: what a build depends on."""
    found: set[str] = set()
    ahead = list(compiled)
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += [other for other in uses[name] if not other.startswith(SEALED)]
    return sorted(found)


def affected(uses: Mapping[str, Sequence[str]], edited: Iterable[str]) -> set[str]:
    """The modules in `edited`, all that use one of them, and the sealed ones these derive from."""
    users: dict[str, list[str]] = {}
    for name, others in uses.items():
        for other in others:
            users.setdefault(other, []).append(name)
    found: set[str] = set()
    ahead = list(edited)
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            bases = [other for other in uses.get(name, ()) if other.startswith(SEALED)]
            ahead += [*users.get(name, ()), *(base.removeprefix(SEALED) for base in bases)]
    return found


def to_replace(directory: str, edited: Iterable[str], compiled: Collection[str]) -> set[str]:
    """Modules that have to run as pure Python because sources were edited after the build there."""
    uses: dict[str, list[str]] = json.loads((Path(directory) / "graph.json").read_text())
    for name in edited:
        source = source_of(name)
        with suppress(FileNotFoundError, SyntaxError):  # its import will tell
            uses[name] = used_by(source, uses.keys(), compiled)
    return affected(uses, edited)
