"""Runs a function and hands over what it raises. Not compiled.

A compiled handler binds an exception without the frames that it came through, and those tell
whose code is at fault (`emu/plugins.py`).
"""

from __future__ import annotations

from collections.abc import Callable


def guarded(work: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
    """`fail` gets any exception of `work`, with its traceback."""
    try:
        work()
    except BaseException as error:
        fail(error)
