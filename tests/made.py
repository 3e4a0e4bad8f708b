"""Requests as they stand in the middle or at the end of a run."""

from __future__ import annotations

import contextlib
import copyreg
from inspect import signature
from typing import Any

import pytest

import emu.kernel.clock
from emu.request import Request

IS_COMPILED = not (emu.kernel.clock.__file__ or "").endswith(".py")
_ASKED = frozenset(signature(Request).parameters)


def request_with(**fields: Any) -> Request:
    """A request whose fields are given, those that a run fills in included."""
    asked = {name: value for name, value in fields.items() if name in _ASKED}
    made = Request(**asked)
    for name in fields.keys() - asked.keys():
        setattr(made, name, fields[name])
    return made


_FIELDS = [
    name
    for name, value in vars(Request).items()
    if type(value).__name__ in ("member_descriptor", "getset_descriptor") and name[0] != "_"
]


def _again(fields: dict[str, Any]) -> Request:
    made = request_with(**{name: value for name, value in fields.items() if name in _ASKED})
    for name in fields.keys() - _ASKED:
        with contextlib.suppress(AttributeError):  # what is computed from the others
            setattr(made, name, fields[name])
    return made


def requests_can_be_copied() -> None:
    """By `copy`, which cannot by itself where the class is compiled."""
    copyreg.pickle(Request, lambda r: (_again, ({name: getattr(r, name) for name in _FIELDS},)))


def takes_the_place_of_compiled_code() -> None:
    """A test puts an object or a method of its own where extension classes take only theirs."""
    if IS_COMPILED:
        pytest.skip("stands in for a compiled class")
