"""What `/metrics` counts: the figures of one engine, of a model, or of all.

The moments at which something counts are those of vLLM, on an engine with SGLang's face those of
SGLang: TTFT is no figure of a prefill engine there, and histograms have bounds of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Final, NamedTuple

from emu.apps.serve.choices import Choice
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status
from emu.units import NS_PER_S

TTFT_BUCKETS: Final[tuple[float, ...]] = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS: Final[tuple[float, ...]] = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS: Final[tuple[float, ...]] = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
COUNT_BUCKETS: Final[tuple[float, ...]] = tuple(
    float(m * 10**e) for e in range(6) for m in (1, 2, 5) if m * 10**e <= 200_000
)
ITERATION_BUCKETS: Final[tuple[float, ...]] = (1.0, *(float(2**power) for power in range(3, 15)))
PREEMPTION_BUCKETS: Final[tuple[float, ...]] = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
TRANSFER_BUCKETS: Final[tuple[float, ...]] = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    5.0,
)
BYTES_BUCKETS: Final[tuple[float, ...]] = tuple(float(2**power) for power in range(11, 35, 2))
DESCRIPTOR_BUCKETS: Final[tuple[float, ...]] = (
    10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1000.0, 2000.0, 4000.0, 10_000.0,
    20_000.0, 50_000.0,
)  # fmt: skip
PARAMS_N_BUCKETS: Final[tuple[float, ...]] = (1.0, 2.0, 5.0, 10.0, 20.0)
# SGLang's, of 0.5.9.
SGLANG_TTFT_BUCKETS: Final[tuple[float, ...]] = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0,
    400.0,
)  # fmt: skip
SGLANG_E2E_BUCKETS: Final[tuple[float, ...]] = (*SGLANG_TTFT_BUCKETS, 600.0, 1200.0, 1800.0, 2400.0)
SGLANG_TOKEN_BUCKETS: Final[tuple[float, ...]] = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2,
    0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
)  # fmt: skip
SGLANG_QUEUE_BUCKETS: Final[tuple[float, ...]] = (
    0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0,
    80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0, 1200.0,
    1400.0, 1600.0, 1800.0, 2000.0, 2500.0, 3000.0,
)  # fmt: skip
RECENT: Final = 512
"""Completed requests that the page's percentiles are taken from."""


class Histogram:
    """Cumulative counts over fixed bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.observed = 0

    def add(self, value: float, count: int = 1) -> None:
        """`count` observations of a value (bounds are inclusive, as Prometheus has it)."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count
        self.observed += count


