"""The edge of the core: build a world, tell it, run it on a clock, look at it, finish it.

    world = World.open("cluster.toml")
    world.run(until_s=2.0)                  # emulated time stands still there
    print(world.replica(0).doing)
    world.crash(0)
    print(world.finish().p99_ttft_ms)

A world is a cluster with the files of its run. Everything that emulates composes one: `emu run`,
the live server, chaos trials, `emu story`, notebooks. What stands around it is plugged in at its
ports (`Ports`): a source of requests, observers, a sink of tokens, a clock. Nothing subclasses it.

Two ways of running. `emulate` builds a world on the clock that its plan needs and runs it to its
end. `World.run` goes on to an instant and stands still there, as often as one likes; for plans
that ask no other process. `await live()` is for an event loop of one's own.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeVar

import msgspec

from emu.cluster.audit import final_error, leaks, run_facts, summary_of, write_results
from emu.cluster.cluster import Cluster
from emu.cluster.commands import check_commands
from emu.cluster.ending import Outcome
from emu.cluster.gateway import Requests
from emu.cluster.plan import Plan, plugins_of
from emu.cluster.ports import PLAIN, LiveMove, Observer, Ports, Relay, StateChange
from emu.cluster.prepare import prepare
from emu.cluster.recorder import Recorder
from emu.config.schema import AstraTable, CommandTable, Config, FaultTable, LatencyTable
from emu.errors import InputError, InvariantViolation, PluginError
from emu.kernel.clock import NEVER, Kernel
from emu.kernel.life import completed
from emu.process.interrupts import held, scratch, sent_to
from emu.units import NS_PER_S, s_to_ns

if TYPE_CHECKING:
    from types import TracebackType

    from emu.cluster.standing import Standing
    from emu.kernel.stepped import SteppedKernel
    from emu.report.summary import RunFacts, Summary
    from emu.workload.items import Notes

__all__ = [
    "PLAIN",
    "Cluster",
    "LiveMove",
    "Observer",
    "Outcome",
    "Ports",
    "Relay",
    "Requests",
    "StateChange",
    "World",
    "asks_outside",
    "emulate",
    "prepare",
    "uncollected",
]

_OF_THIS_PROCESS: Final = ("roofline", "linear", "profile", "vidur", "aiconfigurator")
_LOOK_S: Final = 0.1
"""How often what waits for a run is asked, wall time."""
T = TypeVar("T")


class World:
    """A cluster with the files of its run.

    `cluster` has the actors, to be read; what changes them goes through the methods here, or at
    an instant of the world itself (`cluster.kernel`).
    """

    def __init__(
        self,
        plan: Plan,
        source: Requests,
        directory: Path,
        ports: Ports = PLAIN,
        kernel: Kernel | None = None,
    ) -> None:
        """Open the files in `directory` (there already) and build the actors.

        `kernel`: the clock; without one, emulated time that `run` can hold. Raises InputError for
        what a backend or a class of the user's own lacks.
        """
        self.plan = plan
        self.outcome: Outcome | None = None
        """How it ended; None = it has not."""
        self.error: BaseException | None = None
        """What was wrong in the end, the books included; known once it is closed."""
        self._running: Coroutine[None, None, Outcome] | None = None
        self._stepped: SteppedKernel | None = None
        self._scratch = contextlib.ExitStack()
        self._rows = 0
        self._notes: Notes | None = None
        if kernel is None:
            kernel = self._stepped = _stepped_kernel(plan)
        self.directory = directory
        models = plan.models if len(plan.models) > 1 else ()
        self.recorder = Recorder(directory, plan.config.output, ports, models=models)
        try:
            self.cluster = Cluster(plan, source, self.recorder, ports, kernel)
        except BaseException:
            self.discard()
            raise

    @classmethod
    def open(
        cls,
        config: str | Path | Mapping[str, object] | Config,
        overrides: Sequence[str] = (),
        *,
        ports: Ports = PLAIN,
        directory: str | Path | None = None,
    ) -> Self:
        """The world of a configuration: the path of a TOML file, or the same tables as a dict.

        `overrides`: `KEY=VALUE` as on the command line. `directory`: where its files go (made if
        it is not there); without one they are gone when the world is finished. Raises InputError.
        """
        from emu.config.load import config_from_dict, load_config

        source = "config"
        if isinstance(config, (str, Path)):
            source = str(config)
            config = load_config(config, overrides)
        elif isinstance(config, Mapping):
            config = config_from_dict(dict(config), overrides)
        elif overrides:
            raise InputError(source, None, "overrides", "cannot be applied to a Config")
        plan, workload = prepare(config, source)
        with contextlib.ExitStack() as stack:
            if directory is None:
                place = stack.enter_context(scratch("emu-world-"))
            else:
                place = Path(directory)
                place.mkdir(parents=True, exist_ok=True)
            made = cls(plan, workload, place, ports)
            made._scratch = stack.pop_all()
            made._rows, made._notes = workload.count, workload.notes
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A world that was not finished leaves nothing open."""
        self.discard()

    @property
    def now_s(self) -> float:
        """Emulated seconds since the start."""
        return self.cluster.kernel.now_ns / NS_PER_S

    def replica(self, replica_id: int) -> Standing:
        """How a replica stands now. Raises InputError if there is none of this id."""
        from emu.cluster.standing import standing

        replicas = self.cluster.replicas
        if not 0 <= replica_id < len(replicas):
            problem = f"there are replicas 0 to {len(replicas) - 1}, not {replica_id}"
            raise InputError("world", None, "replica", problem)
        return standing(replicas[replica_id], self.cluster.kernel.now_ns)

    def leaks(self) -> list[str]:
        """At the end of a complete run: what is left in the books; must be empty."""
        return leaks(self.cluster)

    def facts(self) -> RunFacts:
        """At the end of a run: what only the cluster knows of it, for the summary."""
        return run_facts(self.cluster)

    def summary(self) -> Summary:
        """At the end of a run: its summary, of what was recorded; nothing is recorded after it."""
        outcome, recorder = self.outcome, self.recorder
        assert outcome is not None
        stats = recorder.requests.finish(partial=outcome.error is not None)
        return summary_of(self.cluster, recorder, stats, recorder.gaps.finish(), self.facts())

    def tell(self, table: CommandTable | FaultTable) -> None:
        """A command or a fault, as if the configuration had its table.

        It happens at its time, or at the next nanosecond if that has passed. Raises InputError
        for what names something that is not there. A command that does not apply then is noted.
        """
        if self._running is not None:
            next_s = (self.cluster.kernel.now_ns + 1) / NS_PER_S
            table = msgspec.structs.replace(table, at_s=max(table.at_s, next_s))
        if isinstance(table, FaultTable):
            self.cluster.inject(table)
            return
        check_commands([table], len(self.cluster.replicas), "world")
        self.cluster.commander.take(table)

    def command(self, command: str, replica: int, factor: float | None = None) -> None:
        """Tell a replica to change its role, forget its cache, or be so many times slower, now."""
        from emu.process.prepared import prepared

        given = {"at_s": 0.0, "command": command, "replica": replica, "factor": factor}
        try:
            table = msgspec.convert(given, prepared(CommandTable))
        except msgspec.ValidationError as error:
            raise InputError("world", None, "command", str(error)) from None
        self.tell(table)

    def strike(self, fault: Mapping[str, object]) -> None:
        """A fault strikes now: a `[[faults]]` table without `at_s`. Raises InputError."""
        from emu.config.faultkinds import read_fault

        self.tell(read_fault(dict(fault)))

    def crash(self, replica_id: int) -> None:
        """A replica crashes now; `[recovery]` says what becomes of its requests."""
        self.strike({"kind": "replica_crash", "replica": replica_id})

    async def live(self) -> Outcome:
        """Run to the end on its own clock, in an event loop if that clock needs one.

        An error that ends the run is in the outcome; it is not raised.
        """
        self.outcome = await self.cluster.run()
        return self.outcome

    def run(self, until_s: float | None = None) -> float:
        """Go on until all that is due by `until_s` has happened, or to the end.

        The emulated seconds that it has come to. Nothing changes until the next call, so that the
        result does not depend on where it stood still. Raises InputError for an instant that has
        passed, and for a world on another clock.
        """
        clock = self._stepped
        if clock is None:
            raise InputError("world", None, "run", "this world runs on a clock that was given")
        if self.outcome is not None:
            return self.now_s
        hold_ns = NEVER if until_s is None else s_to_ns(until_s)
        if hold_ns < clock.now_ns:
            problem = f"{until_s} s has passed, it is {self.now_s:g} s"
            raise InputError("world", None, "until_s", problem)
        clock.hold(hold_ns)
        if self._running is None:
            self._running = self.live()
        with contextlib.suppress(StopIteration):
            self._running.send(None)
        return self.now_s

    def finish(self) -> Summary:
        """Run to the end if it is not there, write the results, and return their summary.

        Raises what ended the run before its time, and InvariantViolation if the books are wrong.
        """
        if self.outcome is None:
            self.run()
        try:
            self.close()
            summary = self.write_results(self._rows, self._notes)
        finally:
            self._scratch.close()
        if self.error is not None:
            raise self.error
        return summary

    def close(self) -> None:
        """At its end: close the files that were written on the way, and look at the books."""
        assert self.outcome is not None, "it has not ended"
        self.recorder.close()
        self.error = _of_plugins(final_error(self.cluster, self.outcome.error), self.plan)

    def write_results(self, rows: int, notes: Notes | None = None) -> Summary:
        """Write what is known only at the end; partial files if `error` is set. After `close`.

        `rows`: of the workload; `notes`: what of them was skipped or clipped.
        """
        return write_results(
            self.directory, self.cluster, self.recorder, self.error, rows=rows, notes=notes
        )

    def discard(self) -> None:
        """Let go of its files, whatever state they are in; called again, it does nothing more."""
        with held():
            if self._running is not None:
                self._running.close()
            self.recorder.leave()
            self._scratch.close()


