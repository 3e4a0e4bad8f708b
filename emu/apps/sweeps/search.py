"""The largest or smallest value of one key that meets conditions."""

from __future__ import annotations

import msgspec

from emu.apps.shared.bisection import Bisection
from emu.apps.shared.conditions import (
    parse_conditions,
)
from emu.apps.shared.points import Driver, Row, meets, with_seeds
from emu.apps.sweeps.sweepfile import (
    SearchTable,
    Sweep,
)
from emu.errors import InputError


class Answer(msgspec.Struct):
    """What a search found."""

    key: str
    goal: str
    conditions: list[str]
    value: float | None
    """None: not even the easy end of the range meets."""
    fails_at: float | None
    """The nearest value tried that does not meet; None if the whole range meets."""
    is_monotone: bool
    rounds: int


def _fails_at(search: Bisection, table: SearchTable) -> float | None:
    """The nearest value that does not meet the conditions; None if all do."""
    if search.answer is None:
        return table.min if table.goal == "highest" else table.max
    return search.bracket[1] if search.bracket else None


def search_value(
    driver: Driver, sweep: Sweep, table: SearchTable, source: str
) -> tuple[list[Row], Answer]:
    conditions = parse_conditions(table.meet, source, "search.meet")
    search = Bisection(
        low=table.min,
        high=table.max,
        goal=table.goal,
        integer=table.integer,
        tolerance=table.tolerance,
        points_per_round=table.points_per_round,
    )
    rows: list[Row] = []
    while values := search.ask():
        number = search.rounds + 1
        driver.line = f"round {number}, {_standing(search, table)}"
        asked = [{table.key: int(v) if table.integer else v} for v in values]
        round_rows = driver.rows(with_seeds(asked, sweep.seeds, number))
        for row in round_rows:
            if row.result.status == "invalid":
                # Neither end of the range may be nonsense: there would be no answer.
                raise InputError(source, None, "search", row.result.error)
            row.meets = meets(row.result, conditions, table.max_unserved)
        rows += round_rows
        each = len(round_rows) // len(values)
        search.tell(
            {
                value: all(row.meets for row in round_rows[at * each : (at + 1) * each])
                for at, value in enumerate(values)
            }
        )
    return rows, Answer(
        key=table.key,
        goal=table.goal,
        conditions=[str(condition) for condition in conditions],
        value=search.answer,
        fails_at=_fails_at(search, table),
        is_monotone=search.is_monotone,
        rounds=search.rounds,
    )


def _standing(search: Bisection, table: SearchTable) -> str:
    if search.answer is None:
        return f"{table.key} from {table.min:g} to {table.max:g}"
    bracket = search.bracket
    beyond = f", not at {bracket[1]:g}" if bracket else ""
    return f"{table.key} = {search.answer:g} meets{beyond}"
