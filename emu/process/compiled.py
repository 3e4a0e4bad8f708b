"""Which modules of emu run compiled, and which as pure Python.

A checkout keeps its build beside the sources, in `build/compiled/TAG` (`make compile`), with two
lists: `modules.txt`, the time, size and digest of each source as it was compiled, and `graph.json`,
which module uses which. `take` comes before any other module of emu: it lets the import system find
the extension modules of all sources that still are what was compiled. One that was edited runs as
it stands, and so does every compiled module that uses it, because compiled code knows the layout of
the objects that it uses. A wheel has its extension beside the package, and the names of what is in
it in `emu/build.json`. One extension has the code of all compiled modules, with an entry for each;
`archived` has the code of the others.

`EMU_COMPILE=0` does without extension modules, `EMU_COMPILE=1` ends the program where one that was
built cannot be taken. Imports nothing of emu unless a source was edited.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from emu.process.archived import Archive

PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED: Final = "emu__mypyc"
"""The extension with the code of all compiled modules."""
CODE: Final = "modules.code"
"""Beside it: the code of the modules that stay Python."""


def beside(root: str) -> str:
    """Where the build of a checkout is, for this interpreter."""
    return os.path.join(root, "build", "compiled", str(sys.implementation.cache_tag))


class Build:
    """What of a build runs."""

    def __init__(
        self,
        compiled: frozenset[str],
        replaced: tuple[str, ...] = (),
        edited: tuple[str, ...] = (),
    ) -> None:
        """`compiled`: modules that run compiled. `replaced`: those that were compiled, but run as
        pure Python. `edited`: those whose source is not the one of the build, the reason why
        others are replaced."""
        self.compiled = compiled
        self.replaced = replaced
        self.edited = edited

    def __str__(self) -> str:
        """`compiled (85 modules)`, or which of them are not."""
        if not self.compiled:
            return "pure Python"
        count = len(self.compiled)
        if not self.replaced:
            return f"compiled ({count} modules)"
        whole = count + len(self.replaced)
        return f"compiled ({count} of {whole} modules; pure Python: {', '.join(self.replaced)})"

    def notice(self) -> str:
        """One line for a user whose sources are newer than the build; empty for others."""
        if not self.edited:
            return ""
        named = ", ".join(self.edited[:3]) + (", ..." if len(self.edited) > 3 else "")
        were = "was" if len(self.edited) == 1 else "were"
        pure = len(self.replaced)
        return (
            f"{named} {were} edited since the build: {pure} of "
            f"{pure + len(self.compiled)} compiled modules run as pure Python (make compile)"
        )


class Finder:
    """Finds compiled modules in their extension, and the code of others in the archive."""

    def __init__(self, build: Build, extension: str, archive: Archive | None = None) -> None:
        self.build = build
        self._extension = extension
        self._archive = archive

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module is; None for those that are where they always are."""
        if name in self.build.compiled:
            loader: ExtensionFileLoader = Door(name, self._extension)
        elif name == SHARED:
            loader = ExtensionFileLoader(name, self._extension)
        else:
            return self._archive.spec(name) if self._archive else None
        spec = ModuleSpec(name, loader, origin=self._extension)
        spec.has_location = True
        return spec


class Door(ExtensionFileLoader):
    """Loads one of the modules whose code is in the shared extension."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if SHARED not in sys.modules:
            __import__(SHARED)  # what all of them share
        entry = entry_of(spec.name)
        module = super().create_module(ModuleSpec(entry, self, origin=self.path))
        sys.modules.pop(entry, None)  # the interpreter notes it by this name, too
        return module


def entry_of(name: str) -> str:
    """The name of a module in the extension, where `PyInit_` stands before it."""
    return name.replace(".", "___")


def take() -> None:
    """Run the modules compiled that can be, of those that are loaded from now on."""
    wanted = os.environ.get("EMU_COMPILE", "")
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    if wanted != "0" and (finder := _of_checkout() or _of_wheel()):
        sys.meta_path.insert(0, finder)
    if wanted == "1" and (problem := _missing()):
        print(f"EMU_COMPILE=1, but {problem}", file=sys.stderr)
        raise SystemExit(2)


def build() -> Build:
    """What runs compiled in this process."""
    for finder in sys.meta_path:
        if isinstance(finder, Finder):
            return finder.build
    return Build(frozenset())


def _missing() -> str:
    found = build()
    if found.edited:
        return found.notice()
    return "" if found.compiled else "no compiled build is installed (make compile)"


def _of_wheel() -> Finder | None:
    """What an installed wheel has beside its sources; None for one that is pure Python."""
    path = os.path.join(PACKAGE, "build.json")
    if not os.path.exists(path):
        return None
    import json

    with open(path, encoding="utf-8") as file:
        names = json.load(file).get("compiled", ())
    root = os.path.dirname(PACKAGE)
    return Finder(Build(frozenset(names)), _extension_in(root)) if names else None


def _of_checkout() -> Finder | None:
    """What of the build of a checkout is current; None where there is no build."""
    root = os.path.dirname(PACKAGE)
    directory = beside(root)
    try:
        with open(os.path.join(directory, "modules.txt"), encoding="utf-8") as file:
            listed = [line.split("\t") for line in file.read().splitlines()]
    except OSError:
        return None
    if os.path.isdir(os.path.join(directory, "emu", "kernel")):
        return None  # of a revision that made an extension for each module
    compiled = [name for name, _, is_compiled, *_ in listed if is_compiled == "1"]
    edited = [
        (name, path)
        for name, path, _, mtime_ns, size, digest in listed
        if not _is_same(root + os.sep + path, int(mtime_ns), int(size), digest)
    ]
    pure: set[str] = set()
    if edited:
        from emu.process.sources import to_replace

        pure = to_replace(directory, [name for name, _ in edited], compiled)
    from emu.process.archived import read

    stays = frozenset(name for name in compiled if name not in pure)
    replaced = tuple(name for name in compiled if name in pure)
    built = Build(stays, replaced, tuple(path for _, path in edited))
    return Finder(built, _extension_in(directory), read(os.path.join(directory, CODE), root))


def _extension_in(directory: str) -> str:
    """The shared extension's file."""
    return os.path.join(directory, SHARED + EXTENSION_SUFFIXES[0])


def _is_same(path: str, mtime_ns: int, size: int, digest: str) -> bool:
    """Whether a source is what was compiled: by time and size, or else by content."""
    try:
        now = os.stat(path)
        if now.st_mtime_ns == mtime_ns and now.st_size == size:
            return True
        return now.st_size == size and digest_of(path) == digest
    except OSError:
        return False


def digest_of(path: str) -> str:
    """SHA-256 of a file's content."""
    import hashlib

    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
