"""From a question to its answer: what is tried, in what order, and what is told of it.

    answer = find_cluster(question, Path("runs/plan"), options)
    answer.rows[0]              # the cheapest cluster that meets all objectives with the confidence

1. Arithmetic gives each layout a place to begin, and rules out what cannot meet (`pace.py`).
2. A search with short runs and the engine as it is orders the layouts.
3. Long runs in drawn worlds find the cheapest cluster that meets in half of them, then the one that
   meets with the confidence; then survivors.

Runs go through the store and the pool of sweeps: an interrupted plan goes on where it was, and
the answer does not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from emu.apps.plan.answer import Answer, Bound, Ranked, Reading
from emu.apps.plan.beside import Opinion, opinions
from emu.apps.plan.costs import costs_of
from emu.apps.plan.day import day_of
from emu.apps.plan.doubt import Doubt, engine_part, interval_of, measure_of
from emu.apps.plan.headroom import headroom
from emu.apps.plan.layouts import (
    HIGH,
    LOW,
    Candidate,
    Layout,
    guessed_cost,
    layouts_of,
    too_slow,
)
from emu.apps.plan.pace import Loads
from emu.apps.plan.question import Objective, Question
from emu.apps.plan.scaled import NOT_SCALED, SPAN
from emu.apps.plan.search import Asked
from emu.apps.plan.spans import STAYS_MIN, Spans, spans_of
from emu.apps.plan.survive import Fate, Survival
from emu.apps.plan.tables import (
    base_config,
    checked_config,
    checked_tables,
    loads_of,
    model_of,
    set_rate,
    types_told,
)
from emu.apps.plan.traffic import SOURCE
from emu.apps.plan.trials import Judge, Trials, search_all, search_scaled
from emu.apps.plan.words import bounds_text
from emu.apps.plan.worlds import Worlds
from emu.apps.shared.blocks import interval_figures
from emu.apps.shared.points import Base, Driver, point_pool, point_store
from emu.apps.shared.watching import Watch
from emu.cluster.plan import make_plan
from emu.config.load import config_from_dict
from emu.config.toml_text import toml_text
from emu.errors import InputError, RunError
from emu.latency.coefficients import is_measured, kernels_told
from emu.options.shared import Workers
from emu.report.atomic import write_text
from emu.report.intervals import mean_of
from emu.runs.engine_lines import spread, typical
from emu.workload.opened import open_workload

NEAR: Final = 1.5
"""Layouts whose best cluster costs more than so many times the best of all, with the engine as it
is, are not looked at further."""
Say = Callable[[str], None]


class Teller:
    """Says the best cluster that is known, each once."""

    def __init__(self, say: Say, trials: Trials) -> None:
        self._say = say
        self._trials = trials
        self._said = ""

    def best(self, judge: Judge, how: str) -> None:
        """Say the best that holds before a judge, if there is one."""
        found = next(iter(self._trials.good(judge)), None)
        line = f"so far, {how}: {found.label}" if found else ""
        if line and line != self._said:
            self._say(line)
            self._said = line


class Finding:
    """One question on its way to its answer."""

    def __init__(self, question: Question, directory: Path) -> None:
        """Reads the traffic and does the arithmetic. Raises InputError; RunError if no cluster can
        meet."""
        self.question = question
        self.directory = directory
        self.plain = base_config(question)
        config = checked_config(self.plain, question.settings)
        self.spec = model_of(question)
        self.engine = config.engine.name
        workload = open_workload(
            config.workload, base_dir=Path(), seed=question.seeds[0], config_source=SOURCE
        )
        rate = set_rate(self.plain, question, workload)
        self.loads: Loads = loads_of(workload, question, rate)
        self.engine_name = config.engine.name
        self.utilization = config.scheduler.gpu_memory_utilization
        _check_measured(question, self.loads)
        self.worlds = Worlds(question, self.plain, directory)
        self.worlds.model = self.spec if config.latency.backend == "roofline" else None
        self.worlds.rate_per_s, self.worlds.span_s = rate, self.loads.span_s
        self.layouts, self.refused = layouts_of(
            question,
            self.spec,
            self.loads,
            self.worlds,
            utilization=self.utilization,
        )
        if not self.layouts:
            raise _impossible(self.refused)
        if question.survive:
            slow = [
                (layout.label, too_slow(layout, question.during, self.loads, self.worlds))
                for layout in self.layouts
            ]
            if all(why for _, why in slow):
                raise _impossible(slow)
        self.worlds.spans = self._spans()
        self.bounds = self._bounds()
        """What arithmetic says, of each kind of GPU."""

    @property
    def first(self) -> Judge:
        """The judge of the search with short runs."""
        return Judge((self.worlds.first,), 1, "the engine as it is")

    def _bounds(self) -> list[Bound]:
        found: dict[str, Layout] = {}
        for layout in sorted(self.layouts, key=lambda one: (guessed_cost(one), one.label)):
            found.setdefault(layout.kinds, layout)
        bounds = []
        for kinds, layout in found.items():
            replicas = layout.guess[0] + layout.guess[1]
            least = max(1, math.floor(LOW * replicas)) * layout.replica_gpus
            most = math.ceil(HIGH * replicas) * layout.replica_gpus
            bounds.append(Bound(gpu=kinds, label=layout.label, low=least, high=most))
        return bounds

    def _spans(self) -> Spans:
        question = self.question
        pace = self.worlds(self.layouts[0], self.layouts[0].gpu)
        spans = spans_of(question.objectives, self.loads, pace)
        if question.has_count:
            return msgspec.structs.replace(spans, short_s=question.run_s, long_s=question.run_s)
        if question.run_s:
            short_s = min(spans.short_s, question.run_s)
            return msgspec.structs.replace(spans, short_s=short_s, long_s=question.run_s)
        return spans

    def search(self, trials: Trials, say: Say) -> tuple[Judge, Judge | None]:
        """Run the search; the judges with the confidence and with one half.

        `say` hears the best cluster of each step as soon as it is known.
        """
        question, worlds = self.question, self.worlds
        first = self.first
        starts = [(layout, layout.guess) for layout in self.layouts]
        teller = Teller(say, trials)
        search_all(trials, starts, first, span=NEAR)
        teller.best(first, "with the engine as it is, in short runs")
        if not worlds.drawn:
            judge = Judge(tuple(worlds.plain), len(worlds.plain), "every seed")
            self._near(trials, (first,), judge, lambda: None)
            return judge, None
        count = len(worlds.drawn)
        half = Judge(tuple(worlds.drawn[: max(1, count // 2)]), math.ceil(count // 2 / 2), "half")
        judge = Judge(
            tuple(worlds.drawn), _needed(question), f"{100 * question.confidence:g} % of the draws"
        )
        known: tuple[Judge, ...] = (first,)
        if worlds.spans.short_s < worlds.spans.long_s:
            short = tuple(msgspec.structs.replace(one, is_short=True) for one in half.worlds)
            quick = Judge(short, half.needed, "half, short runs")
            told = partial(teller.best, quick, "with 50 %, in short runs")
            self._near(trials, known, quick, told)
            known = (quick, first)
        self._near(trials, known, half, partial(teller.best, half, "with 50 %"))
        told = partial(teller.best, judge, f"with {100 * question.confidence:g} %")
        if self._holds_as_cheap(trials, half, judge):
            told()
        else:
            self._near(trials, (half, *known), judge, told)
        return judge, half

    def _holds_as_cheap(self, trials: Trials, half: Judge, judge: Judge) -> bool:
        """Whether the best with one half holds with the confidence too: then none is cheaper, as
        what holds in so many draws holds in half of the first ones."""
        others = len(judge.worlds) - len(half.worlds)
        if judge.needed - others < half.needed or self.question.systems != (NOT_SCALED,):
            return False
        least = trials.best_cost(half)
        bests = tuple(one for one in trials.good(half) if trials.cost(one) == least)
        return any(trials.answer([Asked(bests)], judge)[0]) if bests else False

    def _near(
        self, trials: Trials, known: Sequence[Judge], judge: Judge, told: Callable[[], None]
    ) -> None:
        """The search of a judge, over the layouts that are near the best as the engine is.

        It begins with what earlier judges found, the strictest first. `told` is called when a
        layout is done.
        """
        starts: dict[Layout, tuple[int, int]] = {}
        for one in (found for earlier in known for found in trials.good(earlier)):
            if one.scaling is None:
                starts.setdefault(one.layout, (one.prefill, one.decode))
        if not starts:  # short runs can be too hard: their beginning counts for more
            starts = {layout: layout.guess for layout in self.layouts}
        span = 1.0
        if self.question.systems != (NOT_SCALED,):
            span = SPAN
        search_all(trials, list(starts.items()), judge, span=span, at_once=1, told=told)
        search_scaled(trials, self.question, judge)
        told()

    def ranked(self, trials: Trials, candidate: Candidate, judge: Judge) -> Ranked:
        """A row of the answer, of what has been run."""
        layout = candidate.layout
        cost = trials.cost(candidate)
        drawn = [w for w in judge.worlds if w.index and (candidate, w) in trials.rows]
        return Ranked(
            label=candidate.label,
            gpu=layout.kinds,
            gpus=candidate.gpus,
            cost_per_h=cost,
            mode=layout.mode,
            tensor_parallel=layout.tensor_parallel,
            pipeline_parallel=layout.pipeline_parallel,
            dtype=layout.dtype,
            limits=layout.limits,
            prefill=candidate.prefill if candidate.decode else 0,
            decode=candidate.decode,
            replicas=candidate.replicas,
            system=candidate.scaling.system if candidate.scaling else "",
            bounds=candidate.bounds,
            gpus_mean=trials.gpus_mean(candidate),
            worst=trials.worst(candidate, judge),
            met=trials.met(candidate, judge) if drawn else 0,
            of=len(drawn),
            is_missed=self._misses(trials, candidate),
            readings=[self._reading(trials, candidate, one, judge) for one in self.objectives],
            costs=costs_of(
                candidate,
                cost,
                self.loads,
                self.worlds(layout, layout.gpu),
                has_prices=self.question.has_prices,
            ),
        )

    def _misses(self, trials: Trials, candidate: Candidate) -> bool:
        """Whether so many draws are known to miss that too few can meet."""
        drawn = self.worlds.drawn
        known = [one for one in drawn if (candidate, one) in trials.rows]
        missing = sum(trials.ratio(candidate, one) > 1 for one in known)
        return missing > len(drawn) - _needed(self.question)

    def rests_on(self, layout: Layout) -> str:
        """The measured runs and kernels behind a layout's times, of each of its kinds of GPUs."""
        told = []
        for kind in layout.gpus:
            known = self.worlds.known(layout, kind)
            words = [f"engine {known.base}: {known.known.source}"] if known else []
            if self.worlds.model is not None:
                words.append(kernels_told(kind.spec))
            told.append(f"{kind.name}: {'; '.join(words)}")
        return " | ".join(told)

    @property
    def unmeasured(self) -> list[str]:
        """GPUs among those looked at whose kernels were never measured."""
        if self.worlds.model is None:
            return []
        kinds = {kind.name: kind.spec for layout in self.layouts for kind in layout.gpus}
        return [name for name, spec in kinds.items() if not is_measured(spec, self.engine)]

    @property
    def objectives(self) -> Sequence[Objective]:
        """Those of the question."""
        return self.question.objectives

    def _reading(
        self, trials: Trials, candidate: Candidate, objective: Objective, judge: Judge
    ) -> Reading:
        plain = trials.values(candidate, self.worlds.plain, objective)
        if not plain:  # only looked at with short runs
            plain = trials.values(candidate, [self.worlds.first], objective)
        drawn = trials.values(candidate, [w for w in judge.worlds if w.index], objective)
        mean = mean_of(plain or drawn)
        half = mean.half
        low, high = interval_of(drawn)[1:] if drawn else (None, None)
        return Reading(
            label=objective.label,
            limit_ms=objective.limit_ms,
            mean_ms=mean.mean,
            low_ms=None if half is None else max(0.0, mean.mean - half),
            high_ms=None if half is None else mean.mean + half,
            drawn_low_ms=low,
            drawn_high_ms=high,
            drawn_ms=sorted(drawn),
        )

    def doubt(self, trials: Trials, best: Candidate, judge: Judge, row: Ranked) -> Doubt | None:
        """What makes the tightest objective unsure."""
        drawn = [world for world in judge.worlds if world.index]
        if not drawn:
            return None
        nearest = max(
            self.objectives,
            key=lambda one: (
                (row.readings[self.objectives.index(one)].drawn_high_ms or 0) / one.limit_ms
            ),
        )
        seeds = [*self.worlds.plain, *self.worlds.more_plain]
        trials.run([(best, world) for world in self.worlds.more_plain])
        part, error = engine_part(
            trials.values(best, drawn, nearest), trials.values(best, seeds, nearest)
        )
        constants: dict[str, float] = {}
        config = config_from_dict(
            checked_tables(self.plain, self.question, best, self.worlds.spans)
        )
        plan = make_plan(config)
        metric = "ttft" if nearest.metric == "ttft" else "tpot"
        at = 0 if metric == "ttft" else len(plan.replicas) - 1
        figures = trials.rows[best, self.worlds.plain[0]].result.figures
        in_flight = self.loads.rate_per_s * figures["mean_e2el_ms"] / 1000
        mates = sum(one.role == plan.replicas[at].role for one in plan.replicas)
        shape = typical(plan.replicas[at], in_flight / mates, self.loads.prompt, self.loads.output)
        found = spread(config, plan, shape, at)
        if found is not None:
            constants = found.parts[metric]
        return Doubt(
            objective=nearest.label,
            engine_part=part,
            engine_part_error=error,
            draws=len(drawn),
            seeds=len(seeds),
            constants=constants,
            measure=measure_of(constants),
        )


