"""The files that a configuration names: which they are, and what was in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from emu.config.names import is_import_path
from emu.plugins import KEYS, sources

FILE_KEYS: Final = ("path", "hf_config", "tokenizer", "replay")
"""Keys of a configuration that name a file or a directory which is read."""


def named_files(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Each table and key of an effective configuration that names something that is there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, (dict, list)):
            yield from named_files(inner)
        elif key in FILE_KEYS and isinstance(inner, str) and inner:
            yield value, key


def named_plugins(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Each table and key of an effective configuration that names a class of a user's own."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, (dict, list)):
            yield from named_plugins(inner)
        elif key in KEYS and isinstance(inner, str) and is_import_path(inner):
            yield value, key


def digests(config: dict[str, Any]) -> dict[str, str]:
    """Path -> digest of what is there, for all files and classes that a configuration names."""
    paths = dict.fromkeys(table[key] for table, key in named_files(config))
    found = {path: tree_digest(Path(path)) for path in paths if Path(path).exists()}
    for table, key in named_plugins(config):
        found |= {str(file): tree_digest(file) for file in sources(table[key])}
    return found


def tree_digest(root: Path) -> str:
    """Digest of a file, or of all files below a directory with their relative names."""
    import hashlib

    whole = hashlib.sha256()
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
    for file in files:
        if "__pycache__" not in file.parts:
            whole.update(f"{file.relative_to(root)}\0".encode())
            with file.open("rb") as content:
                whole.update(hashlib.file_digest(content, "sha256").digest())
    return whole.hexdigest()
