"""`emu chaos`: seeds, a world from a file, or a corpus of them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from emu.apps.chaos.campaign import Job, base_of, campaign, world_of, write_world
from emu.apps.chaos.minimize import Shrinking, shrink
from emu.apps.chaos.options import ChaosOptions
from emu.apps.chaos.quick import QuickForm, quick_form
from emu.apps.chaos.shrinking import telling_shrinking
from emu.apps.chaos.telling import Blame, Owner, advice, blame_of, owner_of, tell
from emu.apps.chaos.totals import Totals
from emu.apps.chaos.totals_table import print_totals
from emu.apps.chaos.trial import run_world
from emu.apps.chaos.worlds.world import World
from emu.config.input_files import read_input
from emu.config.load import config_from_dict, load_config
from emu.config.tomlfile import read_toml
from emu.documents import Document
from emu.errors import InputError, InvariantViolation, RunError
from emu.log import Log, make_log
from emu.process.console import open_console
from emu.report.measurement import records
from emu.units import NS_PER_S
from emu.world import prepare

_TOLD_MAX: Final = 5
"""Failing seeds that are told at length, and minimized."""
_ALL_RULES_SEEDS: Final = 300
"""Within so many drawn worlds every rule of the truth has something to judge."""
_NOT_REPLAYED: Final = (
    *("config", "seeds", "quick", "faults", "lost_ranks", "overrides", "keep", "at_least"),
    *("output", "ray", "jobs"),
)
"""Options that worlds of a corpus have no use for."""
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
    tables = read_toml(path, str(path))[1]
    lines: list[Document] = []
    named = tables.get("workload", {}).get("path", "")
    if named and not Path(named).is_absolute():  # else it is the user's own, of any format
        source = path.parent / tables["workload"].pop("path")
        lines = [line for _, line in records(source, read_input(source))]
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
    lost_ranks: bool = False
    """Only groups that share experts and lose a rank are drawn."""

    def again(self, seed: int) -> str:
        """The command that runs one of its seeds."""
        words = ["python -m emu chaos", *([str(self.path)] if self.path else [])]
        words.append(f"--seeds {seed}:{seed + 1}")
        words += [f"--faults {self.faults}"] if self.faults else []
        words += [f"--set {shlex.quote(override)}" for override in self.overrides]
        words += ["--quick"] if self.quick else []
        words += ["--lost-ranks"] if self.lost_ranks else []
        words += [f"--every {self.every}"] if self.every != Asked().every else []
        return " ".join(words)


class Ordered(msgspec.Struct, frozen=True):
    """The seeds of a campaign, and what is to be said before they run."""

    jobs: list[Job]
    owner: Owner | None = None
    """What of the user's configuration can be the cause of a violation."""
    note: str = ""


def chaos_command(options: ChaosOptions) -> int:
    """Run a campaign.

    4 if emu was wrong, 3 if a run ended early for a cause in the user's configuration, or a kind
    of fault struck, or a rule judged, too seldom.
    """
    console = open_console()
    log = make_log(options.level, options.log_format)
    path, at_least = options.config, options.at_least
    overrides = tuple(options.overrides)
    if options.corpus is not None:
        options.refuse(_NOT_REPLAYED, "goes not with --corpus, whose worlds say everything")
        return _replay(options.corpus, options.every, console, log)
    if path is None:
        options.refuse(("faults", "overrides", "quick"), "needs a configuration")
    elif options.lost_ranks:
        raise InputError("chaos", None, "--lost-ranks", "draws its worlds; leave CONFIG out")
    seeds = seed_range(options.seeds)
    lost_ranks = options.lost_ranks
    asked = Asked(path, seeds, options.faults, overrides, options.quick, options.every, lost_ranks)
    ordered = jobs_of(asked)
    if log is not None:
        _only_one(len(ordered.jobs), "--seeds")
    if ordered.note and not options.quiet:
        print(ordered.note, file=sys.stderr, flush=True)
    draws_all = path is None and not lost_ranks
    totals = campaign(
        ordered.jobs,
        processes=options.jobs,
        ray=options.ray,
        kept=options.output,
        progress=not options.quiet and log is None,
        log=log,
    )
    if not options.quiet:
        print_totals(totals, console, at_least, is_drawn=draws_all)
    if totals.failing:
        return _tell_failing(
            totals, asked, ordered, options.keep, console, is_told=not options.quiet
        )
    if totals.left:
        again = "" if options.output is None else "; the same command goes on from there"
        console.print(f"interrupted; {totals.left:,} seeds did not run{again}")
        return 130
    return RunError.exit_status if _is_too_seldom(totals, at_least, is_drawn=draws_all) else 0


def _is_too_seldom(totals: Totals, at_least: int, *, is_drawn: bool) -> bool:
    """Whether something has not happened often enough to have been tested."""
    if at_least > 1 and (totals.faults_below(at_least) or totals.rules_below(at_least)):
        return True
    return is_drawn and totals.seeds >= _ALL_RULES_SEEDS and bool(totals.rules_below(1))


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
        return Ordered(
            [Job(seed, asked.every, lost_ranks=asked.lost_ranks) for seed in asked.seeds]
        )
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


def _faults_of(path: Path, base: Document) -> list[Document]:
    """The faults of a file, which must fit the configuration `base`.

    The file is a configuration of its own, or has `[[faults]]` alone.
    """
    source = str(path)
    raw = read_toml(path, source)[1]
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
