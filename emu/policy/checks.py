"""Answers of a user's own policies: one that is none is a PluginError.

An exception in a policy passes, and `blamed` (`emu/plugins/blame.py`) names it.
"""

from __future__ import annotations

import operator

from emu.errors import PluginError, shown


def index_of(chosen: object, count: int, what: str, *, may_wait: bool = False) -> int:
    """A choice among so many as an index; -1 = to wait, where it may."""
    try:
        index = operator.index(chosen)  # type: ignore[arg-type]
    except TypeError:
        index = -2
    if isinstance(chosen, bool) or not (0 <= index < count or (may_wait and index == -1)):
        wanted = f"an index from 0 to {count - 1}" + (", or -1 to wait" if may_wait else "")
        raise PluginError(f"{what} chose {shown(chosen)} of {count}; expected {wanted}")
    return index
