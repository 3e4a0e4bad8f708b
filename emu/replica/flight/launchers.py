"""What puts a batch that is formed into flight, and what it passes before that.

Launchers are put together from the outside in: first uses of a fresh process, then stages, a group
or lower tiers, then a backend outside simulated time, then the iteration itself. A replica chooses
anew when its state or what looks on changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from emu.replica.actions import Measure
from emu.replica.books import DUMMY_ID, Books
from emu.replica.flight.awaiting import Awaiting, Launcher
from emu.replica.flight.base import IDLE, Flight
from emu.replica.flight.measured import Measured
from emu.replica.flight.member import Member
from emu.replica.flight.run import Run
from emu.replica.flight.step import Step
from emu.replica.ports import ReplicaActorPort
from emu.replica.prerequisites import Prerequisites
from emu.replica.tier_traffic import TierTraffic
from emu.scheduling.base import Batch


@final
class Single:
    """The iteration, or leap, itself."""

    books: Books
    runs_on: bool
    """A batch that ends prompts may be followed by its decodes in one flight."""
    then: Flight
    """What is in flight when it is complete."""

    __slots__ = ("books", "runs_on", "then")

    def __init__(self, books: Books, then: Flight, *, runs_on: bool) -> None:
        self.books = books
        self.runs_on = runs_on
        self.then = then

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
            ends = pace.run_ends(shape, batch.max_steps, -1, number)
            return Run(books, batch, start_ns, ends, self.then)
        cost_ns = pace.varied_ns(measured_ns or pace.latency.iteration_ns(shape), number)
        if pace.is_fresh:
            cost_ns += pace.take_first_use(shape)
        elif self.runs_on and batch.chunks:
            batch.first_end_ns = start_ns + cost_ns
            run_on = books.scheduler.run_on(batch)
            if run_on is not None:
                ends = pace.run_ends(run_on.shape, batch.max_steps - 1, cost_ns, number)
                return Run(books, batch, start_ns, ends, self.then)
        return Step(books, batch, start_ns, books.clock.now_ns + cost_ns, self.then, waited_ns)


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
        if self.books.pace.is_fresh:
            batch.max_steps = 1
        found = self.then.launch(batch, start_ns, waited_ns)
        if not self.books.pace.is_fresh:
            self.over()
        return found
