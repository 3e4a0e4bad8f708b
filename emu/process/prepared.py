"""Types that msgspec reads values into, described by one thread at a time.

msgspec describes a struct type when it is first used, and calls Python code in the middle of it. A
second thread that uses the same type meanwhile, or another type with a field of it, reads half a
description: the process ends with a segmentation fault (msgspec 0.22; docs/lab/msgspec-threads.md).
A type that has been described once can be used by any number of threads.

    msgspec.convert(raw, prepared(Config))
    msgspec.json.Decoder(prepared(Line))
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar

import msgspec

_Kind = TypeVar("_Kind")
_LOCK: Final = threading.Lock()
_PREPARED: Final[set[Any]] = set()


def prepared(kind: type[_Kind]) -> type[_Kind]:
    """The type itself, which msgspec has described when this returns."""
    if kind not in _PREPARED:
        with _LOCK:
            msgspec.json.Decoder(kind)
            _PREPARED.add(kind)
    return kind
