"""Candidates and what came of them in each world: which hold, at what cost.

A cluster holds if it meets the objectives in enough worlds. Worlds are run the hardest first, and
no more of them than the question needs: a cluster fails as soon as so many worlds fail that the
others could not mend it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from emu.apps.plan.layouts import Candidate, Layout, least_cost
from emu.apps.plan.pace import Loads
from emu.apps.plan.question import Objective, Question
from emu.apps.plan.scaled import NOT_SCALED, scaled
from emu.apps.plan.search import SLACK, Asked, Search, search_of
from emu.apps.plan.worlds import World, Worlds
from emu.apps.shared.give_up import RATIO
from emu.apps.shared.points import Driver, Point, Row, meets
from emu.report.intervals import mean_of

LAYOUTS_AT_ONCE: Final = 4
"""Searches that go on at the same time. Fixed: the rows do not depend on the workers."""
_EPSILON: Final = 1e-9
NOT_AS_CHEAP: Final = "no cluster as cheap as the best meets the objectives"
TOO_DEAR: Final = "by arithmetic too dear beside the best, so not run"


class Judge(msgspec.Struct, frozen=True):
    """In how many of which worlds a cluster must meet the objectives."""

    worlds: tuple[World, ...]
    needed: int
    """Worlds."""
    words: str = ""
    """Of progress: what this part of the search looks for."""


class Trials:
    """Candidates and what came of them."""

    def __init__(self, driver: Driver, question: Question, worlds: Worlds, loads: Loads) -> None:
        self._driver = driver
        self._question = question
        self.worlds = worlds
        self._loads = loads
        self.rows: dict[tuple[Candidate, World], Row] = {}
        self.not_scaled: list[tuple[str, str]] = []
        """Layouts that were tried with autoscaling in vain, and why."""
        self.dear: set[Layout] = set()
        """Layouts that were not run, as arithmetic says that they cost too much beside a cluster
        that meets."""
        self._best: dict[Judge, tuple[int, float]] = {}
        """Cost of the best cluster, and how many rows it was taken from."""
        self._orders: dict[Layout, dict[World, float]] = {}

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What a cluster is judged by."""
        return self._question.objectives

    def run(self, pairs: Sequence[tuple[Candidate, World]], *, to_the_end: bool = True) -> None:
        """Run what has not been run, all of it together.

        Unless `to_the_end`, a run may be given up as soon as it misses by more than SLACK.
        """
        new = [
            pair
            for pair in dict.fromkeys(pairs)
            if pair not in self.rows or (to_the_end and self._is_given_up(*pair))
        ]
        points = [self._point(candidate, world) for candidate, world in new]
        if not to_the_end:
            least = tuple(one.limit(SLACK) for one in self.objectives)
            points = [msgspec.structs.replace(point, limits=least) for point in points]
        for pair, row in zip(new, self._driver.rows(points), strict=True):
            self.rows[pair] = row

    def _point(self, candidate: Candidate, world: World) -> Point:
        """A run; of the only one with the engine as it is, which a trace has, also how far its
        percentiles may be chance."""
        point, spans = self.worlds.point(candidate, world), self.worlds.spans
        is_whole = not world.is_short or spans.short_s == spans.long_s
        if len(self._question.seeds) > 1 or world.index or world.factor != 1.0 or not is_whole:
            return point
        asked = tuple(one.percentile for one in self.objectives)
        return msgspec.structs.replace(point, intervals=asked)

    def ratio(self, candidate: Candidate, world: World) -> float:
        """Largest figure / limit of the objectives in a world; infinite if not all was served, or
        the load was too much."""
        result = self.rows[candidate, world].result
        if result.status == "given up":
            return float(result.figures[RATIO])
        if not meets(result, [], 0.0) or result.figures["load.verdict"] == "overloaded":
            return float("inf")
        return max(
            float(result.figures[objective.figure] or 0.0) / objective.limit_ms
            for objective in self._question.objectives
        )

    def lacking(self, candidate: Candidate, judge: Judge) -> tuple[bool, bool]:
        """Whether the runs of a cluster that fails miss for want of prefill, and of decode
        replicas: by their objectives on TTFT, and on the others; both if no objective says."""
        missed: set[bool] = set()
        for world in judge.worlds:
            row = self.rows.get((candidate, world))
            figures = {} if row is None else row.result.figures
            for one in self.objectives:
                part = figures.get(one.limit(SLACK).figure)
                if part is None and one.figure in figures:
                    part = figures[one.figure] / one.limit_ms
                if part is not None and part > 1:
                    missed.add(one.metric == "ttft")
        return (True in missed, False in missed) if missed else (True, True)

    def values(
        self, candidate: Candidate, worlds: Sequence[World], objective: Objective
    ) -> list[float]:
        """Values of an objective in those worlds that were run and served anything, ms."""
        found = [self.rows.get((candidate, world)) for world in worlds]
        return [
            float(row.result.figures[objective.figure])
            for row in found
            if row is not None and objective.figure in row.result.figures
        ]

    def _is_given_up(self, candidate: Candidate, world: World) -> bool:
        return self.rows[candidate, world].result.status == "given up"

    def with_objectives(self, objectives: tuple[Objective, ...]) -> Trials:
        """The same runs, judged by other objectives."""
        question = msgspec.structs.replace(self._question, objectives=objectives)
        other = Trials(self._driver, question, self.worlds, self._loads)
        other.rows = {  # a run that was given up says nothing of other limits
            pair: row
            for pair, row in self.rows.items()
            if objectives == self.objectives or row.result.status != "given up"
        }
        return other

    def met(self, candidate: Candidate, judge: Judge) -> int:
        """Worlds of a judge in which a cluster is known to meet."""
        return sum(
            (candidate, world) in self.rows and self.ratio(candidate, world) <= 1
            for world in judge.worlds
        )

    def holds(self, candidate: Candidate, judge: Judge) -> bool:
        """Whether enough worlds are known in which the cluster meets."""
        return self.met(candidate, judge) >= judge.needed

    def answer(self, asked: Sequence[Asked], judge: Judge) -> list[list[bool]]:
        """Run what several searches ask for, until each of their clusters is decided."""
        flat = {(one, ask.slack, ask.is_probe): None for ask in asked for one in ask.candidates}
        decided: dict[tuple[Candidate, float, bool], bool | None] = dict(flat)
        while True:
            wanted: list[tuple[Candidate, World]] = []
            for key in decided:
                if decided[key] is None:
                    decided[key], more = self._next(key, judge)
                    wanted += [(key[0], world) for world in more]
            if not wanted:
                break
            self._driver.line = judge.words
            self.run(wanted, to_the_end=False)
        return [
            [bool(decided[one, ask.slack, ask.is_probe]) for one in ask.candidates] for ask in asked
        ]

    def _next(
        self, key: tuple[Candidate, float, bool], judge: Judge
    ) -> tuple[bool | None, list[World]]:
        """Whether a cluster holds, or the worlds that are to be run next."""
        candidate, slack, is_probe = key
        run = [world for world in judge.worlds if (candidate, world) in self.rows]
        good = sum(self.ratio(candidate, world) <= slack for world in run)
        hopeless = self._hopeless(candidate, [w for w in judge.worlds if w not in run])
        failing = len(run) - good + len(hopeless)
        to_fail = len(judge.worlds) - judge.needed + 1
        if good >= judge.needed:
            return True, []
        if failing >= to_fail:
            return False, []
        if is_probe and run and good:
            return True, []
        left = [world for world in judge.worlds if world not in run and world not in hopeless]
        count = min(judge.needed - good, to_fail - failing)
        order = self._order(candidate.layout, judge)
        left.sort(key=lambda world: (-self._known_ratio(candidate, world), -order[world]))
        return None, left[: max(1, count)]

    def _hopeless(self, candidate: Candidate, worlds: Sequence[World]) -> set[World]:
        """Worlds in which a cluster with as much of both roles, or more, misses by more than
        SLACK."""
        return {
            its
            for one, its in self.rows
            if its in worlds and one.has_as_much_as(candidate) and self.ratio(one, its) > SLACK
        }

    def _known_ratio(self, candidate: Candidate, world: World) -> float:
        """What the nearest cluster of the layout had in a world; 0: none was run there."""
        near = [
            (abs(one.replicas - candidate.replicas), self.ratio(one, world))
            for one, its in self.rows
            if its == world and one.layout == candidate.layout
        ]
        return min(near)[1] if near else 0.0

    def _order(self, layout: Layout, judge: Judge) -> dict[World, float]:
        """How hard each world is, by arithmetic."""
        known = self._orders.setdefault(layout, {})
        for world in judge.worlds:
            if world not in known:
                known[world] = (
                    self.worlds.harshness(layout, world, self._loads.prompt) if world.index else 0.0
                )
        return known

    def cost(self, candidate: Candidate) -> float:
        """Per hour: of its GPUs, or of the GPU time that it took."""
        if candidate.scaling is None:
            return candidate.cost
        return self.gpus_mean(candidate) * candidate.layout.gpu.price

    def gpus_mean(self, candidate: Candidate) -> float:
        """GPUs that it had over the time of its runs, mean over worlds."""
        if candidate.scaling is None:
            return float(candidate.gpus)
        figures = [row.result.figures for (one, _), row in self.rows.items() if one == candidate]
        served = [one for one in figures if "gpu_seconds.total" in one]
        if not served:
            return float(candidate.gpus)
        return mean_of([one["gpu_seconds.total"] / one["duration"] for one in served]).mean

    def is_allowed(self, candidate: Candidate) -> bool:
        """Whether there are so many GPUs (the search also asks about more)."""
        most = self._question.gpus_max
        return candidate.gpus <= most and all(
            candidate.gpus_of(kind) <= (kind.count_max or most) for kind in candidate.layout.gpus
        )

    def good(self, judge: Judge) -> list[Candidate]:
        """Candidates that hold and may be built, the cheapest first; then the farthest from its
        limits."""
        found = [
            one
            for one in dict.fromkeys(candidate for candidate, _ in self.rows)
            if self.is_allowed(one) and self.holds(one, judge)
        ]
        return sorted(found, key=lambda one: (self.cost(one), self.worst(one, judge), one.label))

    def worst(self, candidate: Candidate, judge: Judge) -> float:
        """The largest ratio of the worlds that must be met, as far as they were run."""
        ratios = sorted(
            self.ratio(candidate, world)
            for world in judge.worlds
            if (candidate, world) in self.rows
        )
        return ratios[min(judge.needed, len(ratios)) - 1] if ratios else float("inf")

    def best_cost(self, judge: Judge) -> float:
        """Cost of the cheapest that holds; infinite without one."""
        known, cost = self._best.get(judge, (-1, 0.0))
        if known != len(self.rows):
            cost = min((self.cost(one) for one in self.good(judge)), default=float("inf"))
            self._best[judge] = len(self.rows), cost
        return cost

    def replicas_max(self, layout: Layout) -> int:
        """Most replicas of a layout that the GPUs allow."""
        most = self._question.gpus_max
        counts = [min(kind.count_max or most, most) for kind in layout.gpus]
        return min(most, sum(counts)) // layout.replica_gpus

    def reason(self, layout: Layout) -> str:
        """Why no cluster of a layout stands among the answers."""
        for (candidate, _), row in self.rows.items():
            if candidate.layout == layout and row.result.error:
                return row.result.error
        return TOO_DEAR if layout in self.dear else NOT_AS_CHEAP


