"""One live migration of a running decode as a machine: events in, actions out.

As in Llumnix (OSDI'24): the blocks that exist are copied while the request decodes; what it has
produced meanwhile is copied in further, ever shorter rounds; when little is left the request
stops at the end of an iteration, the rest moves, and it goes on at the destination. The handoff
is the same as everywhere: hold, reserve, transfer, activate, release. The stop is part of the
request's `migration_ns`.

A migration is given up, at no cost to the request, when the request ends, is preempted or
cancelled, when the destination has no room for it, or when it or the transfer fails. If the source
crashes after the stop, the request is lost with it.

`HANDLERS[phase, kind]` is what happens; a pair without a handler raises `UnexpectedEvent`. Three
questions are answered at once (`Side`): is the replica in the same life, how much of the request
it has, and a reservation. `LiveMigrator` (`live.py`) applies the actions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

import msgspec

from emu.errors import UnexpectedEvent
from emu.request import Request, Status
from emu.units import ceil_div

ROUNDS_MAX: Final = 8
"""Copying rounds before the stop (Llumnix needs two or three)."""
STOP_BLOCKS: Final = 2
"""The request stops when no more than so many blocks are left to copy."""


class Phase(enum.Enum):
    """How far a live migration has come."""

    ASKED = "asked"
    COPYING = "copying"
    STOPPING = "stopping"
    LAST_TRANSFER = "last_transfer"
    OVER = "over"


class Side(Protocol):
    """One of the two replicas, as it was when the migration was asked for."""

    @property
    def is_alive(self) -> bool:
        """It is in the same life."""
        ...

    @property
    def takes_kv(self) -> bool:
        """Its state lets it decode what arrives."""
        ...

    def reserve(self, request: Request) -> bool:
        """Blocks for all that the request has reached: a question, answered now."""
        ...

    def tokens_of(self, request: Request) -> int:
        """Tokens of the request whose KV it has, or -1 if the request does not run there."""
        ...


class Event(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Base of all events."""


class Begun(Event, frozen=True, eq=False, gc=False):
    """The instant at which it was asked for has come to rest."""


class Noticed(Event, frozen=True, eq=False, gc=False):
    """The network reports the end of a transfer. It may do so twice, or late: the number tells."""

    number: int
    has_arrived: bool


class TransferEnded(Event, frozen=True, eq=False, gc=False):
    """What else the end of the transfer has set off at this instant has happened."""


class Stopped(Event, frozen=True, eq=False, gc=False):
    """The source answers: the request stands still there, or has ended or gone."""


class RoomAsked(Event, frozen=True, eq=False, gc=False):
    """The reservation, which was for fewer tokens, is given back: one for all is asked for."""


class Forgotten(Event, frozen=True, eq=False, gc=False):
    """The request has ended, or starts anew elsewhere."""


class Cut(Event, frozen=True, eq=False, gc=False):
    """One of the two replicas has crashed: what is on its way will not arrive."""


class Action(msgspec.Struct, frozen=True, gc=False):
    """Base of all actions."""


class CountMove(Action, frozen=True, gc=False):
    """A replica has one live migration more, or one less (then it has free capacity too).

    `change` is 1 or -1.
    """

    is_source: bool
    change: int


class AskStop(Action, frozen=True, gc=False):
    """Ask the source to stop the request at the end of its iteration; the answer is `Stopped`."""


class UndoStop(Action, frozen=True, gc=False):
    """The request goes on at the source."""


class Release(Action, frozen=True, gc=False):
    """Free the source's blocks."""


class Unreserve(Action, frozen=True, gc=False):
    """Give the destination's blocks back."""


class AskRoom(Action, frozen=True, gc=False):
    """Go on with `RoomAsked`, now that what came before is applied."""


class Send(Action, frozen=True, gc=False):
    """Start a transfer; its end is noticed with this number."""

    number: int
    size_bytes: int


class CancelTransfer(Action, frozen=True, gc=False):
    """Stop the transfer under way."""


class EndSoon(Action, frozen=True, gc=False):
    """Go on with `TransferEnded` at the end of this instant's queue."""


class Deliver(Action, frozen=True, gc=False):
    """The request decodes at the destination from now on; it stood still for so long."""

    started_ns: int
    stop_ns: int


