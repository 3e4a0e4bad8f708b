"""Parity with LLMServingSim: its whole front end on the embedded executor, quirks included.

Owns a deterministic, synchronous re-run of that simulator's main loop: polls, routing, iteration
scheduling, hand-off from prefill to decode, data-parallel waves, sessions. Its only purpose is to
reproduce published runs to the nanosecond; emu's own runs use the replica actors. Schedulers and
KV pools are emu's (`scheduling/vllm.py`), so what they do is checked here against the original.
Source: LLMServingSim 2.0.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from emu.backends.astra.executor import Executor
from emu.backends.astra.graph import Graph, Node, NodeKind
from emu.backends.astra.polling import IDLE_STEP_NS, Answer, Polling
from emu.errors import InputError, RunError
from emu.lab.parity.cluster import ParityCluster
from emu.lab.parity.instance import Flight, Instance, ParityOptions, ParityRow
from emu.process.prepared import prepared
from emu.request import Request, plain_request
from emu.scheduling.base import Progress
from emu.workload.items import Line, Turn, prefix_of

_NS_PER_S: Final = 1_000_000_000
_WAITING_WEIGHT: Final = 4
_DEFAULT_REQUESTS: Final = 16
_DEFAULT_TOKENS: Final = 64
"""Prompt and output of the requests that every instance is given without a workload."""


class _Session(msgspec.Struct):
    """Sub-requests that are still to come."""

    turns: list[Turn]
    first_id: int
    at: int = 0


class ParityResult(msgspec.Struct, frozen=True):
    """What a run brought."""

    clock_ns: int
    rows: list[ParityRow]
    polls: int
    preemptions: int
    recomputed_tokens: int


def read_requests(path: Path, limit: int = 0) -> list[Line]:
    """The lines of a workload; `limit` 0 = all."""
    lines = msgspec.json.Decoder(prepared(Line)).decode_lines(path.read_bytes())
    return lines[:limit] if limit else lines


class ParityRun:
    """The front end: answers the polls of the executor's loop."""

    def __init__(
        self,
        cluster: ParityCluster,
        instances: Sequence[Instance],
        lines: Sequence[Line] | None,
        options: ParityOptions,
    ) -> None:
        """`lines` None: the requests of the original without a workload."""
        self.cluster = cluster
        self.options = options
        self.instances = list(instances)
        self._by_npu: dict[int, Instance] = {}
        for instance in self.instances:
            for npu in range(instance.replica.first_npu, instance.replica.last_npu + 1):
                self._by_npu[npu] = instance
        self._entries = [i for i in self.instances if i.replica.kind != "DECODE"]
        self._decoders = [i for i in self.instances if i.replica.kind == "DECODE"]
        self._turn = {"prefill": 0, "decode": 0}
        self._pending: list[tuple[int, int, Request]] = []
        """A heap of (arrival, number): equal arrivals keep the order of their release."""
        self._numbers = itertools.count()
        self._sessions: dict[int, _Session] = {}
        self._random = random.Random(42)
        replicas = [i.replica for i in self.instances]
        # Idle start NPUs are asked at every event, even inside the collectives of others.
        watched = len(replicas) > 1 or any(r.pipeline > 1 for r in replicas)
        offloads = any(i.options.attention_offloading for i in self.instances)
        memories = cluster.pim_memories if offloads else cluster.memories
        self.executor = Executor(cluster.network, memories, every_message=watched)
        self._has_workload = lines is not None
        if lines is None:
            self._queue_defaults()
        else:
            self._read(lines)
        self._waves: dict[str, dict[int, Flight]] = {}
        """Data-parallel groups: batches that wait for the other members, by instance."""
        self._released: dict[int, Mapping[int, Graph]] = {}
        """Graphs of a complete wave for a member that did not complete it."""
        self._overrun: list[int] = []
        """Requests of one output token that a decode instance gives a second one."""
        self._last_tokens: dict[int, int] = {}
        self._gaps: dict[int, list[int]] = {}
        self._done_npus: dict[int, list[int]] = {i.replica.index: [] for i in self.instances}
        self._finished: set[int] = set()
        self._prefills_are_done = False

    def _read(self, lines: Sequence[Line]) -> None:
        next_id = 0
        for line in lines:
            if line.sub_requests is None:
                self._release(next_id, line, line.arrival_time_ns)
                next_id += 1
            elif line.sub_requests:
                if any(turn.after is not None for turn in line.sub_requests):
                    problem = "LLMServingSim plays sub-requests one after another"
                    raise InputError("workload", None, "sub_requests.after", problem)
                self._sessions[next_id] = _Session(line.sub_requests, next_id)
                self._release(next_id, line.sub_requests[0], line.arrival_time_ns)
                next_id += len(line.sub_requests)

    def _queue_defaults(self) -> None:
        """16 requests for every instance from the start, past the router."""
        for instance in self.instances:
            for number in range(_DEFAULT_REQUESTS):
                request_id = instance.replica.index * _DEFAULT_REQUESTS + number
                request = plain_request(request_id, 0, _DEFAULT_TOKENS, _DEFAULT_TOKENS)
                instance.scheduler.enqueue(request, 0)

    def _release(self, request_id: int, item: Line | Turn, arrival_ns: int) -> None:
        request = plain_request(request_id, arrival_ns, item.input_toks, item.output_toks)
        request.prefix = prefix_of(item)
        heapq.heappush(self._pending, (arrival_ns, next(self._numbers), request))
        if not self.options.late_arrivals:
            self.executor.wake_at(max(arrival_ns, self.executor.now_ns))

    def _continue_session(self, request: Request, now_ns: int) -> None:
        for session in self._sessions.values():
            if session.first_id + session.at == request.request_id:
                turn = session.turns[session.at]
                session.at += 1
                if session.at < len(session.turns):
                    due = now_ns + turn.tool_duration_ns
                    self._release(request.request_id + 1, session.turns[session.at], due)
                else:
                    del self._sessions[session.first_id]
                return

    def _choose(self, role: str, candidates: Sequence[Instance]) -> Instance:
        """Least load from a rotating start: the first strictly smaller score wins."""
        start, count = self._turn[role], len(candidates)
        policy = self.options.request_routing
        if policy == "rand":
            return candidates[self._random.randrange(count)]
        if policy == "rr":
            self._turn[role] = start + 1
            return candidates[start % count]
        best, best_score = 0, float("inf")
        for offset in range(count):
            index = (start + offset) % count
            scheduler = candidates[index].scheduler
            load = _WAITING_WEIGHT * scheduler.waiting_count + scheduler.running_count
            score = load / candidates[index].table.requests_max
            if score < best_score:
                best, best_score = index, score
        self._turn[role] = (best + 1) % count
        return candidates[best]

    def _route(self, now_ns: int) -> None:
        while self._pending and self._pending[0][0] <= now_ns:
            _, _, request = heapq.heappop(self._pending)
            instance = self._choose("prefill", self._entries)
            if not instance.table.caches_prefixes:
                request.prefix = None
            if instance.replica.kind == "PREFILL" and request.output_tokens == 1:
                # The original hands it on all the same, and one decode too many is run.
                request.output_tokens = request.max_output_tokens = 2
                self._overrun.append(request.request_id)
            instance.scheduler.enqueue(request, now_ns)

    def _hand_off(self, source: Instance, request: Request, now_ns: int) -> None:
        computed = request.computed_tokens
        source.scheduler.detach(request)
        source.scheduler.release(request)
        request.computed_tokens = computed
        instance = self._choose("decode", self._decoders)
        request.held = None
        if not instance.scheduler.reserve([request]):
            raise RunError(
                f"at {now_ns} ns decode instance {instance.replica.index} has no room for request "
                f"{request.request_id}; the original stops here, too"
            )
        instance.scheduler.activate([request], now_ns)

    def next_ns(self, now_ns: int) -> int:
        """The next arrival, for runs without the idle grid."""
        return max(now_ns + 1, self._pending[0][0]) if self._pending else -1

    def answer(self, npu: int, iteration: int, now_ns: int) -> Answer | Mapping[int, Graph]:
        """One poll, in the order of the original's main loop."""
        instance = self._by_npu[npu]
        self._route(now_ns)
        flight = instance.report(iteration - 1, npu)
        if flight is not None:
            self._complete(instance, flight, now_ns)
        graphs = self._schedule(instance, npu, iteration, now_ns)
        if graphs is not None:
            return graphs
        return self._rest(instance, npu)

    def _complete(self, instance: Instance, flight: Flight, now_ns: int) -> None:
        if flight.batch is None:
            return
        scheduler = instance.scheduler
        receivers = list(scheduler.token_receivers(flight.batch))
        progress: Progress = scheduler.complete(flight.batch, 1, now_ns, 0)
        for request in receivers:
            last = self._last_tokens.get(request.request_id)
            if last is None:
                self._gaps[request.request_id] = []
            else:
                self._gaps[request.request_id].append(now_ns - last)
            self._last_tokens[request.request_id] = now_ns
        if instance.replica.kind == "PREFILL":
            for request in progress.first_tokens:
                self._hand_off(instance, request, now_ns)
            return
        for request in progress.finished:
            instance.done.append(self._row(instance, request, now_ns))
            self._continue_session(request, now_ns)

    def _row(self, instance: Instance, request: Request, now_ns: int) -> ParityRow:
        latency = now_ns - request.arrival_ns
        ttft = request.first_token_ns - request.arrival_ns
        output = 1 if request.request_id in self._overrun else request.output_tokens
        steps = output - 1
        index, number = instance.replica.index, request.request_id
        if not self._has_workload:
            # There the column says which instance the request was numbered for.
            owner, number = divmod(number, _DEFAULT_REQUESTS)
            if owner == index:
                index = number % len(self.instances)
        return ParityRow(
            index,
            number,
            request.prompt_tokens,
            output,
            request.arrival_ns,
            now_ns,
            latency,
            request.prefill_scheduled_ns - request.arrival_ns,
            ttft,
            (latency - ttft) // steps if steps else 0,
            self._gaps.pop(request.request_id),
        )

    def _schedule(
        self, instance: Instance, npu: int, iteration: int, now_ns: int
    ) -> Mapping[int, Graph] | None:
        replica = instance.replica
        has_room = len(instance.flights) < replica.pipeline
        if npu == replica.first_npu and has_room:
            flight = instance.form(now_ns, npu)
            if flight is not None:
                if replica.group:
                    return self._enter_wave(instance, flight)
                flight.graphs = instance.graphs(flight)
                return flight.graphs
        else:
            flight = instance.join(iteration, npu)
            if flight is not None:
                if flight.graphs is None:
                    flight.fired.remove(npu)
                return flight.graphs
        released = self._released.pop(replica.index, None)
        if released is not None:
            return released
        wave = self._waves.get(replica.group)
        if wave and replica.index not in wave and has_room:
            # A member with nothing to do keeps pace with a batch of one token.
            return self._enter_wave(instance, instance.form_dummy(npu))
        return None

    def _members(self, group: str) -> list[Instance]:
        return [i for i in self.instances if i.replica.group == group]

    def _enter_wave(self, instance: Instance, flight: Flight) -> Mapping[int, Graph] | None:
        """Put a batch into the group's wave; its graphs if that completes the wave."""
        group = instance.replica.group
        wave = self._waves.setdefault(group, {})
        wave[instance.replica.index] = flight
        members = self._members(group)
        if len(wave) < len(members):
            return None
        del self._waves[group]
        largest = max(each.shape.new_tokens for each in wave.values())
        graphs: dict[int, Graph] = {}
        for member in members:
            each = wave[member.replica.index]
            each.shape.padded_tokens = largest
            graphs.update(member.graphs(each))
        for index, each in wave.items():
            each.graphs = graphs
            if index != instance.replica.index:
                # The NPU that formed it has claimed it already and is answered at its next poll.
                self._released[index] = graphs
        return graphs

    def _is_empty(self, instance: Instance) -> bool:
        scheduler = instance.scheduler
        return not (scheduler.waiting_count or scheduler.running_count or instance.flights)

    def _rest(self, instance: Instance, npu: int) -> Answer:
        replica = instance.replica
        if self._pending or self._sessions or not self._is_empty(instance):
            return Answer.PASS
        if replica.group and not all(self._is_empty(m) for m in self._members(replica.group)):
            return Answer.PASS
        if replica.kind == "DECODE" and not self._prefills_are_done:
            prefills = sum(i.replica.kind == "PREFILL" for i in self.instances)
            self._prefills_are_done = len(self._finished) >= prefills
            if not self._prefills_are_done:
                return Answer.PASS
        reported = self._done_npus[replica.index]
        if npu not in reported:
            reported.append(npu)
        if len(reported) >= min(2, replica.num_npus):
            self._finished.add(replica.index)
        if len(self._finished) == len(self.instances):
            return Answer.EXIT
        return Answer.DONE

    def run(self) -> ParityResult:
        """Run to the end."""
        replicas = [i.replica for i in self.instances]
        ends = [r.last_npu for r in replicas if r.npus_owned > 1]
        polling = Polling(
            self.executor,
            [r.first_npu for r in replicas],
            ends,
            idle_step_ns=IDLE_STEP_NS if self.options.idle_grid else 0,
            stagger=self.options.end_npu_stagger,
        )
        first = max(1, self._pending[0][0]) if self._pending else 1
        interval_ns = int(self.options.log_interval_s * _NS_PER_S)
        event = Node(0, NodeKind.COMP, duration_ns=min(interval_ns, first))
        graphs = [Graph(npu, [event]) for npu in range(self.executor.npu_count)]
        clock = polling.run(self, graphs)
        rows = [row for instance in self.instances for row in instance.done]
        return ParityResult(
            clock,
            rows,
            polling.polls,
            sum(i.preemptions for i in self.instances),
            sum(i.recomputed_tokens for i in self.instances),
        )
