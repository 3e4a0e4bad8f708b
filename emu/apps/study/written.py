"""Classes of a notebook or a script as files: other processes, and other people, then have them.

    path = written_class(Mine, Path("runs/study/classes"))     # .../Mine.py:Mine

The file holds the class and what it names: functions, classes and constants from beside it, and
imports. A class of a module that can be imported keeps its name.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

from emu.documents import Document, DocumentView
from emu.errors import InputError
from emu.report.atomic import write_text

_PLAIN: Final = (bool, int, float, str, bytes, type(None))
_HEAD: Final = '"""Written by emu.study from where it was defined."""\n\n'


def written_class(found: type, directory: Path) -> str:
    """The class as `file.py:Class` (or `module:Class` where that can be imported).

    Raises InputError for a class that uses what cannot be written down.
    """
    module = sys.modules.get(found.__module__)
    if (
        found.__module__ != "__main__"
        and module is not None
        and "<locals>" not in found.__qualname__
    ):
        return f"{found.__module__}:{found.__qualname__}"
    path = directory / f"{found.__name__}.py"
    directory.mkdir(parents=True, exist_ok=True)
    write_text(path, source_of(found))
    return f"{path.resolve()}:{found.__name__}"


def source_of(found: type) -> str:
    """A module that holds the class alone. Raises InputError."""
    imports: dict[str, None] = {}
    definitions: dict[str, str] = {}
    _write(found, found.__name__, imports, definitions, str(found.__qualname__))
    lines = [*imports, *([""] if imports else []), *definitions.values()]
    return _HEAD + "\n".join(lines) + "\n"


def _write(
    value: Any, name: str, imports: dict[str, None], definitions: dict[str, str], owner: str
) -> None:
    """Write down one name, after all that it needs itself."""
    if name in definitions:
        return
    if isinstance(value, types.ModuleType):
        imports[f"import {value.__name__} as {name}"] = None
        return
    home = getattr(value, "__module__", None)
    if isinstance(value, (type, FunctionType)):
        if home not in (None, "__main__") and "<locals>" not in value.__qualname__:
            imports[f"from {home} import {value.__qualname__} as {name}"] = None
            return
        definitions[name] = ""  # it may name itself
        text = _text_of(value, owner)
        for used, inner in _used(value, text, owner):
            _write(inner, used, imports, definitions, owner)
        del definitions[name]
        definitions[name] = text + "\n"
        return
    if not _is_plain(value):
        problem = f"uses {name}, {type(value).__name__}; put the class into a file of its own"
        raise InputError("study", None, owner, problem)
    definitions[name] = f"{name} = {value!r}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    return isinstance(value, _PLAIN)


def _functions(value: type | FunctionType) -> list[FunctionType]:
    """The functions that a definition holds."""
    if isinstance(value, FunctionType):
        return [value]
    found = []
    for member in vars(value).values():
        inner = member.fget if isinstance(member, property) else member
        inner = inner.__func__ if isinstance(inner, (staticmethod, classmethod)) else inner
        if isinstance(inner, FunctionType):
            found.append(inner)
    return found


def _text_of(value: type | FunctionType, owner: str) -> str:
    """The lines of a definition, from its file or from the cell of a notebook."""
    codes = [function.__code__ for function in _functions(value)]
    first = {code.co_firstlineno for code in codes}
    # A class without functions does not say where it was written: the last that is called so.
    files = [code.co_filename for code in codes] or [_script(), *reversed(linecache.cache)]
    for file in dict.fromkeys(files):
        lines = linecache.getlines(file)
        for node in reversed(_definitions(lines, value.__name__)):
            start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            end = node.end_lineno or start
            if not first or any(start <= line <= end for line in first):
                return _outdented(lines[start - 1 : end])
    raise InputError("study", None, owner, "its source cannot be found; put it into a file")


def _script() -> str:
    """The file of the program, if it has one."""
    return str(vars(sys.modules["__main__"]).get("__file__") or "")


def _definitions(lines: list[str], name: str) -> list[ast.ClassDef | ast.FunctionDef]:
    """Classes and functions of that name in a source."""
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return []
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]


def _outdented(lines: list[str]) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "".join(line[indent:] if line.strip() else "\n" for line in lines)


def _used(value: type | FunctionType, text: str, owner: str) -> Iterator[tuple[str, Any]]:
    """Names from outside that a definition needs, with what they stand for."""
    scopes: list[DocumentView] = []
    for function in _functions(value):
        scopes += [_closure(function), function.__globals__]
    own = {value.__name__}
    named = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    for name in sorted(named - own):
        scope = next((one for one in scopes if name in one), None)
        if scope is not None:
            yield name, scope[name]
        elif not hasattr(builtins, name) and not _is_local(name, value):
            raise InputError("study", None, owner, f"uses {name}, which is not defined")


def _closure(function: FunctionType) -> Document:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if name != "__class__"}


def _is_local(name: str, value: type | FunctionType) -> bool:
    """Whether a name belongs to a function of the definition, or to the class itself."""

    def holds(code: CodeType) -> bool:
        names = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        inner = (one for one in code.co_consts if isinstance(one, CodeType))
        return name in names or any(map(holds, inner))

    return name in vars(value) or any(holds(f.__code__) for f in _functions(value))
