"""The front of two or three figures, searched with Optuna's NSGA-II (extra `search`).

Points are asked for a round at a time and told in their order, with a seeded sampler: the search
takes the same way whatever runs the points. A run that did not complete, or left requests
unserved, is told as infeasible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from emu.apps.shared.bisection import rounded
from emu.apps.shared.conditions import (
    unserved_part,
)
from emu.apps.shared.points import Driver, Row, with_seeds
from emu.apps.sweeps.sweepfile import (
    ParetoTable,
    RangeTable,
    Sweep,
    ranges,
)
from emu.errors import InputError, needs_extra


def search_front(driver: Driver, sweep: Sweep, table: ParetoTable, source: str) -> list[Row]:
    """All rows tried; `meets` marks those on the front. Raises InputError."""
    with needs_extra("search", source):
        import optuna
    space = ranges(table.keys, source, "pareto.keys")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.NSGAIISampler(
        seed=table.seed, population_size=max(2, table.points_per_round)
    )
    study = optuna.create_study(directions=["minimize"] * len(table.minimize), sampler=sampler)
    rows: list[Row] = []
    while len(study.trials) < table.points:
        count = min(table.points_per_round, table.points - len(study.trials))
        trials = [study.ask() for _ in range(count)]
        asked = [{key: _suggest(trial, key, one) for key, one in space.items()} for trial in trials]
        driver.line = f"{len(study.trials)} of {table.points} points"
        round_rows = driver.rows(
            with_seeds(asked, sweep.seeds, len(study.trials) // table.points_per_round)
        )
        each = len(round_rows) // count
        for at, trial in enumerate(trials):
            costs = cost_of(round_rows[at * each : (at + 1) * each], table.minimize, source)
            if costs is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, costs)
        rows += round_rows
    mark_front(rows, table.minimize)
    return rows


def _suggest(trial: Any, key: str, one: RangeTable) -> Any:
    if one.values:
        # Indices, because values may be tables or lists.
        return one.values[trial.suggest_int(key, 0, len(one.values) - 1)]
    if one.integer:
        return trial.suggest_int(
            key, math.ceil(one.min or 0), math.floor(one.max or 0), log=one.log
        )
    return rounded(trial.suggest_float(key, one.min, one.max, log=one.log))


def cost_of(rows: Sequence[Row], names: Sequence[str], source: str) -> list[float] | None:
    """Worst of each figure over the seeds; None if a run is of no use."""
    if any(row.result.status != "completed" for row in rows):
        return None
    if any(unserved_part(row.result.figures) > 0 for row in rows):
        return None
    costs = []
    for name in names:
        values = [row.result.figures.get(name) for row in rows]
        if not all(isinstance(value, (int, float)) for value in values):
            problem = f"the runs have no number {name}"
            raise InputError(source, None, "pareto.minimize", problem)
        costs.append(max(float(value) for value in values if value is not None))
    return costs


def mark_front(rows: Sequence[Row], names: Sequence[str]) -> None:
    """Set `meets` of every row: True where no other run is better in all figures."""
    costs = [cost_of([row], names, "") for row in rows]
    for row, mine in zip(rows, costs, strict=True):
        row.meets = mine is not None and not any(
            other is not None
            and other != mine
            and all(theirs <= own for theirs, own in zip(other, mine, strict=True))
            for other in costs
        )
