"""A member of a data-parallel group: its batch waits for a wave, runs in it, and may go on in more.

While a member's batches are certain, its group promises it waves ahead (`wave.py: Part`); any event
ends the promise, and the member has the single batch in flight that stepping would have.
"""

from __future__ import annotations

from typing import Final, Protocol, final

from emu.kernel.clock import PARK
from emu.latency.ends import Ends
from emu.replica.actions import Measure
from emu.replica.books import DUMMY_ID, Books
from emu.replica.events import INTERRUPT
from emu.replica.flight.base import Flight, Sort, until, words_of
from emu.replica.flight.measured import Measured
from emu.replica.flight.run import Run
from emu.replica.flight.step import Step
from emu.replica.mailbox import Mailbox
from emu.replica.ports import GroupWave, ReplicaActorPort
from emu.replica.prerequisites import Prerequisites
from emu.scheduling.base import Batch

STEPS_SURE: Final = 1 << 30
"""Of a promise without an end of its own."""
OVER: Final = -5
"""`Promise.go_on`: the batch is complete."""


class Promise(Protocol):
    """Waves that are certain to follow each other, as far as they concern one member."""

    def begin(self) -> int:
        """The batch that was formed for it runs: when it ends, as far as is known."""
        ...

    def go_on(self) -> int:
        """What is known of the batch has ended: when more will have; `OVER` if it is complete."""
        ...

    def settle(self) -> None:
        """Bring the books up to now."""
        ...

    def unroll(self) -> None:
        """It is over now: what is in flight is there as stepping has it."""
        ...


