"""Actors as asyncio tasks, for runs in which something waits for the real world.

Each actor's life (`emu/kernel/life.py`) is a task of one anyio task group, with the actor's name;
it fails and is cancelled as any other. Its turn is a future that only the kernel resolves: one
actor at a time has its turn, in the kernel's order, and the next one gets it when that one waits
for its turn again. Meanwhile it may await the real world (a backend in another process): simulated
time stands still until it has come back. So results do not depend on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from emu.kernel.clock import Actor, Kernel

_NOT_OF_TASKS: Final = (KeyboardInterrupt, SystemExit)
"""Errors that asyncio takes past every task, out of the event loop."""

_LOOK_S: Final = 0.05
"""So often is it shown where the run is."""


class _Turn:
    """A task waits here until the kernel resumes its actor."""

    def __init__(self, kernel: TaskKernel, actor: Actor) -> None:
        self._kernel = kernel
        self._actor = actor

    def __await__(self) -> Generator[Any, None, None]:
        call = asyncio.get_running_loop().create_future()
        self._actor.resume = call.set_result
        self._kernel.waits()
        return call.__await__()


class TaskKernel(Kernel):
    """Simulated time for actors that are tasks of the running event loop."""

    def __init__(self, *, events_per_instant_max: int = 100_000, start_ns: int = 0) -> None:
        super().__init__(events_per_instant_max=events_per_instant_max, start_ns=start_ns)
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._group: TaskGroup | None = None

    async def run(self, *, limit_ns: int | None = None) -> None:
        """Let the actors live until `stop` is called; as `Kernel.run`."""
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                self._begin(limit_ns)
                group.start_soon(self._look_around)
                if not self._running:
                    self._loop.call_soon(self._advance)
                await self._done.wait()
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            # One actor at a time runs, so one has failed; others were only cancelled.
            self.fail(errors.exceptions[0])
        finally:
            self._is_over = True
        self._end()

    def fail(self, error: BaseException) -> None:
        """End the run with an error."""
        super().fail(error)
        self._done.set()

    def stop(self) -> None:
        """The run is over as soon as what this set off at this instant has come to rest."""
        super().stop()
        self._go_on()

    def waits(self) -> None:
        """An actor waits for its turn, and others have theirs."""
        self._running -= 1
        self._go_on()

    async def _look_around(self) -> None:
        """Show where the run is, also while an actor waits for the real world."""
        while self._between is not None:
            await anyio.sleep(_LOOK_S)
            self._between()

    def call_soon_threadsafe(self, call: Callable[..., object], *arguments: Any) -> None:
        """Make this call in the event loop: for signal handlers and other threads."""
        self._loop.call_soon_threadsafe(call, *arguments)

    def _bring_to_life(self, actor: Actor) -> None:
        assert self._group is not None
        actor.turn = _Turn(self, actor)
        self._running += 1
        self._group.start_soon(self._live, actor, name=actor.name)

    async def _live(self, actor: Actor) -> None:
        """The task of an actor: even its first turn is the kernel's to give."""
        await actor.turn
        life = actor.life = actor.live()
        try:
            await life
        except _NOT_OF_TASKS as error:
            self.fail(error)

    def _step(self, actor: Actor) -> None:
        self._running += 1
        super()._step(actor)

    def _make_ready(self, actor: Actor) -> None:
        super()._make_ready(actor)
        self._go_on()

    def soon(self, call: Callable[[], None]) -> None:
        """Run a plain function at the end of the queue of this instant."""
        super().soon(call)
        self._go_on()

    def wake_in_turn(self, actors: Iterator[Actor]) -> None:
        """Wake these in their order, each when those before it have come to rest."""
        super().wake_in_turn(actors)
        self._go_on()

    def _go_on(self) -> None:
        """See to it that the queue is looked at, unless it is, or an actor has its turn."""
        if self._running == 0 and not self._is_advancing and not self._is_over:
            self._loop.call_soon(self._advance)

    def _advance(self) -> None:
        if not self._is_running:
            return  # something from outside has come before the actors live
        super()._advance()
        if self._is_over:
            self._done.set()

    def _move_on(self) -> None:
        super()._move_on()
        if self._running == 0 and not self._is_over:
            # The slice is over: signals, progress and other tasks have the event loop.
            self._loop.call_soon(self._advance)
