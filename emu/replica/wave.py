"""Data-parallel groups: replicas whose iterations begin together, in waves.

Owns the barrier of one group. A member that has formed a batch enters the wave and waits; the
wave leaves when every member that serves has entered. Members with nothing to do enter with a
batch of one token, so that no member waits for them; they are woken when a request enters. All
batches are padded to the largest token count. Rules: LLMServingSim 2.0.

vLLM pads a group that shares experts only if the largest batch fits into a CUDA graph (source:
`coordinate_batch_across_dp`, 0.19). Otherwise every member computes its own tokens, and the
experts those of all; members wait for each other in every layer and end together.

Where members share the experts of a model, every layer ends in an exchange between all of them:
a member that is early waits there, so each member's attention takes as long as the slowest one's.
In a dense group nothing ties the members together between two waves.

Nothing polls. A member that crashes or stops serving leaves; the wave then is complete without
it.

Leaps. A member's scheduler promises equal batches as that of any replica does, but when they start
depends on all members. So waves leap together: as far as every batch of a wave is certain to be
followed by its like, the ends of all members follow from their costs, and no member takes a step
before (`Part`). Whatever happens to a member ends its own promise, and cuts the waves of all at
the one that is under way; the other members go on with theirs in the next wave. A member that
keeps pace with batches of one token is certain to do so while nothing comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from emu.kernel.clock import PARK
from emu.latency.base import BatchShape, LatencyBackend, next_decode_shape, packed
from emu.replica.completion import DUMMY_ID, end_leap_part
from emu.replica.events import PrerequisiteMet
from emu.replica.replica import LOOP, RESTING, RUNNING, STEPS_SURE, WAITING
from emu.replica.states import ReplicaState
from emu.scheduling.base import Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from emu.replica.replica import Replica

_Times: TypeAlias = "NDArray[np.int64]"

S = ReplicaState
SERVES: Final = frozenset(
    {
        S.COLOCATED,
        S.PREFILL,
        S.DECODE,
        S.SHUTTING_COLOCATED,
        S.SHUTTING_PREFILL,
        S.SHUTTING_DECODE,
        S.MUTATING_TO_DECODE,
    }
)
"""States in which a member takes part in waves."""
GRAPH_TOKENS_MAX: Final = 512
"""vLLM captures graphs for up to twice `max_num_seqs` tokens, and not beyond this."""


STEPS_MAX: Final = 256
"""Waves that leap at once; a batch of one token promises as many."""


class _Entry(NamedTuple):
    replica: Replica
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
    replica: Replica
    is_dummy: bool
    is_pending: bool
    """The member has not begun: the wave has not left, or did so at this very instant."""
    starts: _Times
    """When each wave of its batch left."""
    ends: _Times
    """When each step of its batch ends."""
    before: int
    """Of these, steps before the waves that leap now; of a dummy, steps that are counted."""

    __slots__ = ("before", "ends", "group", "is_dummy", "is_pending", "replica", "starts")

    def __init__(self, group: WaveGroup, replica: Replica) -> None:
        import numpy as np

        self.group = group
        self.replica = replica
        self.is_dummy = _is_dummy(replica)
        self.is_pending = True
        self.starts = self.ends = np.zeros(0, dtype=np.int64)
        self.before = 0

    def extend(self, starts: _Times, ends: _Times) -> None:
        """These waves leap from now on."""
        import numpy as np

        self.before = len(self.ends)
        if self.before:
            starts, ends = np.concatenate((self.starts, starts)), np.concatenate((self.ends, ends))
        self.starts, self.ends = starts, ends
        if not self.is_pending:  # nothing else makes it run
            replica = self.replica
            replica.activity = RUNNING
            replica.prerequisites.left = 0
            replica.actor.arm(self.begin())

    def begin(self) -> int:
        """The member's batch runs: when its last step ends, as far as is known."""
        self.is_pending = False
        replica = self.replica
        end_ns = replica.end_ns = self.ends.item(-1)
        if not self.is_dummy:
            replica.ends = packed(self.ends - replica.start_ns)
        return end_ns

    def ended(self) -> int:
        """Steps of the waves that leap that have ended by now (see `Replica.steps_ended`)."""
        clock = self.replica.clock
        at_ns = clock.now_ns + (clock.priority_reached > self.replica.priority)
        ended = int(self.ends.searchsorted(at_ns))
        return ended if self.is_dummy else ended - self.before

    def cut(self, steps: int, *, is_over: bool) -> None:
        """So many waves leap and no more; `is_over`: for this member they have ended."""
        known = steps if self.is_dummy else self.before + steps
        self.starts, self.ends = self.starts[:known], self.ends[:known]
        replica = self.replica
        if self.is_dummy:
            self._cut_dummy(is_over=is_over)
        elif not self.is_pending:
            replica.ends = packed(self.ends - replica.start_ns)
            replica.end_ns = self.ends.item(-1)
            if is_over:
                self.enter_next()
            else:
                replica.actor.arm(replica.end_ns)

    def _cut_dummy(self, *, is_over: bool) -> None:
        replica = self.replica
        end_ns = self.ends.item(-1)
        self.close()
        if self.is_pending:
            return
        replica.end_ns = end_ns
        if not is_over:
            replica.actor.arm(end_ns)
            return
        self._count(len(self.ends))
        replica.batch = None
        replica.waited_ns = 0
        replica.activity = RESTING
        if replica.rest_since_ns < 0:
            replica.rest_since_ns = end_ns
        self.group.forms_later(replica)

    def enter_next(self) -> None:
        """The steps known so far have ended, and the next one is in the wave that forms."""
        replica, known = self.replica, len(self.ends)
        batch = replica.batch
        assert batch is not None
        self.group.leaves(self)
        replica.activity = WAITING
        replica.prerequisites.left = 1
        shape = next_decode_shape(batch.shape, known)
        _unpad(shape)
        entry = _Entry(replica, shape, None, batch.max_steps - known)
        self.group.entered[replica.replica_id] = entry

    def close(self) -> None:
        """The last step known so far is a batch of its own, or completes all of them."""
        replica, known = self.replica, len(self.ends)
        replica.own_leap = None
        self.group.leaves(self)
        if self.is_dummy:
            self._count(known - 1)
            if known > 1:
                replica.start_ns, replica.waited_ns = self.starts.item(-1), 0
        else:
            replica.busy_ns -= self._waited_ns(known)

    def _count(self, steps: int) -> None:
        """The first steps of a batch that keeps pace have ended: each was one of its own."""
        counted, replica = self.before, self.replica
        if steps > counted:
            self.before = steps
            replica.iterations += steps - counted
            replica.busy_ns += int((self.ends - self.starts)[counted:steps].sum())

    def _waited_ns(self, steps: int) -> int:
        """What it waited between the first `steps` steps."""
        return int((self.starts[1:steps] - self.ends[: steps - 1]).sum())

    def go_on(self) -> int:
        """The last step known so far has ended: when the next ones will have.

        `PARK` while others are waited for, `LOOP` if the batch is complete.
        """
        replica, batch = self.replica, self.replica.batch
        assert batch is not None
        if self.is_dummy or len(self.ends) >= batch.max_steps:
            self.close()
            return LOOP
        self.enter_next()
        self.group.go_if_complete()
        return replica.end_ns if replica.activity == RUNNING else PARK

    # --- the port of a leap -----------------------------------------------------------------------
    def settle(self) -> None:
        """Steps that keep pace are counted; others are of its replica's leap (`Replica.settle`)."""
        if self.is_dummy and not self.is_pending:
            self._count(self.ended())

    def unroll(self) -> None:
        """Something happens to the member: it has a single batch in flight, as stepping has it."""
        self.group.cut()
        replica = self.replica
        if replica.own_leap is not self:  # it kept pace, and may do so in the next wave
            if replica.own_leap is not None:
                replica.own_leap.unroll()
            return
        batch = replica.batch
        assert batch is not None
        if self.is_pending:
            replica.own_leap = None
            self.group.leaves(self)
            batch.max_steps = 1
            entry = self.group.entered.get(replica.replica_id)
            if entry is not None:
                self.group.entered[replica.replica_id] = entry._replace(steps=1)
            return
        if self.is_dummy:
            self.close()
            return
        ends = replica.ends
        assert ends is not None
        is_waiting = replica.activity == WAITING
        done = len(ends) if is_waiting else len(ends) - 1
        self.group.leaves(self)
        replica.own_leap = None
        if done:
            end_leap_part(replica, batch, ends[:done])
            replica.busy_ns -= self._waited_ns(done) + replica.waited_ns
            replica.start_ns = self.ends.item(done - 1)
            replica.waited_ns = 0 if is_waiting else self.starts.item(done) - replica.start_ns
        batch.max_steps = 1
        replica.ends = None
        if is_waiting:
            replica.end_ns = replica.start_ns
            _unpad(batch.shape)
            self.group.entered[replica.replica_id] = _entry(replica, batch.shape)


