"""How a replica stands at an instant, as values that stay what they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from emu.replica.view import ReplicaHandle
from emu.report.history import Record


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One replica at one instant, exact also in the middle of an iteration or a leap."""

    replica: int
    at_ns: int
    state: str
    since_ns: int
    """When that state began."""
    cause: str
    """Why it is in that state."""
    flight: str
    """What it is in the middle of: idle, step, run (a leap), staged, member, layered, relayed,
    awaiting, measured."""
    doing: str
    """The same in words."""
    step_ends_ns: int
    """When the iteration in flight ends; -1 = none is."""
    is_paused: bool
    running: list[int]
    """Ids of admitted requests, in order of admission."""
    waiting: list[int]
    """Ids of waiting requests, head first."""
    kv_blocks_used: int
    kv_blocks_total: int
    prefill_tokens: int
    """Prompt (or recomputed) tokens computed so far."""
    decode_tokens: int
    """Output tokens computed so far."""
    transitions: list[str]
    """Its changes of state, oldest first."""
    last: list[Record] = []
    """What has happened at it last, oldest first, as in `events.jsonl`; empty where nothing kept
    it (`Moment` does)."""


def standing(replica: ReplicaHandle, at_ns: int, last: Iterable[Record] = ()) -> Standing:
    """How it stands now, at `at_ns`."""
    view = replica.view()
    prefill, decode = view.tokens_produced
    now = view.in_flight
    return Standing(
        replica=replica.replica_id,
        at_ns=at_ns,
        state=replica.state.value,
        since_ns=_since_ns(replica.history),
        cause=_cause(replica.history),
        flight=now.flight,
        doing=now.doing,
        step_ends_ns=now.step_ends_ns,
        is_paused=replica.is_paused,
        running=[request.request_id for request in view.residents()],
        waiting=[request.request_id for request in view.waiting()],
        kv_blocks_used=view.blocks_used,
        kv_blocks_total=view.blocks_total,
        prefill_tokens=prefill,
        decode_tokens=decode,
        transitions=list(replica.history),
        last=list(last),
    )


def _since_ns(history: Sequence[str]) -> int:
    return int(history[-1].partition(" ")[0]) if history else 0


def _cause(history: Sequence[str]) -> str:
    return history[-1].partition(" by ")[2] if history else "start of the run"
