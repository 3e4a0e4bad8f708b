"""Many seeds on all cores."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from emu.apps.chaos.telling import TOLD_EVERY_S
from emu.apps.chaos.totals import Totals
from emu.apps.chaos.trial import Verdict, run_world
from emu.apps.chaos.worlds.faults import draw_faults, ground_of
from emu.apps.chaos.worlds.forms import written
from emu.apps.chaos.worlds.world import World, draw_world
from emu.config.load import effective_dict
from emu.config.schema import Config
from emu.config.toml_text import toml_text
from emu.documents import Document
from emu.log import Log
from emu.process.pool import pool_of
from emu.rng import rng_stream
from emu.runs.keys import Keys
from emu.runs.progress import told_every
from emu.runs.store import Store, kept_results

_FEW: Final = 4
"""Fewer seeds run in this process: they end before another has started."""


class Job(msgspec.Struct):
    """What a worker needs."""

    seed: int
    every: int = 40
    """Events between two checks of the books."""
    base: Document | None = None
    """The user's configuration; None = the world is drawn as well."""
    span_s: float = 0.0
    """Time over which the user's requests arrive."""
    faults: list[Document] | None = None
    """Given faults instead of drawn ones."""
    lost_ranks: bool = False
    """Only groups that share experts and lose a rank are drawn."""


def world_of(job: Job) -> World:
    """The world of a seed: drawn, or the user's with drawn faults."""
    if job.base is None:
        world = draw_world(job.seed, lost_ranks=job.lost_ranks)
    else:
        tables: Document = {**job.base, "seed": job.seed}
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


def base_of(config: Config) -> Document:
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
        lines.write_bytes(written(world.lines, tables.get("workload", {})))
        tables["workload"] = {**tables.get("workload", {}), "path": lines.name}
    path = directory / f"seed-{seed}.toml"
    path.write_text(
        f"# World of chaos seed {seed}, minimised. Replay: python -m emu chaos --corpus {path}\n"
        + toml_text(tables)
    )
    return path
