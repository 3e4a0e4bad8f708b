"""Tokens on their way to clients, a replica's step at a time: the loops that run for each token.

Compiled where the hot path is. What a step has made passes through here twice: when the engine has
the tokens (`Takers`), and when they leave its front end (`hand_over`). `IterationCounts` hears of
the step itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from emu.apps.serve.choices import Choice
from emu.apps.serve.statistics import Statistics
from emu.request import Request
from emu.scheduling.base import Batch
from emu.scheduling.pipeline import StageSpan
from emu.units import NS_PER_S


@final
class Takers:
    """The open answers that a replica's tokens belong to.

    They are looked for again only where the engine has made tokens of other requests than a step
    before, or another answer has been put in the place of one (`changes` counts these).
    """

    __slots__ = ("_changes", "_choices", "_receivers", "_takers")

    def __init__(self, choices: dict[int, Choice]) -> None:
        """`choices`: all open answers, by the ids of their requests."""
        self._choices = choices
        self._changes = -1
        self._receivers: list[Request] = []
        self._takers: list[Choice] = []

    def take_up(
        self, receivers: list[Request], changes: int, begin: Callable[[Choice], None]
    ) -> list[Choice]:
        """The engine has made a token of each of these. `begin` hears of an answer whose first
        token this is."""
        if changes == self._changes and receivers == self._receivers:
            return self._takers
        takers: list[Choice] = []
        for request in receivers:
            choice = self._choices.get(request.request_id)
            if choice is not None:
                takers.append(choice)
                if choice.begun_ns < 0:
                    begin(choice)
        self._changes, self._receivers, self._takers = changes, receivers, takers
        return takers


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
