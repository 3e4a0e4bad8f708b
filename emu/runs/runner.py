"""One run from a file to a directory of results: what `emu run` does.

The rim: files, progress and exit statuses live here; what runs is a `World`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from emu.cluster.backends import range_warnings
from emu.cluster.plan import Plan, make_plan
from emu.config.load import effective_dict, load_config
from emu.config.places import blaming, placing
from emu.config.schema import Config
from emu.config.tables.routing import LoadTable
from emu.errors import InputError, printable
from emu.process.interrupts import held
from emu.report.atomic import RunDirectory, find, write_text
from emu.report.summary import Summary
from emu.runs.inputs import Names
from emu.runs.run_json import Began, Origin, run_json, with_limits
from emu.units import NS_PER_S
from emu.workload.opened import Workload, refused_warning
from emu.world import Outcome, Ports, World, emulate, prepare

if TYPE_CHECKING:
    import threading

    from emu.log import Log
    from emu.runs.options import RunOptions
    from emu.runs.shard_routes import Routes

_WARNINGS_MAX: Final = 5
"""Faults and commands without effect that a run tells; the others stand in marks.csv."""


class RunResult(msgspec.Struct):
    """What a run leaves behind."""

    directory: Path
    summary: Summary | None
    outcome: Outcome
    plan: Plan
    """What ran."""
    wall_s: float
    cpu_s: float
    known: str = ""
    """How well the engine is known, where a user or a page is told."""


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)


def _warn_before(plan: Plan, workload: Workload) -> None:
    _warn(workload.notes.warnings)
    config = plan.config
    is_short = bool(config.workload.path) and workload.count < config.workload.limit
    is_waiting = any(one.role == "inactive" for one in plan.replicas)
    if config.router != LoadTable() or is_short or is_waiting:
        from emu.runs.unused import unused_parts  # most runs have the default router alone

        _warn(unused_parts(config, plan, workload))


def _warnings(world: World) -> Iterator[str]:
    """What a user should know of a run that has ended."""
    cluster, plan = world.cluster, world.plan
    yield from range_warnings(
        (replica.latency, its.scheduler)
        for replica, its in zip(cluster.replicas, plan.replicas, strict=False)
    )
    told = cluster.warnings()
    yield from told[:_WARNINGS_MAX]
    if len(told) > _WARNINGS_MAX:
        yield f"{len(told) - _WARNINGS_MAX} more in marks.csv"


def execute(
    config: Config,
    source: str,
    *,
    progress: bool = False,
    report: bool | None = None,
    stop: threading.Event | None = None,
    log: Log | None = None,
    origin: Origin | None = None,
    jobs: int = 1,
) -> RunResult:
    """Run a configuration and write its directory. `stop` interrupts it from another thread.

    `origin` is recorded: how the configuration came about. `jobs`: processes that its replicas are
    shared out to, with the same results (docs/speed.md).

    Raises InputError before anything is written. A run that cannot go on (RunError), violates
    an invariant or is interrupted keeps what was computed as partial files and raises.
    """
    began = Began.now()
    wants_report = config.output.report if report is None else report
    output = msgspec.structs.replace(config.output, report=wants_report)
    plan, workload = prepare(msgspec.structs.replace(config, output=output), source)
    _warn_before(plan, workload)
    routes = _routes(plan, workload, jobs, logs=log is not None)
    directory: RunDirectory | None = None
    world: World | None = None
    try:
        directory = RunDirectory(Path(config.output.dir))
        staging, ports = directory.staging, Ports(log=log)
        if routes is not None:
            world = _in_parts(plan, workload, staging, routes)
        if world is None:
            with placing(source), _looking(workload.count, stop, progress=progress) as look:
                world = emulate(plan, partial(World, plan, workload, staging, ports), look)
        assert world.outcome is not None
        _warn(_warnings(world))
        world.close()
        summary = world.write_results(workload.count, workload.notes)
        known = _known(config, plan, summary) if origin is not None or wants_report else ""
        text = run_json(config, plan, source, directory.final, world.outcome, began, origin, known)
        write_text(staging / "run.json", text)
        if world.error is not None:
            _keep_partial(directory, is_told=origin is not None)
            raise world.error
        directory.publish()
    except BaseException:
        with held():
            if world is not None:
                world.discard()
            if directory is not None:
                directory.discard()
        raise
    _warn_refused(summary, workload)
    if wants_report:
        from emu.report.run_page import write_report

        write_report(Path(config.output.dir))
    where = Path(config.output.dir)
    return RunResult(where, summary, world.outcome, plan, *began.spent_s(), known)


def _known(config: Config, plan: Plan, summary: Summary) -> str:
    from emu.runs.engine_lines import uncertainty_line

    return uncertainty_line(config, plan, summary)


def _warn_refused(summary: Summary, workload: Workload) -> None:
    ended = summary.completed + summary.failed + summary.rejected + summary.cancelled
    if summary.rejected * 2 > ended and not workload.notes.rejected:
        print(f"warning: {refused_warning(summary.rejected, ended)}", file=sys.stderr)


def _routes(plan: Plan, workload: Workload, jobs: int, *, logs: bool) -> Routes | None:
    """How a run is shared out to processes; None = it is not."""
    if jobs < 2:
        return None
    from emu.runs.shard_rules import routes_of

    return routes_of(plan, workload, jobs, logs=logs)


def _in_parts(plan: Plan, workload: Workload, staging: Path, routes: Routes) -> World | None:
    """The world of a run that several processes have done; None = it needs one, which is said."""
    from emu.runs.shards import run_in_parts

    found = run_in_parts(plan, workload, staging, routes)
    if isinstance(found, str):
        _warn([f"one process runs all of it: {found}"])
        return None
    return found


def _keep_partial(directory: RunDirectory, *, is_told: bool) -> None:
    """Publish what was computed before an error; `is_told`: say where."""
    directory.publish_partial()
    if is_told:
        where = os.path.relpath(directory.final)
        print(f"partial results are kept in {where} (*.partial.*)", file=sys.stderr)


@contextlib.contextmanager
def _looking(
    requests: int, stop: threading.Event | None, *, progress: bool
) -> Iterator[Callable[[World], bool] | None]:
    """What is to look at a run while it goes on, if anything: the bar, another thread's wish."""
    if not progress:
        yield None if stop is None else lambda _: stop.is_set()
        return
    from emu.runs.progress import Progress

    with Progress(requests) as bar:

        def look(world: World) -> bool:
            bar.update(world)
            return stop is not None and stop.is_set()

        yield look


