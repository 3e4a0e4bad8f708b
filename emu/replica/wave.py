"""Data-parallel groups: replicas whose iterations begin together, in waves.

Owns the barrier of one group. A member that has formed a batch enters the wave and waits; the
wave leaves when every member that serves has entered. Members with nothing to do enter with a
batch of one token, so that no member waits for them; they are woken when a request enters. All
batches are padded to the largest token count. Rules: LLMServingSim 2.0.

vLLM pads a group that shares experts only if the largest batch fits into a CUDA graph (source:
`coordinate_batch_across_dp`, 0.19). Otherwise every member computes its own tokens, and the
experts those of all; members wait for each other in every layer and end together. So do SGLang and
TensorRT-LLM if a member has a prompt: they pad captured steps alone (`pads_prompts`).

Where members share the experts of a model, every layer ends in an exchange between all of them:
a member that is early waits there, so each member's attention takes as long as the slowest one's.
In a dense group nothing ties the members together between two waves.

Nothing polls. A member that crashes or stops serving leaves; the wave of a dense group then is
complete without it. Where experts are shared, no wave leaves while a member is gone, unless the
others have copies of its experts (`spare`).

Leaps. A member's scheduler promises equal batches as that of any replica does, but when they start
depends on all members. So waves leap together: as far as every batch of a wave is certain to be
followed by its like, the ends of all members follow from their costs, and no member takes a step
before (`Part`). Whatever happens to a member ends its own promise, and cuts the waves of all at
the one that is under way; the other members go on with theirs in the next wave. A member that
keeps pace with batches of one token is certain to do so while nothing comes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from operator import add, sub
from typing import TYPE_CHECKING, Final, NamedTuple, final

from emu.kernel.clock import PARK
from emu.latency.base import BatchShape, next_decode_shape
from emu.latency.ends import Ends
from emu.replica.books import DUMMY_ID
from emu.replica.events import PrerequisiteMet
from emu.replica.flight.member import OVER, STEPS_SURE, Member
from emu.replica.prerequisites import Prerequisites
from emu.scheduling.base import Batch

if TYPE_CHECKING:
    from emu.replica.replica import Replica

GRAPH_TOKENS_MAX: Final = 512
"""vLLM captures graphs for up to twice `max_num_seqs` tokens, and not beyond this."""


STEPS_MAX: Final = 64
"""Waves that leap at once: half of those that are planned beyond are cut again."""


class Rebalance(NamedTuple):
    """Experts are placed anew at intervals, by the first wave after each."""

    interval_ns: int
    stall_ns: int
    """What the group stands still meanwhile."""

    def stalls(self, before_ns: int, now_ns: int) -> int:
        """What a wave that leaves now waits, if the one before it left then."""
        is_due = before_ns // self.interval_ns < now_ns // self.interval_ns
        return self.stall_ns if is_due else 0


class _Entry(NamedTuple):
    member: Member
    shape: BatchShape
    go: Callable[[int], None] | None
    """Called when the wave leaves, with what the member waits for others inside its layers.

    None: the batch is one of a promise that goes on."""
    steps: int
    """For so many waves the member's batches are certain."""

    @property
    def is_part(self) -> bool:
        """Its batch has steps before or after this wave."""
        return self.go is None or 1 < self.steps < STEPS_SURE


