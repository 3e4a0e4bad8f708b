"""`emu chaos`: what the command line does with a campaign."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from emu.chaos.campaign import CHANGES, Job, Totals, base_of, campaign, world_of, write_failure
from emu.chaos.coverage import NOT_DRAWN, STRIKES, schema_keys
from emu.chaos.trial import Verdict, run_world
from emu.chaos.worlds import World
from emu.config.faultkinds import KINDS
from emu.config.load import load_config
from emu.errors import InputError, InvariantViolation, RunError
from emu.log import Format, Level, Log, make_log
from emu.process.exits import open_console
from emu.runs.runner import prepare
from emu.units import NS_PER_S

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
    for kind, spec in KINDS.items():
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
            f"{len(NOT_DRAWN)} never are (emu/chaos/coverage.py says why)"
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
    for kind in KINDS:
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
