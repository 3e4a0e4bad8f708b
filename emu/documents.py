"""Parsed documents: tables of TOML, objects of JSON or YAML, before anything is known of them.

`Any` stands here and not at each use: whatever takes a document checks what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]
"""A table or object as its parser gives it, or as a writer is about to get it."""
DocumentView = Mapping[str, Any]
"""The same, to be read only."""
