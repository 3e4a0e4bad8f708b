"""Contexts under attention data parallelism: ranks begin them together (`attention_dp_config`).

A rank that computes a prompt holds up all others for as long. With `enable_balance` contexts are
held back until every rank has one and a place for it, or some rank generates nothing, or so many
steps have passed since contexts ran last. Then all ranks' contexts run; with `batching_wait_iters`
they wait so many steps more, for others to come. As `_balance_adp_requests` of TensorRT-LLM
decides; there each rank says what it has scheduled, here what it could.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Standing(NamedTuple):
    """What a rank has before it forms a step."""

    has_context: bool
    generates: bool
    """Or has nothing: the engine gives it a generation that only keeps pace."""
    has_place: bool
    """For one more request."""


class Rank(Protocol):
    """A rank of the group."""

    def standing(self) -> Standing:
        """What it has now."""
        ...


class ContextBalance:
    """Whether the ranks of a group compute contexts in the step that forms: one answer for all."""

    def __init__(self, timeout_steps: int, batching_steps: int, steps: Callable[[], int]) -> None:
        """`steps`: how many steps the group has begun."""
        self._timeout = max(1, timeout_steps)
        self._batching = batching_steps
        self._steps = steps
        self._ranks: list[Rank] = []
        self._step = -1
        self._lets = True
        self._waited = self._batched = 0

    def join(self, rank: Rank) -> None:
        """One more rank."""
        self._ranks.append(rank)

    def lets(self) -> bool:
        """Asked by a rank that could compute contexts."""
        step = self._steps()
        if step != self._step:
            passed, self._step = step - self._step, step
            self._lets = self._decide(passed)
        return self._lets

    def _decide(self, passed: int) -> bool:
        found = [rank.standing() for rank in self._ranks]
        all_generate = all(one.generates for one in found)
        if all(one.has_context and one.has_place for one in found):
            self._waited = 0
            if all_generate and self._batched < self._batching:
                self._batched += 1
                return False
            self._batched = 0 if all_generate else self._batched
            return True
        # Steps in which no rank had a context count, too.
        self._waited = (self._waited + passed - 1) % self._timeout + 1
        if self._waited >= self._timeout or not all_generate:
            self._waited = 0
            return True
        return False
