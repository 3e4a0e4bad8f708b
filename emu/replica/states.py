"""Everything that affects a replica's state lives in this file.

A replica is in one of the states below. `TRANSITIONS` lists every allowed change with the writers
that may make it and why; `move` is the only code in the program that assigns `state`. It is a
compare-and-set: the writer says which state it believes the replica to be in, so that the three
kinds of writer (the replica's own loop, the planner, a transfer task) can never overwrite each
other's decision.

The first fourteen states and their transitions are BlitzScale's (OSDI'25). emu adds: colocated
serving (one replica does both phases, as vLLM does by default) with its loading and draining,
and FAILED for a crashed replica. The planner's markers are a type of their own: a marker says
that a replica takes part in a weight transfer, it never is a state.

`docs/lab/states.md` explains each state; its diagram is `mermaid()` of this table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, Protocol

import msgspec

from emu.errors import InvalidTransition


class ReplicaState(enum.Enum):
    """What a replica's loop does."""

    INACTIVE = "inactive"
    LOADING_PREFILL = "loading_prefill"
    LOADING_DECODE = "loading_decode"
    PREFILL = "prefill"
    NEW_PREFILL = "new_prefill"
    REFRACTORY_PREFILL = "refractory_prefill"
    OLD_PREFILL = "old_prefill"
    DECODE = "decode"
    MUTATING_TO_DECODE = "mutating_to_decode"
    AUS_PREFILL = "aus_prefill"
    AUS_DECODE = "aus_decode"
    SHUTTING_PREFILL = "shutting_prefill"
    SHUTTING_DECODE = "shutting_decode"
    SHUTTING_NULL = "shutting_null"
    # emu's own
    LOADING_COLOCATED = "loading_colocated"
    COLOCATED = "colocated"
    SHUTTING_COLOCATED = "shutting_colocated"
    FAILED = "failed"

    __hash__ = object.__hash__  # members are singletons; the enum's own hash is slow


class Marker(enum.Enum):
    """Part that a replica plays in a weight transfer (the planner's books)."""

    NONE = "none"
    RDMA_SENDING = "rdma_sending"
    RDMA_LOADING = "rdma_loading"
    RDMA_CASTING = "rdma_casting"
    NVLINK_SENDING = "nvlink_sending"
    NVL_CASTING = "nvl_casting"
    TANZ_CASTING = "tanz_casting"


S = ReplicaState
Writer = Literal["loop", "planner", "transfer", "command", "fault", "recovery"]


class Rule(msgspec.Struct, frozen=True):
    """The writers that may make a transition, and why it happens."""

    writers: tuple[Writer, ...]
    why: str


