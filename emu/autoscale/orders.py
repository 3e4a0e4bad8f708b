"""Actions of a plan: what is ordered of replicas, and loads of their weights. Plain values.

`Scaler` carries them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

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
