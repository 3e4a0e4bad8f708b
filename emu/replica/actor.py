"""The actor of a replica: hands events to the machine, and applies its actions.

Owns the machine: no other actor writes to it. Actions (requests that end, KV that leaves, locks,
weights, changes of state) are applied in their order (`effects.py`), each before the next; what
reaches the replica meanwhile (a request that its own change of state has set free) is handled at
once, between two handlers, never inside one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Final

from emu.kernel.clock import NOW, PARK, Actor
from emu.kernel.life import live
from emu.kernel.priorities import PRIORITY_WATCHER
from emu.latency.base import BatchShape
from emu.replica import actions as act
from emu.replica.beside import live_beside
from emu.replica.effects import EFFECTS, World
from emu.replica.events import (
    INTERRUPT,
    Event,
    Measured,
)
from emu.replica.flight.layered import UNTIL_END_OF_INSTANT
from emu.replica.inbound import reserve
from emu.replica.live_scaling import abandon, take_over
from emu.replica.replica import LOOP, Replica
from emu.replica.states import ReplicaState
from emu.request import Request
from emu.scheduling.base import Batch

S = ReplicaState
_END_OF_INSTANT: Final = PRIORITY_WATCHER - 1
_END: Final = act.End
_FREE_CAPACITY: Final = act.FreeCapacity
_MEASURE: Final = act.Measure


class ReplicaActor(Actor):
    """Mailbox, timer and hands of one replica."""

    def __init__(self, replica: Replica, world: World) -> None:
        super().__init__(world.kernel, replica.name, replica.priority)
        self.replica = replica
        self.world = world
        self.asked: BatchShape | None = None
        """What its last step has asked a backend outside simulated time."""
        replica.attach(self, self.inbox)

    def tell(self, event: Event) -> None:
        """Handle it now; its actions are applied before the sender goes on."""
        replica = self.replica
        replica.is_stirred = True
        if replica.flight.is_joint:
            replica.flight.unroll()
        handler = replica.handlers[event.kind]
        if handler is None:
            raise replica.unexpected(event.kind, event)
        handler(replica, event)
        if replica.out:
            self.perform()
        if replica.look or replica.flight.is_cut:
            self._look_up()

    def reserve(self, requests: list[Any]) -> bool:
        """Reserve blocks for inbound KV, all or nothing: a question, answered now."""
        replica = self.replica
        replica.is_stirred = True
        if replica.flight.is_joint:
            replica.flight.unroll()
        is_reserved = reserve(replica, requests)
        if replica.look or replica.flight.is_cut:
            self._look_up()
        return is_reserved

    def take_over(self, requests: Sequence[Request], first_layer: int) -> Batch:
        """Take a batch that another replica has begun: a question, answered now."""
        self.replica.is_stirred = True
        return take_over(self.replica, requests, first_layer)

    def abandon(self) -> list[Request]:
        """Forget the batch that it was given; its requests, if they are still there."""
        self.replica.is_stirred = True
        requests = abandon(self.replica)
        if self.replica.look:
            self._look_up()
        return requests

    def look(self) -> None:
        """Something that the replica looks at has changed."""
        self.kernel.wake(self)

    def arm(self, at_ns: int) -> None:
        """Its next step is at that time, unless it is in one."""
        if not (self.is_stepping or self.is_ready):
            self.kernel.arm(self, at_ns)

    def align(self, now_ns: int) -> int:
        """When the replica looks at what comes now."""
        replica = self.replica
        flight = replica.flight
        if not flight.is_open:
            return flight.align(now_ns)
        return NOW if replica.paused_ns < 0 else replica.align(now_ns)

    def describe(self) -> str:
        """One line for the story of a run that cannot go on."""
        return f"{super().describe()}; {self.replica.flight.tells(self.kernel.now_ns)}"

    def _look_up(self) -> None:
        replica, kernel, flight = self.replica, self.kernel, self.replica.flight
        look, is_cut = replica.look, flight.is_cut
        replica.look, flight.is_cut = 0, False
        if self.is_stepping:
            return  # the step looks at everything before it ends
        if is_cut and flight.due_ns < self.due_ns and not self.is_ready:
            kernel.arm(self, flight.due_ns)
        if look == INTERRUPT and flight.due_ns != UNTIL_END_OF_INSTANT:
            kernel.interrupt(self)
        elif look:
            kernel.wake(self)

    def live(self) -> Coroutine[object, None, None]:
        """Its life; with a backend outside simulated time one that waits for answers."""
        ends = self.kernel.ends
        return live_beside(self, ends) if self.replica.latency.foreign else live(self, ends)

    def tick(self) -> int:
        """Take the step: until something is in flight, or there is nothing to do."""
        replica = self.replica
        replica.is_stirred = True
        due_ns = replica.go_on()
        while True:
            if replica.out:
                self.perform()
            if due_ns != LOOP:
                break
            due_ns = replica.go_on()
        replica.look, replica.flight.is_cut = 0, False
        if due_ns == UNTIL_END_OF_INSTANT:
            self.kernel.arm(self, self.kernel.now_ns, _END_OF_INSTANT)
            return PARK
        return due_ns

    def perform(self) -> None:
        """Apply the actions of the handler that has just run."""
        replica = self.replica
        out = replica.out
        actions = out[:]
        out.clear()
        world = self.world
        for action in actions:
            kind = type(action)
            if kind is _END:  # those that are frequent need no table
                world.terminal(action.request, action.status, action.reason)  # type: ignore[attr-defined]
            elif kind is _FREE_CAPACITY:
                world.on_capacity(replica)
            elif kind is _MEASURE:
                self.asked = action.shape  # type: ignore[attr-defined]
            else:
                EFFECTS[kind](replica, world, action)

    @property
    def incarnation(self) -> int:
        """Which life of the replica it is."""
        return self.replica.incarnation

    def ask(self) -> Awaitable[int]:
        """Its step is over, and it asks a backend outside simulated time, ns."""
        shape, self.asked = self.asked, None
        self.kernel.goes_out(self)
        asked: Awaitable[int] = self.replica.latency.measure(shape)  # type: ignore[attr-defined]
        return asked

    def answered(self, life: int, cost_ns: int) -> None:
        """The answer to what was asked in this life of the replica."""
        self.kernel.comes_back(self)
        self.tell(Measured(life=life, cost_ns=cost_ns))
