"""What happens to a replica in each state, on each event: the whole machine on one page.

`HANDLERS[state][kind]` is a handler, or None: such an event is a bug of its sender, and raises
`UnexpectedEvent` with the replica's history. `ignore` means: it may come, and means nothing here.
Which changes of state are allowed is a table of its own (`states.py`), and so is what may be in
flight in which state (`flight/table.py`): the end of a flight is no event.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from emu.replica import crash, inbound, live_scaling, serving
from emu.replica.events import Kind
from emu.replica.inbound import ignore, look_again
from emu.replica.replica import Table
from emu.replica.states import LOADING, ReplicaState

S = ReplicaState
K = Kind
_ALL: Final = frozenset(S)
_AWAY: Final = frozenset({S.INACTIVE, S.FAILED}) | LOADING
"""States in which nothing is served."""
_NEW: Final = frozenset({S.NEW_PREFILL, S.REFRACTORY_PREFILL})
_ROUTED: Final = frozenset({S.COLOCATED, S.PREFILL})
"""States in which the router gives requests."""
_SINGLE: Final = frozenset({S.COLOCATED, S.SHUTTING_COLOCATED})
"""States of replicas whose KV never moves to another by a watcher."""
_DECODES: Final = frozenset({S.DECODE, S.SHUTTING_DECODE, S.AUS_DECODE})
_DRAINS: Final = frozenset({S.SHUTTING_PREFILL, S.SHUTTING_DECODE, S.SHUTTING_COLOCATED})


def _table() -> Table:
    table: Table = {state: [None] * len(Kind) for state in S}

    def put(kind: Kind, states: Iterable[ReplicaState], handler: Any) -> None:
        for state in states:
            assert table[state][kind] is None, f"{state} {kind.name} has two handlers"
            table[state][kind] = handler

    def rest_ignores(kind: Kind, but: Iterable[ReplicaState] = ()) -> None:
        put(kind, [s for s in S if table[s][kind] is None and s not in but], ignore)

    _put_boundaries(put)
    _put_requests(put, rest_ignores)
    _put_weights_and_state(put, rest_ignores)
    _put_faults(put, rest_ignores)
    return table


def _put_boundaries(put: Any) -> None:
    """What each state does when nothing is in flight."""
    put(K.BOUNDARY, _AWAY, serving.idle)
    put(K.BOUNDARY, (S.COLOCATED, S.PREFILL, S.DECODE), serving.iterate)
    put(K.BOUNDARY, _NEW, live_scaling.new_prefill)
    put(K.BOUNDARY, (S.OLD_PREFILL,), live_scaling.old_prefill)
    put(K.BOUNDARY, (S.AUS_PREFILL,), serving.aus_prefill)
    put(K.BOUNDARY, (S.AUS_DECODE,), serving.aus_decode)
    put(K.BOUNDARY, (S.MUTATING_TO_DECODE,), serving.mutate_to_decode)
    put(K.BOUNDARY, (S.SHUTTING_PREFILL,), serving.shut_prefill)
    put(K.BOUNDARY, (S.SHUTTING_DECODE,), serving.shut_decode)
    put(K.BOUNDARY, (S.SHUTTING_NULL,), serving.shut_null)
    put(K.BOUNDARY, (S.SHUTTING_COLOCATED,), serving.shut_colocated)


def _put_requests(put: Any, rest_ignores: Any) -> None:
    """Requests and KV that come and go."""
    put(K.SUBMITTED, _ROUTED, inbound.submitted)
    put(K.UNRESERVED, _DECODES, inbound.unreserved)
    rest_ignores(K.UNRESERVED, _SINGLE)
    put(K.RELEASED, _ALL - _SINGLE - _AWAY, inbound.released)
    rest_ignores(K.RELEASED, _SINGLE)
    put(K.STOP_UNDONE, _DECODES, inbound.stop_undone)
    put(K.LIVE_MOVES, _ALL - _SINGLE - {S.INACTIVE}, inbound.live_moves)
    put(K.PREREQUISITE_MET, _ALL, serving.prerequisite_met)
    put(K.MEASURED, _ALL, serving.measured)
    put(K.ACTIVATION_ARRIVED, _ALL, inbound.activation_arrived)
    put(K.LOOKED, _ALL, look_again)
    put(K.CANCELLED, _ALL, inbound.cancelled)
    put(K.CANCELS_APPLIED, _ALL, inbound.cancels_applied)
    put(K.STOP_ASKED, _ALL - _SINGLE, inbound.stop_asked)
    put(K.KV_DELIVERED, (S.DECODE, S.AUS_DECODE), inbound.kv_delivered)
    put(K.KV_DELIVERED, (S.SHUTTING_DECODE,), inbound.kv_delivered_late)


def _put_weights_and_state(put: Any, rest_ignores: Any) -> None:
    """Weights that arrive, commands, the lock."""
    put(K.SEGMENT_ARRIVED, LOADING, inbound.segment_arrived)
    put(K.SEGMENT_ARRIVED, (S.NEW_PREFILL,), inbound.segment_arrived_live)
    put(K.SEGMENT_ARRIVED, (S.REFRACTORY_PREFILL,), ignore)
    put(K.WEIGHTS_ARRIVED, LOADING, inbound.weights_arrived)
    put(K.WEIGHTS_ARRIVED, (S.NEW_PREFILL,), inbound.weights_arrived_live)
    put(K.LOAD_GIVEN_UP, LOADING, inbound.load_given_up)
    put(K.LOAD_GIVEN_UP, (S.NEW_PREFILL,), live_scaling.load_given_up_live)
    put(K.COMMANDED, _ALL, inbound.commanded)
    put(K.LOCK_GRANTED, (S.DECODE, S.AUS_DECODE), inbound.lock_granted_late)
    put(K.LOCK_GRANTED, _ALL - {S.DECODE, S.AUS_DECODE}, inbound.lock_granted)


def _put_faults(put: Any, rest_ignores: Any) -> None:
    """What faults do, and what follows."""
    put(K.PAUSED, _ALL - {S.INACTIVE, S.FAILED}, crash.paused)
    put(K.UNPAUSED, _ALL, crash.unpaused)
    put(K.CRASHED, _ALL - {S.FAILED}, crash.crashed)
    put(K.RESTARTED, (S.FAILED,), inbound.restarted)
    rest_ignores(K.RESTARTED)
    put(K.SLOWDOWN_SET, _ALL, inbound.slowdown_set)
    put(K.TIER_LOST, _ALL, serving.tier_lost)
    put(K.KV_SHRUNK, _ALL, inbound.kv_shrunk)
    put(K.KV_RESTORED, _ALL, inbound.kv_restored)
    put(K.DRAIN_EXPIRED, _DRAINS, inbound.drain_expired)
    rest_ignores(K.DRAIN_EXPIRED)


HANDLERS: Final[Table] = _table()
"""(state, kind of event) -> handler."""
EXPECTED: Final = frozenset(
    (state, Kind(kind))
    for state, row in HANDLERS.items()
    for kind, handler in enumerate(row)
    if handler is not None
)
"""Pairs that may happen; every other one raises."""