def _needed(question: Question) -> int:
    """Draws that must meet."""
    return math.ceil(question.confidence * question.draws - 1e-9)


def _check_measured(question: Question, loads: Loads) -> None:
    """Raises InputError for an objective that no request of the traffic has."""
    if len(loads.outputs) and int(loads.outputs[-1]) == 1:
        for one in (*question.objectives, *question.during):
            if one.metric == "tpot":
                option = f"--tpot-{one.at}"
                raise InputError(SOURCE, None, option, "outputs of one token have no TPOT")


def _notes(finding: Finding) -> list[str]:
    """What one should know before the runs."""
    question, count = finding.question, len(finding.loads.prompts)
    spans, notes = finding.worlds.spans, []
    lasts_s = spans.long_s or finding.loads.span_s
    if 0 < lasts_s < STAYS_MIN / 2 * spans.stay_s:
        notes.append(
            f"note: requests arrive for {lasts_s:.3g} s, and one decodes for up to "
            f"{spans.stay_s:.3g} s: too short to show a queue that grows"
        )
    rarest = max(question.objectives, key=lambda one: int(one.at[1:]))
    needed = math.ceil(100 / (100 - int(rarest.at[1:])))
    if question.has_count and 0 < count < needed:
        notes.append(f"note: of {count} requests {rarest.label} is the largest: {needed} say more")
    return notes


