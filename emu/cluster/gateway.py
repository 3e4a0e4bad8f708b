"""The gateway: releases the workload, admits, routes, and hears of every request's end.

Owns the requests that no replica holds yet: those that arrive in the future, those that no
replica can take at the moment (`held`), and clients that will try again. `Dispatch` sends the
requests of one model to a replica or into its queue. Everything that they decide with is what a
real gateway sees (see the oracle boundary in `emu/request.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Final, Protocol

from emu.config.schema import RecoveryTable, RouterTable
from emu.kernel.clock import AT_DUE, PARK, PRIORITY_WORLD, Actor, Kernel
from emu.kernel.natives import partial
from emu.latency.front_end import Intake
from emu.policy import OwnAdmission
from emu.replica.events import Submitted
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle, View
from emu.request import Request, Status
from emu.routing.policies import LoadOrder, Router, Signal, reads_of
from emu.scheduling.fcfs import PrefillQueue
from emu.units import ms_to_ns
from emu.workload.session import Following

if TYPE_CHECKING:
    from emu.features.base import Door


# --------------------------------------------------------------------------------------------------
# Where the requests of one model go: to the replica that its router chooses, or into its queue.
#
# Owns what the choice is made from: the replicas that take prompts now, their loads (fresh, or as
# old as `router.signal_delay_ms`), and which of them are woken when the queue has something new.
# Does not own admission, nor the requests that no replica can take at the moment (`gateway.py`).


S = ReplicaState
TAKES_PROMPTS: Final = frozenset({S.COLOCATED, S.PREFILL})
"""States in which a replica may be given new requests by the router."""


class Dispatch:
    """Routing among the replicas of one model."""

    def __init__(
        self,
        kernel: Kernel,
        router: Router,
        replicas: Sequence[ReplicaHandle],
        actors: Sequence[Actor],
        *,
        queue: PrefillQueue | None,
        delay_ns: int,
        max_model_tokens: int,
        outstanding_max: int = 0,
    ) -> None:
        """`actors` by replica id. `delay_ns`: age of the loads that the router sees."""
        self._reads_blocks = "blocks_used" in reads_of(router)
        self.kernel = kernel
        self.router = router
        self.replicas = replicas
        self.queue = queue
        """The FIFO that prefill replicas pull from, if the policy is fcfs."""
        self.max_model_tokens = max_model_tokens
        self.outstanding = 0
        """Requests of this model in the system; counted where there are several models."""
        self.outstanding_max = outstanding_max
        """More of them are refused; 0 = unlimited."""
        self._actors = actors
        self._delay_ns = delay_ns
        self._pullers: list[Actor] | None = None
        """Actors of replicas that take from the queue; None = to be found again."""
        self._new: list[Actor] = []
        """Those of replicas that take from it while their weights arrive."""
        self._offered: Request | None = None
        """The head of the queue when they were last woken."""
        self._candidates: list[ReplicaHandle] | None = None
        """Replicas that take prompts; None = to be found again."""
        self._linear_load: tuple[int, int] | None = (
            None if delay_ns else getattr(router, "linear_load", None)
        )
        self._order: LoadOrder | None = None
        """Loads of the candidates, as of when each was last looked at; None = to be made anew."""
        self._places: dict[int, tuple[int, View]] = {}
        """Where each candidate stands in that order, and its figures, by its id."""
        self._touched: list[ReplicaHandle] = []
        """Replicas whose queues may have changed since they were last looked at."""
        if self._linear_load is not None and queue is None and len(replicas) > 1:
            for replica in replicas:
                replica.tell_touches(self._touched)
        self._signals = {
            r.replica_id: Signal(r.replica_id, 0, 0, 0, -1, 0, r.view().max_num_seqs)
            for r in replicas
        }
        if delay_ns:
            for replica in replicas:
                replica.keep_signals(delay_ns, with_blocks=self._reads_blocks)

    def route(self, request: Request) -> bool:
        """Give the request to a replica or put it into the queue; False if no replica takes it."""
        if self.queue is not None:
            request.status = Status.QUEUED
            request.holder_id = -1
            self.queue.append(request)
            self._call_pullers(self.queue, request)
            return True
        candidates = self._candidates
        if candidates is None:
            candidates = self._candidates = [r for r in self.replicas if r.state in TAKES_PROMPTS]
        if not candidates:
            return False
        if len(candidates) == 1:
            candidates[0].actor.tell(Submitted(request))
        elif self._linear_load is not None:
            waiting, running = self._linear_load
            self._least_loaded(candidates, waiting, running).actor.tell(Submitted(request))
        else:
            signals = [self._signal(r) for r in candidates]
            candidates[self.router.choose(request, signals)].actor.tell(Submitted(request))
        return True

    def replica_moved(self) -> None:
        """A replica's state has changed: others may take prompts now."""
        self._candidates = self._order = self._pullers = None

    def _call_pullers(self, queue: PrefillQueue, request: Request) -> None:
        """Wake those that may take something from the queue, now that this request is in it."""
        if self._pullers is None:
            self._pullers = [
                self._actors[r.replica_id] for r in self.replicas if r.state is S.PREFILL
            ]
            self._new = [
                self._actors[r.replica_id] for r in self.replicas if r.state is S.NEW_PREFILL
            ]
        for actor in self._new:  # what they may take grows with time
            self.kernel.wake(actor)
        head = queue.head()
        if head is self._offered and head is not request:
            return  # replicas that could not take it still cannot, and no request overtakes
        self._offered = head
        # The first that can takes it, and then there is often nothing left for others.
        self.kernel.wake_in_turn(takewhile(lambda _: queue.count > 0, self._pullers))

    def _least_loaded(
        self, candidates: list[ReplicaHandle], waiting: int, running: int
    ) -> ReplicaHandle:
        """What a router with `linear_load` would choose from fresh signals."""
        order = self._order
        if order is None:
            views = [replica.view() for replica in candidates]
            order = self._order = LoadOrder([v.promised_load(waiting, running) for v in views])
            self._places = {
                replica.replica_id: (place, view)
                for place, (replica, view) in enumerate(zip(candidates, views, strict=True))
            }
        places = self._places
        for replica in self._touched:
            replica.seen()
            found = places.get(replica.replica_id)
            if found is not None:
                place, view = found
                order.update(place, view.promised_load(waiting, running))
        self._touched.clear()
        return candidates[order.first()]

    def _signal(self, replica: ReplicaHandle) -> Signal:
        signal = self._signals[replica.replica_id]
        view = replica.view()
        if self._delay_ns:
            late = view.late(self.kernel.now_ns - self._delay_ns)
            assert late is not None
            _, signal.waiting, signal.running, signal.waiting_tokens, blocks_used = late
            if self._reads_blocks:
                signal.blocks_used = blocks_used
        else:
            signal.waiting = view.waiting_count
            signal.running = view.running_count
            signal.waiting_tokens = view.waiting_tokens
            if self._reads_blocks:
                signal.blocks_used = view.blocks_used
        signal.blocks_total = view.blocks_total
        return signal

    def recount(self) -> list[str]:
        """Loads that changed without a message; must be empty."""
        order, candidates = self._order, self._candidates
        if order is None or candidates is None or self._linear_load is None:
            return []
        waiting, running = self._linear_load
        wrong = []
        for replica, kept in zip(candidates, order.loads, strict=True):
            load = replica.view().promised_load(waiting, running)
            if load != kept and not replica.is_touched:
                wrong.append(f"{replica.name}: the router believes a load of {kept}, it is {load}")
        return wrong


