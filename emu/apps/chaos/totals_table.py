"""What a campaign met, printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rich.console import Console
from rich.table import Table

from emu.apps.chaos.not_drawn import NOT_DRAWN
from emu.apps.chaos.schema_keys import schema_keys
from emu.apps.chaos.strikes import STRIKES
from emu.apps.chaos.totals import CHANGES, Totals
from emu.config.faultkinds import FAULT_KINDS

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
            f"{len(NOT_DRAWN)} never are (emu/apps/chaos/not_drawn.py says why)"
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
            (f"rules that judged less than {at_least} times", totals.rules_below(at_least)),
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