@final
class Part:
    """What a member does in waves that leap: its batch, as far as it is promised."""

    group: WaveGroup
    member: Member
    is_dummy: bool
    is_pending: bool
    """The member has not begun: the wave has not left, or did so at this very instant."""
    begun_ns: int
    """When its batch was formed."""
    starts: Ends
    """When each wave of its batch left."""
    ends: Ends
    """When each step of its batch ends, from `begun_ns` on."""
    before: int
    """Of these, steps before the waves that leap now; of a dummy, steps that are counted."""
    is_passive: bool
    """Its next step is certain, and another member, which ends later, takes it into that wave."""

    __slots__ = (
        "before",
        "begun_ns",
        "ends",
        "group",
        "is_dummy",
        "is_passive",
        "is_pending",
        "member",
        "starts",
    )

    def __init__(self, group: WaveGroup, member: Member) -> None:
        self.group = group
        self.member = member
        self.is_dummy = _is_dummy(member)
        self.is_pending = True
        self.is_passive = False
        self.begun_ns = member.start_ns
        self.starts = self.ends = array("q")
        self.before = 0

    def extend(self, starts: Ends, costs_ns: list[int]) -> None:
        """Waves that leave at these times leap from now on; its steps take so long."""
        begun_ns = self.begun_ns
        self.before = len(self.ends)
        ends = array("q", [at + cost - begun_ns for at, cost in zip(starts, costs_ns, strict=True)])
        # Arrays in use stay as they are: the member and statistics of gaps hold them.
        self.ends = self.ends + ends if self.before else ends
        self.starts = self.starts + starts if self.before else starts
        if not self.is_pending:  # nothing else makes it run
            self.member.prerequisites.left = 0
            self.begin()

    @property
    def end_ns(self) -> int:
        """When the last step known so far ends."""
        return self.begun_ns + self.ends[-1]

    @property
    def goes_on(self) -> bool:
        """Its batch has begun, and has steps after those known so far."""
        if self.is_dummy or self.is_pending:
            return False
        batch = self.member.batch
        assert batch is not None
        return len(self.ends) < batch.max_steps

    def wake(self) -> None:
        """It takes itself into the next wave: now, if it has ended by now."""
        self.is_passive = False
        if self.member.books.past(self.end_ns) > 0:
            self.enter_next()
        else:
            self.member.actor.arm(self.end_ns)

    def begin(self) -> int:
        """The member's batch runs: when its last step ends, as far as is known."""
        self.is_pending = False
        end_ns = self.end_ns
        self.member.fly(None if self.is_dummy else self.ends, end_ns)
        return end_ns

    def ended(self) -> int:
        """Steps of the waves that leap that have ended by now (see `Books.past`).

        Those before have, also where the last of them ends at this very instant.
        """
        ended = bisect_left(self.ends, self.member.books.past(self.begun_ns))
        return ended if self.is_dummy else max(0, ended - self.before)

    def cut(self, steps: int, *, is_over: bool) -> None:
        """So many waves leap and no more; `is_over`: for this member they have ended."""
        known = steps if self.is_dummy else self.before + steps
        self.starts, self.ends = self.starts[:known], self.ends[:known]
        if self.is_dummy:
            self._cut_dummy(is_over=is_over)
        elif not self.is_pending:
            self.member.fly(self.ends, self.end_ns)
            if is_over:
                self.enter_next()
            else:
                self.member.actor.arm(self.end_ns)

    def _cut_dummy(self, *, is_over: bool) -> None:
        member, end_ns = self.member, self.end_ns
        self.close()
        if self.is_pending:
            return
        member.fly(None, end_ns)
        if not is_over:
            member.actor.arm(end_ns)
            return
        self._count(len(self.ends))
        member.rest()
        if member.books.counters.rest_since_ns < 0:
            member.books.counters.rest_since_ns = end_ns
        self.group.forms_later(member)

    def enter_next(self) -> None:
        """The steps known so far have ended, and the next one is in the wave that forms."""
        member, known = self.member, len(self.ends)
        batch = member.batch
        assert batch is not None
        self.group.leaves(self)
        member.wait()
        member.prerequisites.left = 1
        shape = next_decode_shape(batch.shape, known)
        _unpad(shape)
        entry = _Entry(member, shape, None, batch.max_steps - known)
        self.group.entered[member.replica_id] = entry

    def close(self) -> None:
        """The last step known so far is a batch of its own, or completes all of them."""
        member, known = self.member, len(self.ends)
        member.set_promise(None)
        self.group.leaves(self)
        if self.is_dummy:
            self._count(known - 1)
            if known > 1:
                member.start_ns, member.waited_ns = self.starts[-1], 0
        else:
            member.books.counters.busy_ns -= self._waited_ns(known)

    def _count(self, steps: int) -> None:
        """The first steps of a batch that keeps pace have ended: each was one of its own."""
        counted, counters = self.before, self.member.books.counters
        if steps > counted:
            self.before = steps
            counters.iterations += steps - counted
            begun_ns = self.begun_ns * (steps - counted)
            counters.busy_ns += begun_ns + sum(self.ends[counted:steps])
            counters.busy_ns -= sum(self.starts[counted:steps])

    def _waited_ns(self, steps: int) -> int:
        """What it waited between the first `steps` steps."""
        begun_ns = self.begun_ns * (steps - 1)
        return sum(self.starts[1:steps]) - sum(self.ends[: steps - 1]) - begun_ns

    def go_on(self) -> int:
        """The last step known so far has ended: when the next ones will have.

        `PARK` while others are waited for, `OVER` if the batch is complete.
        """
        member, batch = self.member, self.member.batch
        assert batch is not None
        if self.is_passive:  # a timer from before its waves were cut
            return PARK
        if self.is_dummy or len(self.ends) >= batch.max_steps:
            self.close()
            return OVER
        self.group.enter_passive(self)
        self.enter_next()
        self.group.go_if_complete()
        return PARK if member.is_waiting or self.is_passive else member.end_ns

    # The port of a promise.
    def settle(self) -> None:
        """Steps that keep pace are counted; others are settled as the member's run."""
        if self.is_dummy and not self.is_pending:
            self._count(self.ended())

    def unroll(self) -> None:
        """Something happens to the member: it has a single batch in flight, as stepping has it."""
        self.group.cut()
        member = self.member
        if member.promise is not self:  # it kept pace, and may do so in the next wave
            member.unroll()
            return
        batch = member.batch
        assert batch is not None
        if self.is_pending:
            member.set_promise(None)
            self.group.leaves(self)
            batch.max_steps = 1
            entry = self.group.entered.get(member.replica_id)
            if entry is not None:
                self.group.entered[member.replica_id] = entry._replace(steps=1)
            return
        if self.is_dummy:
            self.close()
            return
        self._unroll_run(batch)

    def _unroll_run(self, batch: Batch) -> None:
        """Steps that have ended are complete; the one in flight, or that waits, is alone."""
        member = self.member
        done = len(self.ends) if member.is_waiting else len(self.ends) - 1
        self.group.leaves(self)
        member.set_promise(None)
        if done:
            member.books.end_leap_part(batch, member.start_ns, self.ends[:done])
            member.books.counters.busy_ns -= self._waited_ns(done) + member.waited_ns
            member.start_ns = self.begun_ns + self.ends[done - 1]
            member.waited_ns = 0
            if not member.is_waiting:
                member.waited_ns = self.starts[done] - member.start_ns
        batch.max_steps = 1
        member.set_run(None)
        if member.is_waiting:
            member.end_ns = member.start_ns
            _unpad(batch.shape)
            self.group.entered[member.replica_id] = _entry(member, batch.shape)


