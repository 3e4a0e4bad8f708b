"""Events for the pages that are open, as they happen."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

_EVENTS_KEPT: Final = 512
_EVENTS_SHOWN: Final = 100


class Passing(msgspec.Struct, frozen=True):
    """An event that later listeners need not hear of: the next one says all that it says."""


class EventHub:
    """Hands events to all listeners; a listener that is slow loses the oldest ones."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.recent: deque[bytes] = deque(maxlen=_EVENTS_SHOWN)
        """The last events, for listeners that come late; no snapshots."""
        self.is_closed = False

    def publish(self, event: Mapping[str, object] | Passing) -> None:
        """Give an event to all present listeners."""
        data = msgspec.json.encode(event)
        if not isinstance(event, Passing):
            self.recent.append(data)
        for listener in self.listeners:
            listener.items.append(data)
            listener.changed.set()

    def close(self) -> None:
        """No more events: listeners end."""
        self.is_closed = True
        for listener in self.listeners:
            listener.changed.set()


class Listener:
    """One open event stream."""

    def __init__(self) -> None:
        self.items: deque[bytes] = deque(maxlen=_EVENTS_KEPT)
        self.changed = asyncio.Event()