def search_all(
    trials: Trials,
    starts: Sequence[tuple[Layout, tuple[int, int]]],
    judge: Judge,
    *,
    span: float,
    at_once: int = LAYOUTS_AT_ONCE,
    told: Callable[[], None] = lambda: None,
) -> None:
    """Every layout from its start, some at a time, in order; the best so far bounds those that
    follow: clusters that cost more than `span` times as much are not looked for. `told` is called
    when some are done."""
    waiting = list(starts)
    while waiting:
        now, waiting = waiting[:at_once], waiting[at_once:]
        active: list[tuple[Search, Asked]] = []
        for layout, start in now:
            if least_cost(layout) > span * trials.best_cost(judge):
                trials.dear.add(layout)
                continue
            search = search_of(
                layout,
                start,
                lambda: span * trials.best_cost(judge),
                trials.replicas_max(layout),
                lambda one: trials.lacking(one, judge),
            )
            _advance(search, None, active)
        while active:
            replies = trials.answer([asked for _, asked in active], judge)
            running, active = active, []
            for (search, _), answers in zip(running, replies, strict=True):
                _advance(search, answers, active)
        told()


def _advance(search: Search, told: list[bool] | None, active: list[tuple[Search, Asked]]) -> None:
    """Take a search one step on, and keep it if it asks for more."""
    try:
        asked = next(search) if told is None else search.send(told)
    except StopIteration:
        return
    active.append((search, asked))


def search_scaled(trials: Trials, question: Question, judge: Judge) -> None:
    """Clusters that scale, from the cheapest static one of each layout."""
    cheapest: dict[Layout, Candidate] = {}
    for one in trials.good(judge):
        if one.layout.decode_gpu is None and one.scaling is None:
            cheapest.setdefault(one.layout, one)
    for static in cheapest.values():
        layout = static.layout
        for system in question.systems:
            if system == NOT_SCALED:
                continue
            tried = scaled(static, system, trials.replicas_max(layout))
            tried.sort(key=lambda one: one.cost)
            for low in dict.fromkeys(one.cost for one in tried):
                if low < trials.best_cost(judge):
                    trials.answer([Asked(tuple(one for one in tried if one.cost == low))], judge)
            if tried and not any(trials.holds(one, judge) for one in tried):
                label = f"{layout.label} by {system}"
                trials.not_scaled.append((label, NOT_AS_CHEAP))