class Leave(Action, frozen=True, gc=False):
    """It holds nothing of its source any more."""


class WaitAWhile(Action, frozen=True, gc=False):
    """The source waits before the next live migration."""


class LookSource(Action, frozen=True, gc=False):
    """The source, which may be draining, looks for another destination."""


class Rebalance(Action, frozen=True, gc=False):
    """The rebalancing rule may look again."""


class Finish(Action, frozen=True, gc=False):
    """It is over, well or not."""

    is_done: bool


class LiveMove:
    """State of one live migration."""

    __slots__ = (
        "block_size",
        "copied_tokens",
        "destination",
        "has_arrived",
        "is_forgotten",
        "is_sending",
        "now_ns",
        "number",
        "out",
        "phase",
        "request",
        "rounds",
        "source",
        "started_ns",
        "state_bytes",
        "stopped_ns",
        "token_bytes",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        source: Side,
        destination: Side,
        *,
        block_size: int,
        token_bytes: int,
        state_bytes: int = 0,
    ) -> None:
        """`state_bytes`: of the states of a sequence, which each step changes."""
        self.request = request
        self.source = source
        self.destination = destination
        self.block_size = block_size
        self.token_bytes = token_bytes
        self.state_bytes = state_bytes
        self.phase = Phase.ASKED
        self.is_forgotten = False
        """The request has ended or gone elsewhere."""
        self.is_sending = False
        self.number = 0
        """Counts transfers: a notice with another number is late, or the second one."""
        self.has_arrived = False
        self.rounds = 0
        self.copied_tokens = 0
        """Whole blocks of them."""
        self.tokens = 0
        """What the transfer under way will have copied."""
        self.started_ns = self.stopped_ns = -1
        self.now_ns = 0
        self.out: list[Action] = []

    def step(self, event: Event, now_ns: int) -> list[Action]:
        """Handle an event that happens now. Raises `UnexpectedEvent`."""
        handler = HANDLERS[self.phase].get(type(event))
        if handler is None:
            raise UnexpectedEvent(
                f"the live migration of request {self.request.request_id} is {self.phase.value} "
                f"and does not expect {event}",
                at_ns=now_ns,
            )
        self.now_ns = now_ns
        handler(self, event)
        out, self.out = self.out, []
        return out

    def copy_round(self) -> None:
        """Copy what is there while it decodes; ask it to stop when little is left."""
        if self.rounds < ROUNDS_MAX:
            self.rounds += 1
            self.tokens = self.source.tokens_of(self.request)
            if self.tokens < 0:
                self.finish(is_done=False)
                return
            if self._blocks_left(self.tokens) > STOP_BLOCKS:
                self.send(self.tokens)
                return
        self.phase = Phase.STOPPING
        self.out.append(AskStop())

    def send(self, tokens: int) -> None:
        """Move the blocks that are not copied yet; states once the request stands still."""
        self.number += 1
        self.is_sending = True
        self.has_arrived = False
        size_bytes = self._blocks_left(tokens) * self.block_size * self.token_bytes
        if self.phase is Phase.LAST_TRANSFER:
            size_bytes += self.state_bytes
        self.out.append(Send(self.number, size_bytes))

    def _blocks_left(self, tokens: int) -> int:
        return ceil_div(tokens, self.block_size) - self.copied_tokens // self.block_size

    def stop_transfer(self) -> None:
        """What is on its way will not arrive."""
        if self.is_sending:
            self.is_sending = False
            self.has_arrived = False
            self.out += (CancelTransfer(), EndSoon())

    def finish(self, *, is_done: bool) -> None:
        """Both sides are free of it."""
        self.phase = Phase.OVER
        has_source, has_destination = self.source.is_alive, self.destination.is_alive
        if not is_done and has_destination and not self.is_forgotten:
            self.out.append(Unreserve())
        self.out.append(Leave())
        if not is_done and has_source:
            self.out.append(WaitAWhile())
        if has_source:
            self.out.append(CountMove(is_source=True, change=-1))
        if has_destination:
            self.out.append(CountMove(is_source=False, change=-1))
        self.out += (Rebalance(), Finish(is_done))


