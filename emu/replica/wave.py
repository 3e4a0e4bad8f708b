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
it. Members never leap: what a wave brings depends on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from emu.latency.base import BatchShape
from emu.replica.completion import DUMMY_ID
from emu.replica.states import ReplicaState
from emu.scheduling.base import Batch

if TYPE_CHECKING:
    from emu.replica.replica import Replica

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


class _Entry(NamedTuple):
    replica: Replica
    shape: BatchShape
    go: Callable[[int], None]
    """Called when the wave leaves, with what the member waits for others inside its layers."""


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
        self._entered: dict[int, _Entry] = {}

    def join(self, replica: Replica) -> None:
        """Called once for each member, by ascending id, before the run."""
        self.members.append(replica)
        replica.wave = self

    def wants(self, replica_id: int) -> bool:
        """A wave is forming, and this member is not in it."""
        return bool(self._entered) and replica_id not in self._entered

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

    def enter(self, replica_id: int, shape: BatchShape, go: Callable[[int], None]) -> None:
        """A member's batch is formed; `go` is called when all members are there."""
        assert replica_id not in self._entered
        member = next(one for one in self.members if one.replica_id == replica_id)
        self._entered[replica_id] = _Entry(member, shape, go)
        if not self._leave():
            for member in self.members:
                if member.replica_id not in self._entered:
                    member.actor.look()

    def withdraw(self, replica_id: int) -> None:
        """A member no longer serves, or lost the batch that it had brought."""
        self._entered.pop(replica_id, None)
        self._leave()

    def _leave(self) -> bool:
        """Let the wave go if no member is missing."""
        if not self._entered:
            return False
        for member in self.members:
            if member.state in SERVES and member.replica_id not in self._entered:
                return False
        entries = [self._entered[i] for i in sorted(self._entered)]
        self._entered = {}
        self.waves += 1
        sizes = [entry.shape.new_tokens for entry in entries]
        waits_ns = [-1] * len(entries)
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
        for entry, wait_ns in zip(entries, waits_ns, strict=True):
            entry.go(wait_ns)
        return True


def _end_together(entries: list[_Entry]) -> list[int]:
    """What each member waits for the slowest one."""
    costs_ns = [entry.replica.latency.iteration_ns(entry.shape) for entry in entries]
    return [max(costs_ns) - own_ns for own_ns in costs_ns]


def _wait_in_every_layer(entries: list[_Entry]) -> list[int]:
    """What each member waits for the slowest attention, over all layers."""
    attention_ns = []
    for replica, shape, _ in entries:
        parts = replica.latency.components_ns(shape)
        attention_ns.append(parts["attention_prefill"] + parts["attention_decode"])
    return [max(attention_ns) - own_ns for own_ns in attention_ns]