def print_nothing(line: str) -> None:
    """What hears nothing."""


def find_cluster(
    question: Question,
    directory: Path,
    workers: Workers,
    watch: Watch | None = None,
    say: Say = print_nothing,
) -> Answer:
    """Search. Raises InputError; RunError if no cluster meets; writes the store and engines alone.

    `say` hears what arithmetic says, before any run, and what is known as the search goes on.
    """
    finding = Finding(question, directory)
    for note in _notes(finding):
        say(note)
    say(f"by arithmetic: {bounds_text(finding.bounds)}")
    store = point_store(directory)
    write_text(directory / "base.toml", toml_text(finding.plain))
    with point_pool(workers.jobs, workers.ray) as pool:
        driver = Driver(Base(directory / "base.toml"), question.settings, store, pool, "")
        if watch is not None:
            driver.watch = watch
        trials = Trials(driver, question, finding.worlds, finding.loads)
        judge, half = finding.search(trials, say)
        return _answered(finding, trials, driver, judge, half)


def _answered(
    finding: Finding, trials: Trials, driver: Driver, judge: Judge, half: Judge | None
) -> Answer:
    """What the runs say together; a few more of the best cluster."""
    question, worlds = finding.question, finding.worlds
    good = trials.good(judge)
    if NOT_SCALED not in question.systems:
        good = [one for one in good if one.scaling is not None]
    if not good:
        raise _no_cluster(finding, trials, judge, half)
    shown: dict[tuple[Layout, str], Candidate] = {}
    for one in good:
        shown.setdefault((one.layout, one.scaling.system if one.scaling else ""), one)
    driver.line = f"{good[0].label}: how sure"
    trials.run([(one, world) for one in shown.values() for world in judge.worlds])
    trials.run([(good[0], world) for world in worlds.plain])
    best = good[0]
    rows = [finding.ranked(trials, one, judge) for one in shown.values()]
    driver.line = f"{best.label}: headroom"
    ratio = trials.ratio(best, worlds.plain[0])
    room = headroom(driver, question, worlds, best, finding.plain, ratio)
    driver.line = f"{best.label}: the day" if question.day else driver.line
    day = day_of(trials, best, judge, question.day) if question.day else None
    others = _others(finding, trials, shown)
    survival = _survivors(finding, trials, driver, (judge, half), [*shown.values(), *others])
    survivor = survival.cheapest
    tables = checked_tables(finding.plain, question, survivor or best, worlds.spans)
    if len(question.seeds) == 1:
        rows[0] = _bootstrapped(rows[0], trials, best)
    return Answer(
        model=finding.spec.name,
        weights=types_told(finding.spec, tables),
        engine=config_from_dict(dict(tables)).engine.label,
        rate_per_s=finding.loads.rate_per_s,
        objectives=[f"{o.label} <= {o.limit_ms:g} ms" for o in question.objectives],
        has_prices=question.has_prices,
        confidence=question.confidence if half is not None else 1.0,
        run_s=worlds.spans.long_s,
        bounds=finding.bounds,
        rows=rows,
        median=None if half is None else _median(finding, trials, half),
        others=[finding.ranked(trials, one, finding.first) for one in others],
        headroom=room,
        doubt=finding.doubt(trials, best, judge, rows[0]),
        day=day,
        rests_on=finding.rests_on(best.layout),
        unmeasured=finding.unmeasured,
        survivor=None if survivor is None else finding.ranked(trials, survivor, judge),
        survive=question.survive,
        fates=survival.fates,
        fates_of_best=survival.of_best,
        beside=_beside(finding, trials, driver),
        refused=_refused(finding, trials, {*good, *others}),
        runs=driver.known,
        config=tables,
    )


