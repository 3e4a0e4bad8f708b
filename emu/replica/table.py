"""What happens to a replica in each state, on each event: the whole machine on one page.

`HANDLERS[state][kind]` is a handler, or None: such an event is a bug of its sender, and raises
`UnexpectedEvent` with the replica's history. `ignore` means: it may come, and means nothing here.
Which changes of state are allowed is a table of its own (`states.py`), and so is what may be in
flight in which state (`flight/table.py`): the end of a flight is no event.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from emu.replica import crash, inbound, live_scaling, orders, posted, serving
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


class _Rows:
    """The rows of the table while they are filled."""

    def __init__(self) -> None:
        self.table: Table = {state: [None] * len(Kind) for state in S}

    def put(self, kind: Kind, states: Iterable[ReplicaState], handler: Any) -> None:
        """The handler of this kind of event in these states; it is for that kind's own class."""
        for state in states:
            assert self.table[state][kind] is None, f"{state} {kind.name} has two handlers"
            self.table[state][kind] = handler

    def rest_ignores(self, kind: Kind, but: Iterable[ReplicaState] = ()) -> None:
        """States that have no handler yet, but for these, ignore the event."""
        self.put(kind, [s for s in S if self.table[s][kind] is None and s not in but], ignore)


def _table() -> Table:
    rows = _Rows()
    _put_boundaries(rows)
    _put_requests(rows)
    _put_weights_and_state(rows)
    _put_faults(rows)
    return rows.table


def _put_boundaries(rows: _Rows) -> None:
    """What each state does when nothing is in flight."""
    rows.put(K.BOUNDARY, _AWAY, serving.idle)
    rows.put(K.BOUNDARY, (S.COLOCATED, S.PREFILL, S.DECODE), serving.iterate)
    rows.put(K.BOUNDARY, _NEW, live_scaling.new_prefill)
    rows.put(K.BOUNDARY, (S.OLD_PREFILL,), live_scaling.old_prefill)
    rows.put(K.BOUNDARY, (S.AUS_PREFILL,), serving.aus_prefill)
    rows.put(K.BOUNDARY, (S.AUS_DECODE,), serving.aus_decode)
    rows.put(K.BOUNDARY, (S.MUTATING_TO_DECODE,), serving.mutate_to_decode)
    rows.put(K.BOUNDARY, (S.SHUTTING_PREFILL,), serving.shut_prefill)
    rows.put(K.BOUNDARY, (S.SHUTTING_DECODE,), serving.shut_decode)
    rows.put(K.BOUNDARY, (S.SHUTTING_NULL,), serving.shut_null)
    rows.put(K.BOUNDARY, (S.SHUTTING_COLOCATED,), serving.shut_colocated)


def _put_requests(rows: _Rows) -> None:
    """Requests and KV that come and go."""
    rows.put(K.SUBMITTED, _ROUTED, inbound.submitted)
    rows.put(K.UNRESERVED, _DECODES, inbound.unreserved)
    rows.rest_ignores(K.UNRESERVED, _SINGLE)
    rows.put(K.RELEASED, _ALL - _SINGLE - _AWAY, inbound.released)
    rows.rest_ignores(K.RELEASED, _SINGLE)
    rows.put(K.STOP_UNDONE, _DECODES, inbound.stop_undone)
    rows.put(K.LIVE_MOVES, _ALL - _SINGLE - {S.INACTIVE}, inbound.live_moves)
    rows.put(K.PREREQUISITE_MET, _ALL, serving.prerequisite_met)
    rows.put(K.MEASURED, _ALL, serving.measured)
    rows.put(K.ACTIVATION_ARRIVED, _ALL, orders.activation_arrived)
    rows.put(K.LOOKED, _ALL, look_again)
    rows.put(K.CANCELLED, _ALL, posted.cancelled)
    rows.put(K.CANCELS_APPLIED, _ALL, posted.cancels_applied)
    rows.put(K.STOP_ASKED, _ALL - _SINGLE, posted.stop_asked)
    rows.put(K.KV_DELIVERED, (S.DECODE, S.AUS_DECODE), posted.kv_delivered)
    rows.put(K.KV_DELIVERED, (S.SHUTTING_DECODE,), posted.kv_delivered_late)


def _put_weights_and_state(rows: _Rows) -> None:
    """Weights that arrive, commands, the lock."""
    rows.put(K.SEGMENT_ARRIVED, LOADING, orders.segment_arrived)
    rows.put(K.SEGMENT_ARRIVED, (S.NEW_PREFILL,), orders.segment_arrived_live)
    rows.put(K.SEGMENT_ARRIVED, (S.REFRACTORY_PREFILL,), ignore)
    rows.put(K.WEIGHTS_ARRIVED, LOADING, orders.weights_arrived)
    rows.put(K.WEIGHTS_ARRIVED, (S.NEW_PREFILL,), orders.weights_arrived_live)
    rows.put(K.LOAD_GIVEN_UP, LOADING, orders.load_given_up)
    rows.put(K.LOAD_GIVEN_UP, (S.NEW_PREFILL,), live_scaling.load_given_up_live)
    rows.put(K.COMMANDED, _ALL, orders.commanded)
    rows.put(K.LOCK_GRANTED, (S.DECODE, S.AUS_DECODE), orders.lock_granted_late)
    rows.put(K.LOCK_GRANTED, _ALL - {S.DECODE, S.AUS_DECODE}, orders.lock_granted)


def _put_faults(rows: _Rows) -> None:
    """What faults do, and what follows."""
    rows.put(K.PAUSED, _ALL - {S.INACTIVE, S.FAILED}, crash.paused)
    rows.put(K.UNPAUSED, _ALL, crash.unpaused)
    rows.put(K.CRASHED, _ALL - {S.FAILED}, crash.crashed)
    rows.put(K.RESTARTED, (S.FAILED,), orders.restarted)
    rows.rest_ignores(K.RESTARTED)
    rows.put(K.SLOWDOWN_SET, _ALL, orders.slowdown_set)
    rows.put(K.TIER_LOST, _ALL, serving.tier_lost)
    rows.put(K.KV_SHRUNK, _ALL, posted.kv_shrunk)
    rows.put(K.KV_RESTORED, _ALL, posted.kv_restored)
    rows.put(K.DRAIN_EXPIRED, _DRAINS, posted.drain_expired)
    rows.rest_ignores(K.DRAIN_EXPIRED)


HANDLERS: Final[Table] = _table()
"""(state, kind of event) -> handler."""
EXPECTED: Final = frozenset(
    (state, Kind(kind))
    for state, row in HANDLERS.items()
    for kind, handler in enumerate(row)
    if handler is not None
)
"""Pairs that may happen; every other one raises."""
