"""Source files of a user's own classes, found and checked without running them."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

from emu.errors import InputError

if TYPE_CHECKING:
    import ast
from emu.plugins.blame import FILES, module_file, told
from emu.plugins.named import OBJECTS, SUFFIX, are_forbidden


def sources(path: str) -> list[Path]:
    """Files that a class comes from, with what they import from beside them. Runs nothing.

    Empty for what has no source (a module in C, a class of a notebook).
    """
    module = path.rpartition(":")[0]
    if path in OBJECTS:
        place = module_file(OBJECTS[path].__module__)
        first = [Path(place)] if place and place.endswith(SUFFIX) else []
    elif module.endswith(SUFFIX):
        first = [Path(module)]
    else:
        first = _files_of(module)
    found: dict[Path, None] = {}
    waiting = [file.resolve() for file in first if file.is_file()]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += _imports_beside(file)
    return sorted(found)


def digest(path: str) -> str:
    """Digest of the sources of a class; of its methods' code where there is no file."""
    import hashlib

    whole = hashlib.sha256()
    for file in sources(path):
        whole.update(file.name.encode() + b"\0" + file.read_bytes())
    if path in OBJECTS:
        for name, member in sorted(vars(OBJECTS[path]).items()):
            if isinstance(member, FunctionType):
                code = member.__code__
                whole.update(f"{name}\0{code.co_consts!r}{code.co_names!r}".encode())
                whole.update(code.co_code)
            elif not name.startswith("__"):
                whole.update(f"{name}={member!r}".encode())
    return whole.hexdigest()


def _files_of(module: str) -> list[Path]:
    """Files that are run when a module is imported, packages first; those that can be found."""
    files: list[Path] = []
    places: list[str] | None = None
    parts = module.split(".")
    for index in range(len(parts)):
        name = ".".join(parts[: index + 1])
        try:
            spec = importlib.machinery.PathFinder.find_spec(name, places)
        except (ImportError, ValueError):
            break
        if spec is None:
            break
        if spec.origin and spec.origin.endswith(SUFFIX):
            files.append(Path(spec.origin))
        if spec.submodule_search_locations is None:
            break
        places = list(spec.submodule_search_locations)
    return files


def _imports_beside(file: Path) -> list[Path]:
    """Modules of the file's own folder (and packages there) that it imports."""
    import ast  # runs without classes of a user's own need no parser

    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
            names += [f"{node.module}.{a.name}" if node.module else a.name for a in node.names]
    found = []
    for name in names:
        place = file.parent.joinpath(*name.split("."))
        candidates = (place.with_suffix(SUFFIX), place / "__init__.py") if name else ()
        found += [candidate.resolve() for candidate in candidates if candidate.is_file()]
    return found


def is_plugin_file(name: str) -> bool:
    """Whether code of this file belongs to a class of a user's own."""
    return name in FILES


def find_plugin(path: str, key: str, source: str = "config") -> None:
    """Look for a class without running its code: is there a file, can it be read, has it the name?

    Raises InputError.
    """
    if are_forbidden():
        raise forbidden_error(path, key, source)
    if path in OBJECTS:
        return
    module, _, name = path.rpartition(":")
    is_file = module.endswith(SUFFIX)
    where = module if is_file else f"module {module!r}"
    if is_file and not Path(module).is_file():
        raise InputError(source, None, key, f"no such file: {module}")
    files = [Path(module)] if is_file else _files_of(module)
    if not files:
        if module.partition(".")[0] in {*sys.builtin_module_names, *sys.stdlib_module_names}:
            return  # of C: only an import can tell
        raise InputError(source, None, key, f"cannot import {module!r}: no such module")
    import ast

    try:
        body = ast.parse(files[-1].read_bytes(), str(files[-1])).body
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        problem = f"cannot import {where}: {told(error)}"
        raise InputError(source, None, key, problem) from None
    defined = _defined(body)
    if defined.get(name) is FunctionType:
        problem = f"{path} ({files[-1]}) is a function, expected a class"
        raise InputError(source, None, key, problem)
    if name not in defined and "*" not in defined:
        raise InputError(source, None, key, f"{where} has no {name!r}")


def _defined(body: Sequence[ast.stmt]) -> dict[str, object]:
    """Names that the statements of a module define, and what functions are."""
    import ast

    names: dict[str, object] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = type
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names[node.name] = FunctionType
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name, None) for alias in node.names)
        else:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    names[inner.id] = None
                elif isinstance(inner, (ast.ClassDef, ast.FunctionDef)):
                    names[inner.name] = None
    return names


def forbidden_error(path: str, key: str, source: str) -> InputError:
    return InputError(source, None, key, f"names the class {path}, which --no-plugins refuses")
