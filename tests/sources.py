"""Sources as trees, parsed once in a process of tests: many tests read all of emu's."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file, shared: it is not to be changed.

    The collector rests meanwhile, or it walks all trees again and again: three times as long.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if was_enabled:
            gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of that tree, in the order of `ast.walk`."""
    return tuple(ast.walk(parsed(path)))
