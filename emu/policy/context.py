"""The one object that a policy of a user's own is given.

    class Mine:
        def __init__(self, context: Context) -> None:
            self.context = context

        def choose(self, request, signals):
            found = [self.context.prefix_tokens(s.replica_id, request) for s in signals]
            ...

It looks, and changes nothing. The load of replicas, and for a planner all figures, are as old as
the configuration says (`router.signal_delay_ms`, `autoscale.metrics_delay_ms`); what passes the
gateway itself, and what replicas cache (they publish that as events), is known at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, final

from emu.policy.books import Books, Forecast, Rates
from emu.policy.views import ReplicaView, RequestView, TransferView, request_of
from emu.request import Request
from emu.rng import rng_stream

if TYPE_CHECKING:
    import numpy as np


class Watched(Protocol):
    """What a context asks of the world."""

    books: Books
    seed: int
    objectives_ms: tuple[float, float, float]
    """TTFT, TPOT and E2E of [slo]; 0 = none."""

    def delays_ns(self, key: str, replica_id: int) -> tuple[int, int]:
        """Ages of the load and of the gateway's figures as a policy under this key sees them."""
        ...

    @property
    def now_ns(self) -> int:
        """Simulated time."""
        ...

    def look(self, request: Request) -> None:
        """Bring the counts of a request up to this instant."""
        ...

    def ttft_ms(self, percent: float, at_ns: int, window_s: float) -> float | None:
        """Percentile of TTFT over first tokens of the window; None if there was none."""
        ...

    def replicas(self, delay_ns: int) -> Sequence[ReplicaView]:
        """All replicas, by id; load of `delay_ns` ago."""
        ...

    def prefix_tokens(self, replica_id: int, request: Request) -> int:
        """Prompt tokens that a replica's cache holds."""
        ...

    def transfers(self) -> Sequence[TransferView]:
        """KV that leaves prefill replicas."""
        ...

    def running(self, replica_id: int) -> Sequence[Request]:
        """Requests that run on a replica, in order of admission."""
        ...

    def iteration_ms(self, replica_id: int, shape: tuple[int, int, int]) -> float:
        """Cost of an iteration: prompt tokens, decodes, tokens of context of these together."""
        ...


@final
class Context:
    """Time, chance, and what the control plane sees."""

    def __init__(self, watched: Watched, key: str, replica_id: int) -> None:
        name = f"plugin.{key}" if replica_id < 0 else f"plugin.{key}.{replica_id}"
        self._watched = watched
        self._delay_ns, self._figures_delay_ns = watched.delays_ns(key, replica_id)
        self._stream = (watched.seed, name)
        self._rng: np.random.Generator | None = None
        self.objectives_ms = watched.objectives_ms
        """TTFT, TPOT and E2E of [slo]; 0 = none."""
        self.replica_id = replica_id
        """Whose scheduler or eviction it is; -1 = of no replica in particular."""

    @property
    def now_ns(self) -> int:
        """Simulated time, ns since the start."""
        return self._watched.now_ns

    @property
    def now_s(self) -> float:
        """Simulated time, seconds since the start."""
        return self._watched.now_ns / 1e9

    @property
    def rng(self) -> np.random.Generator:
        """A random stream of this policy's own: the same draws in every run of one seed."""
        if self._rng is None:
            self._rng = rng_stream(*self._stream)
        return self._rng

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """All replicas, by id, inactive ones too."""
        return self._watched.replicas(self._delay_ns)

    @property
    def transfers(self) -> Sequence[TransferView]:
        """KV on its way from prefill replicas, and KV that waits for a destination."""
        return self._watched.transfers()

    def prefix_tokens(self, replica_id: int, request: RequestView) -> int:
        """Prompt tokens of the request that the replica's prefix cache holds."""
        return self._watched.prefix_tokens(replica_id, request_of(request))

    def running(self, replica_id: int) -> list[RequestView]:
        """Requests that run on a replica now, in order of admission."""
        watched = self._watched
        return [RequestView(request, watched.look) for request in watched.running(replica_id)]

    def iteration_ms(
        self,
        replica_id: int = 0,
        *,
        prompt_tokens: int = 0,
        decodes: int = 0,
        context_tokens: int = 0,
    ) -> float:
        """What a profile of the replica says: an iteration that reads one prompt of so many tokens
        and decodes so many requests, which have `context_tokens` together."""
        return self._watched.iteration_ms(replica_id, (prompt_tokens, decodes, context_tokens))

    @property
    def _seen_ns(self) -> int:
        return max(0, self._watched.now_ns - self._figures_delay_ns)

    def rates(self, window_s: float = 10.0) -> Rates:
        """Arrivals, completions and their tokens, per second."""
        return self._watched.books.rates(self._seen_ns, window_s)

    def ttft_ms(self, percent: float = 95.0, window_s: float = 10.0) -> float | None:
        """Percentile of the time to first token, over first tokens of the window."""
        return self._watched.ttft_ms(percent, self._seen_ns, window_s)

    def itl_ms(self, percent: float = 95.0, window_s: float = 10.0) -> float | None:
        """Percentile of the time between tokens, of requests that completed in the window."""
        return self._watched.books.itl_ms(percent, self._seen_ns, window_s)

    def attainment(self, window_s: float = 10.0) -> float | None:
        """Part of the requests that ended in the window and met all objectives of [slo]."""
        return self._watched.books.attainment(self._seen_ns, window_s)

    def forecast(
        self,
        horizon_s: float,
        *,
        window_s: float = 10.0,
        buckets: int = 6,
        method: Forecast = "holt",
    ) -> Rates:
        """Rates expected in `horizon_s` seconds."""
        books = self._watched.books
        return books.forecast(self._seen_ns, horizon_s, window_s, buckets, method)
