"""A world for faults without a cluster: replicas are machines, the network is real, time is set by hand."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from emu.autoscale.sight import Sight
from emu.autoscale.snapshot import Snapshot
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.config.schema import FaultTable
from emu.faults.handlers import HANDLERS
from emu.faults.injector import Injector
from emu.faults.recovery import Recovery
from emu.network.carrier import Carrier
from emu.network.grids import Grid
from emu.replica import actions as act
from emu.replica.events import Asked, Event
from emu.replica.relay_board import RelayBoard
from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.request import Request, Status
from emu.testing import Bench
from tests.migration.fakes import FakeActor, FakeWorld

S = ReplicaState


class ActingActor(FakeActor):
    """Hands events to the machine and applies what follows, as the real one does."""

    def __init__(self, bench: Bench, world: World) -> None:
        super().__init__(bench)
        self.world = world

    def tell(self, event: Event) -> None:
        self.told.append(event)
        replica = self.bench.replica
        for action in self.bench.tell(event):
            if isinstance(action, act.Move):
                before = replica.state
                self.bench.move(action)
                self.world.moved.append((replica.replica_id, before, replica.state))
                self.world.injector.on_moved(replica, before)
            elif isinstance(action, act.CloseLock):
                replica.lock.try_acquire(replica.name)
            elif isinstance(action, act.Reply):
                self.world.on_reply(action.asked, action.value)

    def boundary(self) -> list[str]:
        """The replica reaches a boundary: what is posted is applied."""
        found = []
        for action in self.bench.step():
            found.append(type(action).__name__)
            if isinstance(action, act.Reply):
                self.world.on_reply(action.asked, action.value)
        return found


class FakeGateway:
    """Where requests arrive, and go when their KV is lost."""

    def __init__(self) -> None:
        self.held: list[Request] = []
        self.taking: list[Request] = []
        self.at_doors: dict[int, Request] = {}
        self.routed: list[Request] = []
        self.arrived: list[Request] = []
        self.echoes: list[Callable[[Request], None]] = []

    def echo(self, echo: Callable[[Request], None]) -> Callable[[], None]:
        self.echoes.append(echo)
        return lambda: self.echoes.remove(echo)

    def arrive(self, request: Request) -> None:
        self.arrived.append(request)
        for echo in list(self.echoes):
            echo(request)

    def route(self, request: Request) -> None:
        request.status = Status.QUEUED
        self.routed.append(request)

    def take_held(self, served: Container[int]) -> list[Request]:
        held = [request for request in self.held if request.model not in served]
        self.held = [request for request in self.held if request.model in served]
        return held


class FakeQueue:
    """A global queue of prompts."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self.requests))

    def cancel(self, request: Request) -> bool:
        self.requests.remove(request)
        return True


class Chronicle:
    """What faults write down."""

    def __init__(self) -> None:
        self.struck: list[tuple[int, str, str, str, int]] = []
        self.over: list[tuple[int, str, str]] = []
        self.losses: list[tuple[Request, str]] = []

    def fault(self, *entry: Any) -> None:
        self.struck.append(entry)

    def fault_over(self, *entry: Any) -> None:
        self.over.append(entry)

    def lost(self, request: Request, reason: str, at_ns: int) -> None:
        self.losses.append((request, reason))


class FakeTiers:
    """KV tiers: which replicas use which."""

    kinds: Sequence[str] = ("cpu", "cxl")

    def __init__(self) -> None:
        self.lost: list[tuple[str, int]] = []
        self.users: list[int] = []

    def lose(self, kind: str, machine: int) -> Sequence[int]:
        self.lost.append((kind, machine))
        return self.users


class FakeScaler:
    """A planner's surroundings."""

    def __init__(self, world: World) -> None:
        self.is_active = False
        self.sight = Sight(0)
        self.caches_lost: list[int] = []
        self.restored: list[tuple[int, str, bool]] = []
        self.restarts: list[int] = []
        self.looks = 0
        self.stale: list[Callable[[int], bool]] = []
        self.sources: list[int] = []
        self._world = world
        self.waiting = 0

    def snapshot(self) -> Snapshot:
        return Snapshot(
            now_ns=self._world.kernel.now_ns,
            replicas=(),
            block_tokens=16,
            waiting_requests=self.waiting,
        )

    def lose_cache(self, machine: int) -> None:
        self.caches_lost.append(machine)

    def distrust(self, is_gone: Callable[[int], bool]) -> Callable[[], None]:
        self.stale.append(is_gone)
        return lambda: self.stale.remove(is_gone)

    def restore(self, replica: Replica, role: str, *, from_disk: bool) -> None:
        self.restored.append((replica.replica_id, role, from_disk))

    def restart(self, until_ns: int) -> None:
        self.restarts.append(until_ns)

    @property
    def under_way(self) -> SimpleNamespace:
        return SimpleNamespace(sources=lambda: self.sources)

    def look(self) -> None:
        self.looks += 1


