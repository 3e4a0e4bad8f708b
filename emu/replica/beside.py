"""The life of a replica whose costs come from outside simulated time.

As `emu/kernel/life.py`, but for one thing: when a step has asked a backend in another process, the
coroutine awaits its answer, and simulated time stands still. The answer is an event like any other,
so one that comes for an earlier life of the replica changes nothing. Not compiled, as that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emu.replica.actor import ReplicaActor


async def live_beside(actor: ReplicaActor) -> None:
    """Live until the run ends, which cancels its task."""
    kernel, turn = actor.kernel, actor.turn
    while True:
        kernel.ends(actor, actor.tick())
        if actor.asked is not None:
            life = actor.incarnation
            actor.answered(life, await actor.ask())
        await turn
