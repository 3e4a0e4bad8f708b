"""Many seeds on all cores: runs the trials, adds up what happened, and says what never did.

A failing seed is minimised (its fault list, then its workload) and written as a configuration
with its workload beside it; one line reproduces it.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from emu.chaos.coverage import NOT_DRAWN, STRIKES, schema_keys
from emu.chaos.drawfaults import draw_faults, ground_of
from emu.chaos.trial import Verdict, run_world
from emu.chaos.worlds import World, draw_world
from emu.config.faultkinds import KINDS
from emu.config.files import toml_text
from emu.config.load import effective_dict
from emu.config.schema import Config
from emu.log import Log
from emu.process.pool import pool_of
from emu.replica.states import TRANSITIONS
from emu.rng import rng_stream
from emu.runs.progress import told_every
from emu.runs.store import Keys, Store, kept_results

# --------------------------------------------------------------------------------------------------
# Makes a failing world small: fewer faults, then fewer requests, as long as it still fails.
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


# --- Many seeds on all cores ----------------------------------------------------------------------

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
        seen = {kind: self.faults.get(kind, 0) for kind in KINDS}
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
