"""Nearest known words for keys and values: "did you mean ...?". Pure, deterministic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

_SHOWN_CHARS: Final = 60


_SHORT_TYPES: Final = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp4": "nvfp4",
    "awq": "int4",
    "w8a8": "int8",
}
"""What others call types of numbers, and what a configuration does."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that resembles `word` most, or an empty string if none does.

    `cutoff` is the least likeness, 0 to 1.
    """
    words = sorted(known)
    if _SHORT_TYPES.get(word.casefold()) in words:
        return _SHORT_TYPES[word.casefold()]
    folded = word.casefold().replace("-", "_")
    for candidate in words:
        if candidate.casefold().replace("-", "_") == folded:
            return candidate
    # The same words in another order: ttft_p95_ms means p95_ttft_ms.
    parts = sorted(folded.split("_"))
    for candidate in words:
        if sorted(candidate.casefold().replace("-", "_").split("_")) == parts:
            return candidate
    import difflib  # only after a mistake

    matches = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What is appended to a problem; nothing if no known word resembles this one."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def unknown_key(key: str, here: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """The problem text for a key that its table does not have.

    `here` are the table's keys, `elsewhere` maps key names of other tables to their dotted path.
    A slip of one letter in the right table is likelier than the right key in the wrong table,
    and that is likelier than a vague resemblance.
    """
    near = nearest(key, here, cutoff=0.8)
    if key in elsewhere and not near:
        return f"unknown key; did you mean {elsewhere[key]}?"
    near = near or nearest(key, here)
    if near:
        return f"unknown key; did you mean {near}?"
    far = nearest(key, elsewhere, cutoff=0.8)
    if far:
        return f"unknown key; did you mean {elsewhere[far]}?"
    if not here:
        return "unknown key"
    return f"unknown key; known keys are {', '.join(here)}"


def unknown_value(value: str, known: Sequence[str], what: str = "expected one of") -> str:
    """The problem text for a word that is not among the known ones."""
    return f'{what} {", ".join(known)}; got "{value}"{did_you_mean(value, known)}'


def dotted(path: Sequence[str | int]) -> str:
    """A path as the user writes it after `--set`."""
    return ".".join(str(part) for part in path)


def shown(value: object) -> str:
    """A value as an error message quotes it: TOML-like and short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        digits = hex(value) if abs(value) >= 10**300 else str(value)
        return digits if len(digits) <= _SHOWN_CHARS else "a huge integer"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        short = value if len(value) <= _SHOWN_CHARS else value[: _SHOWN_CHARS - 3] + "..."
        return quoted(short)
    return "nothing" if value is None else f"a date or time ({value})"


def quoted(word: object) -> str:
    """A word between quotes, as TOML writes it."""
    import json

    return json.dumps(word, ensure_ascii=False)
