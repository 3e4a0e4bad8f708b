"""Requests as they stand in the middle or at the end of a run."""

from __future__ import annotations

from typing import Any

from emu.request import Request

_ASKED = frozenset(Request.__init__.__code__.co_varnames)


def request_with(**fields: Any) -> Request:
    """A request whose fields are given, those that a run fills in included."""
    asked = {name: value for name, value in fields.items() if name in _ASKED}
    made = Request(**asked)
    for name in fields.keys() - asked.keys():
        setattr(made, name, fields[name])
    return made
