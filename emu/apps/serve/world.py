"""The cluster of live mode: requests come from clients, tokens go to them as they are produced.

Owns the open exchanges (one per HTTP call) and the statistics that `/metrics` and the page show.
The actors are those of every run; the kernel is a `WallKernel`, and whatever comes from outside
enters through `kernel.enter`. An open server counts as one pending client of the gateway, so that
an idle cluster does not end; `close_door` takes it away and the run ends with the last request.

Memory. A choice keeps counters, not tokens: a client that reads slowly costs its socket buffer
and no more. Finished exchanges are forgotten.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from emu.apps.serve.pace import Pace
from emu.apps.serve.recording import Tape
from emu.apps.serve.script import Script
from emu.cluster.plan import Plan
from emu.config.schema import Config
from emu.kernel.clock import PRIORITY_WORLD
from emu.kernel.wallclock import WallKernel
from emu.log import Log
from emu.migration.transfer import MigratingBatch, kv_blocks, kv_bytes
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status
from emu.scheduling.base import Batch, StageSpan
from emu.units import NS_PER_S
from emu.workload.session import NOTHING_FOLLOWS, Following
from emu.world import Observer, Ports, World

TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
COUNT_BUCKETS: Final = tuple(
    float(m * 10**e) for e in range(6) for m in (1, 2, 5) if m * 10**e <= 200_000
)
ITERATION_BUCKETS: Final = (1.0, *(float(2**power) for power in range(3, 15)))
PREEMPTION_BUCKETS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
TRANSFER_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
BYTES_BUCKETS: Final = tuple(float(2**power) for power in range(11, 35, 2))
DESCRIPTOR_BUCKETS: Final = (
    10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1000.0, 2000.0, 4000.0, 10_000.0,
    20_000.0, 50_000.0,
)  # fmt: skip
RECENT: Final = 512
"""Completed requests that the page's percentiles are taken from."""


