"""One configuration many times: with several seeds, or over draws of what is not known."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.sweeps.sweepfile import figures_of
from emu.cluster.plan import make_plan
from emu.config.load import load_config
from emu.config.schema import Config
from emu.engines.registry import engine_text
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.latency.posterior import Known, draws, known_engine
from emu.process.exits import open_console, scratch
from emu.process.pool import pool_of
from emu.process.prepared import prepared
from emu.report.atomic import write_text
from emu.report.compare import percent_of, run_names
from emu.report.drawn import (
    LEVEL,
    NAME,
    SHOWN,
    SOURCES,
    Draws,
    Interval,
    Mean,
    interval_of,
    interval_text,
    mean_of,
    share_text,
    shown,
)
from emu.report.table import number
from emu.rng import rng_stream
from emu.runs.keys import Keys
from emu.runs.run_json import Origin
from emu.runs.runner import adjust, execute
from emu.runs.store import Store, kept_results

# --- seeds: means with intervals, and two such sets compared --------------------------------------
# runs/a/seed-42/ ... the runs runs/a/seeds.json seeds, and of every figure the mean, half its 95 %
# interval, the values

SEEDS_FILE: Final = "seeds.json"


class SeedTask(msgspec.Struct, frozen=True):
    """One run."""

    config: Config
    source: str
    report: bool
    origin: Origin


class Figure(msgspec.Struct, frozen=True):
    """A figure of all seeds."""

    mean: float
    half: float | None
    """Half of the 95 % interval's width."""
    values: list[float]


class Seeds(msgspec.Struct, frozen=True):
    """seeds.json."""

    seeds: list[int]
    figures: dict[str, Figure]


def run_one(task: SeedTask) -> dict[str, Any]:
    """Run a seed; the figures of its summary."""
    result = execute(task.config, task.source, report=task.report, origin=task.origin)
    assert result.summary is not None
    return {"seed": task.config.seed, **figures_of(result.summary)}


