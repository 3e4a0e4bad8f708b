"""Candidates and what came of them: runs over all seeds, every layout, clusters that scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emu.apps.plan.layouts import Candidate, Layout
from emu.apps.plan.question import Question
from emu.apps.plan.scaled import NOT_SCALED, SPAN, scaled
from emu.apps.plan.search import Search, search_of
from emu.apps.shared.points import Driver, Row, meets, with_seeds
from emu.report.intervals import mean_of

LAYOUTS_AT_ONCE: Final = 4
"""Searches that go on at the same time. Fixed: the rows do not depend on the workers."""
_EPSILON: Final = 1e-9
NOT_AS_CHEAP: Final = "no cluster as cheap as the best meets the objectives"


class Trials:
    """Candidates and what came of them, over all seeds."""

    def __init__(self, driver: Driver, question: Question) -> None:
        self._driver = driver
        self._question = question
        self._conditions = [objective.condition for objective in question.objectives]
        self.rows: dict[Candidate, list[Row]] = {}
        self.best_cost = float("inf")
        self.not_scaled: list[tuple[str, str]] = []
        """Layouts that were tried with autoscaling in vain, and why."""

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Run what has not been run, all of it together."""
        new = [one for one in dict.fromkeys(candidates) if one not in self.rows]
        seeds = self._question.seeds
        values = [
            one.values(self._question.gpus_per_node)
            | (self._question.scaling if one.scaling is not None else {})
            for one in new
        ]
        rows = self._driver.rows(with_seeds(values, seeds))
        for index, candidate in enumerate(new):
            mine = rows[index * len(seeds) : (index + 1) * len(seeds)]
            self.rows[candidate] = mine
            if self.is_met(candidate) and self.is_allowed(candidate):
                self.best_cost = min(self.best_cost, self.cost(candidate))

    def cost(self, candidate: Candidate) -> float:
        """Per hour: of its GPUs, or of the GPU time that it took."""
        if candidate.scaling is None:
            return candidate.cost
        return self.gpus_mean(candidate) * candidate.layout.gpu.price

    def gpus_mean(self, candidate: Candidate) -> float:
        """GPUs that it had over the time of its run, mean over seeds."""
        if candidate.scaling is None:
            return float(candidate.gpus)
        figures = [row.result.figures for row in self.rows[candidate]]
        return mean_of([one["gpu_seconds.total"] / one["duration"] for one in figures]).mean

    def is_met(self, candidate: Candidate) -> bool:
        """Whether every seed meets all objectives and serves every request."""
        return all(meets(row.result, self._conditions, 0.0) for row in self.rows[candidate])

    def worst(self, candidate: Candidate) -> float:
        """Largest figure / limit over objectives and seeds; infinite if not all was served."""
        rows = self.rows[candidate]
        if not all(meets(row.result, [], 0.0) for row in rows):
            return float("inf")
        return max(
            float(row.result.figures[objective.figure] or 0.0) / objective.limit_ms
            for objective in self._question.objectives
            for row in rows
        )

    def is_allowed(self, candidate: Candidate) -> bool:
        """Whether there are so many GPUs (the search also asks about more)."""
        most = candidate.layout.gpu.count_max or self._question.gpus_max
        return candidate.gpus <= min(most, self._question.gpus_max)

    @property
    def met(self) -> list[Candidate]:
        """Candidates that meet and may be built."""
        return [one for one in self.rows if self.is_allowed(one) and self.is_met(one)]

    @property
    def layouts_met(self) -> list[Layout]:
        """Layouts of which a cluster meets."""
        return [one.layout for one in self.met]

    def limit(self, layout: Layout) -> int:
        """Most replicas of a layout: so many GPUs there are, at no more than the best's cost."""
        most = min(layout.gpu.count_max or self._question.gpus_max, self._question.gpus_max)
        replicas = most // layout.replica_gpus
        if self.best_cost < float("inf"):
            span = 1.0 if self._question.systems == (NOT_SCALED,) else SPAN
            replicas = min(replicas, int(span * self.best_cost / layout.price * (1 + _EPSILON)))
        return replicas

    def reason(self, layout: Layout) -> str:
        """Why no cluster of a layout stands among the answers."""
        for candidate, rows in self.rows.items():
            if candidate.layout == layout and rows[0].result.error:
                return rows[0].result.error
        return NOT_AS_CHEAP


def search_all(trials: Trials, layouts: Sequence[Layout], question: Question) -> None:
    """Every layout, a few at a time, in order; the best so far bounds those that follow."""
    waiting = list(layouts)
    while waiting:
        modes = [layout.mode for layout in waiting]
        # Splits begin when all colocated layouts are done: their limit is then known.
        width = min(LAYOUTS_AT_ONCE, modes.count(modes[0]))
        now, waiting = waiting[:width], waiting[width:]
        active: list[tuple[Search, list[Candidate]]] = []
        for layout in now:
            search = search_of(
                layout,
                lambda layout=layout: trials.limit(layout),  # type: ignore[misc]
                is_bounded=trials.best_cost < float("inf"),
            )
            _advance(search, None, active)
        while active:
            trials.run([candidate for _, asked in active for candidate in asked])
            running, active = active, []
            for search, asked in running:
                _advance(search, [trials.worst(one) for one in asked], active)


def _advance(
    search: Search, told: list[float] | None, active: list[tuple[Search, list[Candidate]]]
) -> None:
    """Take a search one step on, and keep it if it asks for more."""
    try:
        asked = next(search) if told is None else search.send(told)
    except StopIteration:
        return
    active.append((search, asked))


def search_scaled(trials: Trials, question: Question) -> None:
    """Clusters that scale, from the cheapest static one of each layout."""
    cheapest: dict[Layout, Candidate] = {}
    for one in sorted(trials.met, key=lambda one: (one.cost, one.label)):
        cheapest.setdefault(one.layout, one)
    for static in cheapest.values():
        layout = static.layout
        most = min(layout.gpu.count_max or question.gpus_max, question.gpus_max)
        for system in question.systems:
            if system == NOT_SCALED:
                continue
            tried = scaled(static, system, most // layout.replica_gpus)
            tried.sort(key=lambda one: one.cost)
            for low in dict.fromkeys(one.cost for one in tried):
                if low < trials.best_cost:
                    trials.run([one for one in tried if one.cost == low])
            if tried and not any(one in trials.rows and trials.is_met(one) for one in tried):
                label = f"{layout.label} by {system}"
                trials.not_scaled.append((label, NOT_AS_CHEAP))
