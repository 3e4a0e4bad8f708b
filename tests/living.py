"""Functions that are alive, given the code of another text of their file.

    living = Living(folder)
    with living.watched():
        ...  # import everything
    living.find()
    if not living.swap(path, old, new):
        ...  # the change is not of functions alone: the file has to be imported anew

A process that has imported a program runs the other text from then on, without importing anything
again: objects, tables and other modules keep the functions that they have, and those get other
code. That says nothing of what a function has left behind while modules were imported (a table, a
class, a cached answer), so one that has run by then is not swapped.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType

Place = tuple[str, str, int]
"""(file, qualified name, first line) of a function's code."""


class Living:
    """The functions of a folder's modules."""

    def __init__(self, folder: Path) -> None:
        self._root = f"{folder}/"
        self._early: set[Place] = set()
        """What ran while it was watched."""
        self._found: dict[Place, list[FunctionType]] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note what runs meanwhile."""

        def called(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(self._root):
                self._early.add(_place(frame.f_code))

        sys.setprofile(called)
        try:
            yield
        finally:
            sys.setprofile(None)

    def find(self) -> None:
        """Look for all functions there are now; what there is stays where it is in forks."""
        gc.unfreeze()
        self._found = {}
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(self._root):
                self._found.setdefault(_place(one.__code__), []).append(one)
        gc.collect()
        gc.freeze()

    def swap(self, path: str, old: bytes, new: bytes) -> bool:
        """Whether the functions of a file run as the new text says."""
        changed = changed_functions(_compiled(old, path), _compiled(new, path))
        if changed is None:
            return False
        for before, after in changed:
            functions = self._found.get(_place(before), [])
            if not functions or _place(before) in self._early:
                return False
            for function in functions:
                if len(after.co_freevars) != len(before.co_freevars):
                    return False
                function.__code__ = after
        return True


def changed_functions(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """Functions of two modules or classes that differ; None if anything else does, too."""
    changed: list[tuple[CodeType, CodeType]] = []
    before, after = _inner(old), _inner(new)
    if _shape(old) != _shape(new) or len(before) != len(after):
        return None
    for one, other in zip(before, after, strict=True):
        if _meaning(one) == _meaning(other):
            continue
        if one.co_qualname != other.co_qualname:
            return None
        if one.co_flags & inspect.CO_NEWLOCALS:
            changed.append((one, other))
        else:
            inside = changed_functions(one, other)
            if inside is None:
                return None
            changed += inside
    return changed


def _compiled(text: bytes, path: str) -> CodeType:
    return compile(text, path, "exec", dont_inherit=True)


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _inner(code: CodeType) -> list[CodeType]:
    return [one for one in code.co_consts if isinstance(one, CodeType)]


def _shape(code: CodeType) -> tuple[object, ...]:
    """What a code does, whatever its functions do and on which lines it stands."""
    constants = tuple(repr(one) for one in code.co_consts if not isinstance(one, CodeType))
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return (code.co_code, constants, counts, names, code.co_exceptiontable)


def _meaning(code: CodeType) -> tuple[object, ...]:
    return (*_shape(code), *map(_meaning, _inner(code)))
