"""Numbers have units, and docstrings speak of things: read from the sources of `emu/`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from emu.cli.docs import DOCS
from tests.sources import parsed

ROOT = DOCS.parent
_UNITS = """
ns us ms s ps tok tokens token bytes byte block blocks gb gib mib kib gbps hz bits cells chars words lines w j
percent flop flops tflop ratio share shares factor part fraction probability rate weight theta sigma cv price
utilization speed temperature
id ids index seed rank ranks port status pid fd count size degree level depth offset at number no total
low high min max mean median slope std
"""
"""Words of a name that give its unit, or say that it has none."""
_FIELD = """
replica machine npu gpu node source destination target iteration position line column key life row batch request
session member module layer stage worker attempt step pass process expert width height priority
tp pp ep dp nd parallel tensor pipeline npus gpus heads hidden vocab dim ffn
running waiting completed failed rejected cancelled outstanding drafting done
attainment efficiency util kind capacity lag top length
n i j k x y a b value values
"""
"""Identities, degrees of parallelism, sizes of tensors and counts that the field calls so."""
_NAMES = frozenset([*_UNITS.split(), *_FIELD.split()])
_COUNTS = ("num", "max", "min", "n")
_IN_CLASS = re.compile(
    r"\b(?:ns|us|ms|seconds|bytes|tokens?|token counts|blocks|per cent|1e9 bit/s|1e12)\b", re.I
)
"""A class that gives the unit of all its fields."""


def _parts(annotation: ast.expr | None) -> Iterator[str]:
    """Names of the types that an annotation joins."""
    match annotation:
        case ast.BinOp():
            yield from _parts(annotation.left)
            yield from _parts(annotation.right)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            yield from _parts(first)
        case ast.Name():
            yield annotation.id
        case ast.Constant(value=None):
            yield "None"
        case _:
            yield ""


def _is_number(annotation: ast.expr | None) -> bool:
    parts = set(_parts(annotation))
    return bool(parts & {"int", "float"}) and parts <= {"int", "float", "None"}


def _says_its_unit(name: str) -> bool:
    words = name.strip("_").split("_")
    last = words[-1]
    is_plural = last.endswith("s") and not last.endswith(("ss", "us", "is"))
    return is_plural or words[0] in _COUNTS or not _NAMES.isdisjoint(words)


@cache
def _trees() -> dict[Path, ast.Module]:
    return {path: parsed(path) for path in sorted((ROOT / "emu").rglob("*.py"))}


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@cache
def _functions() -> dict[str, set[str]]:
    """Words that docstrings of all functions of a name have: an override does not repeat its base's."""
    found: dict[str, set[str]] = {}
    for tree in _trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, set()).update(_words(ast.get_docstring(node) or ""))
    return found


def _fields(cls: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Numeric fields of a class with the docstring behind them."""
    for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and _is_number(node.annotation):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield node, "field" if is_text else ""


def _unexplained(tree: ast.Module) -> Iterator[str]:
    for cls in [None, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        text = (ast.get_docstring(cls) or "") if cls else ""
        explained = (
            text + " ".join(ast.unparse(node.target) for node, doc in _fields(cls) if doc)
            if cls
            else ""
        )
        if cls and cls.name.startswith("_"):
            continue
        for node, doc in _fields(cls) if cls else ():
            name = ast.unparse(node.target)
            if name.startswith("_") or doc or _IN_CLASS.search(text):
                continue
            is_told = _says_its_unit(name) or name in _words(text)
            told = ast.unparse(node.annotation)
            is_told = is_told or any(f"{word}(" in told for word in ("doc", "Option", "Argument"))
            if not is_told:
                yield f"{node.lineno}: {cls.name if cls else ''}.{name}"
        for function in cls.body if cls else tree.body:
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if function.name.startswith("_") and function.name != "__init__":
                continue
            is_init = function.name == "__init__"
            own = ast.get_docstring(function) or ""
            told = _words(explained) | (_words(own) if is_init else _functions()[function.name])
            arguments = function.args
            for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                if not _is_number(one.annotation) or _says_its_unit(one.arg):
                    continue
                if one.arg not in told:
                    yield f"{one.lineno}: {function.name}({one.arg})"


def test_every_number_has_a_unit_or_a_meaning() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{place}"
        for path, tree in _trees().items()
        for place in _unexplained(tree)
    ]
    assert found == [], "name the unit (_ns, _tokens, ...), or explain the number in a docstring"


_PEOPLE = re.compile(
    r"\b(?:who|whom|whoever|nobody|somebody|everybody|anybody)\b(?!/knows|\s+are you)", re.I
)
_FRAGMENT = re.compile(r"(?:Of|By|Until|Also|Not|To|As(?! many)) ")


def test_docstrings_have_a_subject() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"
        for path, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and (text := ast.get_docstring(node))
        and _FRAGMENT.match(text)
    ]
    assert found == []


def test_things_in_the_sources_are_not_people() -> None:
    mine = {Path(__file__), Path(__file__).with_name("test_prose.py")}
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for folder in ("emu", "tests", "benchmarks", "configs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path not in mine
        for match in _PEOPLE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
