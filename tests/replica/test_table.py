"""The table of handlers: every kind of event means something somewhere."""

from __future__ import annotations

import pytest

from emu.replica.events import Kind
from emu.replica.states import ReplicaState
from emu.replica.table import HANDLERS

S = ReplicaState


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name.lower())
def test_every_kind_of_event_is_handled_in_some_state(kind: Kind) -> None:
    assert any(row[kind] is not None for row in HANDLERS.values())


@pytest.mark.parametrize(
    "kind", [Kind.PREREQUISITE_MET, Kind.MEASURED, Kind.CANCELLED, Kind.LOOKED], ids=str
)
def test_what_may_come_late_is_expected_in_every_state(kind: Kind) -> None:
    assert [state for state in S if HANDLERS[state][kind] is None] == []
