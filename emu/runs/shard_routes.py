"""Which replica each request goes to, computed once for all parts of a run that is shared out.

Only for routers that look at no signals: their choice depends on the requests before, in the order
in which the front end has done with them, which is that of arrival.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import compress

from emu.cluster.build import build_intake
from emu.cluster.gateway import unservable
from emu.cluster.plan import Plan
from emu.errors import InputError
from emu.kernel.priorities import PRIORITY_WORLD
from emu.request import Request
from emu.routing.policies import make_router
from emu.routing.signal import Pool, Signal
from emu.workload.opened import Workload


class Routes:
    """The routes of all requests, by row: 13 bytes for each, 21 with a front end."""

    def __init__(self, plan: Plan, workload: Workload, parts: int) -> None:
        """Raises InputError for a request whose route depends on more than those before it."""
        self.parts = parts
        self._replicas = len(plan.replicas)
        self.part_of = array("B")
        """By row."""
        self._replica_of = array("l")
        self._ready_ns = array("q")
        self._arrival_ns = array("q")
        self._find(plan, workload)

    def replicas(self, part: int) -> range:
        """Ids of the replicas of a part."""
        count = self._replicas
        return range(part * count // self.parts, (part + 1) * count // self.parts)

    def _find(self, plan: Plan, workload: Workload) -> None:
        config, intake = plan.config, build_intake(plan)
        router = make_router(
            config.router, Pool("prefill", config.seed, _nothing_cached, _no_adapter)
        )
        signals = [Signal(one.replica_id, 0, 0, 0, -1, 0, 0) for one in plan.replicas]
        longest = max(one.max_model_tokens for one in plan.replicas)
        prompt_max = config.router.max_prompt_tokens
        home = [part for part in range(self.parts) for _ in self.replicas(part)]
        self._has_intake = intake is not None
        for request in workload.releases():
            if request.cancel_after_ns >= 0 or request.pin >= 0 or request.session_id:
                problem = "clients that leave, sessions and outside routers need one process"
                raise InputError(plan.source, None, "--jobs", problem)
            arrival_ns = request.arrival_ns
            if intake is not None:
                self._ready_ns.append(intake.ready_ns(arrival_ns, request.prompt_tokens))
            chosen = 0
            if not unservable(request, longest, prompt_max):
                chosen = router.choose(request, signals)
            self._arrival_ns.append(arrival_ns)
            self._replica_of.append(chosen)
            self.part_of.append(home[chosen])

    def of_part(self, requests: Iterator[Request], part: int) -> Iterator[Request]:
        """Those that go to the replicas of a part, each bound for one."""
        for request, its_part, replica in zip(
            requests, self.part_of, self._replica_of, strict=True
        ):
            if its_part == part:
                request.pin = replica
                yield request

    def ready_of_part(self, part: int) -> Iterator[int] | None:
        """When the engines have those requests, ns; None = there is no front end."""
        if not self._has_intake:
            return None
        return compress(self._ready_ns, (its_part == part for its_part in self.part_of))

    def ticks(self, part: int) -> Sequence[int]:
        """What the gateway's timers of a part add to the digest of instants."""
        own = compress(self._arrival_ns, (its_part == part for its_part in self.part_of))
        return _ticks(own)

    def all_ticks(self) -> Sequence[int]:
        """The same of a gateway that has all requests."""
        return _ticks(iter(self._arrival_ns))


def _ticks(arrivals_ns: Iterator[int]) -> list[int]:
    """Arrivals come in order, and all of one instant in one turn; those at 0 need no timer."""
    return [at_ns + PRIORITY_WORLD + 1 for at_ns in dict.fromkeys(arrivals_ns) if at_ns]


def _nothing_cached(replica_id: int, request: Request) -> int:
    return 0


def _no_adapter(replica_id: int, request: Request) -> bool:
    return False
