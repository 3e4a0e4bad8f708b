"""Queues of waiting requests, one for each `scheduler.order`, and of those not seen yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from mypy_extensions import mypyc_attr

from emu.kernel.natives import bisect_left, insort
from emu.request import Request

_NO_DEADLINE: Final = 1 << 62


@mypyc_attr(allow_interpreted_subclasses=True)
class WaitingQueue(ABC):
    """What a scheduler asks of its waiting queue."""

    def __init__(self, *, counts_service: bool = False) -> None:
        self.prompt_tokens = 0
        self.count = 0
        """As `len`, without a call."""
        self.counts_service = counts_service
        """Its order depends on what tenants are charged."""

    def __len__(self) -> int:
        return self.count

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    @abstractmethod
    def __contains__(self, request: Request) -> bool: ...

    @abstractmethod
    def append(self, request: Request) -> None:
        """A new request."""

    @abstractmethod
    def push_front(self, request: Request) -> None:
        """A preempted request comes back."""

    @abstractmethod
    def head(self) -> Request:
        """Head of the queue; it must not be empty."""

    @abstractmethod
    def remove(self, request: Request) -> bool:
        """The request leaves (admitted, cancelled). False if it is not here."""

    def charge(self, tenant: str, tokens: int) -> None:  # noqa: B027
        """The tenant was served so many tokens, of which most orders take no account."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ArrivalQueue(WaitingQueue):
    """First come, first served."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._requests

    def append(self, request: Request) -> None:
        requests = self._requests
        self.prompt_tokens += request.prompt_tokens
        self.count += 1
        if requests:
            last = requests[next(reversed(requests))]
            if arrival_order(last) > arrival_order(request):
                self._insert(request)
                return
        requests[request.request_id] = request

    def _insert(self, request: Request) -> None:
        """Behind the last one that did not arrive later. Rare: retries and late hand-overs."""
        items = list(self._requests.values())
        at = len(items)
        while at > 0 and arrival_order(items[at - 1]) > arrival_order(request):
            at -= 1
        items.insert(at, request)
        self._requests = OrderedDict((item.request_id, item) for item in items)

    def push_front(self, request: Request) -> None:
        self.prompt_tokens += request.prompt_tokens
        self.count += 1
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def head(self) -> Request:
        return self._requests[next(iter(self._requests))]

    def remove(self, request: Request) -> bool:
        if self._requests.pop(request.request_id, None) is None:
            return False
        self.prompt_tokens -= request.prompt_tokens
        self.count -= 1
        return True


class SortedQueue(WaitingQueue):
    """Requests in order of a fixed key: priority or deadline."""

    def __init__(self, *, by_deadline: bool) -> None:
        super().__init__()
        self._by_deadline = by_deadline
        self._entries: list[tuple[int, int, int]] = []
        self._requests: dict[int, Request] = {}

    def _key(self, request: Request) -> tuple[int, int, int]:
        if self._by_deadline:
            urgency = request.deadline_ns if request.deadline_ns >= 0 else _NO_DEADLINE
        else:
            urgency = request.priority
        return urgency, request.arrival_ns, request.request_id

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[entry[2]] for entry in self._entries)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._requests

    def append(self, request: Request) -> None:
        self.prompt_tokens += request.prompt_tokens
        self.count += 1
        self._requests[request.request_id] = request
        insort(self._entries, self._key(request))

    def push_front(self, request: Request) -> None:
        self.append(request)

    def head(self) -> Request:
        return self._requests[self._entries[0][2]]

    def remove(self, request: Request) -> bool:
        if self._requests.pop(request.request_id, None) is None:
            return False
        del self._entries[bisect_left(self._entries, self._key(request))]
        self.prompt_tokens -= request.prompt_tokens
        self.count -= 1
        return True


class FairQueue(WaitingQueue):
    """The least served tenant goes first."""

    def __init__(self) -> None:
        super().__init__(counts_service=True)
        self._tenants: dict[str, ArrivalQueue] = {}
        """Tenants with waiting requests only."""
        self._served: dict[str, int] = {}

    def __iter__(self) -> Iterator[Request]:
        for tenant in sorted(self._tenants, key=self._rank):
            yield from self._tenants[tenant]

    def __contains__(self, request: Request) -> bool:
        queue = self._tenants.get(request.tenant)
        return queue is not None and request in queue

    def _rank(self, tenant: str) -> tuple[int, int, int]:
        arrival_ns, request_id = arrival_order(self._tenants[tenant].head())
        return self._served[tenant], arrival_ns, request_id

    def _queue_of(self, tenant: str) -> ArrivalQueue:
        queue = self._tenants.get(tenant)
        if queue is None:
            floor = min((self._served[other] for other in self._tenants), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
            queue = self._tenants[tenant] = ArrivalQueue()
        return queue

    def append(self, request: Request) -> None:
        self._queue_of(request.tenant).append(request)
        self.count += 1
        self.prompt_tokens += request.prompt_tokens

    def push_front(self, request: Request) -> None:
        self._queue_of(request.tenant).push_front(request)
        self.count += 1
        self.prompt_tokens += request.prompt_tokens

    def head(self) -> Request:
        return self._tenants[min(self._tenants, key=self._rank)].head()

    def remove(self, request: Request) -> bool:
        queue = self._tenants.get(request.tenant)
        if queue is None or not queue.remove(request):
            return False
        if not queue:
            del self._tenants[request.tenant]
        self.count -= 1
        self.prompt_tokens -= request.prompt_tokens
        return True

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] = self._served.get(tenant, 0) + tokens


def arrival_order(request: Request) -> tuple[int, int]:
    """What first come, first served sorts by: ids settle what arrived at one instant."""
    return request.arrival_ns, request.request_id


def make_queue(order: str) -> WaitingQueue:
    """The queue of a `scheduler.order`."""
    if order == "arrival":
        return ArrivalQueue()
    if order == "fair":
        return FairQueue()
    assert order in ("priority", "deadline")
    return SortedQueue(by_deadline=order == "deadline")


class Unseen:
    """Requests that are here, and that the engine has not looked at: it looks once a batch.

    In order of arrival here, which is not the order of the queue (retries, late hand-overs).
    """

    def __init__(self) -> None:
        self.count = 0
        self.prompt_tokens = 0
        self._requests: dict[int, tuple[int, Request]] = {}
        """(arrival here, request) by id."""

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._requests.values())

    def first_ns(self) -> int:
        """When the first of them came; there must be one."""
        arrived_ns, _ = next(iter(self._requests.values()))
        return arrived_ns

    def first_order(self) -> tuple[int, int]:
        """The least arrival order among them; there must be one."""
        return min(map(arrival_order, self))

    def add(self, request: Request, now_ns: int) -> None:
        """The request has come."""
        self._requests[request.request_id] = (now_ns, request)
        self.count += 1
        self.prompt_tokens += request.prompt_tokens

    def take(self, until_ns: int) -> list[Request]:
        """Requests that were here at that time; they are seen now."""
        seen = []
        for arrived_ns, request in self._requests.values():
            if arrived_ns > until_ns:
                break
            seen.append(request)
        if seen:
            self._forget(seen)
        return seen

    def remove(self, request: Request) -> bool:
        """The request leaves unseen. False if it is not here."""
        if request.request_id not in self._requests:
            return False
        self._forget([request])
        return True

    def _forget(self, requests: list[Request]) -> None:
        self.count -= len(requests)
        if not self.count:
            self._requests.clear()
            self.prompt_tokens = 0
            return
        for request in requests:
            del self._requests[request.request_id]
            self.prompt_tokens -= request.prompt_tokens
        # A dict keeps the places of what was deleted, and walks over them: a new one has none.
        self._requests = dict(self._requests)
