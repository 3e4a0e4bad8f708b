"""The life of an actor: one coroutine, which takes a step at each of its turns.

It is the same on both event loops, and only what it awaits differs. Under simulated time a turn is
`TURN`: awaiting it hands control back to the kernel, which resumes the coroutine with `send` when
the actor's next turn has come. Its iterator is one that C makes, so that a turn costs a tenth of a
microsecond. Where actors are asyncio tasks, a turn is a future that only the kernel resolves
(`emu/kernel/tasks.py`).

Not compiled in either build: mypyc's coroutines are objects of its own, without `cr_running` and
slower to resume than those of the interpreter.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")
S = TypeVar("S", bound="Steps")


class Turn(list[None]):
    """Gives the kernel its turn, once for each element.

    `list.__reversed__` is a plain method of C; the `__iter__` of a type is a slot in a wrapper,
    and costs three times as much to call from here.
    """

    __slots__ = ()
    __await__: Any = list.__reversed__


TURN: Final = Turn([None])


class Steps(Protocol):
    """An actor, as its life sees it."""

    turn: Awaitable[None]

    def tick(self) -> int:
        """Take what is in the mailbox and what is due, and begin the next thing."""
        ...


async def live(actor: S, ends: Callable[[S, int], None]) -> None:
    """Live until the run ends, which closes the coroutine, or cancels its task.

    `ends` hears from each step when the next is due.
    """
    tick, turn = actor.tick, actor.turn
    while True:
        ends(actor, tick())
        await turn


def completed(work: Callable[..., Coroutine[object, None, T]], *arguments: object) -> T:
    """The result of a coroutine function that waits for nothing but simulated time.

    The kernel is its event loop, as it is that of the actors: nothing outside is awaited.
    """
    running = work(*arguments)
    try:
        running.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    running.close()
    raise AssertionError(f"{running} waits for something outside simulated time")
