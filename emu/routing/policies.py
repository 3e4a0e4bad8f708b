"""The routers of emu, and how one is made from its table.

Which there are, and the keys of each, stands in `emu/config/tables/routing.py`: a table names the
class that reads it. Each policy keeps its own counters or random stream; ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from emu.config.kinds import implementation
from emu.config.own import make_own
from emu.config.schema import OwnRouterTable, RouterTable
from emu.request import Request
from emu.rng import rng_stream
from emu.routing.signal import Pool, Router, Signal

if TYPE_CHECKING:
    from emu.policy.views import Look


WAITING_WEIGHT = 4
"""vLLM's data-parallel balancer (and LLMServingSim's LOAD) count a waiting request four times."""


class LoadRouter:
    """Least waiting x 4 + running (vLLM's data-parallel load balancer)."""

    linear_load: ClassVar[tuple[int, int]] = (WAITING_WEIGHT, 1)
    reads: ClassVar[frozenset[str]] = frozenset({"waiting", "running"})

    def __init__(self, table: RouterTable, pool: Pool) -> None:
        """It reads no keys, and asks nothing beside signals."""

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

    linear_load: ClassVar[tuple[int, int]] = (1, 1)
    reads: ClassVar[frozenset[str]] = frozenset({"waiting", "running"})

    def __init__(self, table: RouterTable, pool: Pool) -> None:
        """It reads no keys, and asks nothing beside signals."""

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

    reads: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, table: RouterTable, pool: Pool) -> None:
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

    reads: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, table: RouterTable, pool: Pool) -> None:
        self._rng = rng_stream(pool.seed, f"router.{pool.name}")
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

    reads: ClassVar[frozenset[str]] = frozenset({"waiting", "running"})

    def __init__(self, table: RouterTable, pool: Pool) -> None:
        self._match = pool.match

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

    reads: ClassVar[frozenset[str]] = frozenset({"waiting", "running", "max_num_seqs"})

    def __init__(self, table: RouterTable, pool: Pool) -> None:
        self._holds = pool.holds

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


def make_router(
    table: RouterTable,
    pool: Pool,
    own: Callable[..., Any] | None = None,
    look: Look | None = None,
) -> Router:
    """The router of a pool of replicas. Each pool has its own (counters are not shared).

    A class of a user's own is made by `own`; `look` keeps the requests that it is shown exact.
    Raises InputError for one that cannot be made.
    """
    if isinstance(table, OwnRouterTable):
        from emu.routing.own import OwnRouter  # most runs have none

        return OwnRouter(
            (own or make_own)(table.policy, "router.policy", table.own), table.policy, look
        )
    made: Router = implementation(table.made_by)(table, pool)
    return made