def _is_dummy(replica: Replica) -> bool:
    return replica.batch is not None and replica.batch.batch_id == DUMMY_ID


def _entry(replica: Replica, shape: BatchShape, steps: int = 1) -> _Entry:
    """A batch that waits, by itself, for the wave to leave."""
    life, actor = replica.incarnation, replica.actor

    def go(wait_ns: int) -> None:
        actor.tell(PrerequisiteMet(life=life, wait_ns=wait_ns))

    return _Entry(replica, shape, go, steps)


def _unpad(shape: BatchShape) -> None:
    """The batch has not been in a wave yet."""
    shape.padded_tokens = shape.group_tokens = shape.group_tokens_max = 0


class WaveGroup:
    """The barrier of one data-parallel group."""

    def __init__(self, name: str, *, shares_experts: bool, padded_tokens_max: int = 0) -> None:
        """`padded_tokens_max`: the largest batch to which others are padded; 0 = any."""
        self.name = name
        self.shares_experts = shares_experts
        self.padded_tokens_max = padded_tokens_max
        self.members: list[Replica] = []
        self.waves = 0
        self.dummies = 0
        self.entered: dict[int, _Entry] = {}
        """Members of the wave that forms; only this module writes to it."""
        self._parts: list[Part] = []
        """Members whose waves leap now."""
        self._steps = 0
        """Waves that leap now."""
        self._formed: list[Replica] = []

    def join(self, replica: Replica) -> None:
        """Called once for each member, by ascending id, before the run."""
        self.members.append(replica)
        replica.wave = self
        replica.is_monotone = False  # a gap depends on the others, too

    def wants(self, replica_id: int) -> bool:
        """A wave is forming, and this member is not in it."""
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
            member.own_leap = Part(self, member)
        self.go_if_complete()

    def go_if_complete(self) -> None:
        """Let the wave go, or see to it that members that rest enter it."""
        if not self._leave():
            for member in self.members:
                if member.replica_id not in self.entered and member.own_leap is None:
                    member.actor.look()

    def withdraw(self, replica_id: int) -> None:
        """A member no longer serves, or lost the batch that it had brought."""
        self.entered.pop(replica_id, None)
        self._leave()

    # --- waves that leap --------------------------------------------------------------------------
    def cut(self) -> None:
        """No wave after the one under way is certain any more."""
        if not self._parts:
            return
        ended = [part.ended() for part in self._parts]
        steps = min(ended) + 1
        if steps >= self._steps:
            return
        self.waves -= self._steps - steps
        self._steps = steps
        pairs = list(zip(self._parts, ended, strict=True))
        for part, done in pairs:
            part.cut(steps, is_over=done >= steps)
        formed, self._formed = self._formed, []
        if self.entered:
            for replica in formed:
                self._keep_pace(replica)

    def leaves(self, part: Part) -> None:
        """The member does not take part in what leaps now any more."""
        if part in self._parts:
            self._parts.remove(part)

    def forms_later(self, replica: Replica) -> None:
        """A member that keeps pace rests, unless another one is in the next wave already."""
        self._formed.append(replica)

    def _keep_pace(self, replica: Replica) -> None:
        now_ns = replica.clock.now_ns
        replica.rest_since_ns = -1
        replica.batch = batch = self.dummy(now_ns)
        replica.start_ns = replica.end_ns = now_ns
        replica.activity = WAITING
        replica.prerequisites.left = 1
        self.entered[replica.replica_id] = _entry(replica, batch.shape, replica.paces)
        if replica.paces > 1:
            replica.own_leap = Part(self, replica)

    # --- the wave ---------------------------------------------------------------------------------
    def _leave(self) -> bool:
        """Let the wave go if no member is missing."""
        if not self.entered:
            return False
        for member in self.members:
            if member.state in SERVES and member.replica_id not in self.entered:
                return False
        entries = [self.entered[i] for i in sorted(self.entered)]
        self.entered = {}
        self.waves += 1
        sizes = [entry.shape.new_tokens for entry in entries]
        waits_ns = [-1] * len(entries)
        steps = 1
        if 0 < self.padded_tokens_max < max(sizes):
            for entry in entries:
                entry.shape.group_tokens = -(-sum(sizes) // len(sizes))
                entry.shape.group_tokens_max = max(sizes)
            waits_ns = _end_together(entries)
        else:
            for entry in entries:
                entry.shape.padded_tokens = max(sizes)
            if self.shares_experts:
                waits_ns = _wait_in_every_layer(entries)
            steps = min(min(entry.steps for entry in entries), STEPS_MAX)
        if steps > 1 or any(entry.is_part for entry in entries):
            self._leap(entries, waits_ns, steps)
        else:
            for entry, wait_ns in zip(entries, waits_ns, strict=True):
                assert entry.go is not None
                entry.replica.own_leap = None
                entry.go(wait_ns)
        return True

    def _leap(self, entries: list[_Entry], waits_ns: list[int], steps: int) -> None:
        """The wave leaves, and so many waves in all go on by themselves."""
        import numpy as np

        now_ns = entries[0].replica.clock.now_ns
        self.waves += steps - 1
        starts: _Times = np.array([now_ns], dtype=np.int64)
        if steps == 1:
            runs = [
                np.array([_step_ns(entry) + max(0, wait_ns)], dtype=np.int64)
                if entry.is_part
                else starts
                for entry, wait_ns in zip(entries, waits_ns, strict=True)
            ]
        else:
            runs = [_run_ns(entry, steps) for entry in entries]
            if self.shares_experts:
                attention = [_attention_ns(entry, steps) for entry in entries]
                slowest = np.maximum.reduce(attention)
                runs = [run + slowest - own for run, own in zip(runs, attention, strict=True)]
            longest = np.maximum.reduce(runs)
            starts = np.concatenate((starts, now_ns + np.cumsum(longest[:-1])))
        self._steps = steps
        self._parts = []
        for entry, wait_ns, run in zip(entries, waits_ns, runs, strict=True):
            replica, go = entry.replica, entry.go
            part = replica.own_leap
            if go is not None:
                replica.own_leap = None  # what it is told now does not end its promise
                go(wait_ns)
            if steps > 1 or entry.is_part:
                assert isinstance(part, Part)
                replica.own_leap = part
                self._parts.append(part)
                part.extend(starts, starts + run)


def _step_ns(entry: _Entry) -> int:
    """What the next step of a promise takes."""
    replica = entry.replica
    cost_ns = replica.cost_ns(entry.shape)
    if replica.jitter is not None:
        cost_ns = replica.jitter.step(_number(entry), cost_ns)
    return cost_ns


def _number(entry: _Entry) -> int:
    """Steps that the member has taken before this one."""
    replica = entry.replica
    known = 0 if entry.go is not None or replica.ends is None else len(replica.ends)
    return replica.iterations + known


def _run_ns(entry: _Entry, steps: int) -> _Times:
    """What each of so many steps takes."""
    import numpy as np

    replica = entry.replica
    if _is_dummy(replica):
        costs = np.full(steps, replica.cost_ns(entry.shape), dtype=np.int64)
        ends = np.cumsum(costs)
    else:
        ends = replica.decode_run_ns(entry.shape, steps)
    if replica.jitter is not None:
        ends = replica.jitter.run(_number(entry), ends)
    found: _Times = np.array(ends, dtype=np.int64)
    found[1:] -= found[:-1]
    return found


def _attention_ns(entry: _Entry, steps: int) -> _Times:
    """What attention takes in each of so many steps."""
    import numpy as np

    replica, shape = entry.replica, entry.shape
    latency = replica.latency
    if _is_dummy(replica):
        return np.full(steps, _attention_of(latency, shape), dtype=np.int64)
    attention_run_ns = getattr(latency, "attention_run_ns", None)
    if attention_run_ns is not None:
        found: _Times = attention_run_ns(shape, steps)
        return found
    shapes = [next_decode_shape(shape, step) for step in range(steps)]
    return np.array([_attention_of(latency, each) for each in shapes], dtype=np.int64)


def _attention_of(latency: LatencyBackend, shape: BatchShape) -> int:
    parts = latency.components_ns(shape)
    return parts["attention_prefill"] + parts["attention_decode"]


def _end_together(entries: list[_Entry]) -> list[int]:
    """What each member waits for the slowest one."""
    costs_ns = [entry.replica.latency.iteration_ns(entry.shape) for entry in entries]
    return [max(costs_ns) - own_ns for own_ns in costs_ns]


def _wait_in_every_layer(entries: list[_Entry]) -> list[int]:
    """What each member waits for the slowest attention, over all layers."""
    attention_ns = [_attention_of(entry.replica.latency, entry.shape) for entry in entries]
    return [max(attention_ns) - own_ns for own_ns in attention_ns]
