"""What a planner sees, and what a plan consists of: plain values.

A snapshot is what a real control plane could know at one instant: states, blocks in use, queue
lengths, markers of transfers under way; its metrics may be late. It never holds a request's true
output length (the oracle boundary). Planners and plan generators are pure functions of it. `Scaler`
carries the actions out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from emu.replica.states import Marker, ReplicaState

# --------------------------------------------------------------------------------------------------
# The cluster at one instant


S = ReplicaState


class ReplicaView(msgspec.Struct, frozen=True, gc=False):
    """One replica as the control plane sees it."""

    replica_id: int
    state: ReplicaState
    """`failed` also where another model's replica is on its GPUs."""
    machine: int
    blocks_used: int = 0
    blocks_total: int = 1
    running: int = 0
    waiting: int = 0
    is_loaded: bool = False
    """All weights are on its GPUs."""
    is_closed: bool = True
    """It holds its own lock: no inbound KV."""
    is_lock_free: bool = False
    """No actor holds its lock (an idle decode replica may be closed at once)."""
    rdma: Marker = Marker.NONE
    nvl: Marker = Marker.NONE
    shut_ns: int = -1
    """When it began to shut; -1 = it does not."""
    last_role: str = ""
    """prefill or decode: what it did before it shut."""
    migrations: int = 0
    """Own outbound migrations that have not ended."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The cluster at one instant."""

    now_ns: int
    replicas: tuple[ReplicaView, ...]
    block_tokens: int = 64
    """Tokens of a KV block."""
    waiting_tokens: int = 0
    """Prompt tokens that no replica has begun."""
    waiting_requests: int = 0
    outstanding: int = 0
    tokens_in_migration: int = 0
    scarce_decode: bool = False
    """A batch found no destination: idle decode replicas are not to be dropped now."""
    cached_machines: tuple[int, ...] = ()
    """Machines whose host memory holds the weights."""
    may_empty: bool = False
    """No request has been there for `autoscale.idle_s`: even the last replica may go."""
    avoided: tuple[tuple[int, int], ...] = ()
    """(source, target) of loads that were given up lately; source -1 = the target's machine."""
    is_busy: bool = False
    """A multicast that the planner waits for is under way."""


class Site(msgspec.Struct, frozen=True, gc=False):
    """Where a replica is: fixed for the whole run."""

    replica_id: int
    machine: int
    domain: int
    """Fast-interconnect domain of its first GPU."""
    leaf: str
    nic_bytes_per_s: int
    """Of all its ranks together."""
    has_nvlink: bool
    can_go_live: bool = True
    """Its engine can serve while weights arrive (whole prompts pulled from the global queue)."""


# --------------------------------------------------------------------------------------------------
# What a planner sees of the load: the present, or metrics that are late, still or not there.
#
# Which replicas there are, and in which states, a control plane knows by itself: it ordered that,
# and hears when a process dies. The load (blocks, running and waiting requests, tokens) comes as
# metrics through a collector. That takes `autoscale.metrics_delay_ms`, and faults may add to it,
# stop it, or leave the planner with none. Several at once: none beats still, still beats late;
# delays add up.
#
# Late figures are those of the newest sample that is old enough. Samples are taken when the planner
# looks, no closer than a 64th of the delay, so that memory does not grow with it.


SAMPLES_PER_DELAY: Final = 64


class Metrics(NamedTuple):
    """The figures of a snapshot that come as metrics."""

    waiting_tokens: int
    waiting_requests: int
    outstanding: int
    tokens_in_migration: int
    scarce_decode: bool
    replicas: tuple[tuple[int, int, int], ...]
    """Blocks in use, running and waiting requests, by replica."""


def load_of(snapshot: Snapshot) -> Metrics:
    """Its load alone."""
    return Metrics(
        snapshot.waiting_tokens,
        snapshot.waiting_requests,
        snapshot.outstanding,
        snapshot.tokens_in_migration,
        snapshot.scarce_decode,
        tuple([(view.blocks_used, view.running, view.waiting) for view in snapshot.replicas]),
    )


def with_load(snapshot: Snapshot, load: Metrics) -> Snapshot:
    """States and roles of the snapshot, load of another time."""
    views = [
        msgspec.structs.replace(view, blocks_used=used, running=running, waiting=waiting)
        for view, (used, running, waiting) in zip(snapshot.replicas, load.replicas, strict=True)
    ]
    return msgspec.structs.replace(
        snapshot,
        replicas=tuple(views),
        waiting_tokens=load.waiting_tokens,
        waiting_requests=load.waiting_requests,
        outstanding=load.outstanding,
        tokens_in_migration=load.tokens_in_migration,
        scarce_decode=load.scarce_decode,
    )


