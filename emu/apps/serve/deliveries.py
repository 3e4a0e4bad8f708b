"""Tokens on their way to clients, a replica's step at a time: the loops that run for each token.

Compiled where the hot path is. What a step has made passes through here twice: when the engine has
the tokens (`take_up`), and when they leave its front end (`hand_over`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from emu.apps.serve.choices import Choice
from emu.request import Request


def take_up(
    receivers: Iterable[Request],
    choices: dict[int, Choice],
    begin: Callable[[Choice], None],
) -> tuple[int, list[Choice]]:
    """Return how many tokens the engine has made, and the open answers that they belong to.

    `begin` hears of an answer whose first token this is.
    """
    takers: list[Choice] = []
    count = 0
    for request in receivers:
        count += 1
        choice = choices.get(request.request_id)
        if choice is not None:
            takers.append(choice)
            if choice.begun_ns < 0:
                begin(choice)
    return count, takers


def hand_over(
    takers: list[Choice],
    now_ns: int,
    begin: Callable[[Choice], None],
    add_gaps: Callable[[int, int], None],
) -> tuple[int, int]:
    """Return how many of these tokens, one for each answer, were written to their clients at once,
    and for how many of the answers something else was woken to do it.

    `begin` hears of an answer whose first token leaves, `add_gaps` of how long the others came
    after the ones before them: (ns, how many).
    """
    last_ns = -1
    gaps = written = woken = 0
    for choice in takers:
        choice.produced += 1
        if choice.last_ns < 0:
            begin(choice)
        elif choice.last_ns == last_ns:
            gaps += 1
        else:
            if gaps:
                add_gaps(now_ns - last_ns, gaps)
            last_ns = choice.last_ns
            gaps = 1
        choice.last_ns = now_ns
        exchange = choice.exchange
        line = exchange.line
        if line is not None and line.write(now_ns):
            choice.sent = line.sent
            written += line.leaves
        elif exchange.on_token is not None:
            written += exchange.on_token(now_ns)
        else:
            exchange.changed.set()
            woken += 1
    if gaps:
        add_gaps(now_ns - last_ns, gaps)
    return written, woken
