"""`emu chaos`: many seeds on all cores, what happened in them, and what never did."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from emu.chaos.draws import draw_faults, ground_of
from emu.chaos.trial import NOT_DRAWN, STRIKES, Verdict, run_world, schema_keys
from emu.chaos.worlds import World, draw_world
from emu.config.faultkinds import FAULT_KINDS
from emu.config.load import effective_dict, load_config
from emu.config.names import toml_text
from emu.config.schema import Config
from emu.errors import InputError, InvariantViolation, RunError
from emu.log import Format, Level, Log, make_log
from emu.process.exits import open_console
from emu.process.pool import pool_of
from emu.replica.states import TRANSITIONS
from emu.rng import rng_stream
from emu.runs.runner import prepare, told_every
from emu.runs.store import Keys, Store, kept_results
from emu.units import NS_PER_S

# --- minimizing -----------------------------------------------------------------------------------
# A failing seed is minimised (its fault list, then its workload) and written as a configuration
# with its workload beside it; one line reproduces it.
#
# Delta debugging: drop halves, then quarters, and so on. What counts as the same failure is the
# first words of the first problem, so that one bug is not exchanged for another on the way.

T = TypeVar("T")
TRIALS_MAX = 400


def signature(problem: str) -> str:
    """What kind of failure it is, without its figures."""
    words = "".join(" " if c.isdigit() else c for c in problem).split()
    return " ".join(words[:6])


def shrink(world: World, seed: int, *, every: int = 40) -> World:
    """A smaller world that fails in the same way (or the same world, if it does not fail).

    The books are checked after `every` events.
    """
    verdict = run_world(world, seed, every=every)
    if not verdict.problems:
        return world
    wanted = signature(verdict.problems[0])
    budget = [TRIALS_MAX]

    def fails(candidate: World) -> bool:
        if budget[0] <= 0 or (world.lines and not candidate.lines):
            return False
        budget[0] -= 1
        problems = run_world(candidate, seed, every=every).problems
        return bool(problems) and signature(problems[0]) == wanted

    faults = minimize(
        list(world.tables.get("faults", [])), lambda kept: fails(_with_faults(world, kept))
    )
    world = _with_faults(world, faults)
    lines = minimize(world.lines, lambda kept: fails(msgspec.structs.replace(world, lines=kept)))
    return msgspec.structs.replace(world, lines=lines)


def _with_faults(world: World, faults: list[dict[str, object]]) -> World:
    tables = {key: value for key, value in world.tables.items() if key != "faults"}
    if faults:
        tables["faults"] = faults
    return msgspec.structs.replace(world, tables=tables)


def minimize(items: list[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A sublist that still fails and loses that when any one chunk tried is dropped."""
    size = max(1, len(items) // 2)
    while items:
        at = 0
        while at < len(items):
            kept = items[:at] + items[at + size :]
            if fails(kept):
                items = kept
            else:
                at += size
        if size == 1:
            break
        size = max(1, size // 2)
    return items


# --- many seeds on all cores ----------------------------------------------------------------------

_TOLD_EVERY_S: Final = 10.0
_FEW: Final = 4
"""Fewer seeds run in this process: they end before another has started."""
_DIGITS: Final = re.compile(r"\d+")
ENDS: Final = (
    "completed",
    "cancelled: client_left",
    "cancelled: session_ended",
    "rejected: overloaded",
    *(
        f"failed: {reason}"
        for reason in (
            "replica_lost",
            "kv_lost",
            "lease_expired",
            "drain_expired",
            "refused",
            "transfer_broken",
            "transfer_timeout",
            "handshake_timeout",
            "destination_refused",
            "no_replica_left",
            "no_decode_replica_holds_it",
        )
    ),
)
"""Ends that a request can have, apart from those that name a size."""
CHANGES: Final = tuple(f"{before.value} -> {after.value}" for before, after in TRANSITIONS)


class Totals(msgspec.Struct):
    """What a campaign saw."""

    seeds: int = 0
    events: int = 0
    checks: int = 0
    virtual_s: float = 0.0
    gpu_hours: float = 0.0
    cluster_hours: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    faults: dict[str, int] = {}
    missed: dict[str, int] = {}
    parts: dict[str, int] = {}
    """`kind on part` -> how often a fault struck a replica that played this part."""
    keys: dict[str, int] = {}
    """Key of the schema -> worlds that gave it."""
    transitions: dict[str, int] = {}
    ends: dict[str, int] = {}
    failing: list[Verdict] = []
    left: int = 0
    """Seeds that did not run: the campaign was interrupted."""

    def add(self, verdict: Verdict) -> None:
        """One more seed."""
        self.seeds += 1
        self.events += verdict.events
        self.checks += verdict.checks
        hours = verdict.virtual_ns / 3.6e12
        self.virtual_s += verdict.virtual_ns / 1e9
        self.cluster_hours += hours
        self.gpu_hours += hours * verdict.gpus
        self.cpu_s += verdict.cpu_s
        for mine, its in (
            (self.faults, verdict.faults),
            (self.missed, verdict.missed),
            (self.parts, verdict.parts),
            (self.keys, dict.fromkeys(verdict.keys, 1)),
            (self.transitions, verdict.transitions),
            (self.ends, verdict.ends),
        ):
            for name, count in its.items():
                key = _DIGITS.sub("N", name) if mine is self.ends else name
                mine[key] = mine.get(key, 0) + count
        if verdict.problems:
            self.failing.append(verdict)

    def faults_below(self, times: int) -> list[str]:
        """Kinds of faults that struck less often, with how often."""
        seen = {kind: self.faults.get(kind, 0) for kind in FAULT_KINDS}
        return [f"{kind} ({count})" for kind, count in seen.items() if count < times]

    def parts_below(self, times: int) -> list[str]:
        """Kinds of faults on parts that they can strike, which did so less often."""
        seen = {name: self.parts.get(name, 0) for name in STRIKES}
        return [f"{name} ({count})" for name, count in seen.items() if count < times]

    def changes_below(self, times: int) -> list[str]:
        """Changes of state that came less often, with how often."""
        seen = {name: self.transitions.get(name, 0) for name in CHANGES}
        return [f"{name} ({count})" for name, count in seen.items() if count < times]

    def rarest(self, count: int) -> list[tuple[str, int]]:
        """So many of the changes of state, and of the faults on parts, that came least often."""
        seen = {name: self.transitions.get(name, 0) for name in CHANGES}
        seen |= {name: self.parts.get(name, 0) for name in STRIKES}
        return sorted(seen.items(), key=lambda item: (item[1], item[0]))[:count]

    def keys_not_drawn(self) -> list[str]:
        """Keys of the schema that no world gave, apart from those that none ever does."""
        return [key for key in schema_keys() if key not in self.keys and key not in NOT_DRAWN]

    def never_seen(self) -> list[str]:
        """Ends of requests that the campaign did not meet (a finding)."""
        return [end for end in ENDS if end not in self.ends]


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
    if progress and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        stream = iter(
            track(stream, "chaos", len(jobs), console=Console(stderr=True), transient=True)
        )
    elif progress:
        telling = told_every(_TOLD_EVERY_S, line)
    try:
        with telling:
            for verdict in stream:
                totals.add(verdict)
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


def write_failure(job: Job, directory: Path) -> Path:
    """Minimize a failing seed and write it down; the configuration's path."""
    world = shrink(world_of(job), job.seed, every=job.every)
    return write_world(world, job.seed, directory)


def write_world(world: World, seed: int, directory: Path) -> Path:
    """A world as a configuration file with its workload."""
    directory.mkdir(parents=True, exist_ok=True)
    tables = {**world.tables, "seed": seed}
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
_RAREST: Final = 12
"""Changes of state, and faults on parts, that are named as the rarest."""


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
    if "path" in tables.get("workload", {}):
        source = path.parent / tables["workload"].pop("path")
        lines = [json.loads(line) for line in source.read_text().splitlines() if line]
    return World(tables, lines, heals=False)


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
    at_least: int = 1,
    ray: str | None = None,
    output: Path | None = None,
    log_level: Level = "off",
    log_format: Format = "text",
) -> int:
    """Run a campaign; 4 if anything was wrong, 3 if a kind of fault struck too seldom.

    The books are checked after `every` events.
    """
    console = open_console()
    log = make_log(log_level, log_format)
    if corpus is not None:
        return _replay(corpus, every, console, log)
    jobs = _jobs(path, seed_range(seeds), faults, every)
    if log is not None:
        _only_one(len(jobs), "--seeds")
    totals = campaign(
        jobs,
        processes=processes,
        ray=ray,
        kept=output,
        progress=not quiet and log is None,
        log=log,
    )
    if not quiet:
        print_totals(totals, console, at_least, is_drawn=path is None)
    by_seed = {job.seed: job for job in jobs}
    for verdict in totals.failing[:5]:
        _tell(verdict, console)
        console.print(f"  written to {write_failure(by_seed[verdict.seed], keep)}", soft_wrap=True)
    for verdict in totals.failing:
        config = f" {path}" if path else ""
        given = f" --faults {faults}" if faults else ""
        seed = f"{verdict.seed}:{verdict.seed + 1}"
        console.print(f"python -m emu chaos{config} --seeds {seed}{given}", soft_wrap=True)
    if totals.failing:
        return InvariantViolation.exit_status
    if totals.left:
        again = "" if output is None else "; the same command goes on from there"
        console.print(f"interrupted; {totals.left:,} seeds did not run{again}")
        return 130
    return RunError.exit_status if at_least > 1 and totals.faults_below(at_least) else 0


def _jobs(path: Path | None, seeds: range, faults: Path | None, every: int) -> list[Job]:
    base: dict[str, Any] | None = None
    span_s = 0.0
    given: list[dict[str, Any]] | None = None
    if path is not None:
        config = load_config(path)
        _, workload = prepare(config, str(path))
        span_s = workload.last_arrival_ns / NS_PER_S
        base = base_of(config)
    if faults is not None:
        tables = msgspec.to_builtins(load_config(faults).faults)
        given = [{k: v for k, v in table.items() if v is not None} for table in tables]
    return [Job(seed, every, base, span_s, given) for seed in seeds]


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
            _tell(verdict, console)
    console.print(f"{len(paths)} worlds of the corpus, {failing} fail")
    return InvariantViolation.exit_status if failing else 0


def _tell(verdict: Verdict, console: Console) -> None:
    console.print(f"seed {verdict.seed}:", style="bold red")
    for problem in verdict.problems[:5]:
        console.print(f"  {problem}", soft_wrap=True, markup=False)
    for line in verdict.story[:40]:
        console.print(f"    {line}", soft_wrap=True, markup=False)


def print_totals(
    totals: Totals, console: Console, at_least: int = 1, *, is_drawn: bool = True
) -> None:
    """What happened, how often, and what never did (or less often than wanted).

    `is_drawn`: the worlds were drawn, so that anything could have happened; what cannot happen in
    a user's cluster is left out.
    """
    table = Table(title="faults")
    for column in ("kind", "catalogue", "struck", "found nothing"):
        table.add_column(column, justify="left" if column in ("kind", "catalogue") else "right")
    for kind, spec in FAULT_KINDS.items():
        struck = totals.faults.get(kind, 0)
        if not is_drawn and not struck and not totals.missed.get(kind):
            continue
        style = None if struck else "red"
        missed = totals.missed.get(kind, 0)
        table.add_row(kind, spec.numbers, f"{struck:,}", f"{missed:,}", style=style)
    console.print(table)
    _print_counts("ends of requests", totals.ends, console)
    never = dict.fromkeys(CHANGES, 0) if is_drawn else {}
    _print_counts("changes of state", never | totals.transitions, console)
    if is_drawn:
        _print_parts(totals, console)
        drawn = sum(key in totals.keys for key in schema_keys())
        console.print(
            f"{drawn} of {len(schema_keys())} keys of the schema drawn, "
            f"{len(NOT_DRAWN)} never are (emu/chaos/trial.py says why)"
        )
    minutes = totals.cpu_s / 60
    console.print(
        f"{totals.seeds:,} seeds, {len(totals.failing)} with violations; {totals.events:,} events, "
        f"{totals.checks:,} full recounts, {totals.virtual_s:,.0f} virtual seconds; "
        f"{totals.wall_s / 60:.1f} min wall, {minutes:.1f} min CPU: "
        f"{totals.cluster_hours / max(minutes, 1e-9):.2f} virtual cluster-hours "
        f"({totals.gpu_hours / max(minutes, 1e-9):.1f} GPU-hours) per CPU-minute",
        soft_wrap=True,
    )
    if is_drawn and totals.seeds:
        told = ", ".join(f"{name} ({count:,})" for name, count in totals.rarest(_RAREST))
        console.print(f"rarest: {told}", soft_wrap=True)
    if at_least > 1 or (is_drawn and totals.seeds >= 100):
        for head, names in (
            (f"struck less than {at_least} times", totals.faults_below(at_least)),
            (f"struck a part less than {at_least} times", totals.parts_below(at_least)),
            (f"changes less than {at_least} times", totals.changes_below(at_least)),
            ("keys that no world gave", totals.keys_not_drawn()),
            ("never seen", totals.never_seen()),
        ):
            if names:
                console.print(f"{head}: {'; '.join(names)}", style="red", soft_wrap=True)


def _print_parts(totals: Totals, console: Console) -> None:
    """Kinds of faults by the part that the struck replica played; a dash where none can."""
    parts = tuple(dict.fromkeys(name.partition(" on ")[2] for name in STRIKES))
    table = Table(title="faults by the part of the replica")
    for column in ("kind", *parts):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind in FAULT_KINDS:
        names = [f"{kind} on {part}" for part in parts]
        if any(name in STRIKES for name in names):
            counts = (f"{totals.parts.get(n, 0):,}" if n in STRIKES else "-" for n in names)
            table.add_row(kind, *counts)
    console.print(table)


def _print_counts(title: str, counts: Mapping[str, int], console: Console) -> None:
    table = Table(title=title)
    table.add_column("what")
    table.add_column("times", justify="right")
    for what, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(what, f"{count:,}")
    console.print(table)


__all__ = ["chaos_command", "print_totals", "read_world", "seed_range", "world_of"]
