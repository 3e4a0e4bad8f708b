"""A session in flight: which turns have arrived, and what the end of one brings.

The turns of a session are a graph: each waits for some before it (`Turn.after`), a chain where
nothing else is said. A turn arrives when the last of those that it waits for has completed, each
with the pause of its tool.
"""

from __future__ import annotations

import msgspec

from emu.request import Prefix, Request
from emu.workload.items import Line, Turn, make_request, prefix_of


class Following(msgspec.Struct, frozen=True):
    """What the end of a request means for its session."""

    arriving: list[Request] = []
    """Turns that had waited for it alone, with their arrival times."""
    dropped: list[Request] = []
    """Turns that will never be asked, as if they had arrived now."""
    goes_on: bool = False
    """Some turn of the session is still to end."""


NOTHING_FOLLOWS = Following()


class Session(msgspec.Struct):
    """A session in flight: the turns that are still to come. `model` is an index."""

    labels: Line
    """Its line, without the turns."""
    model: int
    first_request_id: int
    turns: list[Turn]
    prefixes: list[Prefix | None]
    """Of the turns whose ids are listed one by one, as arrays; None: made at release."""
    missing: list[int]
    """By turn, how many of those that it waits for have not completed."""
    followers: list[list[int]]
    """By turn, those that wait for it."""
    ready_ns: list[int]
    """By turn, its arrival as far as it is known."""
    in_flight: int = 0
    """Sub-requests that have arrived and not ended."""
    latest: Prefix | None = None
    """Of the turn that was released last, if its ids are ranges."""

    def release(self, index: int, arrival_ns: int) -> Request:
        """The request of the turn at `index`, which arrives at `arrival_ns`."""
        turn = self.turns[index]
        prefix = self.prefixes[index] or prefix_of(turn)
        self.prefixes[index] = None
        if prefix is not None and prefix.ranges is not None:
            prefix.before, self.latest = self.latest, prefix
        request_id = self.first_request_id + index
        request = make_request(turn, self.labels, request_id, arrival_ns, self.model, prefix)
        request.sub_request_index = index
        request.has_more_turns = bool(self.followers[index])
        self.in_flight += 1
        return request

    def roots(self) -> list[int]:
        """Turns that arrive with the session."""
        return [index for index, count in enumerate(self.missing) if not count]

    def complete(self, index: int, now_ns: int) -> list[int]:
        """A turn has completed: those that need wait no longer."""
        ready = []
        at_ns = now_ns + self.turns[index].tool_duration_ns
        for follower in self.followers[index]:
            self.ready_ns[follower] = max(self.ready_ns[follower], at_ns)
            self.missing[follower] -= 1
            if not self.missing[follower]:
                ready.append(follower)
        return ready

    def drop(self) -> list[int]:
        """A turn did not complete: none that has not been released will be."""
        left = [index for index, count in enumerate(self.missing) if count > 0]
        for index in left:
            self.missing[index] = -1
        for followers in self.followers:
            followers.clear()
        return left


def open_session(line: Line, first_id: int, model: int = 0) -> Session:
    """The session of a line, nothing released yet. `model` is an index."""
    turns = line.sub_requests
    assert turns is not None
    # Lists of Python integers become arrays now: they may have to wait for long.
    prefixes = [prefix_of(turn) if turn.input_tok_ids else None for turn in turns]
    slim = [
        msgspec.structs.replace(turn, input_tok_ids=None, output_tok_ids=None)
        if turn.input_tok_ids or turn.output_tok_ids
        else turn
        for turn in turns
    ]
    followers: list[list[int]] = [[] for _ in turns]
    missing = []
    for index, turn in enumerate(turns):
        before = waits_for(turn, index)
        missing.append(len(before))
        for other in before:
            followers[other].append(index)
    labels = msgspec.structs.replace(
        line, session_id=line.session_id or f"session_{first_id}", sub_requests=None
    )
    return Session(
        labels,
        model,
        first_id,
        slim,
        prefixes,
        missing,
        followers,
        [0] * len(turns),
    )


def waits_for(turn: Turn, index: int) -> list[int]:
    """Positions of the turns that this one, at `index`, waits for."""
    if turn.after is None:
        return [index - 1] if index else []
    return turn.after
