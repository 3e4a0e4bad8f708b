"""A leap: equal decode iterations that are certain to follow each other, as one flight.

They may follow the end of a batch's prompts (the run-on). A change in the middle cuts the leap at
the end of the iteration in flight, so leaping and stepping give the same results.
"""

from __future__ import annotations

from typing import final

from emu.kernel.natives import bisect_left, bisect_right
from emu.latency.ends import Ends
from emu.replica.books import Books, longest_of
from emu.replica.flight.base import IDLE, Flight, Sort, until, words_of
from emu.replica.flight.step import Step
from emu.scheduling.base import Batch


@final
class Run(Flight):
    """A leap of one batch."""

    books: Books
    batch: Batch
    start_ns: int
    ends: Ends
    """When each of its iterations ends, from `start_ns` on."""
    then: Flight
    """What is in flight when it is complete."""
    _past_ns: int
    """So much of it was past when it was last asked for what had ended."""
    _done: int
    """Iterations that had ended then: time goes on, so no fewer have now."""

    __slots__ = ("_done", "_past_ns", "batch", "books", "ends", "start_ns", "then")

    def __init__(
        self, books: Books, batch: Batch, start_ns: int, ends: Ends, then: Flight = IDLE
    ) -> None:
        self.is_open = self.is_joint = self.is_cut = False
        self.is_leap = True
        self.due_ns = start_ns + ends[-1]
        self.books = books
        self.batch = batch
        self.start_ns = start_ns
        self.ends = ends
        self.then = then
        self._past_ns = self._done = 0

    @property
    def sort(self) -> Sort:
        """Which flight it is."""
        return Sort.RUN

    def end(self) -> Flight:
        """Its iterations up to now are complete."""
        books, batch, ends, start_ns = self.books, self.batch, self.ends, self.start_ns
        now_ns = books.clock.now_ns
        longest_ns = now_ns - start_ns
        if now_ns != self.due_ns:  # it has been cut
            ends = ends[: bisect_right(ends, longest_ns)]
        if len(ends) > 1:
            before_ns = ends[-2]
            if batch.run_on is None:  # else it has been known since the beginning
                batch.first_end_ns = start_ns + ends[0]
            batch.last_start_ns = start_ns + before_ns
            if books.pace.is_monotone:
                longest_ns -= before_ns
            else:
                longest_ns = longest_of(ends, batch)
        books.complete(batch, len(ends), start_ns, ends, longest_ns)
        return self.then

    def settle(self) -> int:
        """Bring the books up to now; iterations that have ended."""
        batch, books = self.batch, self.books
        clock = books.clock  # as `steps_ended`, without a call: every reader asks
        past_ns = clock.now_ns - self.start_ns + (clock.priority_reached > books.priority)
        if past_ns != self._past_ns:
            self._past_ns = past_ns
            self._done = bisect_left(self.ends, past_ns, self._done)
        done = self._done
        steps = done + 1 if done < batch.max_steps else done
        if steps > batch.steps_settled:
            books.settle_steps(batch, steps, self.start_ns, self.ends)
        return done

    def steps_ended(self) -> int:
        """Iterations that have ended by now: `Books.past`, without a call."""
        books = self.books
        clock = books.clock
        past_ns = clock.now_ns - self.start_ns + (clock.priority_reached > books.priority)
        if past_ns != self._past_ns:  # several readers often ask at one instant
            self._past_ns = past_ns
            self._done = bisect_left(self.ends, past_ns, self._done)
        return self._done

    def boundary_ns(self, done: int) -> int:
        """When the iteration in flight ends."""
        return self.due_ns if done >= len(self.ends) else self.start_ns + self.ends[done]

    def tokens_settled(self, done: int) -> tuple[int, int]:
        """(prefill, decode) tokens of iterations that have ended."""
        batch = self.batch
        run_on = batch.run_on
        if done == 0 or run_on is None:
            return 0, done * batch.shape.decode_count
        opening = run_on.opening
        assert opening is not None
        decode = opening.decode_tokens + (done - 1) * run_on.shape.decode_count
        return opening.prefill_tokens, decode

    def align(self, now_ns: int) -> int:
        """At the end of the iteration in flight."""
        done = self.steps_ended()
        return self.due_ns if done >= len(self.ends) else self.start_ns + self.ends[done]

    def tells(self, now_ns: int) -> str:
        """Which of its iterations is in flight, and when the last one ends."""
        count = len(self.ends)
        at = min(self.steps_ended() + 1, count)
        words = f"{words_of(self.batch)}: iteration {at} of {count}"
        return f"{words}, the last {until(self.due_ns, now_ns)}"

    def puts_off(self, done: int) -> bool:
        """It takes the steps that it takes before it would see what has just come."""
        started_ns = self.start_ns + (self.ends[done - 1] if done else 0)
        steps = self.books.scheduler.sees_in(self.batch, done + 1, started_ns)
        if steps == 0:
            return False
        self._cut(steps)
        return True

    def still_holds(self, done: int) -> bool:
        """Ask the scheduler, whose settled books have changed."""
        batch = self.batch
        batch.last_start_ns = self.start_ns + (self.ends[done - 1] if done else 0)
        if not self.books.scheduler.leap_holds(batch):
            return False
        self._cut(batch.max_steps)  # it may hold, but not so long
        return True

    def _cut(self, steps: int) -> None:
        """It takes so many steps and no more."""
        if steps < len(self.ends):
            self.ends = self.ends[:steps]
            self.due_ns = self.start_ns + self.ends[-1]
            self.is_cut = True

    def pause(self) -> Flight:
        """What is left is the iteration in flight."""
        return self._alone().pause()

    def lose(self) -> Flight:
        """The iteration in flight ran for nothing."""
        return self._alone().lose()

    def _alone(self) -> Step:
        """Complete the iterations that have ended: the one in flight is alone then."""
        batch, start_ns, ends = self.batch, self.start_ns, self.ends
        done = self.settle()
        end_ns = start_ns + ends[done]
        if done:
            self.books.end_leap_part(batch, start_ns, ends[:done])
            start_ns += ends[done - 1]
        batch.max_steps = 1
        return Step(self.books, batch, start_ns, end_ns)
