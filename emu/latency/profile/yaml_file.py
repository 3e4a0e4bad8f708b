"""A YAML mapping with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emu.documents import Document
from emu.errors import InputError, needs_extra

with needs_extra("profiles", "config", "latency.backend"):
    import yaml


class YamlFile:
    """A YAML mapping with errors that name the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(str(path), None, "", "missing") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(str(path), None, "", f"cannot be read: {error}") from None
        except yaml.MarkedYAMLError as error:
            line = None if error.problem_mark is None else error.problem_mark.line + 1
            raise InputError(str(path), line, "", error.problem or "not YAML") from None
        except yaml.YAMLError:
            raise InputError(str(path), None, "", "not YAML") from None
        if not isinstance(data, dict):
            raise self.fail("", "expected a mapping of keys")
        self.data: Document = data

    def fail(self, field: str, problem: str) -> InputError:
        """The error to raise about one key of this file."""
        return InputError(str(self.path), None, field, problem)

    def text(self, key: str) -> str:
        """A name that must be there."""
        value = self.data.get(key)
        if not isinstance(value, str) or not value:
            raise self.fail(key, "missing" if value is None else f"{value!r} is not a name")
        return value

    def table(self, key: str, *, optional: bool = False) -> dict[Any, Any]:
        """A mapping; absent is an empty one when it is optional."""
        return self.mapping(self.data.get(key, {} if optional else None), key)

    def mapping(self, value: object, field: str) -> dict[Any, Any]:
        """`value` if it is a mapping."""
        if not isinstance(value, dict):
            raise self.fail(field, "missing" if value is None else "expected a mapping of keys")
        return value

    def count(self, table: Mapping[Any, Any], key: str) -> int:
        """A count that may be absent (0)."""
        value = table.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.fail(key, f"{value!r} is not a count")
        return value

    def number(self, value: object, field: str) -> float:
        """`value` if it is a finite number."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fail(field, f"{value!r} is not a number")
        if not math.isfinite(value):
            raise self.fail(field, f"{value!r} is not finite")
        return float(value)
