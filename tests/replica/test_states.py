"""The table of transitions: all of it, and nothing else."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from emu.errors import InvalidTransition
from emu.replica.events import Kind
from emu.replica.states import (
    GPU_ROLE,
    TRANSITIONS,
    Marker,
    ReplicaState,
    Rule,
    Writer,
    mermaid,
    move,
)
from emu.replica.table import HANDLERS

S = ReplicaState
WRITERS: tuple[Writer, ...] = (
    "loop",
    "planner",
    "transfer",
    "command",
    "fault",
    "recovery",
)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "lab" / "states.md"


class FakeReplica:
    """A state and its writer."""

    def __init__(self, state: ReplicaState) -> None:
        self.replica_id = 7
        self.state = state
        self.history: list[str] = []


@pytest.mark.parametrize(("before", "after"), list(product(S, S)))
@pytest.mark.parametrize("writer", WRITERS)
def test_the_table_decides(before: ReplicaState, after: ReplicaState, writer: Writer) -> None:
    replica = FakeReplica(before)
    rule = TRANSITIONS.get((before, after))
    if rule is not None and writer in rule.writers:
        move(replica, before, after, writer=writer, cause="why", at_ns=5)
        assert replica.state is after
        assert "why" in replica.history[-1]
    else:
        with pytest.raises(InvalidTransition, match="replica 7"):
            move(replica, before, after, writer=writer, cause="why", at_ns=5)
        assert replica.state is before
        assert not replica.history


def test_a_writer_that_comes_too_late_is_refused() -> None:
    replica = FakeReplica(S.AUS_DECODE)  # the planner has revived it
    with pytest.raises(InvalidTransition, match="it is aus_decode"):
        move(replica, S.SHUTTING_DECODE, S.SHUTTING_NULL, writer="loop", cause="x", at_ns=1)


def test_the_story_of_an_error_tells_the_last_moves() -> None:
    replica = FakeReplica(S.PREFILL)
    move(replica, S.PREFILL, S.SHUTTING_PREFILL, writer="planner", cause="surplus", at_ns=10)
    with pytest.raises(InvalidTransition) as error:
        move(replica, S.SHUTTING_PREFILL, S.DECODE, writer="planner", cause="oops", at_ns=20)
    assert "10 prefill -> shutting_prefill by planner: surplus" in str(error.value)


def test_all_of_blitzscale_is_there() -> None:
    blitz = {
        "inactive", "loading_prefill", "loading_decode", "prefill", "new_prefill",
        "refractory_prefill", "old_prefill", "decode", "mutating_to_decode", "aus_prefill",
        "aus_decode", "shutting_prefill", "shutting_decode", "shutting_null",
    }  # fmt: skip
    assert blitz < {state.value for state in S}
    assert {marker.value for marker in Marker} == {
        "none", "rdma_sending", "rdma_loading", "rdma_casting", "nvlink_sending",
        "nvl_casting", "tanz_casting",
    }  # fmt: skip
    automatic = [
        (before, after)
        for (before, after), rule in TRANSITIONS.items()
        if {before.value, after.value} <= blitz and rule.writers != ("command",)
    ]
    assert len(automatic) >= 25


def test_every_state_has_a_handler_an_account_and_a_way_out() -> None:
    for state in S:
        assert HANDLERS[state][Kind.BOUNDARY] is not None, state
        assert state in GPU_ROLE, state
        assert any(before is state for before, _ in TRANSITIONS), state
    assert all(isinstance(rule, Rule) and rule.why for rule in TRANSITIONS.values())


def test_every_state_can_be_reached() -> None:
    reached = {S.INACTIVE, S.PREFILL, S.DECODE, S.COLOCATED}
    grown = True
    while grown:
        more = {after for before, after in TRANSITIONS if before in reached}
        grown = not more <= reached
        reached |= more
    assert reached | {S.AUS_PREFILL} == set(S)


def test_the_diagram_in_the_docs_is_the_table() -> None:
    text = DOCS.read_text()
    assert mermaid() in text
    for state in S:
        assert f"`{state.value}`" in text, state
