"""The files and classes that a configuration names: what is in them, and how run.json calls them.

run.json tells no home directory. Names that are relative are so to the directory in which the run
was started; `started_in` leads there from the run's own directory. Absolute ones below the home
directory begin with `~/`. `Names` writes and resolves them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from emu.config.names import is_file_path, is_import_path
from emu.documents import Document, DocumentView
from emu.plugins.named import KEYS

FILE_KEYS: Final = ("path", "hf_config", "tokenizer", "replay", "learned")
"""Keys of a configuration that name a file or a directory which is read."""


def named_files(value: Any) -> Iterator[tuple[Document, str]]:
    """Each table and key of an effective configuration that names something that is there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, (dict, list)):
            yield from named_files(inner)
        elif isinstance(key, str) and isinstance(inner, str) and inner and key in FILE_KEYS:
            yield value, key


def named_plugins(value: Any) -> Iterator[tuple[Document, str]]:
    """Each table and key of an effective configuration that names a class of a user's own."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, (dict, list)):
            yield from named_plugins(inner)
        elif key in KEYS and isinstance(inner, str) and is_import_path(inner):
            yield value, key


def named_programs(value: Any) -> Iterator[str]:
    """Each program that a configuration names: a backend starts it."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, (dict, list)):
            yield from named_programs(inner)
        elif key == "binary" and isinstance(inner, str) and inner:
            yield inner


def tree_digest(root: Path) -> str:
    """Digest of a file, or of all files below a directory with their relative names."""
    whole = hashlib.sha256()
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
    for file in files:
        if "__pycache__" not in file.parts:
            whole.update(f"{file.relative_to(root)}\0".encode())
            with file.open("rb") as content:
                whole.update(hashlib.file_digest(content, "sha256").digest())
    return whole.hexdigest()


class Names:
    """Names of files, as run.json has them."""

    def __init__(self, started_in: Path) -> None:
        self._started_in = started_in
        home = os.path.realpath(os.path.expanduser("~"))
        homes = {os.path.expanduser("~").rstrip("/"), home.rstrip("/")} - {""}
        either = "|".join(map(re.escape, sorted(homes)))
        self._home = re.compile(rf"(?<![\w.~-])(?:{either})/" if homes else r"(?!)")

    def of(self, path: Path) -> str:
        """What a file is called: relative to where the run was started, if it lies below."""
        if path.is_relative_to(self._started_in):
            return str(path.relative_to(self._started_in))
        return self.at_home(str(path))

    def at_home(self, value: str) -> str:
        """The text, with `~/` for the home directory."""
        return self._home.sub("~/", value)

    def all_at_home(self, value: Any) -> Any:
        """Plain values, with `~/` for the home directory in every text."""
        if isinstance(value, dict):
            return {self.all_at_home(key): self.all_at_home(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.all_at_home(inner) for inner in value]
        return self.at_home(value) if isinstance(value, str) else value

    def place(self, name: str) -> Path:
        """Where the file of that name is."""
        return self._started_in / os.path.expanduser(name)


def started_in(directory: Path) -> str:
    """The way from a run's directory to where the run is started, for run.json."""
    here, there = Path.cwd(), Path(os.path.realpath(directory))
    home = Path(os.path.realpath(os.path.expanduser("~")))
    if here.is_relative_to(home) and not there.is_relative_to(home) and home != home.parent:
        return str("~" / here.relative_to(home))
    return os.path.relpath(here, there)


def recorded(config: DocumentView, directory: Path) -> Document:
    """What run.json of a run in `directory` says of its configuration's files and classes.

    `inputs`: name of each file -> digest. `classes`: each class -> the folder in which its imports
    are looked for, and its files in there.
    """
    names, inputs = Names(Path.cwd()), {}
    for table, key in named_files(config):
        path = Path(table[key])
        if path.exists():
            inputs[names.at_home(table[key])] = tree_digest(path)
    classes: Document = {}
    for table, key in named_plugins(config):
        from emu.plugins.sources import sources  # most runs name no class

        files = sources(table[key])
        if files:
            root = root_of(table[key], files)
            own = {_within(file, root): tree_digest(file) for file in files}
            classes[names.at_home(table[key])] = {"folder": names.of(root), "files": own}
    return {
        "started_in": started_in(directory),
        "config": names.all_at_home(config),
        "inputs": inputs,
        "classes": classes,
    }


def _within(file: Path, root: Path) -> str:
    """A file's name in a folder; one that only a link leads to is beside the others."""
    return str(file.relative_to(root)) if file.is_relative_to(root) else file.name


def root_of(path: str, files: list[Path]) -> Path:
    """The folder in which the imports of a class's files are looked for."""
    module = path.rpartition(":")[0]
    if is_file_path(path):
        return Path(module).resolve().parent
    parts = module.split(".")
    for file in files:
        for own in (parts, [*parts, "__init__"]):
            if list(file.with_suffix("").parts[-len(own) :]) == own:
                return file.parents[len(own) - 1]
    return Path(os.path.commonpath([file.parent for file in files]))


def folder_name(files: Mapping[str, str]) -> str:
    """Name of the folder of a bundle that holds the files of a class: the same for the same."""
    content = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(content.encode()).hexdigest()[:16]