def _is_dummy(member: Member) -> bool:
    return member.batch is not None and member.batch.batch_id == DUMMY_ID


def _entry(member: Member, shape: BatchShape, steps: int = 1) -> _Entry:
    """A batch that waits, by itself, for the wave to leave."""
    life, actor = member.life, member.actor

    def go(wait_ns: int) -> None:
        actor.tell(PrerequisiteMet(life=life, wait_ns=wait_ns))

    return _Entry(member, shape, go, steps)


def _unpad(shape: BatchShape) -> None:
    """The batch has not been in a wave yet."""
    shape.padded_tokens = shape.group_tokens = shape.group_tokens_max = 0


class WaveGroup:
    """The barrier of one data-parallel group."""

    def __init__(
        self,
        name: str,
        *,
        shares_experts: bool,
        holds_experts: bool = True,
        padded_tokens_max: int = 0,
        pads_prompts: bool = True,
        rebalance: Rebalance | None = None,
    ) -> None:
        """`holds_experts`: the experts that members share lie on their own GPUs.

        `padded_tokens_max`: the largest batch to which others are padded; 0 = any. `pads_prompts`:
        they are padded too where a member has prompts."""
        self._rebalance = rebalance
        self._left: Ends = array("q", [0])
        """When the last waves left: one, or those that leap now."""
        self._stalls: list[int] = [0]
        """What each of them waited for a new placement of experts."""
        self.placements = 0
        self.placement_ns = 0
        self.name = name
        self.shares_experts = shares_experts
        self.holds_experts = shares_experts and holds_experts
        """A member that is gone takes experts with it."""
        self.padded_tokens_max = padded_tokens_max
        self.pads_prompts = pads_prompts
        self.members: list[Member] = []
        self.waves = 0
        self.dummies = 0
        self.entered: dict[int, _Entry] = {}
        """Members of the wave that forms; only this module writes to it."""
        self._spared: frozenset[int] = frozenset()
        """Members without which the others have all experts."""
        self._parts: list[Part] = []
        self._last: Part | None = None
        """Members whose waves leap now; `_last` takes passive ones into the next wave."""
        self._steps = 0
        """Waves that leap now."""
        self._formed: list[Member] = []

    def join(self, replica: Replica) -> None:
        """Called once for each member, by ascending id, before the run."""
        self.members.append(replica.join(self))

    def wants(self, replica_id: int) -> bool:
        """A wave is forming, and this member is not in it."""
        self.wake_passive()  # a member that rests is woken by the first that enters
        return bool(self.entered) and replica_id not in self.entered

    def dummy(self, now_ns: int) -> Batch:
        """A decode of one token with a history of one."""
        self.dummies += 1
        shape = BatchShape(
            decode_count=1,
            decode_context_sum=1,
            decode_context_max=1,
            decode_context_min=1,
            sequences=1,
        )
        return Batch(DUMMY_ID, shape, [], formed_ns=now_ns)

    def enter(
        self, replica_id: int, shape: BatchShape, go: Callable[[int], None], steps: int = 1
    ) -> None:
        """A member's batch is formed; `go` is called when all members are there.

        `steps`: for so many waves, this one included, its batches are certain.
        """
        assert replica_id not in self.entered
        member = next(one for one in self.members if one.replica_id == replica_id)
        self.entered[replica_id] = _Entry(member, shape, go, steps)
        if steps > 1:
            member.set_promise(Part(self, member))
        self.go_if_complete()

    def go_if_complete(self) -> None:
        """Let the wave go, or see to it that members that rest enter it."""
        if not self._leave():
            for member in self.members:
                if member.replica_id not in self.entered and member.promise is None:
                    member.actor.look()

    def withdraw(self, replica_id: int) -> None:
        """A member no longer serves, or lost the batch that it had brought."""
        self.entered.pop(replica_id, None)
        self._leave()

    def spare(self, members: frozenset[int]) -> None:
        """The others have all experts without these members, and only without these."""
        self._spared = members
        if self.entered:
            self.go_if_complete()

    def lacks_experts(self) -> bool:
        """A member is gone whose experts the others do not have."""
        return any(self._is_missed(one) for one in self.members)

    def _is_missed(self, member: Member) -> bool:
        """It does not serve, and has experts that no other member has."""
        return not member.serves and self.holds_experts and member.replica_id not in self._spared

    # Waves that leap.
    def cut(self) -> None:
        """No wave after the one under way is certain any more."""
        self.wake_passive()
        if not self._parts:
            return
        ended = [part.ended() for part in self._parts]
        steps = min(ended) + 1
        if steps >= self._steps:
            return
        self.waves -= self._steps - steps
        self._steps = steps
        self._count_stalls(-1)
        self._left, self._stalls = self._left[:steps], self._stalls[:steps]
        self._count_stalls(1)
        pairs = list(zip(self._parts, ended, strict=True))
        for part, done in pairs:
            part.cut(steps, is_over=done >= steps)
        formed, self._formed = self._formed, []
        if self.entered:
            for member in formed:
                self._keep_pace(member)

    def wake_passive(self) -> None:
        """All members take themselves into the next wave."""
        for part in self._passive():
            part.wake()

    def enter_passive(self, part: Part) -> None:
        """A member has ended; if it is the one that ends after the passive ones, so have they."""
        if part is self._last:
            for other in self._passive():
                other.is_passive = False
                other.enter_next()

    def _passive(self) -> list[Part]:
        return [part for part in self._parts if part.is_passive]

    def leaves(self, part: Part) -> None:
        """The member does not take part in what leaps now any more."""
        if part in self._parts:
            self._parts.remove(part)

    def forms_later(self, member: Member) -> None:
        """A member that keeps pace rests, unless another one is in the next wave already."""
        self._formed.append(member)

    def _keep_pace(self, member: Member) -> None:
        now_ns = member.books.clock.now_ns
        member.books.counters.rest_since_ns = -1
        batch, waves = self.dummy(now_ns), Prerequisites(member.replica_id)
        waves.left = 1
        member.hold(batch, now_ns, waves)
        self.entered[member.replica_id] = _entry(member, batch.shape, member.paces)
        if member.paces > 1:
            member.set_promise(Part(self, member))

    # The wave.
    def _leave(self) -> bool:
        """Let the wave go if no member is missing."""
        if not self.entered:
            return False
        for member in self.members:
            is_awaited = member.serves or self._is_missed(member)
            if member.replica_id not in self.entered and is_awaited:
                return False
        entries = [self.entered[i] for i in sorted(self.entered)]
        self.entered = {}
        self.waves += 1
        waits_ns, steps = self._agree(entries)
        stall_ns = self._stall_ns(entries[0].member.books.clock.now_ns)
        if stall_ns:
            waits_ns = [max(0, wait_ns) + stall_ns for wait_ns in waits_ns]
        if steps > 1 or any(entry.is_part for entry in entries):
            self._leap(entries, waits_ns, steps, stall_ns)
        else:
            for entry, wait_ns in zip(entries, waits_ns, strict=True):
                assert entry.go is not None
                entry.member.set_promise(None)
                entry.go(wait_ns)
        return True

    def _agree(self, entries: list[_Entry]) -> tuple[list[int], int]:
        """Sizes for all: what each waits for the others inside its layers, and waves that leap."""
        sizes = [entry.shape.new_tokens for entry in entries]
        is_large = 0 < self.padded_tokens_max < max(sizes)
        if is_large or (not self.pads_prompts and any(e.shape.prefill_new for e in entries)):
            for entry in entries:
                entry.shape.group_tokens = -(-sum(sizes) // len(sizes))
                entry.shape.group_tokens_max = max(sizes)
            return _end_together(entries), 1
        for entry in entries:
            entry.shape.padded_tokens = max(sizes)
        steps = min(min(entry.steps for entry in entries), STEPS_MAX)
        if self.shares_experts:
            return _wait_in_every_layer(entries), steps
        return [-1] * len(entries), steps

    def _stall_ns(self, now_ns: int) -> int:
        """What the wave that leaves now waits for a new placement of experts."""
        if self._rebalance is None:
            return 0
        stall_ns = self._rebalance.stalls(self._left[-1], now_ns)
        self._left, self._stalls = array("q", [now_ns]), [stall_ns]
        self._count_stalls(1)
        return stall_ns

    def _count_stalls(self, sign: int) -> None:
        self.placement_ns += sign * sum(self._stalls)
        self.placements += sign * sum(1 for stall_ns in self._stalls if stall_ns)

    def _starts(self, runs: list[list[int]], now_ns: int, stall_ns: int) -> Ends:
        """When each of the waves that leap leaves. Stalls are added to their runs."""
        longest = _longest(runs)
        rebalance = self._rebalance
        if rebalance is None:
            del longest[-1]
            return array("q", accumulate(longest, initial=now_ns))
        starts, stalls = array("q"), []
        at_ns = now_ns
        self._count_stalls(-1)
        for step, length in enumerate(longest):
            if step:
                stall_ns = rebalance.stalls(starts[-1], at_ns)
            if stall_ns:
                for run in runs:
                    run[step] += stall_ns
            starts.append(at_ns)
            stalls.append(stall_ns)
            at_ns += length + stall_ns
        self._left, self._stalls = starts, stalls
        self._count_stalls(1)
        return starts

    def _leap(self, entries: list[_Entry], waits_ns: list[int], steps: int, stall_ns: int) -> None:
        """The wave leaves, and so many waves in all go on by themselves."""
        now_ns = entries[0].member.books.clock.now_ns
        self.waves += steps - 1
        if steps == 1:
            runs = [
                [_step_ns(entry) + max(0, wait_ns)] if entry.is_part else []
                for entry, wait_ns in zip(entries, waits_ns, strict=True)
            ]
            starts = array("q", [now_ns])
        else:
            runs = [_run_ns(entry, steps) for entry in entries]
            if self.shares_experts:
                attention = [_attention_ns(entry, steps) for entry in entries]
                slowest = _longest(attention)
                runs = [
                    list(map(add, run, map(sub, slowest, own)))
                    for run, own in zip(runs, attention, strict=True)
                ]
            starts = self._starts(runs, now_ns, stall_ns)
        self._steps = steps
        self._parts = []
        for entry, wait_ns, run in zip(entries, waits_ns, runs, strict=True):
            member, go = entry.member, entry.go
            part = member.promise
            if go is not None:
                member.set_promise(None)  # what it is told now does not end its promise
                go(wait_ns)
            if steps > 1 or entry.is_part:
                assert isinstance(part, Part)
                member.set_promise(part)
                self._parts.append(part)
                part.extend(starts, run)
        self._arm()

    def _arm(self) -> None:
        """The last of the members whose next steps are certain takes all of them into that wave."""
        last: Part | None = None
        for part in self._parts:
            if part.goes_on and (last is None or part.end_ns >= last.end_ns):
                last = part
        self._last = last
        for part in self._parts:
            if not part.is_pending:
                part.is_passive = part is not last and part.goes_on
                if not part.is_passive:
                    part.member.actor.arm(part.end_ns)


def _step_ns(entry: _Entry) -> int:
    """What the next step of a promise takes."""
    pace = entry.member.books.pace
    return pace.varied_ns(pace.latency.iteration_ns(entry.shape), _number(entry))


def _number(entry: _Entry) -> int:
    """Steps that the member has taken before this one."""
    member = entry.member
    known = 0 if entry.go is not None or member.run is None else len(member.run.ends)
    return member.books.counters.iterations + known


def _longest(runs: list[list[int]]) -> list[int]:
    """The longest of each step."""
    return list(map(max, *runs)) if len(runs) > 1 else list(runs[0])


def _run_ns(entry: _Entry, steps: int) -> list[int]:
    """What each of so many steps takes."""
    pace = entry.member.books.pace
    if _is_dummy(entry.member):
        costs_ns = [pace.cost_ns(entry.shape)] * steps
    else:
        costs_ns = pace.decode_costs_ns(entry.shape, steps)
    if pace.jitter is not None:
        varied = pace.jitter.run(_number(entry), array("q", accumulate(costs_ns)))
        costs_ns = [varied[0], *map(sub, varied[1:], varied)]
    return costs_ns


def _attention_ns(entry: _Entry, steps: int) -> list[int]:
    """What attention takes in each of so many steps."""
    pace = entry.member.books.pace
    if _is_dummy(entry.member):
        return [pace.attention_ns(entry.shape)] * steps
    return pace.attention_costs_ns(entry.shape, steps)


def _end_together(entries: list[_Entry]) -> list[int]:
    """What each member waits for the slowest one."""
    costs_ns = [entry.member.books.pace.latency.iteration_ns(entry.shape) for entry in entries]
    return [max(costs_ns) - own_ns for own_ns in costs_ns]


def _wait_in_every_layer(entries: list[_Entry]) -> list[int]:
    """What each member waits for the slowest attention, over all layers."""
    attention_ns = [entry.member.books.pace.attention_ns(entry.shape) for entry in entries]
    return [max(attention_ns) - own_ns for own_ns in attention_ns]