def run_seeds(
    config: Config,
    source: str,
    count: int,
    *,
    jobs: int,
    ray: str | None = None,
    report: bool,
    origin: Origin,
) -> Seeds:
    """Run seeds `config.seed` to `config.seed + count - 1`, and write seeds.json.

    What an interrupt leaves is not run again.
    """
    top = Path(config.output.dir)
    place = top if ray is None else top.resolve()  # workers of Ray stand elsewhere
    seeds = [config.seed + index for index in range(count)]
    tasks = [
        SeedTask(adjust(config, seed=seed, output=place / f"seed-{seed}"), source, report, origin)
        for seed in seeds
    ]
    store: Store[dict[str, Any]] = Store(top, dict)
    known = Keys()
    keys = {task.config.seed: known.key(task.config, "seed") for task in tasks}
    keyed = {keys[task.config.seed]: task for task in tasks}
    for key, task in keyed.items():
        if not Path(task.config.output.dir).exists():
            store.drop(key)
    try:
        with pool_of(run_one, jobs, ray, lambda task: f"its seed was {task.config.seed}") as pool:
            results = kept_results(keyed, pool, store, lambda one: keys[int(one["seed"])])
            found = sorted(results, key=lambda one: int(one["seed"]))
    except KeyboardInterrupt:
        print(f"runs that ended are kept in {top}", file=sys.stderr)
        raise
    names = [
        name
        for name, value in found[0].items()
        if name != "seed" and all(_is_number(one.get(name)) for one in found)
    ]
    figures = {}
    for name in names:
        values = [float(one[name]) for one in found]
        mean = mean_of(values)
        figures[name] = Figure(mean.mean, mean.half, values)
    result = Seeds(seeds, figures)
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
    write_text(top / SEEDS_FILE, text + "\n")
    store.remove()
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def seeds_command(
    path: Path,
    count: int,
    *,
    output: Path | None,
    seed: int | None,
    overrides: Sequence[str],
    jobs: int,
    ray: str | None,
    quiet: bool,
    report: bool,
    as_json: bool,
    force: bool,
) -> int:
    """`emu run --seeds N`."""
    absolute = load_config(path if ray is None else path.resolve(), overrides)
    config = adjust(absolute, seed=seed, output=output)
    top = Path(config.output.dir)
    if (top / "summary.json").exists() or ((top / SEEDS_FILE).exists() and not force):
        problem = "holds results already; another directory with --output, or --force"
        raise InputError(str(top), None, "output.dir", problem)
    words = f"emu run {path} --seeds {count}"
    result = run_seeds(
        config,
        str(path),
        count,
        jobs=jobs,
        ray=ray,
        report=report and config.output.report,
        origin=Origin(words, overrides),
    )
    if as_json:
        print((top / SEEDS_FILE).read_text(encoding="utf-8"), end="")
    elif not quiet:
        table = Table(title=f"{path}: {count} seeds", title_justify="left")
        for heading in ("", "mean", "95 % interval", "least", "most"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, label in SHOWN.items():
            if name in result.figures:
                table.add_row(label, *_cells(result.figures[name]))
        console = open_console()
        console.print(table)
        console.print(f"every figure in {top / SEEDS_FILE}", soft_wrap=True)
    return 0


def _cells(figure: Figure) -> list[str]:
    half = "-" if figure.half is None else f"± {number(figure.half)}"
    return [number(figure.mean), half, number(min(figure.values)), number(max(figure.values))]


# --- two sets of seeds ---------------------------------------------------------------------------
class SeedRow(msgspec.Struct, frozen=True):
    """A figure of two sets; the difference in per cent of the first mean, with its interval."""

    name: str
    means: list[Mean]
    percent: list[float | None]
    half: list[float | None]


def read_seeds(directory: Path) -> Seeds:
    """seeds.json. Raises InputError."""
    path = directory / SEEDS_FILE
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), prepared(Seeds))
    except (OSError, ValueError) as error:
        raise InputError(str(path), None, "", f"unusable: {error}") from None


def compare_seeds(directories: Sequence[Path]) -> list[SeedRow]:
    """Sets of seeds against the first; paired by seed. Raises InputError if seeds are not equal."""
    sets = [read_seeds(directory) for directory in directories]
    if any(one.seeds != sets[0].seeds for one in sets):
        raise InputError("compare", None, "", "the sets of runs have different seeds")
    rows = []
    for name, label in SHOWN.items():
        if not all(name in one.figures for one in sets):
            continue
        base = sets[0].figures[name]
        percents: list[float | None] = []
        halves: list[float | None] = []
        for other in sets[1:]:
            values = other.figures[name].values
            apart = mean_of([b - a for a, b in zip(base.values, values, strict=True)])
            percents.append(percent_of(base.mean + apart.mean, base.mean))
            known = apart.half is not None and base.mean != 0
            halves.append(100 * (apart.half or 0.0) / abs(base.mean) if known else None)
        means = [
            Mean(one.figures[name].mean, one.figures[name].half, len(one.seeds)) for one in sets
        ]
        rows.append(SeedRow(label, means, percents, halves))
    return rows


def print_seeds(directories: Sequence[Path]) -> None:
    """The comparison as a table; `*`: the interval of the difference excludes zero."""
    names = run_names(directories)
    table = Table(title="Means over seeds, paired by seed", title_justify="left")
    table.add_column("")
    for index, name in enumerate(names):
        table.add_column(name, justify="right")
        if index:
            table.add_column("difference, %", justify="right")
    for row in compare_seeds(directories):
        cells = [_mean_text(row.means[0])]
        for mean, percent, half in zip(row.means[1:], row.percent, row.half, strict=True):
            cells += [_mean_text(mean), _difference_text(percent, half)]
        table.add_row(row.name, *cells)
    console = open_console()
    console.print(table)
    console.print("± half of the 95 % interval; *: the difference is not zero")


