"""Routers: what they see, what they answer, and the policies by name.

A router is pure: it takes signals and a request and returns the index of the chosen signal. It
sees what a real gateway sees: counts, never a request's true output length. Signals may be
stale (`router.signal_delay_ms`); the gateway keeps the history, not the router. Each policy keeps
its own counters or random stream; ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, ClassVar, Final, Protocol, final

from emu.errors import InputError
from emu.kernel.natives import heapify, heappop, heappush
from emu.plugins import make_plugin
from emu.policy import Look, RequestView, index_of, shown
from emu.request import Request
from emu.rng import rng_stream


@final
class Signal:
    """What a replica reports about itself: exact now, or as it was `router.signal_delay_ms` ago.

    `blocks_used` is -1 for a router that declares what it reads (`Router.reads`) without it.
    """

    replica_id: int
    waiting: int
    running: int
    waiting_tokens: int
    blocks_used: int
    blocks_total: int
    max_num_seqs: int

    __slots__ = (
        "blocks_total",
        "blocks_used",
        "max_num_seqs",
        "replica_id",
        "running",
        "waiting",
        "waiting_tokens",
    )

    def __init__(
        self,
        replica_id: int,
        waiting: int,
        running: int,
        waiting_tokens: int,
        blocks_used: int,
        blocks_total: int,
        max_num_seqs: int,
    ) -> None:
        self.replica_id = replica_id
        self.waiting = waiting
        self.running = running
        self.waiting_tokens = waiting_tokens
        self.blocks_used = blocks_used
        self.blocks_total = blocks_total
        self.max_num_seqs = max_num_seqs


PrefixMatch = Callable[[int, Request], int]
"""(replica id, request) -> prompt tokens that the replica's cache holds."""


AdapterMatch = Callable[[int, Request], bool]
"""(replica id, request) -> whether the request's LoRA adapter is on the replica's GPU."""


SIGNAL_FIELDS: Final = frozenset(
    {
        "blocks_total",
        "blocks_used",
        "max_num_seqs",
        "replica_id",
        "running",
        "waiting",
        "waiting_tokens",
    }
)


class Router(Protocol):
    """Chooses a replica for a request.

    A class attribute `reads` names the fields of signals that a router looks at. Without it all of
    them are exact. Blocks grow in a leap: a router that does not read them spares the gateway a
    look into each replica.

    A router whose choice is the first replica with the least `a x waiting + b x running` may say
    so in a class attribute `linear_load = (a, b)`; the gateway then need not build signals.
    """

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """Index into `signals` (never empty, ascending replica id)."""
        ...


# --------------------------------------------------------------------------------------------------
# The first of the least loaded among many replicas, without looking at all of them.
#
#     order = LoadOrder([3, 0, 0])
#     order.first()           # 1: the lowest place among those with the least load
#     order.update(1, 5)
#     order.first()           # 2
#
# Owns a heap of (load, place) in which entries of former loads stay until they come to the top. An
# update costs O(log n), a question O(1) beside the entries that it throws away.


class LoadOrder:
    """Loads by place, and where the least of them is."""

    def __init__(self, loads: Sequence[int]) -> None:
        self.loads = list(loads)
        self._places = len(loads)
        self._heap: list[int] = []
        """load * places + place: a number is compared five times faster than a tuple."""
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [load * self._places + place for place, load in enumerate(self.loads)]
        heapify(self._heap)
        self._entries_max = 4 * len(self.loads) + 64

    def update(self, place: int, load: int) -> None:
        """The load at a place, changed or not."""
        loads = self.loads
        if loads[place] == load:
            return
        loads[place] = load
        heappush(self._heap, load * self._places + place)
        if len(self._heap) > self._entries_max:
            self._rebuild()

    def first(self) -> int:
        """The lowest place among those with the least load."""
        heap, loads, places = self._heap, self.loads, self._places
        while True:
            entry = heap[0]
            place = entry % places
            if loads[place] == entry // places:
                return place
            heappop(heap)


# --------------------------------------------------------------------------------------------------
# Policies


WAITING_WEIGHT = 4
"""vLLM's data-parallel balancer (and LLMServingSim's LOAD) count a waiting request four times."""


class LoadRouter:
    """Least waiting x 4 + running (vLLM's data-parallel load balancer)."""

    linear_load: ClassVar[tuple[int, int]] = (WAITING_WEIGHT, 1)
    reads: ClassVar[frozenset[str]] = frozenset({"waiting", "running"})

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

    reads: ClassVar[frozenset[str]] = frozenset()

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

    reads: ClassVar[frozenset[str]] = frozenset({"waiting", "running"})

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

    reads: ClassVar[frozenset[str]] = frozenset({"waiting", "running", "max_num_seqs"})

    def __init__(self, holds: AdapterMatch) -> None:
        self._holds = holds

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


def reads_of(router: object) -> frozenset[str]:
    """What a router reads of signals: all of it, unless it declares that (`Router.reads`)."""
    reads: frozenset[str] = getattr(router, "reads", SIGNAL_FIELDS)
    return reads


def _weights_of(router: object, policy: str) -> tuple[int, int] | None:
    """`linear_load` of a router of a user's own: it is not asked, while signals are fresh."""
    weights = getattr(router, "linear_load", None)
    if weights is None:
        return None
    if not (
        isinstance(weights, tuple)
        and len(weights) == 2
        and all(type(weight) is int and weight >= 0 for weight in weights)
    ):
        problem = f"{policy}: linear_load is {shown(weights)}, expected two whole numbers >= 0"
        raise InputError("config", None, "router.policy", problem)
    return weights


def _reads_of(router: object, policy: str) -> frozenset[str]:
    """`reads` of a router of a user's own; all fields without."""
    reads = reads_of(router)
    names = isinstance(reads, (frozenset, set, tuple, list))
    if not names or not SIGNAL_FIELDS.issuperset(map(str, reads)):
        fields = ", ".join(sorted(SIGNAL_FIELDS))
        problem = f"{policy}: reads is {shown(reads)}, expected names of: {fields}"
        raise InputError("config", None, "router.policy", problem)
    return frozenset(reads)


class _Own:
    """A router of a user's own: it sees views of requests, and its choices are looked at."""

    def __init__(self, router: Any, policy: str, look: Look | None) -> None:
        self._router = router
        self._look = look
        self._what = f"router.policy: {policy}"
        self.linear_load = _weights_of(router, policy)
        self.reads = _reads_of(router, policy)

    def choose(self, request: Request, signals: Sequence[Signal]) -> int:
        """What the other chooses; PluginError if that is none of the signals."""
        chosen = self._router.choose(RequestView(request, self._look), signals)
        return index_of(chosen, len(signals), self._what)


def make_router(
    policy: str,
    *,
    seed: int,
    pool: str,
    match: PrefixMatch,
    holds: AdapterMatch | None = None,
    own: Callable[[str, str], Any] = make_plugin,
    look: Look | None = None,
) -> Router:
    """The router of a pool of replicas. Each pool has its own (counters are not shared).

    `policy` is a built-in name or that of a class, of which `own(path, key)` makes an object;
    `look` keeps the requests that it is shown exact. Raises InputError for anything else.
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
        assert holds is not None
        return LoraAffinityRouter(holds)
    return _Own(own(policy, "router.policy"), policy, look)
