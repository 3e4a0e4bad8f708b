"""Pods as the controller keeps them: which replica each has, and how far it is."""

from __future__ import annotations

import enum

from msgspec import Struct


class Stage(enum.Enum):
    """How far a pod is on its way."""

    PENDING = "pending"
    """No GPUs."""
    LOADING = "loading"
    """Weights are on their way to its GPUs."""
    STARTING = "starting"
    """Its replica was told to serve."""
    RUNNING = "running"
    """Its replica serves, or would if it had not crashed."""


class Slot(Struct, kw_only=True):
    """A pod."""

    name: str
    role: str
    revision: str
    """Of its deployment's template."""
    gpus: int
    grace_s: int
    stage: Stage = Stage.PENDING
    replica: int = -1
    life: int = 0
    """Of its replica."""
    loaded_ns: int = -1
    """When its weights are there."""
    is_ready: bool = False
    is_lost: bool = False
    """Its node is."""
    lost_ns: int = -1
    is_leaving: bool = False
    leaving_ns: int = -1
    is_cut: bool = False
    """Its grace was over before it was idle."""
    restarts: int = 0
    problem: str = ""
    """Why it has no GPUs."""
    # Unix seconds, for stamps.
    placed_s: float = 0.0
    changed_s: float = 0.0
    crashed_s: float = 0.0
    leaving_s: float = 0.0