class Watching(Protocol):
    """Something that is told what happens to requests."""

    def on_end(self, request: Request) -> None:
        """A request has ended, in whatever way."""

    def on_transfer(
        self, source: ReplicaHandle, destination: ReplicaHandle, size_bytes: int
    ) -> None:
        """KV has gone from one replica to another."""


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

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_BUCKETS)
        self.inter_token = Histogram(TOKEN_BUCKETS)
        self.per_output_token = Histogram(TOKEN_BUCKETS)
        self.e2e = Histogram(LATENCY_BUCKETS)
        self.queue = Histogram(LATENCY_BUCKETS)
        self.prefill = Histogram(LATENCY_BUCKETS)
        self.decode = Histogram(LATENCY_BUCKETS)
        self.inference = Histogram(LATENCY_BUCKETS)
        self.prompt_tokens = Histogram(COUNT_BUCKETS)
        self.generation_tokens = Histogram(COUNT_BUCKETS)
        self.request_preemptions = Histogram(PREEMPTION_BUCKETS)
        self.kv_computed_tokens = Histogram(COUNT_BUCKETS)
        self.max_tokens = Histogram(COUNT_BUCKETS)
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
        queued_ns = request.queued_ns
        queued_ns = queued_ns if 0 <= queued_ns <= scheduled else arrival  # it was tried again
        times = Times(
            came_ns=arrival,
            queued_ns=queued_ns,
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
        self.generation_tokens.add(tokens)
        self.request_preemptions.add(request.preemptions)
        self.kv_computed_tokens.add(computed_tokens)
        self.max_tokens.add(limit)


def awaiting_kv(replica: ReplicaHandle, stats: Statistics) -> int:
    """Requests of a replica whose KV another one has, or has sent and no step has taken up yet."""
    come = sum(not r.status.is_terminal for event in replica.view().arrived for r in event.requests)
    return stats.fetching + come


class Times(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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


class Choice:
    """One answer: how far it is, what of it has been sent, and the filler token of its `start`."""

    __slots__ = (
        "base", "begun_ns", "came_ns", "exchange", "first_ns", "heir", "index", "is_ended",
        "last_ns", "loaded_ns", "produced", "request", "script", "sent", "start",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange,
        index: int,
        request: Request,
        start: int,
        script: Script | None = None,
    ) -> None:
        self.exchange = exchange
        self.index = index
        self.request = request
        self.start = start
        """Filler token with which its text begins."""
        self.script = script
        """What it says, if that is not plain filler."""
        self.base = 0
        """Tokens of the request that another endpoint produced: no part of this answer."""
        self.heir: Choice | None = None
        """The answer that gets the tokens after the first."""
        self.came_ns = -1
        """When it was asked for, where that is not the request's arrival."""
        self.loaded_ns = -1
        """When its KV had come from another endpoint, where it did."""
        self.begun_ns = -1
        """When the engine had its first token, which may still be on its way through the front
        end."""
        self.produced = 0
        """Tokens that have left the emulated front end."""
        self.sent = 0
        self.first_ns = -1
        self.last_ns = -1
        """Emulated times at which the first and the last token so far left it."""
        self.is_ended = False

    @property
    def is_begun(self) -> bool:
        """The engine has its first token."""
        return self.begun_ns >= 0

    @property
    def taker(self) -> Choice | None:
        """The answer on the endpoint that fetches the KV; None as long as none has come."""
        return self if self.base else self.heir

    @property
    def tokens(self) -> int:
        """Tokens of the whole answer."""
        return self.request.output_tokens - self.base

    @property
    def finish_reason(self) -> str:
        """The reason in OpenAI's words."""
        request = self.request
        if self.script is not None and self.script.finish:
            return self.script.finish
        return "length" if request.output_tokens >= request.max_output_tokens else "stop"


class Exchange:
    """The answers of one HTTP call, and the event that says something has changed."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.changed = asyncio.Event()
        self.has_left = False
        self.came_ns = -1
        """Emulated time at which the call reached the machine."""
        self.entered_ns = -1
        """Emulated time at which its requests arrive, or what it waited for goes on."""
        self.is_entering = False
        """It has been read, and the emulation has not come to its arrival."""
        self.adapter = ""
        """Name of the LoRA adapter that was asked for."""
        self.cache_salt = ""

    @property
    def is_ended(self) -> bool:
        """Every answer has ended."""
        return all(choice.is_ended for choice in self.choices)

    def failure(self) -> Request | None:
        """A request that ended without completing."""
        for choice in self.choices:
            if choice.is_ended and choice.request.status is not Status.COMPLETED:
                return choice.request
        return None


class LiveCluster(Observer):
    """A world on the wall clock, and the exchanges that are open with its clients.

    It is the world's source of tokens for clients, and an observer of ends and transfers.
    """

    def __init__(
        self, plan: Plan, directory: Path, tape: Tape, clock: WallKernel, log: Log | None
    ) -> None:
        """`directory`: of the files that every run has."""
        self.plan = plan
        self.tape = tape
        self.kernel = clock
        self.has_prefixes = any(r.scheduler.caches_prefixes for r in plan.replicas)
        self.stats = Statistics()
        self.engines = [Statistics() for _ in plan.replicas]
        """The same, of each replica: a request counts where it ended."""
        is_one = len(plan.models) == 1
        self.of_models = [self.stats] if is_one else [Statistics() for _ in plan.models]
        """The same, of each model."""
        models = [self.of_models[plan.model_indices[r.served]] for r in plan.replicas]
        self._sinks: list[tuple[Statistics, ...]] = [
            (self.stats, engine) if is_one else (self.stats, model, engine)
            for model, engine in zip(models, self.engines, strict=True)
        ]
        """What counts the tokens of a replica."""
        ports = Ports(
            log=log,
            observers=(tape, self),
            batches=_Iterations(self._sinks, has_prefixes=self.has_prefixes),
            tokens=self._on_tokens,
        )
        source = _NoSource(has_prefixes=self.has_prefixes)
        self.world = World(plan, source, directory, ports, clock)
        # What the endpoints read of it.
        cluster = self.world.cluster
        self.config = cluster.config
        self.replicas = cluster.replicas
        self.pools = cluster.pools
        self.gateway = cluster.gateway
        self.network = cluster.network
        self.watchers = cluster.watchers
        self.scalers = cluster.scalers
        self.faults = cluster.faults
        self.commander = cluster.commander
        self.note = cluster.note
        self.inject = cluster.inject
        self.is_open = True
        self.error: BaseException | None = None
        self.pace = Pace()
        self.observers: list[Watching] = []
        self._choices: dict[int, Choice] = {}
        self._ending: dict[int, Choice] = {}
        """Answers whose requests have ended; the last tokens are in the front end."""
        self._carried: dict[int, Choice] = {}
        """Answers whose first token goes to the decode replica with the KV."""
        self._fetching: dict[int, int] = {}
        """The endpoint that waits for the KV of a request, by the request's id."""
        self._carries_first = plan.config.network.first_token == "decode"
        self._entering = 0
        """Answers whose requests have been read and have not arrived."""
        self._next_id = 0
        self.gateway.expect_client()

    @property
    def tokens_in_migration(self) -> int:
        """Prompt tokens that wait for or are under migration."""
        return self.world.cluster.tokens_in_migration

    def flush(self) -> None:
        """Let what has happened so far be seen in the files (not more often than once a second)."""
        self.tape.traffic.flush()
        self.world.recorder.flush()

    # --- from clients -------------------------------------------------------------------------
    def submit(self, exchange: Exchange, came_ns: int | None = None) -> None:
        """All requests of a call arrive at the instant at which it came (None: now).

        Ids count arrivals, as lines of the recording do.
        """
        self._entering += len(exchange.choices)

        exchange.is_entering = True

        def arrive() -> None:
            if not exchange.is_entering:
                return
            exchange.is_entering = False
            for choice in exchange.choices:
                request = choice.request
                request.request_id = self._next_id
                self._choices[self._next_id] = choice
                self._next_id += 1
                self._entering -= 1
                request.arrival_ns = self.kernel.now_ns
                self.gateway.arrive(request)

        entered_ns = exchange.entered_ns = self.kernel.enter(arrive, came_ns)
        exchange.came_ns = entered_ns if came_ns is None else came_ns
        waited_s = (entered_ns - exchange.came_ns) / NS_PER_S
        self.pace.intake_worst_s = max(self.pace.intake_worst_s, waited_s)

    def leave(self, exchange: Exchange) -> None:
        """The client has gone: whatever has not ended is cancelled, at whatever stage it is.

        That is at once, also where the emulation is behind: no client waits for what it would still
        compute. A call to whose arrival it has not come never arrives.
        """
        if exchange.has_left:
            return
        exchange.has_left = True
        exchange.changed.set()
        if exchange.is_ended:
            return
        if exchange.is_entering:
            exchange.is_entering = False
            self._entering -= len(exchange.choices)
            for choice in exchange.choices:
                choice.is_ended = True
            return

        def cancel() -> None:
            for choice in exchange.choices:
                self._cancel_now(choice.request)

        self.kernel.enter(cancel, max(exchange.entered_ns, self.kernel.soonest_ns))

    def adopt(self, choice: Choice, first: Choice) -> None:
        """This answer gets the tokens after the one of `first`; inside the emulation only."""
        request = choice.request
        self._fetching[request.request_id] = request.decode_pin
        self.engines[request.decode_pin].fetching += 1
        if first.is_begun:
            self._choices[choice.request.request_id] = choice
        else:
            first.heir = choice

    def end_fetch(self, choice: Choice, replica_id: int) -> None:
        """The KV that an endpoint was to fetch for this answer is gone."""
        self.engines[replica_id].failed(Status.FAILED)
        self.end_choice(choice)

    def is_fetching(self, request: Request) -> bool:
        """A decode endpoint has asked for its KV and does not have it."""
        return request.request_id in self._fetching

    def break_fetch(self, choice: Choice, first: Choice, own: Request) -> None:
        """The endpoint that was to fetch the KV has died: its answer ends, badly.

        `first`: the answer of the prefill endpoint, which still holds the KV. `own`: what `choice`
        had for a request before it took that one.
        """
        request = choice.request
        endpoint = self._fetching.pop(request.request_id)
        self.engines[endpoint].fetching -= 1
        self._choices[request.request_id] = first
        first.heir = None
        own.status, own.reason = Status.FAILED, "replica_lost"
        choice.request = own
        choice.base = 0
        self.end_fetch(choice, endpoint)

    def end_choice(self, choice: Choice) -> None:
        """Its request has ended before."""
        choice.is_ended = True
        choice.exchange.changed.set()

    def forsake(self, request: Request) -> None:
        """No client will come for this request: it is cancelled now."""
        self.kernel.enter(lambda: self._cancel_now(request))

    def leave_all(self) -> None:
        """The server ends and waits no longer."""

        def cancel() -> None:
            for choice in list(self._choices.values()):
                self._cancel_now(choice.request)

        self.kernel.enter(cancel, self.kernel.soonest_ns)
        self.kernel.enter(cancel)  # what arrives until now

    def _cancel_now(self, request: Request) -> None:
        if not request.status.is_terminal and request.cancel_after_ns < 0:
            request.cancel_after_ns = self.kernel.now_ns - request.arrival_ns
            self.world.cluster.cancel(request)

    def close_door(self) -> None:
        """No more requests will come; the run ends with the last one that is here."""
        if self.is_open:
            self.is_open = False
            self.kernel.enter(self._close)

    def _close(self) -> None:
        self.gateway.client_left()

    def end_open(self, error: BaseException | None) -> None:
        """The emulation has ended, with an error or without: no stream waits any longer."""
        for request_id in list(self._ending):
            self._end_answer(self._ending[request_id].request)
        self.error = error
        for choice in list(self._choices.values()):
            choice.exchange.changed.set()

    def adapters_in_use(self) -> Iterator[tuple[str, Request]]:
        """(adapter, request) of the answers under way that have one."""
        for choice in self._choices.values():
            if choice.exchange.adapter:
                yield choice.exchange.adapter, choice.request

    def cache_salt_of(self, request: Request) -> str:
        """The salt of a request that is under way; empty = none."""
        choice = self._choices.get(request.request_id) or self._ending.get(request.request_id)
        return "" if choice is None else choice.exchange.cache_salt

    def under_way(self) -> list[Request]:
        """Requests that have arrived and have not ended, in order of arrival."""
        return [choice.request for choice in self._choices.values()]

    @property
    def open_choices(self) -> int:
        """Answers under way."""
        return len(self._choices) + self._entering

    # --- to clients ---------------------------------------------------------------------------
    def _on_tokens(self, replica_id: int, receivers: Iterable[Request]) -> None:
        """A token for each of these: count it, and let it pass the engine's front end."""
        choices = self._choices
        takers: list[Choice] = []
        count = 0
        stream = self.replicas[replica_id].books.stream
        delay_ns = 0 if stream is None else stream.delay_ns
        now_ns = self.kernel.now_ns
        for request in receivers:
            count += 1
            choice = choices.get(request.request_id)
            if choice is None:
                continue
            takers.append(choice)
            if choice.begun_ns < 0:
                choice.begun_ns = now_ns
                if request.handoff_after_ns >= 0 and not choice.base:
                    self.engines[replica_id].prefilled(request, now_ns, now_ns + delay_ns)
                if choice.heir is not None:
                    choices[request.request_id] = choice.heir
        sinks = self._sinks[replica_id]
        for stats in sinks:
            stats.generated_sum += count
        if not delay_ns and not self._carries_first:
            self._deliver(takers, sinks)
        elif takers:
            at_ns = now_ns + delay_ns
            self.kernel.call_at(at_ns, PRIORITY_WORLD, partial(self._deliver, takers, sinks))

    def _deliver(self, takers: list[Choice], sinks: tuple[Statistics, ...]) -> None:
        """A token of each of these leaves the front end now: wake the streams that send them."""
        if self._carries_first:
            takers = [choice for choice in takers if not self._is_carried(choice)]
        now_ns = self.kernel.now_ns
        gap_ns, gap_count = -1, 0
        for choice in takers:
            choice.produced += 1
            if choice.last_ns >= 0:
                gap = now_ns - choice.last_ns
                if gap != gap_ns:
                    if gap_count:
                        for stats in sinks:
                            stats.inter_token.add(gap_ns / NS_PER_S, gap_count)
                    gap_ns, gap_count = gap, 0
                gap_count += 1
            else:
                choice.first_ns = now_ns
                if choice.base:
                    sinks[-1].received(choice.request, choice.came_ns, now_ns)
                else:
                    for stats in sinks:
                        stats.began(choice.request, now_ns)
            choice.last_ns = now_ns
            choice.exchange.changed.set()
        if gap_count:
            for stats in sinks:
                stats.inter_token.add(gap_ns / NS_PER_S, gap_count)

    def _is_carried(self, choice: Choice) -> bool:
        """This is a first token that the decode replica will deliver (`network.first_token`)."""
        request = choice.request
        if choice.produced or choice.base or request.handoff_after_ns >= 0:
            return False
        if request.migrations:  # the KV was faster than the front end
            return self._deliver_carried(choice)
        if request.status is not Status.MIGRATING:
            return False
        self._carried[request.request_id] = choice
        return True

    def _deliver_carried(self, choice: Choice) -> bool:
        """The KV is there: whether the first token has still a way to go."""
        request = choice.request
        at_ns = request.first_token_ns + request.first_out_ns
        if at_ns <= self.kernel.now_ns:
            return False
        sinks = self._sinks[request.holder_id]
        self.kernel.call_at(at_ns, PRIORITY_WORLD, partial(self._deliver, [choice], sinks))
        return True

    def transferred(
        self,
        batch: MigratingBatch,
        source: ReplicaHandle,
        destination: ReplicaHandle,
        ended_ns: int,
    ) -> None:
        """KV has arrived: a transfer for each request and rank, as vLLM counts its connector's.

        A rank takes its part of a block in one piece for each layer of its stage, keys and values
        apart (a latent vector is both).
        """
        receiver = destination.replica_id
        plan = self.plan.replicas[receiver]
        ranks, page = len(destination.gpus), plan.scheduler.block_size
        is_latent = plan.model.latent is not None
        regions = (1 if is_latent else 2) * plan.model.layers / plan.pipeline_parallel
        whole_bytes = kv_bytes(batch.requests, page, plan.kv_bytes_per_token)
        share = batch.kv_bytes / whole_bytes  # a split batch travels in two halves
        for observer in self.observers:
            observer.on_transfer(source, destination, batch.kv_bytes)
        for request in batch.requests if self._carried else ():
            choice = self._carried.get(request.request_id)
            if choice is not None and request.migrations:  # both halves are there
                del self._carried[request.request_id]
                if not self._deliver_carried(choice):
                    self._deliver([choice], self._sinks[receiver])
        for request in batch.requests if self._fetching else ():
            if request.migrations:
                self._end_fetching(request, receiver)
        for request in batch.requests:
            size_bytes = share * kv_bytes([request], page, plan.kv_bytes_per_token)
            pieces = round(share * regions * kv_blocks(request, page))
            for stats in self._sinks[receiver]:
                stats.transfer.add((ended_ns - batch.started_ns) / NS_PER_S, ranks)
                stats.transfer_post.add(0.0, ranks)  # takes no time here
                stats.transfer_bytes.add(size_bytes / ranks, ranks)
                stats.transfer_descriptors.add(pieces, ranks)

    def _end_fetching(self, request: Request, receiver: int) -> None:
        """The KV of a request is at the endpoint that asked for it."""
        endpoint = self._fetching.pop(request.request_id, -1)
        choice = self._choices.get(request.request_id)
        if endpoint < 0 or choice is None or choice.taker is None:
            return
        assert endpoint == receiver
        choice.taker.loaded_ns = self.kernel.now_ns
        engine = self.engines[endpoint]
        engine.fetching -= 1
        if self.has_prefixes:
            engine.fetched_kv(request)

    def ended(self, request: Request, at_ns: int) -> None:
        """A request has ended: count it, and end its answer."""
        choice = self._choices.pop(request.request_id, None)
        self.stats.ended(request)
        if len(self.of_models) > 1:
            self.of_models[request.model].ended(request)
        for observer in self.observers:
            observer.on_end(request)
        self._end_on_engine(request, choice)
        self._carried.pop(request.request_id, None)
        if choice is None:
            return
        self._ending[request.request_id] = choice
        if request.status is Status.COMPLETED and request.last_out_ns:
            at_ns = self.kernel.now_ns + request.last_out_ns
            self.kernel.call_at(at_ns, PRIORITY_WORLD, partial(self._end_answer, request))
        else:
            self._end_answer(request)

    def _end_on_engine(self, request: Request, choice: Choice | None) -> None:
        """Count the end where it was; a request that two endpoints share, on both."""
        if request.handoff_after_ns >= 0 and choice is not None:
            endpoint = self._fetching.pop(request.request_id, -1)
            if endpoint >= 0:
                self.engines[endpoint].fetching -= 1
            taker = choice.taker
            if not choice.is_begun and not choice.base:
                self.engines[request.pin].failed(request.status)
            if taker is not None:
                self.engines[request.decode_pin].decoded(taker)
            return
        place = request.decode_replica_id if request.decode_replica_id >= 0 else request.replica_id
        place = place if place >= 0 else request.holder_id
        if place < 0 and request.status is not Status.REJECTED:
            place = request.pin  # an outside router has given it to that endpoint
        if place >= 0:
            self.engines[place].ended(request)

    def _end_answer(self, request: Request) -> None:
        """The last token has left the front end, or the answer breaks off."""
        choice = self._ending.pop(request.request_id, None)
        if choice is None:
            return
        if request.status is Status.COMPLETED:
            choice.produced = request.generated_tokens - choice.base
        self.end_choice(choice)
        if choice.heir is not None and choice.heir is not choice:
            self.end_choice(choice.heir)


class _Iterations:
    """Counts the tokens of each iteration."""

    def __init__(
        self,
        sinks: list[tuple[Statistics, ...]],
        *,
        has_prefixes: bool,
    ) -> None:
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


class _NoSource:
    """Nothing comes from a file."""

    def __init__(self, *, has_prefixes: bool) -> None:
        self.has_prefixes = has_prefixes

    def releases(self) -> Iterator[Request]:
        """Requests come from clients only."""
        return iter(())

    def end_turn(self, request: Request, now_ns: int, *, completed: bool) -> Following:
        """Real clients decide what they ask next."""
        return NOTHING_FOLLOWS


def live_config(config: Config) -> Config:
    """What live mode changes: clients that are refused try again themselves; loads have a deadline,
    as faults may come, and a replay has to agree with it whether any did."""
    recovery = config.recovery
    deadline_s = recovery.load_deadline_ns(has_faults=True) / NS_PER_S
    return msgspec.structs.replace(
        config,
        recovery=msgspec.structs.replace(recovery, client_retries=0, load_deadline_s=deadline_s),
    )
