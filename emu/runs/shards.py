"""One run in several processes: its replicas are shared out, its results are those of one process.

Exact where no replica can feel another: routers that look at no signals, colocated replicas, no
planner, no transfers (`shard_rules.py` says what is refused, and why). Then a request's replica and
the instant at which an engine has it are known before the run. Each process runs the whole cluster
with the requests of its own replicas; the others rest. All meet once, when each has ended its
requests, to learn when the run ends; then rows, samples, gaps and counters are put together.

Owns the processes and the order of things. The first part runs in this process, the others in
forks of it, which inherit the plan and the workload.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from emu.cluster.ending import Outcome
from emu.cluster.plan import Plan
from emu.cluster.ports import Observer, Ports
from emu.kernel.clock import NEVER
from emu.kernel.digest import digest_of
from emu.kernel.priorities import PRIORITY_WORLD
from emu.kernel.stepped import SteppedKernel
from emu.latency.known_intake import KnownIntake
from emu.process.interrupts import helps, spawning
from emu.replica.counters import CounterFigures
from emu.replica.states import ReplicaState
from emu.report.itl import GapPart
from emu.report.records import COLUMNS, ROW_BYTES, LogPart
from emu.report.timeseries import Sample, TimeseriesWriter
from emu.request import Request
from emu.runs.shard_routes import Routes
from emu.workload.opened import Workload
from emu.workload.session import NOTHING_FOLLOWS, Following
from emu.world import World, uncollected

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

_LATE_NS: Final = NEVER >> 1
"""A timer so late that it never comes: time can be held although nothing else is due."""
_FIRST: Final = -1
"""Before all that is due at an instant."""
_MASK: Final = (1 << 64) - 1
_STATUS: Final = COLUMNS.index("status")
_END_S: Final = 30.0
_Look = tuple[int, int, int, int, int, int, int, int, int, int]
"""Of a sample: time, total blocks, and eight figures that add up over parts."""


class _End(NamedTuple):
    """When the whole run ends."""

    rest_ns: int
    """All requests have ended."""
    delivered_ns: int
    """The last token is with its client."""

    @property
    def end_ns(self) -> int:
        """The last instant."""
        return max(self.rest_ns, self.delivered_ns)

    @property
    def is_delivery(self) -> bool:
        """The run ends with a delivery, which is an instant of its own."""
        return self.delivered_ns > self.rest_ns


class _Found(NamedTuple):
    """What a part leaves, in plain values."""

    events: int
    digest: int
    requests: LogPart
    gaps: GapPart
    looks: list[_Look]
    counters: list[CounterFigures]
    """Of its replicas, in their order."""
    stages: list[list[int]]
    """Time in which each stage of a pipeline was busy; empty without."""


class _Inexact(Exception):
    """The parts cannot tell what one process would do: it has to do it."""


class _Looks(Observer):
    """Keeps the samples."""

    def __init__(self) -> None:
        self.looks: list[_Look] = []

    def sampled(self, sample: Sample) -> None:
        """A row of the time series was written."""
        self.looks.append(
            (
                *(sample.time_ns, sample.total_blocks, sample.waiting),
                *(sample.waiting_prefill_tokens, sample.running, sample.used_blocks),
                *(sample.prefill_tokens, sample.decode_tokens),
                *(sample.completed, sample.preemptions),
            )
        )


class _Requests:
    """The requests of one part."""

    def __init__(self, workload: Workload, routes: Routes, number: int) -> None:
        self._workload = workload
        self._routes = routes
        self._number = number
        self.has_prefixes = workload.has_prefixes

    def releases(self) -> Iterator[Request]:
        """Those that go to its replicas, each bound for one."""
        return self._routes.of_part(self._workload.releases(), self._number)

    def end_turn(self, request: Request, now_ns: int, *, completed: bool) -> Following:
        """There are no sessions."""
        return NOTHING_FOLLOWS


class _Part:
    """The world of one part."""

    def __init__(
        self, plan: Plan, workload: Workload, routes: Routes, number: int, directory: Path
    ) -> None:
        per_instant = plan.config.limits.events_per_instant // routes.parts
        self.kernel = SteppedKernel(events_per_instant_max=max(1, per_instant))
        self._looks = _Looks()
        self._routes = routes
        self._number = number
        self.rest = _End(-1, -1)
        self._is_shared_instant = False
        """Something else was due when its last request ended."""
        source = _Requests(workload, routes, number)
        ports = Ports(observers=(self._looks,))
        self.world = World(plan, source, directory, ports, self.kernel)
        ready = routes.ready_of_part(number)
        intake = None if ready is None else KnownIntake(ready)
        self.world.cluster.gateway.take_over(intake, self._at_rest)
        self.kernel.call_at(_LATE_NS, PRIORITY_WORLD, _nothing)
        self._life = self.world.live()

    def _at_rest(self, delivered_ns: int) -> None:
        now_ns = self.kernel.now_ns
        self.rest = _End(now_ns, delivered_ns)
        self._is_shared_instant = self.kernel.has_due(now_ns)
        self.kernel.hold(now_ns)

    def _go_on(self) -> None:
        with contextlib.suppress(StopIteration):
            self._life.send(None)

    def run(self) -> _End:
        """All its requests; when the last one has ended, and the last token is delivered."""
        self._go_on()
        if self.world.outcome is not None:
            raise _Inexact(f"a part ended with {self.world.outcome.error}")
        return self.rest

    def finish(self, end: _End) -> _Found:
        """Go on to the end of the whole run and give what it leaves. Raises _Inexact."""
        kernel, world = self.kernel, self.world
        own_stop = 1
        if end.is_delivery:
            stop_ns = end.delivered_ns + PRIORITY_WORLD + 1
            kernel.call_at(end.delivered_ns, PRIORITY_WORLD, kernel.stop)
        elif self.rest.rest_ns < end.rest_ns:
            stop_ns = end.rest_ns + _FIRST + 1
            kernel.call_at(end.rest_ns, _FIRST, kernel.stop)
        else:
            own_stop = stop_ns = 0
            kernel.stop()
        kernel.hold(NEVER)
        self._go_on()
        assert world.outcome is not None
        if world.outcome.error is not None:
            raise _Inexact(f"a part ended with {world.outcome.error}")
        is_shared = self._is_shared_instant and self.rest.rest_ns == end.rest_ns
        if not end.is_delivery and (is_shared or kernel.has_due(end.rest_ns)):
            raise _Inexact("two things are due at its last instant")
        world.close()
        if world.error is not None:
            raise _Inexact(f"a part ended with {world.error}")
        replicas = [world.cluster.replicas[place] for place in self._routes.replicas(self._number)]
        recorder = world.recorder
        own = digest_of([stop_ns]) if own_stop else 0
        ticks = self._routes.ticks(self._number)
        return _Found(
            kernel.events - own_stop - len(ticks),
            (kernel.digest - own - digest_of(ticks)) & _MASK,
            recorder.requests.pause(),
            recorder.gaps.part(),
            self._looks.looks,
            [replica.counters.figures() for replica in replicas],
            [[] if one.staged is None else one.staged.pipeline.busy_ns for one in replicas],
        )


def _nothing() -> None:
    """Never called."""


def _work(end: Connection, make: Callable[[], _Part]) -> None:
    """What a process of a part does."""
    helps()
    try:
        with uncollected():
            part = make()
            end.send(part.run())
            end.send(part.finish(end.recv()))
    except EOFError:
        return  # its parent has given up
    except _Inexact as error:
        end.send(str(error))
    except Exception as error:  # one process will meet it again, and tell it in full
        end.send(f"a part ended with {type(error).__name__}: {error}")


class _Helpers:
    """The processes of all parts but the first. Leaving ends what is still running."""

    def __init__(self, makers: Sequence[Callable[[], _Part]]) -> None:
        context = multiprocessing.get_context("fork")
        self._ends: list[Connection] = []
        self._processes: list[ForkProcess] = []
        with spawning():
            for make in makers:
                mine, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, make), daemon=True)
                process.start()
                theirs.close()
                self._ends.append(mine)
                self._processes.append(process)

    def tell(self, end: _End) -> None:
        """When the whole run ends."""
        for connection in self._ends:
            connection.send(end)

    def rests(self) -> list[_End]:
        """When each part has ended its requests."""
        return [answer for answer in self._answers() if isinstance(answer, _End)]

    def found(self) -> list[_Found]:
        """What each part leaves."""
        return [answer for answer in self._answers() if isinstance(answer, _Found)]

    def _answers(self) -> Iterator[object]:
        for connection in self._ends:
            try:
                answer = connection.recv()
            except (EOFError, ConnectionResetError):
                raise _Inexact("the process of a part has died") from None
            if isinstance(answer, str):
                raise _Inexact(answer)
            yield answer

    def close(self) -> None:
        """End what is still running."""
        for connection in self._ends:
            connection.close()
        for process in self._processes:
            process.join(_END_S if process.exitcode is None else 0)
            if process.is_alive():
                process.kill()
                process.join()


def run_in_parts(plan: Plan, workload: Workload, staging: Path, routes: Routes) -> World | str:
    """The world of the whole run, over, its files written; or why one process has to do it.

    The reasons are rare: an error, which one process tells better, and a last instant at which two
    parts have something to do.
    """
    import numpy  # gaps and digests are put together by it

    assert numpy
    places = [staging / f"part-{number}" for number in range(1, routes.parts)]
    parts: list[_Part] = []

    def maker(number: int, place: Path) -> Callable[[], _Part]:
        return lambda: _Part(plan, workload, routes, number, place)

    for place in places:
        place.mkdir()
    helpers = _Helpers([maker(number, place) for number, place in enumerate(places, start=1)])
    is_whole = False
    try:
        with uncollected():
            parts.append(maker(0, staging)())
            rests = [parts[0].run(), *helpers.rests()]
            end = _End(max(r.rest_ns for r in rests), max(r.delivered_ns for r in rests))
            helpers.tell(end)
            found = [parts[0].finish(end), *helpers.found()]
            _join(parts[0].world, routes, found, places, end)
        is_whole = True
    except _Inexact as error:
        return str(error)
    finally:
        helpers.close()
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        if parts and not is_whole:
            parts[0].world.discard()
    return parts[0].world


def _join(
    world: World, routes: Routes, found: Sequence[_Found], places: Sequence[Path], end: _End
) -> None:
    """The world of the first part becomes that of the whole run."""
    staging, recorder = world.directory, world.recorder
    _join_series(world, staging, [part.looks for part in found])
    _join_replicas(staging, places, routes)
    _join_requests(world, routes, [part.requests for part in found])
    for part in found[1:]:
        recorder.gaps.add_part(part.gaps)
    for number, part in enumerate(found):
        for place, figures, stages in zip(
            routes.replicas(number), part.counters, part.stages, strict=True
        ):
            replica = world.cluster.replicas[place]
            replica.counters.take(figures)
            if replica.staged is not None:
                replica.staged.pipeline.busy_ns = stages
    ticks = routes.all_ticks()
    digest = sum(part.digest for part in found) + digest_of(ticks)
    events = sum(part.events for part in found) + len(ticks)
    if end.is_delivery:
        events += 1
        digest += digest_of([end.delivered_ns + PRIORITY_WORLD + 1])
    world.outcome = Outcome(None, end.end_ns, events, f"{digest & _MASK:016x}")


def _join_series(world: World, staging: Path, looks: Sequence[list[_Look]]) -> None:
    """timeseries.csv: figures of all parts at the same instants."""
    states = [replica.state.value for replica in world.cluster.replicas]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    from emu.cluster.recorder import FLOW_KINDS

    every_state = [state.value for state in ReplicaState]
    series = TimeseriesWriter(staging / "timeseries.csv", every_state, FLOW_KINDS)
    try:
        for row in zip(*looks, strict=True):
            if len({(look[0], look[1]) for look in row}) > 1:
                raise _Inexact("parts were looked at at different instants")
            sums = [sum(column) for column in zip(*[look[2:] for look in row], strict=True)]
            series.add(
                Sample(
                    time_ns=row[0][0],
                    replicas=counts,
                    waiting=sums[0],
                    waiting_prefill_tokens=sums[1],
                    running=sums[2],
                    used_blocks=sums[3],
                    total_blocks=row[0][1],
                    prefill_tokens=sums[4],
                    decode_tokens=sums[5],
                    completed=sums[6],
                    preemptions=sums[7],
                )
            )
    except ValueError:
        raise _Inexact("parts were looked at at different instants") from None
    finally:
        series.close()


def _join_replicas(staging: Path, places: Sequence[Path], routes: Routes) -> None:
    """replicas.csv: of each part the rows of its own replicas, by time and replica."""
    kept: list[bytes] = []
    header = b""
    for number, place in enumerate([staging, *places]):
        own = {b"%d" % replica for replica in routes.replicas(number)}
        with (place / "replicas.csv").open("rb") as file:
            header = next(file)
            kept += [line for line in file if line.split(b",", 2)[1] in own]
    # Parts have ascending replicas, and each file is in order: a stable sort by time is enough.
    kept.sort(key=lambda line: int(line[: line.index(b",")]))
    with (staging / "replicas.csv").open("wb") as file:
        file.write(header)
        file.writelines(kept)


def _join_requests(world: World, routes: Routes, logs: Sequence[LogPart]) -> None:
    """requests.csv in order of arrival, and the figures behind it."""
    rows = [_rows(Path(log[0])) for log in logs]
    headers = [next(each) for each in rows]
    part_of = routes.part_of
    completed = array("B")

    def lines() -> Iterator[bytes]:
        for number in part_of:
            line = next(rows[number])
            if line.split(b",", _STATUS + 1)[_STATUS] == b"completed":
                completed.append(number)
            yield line

    def values() -> Iterator[bytes]:
        files = [Path(log[1]).open("rb") for log in logs]  # noqa: SIM115
        try:
            for number in completed:
                yield files[number].read(ROW_BYTES)
        finally:
            for file in files:
                file.close()

    world.recorder.requests.join(logs, chain(headers[:1], lines()), values())


def _rows(path: Path) -> Iterator[bytes]:
    """Rows of a table; a field in quotes may hold ends of lines."""
    with path.open("rb") as file:
        for line in file:
            while line.count(b'"') % 2:
                line += next(file)
            yield line
