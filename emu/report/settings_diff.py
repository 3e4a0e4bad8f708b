"""Which settings of several runs differ: what a comparison compares. Pure.

`[output]` is left out: where the files of a run went says nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

Setting = tuple[str, list[str]]
"""Dotted key, its value in each run."""

_ABSENT: Final = object()
_PLACES: Final = frozenset({"output"})


def differing(configs: Sequence[Mapping[str, object]]) -> list[Setting]:
    """Keys whose values are not the same in all runs, in the order of the first configuration."""
    if not all(configs):
        return []  # a directory without run.json
    return [
        setting
        for key in dict.fromkeys(key for config in configs for key in config)
        if key not in _PLACES
        for setting in _walk(key, [config.get(key, _ABSENT) for config in configs])
    ]


def _walk(path: str, values: Sequence[Any]) -> list[Setting]:
    if all(value == values[0] for value in values):
        return []
    # A table that a run lacks is one difference, not one for each of its keys.
    if all(isinstance(value, Mapping) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return [
            setting
            for key in keys
            for setting in _walk(f"{path}.{key}", [value.get(key, _ABSENT) for value in values])
        ]
    if all(isinstance(value, list) for value in values) and _has_tables(values):
        return [
            setting
            for index in range(max(map(len, values)))
            for setting in _walk(
                f"{path}.{index}",
                [value[index] if index < len(value) else _ABSENT for value in values],
            )
        ]
    return [(path, [_text(value) for value in values])]


def _has_tables(lists: Sequence[list[Any]]) -> bool:
    return any(isinstance(item, Mapping) for items in lists for item in items)


def _text(value: object) -> str:
    if value is _ABSENT or value is None:
        return "-"
    if isinstance(value, Mapping):
        return "given"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
