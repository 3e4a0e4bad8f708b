"""In which states of a replica which flight may be: what is in flight there is ended there.

A flight begins in a state, and may still be there when another actor has changed it. What is not in
this table is a bug of what has changed the state, and raises `UnexpectedEvent` at that change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from emu.replica.flight.base import Sort
from emu.replica.states import LOADING, ReplicaState

S = ReplicaState
_ALL: Final = frozenset(S)
_AWAY: Final = frozenset({S.INACTIVE, S.FAILED}) | LOADING
"""States in which nothing is served."""
_NEW: Final = frozenset({S.NEW_PREFILL, S.REFRACTORY_PREFILL})
_BATCHES: Final = _ALL - _AWAY - _NEW
"""States in which a batch may be in flight, begun in this state or the one before."""

FLIES: Final[Mapping[Sort, frozenset[ReplicaState]]] = {
    Sort.IDLE: _ALL,
    Sort.STEP: _BATCHES,
    Sort.RUN: _BATCHES,
    Sort.STAGED: _ALL,
    Sort.MEMBER: _ALL,
    Sort.LAYERED: _ALL,
    Sort.RELAYED: frozenset({S.OLD_PREFILL}),
    Sort.AWAITING: _BATCHES,
    Sort.MEASURED: _ALL - _AWAY,
}
"""A pipeline and a member are in flight for all of a replica's life, and may be empty: with a
batch, they may be where a `Step` may. A load that is given up leaves its layers to end anywhere."""


def may_fly(sort: Sort, state: ReplicaState, *, holds_batch: bool) -> bool:
    """Whether such a flight, with a batch or without, may be in flight in that state."""
    if holds_batch and sort in (Sort.STAGED, Sort.MEMBER) and state not in _BATCHES:
        return False
    return state in FLIES[sort]