class World(FakeWorld):
    """The cluster, as faults see it: a replica on each GPU, two GPUs on each machine."""

    def __init__(self, *states: ReplicaState, blocks: int = 100, **recovery: Any) -> None:
        super().__init__(*states, blocks=blocks)
        machines = (len(states) + 1) // 2
        self.config = config_from_dict(
            {
                "nodes": [{"gpu": "H100-SXM5-80GB", "gpus": 2, "count": machines}],
                "replicas": [{"count": len(states)}],
                "recovery": {"restart_s": 1.0, **recovery},
            }
        )
        self.topology = make_plan(self.config, "test").topology
        self.carrier = Carrier(self.kernel, self.topology)
        self.network = self.carrier  # type: ignore[assignment]
        self.carrier.send = self.send  # type: ignore[method-assign,assignment]
        self.live = None
        self.queue: FakeQueue | None = None
        self.gateway = FakeGateway()
        self.recorder = Chronicle()
        self.tiers = FakeTiers()
        self.scaler: Any = FakeScaler(self)
        self.relay = RelayBoard(lambda one: self.replicas[one].actor.look(), self.next_batch_id)
        self.notes: list[tuple[str, str, str]] = []
        self.moved: list[tuple[int, ReplicaState, ReplicaState]] = []
        self.cancelled: list[Request] = []
        self.spares: list[int] = []
        for index, replica in enumerate(self.replicas):
            replica.grid, replica.machine = Grid((index,), 1), index // 2
            replica.actor = ActingActor(self.benches[index], self)
            self.benches[index].use(self.kernel)
            replica.relaying.board, replica.relaying.peers = self.relay, self.replicas
        self.kernel.priority_reached = -1
        self.recovery = Recovery(self)  # type: ignore[arg-type]
        self.injector = Injector(self, self.recovery, lambda: HANDLERS)  # type: ignore[arg-type]

    @property
    def scalers(self) -> list[Any]:
        return [self.scaler]

    def scaler_of(self, replica: Any) -> Any:
        return self.scaler

    def relay_of(self, replica: Any) -> RelayBoard:
        return self.relay

    @property
    def queues(self) -> list[FakeQueue]:
        return [] if self.queue is None else [self.queue]

    def actor(self, index: int) -> ActingActor:
        found = self.replicas[index].actor
        assert isinstance(found, ActingActor)
        return found

    def strike(self, kind: str, **keys: Any) -> FaultTable:
        """A fault strikes now."""
        from emu.config.faultkinds import read_fault

        fault = read_fault({"kind": kind, **keys})
        self.injector.inject(fault)
        due = [t for t in self.kernel.timers if t[0] <= self.kernel.now_ns]
        for timer in due:
            self.kernel.timers.remove(timer)
            timer[1]()
        return fault

    def until(self, at_s: float) -> None:
        """Let timers come up to then."""
        at_ns = round(at_s * 1e9)
        while self.kernel.timers and min(t[0] for t in self.kernel.timers) <= at_ns:
            self.kernel.ring()
        self.kernel.now_ns = at_ns

    # --- the ports ----------------------------------------------------------------------------
    def on_reply(self, asked: Asked, value: int) -> None:
        assert asked.by == "injector"
        self.injector.answered(asked.number, value)

    def is_spare(self, replica: Replica) -> bool:
        return replica.replica_id in self.spares

    def are_equal(self, one: Replica, other: Replica) -> bool:
        return True

    def cancel(self, request: Request) -> None:
        request.status = Status.CANCELLED
        self.cancelled.append(request)

    def note(self, kind: str, target: str, text: str) -> None:
        self.notes.append((kind, target, text))

    def lost(self, requests: Sequence[Request], reason: str) -> None:
        super().lost(requests, reason)
        self.recovery.lost(requests, reason)

    @property
    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self.replicas]

    @property
    def missed(self) -> list[str]:
        return [text for kind, _, text in self.notes if kind == "fault missed"]

    @property
    def struck(self) -> list[str]:
        """What the faults have struck, for people."""
        return [entry[2] for entry in self.recorder.struck]
