"""Mappings and lists as YAML in block style.

PyYAML comes with an extra alone (`profiles`), and this much takes no package: scalars are JSON,
which is YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from emu.documents import Document


def yaml_documents(documents: Sequence[Document]) -> str:
    return "".join("---\n" + "\n".join(yaml_lines(document, 0)) + "\n" for document in documents)


def yaml_lines(value: Any, depth: int) -> Iterator[str]:
    """Lines of a mapping or a list in block style; scalars as JSON, which is YAML."""
    indent = "  " * depth
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, (dict, list)):
                yield f"{indent}{_key(key)}:"
                yield from yaml_lines(inner, depth + 1)
            else:
                yield f"{indent}{_key(key)}: {json.dumps(inner)}"
        return
    for item in value:
        if isinstance(item, dict):
            first, *rest = yaml_lines(item, depth + 1)
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}- {json.dumps(item)}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z]+", key) else json.dumps(key)
