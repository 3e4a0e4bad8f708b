"""What a reader of the sources stumbles over, counted: `python -m tests.house [PATH ...]`.

Each figure is a list of places, so that a failing test says where to look. Words are counted in
code, not in comments or strings. Paths are relative to `emu/`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.sources import nodes, parsed

ROOT = Path(__file__).resolve().parents[2] / "emu"
FUNCTION_LINES_MAX = 60
COMPLEXITY_MAX = 15
RUFF = (
    *(sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901", "-q"),
    *("--config", f"lint.mccabe.max-complexity={COMPLEXITY_MAX}", "--output-format", "concise"),
)
"""Lists functions of higher complexity in the paths that follow."""
GROUP_LINES_MIN = 40
"""A component of fewer lines is a helper, not a topic."""
BANNER = re.compile(r"^\s*#\s*[-=#~*]{8,}|^\s*#\s*[-=]{3,} .* [-=]{3,}\s*$")


def files(below: Iterable[str] = ("",)) -> list[Path]:
    """All modules of emu whose path begins with one of the given ones, sorted.

    Raises:
        ValueError: No module's path begins with one of them.
    """
    wanted = tuple(below)
    names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")]
    for start in wanted:
        if not any(name.startswith(start) for name in names):
            raise ValueError(f"no module begins with emu/{start}")
    return [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).as_posix().startswith(wanted)
    ]


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{line}"


def banners(path: Path) -> Iterator[str]:
    """Comment lines drawn as rules: heads of modules that stand inside another one."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if BANNER.match(line):
            yield place(path, number)


def other_names(path: Path) -> Iterator[str]:
    """The module's docstring begins with the name of another file, or of one that is not there."""
    own = path.relative_to(ROOT.parent).as_posix()
    for node in nodes(path):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for name in re.findall(
            r"\(`(\w+\.py)`\)|`(emu/[\w/]+\.py)`", ast.get_docstring(node) or ""
        ):
            bare, whole = name
            if (bare and bare == path.name) or whole == own:
                yield f"{place(path, getattr(node, 'lineno', 1))}: names itself"
            elif whole and not (ROOT.parent / whole).exists():
                yield f"{place(path, getattr(node, 'lineno', 1))}: {whole} is gone"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_functions(path: Path) -> Iterator[str]:
    for node in functions(path):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"{place(path, node.lineno)} {node.name}: {lines} lines"


def top_level(path: Path) -> dict[str, ast.stmt]:
    """Names that the module itself defines at its top, each with its statement."""
    found: dict[str, ast.stmt] = {}
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    found.pop("__all__", None)
    return found


def _words(node: ast.AST) -> set[str]:
    """Names used in a statement, those in quoted annotations too."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            found |= set(re.findall(r"\w+", inner.value)) if len(inner.value) < 80 else set()
    return found


def groups(path: Path) -> list[list[str]]:
    """Components of the module's top-level names, joined where one uses another.

    Those of fewer than GROUP_LINES_MIN lines are left out.
    """
    names = top_level(path)
    home = {name: name for name in names}

    def root(name: str) -> str:
        while home[name] != name:
            name = home[name]
        return name

    for name, node in names.items():
        for other in _words(node) & names.keys():
            home[root(other)] = root(name)
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(root(name), []).append(name)

    def lines(members: list[str]) -> int:
        spans = {(names[m].lineno, names[m].end_lineno or names[m].lineno) for m in members}
        return sum(end - begin + 1 for begin, end in spans)

    return [sorted(part) for part in parts.values() if lines(part) >= GROUP_LINES_MIN]


def split_modules(path: Path) -> Iterator[str]:
    found = groups(path)
    if len(found) > 1:
        heads = ", ".join(part[0] + (f" (+{len(part) - 1})" if part[1:] else "") for part in found)
        yield f"{place(path, 1)} {len(found)} groups: {heads}"


PUBLIC = frozenset(("_replace", "_exit", "_run_exitfuncs", "_flash_attention_forward"))
"""Names of named tuples, `os`, `atexit` and transformers: their libraries have no public ones."""


def foreign_privates(path: Path) -> Iterator[str]:
    """Private names taken from another package of emu (the folder below `emu` or `emu/apps`)."""
    own = package(path.relative_to(ROOT).as_posix())
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("emu."):
            home = package("/".join((node.module or "").split(".")[1:]))
            for alias in node.names:
                if alias.name.startswith("_") and not alias.name.startswith("__") and home != own:
                    yield f"{place(path, node.lineno)} {node.module}.{alias.name}"

    known = private_names(own) | PUBLIC
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            on_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not on_self and node.attr not in known:
                yield f"{place(path, node.lineno)} .{node.attr}"


@cache
def private_names(own: str) -> frozenset[str]:
    """Private attributes, methods and names that a package itself defines."""
    found: set[str] = set()
    for path in files():
        if package(path.relative_to(ROOT).as_posix()) != own:
            continue
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(found)


def package(relative: str) -> str:
    parts = relative.removesuffix(".py").split("/")
    return "/".join(parts[:2]) if parts[0] == "apps" else parts[0]


@cache
def words(path: Path) -> tuple[tuple[str, str, str, int], ...]:
    """(before, word, after, line) of each name in the code."""
    text = path.read_text(encoding="utf-8")
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in (tokenize.NAME, tokenize.OP)
    ]
    return tuple(
        (tokens[i - 1].string if i else "", token.string, after.string, token.start[0])
        for i, (token, after) in enumerate(zip(tokens, [*tokens[1:], *tokens[-1:]], strict=True))
        if token.type == tokenize.NAME
    )


def uses(path: Path, *wanted: str) -> Iterator[str]:
    for before, word, _, line in words(path):
        if word in wanted and before not in (".", "import"):
            yield f"{place(path, line)} {word}"


def star_kwargs(path: Path) -> Iterator[str]:
    for node in functions(path):
        if node.args.kwarg is not None:
            yield f"{place(path, node.lineno)} {node.name}"


def passed_on(path: Path) -> Iterator[str]:
    """Lines `x=x,`: an argument handed on under its own name."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = re.fullmatch(r"\s*(\w+)=(\w+),\s*(#.*)?", line)
        if found and found[1] == found[2]:
            yield place(path, number)


FIGURES = {
    "banner": banners,
    "names another file": other_names,
    "long function": long_functions,
    "two topics": split_modules,
    "foreign private": foreign_privates,
    "x=x": passed_on,
    "getattr, hasattr": lambda path: uses(path, "getattr", "hasattr"),
    "Any": lambda path: uses(path, "Any"),
    "cast": lambda path: uses(path, "cast"),
    "**kwargs": star_kwargs,
}


def count(below: Iterable[str] = ("",)) -> dict[str, list[str]]:
    """All places, by figure."""
    wanted = files(below)
    return {name: [p for path in wanted for p in look(path)] for name, look in FIGURES.items()}
