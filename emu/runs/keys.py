"""Hashes of everything that the result of a run depends on: names of stored results."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.config.load import effective_dict
from emu.config.schema import Config
from emu.documents import Document
from emu.plugins.sources import digest
from emu.runs.inputs import FILE_KEYS, named_plugins, tree_digest

FORMAT: Final = 1
"""Changes when stored results of earlier versions no longer mean the same."""


class Keys:
    """Hashes of what results depend on. Digests of files are taken once."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        # Results of other code are other results, whatever the version says.
        self._code = tree_digest(Path(__file__).parents[1])

    def key(self, config: Config, *more: Any) -> str:
        """Key of a configuration without [output], the files and classes it names, and `more`."""
        plain = effective_dict(config)
        del plain["output"]
        return self.key_of(plain, *more)

    def key_of(self, plain: Any, *more: Any) -> str:
        """The key of tables of a configuration, which are changed in place, and `more`."""
        for table, name in named_plugins(plain):
            table[name] = f"{table[name].rpartition(':')[2]} {digest(table[name])}"
        self._replace_paths(plain)
        content: Document = {"format": FORMAT, "emu": self._code, "config": plain}
        if more:
            content["more"] = more
        text = msgspec.json.encode(content, order="deterministic")
        return hashlib.sha256(text).hexdigest()[:32]

    def _replace_paths(self, value: Any) -> None:
        """Paths of files that exist become digests of their content, in place."""
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            if isinstance(inner, (dict, list)):
                self._replace_paths(inner)
            elif isinstance(key, str) and inner and key in FILE_KEYS:
                value[key] = self._digest(inner)

    def _digest(self, path: str) -> str:
        known = self._digests.get(path)
        if known is None:
            known = self._digests[path] = tree_digest(Path(path))
        return known
