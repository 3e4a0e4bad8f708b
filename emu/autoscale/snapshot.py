"""What a planner sees: the cluster at one instant, as plain values.

A snapshot is what a real control plane could know at one instant: states, blocks in use, queue
lengths, markers of transfers under way; its metrics may be late. It never holds a request's true
output length (the oracle boundary). Planners and plan generators are pure functions of it. `Scaler`
carries the actions out.
"""

from __future__ import annotations

import msgspec

from emu.replica.states import Marker, ReplicaState

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
