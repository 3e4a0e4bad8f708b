"""Strikes: carries out the `[[faults]]` of a configuration, each at its time.

`inject` is the single entry: a configuration's list goes through it, and so does a live server.
A fault enters as a timestamped call to the owner of the thing that breaks. What each kind does is
in `emu/faults/handlers.py`, which is loaded when the first one strikes. Every strike is counted,
marked in the timeline and drawn into the trace; a fault that finds nothing to strike is marked as
missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct, structs

from emu.config.schema import FaultTable
from emu.errors import InputError
from emu.faults.link_faults import LinkFaults
from emu.faults.recovery import Recovery
from emu.faults.transfer_faults import TransferFaults
from emu.kernel.priorities import PRIORITY_WORLD
from emu.replica.events import Asked
from emu.replica.states import DRAINING, LOADING, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.rng import rng_stream
from emu.units import NS_PER_S, ms_to_ns, s_to_ns

if TYPE_CHECKING:
    import numpy as np

    from emu.config.tables.faults import DrainExpired, ReplicaCrash
    from emu.faults.ports import FaultWorld

_TOLD_MAX: Final = 100
"""Faults without effect that are put in words."""
S = ReplicaState
Fault = TypeVar("Fault", bound=FaultTable, covariant=True)
Handler = Callable[["Strike[Any]"], None]
"""What a kind of fault does."""


def states_of(stage: str) -> Sequence[ReplicaState]:
    """States that a crash's `stage` means."""
    found: dict[str, list[ReplicaState]] = {
        "prefill": [S.PREFILL, S.AUS_PREFILL, S.SHUTTING_PREFILL],
        "decode": [S.DECODE, S.AUS_DECODE, S.SHUTTING_DECODE],
        "colocated": [S.COLOCATED, S.SHUTTING_COLOCATED],
        "new_prefill": [S.NEW_PREFILL, S.REFRACTORY_PREFILL],
        "old_prefill": [S.OLD_PREFILL],
        "loading": sorted(LOADING, key=lambda s: s.value),
        "any": [s for s in S if s not in (S.FAILED, S.INACTIVE)],
    }
    return found.get(stage) or [state for state in S if state.value == stage]


def _number(fault: FaultTable, key: str) -> float | None:
    """A number that some kinds of fault have."""
    found: float | None = structs.asdict(fault).get(key)
    return found


class InForce(Struct):
    """A fault that lasts, and what ends it."""

    fault: FaultTable
    target: str
    since_ns: int
    end: Callable[[], None]

    @property
    def until_s(self) -> float | None:
        """When it is over by itself; None: never."""
        duration_s = _number(self.fault, "duration_s")
        return self.since_ns / NS_PER_S + duration_s if duration_s else None


