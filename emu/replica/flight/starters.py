"""What begins the next thing of a replica that forms batches: chosen once, not asked each time.

`Plain` is a replica alone with its scheduler and a backend inside simulated time: one iteration, or
leap, after the other. Everything else is `Composed`: it forms the batch with what looks on, then
launchers put it into flight. They are put together from the outside in: first uses of a fresh
process, then stages, a group or lower tiers, then a backend outside simulated time, then the
iteration itself. A replica chooses anew when its state or what looks on changes.
"""

from __future__ import annotations

from typing import final

from emu.replica.actions import FreeCapacity
from emu.replica.books import DUMMY_ID, Books
from emu.replica.flight.awaiting import Launcher
from emu.replica.flight.base import BETWEEN, Flight
from emu.replica.flight.member import Member
from emu.replica.flight.run import Run
from emu.replica.flight.staged import Staged
from emu.replica.flight.step import Step
from emu.replica.tier_traffic import TierTraffic
from emu.scheduling.base import Batch


class Starter:
    """Base of what begins the next thing."""

    __slots__ = ()

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
        self.books = books
        self.frees = frees
        self.runs_on = runs_on

    def start(self) -> Flight | None:
        """Form the next batch and begin it."""
        books = self.books
        counters, scheduler, now_ns = books.counters, books.scheduler, books.clock.now_ns
        pool = books.shedding
        free = 0 if pool is None else pool.blocks_free
        batch = scheduler.schedule(now_ns)
        if not books.watch.is_touched:
            books.watch.touch()
        if batch is None:
            counters.begin_rest(now_ns)
            return None
        if self.frees and (batch.preempted or (pool is not None and pool.blocks_free > free)):
            books.out.append(FreeCapacity())  # KV that waits elsewhere may fit now
        if counters.rest_since_ns >= 0:
            counters.end_rest(now_ns)
        pace, shape, steps = books.pace, batch.shape, batch.max_steps
        if steps > 1:
            decode_ends = pace.decode_ends
            if decode_ends is not None:
                return Run(books, batch, now_ns, decode_ends(shape, steps, -1), BETWEEN)
            ends = pace.run_ends(shape, steps, -1, counters.iterations)
            return Run(books, batch, now_ns, ends, BETWEEN)
        cost_ns = pace.latency.iteration_ns(shape)
        if not pace.is_even:
            cost_ns = pace.varied_ns(cost_ns, counters.iterations)
        if batch.chunks and self.runs_on:
            batch.first_end_ns = now_ns + cost_ns
            run_on = scheduler.run_on(batch)
            if run_on is not None:
                steps = batch.max_steps - 1
                ends = pace.run_ends(run_on.shape, steps, cost_ns, counters.iterations)
                return Run(books, batch, now_ns, ends, BETWEEN)
        return Step(books, batch, now_ns, now_ns + cost_ns, BETWEEN)


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
    ) -> None:
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
        pool = books.shedding
        free = 0 if pool is None else pool.blocks_free
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
        if self.frees and (batch.preempted or (pool is not None and pool.blocks_free > free)):
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
