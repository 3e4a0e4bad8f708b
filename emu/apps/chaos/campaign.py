"""`emu chaos`: many seeds on all cores."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from emu.apps.chaos.draws import draw_faults, ground_of
from emu.apps.chaos.minimize import Shrinking, shrink
from emu.apps.chaos.quick import QuickForm, quick_form
from emu.apps.chaos.telling import (
    TOLD_EVERY_S,
    Blame,
    Owner,
    advice,
    blame_of,
    owner_of,
    tell,
    telling_shrinking,
)
from emu.apps.chaos.totals import Totals, print_totals
from emu.apps.chaos.trial import Verdict, run_world
from emu.apps.chaos.worlds import World, draw_world
from emu.config.load import config_from_dict, effective_dict, load_config
from emu.config.names import toml_text
from emu.config.schema import Config
from emu.errors import InputError, InvariantViolation, RunError
from emu.log import Format, Level, Log, make_log
from emu.process.console import open_console
from emu.process.pool import pool_of
from emu.rng import rng_stream
from emu.runs.keys import Keys
from emu.runs.progress import told_every
from emu.runs.store import Store, kept_results
from emu.units import NS_PER_S
from emu.world import prepare

# --- many seeds on all cores ----------------------------------------------------------------------

_FEW: Final = 4
"""Fewer seeds run in this process: they end before another has started."""


class Job(msgspec.Struct):
    """What a worker needs."""

    seed: int
    every: int = 40
    """Events between two checks of the books."""
    base: dict[str, Any] | None = None
    """The user's configuration; None = the world is drawn as well."""
    span_s: float = 0.0
    """Time over which the user's requests arrive."""
    faults: list[dict[str, Any]] | None = None
    """Given faults instead of drawn ones."""


def world_of(job: Job) -> World:
    """The world of a seed: drawn, or the user's with drawn faults."""
    if job.base is None:
        world = draw_world(job.seed)
    else:
        tables: dict[str, Any] = {**job.base, "seed": job.seed}
        rng = rng_stream(job.seed, "chaos faults")
        tables["faults"] = draw_faults(rng, ground_of(tables, heals=True), job.span_s + 0.5)
        world = World(tables, [], heals=True)
    if job.faults is not None:
        world.tables["faults"] = job.faults
    return world


def run_job(job: Job) -> Verdict:
    """One seed (in a worker)."""
    return run_world(world_of(job), job.seed, every=job.every)


def verdicts(
    jobs: Sequence[Job], processes: int, ray: str | None, kept: Path | None
) -> Iterator[Verdict]:
    """Verdicts as they come; those in the store of a directory first."""
    keys = {job.seed: str(job.seed) for job in jobs}
    store: Store[Verdict] | None = None
    if kept is not None:
        store, known = Store(kept, Verdict), Keys()
        keys = {job.seed: known.key_of(msgspec.to_builtins(job)) for job in jobs}
    tasks = {keys[job.seed]: job for job in jobs}
    few = 1 if len(jobs) < _FEW and ray is None else processes
    with pool_of(run_job, few, ray, lambda job: f"its seed was {job.seed}") as pool:
        yield from kept_results(tasks, pool, store, lambda verdict: keys[verdict.seed])


def campaign(
    jobs: Sequence[Job],
    *,
    processes: int = 0,
    ray: str | None = None,
    kept: Path | None = None,
    progress: bool = False,
    log: Log | None = None,
) -> Totals:
    """Run all jobs; failing seeds in ascending order. An interrupt ends it early.

    `ray`: address of a cluster. `kept`: directory of what was run before, so that a campaign goes
    on where it was. `log`: of the worlds, which then run in this process.
    """
    started_s = time.perf_counter()
    totals = Totals()
    stream = (
        verdicts(jobs, processes, ray, kept)
        if log is None
        else (run_world(world_of(job), job.seed, every=job.every, log=log) for job in jobs)
    )

    def line() -> str:
        done = f"{totals.seeds:,} of {len(jobs):,} seeds, {len(totals.failing)} with violations"
        return f"chaos: {done}, {time.perf_counter() - started_s:.0f} s"

    telling: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    errors = Console(stderr=True)
    if progress and sys.stderr.isatty():
        from rich.progress import track

        stream = iter(track(stream, "chaos", len(jobs), console=errors, transient=True))
    elif progress:
        telling = told_every(TOLD_EVERY_S, line)
    try:
        with telling:
            for verdict in stream:
                totals.add(verdict)
                if progress and verdict.problems and len(totals.failing) == 1:
                    first = f"seed {verdict.seed}: {verdict.problems[0]} (Ctrl-C: tell it now)"
                    errors.print(first, soft_wrap=True, markup=False, highlight=False)
    except KeyboardInterrupt:
        totals.left = len(jobs) - totals.seeds
    totals.wall_s = time.perf_counter() - started_s
    totals.failing.sort(key=lambda verdict: verdict.seed)
    return totals


