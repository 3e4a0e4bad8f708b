"""The gateway: releases the workload, admits, routes, and hears of every request's end.

Owns the requests that no replica holds yet: those that arrive in the future, those that no
replica can take at the moment (`held`), and clients that will try again. `Dispatch` sends the
requests of one model to a replica or into its queue. Everything that they decide with is what a
real gateway sees (see the oracle boundary in `emu/request.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from emu.cluster.dispatch import TAKES_PROMPTS, Dispatch
from emu.config.schema import RecoveryTable, RouterTable
from emu.kernel.clock import AT_DUE, PARK, Actor, Kernel
from emu.kernel.natives import partial
from emu.kernel.priorities import PRIORITY_WORLD
from emu.latency.front_end import Intake
from emu.replica.events import Submitted
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status
from emu.units import ms_to_ns
from emu.workload.session import Following

if TYPE_CHECKING:
    from emu.features.base import Door
    from emu.policy.own import OwnAdmission

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


class Requests(Source, Protocol):
    """Where the requests of a world come from."""

    @property
    def has_prefixes(self) -> bool:
        """Whether any of them may share a prefix with another: caches are kept."""
        ...


def unservable(request: Request, longest: int, prompt_max: int) -> str:
    """Why a request is refused whatever the cluster does; empty if it is not. (422.)

    `longest`: tokens that the model reads; `prompt_max`: longest prompt, 0 = as the model's.
    """
    size = request.prompt_tokens + request.output_tokens
    if request.reason and (size <= longest or request.model < 0):
        return request.reason  # the workload knows that no pool could ever hold it
    if request.prompt_tokens > (prompt_max or longest):
        return "prompt_too_long"
    if request.prompt_tokens + request.max_output_tokens > longest:
        return "total_too_long"
    return ""


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
        is_paced: bool = False,
    ) -> None:
        """`clients`: of a closed loop, each with one request or session; 0 = requests arrive at
        their times. `is_paced`: a client sends its line no earlier than the workload says."""
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
        self._is_paced = is_paced
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
        self._at_rest: Callable[[int], None] | None = None

    def take_over(self, intake: Intake | None, at_rest: Callable[[int], None]) -> None:
        """This gateway has a part of the requests of a run that is shared out.

        `intake` knows when each of them is with an engine. `at_rest` is told, instead of an end of
        the run, that all have ended, and when the last token so far is with its client (ns).
        """
        if intake is not None:
            self._intake = intake
        self._at_rest = at_rest

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
        if self._is_paced and request is not None:
            at_ns = max(at_ns, request.arrival_ns)
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
        reason = unservable(request, dispatch.max_model_tokens, self._max_prompt_tokens)
        if reason:
            return reason
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
        pause_ms = self._recovery.client_backoff_ms * 2**request.retries
        at_ns = self.kernel.now_ns + ms_to_ns(pause_ms)
        deadline_ns = request.deadline_ns
        again = Request(
            request_id=request.request_id,
            arrival_ns=at_ns,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            max_output_tokens=request.max_output_tokens,
            prefix=request.prefix,
            tenant=request.tenant,
            priority=request.priority,
            session_id=request.session_id,
            sub_request_index=request.sub_request_index,
            deadline_ns=deadline_ns + at_ns - request.arrival_ns if deadline_ns >= 0 else -1,
            cancel_after_ns=request.cancel_after_ns,
        )
        again.has_more_turns = request.has_more_turns
        again.model = request.model
        again.ask_as(request)
        again.retries = request.retries + 1
        self._arrive_at(again, at_ns)

    def _arrive_at(self, request: Request, at_ns: int) -> None:
        self.pending_clients += 1

        def arrive() -> None:
            self.pending_clients -= 1
            self.arrive(request)

        self.kernel.call_at(at_ns, PRIORITY_WORLD, arrive)

    def _check_end(self) -> None:
        if self.is_exhausted and self.outstanding == 0 and self.pending_clients == 0:
            if self._at_rest is not None:
                self._at_rest(self._delivered_ns)
                return
            if self._delivered_ns > self.kernel.now_ns:  # a token is on its way to its client
                self.kernel.call_at(self._delivered_ns, PRIORITY_WORLD, self._check_end)
                return
            self.kernel.stop()
