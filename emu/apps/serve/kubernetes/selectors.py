"""Label and field selectors: which objects a list or a watch is about."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from emu.apps.serve.kubernetes.documents import Document, Refused, labels_of, table

Test = Callable[[Document], bool]
_SET: Final = re.compile(r"^\s*(\S+)\s+(in|notin)\s*\(([^)]*)\)\s*$")
_EQUAL: Final = re.compile(r"^\s*([^!=\s]+)\s*(==|=|!=)\s*(\S*)\s*$")
_NAME: Final = re.compile(r"^\s*(!?)\s*([A-Za-z0-9][-A-Za-z0-9_./]*)\s*$")


def select(labels: str, fields: str) -> Test:
    """A test of objects. Raises Refused for a selector that cannot be read."""
    tests = [_label_test(part) for part in _parts(labels)]
    tests += [_field_test(part) for part in _parts(fields)]
    return lambda document: all(test(document) for test in tests)


def matches(wanted: Document, labels: dict[str, str]) -> bool:
    """Whether labels have all that a `matchLabels` says."""
    return all(labels.get(key) == value for key, value in wanted.items())


def _parts(selector: str) -> list[str]:
    """Between commas that stand in no brackets."""
    return [part for part in re.split(r",(?![^(]*\))", selector) if part.strip()]


def _label_test(part: str) -> Test:
    found = _SET.match(part)
    if found:
        key, word, given = found.groups()
        values = {value.strip() for value in given.split(",")}
        if word == "in":
            return lambda document: labels_of(document).get(key) in values
        return lambda document: labels_of(document).get(key) not in values
    found = _EQUAL.match(part)
    if found:
        key, word, value = found.groups()
        return lambda document: (labels_of(document).get(key) == value) is (word != "!=")
    found = _NAME.match(part)
    if found is None:
        raise Refused(400, f"unable to parse requirement: {part!r}")
    absent, key = found.groups()
    return lambda document: (key in labels_of(document)) is not bool(absent)


def _field_test(part: str) -> Test:
    found = _EQUAL.match(part)
    if found is None:
        raise Refused(400, f"invalid field selector: {part!r}")
    path, word, value = found.groups()
    keys = path.split(".")

    def test(document: Document) -> bool:
        for key in keys[:-1]:
            document = table(document, key)
        held = document.get(keys[-1], "")
        shown = str(held).lower() if isinstance(held, bool) else str(held)
        if isinstance(held, bool) or keys[-1] == "unschedulable":
            shown = shown or "false"
        return (shown == value) is (word != "!=")

    return test
