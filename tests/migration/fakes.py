"""A world for migrations without kernel and cluster: time, links and replicas moved by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from emu.migration.destinations import Choosing, Destinations
from emu.migration.outbound import Kv, Outbound
from emu.migration.watcher import Watcher, name_of
from emu.replica.events import Event
from emu.replica.inbound import reserve
from emu.replica.live_scaling import abandon
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from emu.testing import Bench, request

S = ReplicaState


class FakeKernel:
    """Calls wait in two lists until a test runs them."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.queue: list[Callable[[], None]] = []
        self.timers: list[tuple[int, Callable[[], None]]] = []
        self.woken: list[str] = []

    def wake(self, actor: Any) -> None:
        self.woken.append(actor.name)

    def soon(self, call: Callable[[], None]) -> None:
        self.queue.append(call)

    def call_at(self, at_ns: int, priority: int, call: Callable[[], None]) -> None:
        self.timers.append((at_ns, call))

    def rest(self) -> None:
        """Run what waits at this instant."""
        while self.queue:
            self.queue.pop(0)()

    def ring(self) -> None:
        """The earliest timer comes."""
        self.timers.sort(key=lambda timer: timer[0])
        self.now_ns, call = self.timers.pop(0)
        call()
        self.rest()


class Sent:
    """A transfer: its end is told by the test."""

    def __init__(self, size_bytes: int, **rest: Any) -> None:
        self.size_bytes = size_bytes
        self.on_done: Callable[[], None] = rest["on_done"]
        self.on_failed: Callable[[str], None] = rest["on_failed"]
        self.pair: tuple[int, int] = rest["pair"]
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeActor:
    """Hands events to the machine of a bench and keeps a list."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.told: list[Event] = []
        self.posted: list[Event] = []
        self.looks = 0

    def tell(self, event: Event) -> None:
        self.told.append(event)
        self.bench.tell(event)

    def post(self, event: Any) -> None:
        self.posted.append(event)
        self.bench.post(event)

    def look(self) -> None:
        self.looks += 1

    def reserve(self, requests: list[Request]) -> bool:
        return reserve(self.bench.replica, requests)

    def abandon(self) -> list[Request]:
        return abandon(self.bench.replica)


class FakeWorld:
    """What watchers and live moves need."""

    def __init__(self, *states: ReplicaState, blocks: int = 100) -> None:
        self.kernel: Any = FakeKernel()
        self.network = self
        self.sent: list[Sent] = []
        self.benches = [Bench(state, blocks=blocks) for state in states]
        self.replicas: list[Replica] = []
        for index, bench in enumerate(self.benches):
            replica = bench.replica
            replica.replica_id, replica.name = index, f"replica {index}"
            replica.actor = FakeActor(bench)
            self.replicas.append(replica)
        self.scarce_decode = False
        self.refusing = False
        self.stuck: list[int] = []
        self.watchers: dict[int, Watcher] = {}
        self.losses: list[tuple[list[Request], str]] = []
        self.ends: list[tuple[Request, Status, str]] = []
        self.capacity: list[int] = []
        self.transfers = 0
        self.moved_live = 0
        self._ids = 0

    def actor(self, index: int) -> FakeActor:
        found = self.replicas[index].actor
        assert isinstance(found, FakeActor)
        return found

    def watcher(self, source: int = 0, lease_ns: int = 0) -> Watcher:
        replica = self.replicas[source]
        search = Destinations(
            replica,
            self,  # type: ignore[arg-type]
            Choosing("first_free"),
            holder=name_of(source),
            are_alike=False,
        )
        outbound = Outbound(
            source,
            search,
            Kv(block_size=4, bytes_per_token=10),
            self.next_batch_id,
            attempts_max=1,
            lease_ns=lease_ns,
        )
        made = Watcher(replica, self, outbound, layers=2)  # type: ignore[arg-type]
        replica.outbox = self.watchers[source] = made
        return made

    @property
    def tokens_in_migration(self) -> int:
        return sum(watcher.outbound.tokens for watcher in self.watchers.values())

    def held(self, source: int, *ids: int, prompt: int = 4) -> list[Request]:
        """Prompts that are done at a source, their blocks held."""
        found = []
        for request_id in ids:
            made = request(request_id, prompt, output=9)
            made.status, made.holder_id, made.generated_tokens = Status.MIGRATING, source, 1
            self.benches[source].scheduler.detached.append(made)
            found.append(made)
        return found

    # --- the ports ----------------------------------------------------------------------------
    def send(self, source: Any, destination: Any, size_bytes: int, **rest: Any) -> Sent:
        self.sent.append(Sent(size_bytes, **rest))
        return self.sent[-1]

    @property
    def members(self) -> Sequence[Replica]:
        return self.replicas

    def receivers(self) -> Sequence[Replica]:
        return [r for r in self.replicas if r.state in (S.DECODE, S.SHUTTING_DECODE)]

    def refuses(self, source: Any, destination: Any, requests: Any) -> bool:
        return self.refusing

    def searched(self, *, is_found: bool) -> None:
        self.scarce_decode = not is_found

    def set_stuck(self, source_id: int, *, is_stuck: bool) -> None:
        self.stuck = [source_id] if is_stuck else []

    def next_batch_id(self) -> int:
        self._ids += 1
        return self._ids

    on_sent = None

    def on_transfer(self, *rest: Any) -> None:
        self.transfers += 1

    def on_live_migration(self, *rest: Any) -> None:
        self.moved_live += 1

    def on_capacity(self, replica: Replica) -> None:
        self.capacity.append(replica.replica_id)

    def lost(self, requests: Sequence[Request], reason: str) -> None:
        if requests:
            self.losses.append((list(requests), reason))

    def terminal(self, request: Request, status: Status, reason: str = "") -> None:
        request.status = status
        self.ends.append((request, status, reason))
