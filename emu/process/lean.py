"""Imports of libraries without what they would load beside themselves and no run uses.

with standing_in({"typing_extensions": None}):
    import msgspec

Imports nothing of emu.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def standing_in(names: dict[str, ModuleType | None]) -> Iterator[None]:
    """While this lasts, what is imported finds these in place of modules that are not loaded yet;
    None: as if it were not installed."""
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = names[name]  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def module_of(name: str, contents: dict[str, object]) -> ModuleType:
    """A module that stands in for another one."""
    made = ModuleType(name)
    made.__dict__.update(contents)
    return made


def load_pathlib() -> None:
    """Import pathlib without `urllib.parse` and `ipaddress`, which only `Path.as_uri` needs."""

    def quote_from_bytes(*given: bytes) -> str:
        from urllib.parse import quote_from_bytes

        return quote_from_bytes(*given)

    stand_in = module_of("urllib.parse", {"quote_from_bytes": quote_from_bytes})
    with standing_in({"urllib.parse": stand_in}):
        import pathlib  # noqa: F401


def leave_out_docs_of_numpy() -> None:
    """Should numpy be imported, then without its docstrings: a tenth of the time that it takes."""
    for name in ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars"):
        sys.modules.setdefault(name, ModuleType(name))
