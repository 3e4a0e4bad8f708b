"""What a board's rows say together: medians, worst, verdicts, by what groups they fall into."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from emu.apps.fidelity.board import Row
from emu.apps.fidelity.runs import METRICS

GROUPS: Final = ("gpu", "model_class", "regime")


class Group(msgspec.Struct, frozen=True):
    """Stages whose errors count, taken together."""

    name: str
    stages: int
    median: dict[str, float]
    """|error| by metric, per cent."""
    bias: dict[str, float]
    """Median of the signed error."""
    worst: dict[str, float]
    """The error that is largest, with its sign."""


class Summary(msgspec.Struct, frozen=True):
    """The board in figures."""

    stages: int
    wrong_verdicts: list[str]
    overall: Group
    by: dict[str, list[Group]]
    peers: dict[str, dict[str, float]]
    """Median |error| that other simulators publish for the same runs, by simulator."""


def summarize(rows: Sequence[Row]) -> Summary:
    """Figures over all rows; errors over those that were not overloaded."""
    judged = [row for row in rows if row.is_compared]
    by = {
        key: [
            _group_of(name, [row for row in judged if row.groups[key] == name])
            for name in dict.fromkeys(row.groups[key] for row in judged)
        ]
        for key in GROUPS
    }
    wrong = [f"{row.run_id} {row.stage}" for row in rows if not row.is_judged_right]
    return Summary(len(rows), wrong, _group_of("all", judged), by, _peers(judged))


def _group_of(name: str, rows: Sequence[Row]) -> Group:
    errors = {metric: [row.error(metric) for row in rows] for metric in METRICS} if rows else {}
    return Group(
        name,
        len(rows),
        {m: statistics.median(map(abs, values)) for m, values in errors.items()},
        {m: statistics.median(values) for m, values in errors.items()},
        {m: max(values, key=abs) for m, values in errors.items()},
    )


def _peers(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    runs = {row.run_id: row.peers for row in rows}
    found: dict[str, dict[str, list[float]]] = {}
    for peers in runs.values():
        for name, errors in peers.items():
            for metric, error in errors.items():
                found.setdefault(name, {}).setdefault(metric, []).append(abs(error))
    return {
        name: {metric: statistics.median(values) for metric, values in by.items()}
        | {"runs": float(max(map(len, by.values())))}
        for name, by in sorted(found.items())
    }
