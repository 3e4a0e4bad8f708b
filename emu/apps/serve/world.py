"""The cluster of live mode: requests come from clients, tokens go to them as they are produced.

Owns the open exchanges (one per HTTP call) and the statistics that `/metrics` and the page show.
The actors are those of every run; the kernel is a `WallKernel`, and whatever comes from outside
enters through `kernel.enter`. An open server counts as one pending client of the gateway, so that
an idle cluster does not end; `close_door` takes it away and the run ends with the last request.

Memory. A choice keeps counters, not tokens: a client that reads slowly costs its socket buffer
and no more. Finished exchanges are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from emu.apps.serve.choices import Choice, Exchange, traced_half
from emu.apps.serve.deliveries import IterationCounts, Takers, hand_over
from emu.apps.serve.pace import AnswerPace, Pace
from emu.apps.serve.recording import Tape
from emu.apps.serve.statistics import Statistics
from emu.apps.serve.traces.recorder import Recorder
from emu.cluster.plan import Plan
from emu.config.schema import Config
from emu.kernel.priorities import PRIORITY_WORLD
from emu.kernel.wallclock import WallKernel
from emu.log import Log
from emu.migration.transfer import MigratingBatch, kv_blocks, kv_bytes
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status
from emu.units import NS_PER_S
from emu.workload.session import NOTHING_FOLLOWS, Following
from emu.world import Observer, Ports, World


class Watching(Protocol):
    """Something that is told what happens to requests."""

    def on_end(self, request: Request) -> None:
        """A request has ended, in whatever way."""

    def on_transfer(
        self, source: ReplicaHandle, destination: ReplicaHandle, size_bytes: int
    ) -> None:
        """KV has gone from one replica to another."""


class LiveCluster(Observer):
    """A world on the wall clock, and the exchanges that are open with its clients.

    It is the world's source of tokens for clients, and an observer of ends and transfers.
    """

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        tape: Tape,
        clock: WallKernel,
        log: Log | None,
        traces: Recorder | None = None,
        face: str = "vllm",
    ) -> None:
        """`directory`: of the files that every run has. `traces`: of the calls, if any are kept.

        `face`: as which engine replicas are counted.
        """
        self.traces = traces
        self.plan = plan
        self.tape = tape
        self.kernel = clock
        self.has_prefixes = any(r.scheduler.caches_prefixes for r in plan.replicas)
        self.stats = Statistics()
        self.engines = [Statistics(face) for _ in plan.replicas]
        """The same, of each replica: a request counts where it ended."""
        is_one = len(plan.models) == 1
        self.of_models = [self.stats] if is_one else [Statistics() for _ in plan.models]
        """The same, of each model."""
        self._sinks = self._sinks_of(plan)
        """What counts the tokens of a replica."""
        nothing = _NoSource(has_prefixes=self.has_prefixes)
        self.world = World(plan, nothing, directory, self._ports(log), clock)
        # What the endpoints read of it.
        cluster = self.world.cluster
        self.replicas = cluster.replicas
        self.pools = cluster.pools
        self.gateway = cluster.gateway
        self.network = cluster.network
        self.watchers = cluster.watchers
        self.scalers = cluster.scalers
        self.faults = cluster.faults
        self.commander = cluster.commander
        self.note, self.inject = cluster.note, cluster.inject
        self.is_open = True
        self.error: BaseException | None = None
        self.pace = Pace()
        self.observers: list[Watching] = []
        self.on_delivered: list[Callable[[], None]] = []
        """What passes tokens on that have left the front end of a replica."""
        self._choices: dict[int, Choice] = {}
        self._takers = [Takers(self._choices) for _ in plan.replicas]
        self._ending: dict[int, Choice] = {}
        """Answers whose requests have ended; the last tokens are in the front end."""
        self._carried: dict[int, Choice] = {}
        """Answers whose first token goes to the decode replica with the KV."""
        self._fetching: dict[int, int] = {}
        """The endpoint that waits for the KV of a request, by the request's id."""
        self._carries_first = plan.config.network.first_token == "decode"
        self._entering = 0
        """Answers whose requests have been read and have not arrived."""
        self._next_id = self._changes = 0
        """Of the next request to arrive; how often an answer has lost its place in `_choices`."""
        self.gateway.expect_client()

    def _ports(self, log: Log | None) -> Ports:
        """What the world tells of itself, and to what."""
        tape, traces = self.tape, self.traces
        return Ports(
            log=log,
            observers=(tape, self) if traces is None else (tape, self, traces),
            batches=IterationCounts(self._sinks, has_prefixes=self.has_prefixes),
            tokens=self._on_tokens,
        )

    def _sinks_of(self, plan: Plan) -> list[tuple[Statistics, ...]]:
        """Statistics of all, of its model where there are several, and of itself, by replica."""
        if len(self.of_models) == 1:
            return [(self.stats, engine) for engine in self.engines]
        models = [self.of_models[plan.model_indices[r.served]] for r in plan.replicas]
        return [(self.stats, *pair) for pair in zip(models, self.engines, strict=True)]

    @property
    def tokens_in_migration(self) -> int:
        """Prompt tokens that wait for or are under migration."""
        return self.world.cluster.tokens_in_migration

    def wall_late_ns(self, due_ns: int) -> int:
        """Wall time since something was due."""
        return int((self.kernel.wall_ns() - due_ns) / self.kernel.speed)

    def note_pace(self, exchange: Exchange, pace: AnswerPace) -> None:
        """How late an answer was is written down beside the recording."""
        for choice in exchange.choices:
            self.tape.lateness.add(choice.request.request_id, pace)

    def flush(self) -> None:
        """Let what has happened so far be seen in the files (not more often than once a second)."""
        self.tape.traffic.flush()
        self.tape.lateness.flush()
        self.world.recorder.flush()

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
                # A decode endpoint may already have been promised its KV.
                choice.request.status = Status.CANCELLED
                choice.request.reason = "client_left"
            return

        def cancel() -> None:
            for choice in exchange.choices:
                self._cancel_now(choice.request)

        self.kernel.enter(cancel, max(exchange.entered_ns, self.kernel.soonest_ns))

    def adopt(self, choice: Choice, first: Choice) -> None:
        """This answer gets the tokens after the one of `first`; inside the emulation only."""
        request = choice.request
        self._stop_fetching(request)
        self._fetching[request.request_id] = request.decode_pin
        self.engines[request.decode_pin].fetching += 1
        choice.giver = first
        if first.is_begun:
            self._replace(choice.request, choice)
        else:
            first.heir = choice

    def end_fetch(self, choice: Choice, replica_id: int) -> None:
        """The KV that an endpoint was to fetch for this answer is gone."""
        self.engines[replica_id].failed(Status.FAILED)
        if self.traces is not None:
            self.traces.broken(choice.request, traced_half(choice, replica_id, self.kernel.now_ns))
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
        endpoint = self._stop_fetching(request)
        self._replace(request, first)
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

    def _on_tokens(self, replica_id: int, receivers: list[Request]) -> None:
        """A token for each of these: count it, and let it pass the engine's front end."""
        stream = self.replicas[replica_id].books.stream
        delay_ns = soon_ns = 0
        if stream is not None:
            delay_ns, soon_ns = stream.delay_ns, stream.first_delay_ns
        now_ns = self.kernel.now_ns
        begun = partial(self._begun, replica_id, soon_ns)
        takers = self._takers[replica_id].take_up(receivers, self._changes, begun)
        sinks = self._sinks[replica_id]
        for stats in sinks:
            stats.generated_sum += len(receivers)
        if soon_ns < delay_ns:
            firsts = [choice for choice in takers if choice.begun_ns == now_ns]
            takers = [choice for choice in takers if choice.begun_ns < now_ns]
            if firsts:
                soon = partial(self._deliver, firsts, sinks)
                self.kernel.call_at(now_ns + soon_ns, PRIORITY_WORLD, soon)
        if not delay_ns and not self._carries_first:
            self._deliver(takers, sinks)
        elif takers:
            at_ns = now_ns + delay_ns
            self.kernel.call_at(at_ns, PRIORITY_WORLD, partial(self._deliver, takers, sinks))

    def _begun(self, replica_id: int, delay_ns: int, choice: Choice) -> None:
        """The engine has the first token of an answer, which leaves the front end later."""
        now_ns, request = self.kernel.now_ns, choice.request
        choice.begun_ns = now_ns
        if request.handoff_after_ns >= 0 and not choice.base:
            self.engines[replica_id].prefilled(request, now_ns, now_ns + delay_ns)
        if choice.heir is not None:
            self._replace(request, choice.heir)

    def _replace(self, request: Request, choice: Choice) -> None:
        """The next tokens of a request are this answer's."""
        self._choices[request.request_id] = choice
        self._changes += 1

    def _deliver(self, takers: list[Choice], sinks: tuple[Statistics, ...]) -> None:
        """A token of each of these leaves the front end now: wake the streams that send them."""
        if self._carries_first:
            takers = [choice for choice in takers if not self._is_carried(choice)]
        now_ns = self.kernel.now_ns
        written, woken = hand_over(takers, now_ns, sinks)
        if written:
            self.pace.of_tokens.left(self.wall_late_ns(now_ns), written)
        for pass_on in self.on_delivered:
            pass_on()
        if woken:
            self.kernel.give_way()

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
        ranks, page = len(destination.gpus), plan.page_tokens
        is_latent = plan.model.latent is not None
        regions = (1 if is_latent else 2) * plan.model.layers / plan.pipeline_parallel
        token_bytes, state_bytes = plan.kv_bytes_per_token, plan.state_bytes
        whole_bytes = kv_bytes(batch.requests, page, token_bytes, state_bytes)
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
            size_bytes = share * kv_bytes([request], page, token_bytes, state_bytes)
            pieces = round(share * regions * kv_blocks(request, page))
            for stats in self._sinks[receiver]:
                stats.transfer.add((ended_ns - batch.started_ns) / NS_PER_S, ranks)
                stats.transfer_post.add(0.0, ranks)  # takes no time here
                stats.transfer_bytes.add(size_bytes / ranks, ranks)
                stats.transfer_descriptors.add(pieces, ranks)

    def _end_fetching(self, request: Request, receiver: int) -> None:
        """The KV of a request is at the endpoint that asked for it."""
        endpoint = self._stop_fetching(request)
        choice = self._choices.get(request.request_id)
        if endpoint < 0 or choice is None or choice.taker is None:
            return
        assert endpoint == receiver
        choice.taker.loaded_ns = self.kernel.now_ns
        if self.has_prefixes:
            self.engines[endpoint].fetched_kv(request)

    def _stop_fetching(self, request: Request) -> int:
        """The endpoint that waited for the KV of a request waits no longer; -1 = none did."""
        endpoint = self._fetching.pop(request.request_id, -1)
        if endpoint >= 0:
            self.engines[endpoint].fetching -= 1
        return endpoint

    def ended(self, request: Request, at_ns: int) -> None:
        """A request has ended: count it, and end its answer."""
        choice = self._choices.pop(request.request_id, None)
        self._changes += 1
        self.stats.ended(request)
        if len(self.of_models) > 1:
            self.of_models[request.model].ended(request)
        for observer in self.observers:
            observer.on_end(request)
        if self.traces is not None:
            self._trace(self.traces, request, choice)
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

    def _trace(self, traces: Recorder, request: Request, choice: Choice | None) -> None:
        """Hand on what happened to it."""
        now_ns = self.kernel.now_ns
        if choice is None:
            traces.finish(request, None, [], "", now_ns)
            return
        finish = choice.finish_reason
        first, taker = choice.giver or choice, choice.taker
        halves = []
        if request.pin >= 0:
            halves.append(traced_half(first, request.pin, now_ns))
        if taker is not None:
            halves.append(traced_half(taker, request.decode_pin, now_ns))
        whole = None if halves else choice.exchange.trace
        traces.finish(request, whole, [half for half in halves if half], finish, now_ns)

    def _end_on_engine(self, request: Request, choice: Choice | None) -> None:
        """Count the end where it was; a request that two endpoints share, on both."""
        self._stop_fetching(request)
        if request.handoff_after_ns >= 0 and choice is not None:
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
