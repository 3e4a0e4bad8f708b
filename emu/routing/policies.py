"""Routing policies. Each keeps its own counters or random stream; ties go to the lowest id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emu.errors import RunError
from emu.plugins import make_plugin
from emu.request import Request
from emu.rng import rng_stream
from emu.routing.base import PrefixMatch, Router, Signal

WAITING_WEIGHT = 4
"""vLLM's data-parallel balancer (and LLMServingSim's LOAD) count a waiting request four times."""


class LoadRouter:
    """Least waiting x 4 + running (vLLM's data-parallel load balancer)."""

    linear_load = (WAITING_WEIGHT, 1)

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """The first of the least loaded."""
        best, best_score = 0, -1
        for index, signal in enumerate(signals):
            score = WAITING_WEIGHT * signal.waiting + signal.running
            if best_score < 0 or score < best_score:
                best, best_score = index, score
        return best


class LeastOutstandingRouter:
    """Least waiting + running. (Vidur's LOR counts waiting only, which sends everything to
    replica 0 while queues are empty; that is its defect, not a policy.)"""

    linear_load = (1, 1)

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """The first with the fewest requests."""
        best, best_score = 0, -1
        for index, signal in enumerate(signals):
            score = signal.waiting + signal.running
            if best_score < 0 or score < best_score:
                best, best_score = index, score
        return best


class RoundRobinRouter:
    """One after another, by replica id, skipping those that are not candidates now."""

    def __init__(self) -> None:
        self._last_id = -1

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """The next replica after the last one chosen."""
        for index, signal in enumerate(signals):
            if signal.replica_id > self._last_id:
                self._last_id = signal.replica_id
                return index
        self._last_id = signals[0].replica_id
        return 0


class RandomRouter:
    """Uniformly at random, from its own stream."""

    def __init__(self, seed: int, stream: str) -> None:
        self._rng = rng_stream(seed, stream)
        self._draws: list[float] = []

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """Any of them."""
        if not self._draws:
            self._draws = self._rng.random(256).tolist()
        return int(self._draws.pop() * len(signals))


class PrefixAwareRouter:
    """Longest cached prefix first, unless the replica is far more loaded than the others.

    Score = matched tokens / prompt tokens - load / (1 + largest load): the shape of the scorers
    in llm-d and Dynamo's KV router, with equal weights.
    """

    def __init__(self, match: PrefixMatch) -> None:
        self._match = match

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """Best score; ties to the least loaded, then to the lowest id."""
        loads = [WAITING_WEIGHT * s.waiting + s.running for s in signals]
        scale = 1 + max(loads)
        best, best_key = 0, (-np.inf, 0)
        for index, signal in enumerate(signals):
            matched = self._match(signal.replica_id, request)
            key = (matched / request.prompt_tokens - loads[index] / scale, -loads[index])
            if key > best_key:
                best, best_key = index, key
        return best


class _Checked:
    """A router of a user's own, whose choices are looked at."""

    def __init__(self, router: Router, policy: str) -> None:
        self._router = router
        self._policy = policy

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """What the other chooses; RunError if that is none of the signals."""
        chosen = self._router.choose(request, signals)
        if isinstance(chosen, int | np.integer) and 0 <= chosen < len(signals):
            return int(chosen)
        raise RunError(
            f"router.policy: {self._policy} chose {chosen!r} of {len(signals)} replicas; "
            f"expected an index from 0 to {len(signals) - 1}"
        )


def make_router(policy: str, *, seed: int, pool: str, match: PrefixMatch) -> Router:
    """The router of a pool of replicas. Each pool has its own (counters are not shared).

    `policy` is a built-in name or `package.module:Class` (constructed without arguments).
    Raises InputError for anything else.
    """
    if policy == "load":
        return LoadRouter()
    if policy == "least_outstanding":
        return LeastOutstandingRouter()
    if policy == "round_robin":
        return RoundRobinRouter()
    if policy == "random":
        return RandomRouter(seed, f"router.{pool}")
    if policy == "prefix_aware":
        return PrefixAwareRouter(match)
    made: Router = make_plugin(policy, "router.policy", needs=("choose",))
    # One that says what its choice is (`linear_load`) is not asked.
    return made if hasattr(made, "linear_load") else _Checked(made, policy)