class Injector:
    """Faults of one run."""

    def __init__(
        self,
        cluster: FaultWorld,
        recovery: Recovery,
        handlers: Callable[[], Mapping[str, Handler]],
    ) -> None:
        """`handlers`: by kind; asked for when the first fault strikes."""
        self.cluster = cluster
        self._handlers = handlers
        self.kernel = cluster.kernel
        self.recovery = recovery
        self.struck: dict[str, int] = {}
        """How often each kind struck."""
        self.missed: dict[str, int] = {}
        self.links = LinkFaults(cluster.network)
        self.transfers = TransferFaults(cluster.network, self.note)
        self._clones = self._losses = self._questions = 0
        self._waiting_answers: dict[int, Callable[[int], None]] = {}
        """What goes on with the answer of a replica, by the number of the question."""
        self.waiting: list[tuple[ReplicaCrash, str]] = []
        """Crashes that wait for a replica to enter a stage."""
        self.in_force: dict[int, InForce] = {}
        """Faults that struck and have an end, by a number that counts them."""
        self._forced = 0
        self.drains: list[DrainExpired] = []
        """In force: a replica that begins to drain has no time for it."""
        self._injected = 0
        self._due: dict[int, FaultTable] = {}
        """Faults whose time has not come, by number."""
        self.without_effect: list[str] = []
        """Faults that struck nothing, in words; the first ones."""
        timeout_ns = ms_to_ns(cluster.config.recovery.transfer_timeout_ms)
        cluster.network.set_timeout(max(1, timeout_ns))

    def start(self) -> None:
        """Schedule the configuration's faults (before the run)."""
        for fault in self.cluster.config.faults:
            self.inject(fault)

    def inject(self, fault: FaultTable) -> None:
        """Schedule a fault at its time, or now if that has passed. Raises InputError."""
        self._check(fault)
        number = self._injected
        self._injected += 1
        at_ns = max(self.kernel.now_ns, s_to_ns(fault.at_s))
        self._due[number] = fault
        self.kernel.call_at(at_ns, PRIORITY_WORLD, partial(self._strike, fault, number))

    def _check(self, fault: FaultTable) -> None:
        from emu.config.faultkinds import fault_problems

        for path, problem in fault_problems(self._injected, fault):
            raise InputError("faults", None, ".".join(map(str, path)), problem)
        cluster = self.cluster
        limits = {
            "replica": len(cluster.replicas),
            "source": len(cluster.replicas),
            "destination": len(cluster.replicas),
            "node": len(cluster.topology.machines),
            "gpu": len(cluster.topology.gpus),
        }
        for key, count in limits.items():
            value = _number(fault, key)
            if value is not None and value >= count:
                problem = f"expected an index from 0 to {count - 1}, got {value}"
                raise InputError("faults", None, f"faults.{self._injected}.{key}", problem)

    def close(self) -> None:
        """At the end of a run: faults that it has not come to are missed."""
        end_s = self.kernel.now_ns / NS_PER_S
        for fault in self._due.values():
            self.miss(
                fault,
                f"never reached: due at {fault.at_s:g} s, the run ended at {end_s:g} s",
                f"the {fault.kind} at {fault.at_s:g} s was never reached: "
                f"the run ended at {end_s:g} s",
            )
        for crash, stage in self.waiting:
            self.miss(
                crash,
                f"no replica came to {stage}",
                f"the {crash.kind} at {crash.at_s:g} s never struck: no replica came to {stage}",
            )
        if self.cluster.config.faults:
            from emu.faults.idle import idle_faults

            told = self.without_effect
            told += idle_faults(self.cluster, self.transfers.opened)
            del told[_TOLD_MAX:]

    def _strike(self, fault: FaultTable, number: int) -> None:
        del self._due[number]
        self._handlers()[fault.kind](Strike(self, fault, self.rng(number)))

    def rng(self, number: int) -> np.random.Generator:
        """The random stream of a fault."""
        return rng_stream(self.cluster.config.seed, f"fault {number}")

    def later(self, delay_ns: int, call: object) -> None:
        """Run a call so much later."""
        assert callable(call)
        self.kernel.call_at(self.kernel.now_ns + delay_ns, PRIORITY_WORLD, call)

    def until(self, fault: FaultTable, target: str, end: Callable[[], None]) -> None:
        """The fault is in force now, until its duration is over (None = for good) or `undo`."""
        number = self._forced
        self._forced += 1
        self.in_force[number] = InForce(fault, target, self.kernel.now_ns, end)
        duration_s = _number(fault, "duration_s")
        if duration_s:
            self.later(s_to_ns(duration_s), partial(self._over, number))

    def _over(self, number: int) -> None:
        one = self.in_force.pop(number, None)
        if one is not None:  # it was not undone
            one.end()

    def undo(self, number: int) -> tuple[FaultTable, FaultTable]:
        """End a fault now. Returns it as it was asked for, and with the duration that it had.

        Raises KeyError for a number that is not in force.
        """
        one = self.in_force.pop(number)
        lasted_s = max(1, self.kernel.now_ns - one.since_ns) / NS_PER_S
        one.end()
        return one.fault, structs.replace(one.fault, duration_s=lasted_s)

    def next_clone(self) -> int:
        """Numbers of requests that overloads add."""
        self._clones += 1
        return self._clones - 1

    def next_loss(self) -> int:
        """Numbers of losses of KV memory, each of which gives back its own."""
        self._losses += 1
        return self._losses - 1

    def ask(self, answered: Callable[[int], None]) -> Asked:
        """For an event that a replica answers: `answered` is called with the answer."""
        asked = Asked("injector", self._questions)
        self._questions += 1
        self._waiting_answers[asked.number] = answered
        return asked

    def note(self, fault: FaultTable, target: str) -> None:
        """The fault has struck this."""
        self.struck[fault.kind] = self.struck.get(fault.kind, 0) + 1
        replica = _number(fault, "replica")
        self.cluster.recorder.fault(
            self.kernel.now_ns,
            fault.kind,
            target,
            fault.numbers,
            -1 if replica is None else int(replica),
        )

    def miss(self, fault: FaultTable, why: str, told: str = "") -> None:
        """There was nothing to strike. `told`: what a user hears of it after the run."""
        self.missed[fault.kind] = self.missed.get(fault.kind, 0) + 1
        if len(self.without_effect) < _TOLD_MAX:
            at_s = self.cluster.kernel.now_ns / NS_PER_S
            problem = f"the {fault.kind} at {at_s:g} s struck nothing: {why}"
            self.without_effect.append(told or problem)
        self.cluster.note("fault missed", fault.kind, why)

    def end(self, fault: FaultTable, target: str) -> None:
        """A fault is over."""
        self.cluster.recorder.fault_over(self.kernel.now_ns, fault.kind, target)
        self.cluster.note("fault over", target, fault.kind)

    def wait_for(self, fault: ReplicaCrash, stage: str) -> None:
        """The fault strikes the next replica that comes to this stage."""
        self.waiting.append((fault, stage))

    def watch_drains(self, fault: DrainExpired) -> None:
        """The fault strikes replicas that begin to drain while it is in force."""
        self.drains.append(fault)

        def over() -> None:
            self.drains.remove(fault)
            self.end(fault, fault.kind)

        self.until(fault, fault.kind, over)

    @staticmethod
    def meets_drain(fault: DrainExpired, replica: ReplicaHandle) -> bool:
        """Whether the replica drains, and the fault is about it."""
        return replica.state in DRAINING and fault.replica in (None, replica.replica_id)

    def expire_drain(self, fault: DrainExpired, replica: ReplicaHandle) -> None:
        """The grace of a replica that drains is over."""
        self.note(fault, replica.name)
        self.recovery.expire_drain(replica)

    def answered(self, number: int, value: int) -> None:
        """A replica has answered the question of that number."""
        self._waiting_answers.pop(number)(value)

    def on_moved(self, replica: ReplicaHandle, before: ReplicaState) -> None:
        """A replica changed its state: a crash may have waited for that."""
        self.recovery.on_moved(replica, before)
        for fault in self.drains:
            if self.meets_drain(fault, replica):
                self.expire_drain(fault, replica)
        if not self.waiting:
            return
        for entry in list(self.waiting):
            crash, stage = entry
            if replica.state in states_of(stage):
                self.waiting.remove(entry)
                self.later(
                    0, partial(self._handlers()[crash.kind], Strike(self, crash, self.rng(0)))
                )


class Strike(Generic[Fault]):
    """One strike of a fault: what the handler of its kind sees of the world, and may do."""

    def __init__(self, injector: Injector, fault: Fault, rng: np.random.Generator) -> None:
        self.injector = injector
        self.fault = fault
        self.rng = rng
        self.cluster = injector.cluster
        self.kernel = injector.kernel
        self.recovery = injector.recovery
        self.links = injector.links
        self.transfers = injector.transfers

    def note(self, target: str) -> None:
        """The fault has struck this."""
        self.injector.note(self.fault, target)

    def miss(self, why: str) -> None:
        """There was nothing to strike."""
        self.injector.miss(self.fault, why)

    def end(self, target: str) -> None:
        """The fault is over."""
        self.injector.end(self.fault, target)

    def until(self, target: str, end: Callable[[], None]) -> None:
        """In force from now on, until its duration is over (None = for good) or it is undone."""
        self.injector.until(self.fault, target, end)

    def later(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Run a call so much later."""
        self.injector.later(delay_ns, call)

    def ask(self, answered: Callable[[int], None]) -> Asked:
        """For an event that a replica answers: `answered` is called with the answer."""
        return self.injector.ask(answered)
