"""What features have in common that give a replica its KV pool: which replicas can have one."""

from __future__ import annotations

from collections.abc import Iterator

from emu.config.schema import Config
from emu.config.tables import Problem
from emu.features.base import Feature, Tables
from emu.features.modes import CACHED_STATES, MODELS, PLANNER, ROLES, WINDOWS, Conflict

_LAYERS = "{model} has layers that keep other things than all tokens"


def colocated_only(key: str, problem: str) -> tuple[Conflict, ...]:
    """It needs colocated replicas of one model; the words when they are not."""
    return tuple(Conflict(mode, key, problem) for mode in (ROLES, MODELS, PLANNER))


def all_tokens_only(key: str) -> tuple[Conflict, ...]:
    """It needs layers that keep all tokens."""
    return tuple(Conflict(mode, key, _LAYERS) for mode in (WINDOWS, CACHED_STATES))


class PoolFeature(Feature):
    """A feature with one key, whose part in the scheduler is a pool."""

    def problems_of_roles(self, config: Config) -> Iterator[Problem]:
        """Replicas that are not colocated ones of one model."""
        if any(group.role != "colocated" for group in config.replicas) or config.models:
            yield tuple(self.key.split(".")), self.said(ROLES)

    def withdraw(self, tables: Tables) -> None:
        """The pool is a plain one."""
        table, key = self.key.split(".")
        tables[table].pop(key, None)