def adjust(config: Config, *, seed: int | None, output: Path | None) -> Config:
    """A config with another seed or output directory (relative to the working directory)."""
    if seed is not None:
        if seed < 0:
            raise InputError("seed", None, "", f"must be at least 0, not {seed}")
        config = msgspec.structs.replace(config, seed=seed)
    if output is not None:
        table = msgspec.structs.replace(config.output, dir=str(output))
        config = msgspec.structs.replace(config, output=table)
    return config


def kept_apart(config: Config, source: str) -> Config:
    """The config with a directory of its own, if its directory holds a run of another one.

    A run of the same configuration is replaced: it has the same results. `source` is what messages
    call the configuration. Raises InputError as `make_plan` does.
    """
    first = Path(config.output.dir)
    if not first.exists():
        return config
    whole = with_limits(config, make_plan(config, source, imports=False))

    def holds_another(place: Path) -> bool:
        found = find(place, "summary.json")
        return found is not None and not _is_same(whole, found)

    place = next_free(first, holds_another)
    if place == first:
        return config
    table = msgspec.structs.replace(config.output, dir=str(place))
    return msgspec.structs.replace(config, output=table)


def next_free(first: Path, is_taken: Callable[[Path], bool]) -> Path:
    """The directory, or the first of DIR-2, DIR-3, ... that is not taken."""
    place, number = first, 1
    while is_taken(place):
        number += 1
        place = first.with_name(f"{first.name}-{number}")
    return place


def say_moved(first: Path, place: Path) -> None:
    """Say where the run is, if it is not in the directory that was asked for."""
    if place != first:
        text = f"{first} holds another run; this one goes to {place} (--force replaces)"
        print(text, file=sys.stderr)


def _is_same(config: Config, summary: Path) -> bool:
    """True if a run in the directory of this summary had the same configuration, and ended.

    `config` has the limits that engines fill in.
    """
    import json

    try:
        content = json.loads((summary.parent / "run.json").read_text(encoding="utf-8"))
        old = dict(content["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return ".partial" in summary.name  # nothing that one would want to keep
    recorded_as = Names(Path.cwd()).all_at_home(effective_dict(config))
    new = json.loads(msgspec.json.encode(recorded_as))
    return {**old, "output": None} == {**new, "output": None}


def _log(options: RunOptions) -> Log | None:
    if options.level == "off":
        return None
    from emu.log import make_log  # a run without a log does not load it

    return make_log(options.level, options.log_format)


def run_command(path: Path, output: Path | None, options: RunOptions) -> int:
    """`emu run` of one run; `output`: the directory, None for the configuration's."""
    import shlex

    seed, overrides = options.seed, options.settings
    config = adjust(load_config(path, overrides), seed=seed, output=output)
    asked = Path(config.output.dir)
    if not options.force:
        config = kept_apart(config, str(path))
    words = ["emu", "run", str(path), *(["--seed", str(seed)] if seed is not None else [])]
    words += ["--set", *overrides] if overrides else []
    with blaming(overrides):
        result = execute(
            config,
            str(path),
            progress=not options.quiet and options.level == "off" and sys.stderr.isatty(),
            report=config.output.report and options.report,
            origin=Origin(shlex.join(words), overrides),
            log=_log(options),
            jobs=options.jobs,
        )
    say_moved(asked, Path(config.output.dir))
    if options.as_json:
        print((result.directory / "summary.json").read_text(encoding="utf-8"), end="")
    elif not options.quiet:
        _say(result, config)
    return 0


def _say(result: RunResult, config: Config) -> None:
    """The tables of a run, and what one should know of them."""
    assert result.summary is not None
    from emu.runs.crowding import crowded
    from emu.runs.engine_lines import engine_line, served_lines
    from emu.runs.slow_modes import slow_line

    say = _print_summary(result.summary)
    plan = result.plan
    for line in served_lines(plan):
        say(f"model: {line}")
    say(f"engine: {engine_line(plan, result.known)}")
    for line in crowded(plan):
        say(f"placement: {line}")
    emulated_s = result.outcome.end_ns / NS_PER_S
    speed = emulated_s / result.wall_s
    where = os.path.relpath(result.directory)
    say(
        f"{emulated_s:.1f} s emulated in {result.wall_s:.2f} s "
        f"({speed:.{0 if speed >= 10 else 1}f} x real time); results in {where}"
        + slow_line(config, plan, result.wall_s)
    )


def _print_summary(summary: Summary) -> Callable[[str], object]:
    """The tables; returns what prints the lines below them."""
    from emu.process.console import is_plain, open_console
    from emu.report.table import plain_summary, print_summary

    text = plain_summary(summary) if is_plain() else None
    if text is not None:
        print(text)
        return print
    console = open_console()
    print_summary(summary, console)
    return partial(console.print, soft_wrap=True)