class Statistics:
    """What `/metrics` counts since the start. Times are emulated seconds."""

    def __init__(self, face: str = "vllm") -> None:
        """`face`: the engine whose bounds and moments these are, vllm or sglang."""
        self._is_sglang = face == "sglang"
        self.ttft = Histogram(SGLANG_TTFT_BUCKETS if self._is_sglang else TTFT_BUCKETS)
        self.inter_token = Histogram(SGLANG_TOKEN_BUCKETS if self._is_sglang else TOKEN_BUCKETS)
        self.per_output_token = Histogram(TOKEN_BUCKETS)
        self.e2e = Histogram(SGLANG_E2E_BUCKETS if self._is_sglang else LATENCY_BUCKETS)
        self.queue = Histogram(SGLANG_QUEUE_BUCKETS if self._is_sglang else LATENCY_BUCKETS)
        self.prefill = Histogram(LATENCY_BUCKETS)
        self.decode = Histogram(LATENCY_BUCKETS)
        self.inference = Histogram(LATENCY_BUCKETS)
        self.prompt_tokens = Histogram(COUNT_BUCKETS)
        self.generation_tokens = Histogram(COUNT_BUCKETS)
        self.request_preemptions = Histogram(PREEMPTION_BUCKETS)
        self.kv_computed_tokens = Histogram(COUNT_BUCKETS)
        self.max_tokens = Histogram(COUNT_BUCKETS)
        self.params_n = Histogram(PARAMS_N_BUCKETS)
        self.iteration_tokens = Histogram(ITERATION_BUCKETS)
        self.transfer = Histogram(TRANSFER_BUCKETS)
        self.transfer_post = Histogram((0.001, *TRANSFER_BUCKETS))
        self.transfer_bytes = Histogram(BYTES_BUCKETS)
        self.transfer_descriptors = Histogram(DESCRIPTOR_BUCKETS)
        self.success: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.by_status: dict[str, int] = {}
        self.queried_sum = 0
        """Prompt tokens that the engine looked up in its cache, at the end of the first iteration
        that had some of them, which is when vLLM's engine reports."""
        self.hit_sum = 0
        """Those it found on the GPU; counted at the same instant."""
        self.external_queried_sum = 0
        """Those that were not on the GPU: looked up in a lower tier, or another engine's KV."""
        self.external_hit_sum = 0
        self.prefill_hit_share = 0.0
        """Found part of the prompts of the last iteration that computed some."""
        self.prompt_sum = 0
        """Prompt tokens of requests that have their first token; the next ones say whence."""
        self.cached_sum = 0
        """In the own cache, lower tiers included."""
        self.cached_ended_sum = 0
        """The same, of requests that have completed, KV of other engines included."""
        self.from_tiers_sum = 0
        """Of these, in a tier below the GPU's memory."""
        self.transferred_sum = 0
        """With KV of another replica's prefill."""
        self.fetched = 0
        """Requests of these. The last token of each is computed again."""
        self.recomputed = 0
        """Prompts of which all but the last token was cached, as vLLM counts it."""
        self.fetching = 0
        """Requests that wait for their KV to come from another replica, now."""
        self.kv_expired = 0
        """Requests whose KV no endpoint fetched in time."""
        self.generated_sum = 0
        self.preemptions = 0
        self.migrations = 0
        self.recent: deque[tuple[float, float, float]] = deque(maxlen=RECENT)
        """(TTFT, TPOT, E2E) of the last completed requests, s."""

    def scheduled(self, request: Request) -> None:
        """The first iteration of a request has ended: what the cache had of its prompt is known."""
        hits = request.prefix_hit_tokens - request.storage_hit_tokens
        self.queried_sum += request.prompt_tokens
        self.hit_sum += hits
        self.external_queried_sum += request.prompt_tokens - hits
        self.external_hit_sum += request.storage_hit_tokens

    def fetched_kv(self, request: Request) -> None:
        """The KV of a whole prompt has come from another engine: a miss here, a hit there."""
        self.queried_sum += request.prompt_tokens
        self.external_queried_sum += request.prompt_tokens
        self.external_hit_sum += request.prompt_tokens

    def began(self, request: Request, at_ns: int) -> None:
        """The first token of a request is there."""
        if not (self._is_sglang and request.handoff_after_ns >= 0):
            self.ttft.add((at_ns - request.arrival_ns) / NS_PER_S)
        self.prompt_sum += request.prompt_tokens
        self.cached_sum += request.prefix_hit_tokens
        self.from_tiers_sum += request.storage_hit_tokens
        self.recomputed += request.prefix_hit_tokens + 1 == request.prompt_tokens

    def received(self, request: Request, came_ns: int, at_ns: int) -> None:
        """The first token of a request whose prompt another replica has computed.

        As vLLM's decode engine, which computes the last prompt token again.
        """
        self.ttft.add((at_ns - came_ns) / NS_PER_S)
        self.prompt_sum += request.prompt_tokens
        self.transferred_sum += request.prompt_tokens
        self.fetched += 1
        self.recomputed += 1

    def failed(self, status: Status) -> None:
        """A request has ended without completing."""
        name = status.name.lower()
        self.by_status[name] = self.by_status.get(name, 0) + 1
        self.success["abort" if status is Status.CANCELLED else "error"] += 1

    def ended(self, request: Request) -> None:
        """A request has ended, in whatever way."""
        # As vLLM: latencies are the front end's, the parts of them the engine's own.
        self.preemptions += request.preemptions
        self.migrations += request.migrations
        if request.status is not Status.COMPLETED:
            self.failed(request.status)
            return
        arrival, scheduled = request.arrival_ns, request.first_scheduled_ns
        is_first_try = 0 <= request.queued_ns <= scheduled
        times = Times(
            came_ns=arrival,
            queued_ns=request.queued_ns if is_first_try else arrival,
            scheduled_ns=scheduled,
            first_ns=request.first_token_ns,
            last_ns=request.last_token_ns,
            seen_first_ns=request.first_token_ns + request.first_out_ns,
            seen_last_ns=request.last_token_ns + request.last_out_ns,
        )
        computed = request.prompt_tokens - request.prefix_hit_tokens
        self._served(request, times, request.generated_tokens, computed)

    def prefilled(self, request: Request, at_ns: int, seen_ns: int) -> None:
        """A prompt has been computed for another engine: here it is an answer of one token."""
        times = Times(
            came_ns=request.arrival_ns,
            queued_ns=max(request.queued_ns, request.arrival_ns),
            scheduled_ns=request.first_scheduled_ns,
            first_ns=at_ns,
            last_ns=at_ns,
            seen_first_ns=seen_ns,
            seen_last_ns=seen_ns,
        )
        computed = request.prompt_tokens - request.prefix_hit_tokens
        self._served(request, times, 1, computed, limit=1)

    def decoded(self, choice: Choice) -> None:
        """A request whose prompt another engine has computed has ended here."""
        request = choice.request
        self.preemptions += request.preemptions
        self.migrations += request.migrations
        if request.status is not Status.COMPLETED:
            self.failed(request.status)
            return
        times = Times(
            came_ns=choice.came_ns,
            queued_ns=choice.came_ns,
            scheduled_ns=choice.loaded_ns,
            first_ns=choice.begun_ns,
            last_ns=request.last_token_ns,
            seen_first_ns=choice.first_ns if choice.first_ns >= 0 else choice.begun_ns,
            seen_last_ns=request.last_token_ns + request.last_out_ns,
        )
        limit = request.max_output_tokens - choice.base
        self._served(request, times, choice.tokens, 1, limit=limit)

    def _served(
        self, request: Request, times: Times, tokens: int, computed_tokens: int, limit: int = -1
    ) -> None:
        """A request has completed here, after so many tokens; `limit`: what its client declared."""
        limit = request.max_output_tokens if limit < 0 else limit
        self.by_status["completed"] = self.by_status.get("completed", 0) + 1
        self.success["length" if tokens >= limit else "stop"] += 1
        decode_s = (times.last_ns - times.first_ns) / NS_PER_S
        tpot_s = decode_s / (tokens - 1) if tokens > 1 else 0.0
        ttft_s = (times.seen_first_ns - times.came_ns) / NS_PER_S
        e2e_s = (times.seen_last_ns - times.came_ns) / NS_PER_S
        self.e2e.add(e2e_s)
        self.queue.add((times.scheduled_ns - times.queued_ns) / NS_PER_S)
        self.prefill.add((times.first_ns - times.scheduled_ns) / NS_PER_S)
        self.decode.add(decode_s)
        self.inference.add((times.last_ns - times.scheduled_ns) / NS_PER_S)
        if tokens > 1:
            self.per_output_token.add(tpot_s)
        self.recent.append((ttft_s, tpot_s, e2e_s))
        self.prompt_tokens.add(request.prompt_tokens)
        self.cached_ended_sum += request.prompt_tokens - computed_tokens
        self.params_n.add(1.0)  # each answer is a request of its own, as in vLLM
        self.generation_tokens.add(tokens)
        self.request_preemptions.add(request.preemptions)
        self.kv_computed_tokens.add(computed_tokens)
        self.max_tokens.add(limit)


def awaiting_kv(replica: ReplicaHandle, stats: Statistics) -> int:
    """Requests of a replica whose KV another one has, or has sent and no step has taken up yet."""
    come = sum(not r.status.is_terminal for event in replica.view().arrived for r in event.requests)
    return stats.fetching + come


class Times(NamedTuple):
    """When a request was where on one engine, emulated ns."""

    came_ns: int
    queued_ns: int
    scheduled_ns: int
    first_ns: int
    last_ns: int
    """Tokens as the engine makes them."""
    seen_first_ns: int
    seen_last_ns: int
    """Tokens as they leave the front end."""
