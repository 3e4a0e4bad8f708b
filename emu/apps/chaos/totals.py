"""What a campaign met, added up over its worlds."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from emu.apps.chaos.not_drawn import NOT_DRAWN
from emu.apps.chaos.schema_keys import schema_keys
from emu.apps.chaos.strikes import STRIKES
from emu.apps.chaos.trial import Verdict
from emu.apps.chaos.truth.rules import RULES
from emu.config.faultkinds import FAULT_KINDS
from emu.replica.states import TRANSITIONS

_DIGITS: Final = re.compile(r"\d+")
ENDS: Final = (
    "completed",
    "cancelled: client_left",
    "cancelled: session_ended",
    "rejected: overloaded",
    *(
        f"failed: {reason}"
        for reason in (
            "replica_lost",
            "kv_lost",
            "lease_expired",
            "drain_expired",
            "refused",
            "transfer_broken",
            "transfer_timeout",
            "handshake_timeout",
            "destination_refused",
            "no_replica_left",
            "no_decode_replica_holds_it",
        )
    ),
)
"""Ends that a request can have, apart from those that name a size."""
CHANGES: Final = tuple(f"{before.value} -> {after.value}" for before, after in TRANSITIONS)


class Totals(msgspec.Struct):
    """What a campaign saw."""

    seeds: int = 0
    events: int = 0
    checks: int = 0
    work: int = 0
    """Events and records of all trials: what they cost, without a clock."""
    virtual_s: float = 0.0
    gpu_hours: float = 0.0
    cluster_hours: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    faults: dict[str, int] = {}
    missed: dict[str, int] = {}
    parts: dict[str, int] = {}
    """`kind on part` -> how often a fault struck a replica that played this part."""
    keys: dict[str, int] = {}
    """Key of the schema -> worlds that gave it."""
    judged: dict[str, int] = {}
    """Rule of the truth -> how often it had something to judge."""
    transitions: dict[str, int] = {}
    ends: dict[str, int] = {}
    failing: list[Verdict] = []
    left: int = 0
    """Seeds that did not run: the campaign was interrupted."""

    def add(self, verdict: Verdict) -> None:
        """One more seed."""
        self.seeds += 1
        self.events += verdict.events
        self.checks += verdict.checks
        self.work += verdict.work
        hours = verdict.virtual_ns / 3.6e12
        self.virtual_s += verdict.virtual_ns / 1e9
        self.cluster_hours += hours
        self.gpu_hours += hours * verdict.gpus
        self.cpu_s += verdict.cpu_s
        for mine, its in (
            (self.faults, verdict.faults),
            (self.missed, verdict.missed),
            (self.parts, verdict.parts),
            (self.judged, verdict.judged),
            (self.keys, dict.fromkeys(verdict.keys, 1)),
            (self.transitions, verdict.transitions),
            (self.ends, verdict.ends),
        ):
            for name, count in its.items():
                key = _DIGITS.sub("N", name) if mine is self.ends else name
                mine[key] = mine.get(key, 0) + count
        if verdict.problems:
            self.failing.append(verdict)

    def faults_below(self, times: int) -> list[str]:
        """Kinds of faults that struck less often, with how often."""
        seen = {kind: self.faults.get(kind, 0) for kind in FAULT_KINDS}
        return [f"{kind} ({count})" for kind, count in seen.items() if count < times]

    def parts_below(self, times: int) -> list[str]:
        """Kinds of faults on parts that they can strike, which did so less often."""
        seen = {name: self.parts.get(name, 0) for name in STRIKES}
        return [f"{name} ({count})" for name, count in seen.items() if count < times]

    def changes_below(self, times: int) -> list[str]:
        """Changes of state that came less often, with how often."""
        seen = {name: self.transitions.get(name, 0) for name in CHANGES}
        return [f"{name} ({count})" for name, count in seen.items() if count < times]

    def rules_below(self, times: int) -> list[str]:
        """Rules that had something to judge less often, with how often."""
        seen = {name: self.judged.get(name, 0) for name in RULES}
        return [f"{name} ({count}): {RULES[name]}" for name, count in seen.items() if count < times]

    def rarest(self, count: int) -> list[tuple[str, int]]:
        """So many of the changes of state, and of the faults on parts, that came least often."""
        seen = {name: self.transitions.get(name, 0) for name in CHANGES}
        seen |= {name: self.parts.get(name, 0) for name in STRIKES}
        return sorted(seen.items(), key=lambda item: (item[1], item[0]))[:count]

    def keys_not_drawn(self) -> list[str]:
        """Keys of the schema that no world gave, apart from those that none ever does."""
        return [key for key in schema_keys() if key not in self.keys and key not in NOT_DRAWN]

    def never_seen(self) -> list[str]:
        """Ends of requests that the campaign did not meet (a finding)."""
        return [end for end in ENDS if end not in self.ends]