def emulate(
    plan: Plan,
    make: Callable[[Kernel], World],
    look: Callable[[World], bool] | None = None,
) -> World:
    """The world that `make` builds on the clock that its plan needs, run to its end.

    `look` is called ten times a second of wall time; True interrupts the run. So does a signal:
    what was computed is kept, and the outcome's error is a KeyboardInterrupt.
    """
    made: list[World] = []

    async def main(make_kernel: Callable[..., Kernel]) -> None:
        world = make(make_kernel(events_per_instant_max=plan.config.limits.events_per_instant))
        made.append(world)
        await _attended(world, look)

    try:
        with uncollected():
            _on_its_clock(plan, main)
    except BaseException:
        for world in made:
            world.discard()
        raise
    return made[0]


async def _attended(world: World, look: Callable[[World], bool] | None) -> None:
    """Run it; a signal, or what looks on, ends it and keeps the rest."""
    kernel = world.cluster.kernel
    interrupts: list[KeyboardInterrupt] = []
    looked_s = time.monotonic()

    def interrupt() -> None:
        interrupts.append(KeyboardInterrupt())
        kernel.fail(interrupts[-1])

    def between() -> None:
        nonlocal looked_s
        if look is None or time.monotonic() - looked_s < _LOOK_S:
            return
        if look(world):
            interrupt()
        looked_s = time.monotonic()

    if look is not None:
        kernel.call_between(between)
    with sent_to(kernel, interrupt):
        outcome = await world.live()
    if interrupts and outcome.error is None:  # it came when the run had just ended
        outcome.error = interrupts[0]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Nothing of a run forms cycles; collecting while it goes on would only cost time."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


