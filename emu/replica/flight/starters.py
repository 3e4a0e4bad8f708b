"""What begins the next thing of a replica that forms batches: chosen once, not asked each time.

`Plain` is a replica alone with its scheduler and a backend inside simulated time: one iteration, or
leap, after the other. Everything else is `Composed`: it forms the batch with what looks on, then
launchers put it into flight. They are put together from the outside in: first uses of a fresh
process, then stages, a group or lower tiers, then a backend outside simulated time, then the
iteration itself. A replica chooses anew when its state or what looks on changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from emu.replica.actions import FreeCapacity, Measure
from emu.replica.books import DUMMY_ID, Books
from emu.replica.flight.awaiting import Awaiting, Launcher
from emu.replica.flight.base import IDLE, Flight
from emu.replica.flight.measured import Measured
from emu.replica.flight.member import Member
from emu.replica.flight.run import Run
from emu.replica.flight.staged import Staged
from emu.replica.flight.step import Step
from emu.replica.ports import GroupWave, ReplicaActorPort
from emu.replica.prerequisites import Prerequisites, TierTraffic
from emu.scheduling.base import Batch


class Starter:
    """Base of what begins the next thing."""

    is_simple: bool
    """An iteration needs nothing but the scheduler and the latency backend."""

    __slots__ = ("is_simple",)

    def start(self) -> Flight | None:
        """What is in flight from now on; None if nothing can be formed."""
        raise NotImplementedError


@final
class Plain(Starter):
    """An iteration, or leap, of one batch follows the other, and nothing looks on."""

    books: Books
    frees: bool
    """Blocks of preempted requests may be awaited elsewhere."""
    runs_on: bool
    """A batch that ends prompts may be followed by its decodes in one flight."""

    __slots__ = ("books", "frees", "runs_on")

    def __init__(self, books: Books, *, frees: bool, runs_on: bool) -> None:
        self.is_simple = True
        self.books = books
        self.frees = frees
        self.runs_on = runs_on

    def start(self) -> Flight | None:
        """Form the next batch and begin it."""
        books = self.books
        counters, scheduler, now_ns = books.counters, books.scheduler, books.clock.now_ns
        batch = scheduler.schedule(now_ns)
        if not books.watch.is_touched:
            books.watch.touch()
        if batch is None:
            counters.begin_rest(now_ns)
            return None
        if batch.preempted and self.frees:
            books.out.append(FreeCapacity())  # KV that waits elsewhere may fit now
        if counters.rest_since_ns >= 0:
            counters.end_rest(now_ns)
        pace, shape, steps = books.pace, batch.shape, batch.max_steps
        if steps > 1:
            decode_ends = pace.decode_ends
            if decode_ends is not None:
                return Run(books, batch, now_ns, decode_ends(shape, steps, -1))
            return Run(books, batch, now_ns, pace.run_ends(shape, steps, -1, counters.iterations))
        cost_ns = pace.latency.iteration_ns(shape)
        if not pace.is_even:
            cost_ns = pace.varied_ns(cost_ns, counters.iterations)
        if batch.chunks and self.runs_on:
            batch.first_end_ns = now_ns + cost_ns
            run_on = scheduler.run_on(batch)
            if run_on is not None:
                steps = batch.max_steps - 1
                ends = pace.run_ends(run_on.shape, steps, cost_ns, counters.iterations)
                return Run(books, batch, now_ns, ends)
        return Step(books, batch, now_ns, now_ns + cost_ns)


@final
class Composed(Starter):
    """A batch is formed under the eyes of what looks on, and put into flight by launchers."""

    books: Books
    launcher: Launcher
    tiers: TierTraffic | None
    member: Member | None
    frees: bool
    """Blocks of preempted requests may be awaited elsewhere."""
    is_serving: bool
    """The replica does one iteration after another; else it finishes what it has."""
    stages: Staged | None

    __slots__ = ("books", "frees", "is_serving", "launcher", "member", "stages", "tiers")

    def __init__(
        self,
        books: Books,
        launcher: Launcher,
        *,
        stages: Staged | None,
        member: Member | None,
        tiers: TierTraffic | None,
        frees: bool,
        is_serving: bool,
        is_simple: bool,
    ) -> None:
        self.is_simple = is_simple
        self.books = books
        self.launcher = launcher
        self.stages = stages
        self.member = member
        self.tiers = tiers
        self.frees = frees
        self.is_serving = is_serving

    def start(self) -> Flight | None:
        """Form the next batch and begin it; on stages, one that is held goes first."""
        stages, books = self.stages, self.books
        now_ns = books.clock.now_ns
        if stages is not None and stages.held is not None:
            return None if stages.is_holding else self.launcher.launch(stages.held, now_ns, 0)
        batch = self._form(now_ns)
        if batch is None:
            return None
        if not self.is_serving and books.scheduler.waiting_count:
            batch.max_steps = 1  # a replica that shuts down gives back what it has just preempted
        return self.launcher.launch(batch, now_ns, 0)

    def _form(self, now_ns: int) -> Batch | None:
        books = self.books
        watch, counters = books.watch, books.counters
        batch = books.scheduler.schedule(now_ns)
        if not watch.is_touched:
            watch.touch()
        watch.note_signal()  # it may have admitted or preempted
        if self.tiers is not None:
            self.tiers.write_through()
        if batch is None and self.member is not None:
            batch = self._dummy(now_ns)
        if batch is None:
            if self.stages is None or not self.stages.on_stages:
                counters.begin_rest(now_ns)
            return None
        if batch.preempted and self.frees:
            books.out.append(FreeCapacity())  # KV that waits elsewhere may fit now
        if counters.rest_since_ns >= 0:
            counters.end_rest(now_ns)
        if watch.notes_formed and batch.batch_id != DUMMY_ID:
            watch.formed(batch)
        return batch

    def _dummy(self, now_ns: int) -> Batch | None:
        """A member of a data-parallel group keeps pace with a batch of one token."""
        assert self.member is not None
        group, books = self.member.group, self.books
        is_full = self.stages is not None and len(self.stages.on_stages) >= books.pace.stages
        if not group.wants(books.replica_id) or is_full:
            return None
        return group.dummy(now_ns)


# --- launchers ------------------------------------------------------------------------------------
@final
class Single:
    """The iteration, or leap, itself."""

    books: Books
    runs_on: bool
    """A batch that ends prompts may be followed by its decodes in one flight."""

    __slots__ = ("books", "runs_on")

    def __init__(self, books: Books, *, runs_on: bool) -> None:
        self.books = books
        self.runs_on = runs_on

    def launch(self, batch: Batch, start_ns: int, waited_ns: int) -> Flight:
        """The batch runs, and takes what the backend says."""
        return self.launch_measured(batch, start_ns, waited_ns, 0)

    def launch_measured(
        self, batch: Batch, start_ns: int, waited_ns: int, measured_ns: int
    ) -> Flight:
        """The batch runs, and takes what was measured, or what the backend says (0)."""
        books = self.books
        pace, number, shape = books.pace, books.counters.iterations, batch.shape
        if batch.max_steps > 1:
            return Run(books, batch, start_ns, pace.run_ends(shape, batch.max_steps, -1, number))
        cost_ns = pace.varied_ns(measured_ns or pace.latency.iteration_ns(shape), number)
        if pace.first_uses:
            cost_ns += pace.take_first_use()
        elif self.runs_on and batch.chunks:
            batch.first_end_ns = start_ns + cost_ns
            run_on = books.scheduler.run_on(batch)
            if run_on is not None:
                ends = pace.run_ends(run_on.shape, batch.max_steps - 1, cost_ns, number)
                return Run(books, batch, start_ns, ends)
        return Step(books, batch, start_ns, books.clock.now_ns + cost_ns, waited_ns)


@final
class Foreign:
    """A backend outside simulated time is asked for the cost of the iteration first."""

    single: Single

    __slots__ = ("single",)

    def __init__(self, single: Single) -> None:
        self.single = single

    def launch(self, batch: Batch, start_ns: int, waited_ns: int) -> Flight:
        """Ask for the cost."""
        single = self.single
        single.books.out.append(Measure(batch.shape))

        def begin(cost_ns: int) -> Flight:
            return single.launch_measured(batch, start_ns, waited_ns, cost_ns)

        return Measured(single.books, begin, IDLE, start_ns, waited_ns)


@final
class Tiered:
    """KV that a lower tier holds comes first."""

    books: Books
    tiers: TierTraffic
    actor: ReplicaActorPort
    life: int
    then: Launcher

    __slots__ = ("actor", "books", "life", "then", "tiers")

    def __init__(
        self,
        books: Books,
        tiers: TierTraffic,
        actor: ReplicaActorPort,
        life: int,
        then: Launcher,
    ) -> None:
        self.books = books
        self.tiers = tiers
        self.actor = actor
        self.life = life
        self.then = then

    def launch(self, batch: Batch, start_ns: int, waited_ns: int) -> Flight:
        """Begin the batch, or wait for what it needs. A leap needs nothing."""
        if batch.max_steps == 1:
            needs = Prerequisites(self.books.replica_id)
            if needs.start(batch, self.tiers, None, self.actor, self.life):
                return Awaiting(self.books, batch, start_ns, needs, self.then)
        return self.then.launch(batch, start_ns, waited_ns)


@final
class Grouped:
    """A member of a data-parallel group: the batch waits for its wave."""

    member: Member
    tiers: TierTraffic | None
    may_leap: bool
    """What its scheduler promises holds while the others of its group go on, too."""
    life: int

    __slots__ = ("life", "may_leap", "member", "tiers")

    def __init__(
        self, member: Member, tiers: TierTraffic | None, life: int, *, may_leap: bool
    ) -> None:
        self.member = member
        self.tiers = tiers
        self.may_leap = may_leap
        self.life = life

    def launch(self, batch: Batch, start_ns: int, waited_ns: int) -> Flight:
        """Enter the wave; the last member to do so begins at once."""
        member, paces = self.member, 0
        if not self.may_leap:
            batch.max_steps = 1
        elif batch.batch_id == DUMMY_ID:
            paces = member.paces
        needs = Prerequisites(member.replica_id)
        member.hold(batch, start_ns, needs)
        if needs.start(batch, self.tiers, member.group, member.actor, self.life, paces):
            return member
        member.books.watch.began(batch, member.wave_wait_ns)
        pace = member.books.pace
        return member.ask() if pace.latency.foreign else member.begin(0)


@final
class OntoStages:
    """The batch goes onto the stages of the pipeline, when it has all that it needs."""

    staged: Staged
    tiers: TierTraffic | None
    group: GroupWave | None
    actor: ReplicaActorPort
    life: int

    __slots__ = ("actor", "group", "life", "staged", "tiers")

    def __init__(
        self,
        staged: Staged,
        tiers: TierTraffic | None,
        group: GroupWave | None,
        actor: ReplicaActorPort,
        life: int,
    ) -> None:
        self.staged = staged
        self.tiers = tiers
        self.group = group
        self.actor = actor
        self.life = life

    def launch(self, batch: Batch, start_ns: int, waited_ns: int) -> Flight:
        """Put the batch onto the stages; if it lacks something, hold it."""
        staged = self.staged
        if staged.held is not batch:
            needs = Prerequisites(staged.books.replica_id)
            staged.hold(batch, needs)
            if needs.start(batch, self.tiers, self.group, self.actor, self.life):
                return staged
        if not staged.books.pace.latency.foreign:
            return staged.launch()
        staged.books.out.append(Measure(batch.shape))

        def begin(cost_ns: int) -> Flight:
            return staged.launch()

        return Measured(staged.books, begin, staged)


@final
class FirstUses:
    """The process is fresh: its next iterations are single ones, and take longer."""

    books: Books
    then: Launcher
    over: Callable[[], None]
    """Called when the process is fresh no more."""

    __slots__ = ("books", "over", "then")

    def __init__(self, books: Books, then: Launcher, over: Callable[[], None]) -> None:
        self.books = books
        self.then = then
        self.over = over

    def launch(self, batch: Batch, start_ns: int, waited_ns: int) -> Flight:
        """The batch is one iteration, whatever is certain to follow it."""
        if self.books.pace.first_uses:
            batch.max_steps = 1
        found = self.then.launch(batch, start_ns, waited_ns)
        if not self.books.pace.first_uses:
            self.over()
        return found
