"""The direct collective packet by packet: what rounds hide when messages do not arrive together.

Owns one phase of ASTRA-Sim's direct algorithm among ranks that start at any instants, with any
time for a message between two of them, and with a window on the messages under way. Where all
start together, all messages take as long, and there is no window, the rounds of `collectives.py`
say the same (a test compares).

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
    ranks = [_Rank(kind, position, npus, width) for position in range(npus)]
    ends = [-1] * npus
    events: list[tuple[int, int, int, int]] = []
    """(due, order, rank, sender or -1 for "something is ready" or -2 for a reduction)."""

    def at(due: int, rank: int, what: int) -> None:
        heapq.heappush(events, (due, len(order), rank, what))
        order.append(None)

    order: list[None] = []

    def insert(rank: _Rank, now: int) -> None:
        is_reduced = rank.insert(kind)
        at(now + delay_ns, rank.position, -2 if is_reduced else -1)

    def send(rank: _Rank, now: int) -> None:
        if not rank.queue or not rank.left or not rank.ready:
            return
        step = rank.queue.popleft()
        rank.left -= 1
        rank.ready -= 1
        receiver = (rank.position + step) % npus
        sender = (rank.position - step) % npus
        at(now + net(rank.position, receiver), receiver, rank.position)
        if rank.landed.get(sender):
            rank.landed[sender] -= 1
            at(now, rank.position, npus + sender)
        else:
            rank.posted[sender] = rank.posted.get(sender, 0) + 1

    def get_ready(rank: _Rank, now: int) -> None:
        rank.ready += 1
        if kind == "all-reduce" and rank.left <= npus - 1:
            if rank.received < npus - 1:
                return
            for _ in range(width):
                send(rank, now)
        else:
            send(rank, now)
        if not rank.left and rank.ready == width and ends[rank.position] < 0:
            ends[rank.position] = now

    for rank, start in zip(ranks, starts_ns, strict=True):
        for _ in range(width):
            insert(rank, start)
    while events:
        now, _, position, what = heapq.heappop(events)
        rank = ranks[position]
        if what == -2:
            at(now + reduction_ns, position, -1)
        elif what == -1:
            get_ready(rank, now)
        elif what < npus and not rank.posted.get(what):
            rank.landed[what] = rank.landed.get(what, 0) + 1
        elif ends[position] < 0:
            if what < npus:
                rank.posted[what] -= 1
            rank.received += 1
            insert(rank, now)
    return ends
