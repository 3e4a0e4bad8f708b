"""The direct collective packet by packet: what rounds hide when messages do not arrive together.

Owns one phase of ASTRA-Sim's direct algorithm among ranks that start at any instants, with any
time for a message between two of them, and with a window on the messages under way. Where all
start together, all messages take as long, and there is no window, `rounds.py` says the same
(a test compares). `congestion.py` gives it links that messages contend for.

A rank keeps packets that wait to be sent, in the order of their peers: next rank, the one behind
it, and so on around. It begins with a window of them. Every message that it receives puts one
more into the queue, which is ready an endpoint delay later, after a reduction if this packet is
one to be reduced. Each time something gets ready one packet leaves, except that the second half
of an all-reduce begins only when everything of the first has come in. A rank is done when all
has been sent and as many packets are ready as the window holds. Source: ASTRA-Sim.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from emu.network.rounds import Kind

Net = Callable[[int, int], int]
"""Time of the phase's message from one position to another, in ns."""

_READY = -1
_REDUCED = -2
"""What may be due at a rank beside a message: something is ready, or will be when reduced."""


class _Rank:
    """One rank's counters."""

    def __init__(self, kind: Kind, position: int, npus: int, window: int) -> None:
        self.position = position
        self.npus = npus
        self.window = window
        self.left = 2 * (npus - 1) if kind == "all-reduce" else npus - 1
        """Messages still to be sent."""
        self.queue: deque[int] = deque()
        """Steps to the peers of waiting packets."""
        self.ready = 0
        self.received = 0
        self.posted: dict[int, int] = {}
        """Receives posted and not met, by sender."""
        self.landed: dict[int, int] = {}
        """Messages that have come in before their receive was posted, by sender."""
        self.plain_left = self.reduced_left = 0
        """Packets still to come of the current batch: first those as they are, then the others."""
        self.is_first_pass = False
        self._step = 0

    def next_step(self) -> int:
        """Distance to the next peer around the circle."""
        self._step = self._step % (self.npus - 1) + 1
        return self._step

    def insert(self, kind: Kind) -> bool:
        """Queue a packet; whether it is reduced before it is ready."""
        if not self.plain_left and not self.reduced_left:
            self.plain_left = self.reduced_left = self.window
            self.is_first_pass = not self.is_first_pass
        self.queue.append(self.next_step())
        if self.plain_left:
            self.plain_left -= 1
            return False
        self.reduced_left -= 1
        return kind == "reduce-scatter" or (kind == "all-reduce" and self.is_first_pass)


class Circle:
    """All ranks of a phase, and what is due when.

    `window` counts the packets that a rank may have under way.
    """

    def __init__(
        self, kind: Kind, npus: int, net: Net, *, delay_ns: int, reduction_ns: int, window: int
    ) -> None:
        self.kind: Kind = kind
        self.npus = npus
        self.net = net
        self.delay_ns = delay_ns
        self.reduction_ns = reduction_ns
        self.window = window
        self.ranks = [_Rank(kind, position, npus, window) for position in range(npus)]
        self.ends = [-1] * npus
        self._events: list[tuple[int, int, int, int]] = []
        """(due, order, rank, what): the sender of a message that lands, npus + one whose message
        had landed before its receive was posted, `_READY` or `_REDUCED`."""
        self._order = 0

    def run(self) -> None:
        """Run until nothing is due any more."""
        events = self._events
        while events:
            now, _, position, what = heapq.heappop(events)
            self.happen(now, position, what)

    def happen(self, now: int, position: int, what: int) -> None:
        """What was due at a rank. `now` is in ns."""
        rank = self.ranks[position]
        if what == _REDUCED:
            self.due(now, self.reduction_ns, position, _READY)
        elif what == _READY:
            self._get_ready(rank, now)
        elif what < self.npus and not rank.posted.get(what):
            rank.landed[what] = rank.landed.get(what, 0) + 1
        elif self.ends[position] < 0:
            if what < self.npus:
                rank.posted[what] -= 1
            rank.received += 1
            self._insert(rank, now)

    def begin(self, position: int, now: int) -> None:
        """A rank starts: as many packets as the window holds. `now` is in ns."""
        for _ in range(self.window):
            self._insert(self.ranks[position], now)

    def _insert(self, rank: _Rank, now: int) -> None:
        """One more packet of a rank, which gets ready after the endpoint delay."""
        what = _REDUCED if rank.insert(self.kind) else _READY
        self.due(now, self.delay_ns, rank.position, what)

    def due(self, now: int, delay_ns: int, rank: int, what: int) -> None:
        """Something happens at a rank so much later. `now` is in ns."""
        heapq.heappush(self._events, (now + delay_ns, self._order, rank, what))
        self._order += 1

    def carry(self, now: int, sender: int, receiver: int) -> None:
        """A message leaves. `sender` and `receiver` are positions, `now` is in ns."""
        self.due(now, self.net(sender, receiver), receiver, sender)

    def end(self, position: int, now: int) -> None:
        """A rank is done. `now` is in ns."""
        self.ends[position] = now

    def _send(self, rank: _Rank, now: int) -> None:
        if not rank.queue or not rank.left or not rank.ready:
            return
        step = rank.queue.popleft()
        rank.left -= 1
        rank.ready -= 1
        receiver = (rank.position + step) % self.npus
        sender = (rank.position - step) % self.npus
        self.carry(now, rank.position, receiver)
        if rank.landed.get(sender):
            rank.landed[sender] -= 1
            self.due(now, 0, rank.position, self.npus + sender)
        else:
            rank.posted[sender] = rank.posted.get(sender, 0) + 1

    def _get_ready(self, rank: _Rank, now: int) -> None:
        rank.ready += 1
        peers = self.npus - 1
        if self.kind == "all-reduce" and rank.left <= peers:
            if rank.received < peers:
                return
            for _ in range(self.window):
                self._send(rank, now)
        else:
            self._send(rank, now)
        if not rank.left and rank.ready == self.window and self.ends[rank.position] < 0:
            self.end(rank.position, now)


def direct_ends_ns(
    kind: Kind,
    starts_ns: Sequence[int],
    net: Net,
    *,
    delay_ns: int,
    reduction_ns: int,
    window: int = 0,
) -> list[int]:
    """When each rank is done. `delay_ns`: endpoint delay; `window` 0 = no limit."""
    npus = len(starts_ns)
    width = min(window, npus - 1) if window > 0 else npus - 1
    circle = Circle(kind, npus, net, delay_ns=delay_ns, reduction_ns=reduction_ns, window=width)
    for position, start in enumerate(starts_ns):
        circle.begin(position, start)
    circle.run()
    return circle.ends
