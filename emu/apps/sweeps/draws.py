"""One configuration over draws of what is not known: engine, arrivals, sampling.

`runs/a/summary.json ...` is the run as configured, `runs/a/draws.json` has of every figure the
interval over draws, and where it comes from.

Each draw takes an engine from what is known of it (the posterior of a learned engine, else the
prior of measured runs), a seed of the workload (arrivals and lengths; a recorded file's are what
they were) and a seed of everything else (jitter, routers that draw). Draws come in pairs that
differ in one of the three, in turn: half the mean square of the differences is what that source
adds to the variance (Jansen's estimate), and all draws together give the interval.

Draw i is the same in all configurations with as many draws and the same seed, so that two of them
can be compared draw by draw.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.shared.answer import Reply, json_text, tell
from emu.apps.shared.engines import KnownEngine, engines_of
from emu.config.load import load_config
from emu.config.schema import Config
from emu.documents import Document, DocumentView
from emu.engines.registry import engine_text
from emu.errors import InputError
from emu.latency.engine import EngineModel
from emu.latency.posterior import draws
from emu.options.shared import Workers
from emu.process.interrupts import scratch
from emu.process.pool import pool_of
from emu.report.atomic import write_text
from emu.report.drawn import (
    LEVEL,
    NAME,
    SOURCES,
    Draws,
    Interval,
    interval_of,
    interval_text,
    share_text,
    shown,
)
from emu.report.paired import is_number
from emu.report.summary import figures_of
from emu.report.table import number
from emu.rng import rng_stream
from emu.runs.keys import Keys
from emu.runs.options import RunOptions
from emu.runs.run_json import Origin
from emu.runs.runner import adjust, execute
from emu.runs.store import Store, kept_results


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


def run_draw(task: Task) -> Document:
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

    def result(self, found: Mapping[int, DocumentView]) -> Draws:
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
    config: Config, source: str, options: RunOptions, *, report: bool, origin: Origin
) -> Draws:
    """Run the configuration and its draws; write draws.json, also of what an interrupt leaves.

    What an interrupt leaves is not run again.
    """
    count = options.draws
    drawing = Drawing(config, source, count)
    top = Path(config.output.dir)
    execute(config, source, report=False, origin=origin)
    found: dict[int, Document] = {}
    store: Store[Document] = Store(top, dict)
    try:
        for one in _answers(drawing.tasks, options, store):
            found[int(one["index"])] = one
            if not options.quiet:
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
        from emu.report.run_page import write_report

        write_report(top)
    return result


def draw_each(
    configs: Sequence[Config],
    source: str,
    count: int,
    workers: Workers,
    *,
    directory: Path,
    told: Callable[[int, int], None],
) -> list[Draws]:
    """The draws of several configurations, all in one pool; what is done is kept in `directory`.

    `told` hears (draws done, draws in all).
    """
    drawings = [Drawing(config, source, count) for config in configs]
    tasks = [task for drawing in drawings for task in drawing.tasks]
    tasks = [msgspec.structs.replace(task, index=at) for at, task in enumerate(tasks)]
    store: Store[Document] = Store(directory, dict)
    found: list[dict[int, Document]] = [{} for _ in drawings]
    for done, one in enumerate(_answers(tasks, workers, store), start=1):
        point, index = divmod(int(one["index"]), count)
        found[point][index] = one
        told(done, len(tasks))
    return [drawing.result(mine) for drawing, mine in zip(drawings, found, strict=True)]


def _answers(tasks: Sequence[Task], workers: Workers, store: Store[Document]) -> Iterator[Document]:
    known = Keys()
    keys = [
        known.key(task.config, "draw", task.index, msgspec.to_builtins(task.engines))
        for task in tasks
    ]
    with pool_of(run_draw, workers.jobs, workers.ray, _lost) as pool:
        keyed = dict(zip(keys, tasks, strict=True))
        yield from kept_results(keyed, pool, store, lambda one: keys[int(one["index"])])


def _lost(task: Task) -> str:
    return f"its draw was {task.index}"


def _tell(done: int, count: int) -> None:
    """Progress on standard error: rewritten on a terminal, else each tenth."""
    if sys.stderr.isatty():
        end = "\r\033[K" if done == count else ""
        print(f"\r\033[Kdraw {done} of {count}{end}", end="", file=sys.stderr, flush=True)
    elif done == count or done % max(1, count // 10) == 0:
        print(f"draw {done} of {count}", file=sys.stderr, flush=True)


def save(directory: Path, result: Draws) -> None:
    """Write draws.json."""
    write_text(directory / NAME, json_text(result))


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
    ended: Sequence[DocumentView], numbers: Sequence[Sequence[int]], varied: Sequence[str]
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
    return is_number(value) and math.isfinite(value)


def draws_command(path: Path, output: Path | None, options: RunOptions) -> int:
    """`emu run --draws N`; `output`: the directory, None for the configuration's."""
    from emu.runs.runner import kept_apart, say_moved

    if options.seeds > 1:
        raise InputError("run", None, "--draws", "draws seeds itself; leave out --seeds")
    absolute = load_config(path if options.ray is None else path.resolve(), options.settings)
    config = adjust(absolute, seed=options.seed, output=output)
    asked = Path(config.output.dir)
    if options.draws < 2:
        raise InputError("run", None, "--draws", "an interval needs 2 draws or more")
    if not options.force:
        config = kept_apart(config, str(path))
    result = run_draws(
        config,
        str(path),
        options,
        report=options.report and config.output.report,
        origin=Origin(f"emu run {path} --draws {options.draws}", options.settings),
    )
    top = Path(config.output.dir)
    say_moved(asked, top)

    def show(console: Console) -> None:
        print_draws(result, console, str(path))
        console.print(f"every figure in {top / NAME}", soft_wrap=True)

    return tell(Reply(show, top / NAME), options)


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