def _beside(finding: Finding, trials: Trials, driver: Driver) -> list[Opinion]:
    if not finding.question.beside:
        return []
    driver.line = "a second opinion"
    return opinions(finding, trials)


def _median(finding: Finding, trials: Trials, half: Judge) -> Ranked | None:
    """The row of the cheapest cluster that holds before this judge."""
    middle = next(iter(trials.good(half)), None)
    if middle is None:
        return None
    trials.run([(middle, w) for w in half.worlds if (middle, w) in trials.rows])  # to their end
    return finding.ranked(trials, middle, half)


def _refused(finding: Finding, trials: Trials, told: set[Candidate]) -> dict[str, str]:
    """Why each layout without a cluster in the answer has none."""
    refused = dict(finding.refused)
    for layout in finding.layouts:
        if not any(one.layout == layout for one in told):
            refused[layout.label] = trials.reason(layout)
    return refused | dict(trials.not_scaled)


class _Survivors(NamedTuple):
    """What meets the objectives after a loss."""

    cheapest: Candidate | None
    fates: list[Fate]
    """Of the cheapest."""
    of_best: list[Fate]
    """Of the cluster that is best without a loss."""


def _survivors(
    finding: Finding,
    trials: Trials,
    driver: Driver,
    judges: tuple[Judge, Judge | None],
    bests: Sequence[Candidate],
) -> _Survivors:
    """Nothing if none was asked for.

    `judges`: with the confidence, and with one half; `bests`: of each layout, of those that meet
    with the confidence first.
    """
    judge, half = judges
    question = finding.question
    statics = [one for one in bests if one.scaling is None]
    if not question.survive or not statics:
        return _Survivors(None, [], [])
    driver.line = f"survivors of the loss of a {question.survive}"
    during = trials.with_objectives(question.during)
    survival = Survival(during, driver, question, finding.plain, judge)
    of_best = survival.fates(statics[0])
    found, fates = survival.cheapest(statics)
    if found is not None:
        # What is left of it after each loss holds with the confidence; its own figures need less.
        shown = (half or judge).worlds
        trials.run([(found, world) for world in [*shown, *finding.worlds.plain]])
    return _Survivors(found, fates, of_best)


