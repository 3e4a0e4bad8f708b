"""A session in flight, and how a line or a turn becomes a request.

The turns of a session are a graph: each waits for some before it (`Turn.after`), a chain where
nothing else is said. A turn arrives when the last of those that it waits for has completed, each
with the pause of its tool.
"""

from __future__ import annotations

import msgspec

from emu.request import Prefix, Request
from emu.workload.items import Line, Turn, prefix_of


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
    """A session in flight: the turns that are still to come."""

    session_id: str
    tenant: str
    model: int
    priority: int
    acceptance_rate: float
    adapter: str
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
    """The session of a line, nothing released yet."""
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
    session_id = line.session_id or f"session_{first_id}"
    return Session(
        session_id,
        line.tenant,
        model,
        line.priority,
        line.acceptance_rate,
        line.adapter,
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


def make_request(
    item: Line | Turn, request_id: int, arrival_ns: int, prefix: Prefix | None
) -> Request:
    """The request of a flat line or a turn; labels are the caller's."""
    request = Request(
        request_id=request_id,
        arrival_ns=arrival_ns,
        prompt_tokens=item.input_toks,
        output_tokens=item.output_toks,
        max_output_tokens=item.max_output_toks or item.output_toks,
        prefix=prefix,
        deadline_ns=arrival_ns + item.deadline_ns if item.deadline_ns >= 0 else -1,
        cancel_after_ns=item.cancel_after_ns,
    )
    if item.images:
        request.images = tuple(item.images)
    return request
