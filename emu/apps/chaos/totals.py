"""What a campaign saw: how often each fault, end and change of state came, and what never did."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.chaos.trial import NOT_DRAWN, STRIKES, Verdict, schema_keys
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


# --- in words -------------------------------------------------------------------------------------
_RAREST: Final = 12
"""Changes of state, and faults on parts, that are named as the rarest."""


def print_totals(
    totals: Totals, console: Console, at_least: int = 1, *, is_drawn: bool = True
) -> None:
    """What happened, how often, and what never did (or less often than wanted).

    `is_drawn`: the worlds were drawn, so that anything could have happened; what cannot happen in
    a user's cluster is left out.
    """
    table = Table(title="faults")
    for column in ("kind", "catalogue", "struck", "found nothing"):
        table.add_column(column, justify="left" if column in ("kind", "catalogue") else "right")
    for kind, spec in FAULT_KINDS.items():
        struck = totals.faults.get(kind, 0)
        if not is_drawn and not struck and not totals.missed.get(kind):
            continue
        style = None if struck else "red"
        missed = totals.missed.get(kind, 0)
        table.add_row(kind, spec.numbers, f"{struck:,}", f"{missed:,}", style=style)
    console.print(table)
    _print_counts("ends of requests", totals.ends, console)
    never = dict.fromkeys(CHANGES, 0) if is_drawn else {}
    _print_counts("changes of state", never | totals.transitions, console)
    if is_drawn:
        _print_parts(totals, console)
        drawn = sum(key in totals.keys for key in schema_keys())
        console.print(
            f"{drawn} of {len(schema_keys())} keys of the schema drawn, "
            f"{len(NOT_DRAWN)} never are (emu/apps/chaos/trial.py says why)"
        )
    minutes = totals.cpu_s / 60
    console.print(
        f"{totals.seeds:,} seeds, {len(totals.failing)} with violations; {totals.events:,} events, "
        f"{totals.checks:,} full recounts, {totals.virtual_s:,.0f} virtual seconds; "
        f"{totals.wall_s / 60:.1f} min wall, {minutes:.1f} min CPU: "
        f"{totals.cluster_hours / max(minutes, 1e-9):.2f} virtual cluster-hours "
        f"({totals.gpu_hours / max(minutes, 1e-9):.1f} GPU-hours) per CPU-minute",
        soft_wrap=True,
    )
    if is_drawn and totals.seeds:
        told = ", ".join(f"{name} ({count:,})" for name, count in totals.rarest(_RAREST))
        console.print(f"rarest: {told}", soft_wrap=True)
    if at_least > 1 or (is_drawn and totals.seeds >= 100):
        for head, names in (
            (f"struck less than {at_least} times", totals.faults_below(at_least)),
            (f"struck a part less than {at_least} times", totals.parts_below(at_least)),
            (f"changes less than {at_least} times", totals.changes_below(at_least)),
            ("keys that no world gave", totals.keys_not_drawn()),
            ("never seen", totals.never_seen()),
        ):
            if names:
                console.print(f"{head}: {'; '.join(names)}", style="red", soft_wrap=True)


def _print_parts(totals: Totals, console: Console) -> None:
    """Kinds of faults by the part that the struck replica played; a dash where none can."""
    parts = tuple(dict.fromkeys(name.partition(" on ")[2] for name in STRIKES))
    table = Table(title="faults by the part of the replica")
    for column in ("kind", *parts):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind in FAULT_KINDS:
        names = [f"{kind} on {part}" for part in parts]
        if any(name in STRIKES for name in names):
            counts = (f"{totals.parts.get(n, 0):,}" if n in STRIKES else "-" for n in names)
            table.add_row(kind, *counts)
    console.print(table)


def _print_counts(title: str, counts: Mapping[str, int], console: Console) -> None:
    table = Table(title=title)
    table.add_column("what")
    table.add_column("times", justify="right")
    for what, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(what, f"{count:,}")
    console.print(table)
