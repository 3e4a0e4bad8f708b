"""The life of a replica whose costs come from outside simulated time.

As `emu/kernel/life.py`, but for one thing: when a step has asked a backend in another process, the
coroutine awaits its answer, and simulated time stands still. The answer is an event like any other,
so one that comes for an earlier life of the replica changes nothing. Not compiled, as that one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from emu.kernel.life import Steps

A = TypeVar("A", bound="Asks")


class Asks(Steps, Protocol):
    """The actor of such a replica, as its life sees it."""

    @property
    def asked(self) -> object | None:
        """What its last step has asked."""
        ...

    @property
    def incarnation(self) -> int:
        """Which life of the replica it is."""
        ...

    def ask(self) -> Awaitable[int]:
        """What the step has asked for, ns."""
        ...

    def answered(self, life: int, cost_ns: int) -> None:
        """The answer is here."""
        ...


async def live_beside(actor: A, ends: Callable[[A, int], None]) -> None:
    """Live until the run ends, which cancels its task."""
    turn = actor.turn
    while True:
        ends(actor, actor.tick())
        if actor.asked is not None:
            life = actor.incarnation
            actor.answered(life, await actor.ask())
        await turn
