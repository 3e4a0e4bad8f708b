"""Filler that the whole of a regular expression matches: `text_for(pattern, seed)`."""

from __future__ import annotations

import re
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

TEXT_MAX: Final = 100_000
_PATTERN_MAX: Final = 1000


class CannotFill(Exception):
    """The schema asks for what this module cannot write."""


def text_for(pattern: str, seed: int) -> str:
    """A text that the whole of a regular expression matches. Raises CannotFill.

    The text is right by construction and never matched against the pattern: a client's pattern
    could keep Python's matcher busy forever.
    """
    if len(pattern) > _PATTERN_MAX:
        raise CannotFill(f"a pattern has at most {_PATTERN_MAX} characters")
    try:
        return "".join(_from_tree(_parser.parse(pattern), seed, is_first=True, is_last=True))
    except (re.error, RecursionError, OverflowError) as error:
        raise CannotFill(f"the pattern {pattern[:80]!r} is not understood: {error}") from None


def _from_tree(tree: Any, seed: int, *, is_first: bool, is_last: bool) -> list[str]:
    """Parts of a text for a parsed pattern (Python's own parser).

    `is_first`, `is_last`: nothing comes before or after, so anchors hold.
    """
    parts: list[str] = []
    groups: dict[int, str] = {}
    size = 0
    for position, (operation, argument) in enumerate(tree):
        opens = is_first and size == 0
        closes = is_last and all(str(later) == "AT" for later, _ in tree[position + 1 :])
        parts.append(_part(str(operation), argument, seed + position, groups, opens, closes))
        size += len(parts[-1])
        if size > TEXT_MAX:
            raise CannotFill("the pattern asks for too long a text")
    return parts


def _part(
    operation: str, argument: Any, seed: int, groups: dict[int, str], opens: bool, closes: bool
) -> str:
    if operation == "LITERAL":
        return chr(argument)
    if operation == "NOT_LITERAL":
        return "a" if argument != ord("a") else "b"
    if operation == "ANY":
        return "a"
    if operation == "IN":
        return _of_class(argument, seed)
    if operation in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _repeated(argument, seed)
    if operation == "SUBPATTERN":
        text = "".join(_from_tree(argument[3], seed, is_first=opens, is_last=closes))
        if argument[0] is not None:
            groups[argument[0]] = text
        return text
    if operation == "ATOMIC_GROUP":
        return "".join(_from_tree(argument, seed, is_first=opens, is_last=closes))
    if operation == "BRANCH":
        branches = argument[1]
        branch = branches[seed % len(branches)]
        return "".join(_from_tree(branch, seed, is_first=opens, is_last=closes))
    if operation == "AT":
        where = str(argument)
        if (where.startswith("AT_BEGINNING") and opens) or (where.startswith("AT_END") and closes):
            return ""
        raise CannotFill("the pattern has an anchor that is not at an end")
    if operation == "GROUPREF" and argument in groups:
        return groups[argument]
    raise CannotFill(f"the pattern uses {operation.lower()}, which is not supported")


def _repeated(argument: Any, seed: int) -> str:
    """A part as often as it must be, or a little more."""
    least, most, inner = argument
    count = max(int(least), min(int(most), 3 if least == 0 else int(least) + 1))
    if count > TEXT_MAX:
        raise CannotFill("the pattern asks for too long a text")
    pieces: list[str] = []
    size = 0
    for n in range(count):
        pieces += _from_tree(inner, seed + n, is_first=False, is_last=False)
        size += len(pieces[-1]) if pieces else 0
        if size > TEXT_MAX:
            raise CannotFill("the pattern asks for too long a text")
    return "".join(pieces)


def _of_class(items: Any, seed: int) -> str:
    candidates: list[str] = []
    is_negated = False
    for operation, argument in items:
        name = str(operation)
        if name == "NEGATE":
            is_negated = True
        elif name == "LITERAL":
            candidates.append(chr(argument))
        elif name == "RANGE":
            low, high = argument
            candidates += [chr(low), chr(high), chr(low + seed % (high - low + 1))]
        elif name == "CATEGORY":
            shown = {"DIGIT": "3170", "SPACE": " ", "WORD": "aZ_9"}
            kind = str(argument).removeprefix("CATEGORY_")
            opposite = {"NOT_DIGIT": "a", "NOT_SPACE": "a", "NOT_WORD": "-"}
            candidates += shown.get(kind) or opposite.get(kind) or ""
    if is_negated:
        for character in "aA0 -_.:/xyz~!":
            if not _is_in(character, items):
                return character
        raise CannotFill("the pattern has a class that excludes all plain characters")
    if not candidates:
        raise CannotFill("the pattern has a class that is not supported")
    return candidates[seed % len(candidates)]


def _is_in(character: str, items: Any) -> bool:
    """Whether the class (without its negation) has the character."""
    for operation, argument in items:
        name = str(operation)
        if name == "LITERAL" and ord(character) == argument:
            return True
        if name == "RANGE" and argument[0] <= ord(character) <= argument[1]:
            return True
        if name == "CATEGORY":
            kind = str(argument).removeprefix("CATEGORY_")
            test = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}.get(
                kind.removeprefix("NOT_"), ""
            )
            if test and (re.match(test, character) is not None) != kind.startswith("NOT_"):
                return True
    return False