def _on_its_clock(
    plan: Plan, main: Callable[[Callable[..., Kernel]], Coroutine[None, None, T]]
) -> T:
    """The result of `main`, which is given the kernel's class that the plan needs.

    Emulated time alone needs no event loop beside the kernel. Where replicas ask another process,
    actors are tasks of uvloop's.
    """
    if not asks_outside(plan):
        return completed(main, Kernel)
    import anyio

    from emu.kernel.tasks import TaskKernel

    return anyio.run(main, TaskKernel, backend_options={"use_uvloop": sys.platform != "win32"})


def _stepped_kernel(plan: Plan) -> SteppedKernel:
    """A clock that stands still when it is told. Raises InputError if the plan needs another."""
    if asks_outside(plan):
        problem = "asks another process, which no clock that stands still can wait for"
        raise InputError(plan.source, None, "latency.backend", problem)
    from emu.kernel.stepped import SteppedKernel

    return SteppedKernel(events_per_instant_max=plan.config.limits.events_per_instant)


def asks_outside(plan: Plan) -> bool:
    """Some replica may ask another process what its iterations cost."""
    of_groups = {replica.group: replica.latency for replica in plan.replicas}
    return any(map(_is_outside, of_groups.values()))


def _is_outside(table: LatencyTable) -> bool:
    if isinstance(table, AstraTable) and table.backend == "astra-sim":
        return bool(table.binary)
    return table.backend not in _OF_THIS_PROCESS


def _of_plugins(error: BaseException | None, plan: Plan) -> BaseException | None:
    """A violated invariant where a scheduler of the user's own keeps the books is its fault."""
    if not isinstance(error, InvariantViolation):
        return error
    for key, path, _ in plugins_of(plan.config, plan.replicas):
        if key == "scheduler.policy":
            what = "; ".join([error.what, *error.story[:1]])
            found = PluginError(f"{key}: {path} breaks the books: {what}")
            found.__cause__ = error
            return found
    return error
