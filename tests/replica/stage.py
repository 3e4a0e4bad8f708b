"""Replicas with their real actors and schedulers, and nothing around them: time is moved by hand.

No event loop and no cluster: what a cluster would do on an action is written down, and transfers
arrive when a test says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from emu.config.schema import FcfsTable, VllmTable
from emu.kernel.clock import NEVER, Actor, Kernel
from emu.kernel.lock import Lock
from emu.latency.linear import LinearBackend
from emu.network.grids import Grid
from emu.replica import events as ev
from emu.replica.actor import ReplicaActor
from emu.replica.relay_board import RelayBoard
from emu.replica.replica import Replica
from emu.replica.split_batch import SplitBatch
from emu.replica.states import ReplicaState
from emu.replica.table import HANDLERS
from emu.request import Request, Status
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.fcfs import PrefillQueue
from emu.scheduling.registry import make_scheduler

S = ReplicaState
US = 1_000
BY_COMMAND = {S.NEW_PREFILL: S.INACTIVE, S.OLD_PREFILL: S.PREFILL}
"""States of live scaling, and those from which a command leads there."""


class HandKernel(Kernel):
    """The real queue and timers, run by the test step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.away: list[Actor] = []
        """Actors that wait for an answer from outside."""

    def answer(self) -> None:
        """What was asked of the world outside is answered, without any simulated time."""
        away, self.away = self.away, []
        for actor in away:
            actor.resume(None)

    def rest(self) -> None:
        """What waits at this instant, and what that sets off."""
        while self._ready:
            self._take_ready()

    def run(self, until_ns: int = NEVER) -> None:  # type: ignore[override]
        """Everything up to an instant, which is reached; without one, until nothing is left."""
        self.rest()
        while self._heap and self._heap[0][0] <= until_ns:
            due_ns, priority, number, actor, call = heapq.heappop(self._heap)
            if actor is not None and actor.armed != number:
                continue
            assert self._move_to(due_ns, priority)
            if actor is not None:
                self._step(actor)
            elif call is not None:
                call()
            self.rest()
        if until_ns < NEVER:
            if until_ns > self.now_ns:
                self.priority_reached = -1
            self.now_ns = max(self.now_ns, until_ns)

    def _step(self, actor: Actor) -> None:
        self.steps.append(actor.name)
        assert len(self.steps) < 100_000, "time does not move"
        if actor.life is None:
            self._bring_to_life(actor)
        super()._step(actor)
        if actor.is_away:
            self.away.append(actor)


class Gaps:
    """Sum and number of gaps between tokens."""

    def __init__(self) -> None:
        self.count = 0

    def add_run(self, ends: Any, count: int, start_ns: int = -1, first_count: int = -1) -> None:
        self.count += len(ends) * count if first_count < 0 else (len(ends) - 1) * count
        self.count += max(0, first_count)

    def add_gap(self, ns: int, count: int = 1, at_ns: int = -1) -> None:
        self.count += count

    def add_each(self, gaps_ns: Sequence[int], counts: Sequence[int], at_ns: Sequence[int]) -> None:
        self.count += sum(counts)

    def add_gaps(self, gaps_ns: Iterable[int], at_ns: int = -1) -> None:
        self.count += len(list(gaps_ns))


class Outbound:
    """What has left a prefill replica's hands."""

    def __init__(self, stage: Stage) -> None:
        self.unfinished = 0
        self.batches: list[list[Request]] = []
        self.firsts: list[SplitBatch] = []
        self.seconds: list[tuple[SplitBatch, list[Request]]] = []
        self.handed_ns: dict[int, int] = {}
        self._stage = stage

    def append(self, requests: list[Request], prefill_ns: int) -> None:
        self.unfinished += 1
        self.batches.append(requests)
        self.handed_ns |= {r.request_id: self._stage.kernel.now_ns for r in requests}

    def append_first(self, split: SplitBatch) -> None:
        self.unfinished += 1
        self.firsts.append(split)

    def append_second(self, split: SplitBatch, survivors: list[Request]) -> None:
        self.unfinished += bool(survivors)
        self.seconds.append((split, survivors))
        self.handed_ns |= {r.request_id: self._stage.kernel.now_ns for r in survivors}

    def flush(self) -> list[list[Request]]:
        batches, self.batches = self.batches, []
        self.unfinished -= len(batches)
        return batches