def base_of(config: Config) -> dict[str, Any]:
    """A user's configuration as tables for `Job.base`."""
    tables = {key: value for key, value in effective_dict(config).items() if value is not None}
    for name in ("output", "faults"):
        tables.pop(name, None)
    workload = {k: v for k, v in tables["workload"].items() if v is not None}
    if workload.get("path"):
        workload["path"] = str(Path(workload["path"]).resolve())
    tables["workload"] = workload
    return tables


def write_world(world: World, seed: int, directory: Path) -> Path:
    """A world as a configuration file with its workload."""
    directory.mkdir(parents=True, exist_ok=True)
    tables = {**world.tables, "seed": seed}
    if tables.get("models"):
        tables.pop("replicas", None)  # they share all GPUs; a file that has both is refused
    if world.lines:
        lines = directory / f"seed-{seed}.jsonl"
        lines.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in world.lines))
        tables["workload"] = {**tables.get("workload", {}), "path": lines.name}
    path = directory / f"seed-{seed}.toml"
    path.write_text(
        f"# World of chaos seed {seed}, minimised. Replay: python -m emu chaos --corpus {path}\n"
        + toml_text(tables)
    )
    return path


# --- the command ----------------------------------------------------------------------------------
_TOLD_MAX: Final = 5
"""Failing seeds that are told at length, and minimized."""
_LONG_S: Final = 60.0
"""CPU time of a campaign that is announced."""


def seed_range(text: str) -> range:
    """`A:B` (B excluded) or one seed."""
    first, colon, last = text.partition(":")
    try:
        low = int(first)
        high = int(last) if colon else low + 1
    except ValueError:
        problem = f"expected A:B or a number, got {text!r}"
        raise InputError("chaos", None, "--seeds", problem) from None
    if low < 0 or high <= low:
        raise InputError("chaos", None, "--seeds", f"expected 0 <= A < B, got {text!r}")
    return range(low, high)


def read_world(path: Path) -> World:
    """A world that was written down (tests/corpus): its configuration and its lines."""
    load_config(path)  # every mistake is found here, with its line
    tables = tomllib.loads(path.read_text())
    lines: list[dict[str, Any]] = []
    named = tables.get("workload", {}).get("path", "")
    if named and not Path(named).is_absolute():  # else it is the user's own, of any format
        source = path.parent / tables["workload"].pop("path")
        lines = [json.loads(line) for line in source.read_text().splitlines() if line]
    return World(tables, lines, heals=False)


class Asked(msgspec.Struct, frozen=True):
    """Which worlds a campaign is asked for."""

    path: Path | None = None
    """Configuration; None = clusters and workloads are drawn as well."""
    seeds: range = range(100)
    faults: Path | None = None
    """Configuration whose faults strike, instead of drawn ones."""
    overrides: tuple[str, ...] = ()
    quick: bool = False
    every: int = 40
    """Events between two checks of the books."""

    def again(self, seed: int) -> str:
        """The command that runs one of its seeds."""
        words = ["python -m emu chaos", *([str(self.path)] if self.path else [])]
        words.append(f"--seeds {seed}:{seed + 1}")
        words += [f"--faults {self.faults}"] if self.faults else []
        words += [f"--set {shlex.quote(override)}" for override in self.overrides]
        words += ["--quick"] if self.quick else []
        words += [f"--every {self.every}"] if self.every != Asked().every else []
        return " ".join(words)


class Ordered(msgspec.Struct, frozen=True):
    """The seeds of a campaign, and what is to be said before they run."""

    jobs: list[Job]
    owner: Owner | None = None
    """What of the user's configuration can be the cause of a violation."""
    note: str = ""


def chaos_command(
    path: Path | None,
    *,
    seeds: str,
    faults: Path | None,
    corpus: Path | None,
    every: int,
    processes: int,
    keep: Path,
    quiet: bool,
    overrides: Sequence[str] = (),
    quick: bool = False,
    at_least: int = 1,
    ray: str | None = None,
    output: Path | None = None,
    log_level: Level = "off",
    log_format: Format = "text",
) -> int:
    """Run a campaign.

    4 if emu was wrong, 3 if a run ended early for a cause in the user's configuration, or a kind
    of fault struck too seldom. The books are checked after `every` events.
    """
    console = open_console()
    log = make_log(log_level, log_format)
    if path is None:
        for given, option in ((faults, "--faults"), (overrides, "--set"), (quick, "--quick")):
            if given:
                raise InputError("chaos", None, option, "needs a configuration")
    if corpus is not None:
        return _replay(corpus, every, console, log)
    asked = Asked(path, seed_range(seeds), faults, tuple(overrides), quick, every)
    ordered = jobs_of(asked)
    if log is not None:
        _only_one(len(ordered.jobs), "--seeds")
    if ordered.note and not quiet:
        print(ordered.note, file=sys.stderr, flush=True)
    totals = campaign(
        ordered.jobs,
        processes=processes,
        ray=ray,
        kept=output,
        progress=not quiet and log is None,
        log=log,
    )
    if not quiet:
        print_totals(totals, console, at_least, is_drawn=path is None)
    if totals.failing:
        return _tell_failing(totals, asked, ordered, keep, console, is_told=not quiet)
    if totals.left:
        again = "" if output is None else "; the same command goes on from there"
        console.print(f"interrupted; {totals.left:,} seeds did not run{again}")
        return 130
    return RunError.exit_status if at_least > 1 and totals.faults_below(at_least) else 0