# --------------------------------------------------------------------------------------------------
# The gateway


# A member of an enumeration is looked up by its class in Python, at each arrival and end.
_COMPLETED: Final = Status.COMPLETED
_REJECTED: Final = Status.REJECTED
_SESSION_ENDED: Final = "session_ended"
"""Reason of a turn that is never asked: one before it did not complete."""


class Source(Protocol):
    """The workload, as the gateway sees it."""

    def releases(self) -> Iterator[Request]:
        """Requests in order of arrival; of a session only those that wait for no other."""
        ...

    def end_turn(self, request: Request, now_ns: int, *, completed: bool) -> Following:
        """What the session of a request that has ended does next."""
        ...


class Gateway(Actor):
    """Admission and routing."""

    def __init__(
        self,
        kernel: Kernel,
        source: Source,
        dispatches: Sequence[Dispatch],
        replicas: Sequence[ReplicaHandle],
        table: RouterTable,
        recovery: RecoveryTable,
        *,
        on_release: Callable[[Request], None],
        on_terminal: Callable[[Request], None],
        cancel: Callable[[Request], None],
        on_routed: Callable[[Request], None] | None = None,
        intake: Intake | None = None,
        doors: Sequence[Door] = (),
        admission: OwnAdmission | None = None,
        clients: int = 0,
    ) -> None:
        """`clients`: of a closed loop, each with one request or session; 0 = requests arrive at
        their times."""
        super().__init__(kernel, "gateway", PRIORITY_WORLD)
        self.source = source
        self.dispatches = dispatches
        """By model."""
        self.replicas = replicas
        self.queues = [d.queue for d in dispatches if d.queue is not None]
        """The FIFOs that prefill replicas pull from, if the policy is fcfs: one for each model."""
        self._has_many = len(dispatches) > 1
        self.held: deque[Request] = deque()
        self.taking: deque[Request] = deque()
        """Requests in the front end, in order of arrival."""
        self.at_doors: dict[int, Request] = {}
        """Requests that have not passed what features put before admission."""
        self._intake = intake
        self.doors = doors
        self._admission = admission
        self._clients = clients
        self._delivered_ns = 0
        """When the last token so far is with its client."""
        self.outstanding = 0
        self.released = 0
        self.pending_clients = 0
        """Sessions between two turns, and clients that wait before they try again."""
        self.is_exhausted = False
        self.echoes: list[Callable[[Request], None]] = []
        """Told of each arrival (an overload that adds to it)."""
        self._releases: Iterator[Request] | None = None
        self._next: Request | None = None
        """The request that arrives next."""
        self._table = table
        self._recovery = recovery
        self._max_prompt_tokens = table.max_prompt_tokens
        self._on_release = on_release
        self._on_terminal = on_terminal
        self._cancel = cancel
        self._on_routed = on_routed

    def tick(self) -> int:
        """Let in all requests that arrive by now, and come back for the next."""
        if self._releases is None:
            self._releases = iter(self.source.releases())
        if self._clients:
            for _ in range(self._clients):
                self._begin_line(self.kernel.now_ns)
            return PARK
        now_ns = self.kernel.now_ns
        request = self._next
        if request is not None:
            self.arrive(request)
        for request in self._releases:
            if request.arrival_ns > now_ns:
                self._next = request
                return request.arrival_ns
            self.arrive(request)
        self._next = None
        self.is_exhausted = True
        self._check_end()
        return PARK

    def _begin_line(self, at_ns: int) -> None:
        """A client of the closed loop takes the next line of the workload, if there is one."""
        assert self._releases is not None
        request = self._next or next(self._releases, None)
        self._next = None
        while request is not None:
            if request.deadline_ns >= 0:
                request.deadline_ns += at_ns - request.arrival_ns
            request.arrival_ns = at_ns
            self._arrive_at(request, at_ns)
            request = next(self._releases, None)
            if request is not None and request.sub_request_index <= 0:
                self._next = request  # of the next line; the others arrive with their session
                return
        self.is_exhausted = True
        self._check_end()

    def align(self, now_ns: int) -> int:
        """No message makes a request arrive earlier."""
        return AT_DUE

    def expect_client(self) -> None:
        """A client may send more: the run goes on without requests."""
        self.pending_clients += 1

    def client_left(self) -> None:
        """It will send no more; the run ends if nothing else is left."""
        self.pending_clients -= 1
        if self.is_exhausted:
            self._check_end()

    def cancel_held(self, request: Request) -> bool:
        """Remove a request that no replica can take at the moment; False if it is not held."""
        if request not in self.held:
            return False
        self.held.remove(request)
        return True

    def echo(self, echo: Callable[[Request], None]) -> Callable[[], None]:
        """Tell `echo` of every arrival from now on; what is returned ends that."""
        self.echoes.append(echo)
        return lambda: self.echoes.remove(echo)

    # --- arriving -----------------------------------------------------------------------------
    def arrive(self, request: Request) -> None:
        """A request reaches the gateway now."""
        self.released += 1
        self.outstanding += 1
        if self._has_many and request.model >= 0:
            self.dispatches[request.model].outstanding += 1
        self._on_release(request)
        if self.echoes:
            now_ns = self.kernel.now_ns
            for echo in self.echoes:
                self.kernel.call_at(now_ns, PRIORITY_WORLD, partial(echo, request))
        if request.cancel_after_ns >= 0:
            self.kernel.call_at(
                request.arrival_ns + request.cancel_after_ns,
                PRIORITY_WORLD,
                partial(self._leave, request),
            )
        if self._intake is None:
            self._pass(request)
            return
        now_ns = self.kernel.now_ns
        ready_ns = self._intake.ready_ns(now_ns, request.prompt_tokens, request.pin)
        self.taking.append(request)
        self.kernel.call_at(ready_ns, PRIORITY_WORLD, partial(self._take, request))

    def _leave(self, request: Request) -> None:
        """The client does not wait any longer."""
        if not request.status.is_terminal:
            self._cancel(request)

    def _take(self, request: Request) -> None:
        """The front end has done with a request."""
        self.taking.remove(request)  # the oldest, but where routers outside choose
        if request.status < _COMPLETED:  # else its client has left
            self._pass(request)

    def _pass(self, request: Request) -> None:
        """What features put before admission, then admission."""
        shut = self.doors and [door for door in self.doors if not door.passes(request)]
        if not shut:
            self._admit(request)
            return
        ready_ns = max(door.ready_ns(self.kernel.now_ns, request) for door in shut)
        self.at_doors[request.request_id] = request
        self.kernel.call_at(ready_ns, PRIORITY_WORLD, partial(self._passed, request))

    def _passed(self, request: Request) -> None:
        del self.at_doors[request.request_id]
        if not request.status.is_terminal:
            self._admit(request)

    def _admit(self, request: Request) -> None:
        reason = self._refusal(request)
        if reason:
            self.terminal(request, Status.REJECTED, reason)
            return
        self.route(request)

    def _refusal(self, request: Request) -> str:
        """Why the request is not admitted; empty if it is. (422: too long; 429: overloaded.)"""
        dispatch = self.dispatches[request.model]
        longest = dispatch.max_model_tokens
        size = request.prompt_tokens + request.output_tokens
        if request.reason and (size <= longest or request.model < 0):
            return request.reason  # the workload knows that no pool could ever hold it
        if request.prompt_tokens > (self._max_prompt_tokens or longest):
            return "prompt_too_long"
        if request.prompt_tokens + request.max_output_tokens > longest:
            return "total_too_long"
        if dispatch.outstanding_max and dispatch.outstanding > dispatch.outstanding_max:
            return "overloaded"
        limit = self._table.max_outstanding
        if limit and self.outstanding > limit:
            return "overloaded"
        return "" if self._admission is None else self._admission.refusal(request)

    def route(self, request: Request) -> None:
        """Give the request to a replica (or the global queue), or hold it until one can take it."""
        request.queued_ns = self.kernel.now_ns
        if request.pin >= 0:
            self._route_pinned(request)
        elif not self.dispatches[request.model].route(request):
            request.status = Status.QUEUED
            request.holder_id = -1
            self.held.append(request)
        if self._on_routed is not None:
            self._on_routed(request)

    def _route_pinned(self, request: Request) -> None:
        """An outside router has chosen; what its choice cannot serve is refused to it."""
        replica = self.replicas[request.pin] if request.pin < len(self.replicas) else None
        if replica is None or replica.state not in TAKES_PROMPTS or replica.model != request.model:
            request.holder_id = -1
            self.terminal(request, Status.FAILED, "endpoint_not_serving")
            return
        replica.actor.tell(Submitted(request))

    def recount(self) -> list[str]:
        """Loads that changed without a message; must be empty."""
        return [line for dispatch in self.dispatches for line in dispatch.recount()]

    def replica_moved(self, model: int) -> None:
        """The state of a replica of the model has changed: others may take prompts now."""
        self.dispatches[model].replica_moved()
        if self.held:
            self.route_held()

    def take_held(self, served: Container[int]) -> list[Request]:
        """Requests that no replica will ever take, of models that are not `served`: the caller
        ends them."""
        held = [request for request in self.held if request.model not in served]
        self.held = deque(request for request in self.held if request.model in served)
        return held

    def route_held(self) -> None:
        """A replica may take prompts again."""
        for _ in range(len(self.held)):
            self.route(self.held.popleft())

    # --- ending -------------------------------------------------------------------------------
    def terminal(self, request: Request, status: Status, reason: str) -> None:
        """The one terminal event of a request, wherever it was."""
        assert request.status < _COMPLETED, f"request {request.request_id} ends twice"
        request.status = status
        request.reason = reason
        self.outstanding -= 1
        if self._has_many and request.model >= 0:
            self.dispatches[request.model].outstanding -= 1
        if request.last_out_ns:
            delivered_ns = self.kernel.now_ns + request.last_out_ns
            self._delivered_ns = max(self._delivered_ns, delivered_ns)
        self._on_terminal(request)
        if status is _REJECTED and request.retries < self._recovery.client_retries:
            self._retry_later(request)
        elif request.session_id and self._goes_on(request, self.kernel.now_ns):
            pass  # its client has not ended
        elif self._clients and reason != _SESSION_ENDED:
            self._begin_line(self.kernel.now_ns + request.last_out_ns)
        if self.is_exhausted:
            self._check_end()

    def _goes_on(self, request: Request, now_ns: int) -> bool:
        """Turns arrive after their tools; if one did not complete, none is asked after it."""
        is_done = request.status is _COMPLETED
        at_ns = now_ns + request.last_out_ns if is_done else now_ns
        following = self.source.end_turn(request, at_ns, completed=is_done)
        for turn in following.arriving:
            self._arrive_at(turn, turn.arrival_ns)
        for turn in following.dropped:
            self.released += 1
            self.outstanding += 1
            if self._has_many and turn.model >= 0:
                self.dispatches[turn.model].outstanding += 1
            self._on_release(turn)
            self.terminal(turn, Status.CANCELLED, _SESSION_ENDED)
        return following.goes_on

    def _retry_later(self, request: Request) -> None:
        """The client sends the same again after a pause that doubles (a new request to us)."""
        again = Request(
            request_id=request.request_id,
            arrival_ns=0,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            max_output_tokens=request.max_output_tokens,
            prefix=request.prefix,
            tenant=request.tenant,
            priority=request.priority,
            session_id=request.session_id,
            sub_request_index=request.sub_request_index,
        )
        again.has_more_turns = request.has_more_turns
        again.model = request.model
        again.ask_as(request)
        again.retries = request.retries + 1
        pause_ms = self._recovery.client_backoff_ms * 2**request.retries
        again.arrival_ns = self.kernel.now_ns + ms_to_ns(pause_ms)
        self._arrive_at(again, again.arrival_ns)

    def _arrive_at(self, request: Request, at_ns: int) -> None:
        self.pending_clients += 1

        def arrive() -> None:
            self.pending_clients -= 1
            self.arrive(request)

        self.kernel.call_at(at_ns, PRIORITY_WORLD, arrive)

    def _check_end(self) -> None:
        if self.is_exhausted and self.outstanding == 0 and self.pending_clients == 0:
            if self._delivered_ns > self.kernel.now_ns:  # a token is on its way to its client
                self.kernel.call_at(self._delivered_ns, PRIORITY_WORLD, self._check_end)
                return
            self.kernel.stop()
