"""A session in flight, and how a line or a turn becomes a request."""

from __future__ import annotations

import msgspec

from emu.request import Prefix, Request
from emu.workload.items import Line, Turn, prefix_of


class Session(msgspec.Struct):
    """A session in flight: the sub-requests that are still to come."""

    session_id: str
    tenant: str
    model: int
    priority: int
    acceptance_rate: float
    adapter: str
    next_request_id: int
    turns: list[Turn]
    prefixes: list[Prefix | None]
    """Of the turns whose ids are listed one by one, as arrays; None: made at release."""
    next_index: int = 0

    @property
    def remaining(self) -> int:
        """Sub-requests that have not been released."""
        return len(self.turns) - self.next_index


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
    )


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
