"""Batches on the stages of a pipeline: several are in flight and leave the last one in order.

While it is certain that they follow each other in turn, they do so as one leap
(`emu/scheduling/rotation.py`): its ends go into the books at the next look, and whatever happens
to the replica ends it, with the batches on the stages that stepping would have there.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

from emu.kernel.clock import NOW, PARK
from emu.replica.books import DUMMY_ID, Books
from emu.replica.events import LOOK
from emu.replica.flight.base import Flight, Sort, until, words_of
from emu.replica.mailbox import Mailbox
from emu.replica.prerequisites import Prerequisites
from emu.scheduling.base import Batch
from emu.scheduling.pipeline import Pipeline, StageSpan, discount_bubbles
from emu.scheduling.rotation import Rotation

_ROUNDS_MIN: Final = 8
_ROUNDS_MAX: Final = 64
"""Batches of each turn that are planned at once: as many as the last rotation had, then twice."""


@final
class Staged(Flight):
    """What is in flight on a pipeline: one flight for all of a replica's life."""

    books: Books
    mailbox: Mailbox
    """The replica's: what waits there is to be looked at."""
    pipeline: Pipeline
    on_stages: deque[tuple[list[StageSpan], Batch]]
    """Batches in flight, in order, with where each is when."""
    held: Batch | None
    """Formed, but not on the stages before what it needs is here."""
    prerequisites: Prerequisites
    """Of that batch."""
    wave_wait_ns: int
    """What that batch waits for other members of its group inside its layers."""
    rotation: Rotation | None
    """Batches that follow each other in turn, while that is certain."""
    may_rotate: bool
    """Batches that follow each other need nothing but the scheduler and the backend."""
    is_paused: bool
    _rounds_seen: int
    """Batches of each turn in the last rotation: a guess for the next."""

    __slots__ = (
        "_rounds_seen",
        "books",
        "held",
        "is_paused",
        "mailbox",
        "may_rotate",
        "on_stages",
        "pipeline",
        "prerequisites",
        "rotation",
        "wave_wait_ns",
    )

    def __init__(self, books: Books, stages: int, mailbox: Mailbox) -> None:
        self.is_open = True
        self.is_joint = self.is_leap = self.is_cut = False
        self.may_rotate = self.is_paused = False
        self.due_ns = PARK
        self.books = books
        self.mailbox = mailbox
        self.pipeline = Pipeline(stages)
        self.on_stages = deque()
        self.held = None
        self.prerequisites = Prerequisites(books.replica_id)
        self.wave_wait_ns = 0
        self.rotation = None
        self._rounds_seen = 0

    @property
    def sort(self) -> Sort:
        """Which flight it is."""
        return Sort.STAGED

    def hold(self, batch: Batch, prerequisites: Prerequisites) -> None:
        """The batch is formed, and waits for what it needs."""
        self.held, self.prerequisites = batch, prerequisites
        self.wave_wait_ns = 0

    @property
    def is_holding(self) -> bool:
        """A batch that is formed lacks something."""
        return self.held is not None and self.prerequisites.left > 0

    def launch(self) -> Flight:
        """The held batch enters the pipeline: stages are FIFO and costs known, so its end is."""
        batch, books = self.held, self.books
        assert batch is not None
        self.held = None
        books.watch.began(batch, self.wave_wait_ns)
        costs_ns = books.pace.stage_costs_ns(batch.shape, self.wave_wait_ns)
        self.on_stages.append((self.pipeline.enter(books.clock.now_ns, costs_ns), batch))
        return self

    def wait(self) -> Flight:
        """Wait until the oldest batch leaves the last stage, or something new arrives."""
        self.is_open = False
        self.due_ns = PARK
        if self.on_stages:
            books = self.books
            self.due_ns = self.on_stages[0][0][-1].end_ns
            may_rotate = self.may_rotate and not (
                self.is_paused or books.out or self.mailbox.posted
            )
            if may_rotate and self.due_ns > books.clock.now_ns:
                self._rotate()
        return self

    def end(self) -> Flight:
        """Batches that have left the last stage by now are complete; then look at everything."""
        now_ns, rotation = self.books.clock.now_ns, self.rotation
        if rotation is not None:
            goes_on = now_ns == rotation.due_ns and rotation.planned < rotation.ends_max
            if goes_on and not (self.mailbox.posted or self.is_paused):
                self._plan(rotation)
                return self
            self.unroll()
            self.is_cut = False
        self.is_open = True
        while self.on_stages and self.on_stages[0][0][-1].end_ns <= now_ns:
            spans, batch = self.on_stages.popleft()
            self._complete(spans, batch, -1)
        return self

    def _complete(self, spans: list[StageSpan], batch: Batch, end_ns: int) -> None:
        discount_bubbles(batch, spans)
        if batch.batch_id == DUMMY_ID:
            self.books.keep_pace(batch, spans[0].start_ns, spans)
            return
        gap_ns = spans[-1].end_ns - batch.formed_ns  # it may have waited for the first stage
        self.books.complete(batch, 1, spans[0].start_ns, None, gap_ns, spans, end_ns)

    def align(self, now_ns: int) -> int:
        """At once."""
        return NOW

    def holds_batch(self) -> bool:
        """On the stages, or about to be."""
        return bool(self.on_stages) or self.held is not None

    def batches(self) -> list[Batch]:
        """On the stages, and the one that is held."""
        found = [batch for _, batch in self.on_stages]
        return found if self.held is None else [*found, self.held]

    def tells(self, now_ns: int) -> str:
        """Which batches are on the stages, which one is held, and whether they rotate."""
        rotation, stages = self.rotation, len(self.pipeline.free_ns)
        if rotation is not None:
            ended, count = rotation.ended_by(self.books.past(0)), len(rotation.turns)
            return (
                f"{count} batches in turn on {stages} stages, batch {ended} of {rotation.planned}"
            )
        words = f"nothing is on its {stages} stages"
        if self.on_stages:
            spans, first = self.on_stages[0]
            end = "stands still" if self.is_paused else until(spans[-1].end_ns, now_ns)
            words = f"{len(self.on_stages)} batches on {stages} stages, {words_of(first)} {end}"
        if self.held is not None:
            words += f"; {words_of(self.held)} waits, {self.prerequisites.left} to come"
        return words

    def settle(self) -> int:
        """Bring the books of a rotation up to now."""
        rotation = self.rotation
        if rotation is not None:
            books = self.books
            self.advance(rotation, rotation.ended_by(books.past(0)))
        return 0

    def met(self, wait_ns: int) -> int:
        """With the last thing awaited it enters the pipeline at the next look."""
        if wait_ns >= 0:
            self.wave_wait_ns = wait_ns
        self.prerequisites.left -= 1
        return LOOK if self.prerequisites.left == 0 else 0

    def lose_recalls(self, tier: int) -> tuple[int, int]:
        """It computes what it has waited for in vain."""
        return self.prerequisites.lose_recalls(tier), LOOK

    def stale_tiers(self) -> list[int]:
        """Tiers that have lost what is still read from them."""
        return self.prerequisites.stale_recalls()

    def pause(self) -> Flight:
        """No batch is formed; those that have left by now are complete."""
        self.is_paused = True
        return self

    def resume(self, since_ns: int) -> None:
        """Everything on the stages ends so much later."""
        self.is_paused = False
        longer_ns = self.books.clock.now_ns - since_ns
        for spans, _ in self.on_stages:
            for index, span in enumerate(spans):
                if span.end_ns > since_ns:
                    begun = span.start_ns < since_ns
                    start_ns = span.start_ns + (0 if begun else longer_ns)
                    spans[index] = StageSpan(span.stage, start_ns, span.end_ns + longer_ns)
        free_ns = self.pipeline.free_ns
        free_ns[:] = [at_ns + longer_ns if at_ns > since_ns else at_ns for at_ns in free_ns]

    def lose(self) -> Flight:
        """The stages are empty, and what was awaited is not wanted any more."""
        self.on_stages.clear()
        self.prerequisites.drop()
        self.held = None
        self.pipeline.reset(self.books.clock.now_ns)
        self.is_open, self.is_paused = True, False
        self.due_ns = PARK
        return self

    def _rotate(self) -> None:
        """Plan the batches that are certain to follow, if there are any."""
        books = self.books
        rotation = books.scheduler.rotation([batch for _, batch in self.on_stages])
        if rotation is not None and rotation.start(
            [[span.end_ns for span in spans] for spans, _ in self.on_stages]
        ):
            self.rotation, self.is_joint, self.is_leap = rotation, True, True
            self._plan(rotation)

    def _plan(self, rotation: Rotation) -> None:
        """Plan the next piece: it is due when that is over."""
        pace = self.books.pace
        rounds = rotation.planned // len(rotation.turns) or self._rounds_seen
        rounds = min(max(rounds, _ROUNDS_MIN), _ROUNDS_MAX)
        jitter = pace.jitter
        vary = None if jitter is None else jitter.spread
        before = 0 if jitter is None else jitter.counted
        lines_of = pace.lines_of
        if rotation.planned == 0 and lines_of is not None:
            rotation.follow(lines_of)
        rotation.plan(rounds, self.pipeline.free_ns, pace.stage_run_ns, vary, before)
        self.due_ns = rotation.due_ns

    def advance(self, rotation: Rotation, ended: int) -> None:
        """Enter the first `ended` ends of a rotation into the books."""
        begin, count = rotation.done, len(rotation.turns)
        if ended <= begin:
            return
        rotation.done = ended
        in_flight = list(self.on_stages)[begin : min(ended, count)]
        told, stream = begin, self.books.stream
        for index, (spans, batch) in enumerate(in_flight, begin):
            if rotation.turns[index].is_plain:
                continue
            if stream is not None:
                sizes = [len(turn.members) for turn in rotation.turns]
                stream.turns(rotation.ends, told, index, sizes)
            told = index + 1
            self._complete(spans, batch, spans[-1].end_ns)
        self.books.end_turns(rotation, begin, ended, told, in_flight)
        busy_ns = self.pipeline.busy_ns
        for stage, costs_ns in enumerate(rotation.costs):
            busy_ns[stage] += sum(costs_ns[begin:ended])

    def unroll(self) -> None:
        """The rotation is over now: what is in flight is on the stages, as stepping has it."""
        self.settle()
        rotation, on_stages, jitter = self.rotation, self.on_stages, self.books.pace.jitter
        assert rotation is not None
        self.rotation, self.is_joint, self.is_leap = None, False, False
        done, count = rotation.done, len(rotation.turns)
        self._rounds_seen = done // count + 1
        if jitter is not None:
            jitter.counted += done
        if done:
            batches = [on_stages.popleft()[1] for _ in range(min(done, count))]
            batches = self.books.scheduler.resume(rotation, batches)
            for index, batch in enumerate(batches, done + count - len(batches)):
                on_stages.append((_spans(rotation, index), batch))
            leaves = [leaves[done + count - 1] for leaves in rotation.leaves]
            self.pipeline.free_ns[:] = leaves
        self.due_ns = on_stages[0][0][-1].end_ns
        self.is_cut = True


def _spans(rotation: Rotation, batch: int) -> list[StageSpan]:
    """Where a batch that was formed again is when."""
    spans, formed = [], batch - len(rotation.turns)
    for stage, leaves in enumerate(rotation.leaves):
        end_ns = leaves[batch]
        spans.append(StageSpan(stage, end_ns - rotation.costs[stage][formed], end_ns))
    return spans
