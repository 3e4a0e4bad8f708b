"""Answers under way: one for each choice of a call, and the call that waits for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from emu.apps.serve.lines import Line
from emu.apps.serve.script import Script
from emu.apps.serve.traces.recorder import TracedCall, problem_of
from emu.apps.serve.traces.spans import Half
from emu.request import Request, Status


class Choice:
    """One answer: how far it is, what of it has been sent, and the filler token of its `start`."""

    __slots__ = (
        "base", "begun_ns", "came_ns", "exchange", "first_ns", "giver", "heir", "index", "is_ended",
        "last_ns", "line", "loaded_ns", "produced", "request", "script", "sent", "start",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange,
        index: int,
        request: Request,
        start: int,
        script: Script | None = None,
    ) -> None:
        self.exchange = exchange
        self.index = index
        self.request = request
        self.start = start
        """Filler token with which its text begins."""
        self.script = script
        """What it says, if that is not plain filler."""
        self.base = 0
        """Tokens of the request that another endpoint produced: no part of this answer."""
        self.heir: Choice | None = None
        """The answer that gets the tokens after the first."""
        self.giver: Choice | None = None
        """The answer that got the first."""
        self.came_ns = -1
        """When it was asked for, where that is not the request's arrival."""
        self.loaded_ns = -1
        """When its KV had come from another endpoint, where it did."""
        self.begun_ns = -1
        """When the engine had its first token, which may still be on its way through the front
        end."""
        self.line: Line | None = None
        """Passes on its tokens as they come, each at once."""
        self.produced = 0
        """Tokens that have left the emulated front end."""
        self.sent = 0
        self.first_ns = -1
        self.last_ns = -1
        """Emulated times at which the first and the last token so far left it."""
        self.is_ended = False

    @property
    def is_begun(self) -> bool:
        """The engine has its first token."""
        return self.begun_ns >= 0

    @property
    def taker(self) -> Choice | None:
        """The answer on the endpoint that fetches the KV; None as long as none has come."""
        return self if self.base else self.heir

    @property
    def tokens(self) -> int:
        """Tokens of the whole answer."""
        return self.request.output_tokens - self.base

    @property
    def finish_reason(self) -> str:
        """The reason in OpenAI's words."""
        request = self.request
        if self.script is not None and self.script.finish:
            return self.script.finish
        return "length" if request.output_tokens >= request.max_output_tokens else "stop"


def traced_half(choice: Choice, replica_id: int, now_ns: int) -> tuple[TracedCall, Half] | None:
    """What an engine of a fleet did of an answer, if its call has a trace."""
    call, request = choice.exchange.trace, choice.request
    if call is None:
        return None
    is_taker, is_over = choice.base > 0 or choice.came_ns >= 0, request.status.is_terminal
    is_first = request.handoff_after_ns >= 0 and not is_taker
    last_ns = choice.begun_ns if is_first else request.last_token_ns
    problem = "" if is_first and choice.is_begun else problem_of(request) if is_over else ""
    return call, Half(
        replica=replica_id,
        came_ns=choice.came_ns if is_taker else request.arrival_ns,
        scheduled_ns=choice.loaded_ns if is_taker else request.first_scheduled_ns,
        first_ns=choice.begun_ns,
        last_ns=last_ns if last_ns >= 0 and not problem else now_ns,
        tokens=1 if is_first else choice.produced,
        problem=problem,
    )


class Exchange:
    """The answers of one HTTP call, and the event that says something has changed."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.changed = asyncio.Event()
        self.on_token: Callable[[int], int] | None = None
        """The same where it is not so simple: writes the tokens that are there, the last of which
        was due at the instant given, and says how many have left this process. None = what waits
        for a change does it."""
        self.has_left = False
        self.came_ns = -1
        """Emulated time at which the call reached the machine."""
        self.entered_ns = -1
        """Emulated time at which its requests arrive, or what it waited for goes on."""
        self.is_entering = False
        """It has been read, and the emulation has not come to its arrival."""
        self.adapter = ""
        """Name of the LoRA adapter that was asked for."""
        self.cache_salt = ""
        self.trace: TracedCall | None = None
        """The trace that it belongs to, if one is kept."""

    @property
    def is_ended(self) -> bool:
        """Every answer has ended."""
        return all(choice.is_ended for choice in self.choices)

    def failure(self) -> Request | None:
        """A request that ended without completing."""
        for choice in self.choices:
            if choice.is_ended and choice.request.status is not Status.COMPLETED:
                return choice.request
        return None
