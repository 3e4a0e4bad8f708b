"""The code of the modules that run as Python, in one file of the build.

A run imports some two hundred of them. One by one, the import system looks for an extension of the
name, finds the source, opens what was cached of it and checks that; here each costs one look at its
source and one read. A source that is not what the file was made of is imported as ever, and so is
everything where the build has been moved or the interpreter is another one. `setup.py` writes the
file, so this module imports nothing of emu.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType

_LENGTH_BYTES = 8


Entry = tuple[str, bool, int, int, int, int]
"""Where the code of a module is, and what it was made of: path, whether it is a package, time and
size of the source in ns and bytes, the byte at which its code begins after the table, its length.
"""


class Archive:
    """The code in a file, read module by module.

    `descriptor` is the open file, `start` the byte after the table.
    """

    def __init__(self, descriptor: int, start: int, table: Mapping[str, Entry]) -> None:
        self._descriptor = descriptor  # open as long as the process lives: it imports when it likes
        self._start = start
        self._table = table

    def entry(self, name: str) -> Entry | None:
        """What is known of a module whose source is still the same."""
        entry = self._table.get(name)
        if entry is None:
            return None
        path, _, mtime_ns, size_bytes, _, _ = entry
        try:
            now = os.stat(path)
        except OSError:
            return None
        return entry if now.st_mtime_ns == mtime_ns and now.st_size == size_bytes else None

    def spec(self, name: str) -> ModuleSpec | None:
        """How to import a module; None where it has to be read from its source."""
        entry = self.entry(name)
        if entry is None:
            return None
        path, is_package, *_ = entry
        spec = ModuleSpec(name, _Loader(self, name, entry), origin=path, is_package=is_package)
        spec.has_location = True
        if is_package:
            spec.submodule_search_locations = [os.path.dirname(path)]
        return spec

    def data(self, entry: Entry) -> bytes:
        """The code of a module, marshaled."""
        *_, at_byte, length_bytes = entry
        return os.pread(self._descriptor, length_bytes, self._start + at_byte)


class _Loader(SourceFileLoader):
    """Takes a module's code from an archive; all else (source, resources) from its place."""

    def __init__(self, archive: Archive, name: str, entry: Entry) -> None:
        super().__init__(name, entry[0])
        self._archive = archive
        self._entry = entry

    def get_code(self, fullname: str) -> CodeType | None:
        code: CodeType = marshal.loads(self._archive.data(self._entry))
        return code


def read(path: str, root: str) -> Archive | None:
    """The archive of the checkout at `root`; None if there is none for it and this interpreter."""
    if sys.flags.optimize:
        return None  # the code has its asserts
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    made_for, table = marshal.loads(os.pread(descriptor, length, _LENGTH_BYTES))
    if made_for == _maker(root):
        return Archive(descriptor, _LENGTH_BYTES + length, table)
    os.close(descriptor)
    return None


def write(path: str, root: str, modules: Mapping[str, str]) -> None:
    """Make the archive of modules with their sources; code that is still right is taken over."""
    known = read(path, root)
    table: dict[str, Entry] = {}
    codes = []
    at = 0
    for name, source in modules.items():
        entry = known.entry(name) if known else None
        if known and entry:
            code = known.data(entry)
        else:
            with open(source, "rb") as file:
                facts = os.fstat(file.fileno())
                text = file.read()
            is_package = os.path.basename(source) == "__init__.py"
            entry = (source, is_package, facts.st_mtime_ns, facts.st_size, 0, 0)
            code = marshal.dumps(compile(text, source, "exec", dont_inherit=True, optimize=0))
        table[name] = (*entry[:4], at, len(code))
        codes.append(code)
        at += len(code)
    head = marshal.dumps((_maker(root), table))
    with open(f"{path}.part", "wb") as file:
        file.write(b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *codes]))
    os.replace(f"{path}.part", path)


def _maker(root: str) -> tuple[str, str]:
    """Whose code an archive has: paths stand in it, and the format is the interpreter's."""
    return sys.version, root
