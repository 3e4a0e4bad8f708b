"""What the controller sees of the emulated cluster, and what it may do to it. Pure data."""

from __future__ import annotations

from msgspec import Struct


class MachineView(Struct, frozen=True, kw_only=True):
    """A machine."""

    gpus: int
    gpu: str
    host_memory_gib: float
    is_lost: bool = False
    """A fault has it."""


class ReplicaView(Struct, frozen=True, kw_only=True):
    """A replica."""

    replica_id: int
    machine: int
    gpus: int
    port: int
    """Its own; 0 = it has none."""
    role: str = ""
    """prefill, decode or colocated; empty where it has none."""
    phase: str = "inactive"
    """inactive, loading, serving, draining, spare or failed."""
    life: int = 0
    """Grows with each crash."""


class ClusterView(Struct, frozen=True, kw_only=True):
    """The cluster at an instant."""

    now_ns: int
    """Emulated."""
    now_s: float
    """Unix time."""
    machines: tuple[MachineView, ...]
    replicas: tuple[ReplicaView, ...]


class Facts(Struct, frozen=True, kw_only=True):
    """What does not change."""

    model: str
    host: str
    """Address of the ports."""
    roles: tuple[str, ...]
    """Roles that replicas of this cluster can have."""
    load_ns: int
    """Emulated time in which weights cross from host memory to the GPUs."""
    version: str
    face: str = "vllm"
    session: str = ""


class Start(Struct, frozen=True):
    """A replica whose weights are there begins to serve."""

    replica: int
    role: str


class Stop(Struct, frozen=True):
    """A replica takes nothing more and ends what it has."""

    replica: int


class EndDrain(Struct, frozen=True):
    """The grace of a replica that stops is over."""

    replica: int


class LoseNode(Struct, frozen=True):
    """A machine is gone for good."""

    machine: int


Action = Start | Stop | EndDrain | LoseNode
