"""Benches for the machines of migration: no kernel, no network, no replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from emu.migration import messages as msg
from emu.migration.outbound import HALVES_OFFERED, Kv, Outbound
from emu.replica.split_batch import SplitBatch
from emu.request import Request, Status
from emu.testing import request

A = TypeVar("A", bound=msg.Action)


class Search:
    """Destinations in the order in which a test wants them found; -1 when the list is over."""

    def __init__(self, found: Sequence[int], refused: bool, fits: bool) -> None:
        self.found = list(found)
        self.was_refused = refused
        self.was_full = False
        self.fits = fits
        self.failures: dict[int, int] = {}

    def take(self, requests: list[Request]) -> int:
        return self.found.pop(0) if self.found else -1

    def none_could_hold(self, requests: list[Request]) -> bool:
        return not self.fits

    def failed(self, destination_id: int) -> None:
        self.failures[destination_id] = self.failures.get(destination_id, 0) + 1

    def arrived(self, destination_id: int) -> None:
        self.failures.pop(destination_id, None)

    def forget(self) -> None:
        self.failures.clear()


def outbound(
    *,
    source_id: int = 0,
    destinations: Sequence[int] = (),
    refused: bool = False,
    fits: bool = True,
    kv: Kv | None = None,
    attempts_max: int = 1,
    lease_ns: int = 0,
    full: bool = False,
) -> Outbound:
    """A machine whose searches give these destinations."""
    ids = iter(range(1, 100))
    search = Search(destinations, refused, fits)
    search.was_full = full
    return Outbound(
        source_id,
        search,
        kv or Kv(block_size=4, bytes_per_token=10),
        lambda: next(ids),
        attempts_max=attempts_max,
        lease_ns=lease_ns,
    )


def prompts(*ids: int) -> list[Request]:
    """Prompts of 4 tokens that are done: each has its first token."""
    found = []
    for request_id in ids:
        made = request(request_id, 4, output=9)
        made.status, made.holder_id, made.generated_tokens = Status.MIGRATING, 0, 1
        made.first_token_ns = 0
        found.append(made)
    return found


def split_of(
    *ids: int,
    batch_id: int = 1,
    start: int = 1,
    layers: int = 4,
    first_id: int = -1,
    second_id: int = -1,
) -> SplitBatch:
    """A batch that a helper goes on with after `start` layers."""
    made = SplitBatch(batch_id, prompts(*ids), start, layers, 0)
    made.first_id, made.second_id = first_id, second_id
    return made


def kinds(actions: Sequence[object]) -> list[str]:
    """What the actions are, in their order."""
    return [type(action).__name__ for action in actions]


def only(actions: Sequence[msg.Action], kind: type[A]) -> A:
    """The one action of a kind."""
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


class Pair:
    """The machines of a new and of an old replica; what they tell each other is delivered."""

    def __init__(self, *ids: int, destinations: Sequence[int], start: int = 1) -> None:
        self.first = outbound(source_id=0, destinations=destinations)
        self.second = outbound(source_id=1, destinations=[8])  # never asked for one
        self.split = split_of(*(ids or (1,)), start=start)
        self.done: list[msg.Action] = []
        self._by: list[Outbound] = []

    def begin(self) -> None:
        """The first layers are computed."""
        self.tell(self.first, msg.FirstComputed(self.split), 0)

    def compute(self, survivors: list[Request] | None = None) -> SplitBatch:
        """Both have computed their layers."""
        self.begin()
        going = self.split.requests if survivors is None else survivors
        self.tell(self.second, msg.SecondComputed(self.split, going), 10)
        return self.split

    def tell(self, machine: Outbound, event: msg.Event, now_ns: int) -> None:
        """An event, and all that follows from it in both machines."""
        for action in machine.step(event, now_ns):
            self.done.append(action)
            self._by.append(machine)
            if isinstance(action, msg.Tell):
                other = (self.first, self.second)[action.source_id]
                self.tell(other, action.event, now_ns)
            elif isinstance(action, msg.OfferHalves):
                self.tell(machine, HALVES_OFFERED, now_ns)
            elif isinstance(action, msg.Offer):
                self.tell(machine, msg.Looked(), now_ns)
            elif isinstance(action, msg.OfferBatch):
                self.tell(machine, msg.Offered(), now_ns)

    @property
    def sent(self) -> list[msg.Send]:
        """Transfers in the order in which they were started."""
        return self.of(msg.Send)

    def of(self, kind: type[A]) -> list[A]:
        """All actions of a kind so far."""
        return [action for action in self.done if isinstance(action, kind)]

    def by(self, machine: Outbound, kind: type[A]) -> list[A]:
        """Those of one machine."""
        return [
            action
            for action, actor in zip(self.done, self._by, strict=True)
            if isinstance(action, kind) and actor is machine
        ]
