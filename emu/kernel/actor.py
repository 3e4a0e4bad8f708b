"""An actor: a mailbox, one timer, and a step that the kernel runs when either has something.

An actor owns its object; no other code writes to it. What reaches it are messages and its timer.
A message comes in one of two ways, and the sender chooses:

- `tell` is carried out now, before the sender's next line (depth first). For what the receiver
  must know before anything else happens: a reservation, a request that is routed to it, a crash.
- `post` is put into the mailbox, and the actor is called for a step at the end of the queue of this
  instant (first come, first served), or later if it is in the middle of something: `align` says
  when.

`tick` is the step. It takes what is in the mailbox and what has become due, begins the next thing
and returns when that ends. Each actor is an asyncio task that waits for its step; the kernel runs
the step of a waiting actor in line, without a turn of the event loop, unless it was told to go
through the tasks. Both ways give the same order, because the kernel's queue decides it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from emu.kernel.clock import Kernel

PARK: Final = -1
"""A step returns this: there is nothing to do before the next message."""
AGAIN: Final = -2
"""A step returns this: go on, when those that wait to run have had their turn."""
NOW: Final = -3
"""`align` answers this: at the end of the queue of this instant."""
AT_DUE: Final = -4
"""`align` answers this: when the timer that is set comes, not earlier."""
NEVER: Final = 1 << 63


@mypyc_attr(allow_interpreted_subclasses=True)
class Actor:
    """Base of all actors."""

    def __init__(self, kernel: Kernel, name: str, priority: int) -> None:
        """`priority` orders what is due at one instant (`emu/kernel/priorities.py`)."""
        self.kernel = kernel
        self.name = name
        self.priority = priority
        self.inbox: deque[Any] = deque()
        # What follows belongs to the kernel.
        self.due_ns = NEVER
        """When the timer comes that counts."""
        self.armed = 0
        """Its number; a timer with another number is void: it was put off or cut."""
        self.is_ready = False
        """It waits in the queue of this instant."""
        self.is_stepping = False
        """Its step is under way, which looks at everything before it ends."""
        self.is_away = False
        """It waits for an answer from outside simulated time."""
        self.call: asyncio.Future[None] | None = None
        """What its task waits for."""

    def tick(self) -> int:
        """Take one step: when the next is due, `PARK` or `AGAIN`."""
        raise NotImplementedError

    def align(self, now_ns: int) -> int:
        """When a message that comes now is to be looked at: an instant, `NOW` or `AT_DUE`."""
        return NOW

    def post(self, message: object) -> None:
        """Put a message into the mailbox."""
        self.inbox.append(message)
        self.kernel.wake(self)

    def describe(self) -> str:
        """One line for the story of a run that cannot go on."""
        if self.is_away:
            return f"{self.name} waits for an answer from outside"
        waiting = f", {len(self.inbox)} messages" if self.inbox else ""
        return f"{self.name} waits for a message{waiting}"
