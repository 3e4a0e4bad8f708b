"""A leap of a pipeline: batches in flight that are formed again and again, in turn.

When every running request is a member of a batch in flight and gets a token at its end, and none
that waits could be admitted, the batch that is formed at the end of one is that batch again: the
same members, one more context token each. So the batches of a pipeline follow each other in a
fixed order until a member has all its output, and when each of them leaves each stage follows from
costs alone: it starts on a stage when it has left the one before and the stage is free.

A rotation holds this plan, which is time only. What the ends bring about is entered into the books
at the next look (`emu/replica/flight/staged.py`, `Scheduler.turn`). It is planned piece by piece,
because most rotations are cut by an arrival long before a member ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from operator import add, sub
from typing import NamedTuple, final

from emu.latency.base import BatchShape, StageLines, next_decode_shape
from emu.scheduling.cohort import RunningRequest

StageRun = Callable[[BatchShape, int], list[list[int]]]
"""Costs of so many decode batches in a row, the first of this shape: those on each stage."""
Vary = Callable[[int, Sequence[int]], Sequence[int]]
"""What the batch of this number takes instead of its costs."""


@final
class Turn:
    """The members of one batch in flight, whose batches follow each other.

    It outlives the rotation: while its members stay, the next one finds it at its batch.
    """

    members: list[RunningRequest]
    """In order of admission."""
    shape: BatchShape
    """Of the batch in flight, as far as its members decode."""
    left: int
    """Tokens that some member lacks, and none lacks fewer; that of the batch in flight counts."""
    batch_id: int
    """Of the batch in flight."""
    is_plain: bool
    """That batch gives each member its next token, and the one before came when it was formed."""
    lines: StageLines | None
    """What the batches after that one cost on each stage, if that is known and follows lines."""
    rounds: int
    """Batches that have been formed again since `lines` began."""

    __slots__ = ("batch_id", "is_plain", "left", "lines", "members", "rounds", "shape")

    def __init__(
        self,
        members: list[RunningRequest],
        shape: BatchShape,
        left: int,
        batch_id: int,
        *,
        is_plain: bool,
    ) -> None:
        self.members = members
        self.shape = shape
        self.left = left
        self.batch_id = batch_id
        self.is_plain = is_plain
        self.lines = None
        self.rounds = 0

    def go_on(self, batches: int, batch_id: int) -> None:
        """So many batches have been formed again; the last one has this number."""
        self.left -= batches
        self.rounds += batches
        self.batch_id = batch_id
        self.is_plain = True
        shape = self.shape
        shape.decode_context_sum += batches * shape.decode_count
        shape.decode_context_max += batches
        shape.decode_context_min += batches


class Passed(NamedTuple):
    """What a turn has passed between two looks at a rotation."""

    turn: Turn
    round: int
    """Batches of the turn that had ended before the first of these."""
    formed: int
    """Batches of the turn that have ended, and so been formed again."""
    ends_ns: list[int]
    """When those of them ended that were plain."""
    gaps_ns: list[int]
    """Of the same, the time since the end before."""
    run_ns: int
    """Of the same, what they took on all stages."""


@final
class Rotation:
    """Batch i is one of turn i modulo the number of turns; the first ones were in flight before."""

    turns: Sequence[Turn]
    ends_max: int
    """Ends of batches after each of which the next batch is certain."""
    batch_id: int
    """Of the first batch that is formed again."""
    done: int
    """Ends that are in the books."""
    planned: int
    """Batches that are formed again, as far as they are planned."""
    ends: list[int]
    """When each batch leaves the last stage."""
    leaves: list[list[int]]
    """By stage, when each batch leaves it."""
    costs: list[list[int]]
    """By stage, what each batch that is formed again takes on it."""
    _follows: bool
    """Costs of all turns follow their lines."""
    _repeats: list[bool]
    """By stage, whether all turns take what they take on the stage before."""

    __slots__ = (
        "_follows",
        "_repeats",
        "batch_id",
        "costs",
        "done",
        "ends",
        "ends_max",
        "leaves",
        "planned",
        "turns",
    )

    def __init__(self, turns: Sequence[Turn], ends_max: int, batch_id: int) -> None:
        self.turns = turns
        self.ends_max = ends_max
        self.batch_id = batch_id
        self.done = 0
        self.planned = 0
        self.ends = []
        self.leaves = []
        self.costs = []
        self._follows = False
        self._repeats = []

    def start(self, stage_ends: list[list[int]]) -> bool:
        """When each batch in flight leaves each stage. False: two of them end together."""
        self.leaves = [list(leaves) for leaves in zip(*stage_ends, strict=True)]
        self.costs = [[] for _ in self.leaves]
        self.ends = ends = self.leaves[-1]
        return all(ends[i] < ends[i + 1] for i in range(len(ends) - 1))

    def follow(self, lines_of: Callable[[BatchShape], StageLines | None]) -> None:
        """The batches of each turn take what lines say, if there are any."""
        for turn in self.turns:
            if turn.lines is None:
                turn.rounds = 0
                turn.lines = lines_of(next_decode_shape(turn.shape, 1))
                if turn.lines is None:
                    return
        self._follows = True
        repeats = [False] + [True] * (len(self.leaves) - 1)
        for turn in self.turns:
            lines = turn.lines
            assert lines is not None
            firsts, growths, leasts, _ = lines
            for stage in range(1, len(repeats)):
                if (
                    firsts[stage] != firsts[stage - 1]
                    or growths[stage] != growths[stage - 1]
                    or leasts[stage] != leasts[stage - 1]
                ):
                    repeats[stage] = False
        self._repeats = repeats

    def plan(
        self,
        rounds: int,
        begin_ns: Sequence[int],
        costs_of: StageRun,
        vary: Vary | None = None,
        varied: int = 0,
    ) -> None:
        """Plan so many more batches of each turn, as far as they are certain.

        `begin_ns`: when each stage is free before the first of all. `vary` is asked with the number
        of each batch, from `varied` on.
        """
        count, turns = len(self.turns), self.turns
        before, left = self.planned // count, self.ends_max - self.planned
        if rounds * count > left:
            rounds = -(-left // count)
        leaves = self.leaves
        last = [own[-1] for own in leaves] if before else begin_ns
        at = self.planned
        self.planned = until = min(self.ends_max, at + rounds * count)
        own: list[list[int]]
        if self._follows:
            own = self._along(before, rounds, until - at)
        else:
            runs = [costs_of(next_decode_shape(turn.shape, before + 1), rounds) for turn in turns]
            own = []
            for stage in range(len(leaves)):
                column = [0] * (rounds * count)
                for index, run in enumerate(runs):
                    column[index::count] = run[stage]
                own.append(column[: until - at])
        if vary is not None:
            each = [vary(varied + at, cost) for at, cost in enumerate(zip(*own, strict=True), at)]
            own = [list(column) for column in zip(*each, strict=True)]
        for known, column in zip(self.costs, own, strict=True):
            known += column
        if len(last) == 2:
            _pass_two(own, leaves, last, at)
        elif len(last) == 4:
            _pass_four(own, leaves, last, at)
        else:
            _pass(own, leaves, last, at)

    def _along(self, before: int, rounds: int, batches: int) -> list[list[int]]:
        """What so many batches take on each stage, after `before` rounds."""
        own: list[list[int]] = []
        count = len(self.turns)
        for stage, repeats in enumerate(self._repeats):
            if repeats:
                own.append(own[-1])
                continue
            column = [0] * (rounds * count)
            for index, turn in enumerate(self.turns):
                lines = turn.lines
                assert lines is not None
                firsts, growths, leasts, shift = lines
                growth, least = growths[stage], leasts[stage]
                first = firsts[stage] + (turn.rounds + before) * growth
                if growth:
                    run = [cost >> shift for cost in range(first, first + growth * rounds, growth)]
                else:
                    run = [first >> shift] * rounds
                if run[0] < least:
                    run = [cost if cost > least else least for cost in run]
                column[index::count] = run
            if batches < len(column):
                del column[batches:]
            own.append(column)
        return own

    def whole(self, begin: int, end: int) -> list[int]:
        """What batches `begin` to `end` of those formed again take on all stages, ns."""
        total = self.costs[0][begin:end]
        for costs in self.costs[1:]:
            total = list(map(add, total, costs[begin:end]))
        return total

    def gaps_ns(self, begin: int, end: int, formed_ns: Sequence[int]) -> list[int]:
        """For batches `begin` to `end`, the time from the end before to their own.

        `formed_ns`: when those of them were formed that were in flight when the rotation began.
        """
        count, before = len(self.turns), list(formed_ns)
        if end > count:
            before += self.ends[max(begin - count, 0) : end - count]
        return list(map(sub, self.ends[begin:end], before))

    def first_stage_ns(self, begin: int, end: int) -> int:
        """Time from first start to last end, over batches `begin` to `end` formed again."""
        count = len(self.turns)
        if end <= count:
            return 0
        first = max(begin, count)
        total = sum(self.ends[first:end]) - sum(self.leaves[0][first:end])
        return total + sum(self.costs[0][first - count : end - count])

    def passed(
        self, begin: int, end: int, gaps_ns: Sequence[int], ran_ns: Sequence[int]
    ) -> Iterator[Passed]:
        """What each turn has passed with batches `begin` to `end`, in the order of turns.

        `ran_ns`: what those of them took on all stages that were in flight when the rotation
        began. Of these, batches that were not plain count as formed again, and as no more.
        """
        count, whole = len(self.turns), list(ran_ns)
        if end > count:
            whole += self.whole(max(begin - count, 0), end - count)
        for index, turn in enumerate(self.turns):
            first = begin + (index - begin) % count
            formed = len(range(first, end, count))
            if not formed:
                continue
            if first == index and not turn.is_plain:
                first += count
            at = first - begin
            ends_ns, gaps = self.ends[first:end:count], list(gaps_ns[at::count])
            yield Passed(turn, first // count, formed, ends_ns, gaps, sum(whole[at::count]))

    @property
    def due_ns(self) -> int:
        """The first end after which no batch is planned."""
        return self.ends[self.planned]

    def ended_by(self, at_ns: int) -> int:
        """Batches that have ended before this instant, of those after which one is planned."""
        return bisect_left(self.ends, at_ns, self.done, self.planned)


def _pass(costs: list[list[int]], leaves: list[list[int]], last: Sequence[int], at: int) -> None:
    """Batches pass all stages, one after another, each from the end numbered `at` on."""
    ends, free = leaves[-1], list(last)
    for cost in zip(*costs, strict=True):
        ready_ns = ends[at]
        at += 1
        for stage, cost_ns in enumerate(cost):
            free_ns = free[stage]
            free[stage] = ready_ns = (ready_ns if ready_ns > free_ns else free_ns) + cost_ns
            leaves[stage].append(ready_ns)


def _pass_two(
    costs: list[list[int]], leaves: list[list[int]], last: Sequence[int], at: int
) -> None:
    """The same for two stages, in a fourth of the time."""
    first, second = last
    firsts, ends = leaves
    for one, two in zip(costs[0], costs[1], strict=True):
        ready = ends[at]
        at += 1
        first = (ready if ready > first else first) + one
        second = (first if first > second else second) + two
        firsts.append(first)
        ends.append(second)


def _pass_four(
    costs: list[list[int]], leaves: list[list[int]], last: Sequence[int], at: int
) -> None:
    """The same for four stages."""
    first, second, third, fourth = last
    firsts, seconds, thirds, ends = leaves
    for one, two, three, four in zip(costs[0], costs[1], costs[2], costs[3], strict=True):
        ready = ends[at]
        at += 1
        first = (ready if ready > first else first) + one
        second = (first if first > second else second) + two
        third = (second if second > third else third) + three
        fourth = (third if third > fourth else fourth) + four
        firsts.append(first)
        seconds.append(second)
        thirds.append(third)
        ends.append(fourth)