class Sight:
    """Metrics on their way to one planner."""

    def __init__(self, delay_ns: int) -> None:
        """`delay_ns`: what they always take."""
        self._delay_ns = delay_ns
        self._samples: deque[tuple[int, Metrics]] = deque()
        self._is_behind = False
        """The present differs from the last sample, and it is too early for another."""
        self._stills = 0
        self._still: Metrics | None = None
        self._losses = 0

    def see(self, now: Snapshot) -> Snapshot | None:
        """What the planner decides on; None = it knows of no load and decides nothing."""
        if self._losses:
            return None
        if self._still is not None:
            return with_load(now, self._still)
        if not self._delay_ns:
            return now
        self._sample(now)
        samples = self._samples
        while len(samples) > 1 and samples[1][0] <= now.now_ns - self._delay_ns:
            samples.popleft()
        return with_load(now, samples[0][1])

    def _sample(self, now: Snapshot) -> None:
        load, samples = load_of(now), self._samples
        self._is_behind = False
        if not samples:
            samples.append((now.now_ns, load))
        elif load != samples[-1][1]:
            self._is_behind = now.now_ns < self._next_ns
            if not self._is_behind:
                samples.append((now.now_ns, load))

    @property
    def _next_ns(self) -> int:
        """Earliest time of the next sample."""
        return self._samples[-1][0] + max(1, self._delay_ns // SAMPLES_PER_DELAY)

    def wake_ns(self) -> int:
        """When there will be something else to see, even if nothing changes; -1 = never."""
        if self._losses or self._still is not None or not self._samples:
            return -1
        wakes = [self._next_ns] if self._is_behind else []
        if len(self._samples) > 1:
            wakes.append(self._samples[1][0] + self._delay_ns)
        return min(wakes, default=-1)

    # --- faults -----------------------------------------------------------------------------------
    def freeze(self, now: Snapshot) -> None:
        """From now on the load that is seen stays as it is."""
        if self._still is None:
            seen = self.see(now)
            self._still = load_of(now if seen is None else seen)
        self._stills += 1

    def thaw(self) -> None:
        """The end of a `freeze`."""
        self._stills -= 1
        if not self._stills:
            self._still = None

    def slow(self, delay_ns: int, now: Snapshot) -> None:
        """Metrics take so much longer, or (negative) the end of that."""
        if not self._samples:
            self._sample(now)
        self._delay_ns += delay_ns
        if not self._delay_ns:
            self._samples.clear()

    def lose(self) -> None:
        """From now on none arrive."""
        self._losses += 1

    def find(self) -> None:
        """The end of a `lose`."""
        self._losses -= 1


# --------------------------------------------------------------------------------------------------
# Actions of a plan


Role = Literal["prefill", "decode", "new_prefill", "colocated"]
Method = Literal["nvlink", "p2p", "chain", "tanz", "host", "remote", "disk", "delay"]


class Revive(msgspec.Struct, frozen=True, tag=True):
    """A replica that is shutting goes back to its role."""

    replica: int


class Reuse(msgspec.Struct, frozen=True, tag=True):
    """A warm spare gets a role at no cost."""

    replica: int
    role: Role


class MakeSpare(msgspec.Struct, frozen=True, tag=True):
    """An idle decode replica becomes a spare at once."""

    replica: int


class Expire(msgspec.Struct, frozen=True, tag=True):
    """A spare loses its weights."""

    replica: int
    cause: str


class Mutate(msgspec.Struct, frozen=True, tag=True):
    """A prefill replica becomes a decode replica."""

    replica: int


class Shut(msgspec.Struct, frozen=True, tag=True):
    """A replica takes nothing new and drains."""

    replica: int


class Help(msgspec.Struct, frozen=True, tag=True):
    """A prefill replica helps those that load live (OldPrefill)."""

    replica: int


class Target(msgspec.Struct, frozen=True):
    """A replica that gets weights, and what it becomes."""

    replica: int
    role: Role


class Load(msgspec.Struct, frozen=True, tag=True):
    """Weights travel.

    nvlink, chain: one source, the targets in the order in which they forward. p2p: one source,
    one target. tanz: one source for each lane; `targets` column by column (a column is a
    machine), lane by lane. host, remote, disk, delay: one target, no source.
    """

    method: Method
    targets: tuple[Target, ...]
    sources: tuple[int, ...] = ()
    machine: int = -1
    """remote: the machine from whose memory they come."""

    @property
    def is_live(self) -> bool:
        """Some target serves while its weights arrive."""
        return any(target.role == "new_prefill" for target in self.targets)


Action = Revive | Reuse | MakeSpare | Expire | Mutate | Shut | Help | Load


def involved(action: Action) -> Sequence[int]:
    """Replicas that an action is about: targets of loads, then their sources."""
    if isinstance(action, Load):
        return [*(target.replica for target in action.targets), *action.sources]
    return [action.replica]


def words(action: Action) -> str:
    """An action for people."""
    if isinstance(action, Load):
        sources = ",".join(map(str, action.sources))
        targets = " ".join(f"{t.replica}:{t.role}" for t in action.targets)
        return f"load {action.method} {sources + ' -> ' if sources else ''}{targets}"
    role = f" as {action.role}" if isinstance(action, Reuse) else ""
    return f"{type(action).__name__.lower()} {action.replica}{role}"
