"""Where the requests of one model go: to the replica that its router chooses, or into its queue.

Owns what the choice is made from: the replicas that take prompts now, their loads (fresh, or as old
as `router.signal_delay_ms`), and which of them are woken when the queue has something new. Does not
own admission, nor the requests that no replica can take at the moment (the gateway does).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from emu.kernel.clock import Actor, Kernel
from emu.replica.events import Submitted
from emu.replica.states import ReplicaState
from emu.replica.view import ReplicaHandle, View
from emu.request import Request, Status
from emu.routing.order import LoadOrder
from emu.routing.signal import Router, Signal, reads_of
from emu.scheduling.fcfs import PrefillQueue

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