def _mean_text(mean: Mean) -> str:
    return number(mean.mean) + ("" if mean.half is None else f" ± {number(mean.half)}")


def _difference_text(percent: float | None, half: float | None) -> str:
    if percent is None:
        return "-"
    if half is None:
        return f"{percent:+.2f}"
    return f"{percent:+.2f} ± {half:.2f}{' *' if abs(percent) > half else ''}"


# --- draws: engine, arrivals, sampling ------------------------------------------------------------
#     runs/a/summary.json ...   the run as configured
#     runs/a/draws.json         of every figure the interval over draws, and where it comes from
#
# Each draw takes an engine from what is known of it (the posterior of a learned engine, else the
# prior of measured runs), a seed of the workload (arrivals and lengths; a recorded file's are what
# they were) and a seed of everything else (jitter, routers that draw). Draws come in pairs that
# differ in one of the three, in turn: half the mean square of the differences is what that source
# adds to the variance (Jansen's estimate), and all draws together give the interval.
#
# Draw i is the same in all configurations with as many draws and the same seed, so that two of them
# can be compared draw by draw.


class Task(msgspec.Struct, frozen=True):
    """One draw to run."""

    index: int
    config: Config
    source: str
    engines: tuple[tuple[int, str, EngineModel], ...]
    """Group of replicas -> the engine that it draws from (`vllm-0.15`), its constants."""


def numbers_of(count: int, varied: Sequence[str]) -> list[list[int]]:
    """Which engine, arrivals and sampling each draw has: pairs that differ in one of them."""
    found = []
    for index in range(count):
        pair = index // 2
        own = [2 * pair] * len(SOURCES)
        if index % 2 and varied:
            own[SOURCES.index(varied[pair % len(varied)])] = 2 * pair + 1
        found.append(own)
    return found


def run_draw(task: Task) -> dict[str, Any]:
    """Run a draw; the figures of its summary."""
    with scratch("emu-draw-") as place:
        groups = list(task.config.replicas)
        for group, base, engine in task.engines:
            path = place / f"engine-{group}.toml"
            path.write_text(engine_text(engine, base), encoding="utf-8")
            keys = {**groups[group].engine, "version": "", "learned": str(path)}
            groups[group] = msgspec.structs.replace(groups[group], engine=keys)
        output = msgspec.structs.replace(
            task.config.output, dir=str(place / "run"), trace=False, timeseries_interval_ms=0
        )
        config = msgspec.structs.replace(task.config, replicas=groups, output=output)
        result = execute(config, task.source, report=False)
        assert result.summary is not None
        return {"index": task.index, **figures_of(result.summary)}


class Drawing:
    """The draws of one configuration, and what they say together."""

    def __init__(self, config: Config, source: str, count: int) -> None:
        """Raises InputError for a configuration without an engine."""
        self._config = config
        self._count = count
        self._known = engines_of(config, source)
        self._varied = [name for name, varies in _varying(config, self._known).items() if varies]
        self._numbers = numbers_of(count, self._varied)
        self.tasks = _tasks(config, source, self._known, self._numbers)

    def result(self, found: Mapping[int, Mapping[str, Any]]) -> Draws:
        """The result of the draws that have ended, by number."""
        ended = sorted(found)
        rows = [{**found[index], "index": index} for index in ended]
        return Draws(
            len(ended),
            self._count,
            self._config.seed,
            LEVEL,
            list(dict.fromkeys(one.known.source for one in self._known.values())),
            self._varied,
            [self._numbers[index] for index in ended],
            _figures(rows, self._numbers, self._varied),
        )