class Sent:
    """A transfer whose end the test tells."""

    def __init__(self, size_bytes: int, rest: dict[str, Any]) -> None:
        self.size_bytes = size_bytes
        self.on_done: Callable[[], None] = rest["on_done"]
        self.on_failed: Callable[[str], None] = rest["on_failed"]
        self.pair: tuple[int, int] = rest["pair"]


class Stage:
    """The world of some replicas: what they do to it is written down."""

    streams = False
    batches: Any = None
    on_formed: Any = None
    history: Any = None

    def __init__(
        self,
        *states: ReplicaState,
        policy: str = "vllm",
        leap: bool = True,
        blocks: int = 64,
        stages: int = 1,
        layers: int = 4,
    ) -> None:
        self.kernel: Any = HandKernel()
        self.gaps = Gaps()
        self.network = self
        self.sent: list[Sent] = []
        self.ends: list[tuple[int, str, str, int]] = []
        """(request, status, reason, when)."""
        self.losses: list[tuple[list[int], str]] = []
        self.requeued: list[int] = []
        self.dropped: list[SplitBatch] = []
        self.moves: list[tuple[int, str, str, str, str]] = []
        self.capacity: list[int] = []
        self.draining: list[int] = []
        self.followed: list[int] = []
        self.relays: list[tuple[int, int, list[int], int]] = []
        self.expired: list[list[int]] = []
        self.replies: list[tuple[int, int]] = []
        """(number of the question, answer)."""
        self.on_answer: Callable[[int, int], None] = lambda number, value: None
        self.queue = PrefillQueue() if policy == "fcfs" else None
        self._ids = self._asked = 0
        self.board = RelayBoard(lambda one: self.actors[one].look(), self._next_id)
        self.replicas: list[Replica] = []
        table = FcfsTable() if policy == "fcfs" else VllmTable(block_size=4, max_num_seqs=8)
        for index, state in enumerate(states):
            scheduler = make_scheduler(
                table,
                ReplicaLimits(
                    num_blocks=blocks,
                    block_size=4,
                    max_model_tokens=4096,
                    pipeline_stages=stages,
                    prefix_caching=False,
                    leap=leap,
                    kv_layout=None,
                    replica_id=index,
                ),
                queue=self.queue,
            )
            replica = Replica(
                index,
                self.kernel,
                self,
                scheduler,
                LinearBackend(10.0, 1.0, 0.01, stages=stages, layers=layers),
                HANDLERS,
                Lock(self.kernel.soon, f"lock {index}"),
                state=BY_COMMAND.get(state, state),
                grid=Grid((index,), 1),
                machine=0,
                stages=stages,
                layers=layers,
            )
            replica.relaying.board, replica.relaying.peers = self.board, self.replicas
            replica.relaying.activation_token_bytes = 2
            replica.connect(Outbound(self))
            self.replicas.append(replica)
        self.actors = [ReplicaActor(replica, self) for replica in self.replicas]
        for index, state in enumerate(states):
            if state in BY_COMMAND:
                self.command(index, state)
        for actor in self.actors:
            self.kernel.interrupt(actor)
        self.kernel.rest()

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def outbox(self, index: int) -> Outbound:
        found = self.replicas[index].outbox
        assert isinstance(found, Outbound)
        return found

    def ask_outside(self, index: int, backend: Any) -> None:
        """From now on the replica asks a backend outside simulated time."""
        replica = self.replicas[index]
        replica.pace.latency = backend
        replica.choose_starter()
        self.actors[index].life = None

    def ask(self) -> ev.Asked:
        """A question with a number of its own."""
        self._asked += 1
        return ev.Asked("injector", self._asked)

    # --- what tests do --------------------------------------------------------------------------
    def made(self, request_id: int, prompt: int, output: int) -> Request:
        """A request that arrives now."""
        made = Request(
            request_id=request_id,
            arrival_ns=self.kernel.now_ns,
            prompt_tokens=prompt,
            output_tokens=output,
            max_output_tokens=output,
        )
        made.row = request_id
        return made

    def submit(self, request_id: int, prompt: int, output: int, to: int = 0) -> Request:
        """The router gives a request to a replica."""
        made = self.made(request_id, prompt, output)
        self.actors[to].tell(ev.Submitted(made))
        return made

    def queued(self, request_id: int, prompt: int, output: int = 5) -> Request:
        """A request comes into the global queue, and those that take from it hear of it."""
        assert self.queue is not None
        made = self.made(request_id, prompt, output)
        made.status = Status.QUEUED
        self.queue.append(made)
        for actor in self.actors:
            actor.look()
        return made

    def command(self, index: int, to: ReplicaState, weights: bool | None = None) -> None:
        """A manual command."""
        self.actors[index].tell(
            ev.Commanded(to=to, writer="command", cause="by hand", weights=weights)
        )

    def crash(self, index: int) -> list[Request]:
        """The process dies, and its state says so; what was lost."""
        lost: list[Request] = []
        self.actors[index].tell(ev.Crashed(lost=lost))
        self.actors[index].tell(ev.Commanded(to=S.FAILED, writer="fault", cause="crash"))
        return lost

    def problems(self) -> list[str]:
        """What a scheduler's books say against counting anew."""
        found = []
        for replica in self.replicas:
            replica.settle()
            found += replica.scheduler.recount()
        return found

    # --- the ports ------------------------------------------------------------------------------
    def on_tokens(self, replica_id: int, receivers: list[Request]) -> None:
        raise AssertionError("no one follows tokens")

    def send(self, source: Any, destination: Any, size_bytes: int, **rest: Any) -> Sent:
        self.sent.append(Sent(size_bytes, rest))
        return self.sent[-1]

    def terminal(self, request: Request, status: Status, reason: str = "") -> None:
        assert not request.status.is_terminal, f"request {request.request_id} ends twice"
        request.status = status
        self.ends.append((request.request_id, status.name, reason, self.kernel.now_ns))

    def lost(self, requests: Sequence[Request], reason: str) -> None:
        if requests:
            self.losses.append(([r.request_id for r in requests], reason))

    def requeue(self, requests: list[Request]) -> None:
        self.requeued += [r.request_id for r in requests]

    def drop_split(self, split: SplitBatch) -> None:
        self.dropped.append(split)

    def drain_expired(self, replica: Replica, requests: list[Request]) -> None:
        self.expired.append([r.request_id for r in requests])

    def on_relayed(
        self, source: Replica, old: Replica, requests: list[Request], start_layer: int
    ) -> None:
        ids = [r.request_id for r in requests]
        self.relays.append((source.replica_id, old.replica_id, ids, start_layer))

    def on_reply(self, asked: ev.Asked, value: int) -> None:
        self.replies.append((asked.number, value))
        self.on_answer(asked.number, value)

    def on_capacity(self, replica: Replica) -> None:
        self.capacity.append(replica.replica_id)

    def on_draining(self, replica: Replica) -> None:
        self.draining.append(replica.replica_id)

    def cancel(self, request: Request) -> None:
        self.followed.append(request.request_id)

    def on_moved(
        self, replica: Replica, before: ReplicaState, writer: str, cause: str, at_ns: int
    ) -> None:
        self.moves.append((replica.replica_id, before.value, replica.state.value, writer, cause))
        self.board.on_moved(replica.replica_id, before, replica.state)