def _rules_of_roles() -> dict[tuple[S, S], Rule]:
    return {
        (S.INACTIVE, S.LOADING_PREFILL): Rule(
            ("planner", "recovery"), "prefill demand; a source of weights is found"
        ),
        (S.INACTIVE, S.LOADING_DECODE): Rule(
            ("planner", "recovery"), "decode demand; a source of weights is found"
        ),
        (S.INACTIVE, S.NEW_PREFILL): Rule(
            ("planner", "command"), "live scaling: serves while its weights arrive"
        ),
        (S.LOADING_PREFILL, S.PREFILL): Rule(("transfer",), "weights complete"),
        (S.LOADING_DECODE, S.AUS_DECODE): Rule(("transfer",), "weights complete (blitz)"),
        (S.LOADING_DECODE, S.MUTATING_TO_DECODE): Rule(
            ("transfer",), "weights complete (serverless)"
        ),
        (S.PREFILL, S.OLD_PREFILL): Rule(
            ("planner", "command"), "live scaling needs a helper; least loaded first"
        ),
        (S.PREFILL, S.MUTATING_TO_DECODE): Rule(
            ("planner", "command"), "prefill surplus and decode deficit"
        ),
        (S.PREFILL, S.SHUTTING_PREFILL): Rule(("planner", "command"), "surplus prefill capacity"),
        (S.NEW_PREFILL, S.REFRACTORY_PREFILL): Rule(("loop",), "sees that the model is loaded"),
        (S.REFRACTORY_PREFILL, S.PREFILL): Rule(("loop",), "nothing left to give"),
        (S.OLD_PREFILL, S.PREFILL): Rule(("loop",), "released by a new replica that finished"),
        (S.MUTATING_TO_DECODE, S.DECODE): Rule(("loop",), "flush done"),
        (S.AUS_DECODE, S.DECODE): Rule(("loop",), "opened for inbound KV"),
        (S.AUS_PREFILL, S.PREFILL): Rule(("loop",), "closed for inbound KV"),
        (S.DECODE, S.SHUTTING_DECODE): Rule(("planner", "command"), "surplus decode capacity"),
        (S.DECODE, S.SHUTTING_NULL): Rule(("planner",), "surplus, idle and not locked"),
        (S.SHUTTING_DECODE, S.AUS_DECODE): Rule(("planner", "command"), "decode demand came back"),
        (S.SHUTTING_DECODE, S.SHUTTING_NULL): Rule(("loop",), "drained and locked"),
        (S.SHUTTING_PREFILL, S.PREFILL): Rule(("planner", "command"), "prefill demand came back"),
        (S.SHUTTING_PREFILL, S.SHUTTING_NULL): Rule(("loop",), "last outbound migration finished"),
        (S.SHUTTING_NULL, S.AUS_PREFILL): Rule(("planner",), "a warm spare is reused for prefill"),
        (S.SHUTTING_NULL, S.PREFILL): Rule(
            ("planner", "command"), "a warm spare that is already closed is reused for prefill"
        ),
        (S.SHUTTING_NULL, S.DECODE): Rule(
            ("planner",), "a warm spare that was never closed is reused for decode"
        ),
        (S.SHUTTING_NULL, S.AUS_DECODE): Rule(
            ("planner", "command"), "a warm spare is reused for decode"
        ),
        (S.SHUTTING_NULL, S.INACTIVE): Rule(("planner", "command"), "expired or evicted"),
        (S.INACTIVE, S.MUTATING_TO_DECODE): Rule(("command",), "manual: weights appear"),
        (S.INACTIVE, S.PREFILL): Rule(("command",), "manual: weights appear"),
    }


def _rules_of_colocated() -> dict[tuple[S, S], Rule]:
    return {
        (S.INACTIVE, S.LOADING_COLOCATED): Rule(
            ("planner", "recovery"), "demand; weights are loading"
        ),
        (S.LOADING_COLOCATED, S.COLOCATED): Rule(("transfer",), "weights complete"),
        (S.COLOCATED, S.SHUTTING_COLOCATED): Rule(("planner", "command"), "surplus capacity"),
        (S.SHUTTING_COLOCATED, S.COLOCATED): Rule(("planner", "command"), "demand came back"),
        (S.INACTIVE, S.COLOCATED): Rule(("command",), "manual: weights appear"),
        (S.SHUTTING_COLOCATED, S.INACTIVE): Rule(("loop",), "drained"),
    }


def _rules_of_losses() -> dict[tuple[S, S], Rule]:
    """A load that is given up, a crash and what follows."""
    rules = {
        (S.LOADING_PREFILL, S.INACTIVE): Rule(("planner", "transfer"), "load given up"),
        (S.LOADING_DECODE, S.INACTIVE): Rule(("planner", "transfer"), "load given up"),
        (S.LOADING_COLOCATED, S.INACTIVE): Rule(("planner", "transfer"), "load given up"),
        (S.NEW_PREFILL, S.INACTIVE): Rule(("planner", "transfer"), "load given up"),
        (S.FAILED, S.INACTIVE): Rule(("recovery",), "restarted, weights lost"),
    }
    crashed = Rule(("fault",), "crashed")
    return rules | {(state, S.FAILED): crashed for state in S if state is not S.FAILED}


TRANSITIONS: Final[Mapping[tuple[ReplicaState, ReplicaState], Rule]] = MappingProxyType(
    _rules_of_roles() | _rules_of_colocated() | _rules_of_losses()
)