def _others(
    finding: Finding, trials: Trials, shown: dict[tuple[Layout, str], Candidate]
) -> list[Candidate]:
    """The best cluster of each layout that is not among the rows, as short runs say."""
    found: dict[Layout, Candidate] = {}
    for one in trials.good(finding.first):
        if (one.layout, "") not in shown:
            found.setdefault(one.layout, one)
    return list(found.values())


def _bootstrapped(row: Ranked, trials: Trials, best: Candidate) -> Ranked:
    """The row of a single seed, with intervals over blocks of its requests."""
    figures = trials.rows[best, trials.worlds.plain[0]].result.figures
    readings = []
    for reading, one in zip(row.readings, trials.objectives, strict=True):
        low, high = map(figures.get, interval_figures(one.percentile))
        readings.append(msgspec.structs.replace(reading, low_ms=low, high_ms=high))
    return msgspec.structs.replace(row, readings=readings)


def _impossible(refused: Sequence[tuple[str, str]]) -> Exception:
    """Nothing can run, or nothing that can run can meet."""
    slow = [(label, why) for label, why in refused if " alone takes " in why]
    if not slow:
        return InputError(SOURCE, None, "--gpu", f"no layout can run: {': '.join(refused[0])}")
    label, why = slow[-1]
    return RunError(f"no cluster can meet the objectives: on {label}, {why}")


def _no_cluster(finding: Finding, trials: Trials, judge: Judge, half: Judge | None) -> Exception:
    """The error that names the nearest try, or the configuration's mistake."""
    results = {pair: row.result for pair, row in trials.rows.items()}
    invalid = [result for result in results.values() if result.status == "invalid"]
    if invalid and len(invalid) == len(results):
        return InputError(SOURCE, None, "", invalid[0].error)
    problem = f"no cluster of up to {finding.question.gpus_max} GPUs meets the objectives"
    middle = None if half is None else next(iter(trials.good(half)), None)
    if half is not None:
        problem += f" with {100 * finding.question.confidence:g} %"
        if middle is not None:
            return RunError(f"{problem}; with 50 %: {middle.label}")
    tried = [
        (trials.ratio(*pair), pair[0].cost, pair[0].label)
        for pair in results
        if trials.is_allowed(pair[0]) and results[pair].status in ("completed", "given up")
    ]
    if tried:
        worst, _, label = min(tried)
        if math.isfinite(worst):
            problem += f"; the nearest, {label}, is at {worst:.2f} x of a limit"
        else:
            problem += f"; {label} and all others are overloaded or leave requests unserved"
    return RunError(problem)
