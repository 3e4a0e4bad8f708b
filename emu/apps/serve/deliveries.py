"""Tokens on their way to clients, a replica's step at a time: the loops that run for each token.

Compiled where the hot path is. What a step has made passes through here twice: when the engine has
the tokens (`take_up`), and when they leave its front end (`hand_over`). `IterationCounts` hears of
the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from emu.apps.serve.choices import Choice
from emu.apps.serve.statistics import Statistics
from emu.request import Request
from emu.scheduling.base import Batch
from emu.scheduling.pipeline import StageSpan
from emu.units import NS_PER_S


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


def hand_over(takers: list[Choice], now_ns: int, sinks: tuple[Statistics, ...]) -> tuple[int, int]:
    """Return how many of these tokens, one for each answer, were written to their clients at once,
    and for how many of the answers something else was woken to do it.

    `sinks`: what counts the replica's tokens, itself last.
    """
    last_ns = -1
    gaps = written = woken = 0
    for choice in takers:
        choice.produced += 1
        if choice.last_ns < 0:
            _begin(choice, now_ns, sinks)
        elif choice.last_ns == last_ns:
            gaps += 1
        else:
            if gaps:
                _add_gaps(now_ns - last_ns, gaps, sinks)
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
        _add_gaps(now_ns - last_ns, gaps, sinks)
    return written, woken


def _begin(choice: Choice, now_ns: int, sinks: tuple[Statistics, ...]) -> None:
    """The first token of an answer leaves the front end."""
    choice.first_ns = now_ns
    if choice.base:
        sinks[-1].received(choice.request, choice.came_ns, now_ns)
    else:
        for stats in sinks:
            stats.began(choice.request, now_ns)


def _add_gaps(gap_ns: int, count: int, sinks: tuple[Statistics, ...]) -> None:
    """So many tokens came so long after the ones before them."""
    for stats in sinks:
        stats.inter_token.add(gap_ns / NS_PER_S, count)


class IterationCounts:
    """Counts the tokens of each iteration."""

    def __init__(self, sinks: list[tuple[Statistics, ...]], *, has_prefixes: bool) -> None:
        """`sinks`: by replica."""
        self._sinks = sinks
        self._has_prefixes = has_prefixes

    def batch(
        self,
        replica_id: int,
        batch: Batch,
        start_ns: int,
        end_ns: int,
        steps: int,
        spans: list[StageSpan] | None = None,
    ) -> None:
        """An iteration has ended (nothing leaps on the wall clock)."""
        tokens = batch.shape.new_tokens
        sinks = self._sinks[replica_id]
        for stats in sinks:
            stats.iteration_tokens.add(tokens, steps)
        if self._has_prefixes and batch.chunks:
            self._count_prompts(batch, sinks)

    def _count_prompts(self, batch: Batch, sinks: tuple[Statistics, ...]) -> None:
        """What the iteration computed of prompts, and what the cache had of those that it began."""
        computed = found = 0
        for chunk in batch.chunks:
            request = chunk.request
            if chunk.context_tokens < request.prompt_tokens:
                computed += chunk.new_tokens
            if request.first_scheduled_ns == batch.formed_ns:
                found += request.prefix_hit_tokens
                for stats in sinks:
                    stats.scheduled(request)
        if computed:
            for stats in sinks:
                stats.prefill_hit_share = found / (found + computed)
