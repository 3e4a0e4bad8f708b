"""Routing policies. Each keeps its own counters or random stream; ties go to the lowest id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from emu.errors import InputError
from emu.plugins import make_plugin
from emu.policy import RequestView, index_of, shown
from emu.request import Request
from emu.rng import rng_stream
from emu.routing.base import AdapterMatch, PrefixMatch, Router, Signal

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
        best, best_key = 0, (-inf, 0)
        for index, signal in enumerate(signals):
            matched = self._match(signal.replica_id, request)
            key = (matched / request.prompt_tokens - loads[index] / scale, -loads[index])
            if key > best_key:
                best, best_key = index, key
        return best


class LoraAffinityRouter:
    """Replicas that have the request's adapter on the GPU first, then the least loaded.

    A replica without it is taken when those with it have more requests than places, as in gateways
    that look at the adapters that engines report.
    """

    def __init__(self, holds_adapter: AdapterMatch) -> None:
        self._holds = holds_adapter

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """The least loaded of those with the adapter and a place, else of all."""
        best, best_key = 0, (2, 0)
        for index, signal in enumerate(signals):
            has_place = signal.waiting + signal.running < signal.max_num_seqs
            fits = has_place and bool(request.adapter) and self._holds(signal.replica_id, request)
            key = (0 if fits else 1, WAITING_WEIGHT * signal.waiting + signal.running)
            if key < best_key:
                best, best_key = index, key
        return best


class _Own:
    """A router of a user's own: it sees views of requests, and its choices are looked at."""

    def __init__(self, router: Any, policy: str) -> None:
        self._router = router
        self._what = f"router.policy: {policy}"

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """What the other chooses; PluginError if that is none of the signals."""
        chosen = self._router.choose(RequestView(request), signals)
        return index_of(chosen, len(signals), self._what)


def make_router(
    policy: str,
    *,
    seed: int,
    pool: str,
    match: PrefixMatch,
    holds_adapter: AdapterMatch | None = None,
    own: Callable[[str, str], Any] = make_plugin,
) -> Router:
    """The router of a pool of replicas. Each pool has its own (counters are not shared).

    `policy` is a built-in name or that of a class, of which `own(path, key)` makes an object.
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
    if policy == "lora_affinity":
        assert holds_adapter is not None
        return LoraAffinityRouter(holds_adapter)
    made: Router = own(policy, "router.policy")
    weights = getattr(made, "linear_load", None)
    if weights is None:
        return _Own(made, policy)
    # One that says what its choice is (`linear_load`) is not asked.
    if not (
        isinstance(weights, tuple)
        and len(weights) == 2
        and all(type(weight) is int and weight >= 0 for weight in weights)
    ):
        problem = f"{policy}: linear_load is {shown(weights)}, expected two whole numbers >= 0"
        raise InputError("config", None, "router.policy", problem)
    return made