def _tell_failing(
    totals: Totals, asked: Asked, ordered: Ordered, keep: Path, console: Console, *, is_told: bool
) -> int:
    """What is wrong, seed by seed, before each is minimized; Ctrl-C ends the minimizing."""
    by_seed = {job.seed: job for job in ordered.jobs}
    owner, is_interrupted = ordered.owner or Owner(), False
    for verdict in totals.failing[:_TOLD_MAX]:
        blame, job = tell(verdict, console, owner), by_seed[verdict.seed]
        world, how = world_of(job), "not minimized"
        if blame is not Blame.LIMIT and not is_interrupted:
            shrinking = Shrinking()
            try:
                with telling_shrinking(job.seed, shrinking, is_told=is_told):
                    world = shrink(world, job.seed, every=job.every, shrinking=shrinking)
            except KeyboardInterrupt:
                is_interrupted, world = True, shrinking.smallest or world
            how = shrinking.told() + (", interrupted" if is_interrupted else "")
        file = write_world(world, job.seed, keep)
        console.print(f"  written to {file} ({how})", soft_wrap=True, markup=False)
        console.print(f"  {advice(blame, file.name)}", soft_wrap=True, markup=False)
    for verdict in totals.failing:
        console.print(asked.again(verdict.seed), soft_wrap=True, markup=False)
    if any(blame_of(verdict, owner) is not Blame.LIMIT for verdict in totals.failing):
        return InvariantViolation.exit_status
    return RunError.exit_status


def jobs_of(asked: Asked) -> Ordered:
    """The seeds of a campaign. Everything that can be wrong in a user's files is found here."""
    if asked.path is None:
        return Ordered([Job(seed, asked.every) for seed in asked.seeds])
    source = str(asked.path)
    config = load_config(asked.path, asked.overrides)
    _, workload = prepare(config, source)
    quick = quick_form(config, source, workload)
    note = quick.told() if asked.quick else _how_long(quick, len(asked.seeds))
    if asked.quick and not quick.is_whole:
        table = msgspec.structs.replace(config.workload, limit=quick.lines)
        config = msgspec.structs.replace(config, workload=table)
        _, workload = prepare(config, source)
    span_s = workload.last_arrival_ns / NS_PER_S
    base = base_of(config)
    given = None if asked.faults is None else _faults_of(asked.faults, base)
    jobs = [Job(seed, asked.every, base, span_s, given) for seed in asked.seeds]
    return Ordered(jobs, owner_of(config), note)


def _faults_of(path: Path, base: dict[str, Any]) -> list[dict[str, Any]]:
    """The faults of a file, which must fit the configuration `base`.

    The file is a configuration of its own, or has `[[faults]]` alone.
    """
    source = str(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raw = {}  # `load_config` says what is wrong
    is_alone = set(raw) == {"faults"}
    config = config_from_dict({**base, **raw}, source=source) if is_alone else load_config(path)
    tables = msgspec.to_builtins(config.faults)
    given = [{k: v for k, v in table.items() if v is not None} for table in tables]
    prepare(config_from_dict({**base, "faults": given}, source=source), source)
    return given


def _how_long(quick: QuickForm, seeds: int) -> str:
    """A line before what takes long."""
    if quick.whole_s * seeds < _LONG_S:
        return ""
    return (
        f"each seed takes about {quick.whole_s:.0f} s of CPU time ({quick.of_lines:,} lines); "
        "--quick gives a first verdict"
    )


def _only_one(worlds: int, option: str) -> None:
    if worlds != 1:
        problem = f"tells the life of one world, and there are {worlds}"
        raise InputError("--log-level", None, option, problem)


def _replay(corpus: Path, every: int, console: Console, log: Log | None) -> int:
    """Worlds that once failed must pass."""
    paths = sorted(corpus.glob("*.toml")) if corpus.is_dir() else [corpus]
    if log is not None:
        _only_one(len(paths), "--corpus")
    failing = 0
    for path in paths:
        world = read_world(path)
        verdict = run_world(world, int(world.tables.get("seed", 0)), every=every, log=log)
        failing += bool(verdict.problems)
        if verdict.problems:
            console.print(f"{path}", soft_wrap=True)
            tell(verdict, console)
    console.print(f"{len(paths)} worlds of the corpus, {failing} fail")
    return InvariantViolation.exit_status if failing else 0
