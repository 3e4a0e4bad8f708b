"""The decode cohort: requests that advance together, one token each at every step.

Owns: the shared step counter and, for each member, what follows from it. A member stores one
constant, `offset` = reached tokens - steps completed; while it stays, its token counts, blocks
and the step at which it ends are functions of the counter. A step therefore costs the same for
one member as for a thousand. Does not know the pool, the waiting queue or the clock.

Positions of the counter: `step` counts the steps whose blocks have been taken, the one in flight
included; `in_flight` is 1 while one is. Then, for a member,

    computed = step + offset - 1            reached = step - in_flight + offset

because a member that is scheduled at its reached length r computes the token r - 1 -> r.

A member takes a block in the step that it starts with reached - 1 divisible by the block size,
that is when step = 1 - offset (mod block size). Counting members by that residue gives the blocks
that any number of steps needs without looking at the members.

The longest gap between tokens while a member was here is a suffix maximum over steps: a stack of
(last step, longest duration), durations falling, found by bisection when the member leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from emu.kernel.natives import bisect_left, heappop, heappush, insort
from emu.latency.base import BatchShape
from emu.request import Request


@final
class RunningRequest:
    """An admitted request, and where it stands in the scheduler."""

    request: Request
    admission: int
    """Order of admission; larger = more recent."""
    prefilling: bool
    """Its prompt (or recomputation) is not complete."""
    is_alive: bool
    """False once it has left; batches in flight that still name it drop its result."""
    in_cohort: bool
    pending: int
    """Tokens scheduled in batches in flight (outside the cohort)."""
    offset: int
    """In the cohort: reached tokens less the cohort's steps so far."""
    finish_step: int
    """In the cohort: the step that brings its last token."""
    joined_step: int
    busy_since_ns: int
    """The running set's time in batches when it was admitted."""
    has_keys: bool
    """Blocks that it fills can be found by others."""
    drafts: int
    """Drafts that its next step verifies."""
    indexed_tokens: int
    """Tokens up to which its full blocks can be found."""
    optimistic_tokens: int
    """Computed tokens had all drafts of its last step been accepted."""
    junction_tokens: int
    """Where its prompt stops, so that others find its states there (`Hit.junction_tokens`)."""

    __slots__ = (
        "admission",
        "busy_since_ns",
        "drafts",
        "finish_step",
        "has_keys",
        "in_cohort",
        "indexed_tokens",
        "is_alive",
        "joined_step",
        "junction_tokens",
        "offset",
        "optimistic_tokens",
        "pending",
        "prefilling",
        "request",
    )

    def __init__(self, request: Request, admission: int, busy_since_ns: int = 0) -> None:
        self.request = request
        self.admission = admission
        self.prefilling = True
        self.is_alive = True
        self.in_cohort = False
        self.pending = 0
        self.offset = 0
        self.finish_step = 0
        self.joined_step = 0
        self.busy_since_ns = busy_since_ns
        self.has_keys = False
        self.drafts = 0
        self.indexed_tokens = 0
        self.optimistic_tokens = 0
        self.junction_tokens = 0