def run_draws(
    config: Config,
    source: str,
    count: int,
    *,
    jobs: int,
    ray: str | None = None,
    report: bool,
    origin: Origin,
    is_quiet: bool = False,
) -> Draws:
    """Run the configuration and its draws; write draws.json, also of what an interrupt leaves.

    What an interrupt leaves is not run again.
    """
    drawing = Drawing(config, source, count)
    top = Path(config.output.dir)
    execute(config, source, report=False, origin=origin)
    found: dict[int, dict[str, Any]] = {}
    store: Store[dict[str, Any]] = Store(top, dict)
    try:
        for one in _answers(drawing.tasks, jobs, ray, store):
            found[int(one["index"])] = one
            if not is_quiet:
                _tell(len(found), count)
    except KeyboardInterrupt:
        if len(found) > 1:
            save(top, drawing.result(found))
            print(f"{len(found)} of {count} draws are kept in {top / NAME}", file=sys.stderr)
        raise
    result = drawing.result(found)
    save(top, result)
    store.remove()
    if report:
        from emu.report.html import write_report

        write_report(top)
    return result


def draw_each(
    configs: Sequence[Config],
    source: str,
    count: int,
    *,
    jobs: int,
    ray: str | None,
    directory: Path,
    told: Callable[[int, int], None],
) -> list[Draws]:
    """The draws of several configurations, all in one pool; what is done is kept in `directory`.

    `told` hears (draws done, draws in all).
    """
    drawings = [Drawing(config, source, count) for config in configs]
    tasks = [task for drawing in drawings for task in drawing.tasks]
    tasks = [msgspec.structs.replace(task, index=at) for at, task in enumerate(tasks)]
    store: Store[dict[str, Any]] = Store(directory, dict)
    found: list[dict[int, dict[str, Any]]] = [{} for _ in drawings]
    for done, one in enumerate(_answers(tasks, jobs, ray, store), start=1):
        point, index = divmod(int(one["index"]), count)
        found[point][index] = one
        told(done, len(tasks))
    return [drawing.result(mine) for drawing, mine in zip(drawings, found, strict=True)]