def ignore(move: LiveMove, event: Event) -> None:
    """It may come, and means nothing here."""


def begun(move: LiveMove, event: Begun) -> None:
    """Reserve at the destination, and copy; or give up."""
    move.started_ns = move.now_ns
    if move.is_forgotten or not move.destination.reserve(move.request):
        move.phase = Phase.OVER
        move.out += (Leave(), Finish(is_done=False), LookSource())
        return
    move.out += (CountMove(is_source=True, change=1), CountMove(is_source=False, change=1))
    move.phase = Phase.COPYING
    move.copy_round()


def noticed(move: LiveMove, event: Noticed) -> None:
    """The first notice of the transfer under way counts."""
    if move.is_sending and event.number == move.number:
        move.is_sending = False
        move.has_arrived = event.has_arrived
        move.out.append(EndSoon())


def copy_ended(move: LiveMove, event: TransferEnded) -> None:
    """Copy what has been produced meanwhile, or give up."""
    if not (move.has_arrived and move.source.is_alive and move.destination.is_alive):
        move.finish(is_done=False)
        return
    move.copied_tokens = move.tokens // move.block_size * move.block_size
    move.copy_round()


def stopped(move: LiveMove, event: Stopped) -> None:
    """Give the reservation back and take one for all that the request has reached by now."""
    if (
        move.is_forgotten
        or move.request.status is not Status.MIGRATING
        or not move.source.is_alive  # ended, was preempted, cancelled or lost before it could stop
    ):
        move.finish(is_done=False)
        return
    move.stopped_ns = move.now_ns
    if move.destination.is_alive:
        move.out.append(Unreserve())
    move.out.append(AskRoom())


def room_asked(move: LiveMove, event: RoomAsked) -> None:
    """The rest moves, or the request goes on where it is."""
    destination = move.destination
    if destination.is_alive and destination.takes_kv and destination.reserve(move.request):
        move.phase = Phase.LAST_TRANSFER
        move.send(move.request.reached_tokens)
        return
    move.out.append(UndoStop())
    move.finish(is_done=False)


def last_ended(move: LiveMove, event: TransferEnded) -> None:
    """The request goes on over there, or, if anything has failed, at the source."""
    is_done = False
    if move.source.is_alive and not move.is_forgotten:  # else lost with it, or ended
        if not (move.has_arrived and move.destination.is_alive):
            move.out.append(Release() if move.request.status.is_terminal else UndoStop())
        else:
            move.out.append(Release())
            if not move.request.status.is_terminal:
                stop_ns = move.now_ns - move.stopped_ns
                move.request.note_migration(stop_ns)
                move.out.append(Deliver(move.started_ns, stop_ns))
                is_done = True
    move.finish(is_done=is_done)


def forgotten(move: LiveMove, event: Forgotten) -> None:
    """Both sides are free at once."""
    move.is_forgotten = True
    if move.destination.is_alive:
        move.out.append(Unreserve())
    if move.request.status is Status.MIGRATING and move.source.is_alive:
        move.out.append(Release())
    move.stop_transfer()


def cut(move: LiveMove, event: Cut) -> None:
    """A transfer under way ends without arriving."""
    move.stop_transfer()


Handler = Callable[[LiveMove, Any], None]
HANDLERS: Final[Mapping[Phase, Mapping[type[Event], Handler]]] = MappingProxyType(
    {
        Phase.ASKED: {Begun: begun, Forgotten: forgotten, Cut: ignore},
        Phase.COPYING: {
            Noticed: noticed,
            TransferEnded: copy_ended,
            Forgotten: forgotten,
            Cut: cut,
        },
        Phase.STOPPING: {
            Noticed: ignore,
            Stopped: stopped,
            RoomAsked: room_asked,
            Forgotten: forgotten,
            Cut: ignore,
        },
        Phase.LAST_TRANSFER: {
            Noticed: noticed,
            TransferEnded: last_ended,
            Forgotten: forgotten,
            Cut: cut,
        },
        Phase.OVER: {Noticed: ignore, Forgotten: ignore, Cut: ignore},
    }
)
"""(phase, kind of event) -> handler; a pair that is missing is a bug of its sender."""