PREFILL_TYPE: Final = frozenset(
    {S.PREFILL, S.NEW_PREFILL, S.REFRACTORY_PREFILL, S.OLD_PREFILL, S.AUS_PREFILL}
)
"""States in which a replica works on prompts."""
CLOSED: Final = frozenset(
    PREFILL_TYPE
    | {
        S.INACTIVE,
        S.LOADING_PREFILL,
        S.LOADING_DECODE,
        S.LOADING_COLOCATED,
        S.SHUTTING_PREFILL,
        S.MUTATING_TO_DECODE,
        S.FAILED,
    }
)
"""States in which a replica holds its own lock: closed for inbound KV."""
DECODING: Final = frozenset({S.DECODE, S.SHUTTING_DECODE, S.AUS_DECODE})
"""States in which a replica decodes what it holds."""
RECEIVING: Final = frozenset({S.DECODE, S.SHUTTING_DECODE})
"""States in which inbound KV may begin to come, if the lock can be had."""
DRAINING: Final = (S.SHUTTING_PREFILL, S.SHUTTING_DECODE, S.SHUTTING_COLOCATED)
"""States in which a replica waits for the end of its work."""
WAVES: Final = frozenset(
    {
        S.COLOCATED,
        S.PREFILL,
        S.DECODE,
        S.SHUTTING_COLOCATED,
        S.SHUTTING_PREFILL,
        S.SHUTTING_DECODE,
        S.MUTATING_TO_DECODE,
    }
)
"""States in which a member of a data-parallel group takes part in waves."""
LOADING: Final = frozenset({S.LOADING_PREFILL, S.LOADING_DECODE, S.LOADING_COLOCATED})
"""Weights are on the way and nothing is served."""
GPU_ROLE: Final[Mapping[ReplicaState, str]] = MappingProxyType(
    {
        S.INACTIVE: "",
        S.FAILED: "",
        S.LOADING_PREFILL: "loading",
        S.LOADING_DECODE: "loading",
        S.LOADING_COLOCATED: "loading",
        S.NEW_PREFILL: "prefill",
        S.REFRACTORY_PREFILL: "prefill",
        S.OLD_PREFILL: "prefill",
        S.PREFILL: "prefill",
        S.AUS_PREFILL: "prefill",
        S.SHUTTING_PREFILL: "prefill",
        S.DECODE: "decode",
        S.MUTATING_TO_DECODE: "decode",
        S.AUS_DECODE: "decode",
        S.SHUTTING_DECODE: "decode",
        S.SHUTTING_NULL: "spare",
        S.COLOCATED: "colocated",
        S.SHUTTING_COLOCATED: "colocated",
    }
)
"""To which account a replica's GPU time goes; empty = it holds no GPU."""


class HasState(Protocol):
    """What `move` needs of a replica."""

    replica_id: int
    state: ReplicaState
    history: list[str]


def move(replica: HasState, expected: S, to: S, *, writer: Writer, cause: str, at_ns: int) -> None:
    """Change a replica's state from `expected` to `to`.

    Raises `InvalidTransition` if the replica is not in `expected`, if the table does not have the
    transition, or if this writer may not make it.
    """
    rule = TRANSITIONS.get((expected, to))
    if replica.state is not expected or rule is None or writer not in rule.writers:
        problem = (
            f"replica {replica.replica_id}: {writer} may not move {expected.value} -> {to.value}"
            f" ({cause}); it is {replica.state.value}"
        )
        raise InvalidTransition(problem, at_ns=at_ns, story=replica.history)
    replica.history.append(f"{at_ns} {expected.value} -> {to.value} by {writer}: {cause}")
    del replica.history[:-64]
    replica.state = to


def mermaid() -> str:
    """The table as a Mermaid state diagram (crashes left out: every state has one)."""
    lines = ["stateDiagram-v2"]
    for (before, after), rule in TRANSITIONS.items():
        if after is not S.FAILED:
            lines.append(f"    {before.value} --> {after.value}: {rule.why.replace(':', ' -')}")
    return "\n".join(lines)