def _answers(
    tasks: Sequence[Task], jobs: int, ray: str | None, store: Store[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    known = Keys()
    keys = [
        known.key(task.config, "draw", task.index, msgspec.to_builtins(task.engines))
        for task in tasks
    ]
    with pool_of(run_draw, jobs, ray, lambda task: f"its draw was {task.index}") as pool:
        keyed = dict(zip(keys, tasks, strict=True))
        yield from kept_results(keyed, pool, store, lambda one: keys[int(one["index"])])


def _tell(done: int, count: int) -> None:
    """Progress on standard error: rewritten on a terminal, else each tenth."""
    if sys.stderr.isatty():
        end = "\r\033[K" if done == count else ""
        print(f"\r\033[Kdraw {done} of {count}{end}", end="", file=sys.stderr, flush=True)
    elif done == count or done % max(1, count // 10) == 0:
        print(f"draw {done} of {count}", file=sys.stderr, flush=True)


def save(directory: Path, result: Draws) -> None:
    """Write draws.json."""
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
    write_text(directory / NAME, text + "\n")


class KnownEngine(msgspec.Struct, frozen=True):
    """The engine of a group of replicas."""

    base: str
    """In one word: `vllm-0.15`."""
    known: Known


def engines_of(config: Config, source: str) -> dict[int, KnownEngine]:
    """What is known of the engine of each group of replicas; groups without an engine lack."""
    plan = make_plan(config, source)
    found: dict[int, KnownEngine] = {}
    at = 0
    for group, table in enumerate(config.replicas):
        if table.count == 0:
            continue
        replica = plan.replicas[at]
        at += table.count
        bound = replica.bound
        if bound is None:
            continue
        gpu, model, backend = replica.gpu.name, replica.model.name, replica.latency.backend
        known = known_engine(bound.constants, bound.learned, gpu, model, backend)
        found[group] = KnownEngine(bound.engine.label, known)
    if not found:
        raise InputError(source, None, "engine.name", "draws need an engine, not none")
    return found


def _varying(config: Config, known: Mapping[int, KnownEngine]) -> dict[str, bool]:
    """Which sources can vary. A recorded workload is what it was."""
    drawn = config.workload.synthetic is not None
    return {"engine": bool(known), "arrivals": drawn, "sampling": True}


def _tasks(
    config: Config, source: str, known: Mapping[int, KnownEngine], numbers: Sequence[Sequence[int]]
) -> list[Task]:
    size = 1 + max((max(row) for row in numbers), default=0)
    engines: dict[int, list[EngineModel]] = {}
    for group, one in known.items():
        # Groups with the same engine have the same draw.
        stream = rng_stream(config.seed, f"draws.{one.known.source}")
        engines[group] = draws(one.known, size, stream)
    rng = rng_stream(config.seed, "draws.seeds")
    seeds = rng.integers(0, 2**31, (size, 2)).tolist()
    tasks = []
    for index, (engine, arrivals, sampling) in enumerate(numbers):
        workload = config.workload
        if workload.synthetic is not None:
            workload = msgspec.structs.replace(workload, seed=seeds[arrivals][0])
        drawn = msgspec.structs.replace(config, workload=workload, seed=seeds[sampling][1])
        chosen = tuple((group, known[group].base, row[engine]) for group, row in engines.items())
        tasks.append(Task(index, drawn, source, chosen))
    return tasks


def _figures(
    ended: Sequence[Mapping[str, Any]], numbers: Sequence[Sequence[int]], varied: Sequence[str]
) -> dict[str, Interval]:
    if not ended:
        return {}
    rows = {int(one["index"]): one for one in ended}
    found = {}
    for name, value in ended[0].items():
        if name == "index" or not _is_finite(value):
            continue
        column = {index: row.get(name) for index, row in rows.items()}
        if all(_is_finite(each) for each in column.values()):
            values = {index: float(each) for index, each in column.items()}  # type: ignore[arg-type]
            interval = interval_of(values, numbers, varied)
            if name.startswith("slo."):  # a part of the requests
                interval = msgspec.structs.replace(interval, high=min(1.0, interval.high))
            found[name] = interval
    return found


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


# --- the command ---------------------------------------------------------------------------------
def draws_command(
    path: Path,
    count: int,
    *,
    output: Path | None,
    seed: int | None,
    overrides: Sequence[str],
    jobs: int,
    ray: str | None,
    quiet: bool,
    report: bool,
    as_json: bool,
    force: bool,
) -> int:
    """`emu run --draws N`."""
    from emu.runs.runner import kept_apart

    absolute = load_config(path if ray is None else path.resolve(), overrides)
    config = adjust(absolute, seed=seed, output=output)
    if count < 2:
        raise InputError("run", None, "--draws", "an interval needs 2 draws or more")
    if not force:
        config = kept_apart(config, str(path))
    result = run_draws(
        config,
        str(path),
        count,
        jobs=jobs,
        ray=ray,
        report=report and config.output.report,
        origin=Origin(f"emu run {path} --draws {count}", overrides),
        is_quiet=quiet,
    )
    top = Path(config.output.dir)
    if as_json:
        print((top / NAME).read_text(encoding="utf-8"), end="")
    elif not quiet:
        print_draws(result, open_console(), str(path))
        open_console().print(f"every figure in {top / NAME}", soft_wrap=True)
    return 0


def print_draws(result: Draws, console: Console, title: str) -> None:
    """The intervals of what one looks at first."""
    heading = f"{title}: {result.count} draws, {result.level_percent} % intervals"
    table = Table(title=heading, title_justify="left")
    for column in ("", "median", "interval", "from"):
        table.add_column(column, justify="right" if column in ("median", "interval") else "left")
    for _, label, interval in shown(result):
        table.add_row(label, number(interval.median), interval_text(interval), share_text(interval))
    console.print(table)
    console.print("engines: " + "; ".join(result.engines), soft_wrap=True)
    if "arrivals" not in result.varied:
        console.print("arrivals: as recorded, not drawn", soft_wrap=True)