@final
class Member(Flight):
    """What a member of a group is in the middle of: one flight for all of its life."""

    books: Books
    group: GroupWave
    actor: ReplicaActorPort
    mailbox: Mailbox
    """The replica's: what waits there ends a promise."""
    life: int
    """Of its replica: grows at each crash."""
    serves: bool
    """Its state is one that takes part in waves."""
    is_serving: bool
    """It does one iteration after another, and nothing else."""
    batch: Batch | None
    """In flight, or waiting for its wave; None = the member rests."""
    start_ns: int
    """When that batch was formed; of one that keeps pace, when its wave left."""
    end_ns: int
    """When it ends, as far as is known."""
    waited_ns: int
    """Of the time since its start, what it waited before it ran."""
    wave_wait_ns: int
    """What it waits for other members inside its layers."""
    is_waiting: bool
    """It is formed and does not run yet."""
    run: Run | None
    """Its steps, where several are promised and have begun."""
    prerequisites: Prerequisites
    """What it waits for: its wave, and KV from lower tiers."""
    promise: Promise | None
    is_paused: bool
    is_resumed: bool
    """A pause has just ended: the rest of its iteration is to be waited for."""

    __slots__ = (
        "actor",
        "batch",
        "books",
        "end_ns",
        "group",
        "is_paused",
        "is_resumed",
        "is_serving",
        "is_waiting",
        "life",
        "mailbox",
        "prerequisites",
        "promise",
        "run",
        "serves",
        "start_ns",
        "waited_ns",
        "wave_wait_ns",
    )

    def __init__(
        self, books: Books, group: GroupWave, actor: ReplicaActorPort, mailbox: Mailbox
    ) -> None:
        self.is_open = True
        self.is_joint = self.is_leap = self.is_cut = False
        self.due_ns = PARK
        self.books = books
        self.group = group
        self.actor = actor
        self.mailbox = mailbox
        self.life = 0
        self.serves = self.is_serving = False
        self.batch = None
        self.start_ns = self.end_ns = 0
        self.waited_ns = self.wave_wait_ns = 0
        self.is_waiting = self.is_paused = self.is_resumed = False
        self.run = None
        self.prerequisites = Prerequisites(books.replica_id)
        self.promise = None

    @property
    def sort(self) -> Sort:
        """Which flight it is."""
        return Sort.MEMBER

    @property
    def replica_id(self) -> int:
        """The id of its replica."""
        return self.books.replica_id

    @property
    def paces(self) -> int:
        """For so many waves it surely keeps pace with batches of one token, if nothing comes.

        What waits without a batch may have to fail as soon as the member rests.
        """
        books = self.books
        is_sure = self.is_serving and not (books.watch.is_metered or books.pace.is_fresh)
        if books.scheduler.waiting_count or books.scheduler.ledger.failed:
            return 1
        return STEPS_SURE if is_sure else 1

    def hold(self, batch: Batch, start_ns: int, prerequisites: Prerequisites) -> None:
        """The batch is formed, and waits for what it needs."""
        self.batch, self.prerequisites = batch, prerequisites
        self.start_ns = self.end_ns = start_ns
        self.waited_ns = self.wave_wait_ns = 0
        self.set_run(None)
        self.wait()

    def wait(self) -> None:
        """Its batch, or the next step of it, waits for the wave."""
        self.is_open, self.is_waiting = False, True
        self.due_ns = PARK

    def set_promise(self, promise: Promise | None) -> None:
        """Its group promises it waves, or does so no more."""
        self.promise = promise
        self.is_joint = promise is not None
        self.is_leap = promise is not None or self.run is not None

    def set_run(self, run: Run | None) -> None:
        """Its steps, where several are promised and have begun."""
        self.run = run
        self.is_leap = run is not None or self.promise is not None

    def begin(self, measured_ns: int) -> Flight:
        """The batch runs, and takes what a backend outside simulated time says, or as usual (0)."""
        self.is_waiting = False
        if self.promise is not None:
            if not self.mailbox.posted:
                self.due_ns = self.promise.begin()
                return self
            self.promise.unroll()
        batch, books = self.batch, self.books
        assert batch is not None
        pace, number = books.pace, books.counters.iterations
        cost_ns = pace.varied_ns(measured_ns or pace.latency.iteration_ns(batch.shape), number)
        cost_ns += pace.take_first_use(batch.shape)
        self.end_ns = self.due_ns = books.clock.now_ns + cost_ns + self.wave_wait_ns
        return self

    def ask(self) -> Flight:
        """A backend outside simulated time is asked what the batch takes; meanwhile it waits."""
        batch = self.batch
        assert batch is not None
        self.books.out.append(Measure(batch.shape))
        return Measured(self.books, self.begin, self, self.start_ns, self.waited_ns)

    def fly(self, ends: Ends | None, end_ns: int) -> None:
        """Its steps end so (None: it keeps pace with single ones), the last known at `end_ns`."""
        self.is_open = self.is_waiting = False
        self.end_ns = self.due_ns = end_ns
        batch = self.batch
        assert batch is not None
        self.set_run(None if ends is None else Run(self.books, batch, self.start_ns, ends))

    def end(self) -> Flight:
        """Its wave has left, its batch has ended, or something has interrupted either."""
        if self.is_waiting:
            return self._look()
        if self.is_paused or self.is_resumed:
            self.is_resumed = False  # the rest of it is to be waited for
            return self
        if self.promise is not None:
            due_ns = self.promise.go_on()
            if due_ns != OVER:
                self.due_ns = due_ns
                return self
        batch, run, books = self.batch, self.run, self.books
        assert batch is not None
        waited_ns = self.waited_ns
        self.rest()
        books.counters.busy_ns -= waited_ns
        if run is not None:
            run.end()
        elif batch.batch_id == DUMMY_ID:
            books.keep_pace(batch, self.start_ns)
        else:
            Step(books, batch, self.start_ns, self.end_ns).end()
        return self

    def _look(self) -> Flight:
        """The batch runs from now on, if it has all that it needs and its process runs."""
        if self.prerequisites.left or self.is_paused:
            return self
        books, batch = self.books, self.batch
        assert batch is not None
        self.waited_ns = books.clock.now_ns - self.start_ns
        books.watch.began(batch, self.wave_wait_ns)
        return self.ask() if books.pace.latency.foreign else self.begin(0)

    def rest(self) -> None:
        """Nothing of it is in flight."""
        self.is_open, self.is_waiting = True, False
        self.due_ns = PARK
        self.batch = None
        self.set_run(None)
        self.waited_ns = 0

    def settle(self) -> int:
        """Bring the books up to now; steps of its batch that have ended."""
        if self.promise is not None:
            self.promise.settle()
        return 0 if self.run is None else self.run.settle()

    def steps_ended(self) -> int:
        """Steps of its batch that have ended by now."""
        return 0 if self.run is None else self.run.steps_ended()

    def boundary_ns(self, done: int) -> int:
        """When its step ends, as far as is known."""
        if self.batch is None:
            return -1
        return self.end_ns if self.run is None else self.run.boundary_ns(done)

    def tokens_settled(self, done: int) -> tuple[int, int]:
        """(prefill, decode) tokens of steps of its batch that have ended."""
        return (0, 0) if self.run is None else self.run.tokens_settled(done)

    def align(self, now_ns: int) -> int:
        """When its step ends, and no later: a promise is over."""
        if self.promise is not None:
            self.promise.unroll()
        return super().align(now_ns)

    def holds_batch(self) -> bool:
        """In flight, or waiting for its wave."""
        return self.batch is not None

    def tells(self, now_ns: int) -> str:
        """Whether its batch waits for its wave or runs in it, and how many waves are promised."""
        batch, run = self.batch, self.run
        if batch is None:
            return "nothing is in flight in its group's waves"
        words = "a batch that keeps pace" if batch.batch_id == DUMMY_ID else words_of(batch)
        if self.is_waiting:
            return f"{words} waits for its wave or KV, {self.prerequisites.left} to come"
        step = "its wave"
        if run is not None:
            count = len(run.ends)
            step = f"wave {min(run.steps_ended() + 1, count)} of {count}"
        end = "stands still" if self.is_paused else until(self.end_ns, now_ns)
        return f"{words}: {step} {end}"

    def unroll(self) -> None:
        """Something happens: no wave is promised any more."""
        if self.promise is not None:
            self.promise.unroll()

    def met(self, wait_ns: int) -> int:
        """With the last thing awaited the batch begins at once."""
        if wait_ns >= 0:
            self.wave_wait_ns = wait_ns
        self.prerequisites.left -= 1
        return INTERRUPT if self.prerequisites.left == 0 else 0

    def lose_recalls(self, tier: int) -> tuple[int, int]:
        """The batch computes what it has waited for in vain."""
        tokens = self.prerequisites.lose_recalls(tier)
        return tokens, INTERRUPT if tokens and self.prerequisites.left == 0 else 0

    def stale_tiers(self) -> list[int]:
        """Tiers that have lost what is still read from them."""
        return self.prerequisites.stale_recalls()

    def pause(self) -> Flight:
        """What is left of its batch runs when the process goes on; what waits does not begin."""
        self.is_paused, self.is_resumed = True, False
        self.due_ns = PARK
        return self

    def resume(self, since_ns: int) -> None:
        """Its batch ends so much later."""
        self.is_paused = False
        if self.batch is not None:
            self.end_ns += self.books.clock.now_ns - since_ns
            if not self.is_waiting:
                self.is_resumed = True
                self.due_ns = self.end_ns

    def lose(self) -> Flight:
        """Its batch ran for nothing, and what was awaited is not wanted any more."""
        if self.batch is not None and not self.is_paused and not self.is_waiting:
            books = self.books
            books.counters.busy_ns += books.clock.now_ns - self.start_ns - self.waited_ns
        self.life += 1
        self.prerequisites.drop()
        self.set_promise(None)
        self.rest()
        self.is_paused = self.is_resumed = False
        return self