class Cohort:
    """All plain decodes of a replica."""

    def __init__(
        self,
        block_size: int,
        *,
        track_members: bool = False,
        counts_blocks: bool = False,
        chunk_tokens: int = 0,
    ) -> None:
        """`track_members`: keep those whose blocks others can find, for pools with identities.
        `counts_blocks`: members hold exactly the blocks of their computed tokens, and it is here
        that `Request.kv_blocks` is worked out. `chunk_tokens`: length of a tier's chunk, if
        there are tiers."""
        self.block_size = block_size
        self.track_members = track_members
        self.counts_blocks = counts_blocks
        self.step = 0
        self.in_flight = 0
        self.count = 0
        self.changes = 0  # how often a member has joined or left
        self.offset_sum = 0
        self.prompt_sum = 0
        self.newest_admission = -1
        """No member was admitted later (an upper bound: leaving does not lower it)."""
        self._offsets: list[int] = []
        self._takers = [0] * block_size
        self._indexers = [0] * block_size
        """As `_takers`, members with keys only, by the step in which they fill a block."""
        self._indexer_count = 0
        self._chunk_tokens = chunk_tokens
        self._chunk_steps: list[int] = []
        """Sorted: step (modulo the chunk) in which each member with keys completes a chunk."""
        self._members: list[dict[int, RunningRequest]] = [
            {} for _ in range(block_size * track_members)
        ]
        self._ends: list[tuple[int, int, RunningRequest]] = []
        self._gap_steps: list[int] = []
        self._gap_ns: list[int] = []
        self.late: list[RunningRequest] = []
        """Members that take part for the first time in the step in flight and whose latest token
        is older than that of the others."""

    def join(self, running: RunningRequest) -> None:
        """A request with reached - computed = 1 joins; no step may be in flight."""
        assert self.in_flight == 0
        request = running.request
        step = self.step
        offset = request.prompt_tokens + request.generated_tokens - step
        running.offset = offset
        running.finish_step = request.prompt_tokens + request.output_tokens - offset
        running.joined_step = step
        running.in_cohort = True
        self.count += 1
        self.changes += 1
        self.offset_sum += offset
        self.prompt_sum += request.prompt_tokens
        if running.admission > self.newest_admission:
            self.newest_admission = running.admission
        insort(self._offsets, offset)
        residue = (1 - offset) % self.block_size
        self._takers[residue] += 1
        if self.track_members:
            running.has_keys = 0 < step + offset <= request.known_blocks * self.block_size
            if running.has_keys:
                self._members[residue][running.admission] = running
                self._indexers[-offset % self.block_size] += 1
                self._indexer_count += 1
                if self._chunk_tokens:
                    insort(self._chunk_steps, -offset % self._chunk_tokens)
        heappush(self._ends, (running.finish_step, running.admission, running))

    def leave(self, running: RunningRequest) -> None:
        """A member leaves; its request gets exact counts (`kv_blocks` only where counted)."""
        self.materialise(running)
        offset = running.offset
        running.in_cohort = False
        self.count -= 1
        self.changes += 1
        self.offset_sum -= offset
        self.prompt_sum -= running.request.prompt_tokens
        del self._offsets[bisect_left(self._offsets, offset)]
        residue = (1 - offset) % self.block_size
        self._takers[residue] -= 1
        if running.has_keys:
            running.has_keys = False
            del self._members[residue][running.admission]
            self._indexers[-offset % self.block_size] -= 1
            self._indexer_count -= 1
            if self._chunk_tokens:
                chunk_step = -offset % self._chunk_tokens
                del self._chunk_steps[bisect_left(self._chunk_steps, chunk_step)]
        if self.count == 0:
            self._reset()

    def materialise(self, running: RunningRequest) -> None:
        """Write a member's token counts to its request."""
        request = running.request
        computed = self.step + running.offset - 1
        request.computed_tokens = computed
        request.generated_tokens = computed + 1 - self.in_flight - request.prompt_tokens
        if self.counts_blocks:
            request.kv_blocks = -(-computed // self.block_size)
        at = bisect_left(self._gap_steps, running.joined_step + 1)
        if at < len(self._gap_ns) and self._gap_ns[at] > request.max_gap_ns:
            request.max_gap_ns = self._gap_ns[at]

    def _reset(self) -> None:
        """Reset when the cohort becomes empty: only members could ask for these."""
        self.newest_admission = -1
        self._ends.clear()
        self._gap_steps.clear()
        self._gap_ns.clear()

    def blocks_next(self) -> int:
        """Blocks that the next step takes."""
        return self._takers[self.step % self.block_size]

    def blocks_of(self, steps: int) -> int:
        """Blocks that the next `steps` steps take together."""
        size, takers = self.block_size, self._takers
        at = self.step % size
        if steps == 1:
            return takers[at]
        blocks = steps // size * self.count
        for ahead in range(at, at + steps % size):
            blocks += takers[ahead] if ahead < size else takers[ahead - size]
        return blocks

    def busy_steps(self, steps: int) -> Iterator[int]:
        """Those of the next `steps` steps in which a member takes a block or fills one that others
        can find."""
        size, now = self.block_size, self.step
        busy = [
            ahead
            for ahead in range(min(size, steps))
            if self._takers[(now + ahead) % size] or self._indexers[(now + ahead) % size]
        ]
        for first in range(now, now + steps, size):
            for ahead in busy:
                if first + ahead < now + steps:
                    yield first + ahead

    def steps_that_fit(self, blocks_free: int, limit: int) -> int:
        """The largest number of steps up to `limit` that `blocks_free` blocks are enough for."""
        size = self.block_size
        if blocks_free >= self.count * -(-limit // size):
            return limit
        steps = blocks_free // self.count * size
        left = blocks_free % self.count
        at = self.step % size
        takers = self._takers
        while steps < limit and takers[at] <= left:
            left -= takers[at]
            steps += 1
            at = (at + 1) % size
        return min(steps, limit)

    def fillers(self, ahead: int = 0) -> list[RunningRequest]:
        """Members with keys whose block becomes full in the step `ahead` of the next one.

        In order of admission.
        """
        at = (self.step + ahead) % self.block_size
        if not self._indexers[at]:
            return []
        members = self._members[(at + 1) % self.block_size]
        return [members[admission] for admission in sorted(members)]

    def steps_before_filled_block(self, limit: int) -> int:
        """Further steps, up to `limit`, before the one that fills a block others can find."""
        if self._indexer_count == 0:
            return limit
        at = self.step % self.block_size
        for steps in range(min(limit, self.block_size)):
            if self._indexers[(at + steps) % self.block_size]:
                return steps
        return limit

    def steps_before_chunk(self, limit: int) -> int:
        """Further steps, up to `limit`, before the one that completes a chunk of a tier."""
        steps = self._chunk_steps
        if not steps:
            return limit
        at = self.step % self._chunk_tokens
        place = bisect_left(steps, at)
        due = steps[place] if place < len(steps) else steps[0] + self._chunk_tokens
        return min(limit, due - at)

    @property
    def has_indexers(self) -> bool:
        """Some member fills blocks that others can find."""
        return self._indexer_count > 0

    def least_computed(self) -> int:
        """Computed tokens of the shortest member."""
        return self.step + self._offsets[0] - 1

    def next_shape(self) -> BatchShape:
        """The next step as a batch of its own."""
        before = self.step - 1
        count, offsets = self.count, self._offsets
        return BatchShape(  # by position: keywords cost as much again
            None,
            None,
            count,
            count * before + self.offset_sum,
            before + offsets[-1],
            before + offsets[0],
            count,
        )

    def steps_to_first_end(self) -> int:
        """Steps (the one in flight included) after which a first member has all its output."""
        ends = self._ends
        while True:
            finish_step, _, running = ends[0]
            if running.in_cohort and running.finish_step == finish_step:
                return finish_step - self.step + self.in_flight
            heappop(ends)

    def pop_ended(self, now_ns: int) -> list[RunningRequest]:
        """Members that have all of their output, the last token just now. They leave."""
        ended: list[RunningRequest] = []
        ends, step = self._ends, self.step
        while ends and ends[0][0] <= step:
            finish_step, _, running = heappop(ends)
            if running.in_cohort and running.finish_step == finish_step:
                assert finish_step == step
                ended.append(running)
        for running in ended:
            self.leave(running)
            running.request.last_token_ns = now_ns
        return ended

    def end_late(self, now_ns: int) -> list[int]:
        """The first step of the late members has ended: their gaps, longer than the step."""
        gaps_ns: list[int] = []
        for running in self.late:
            request = running.request
            gap_ns = now_ns - request.last_token_ns
            gaps_ns.append(gap_ns)
            if gap_ns > request.max_gap_ns:
                request.max_gap_ns = gap_ns
        self.late.clear()
        return gaps_ns

    def note_gap(self, gap_ns: int, completed_steps: int) -> None:
        """The gaps of the steps up to `completed_steps` were `gap_ns` at most."""
        durations, steps = self._gap_ns, self._gap_steps
        if not durations or durations[-1] > gap_ns:
            durations.append(gap_ns)
            steps.append(completed_steps)
            return
        durations[-1] = gap_ns
        steps[-1] = completed_steps
        while len(durations) > 1 and durations[-2] <= gap_ns:
            del durations[-2], steps[-2]
