"""One configuration with several seeds: means with intervals, and two such sets compared.

`runs/a/seed-42/ ...` are the runs; `runs/a/seeds.json` has the seeds, and of every figure the mean,
half its 95 % interval and the values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from emu.apps.shared.answer import Reply, json_text, tell
from emu.config.load import load_config
from emu.config.schema import Config
from emu.errors import InputError
from emu.process.pool import pool_of
from emu.process.prepared import prepared
from emu.report.atomic import write_text
from emu.report.compare import run_names
from emu.report.drawn import SHOWN
from emu.report.intervals import mean_of
from emu.report.paired import PairedComparison, SeedSet, compared, numbers_of
from emu.report.summary import figures_of
from emu.report.table import number
from emu.runs.keys import Keys
from emu.runs.options import RunOptions
from emu.runs.run_json import Origin
from emu.runs.runner import adjust, execute
from emu.runs.store import Store, kept_results

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
    config: Config, source: str, options: RunOptions, *, report: bool, origin: Origin
) -> Seeds:
    """Run seeds `config.seed` to `config.seed + options.seeds - 1`, and write seeds.json.

    What an interrupt leaves is not run again.
    """
    top, ray = Path(config.output.dir), options.ray
    place = top if ray is None else top.resolve()  # workers of Ray stand elsewhere
    seeds = [config.seed + index for index in range(options.seeds)]
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
        with pool_of(
            run_one, options.jobs, ray, lambda task: f"its seed was {task.config.seed}"
        ) as pool:
            results = kept_results(keyed, pool, store, lambda one: keys[int(one["seed"])])
            found = sorted(results, key=lambda one: int(one["seed"]))
    except KeyboardInterrupt:
        print(f"runs that ended are kept in {top}", file=sys.stderr)
        raise
    figures = {}
    for name, values in numbers_of(found).items():
        mean = mean_of(values)
        figures[name] = Figure(mean.mean, mean.half, values)
    figures.pop("seed")
    result = Seeds(seeds, figures)
    write_text(top / SEEDS_FILE, json_text(result))
    store.remove()
    return result


def seeds_command(path: Path, output: Path | None, options: RunOptions) -> int:
    """`emu run --seeds N`; `output`: the directory, None for the configuration's."""
    absolute = load_config(path if options.ray is None else path.resolve(), options.settings)
    config = adjust(absolute, seed=options.seed, output=output)
    top = Path(config.output.dir)
    if (top / "summary.json").exists() or ((top / SEEDS_FILE).exists() and not options.force):
        problem = "holds results already; another directory with --output, or --force"
        raise InputError(str(top), None, "output.dir", problem)
    words = f"emu run {path} --seeds {options.seeds}"
    result = run_seeds(
        config,
        str(path),
        options,
        report=options.report and config.output.report,
        origin=Origin(words, options.settings),
    )

    def show(console: Console) -> None:
        table = Table(title=f"{path}: {options.seeds} seeds", title_justify="left")
        for heading in ("", "mean", "95 % interval", "least", "most"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, label in SHOWN.items():
            if name in result.figures:
                table.add_row(label, *_cells(result.figures[name]))
        console.print(table)
        console.print(f"every figure in {top / SEEDS_FILE}", soft_wrap=True)

    return tell(Reply(show, top / SEEDS_FILE), options)


def _cells(figure: Figure) -> list[str]:
    half = "-" if figure.half is None else f"± {number(figure.half)}"
    return [number(figure.mean), half, number(min(figure.values)), number(max(figure.values))]


def read_seeds(directory: Path) -> Seeds:
    """seeds.json. Raises InputError."""
    path = directory / SEEDS_FILE
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), prepared(Seeds))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(str(path), None, "", f"unusable: {error}") from None


def compare_seeds(directories: Sequence[Path]) -> PairedComparison:
    """Sets of seeds against the first; paired by seed. Raises InputError if seeds are not equal."""
    sets = []
    for name, directory in zip(run_names(directories), directories, strict=True):
        one = read_seeds(directory)
        values = {label: figure.values for label, figure in one.figures.items()}
        sets.append(SeedSet(name, one.seeds, values))
    return compared(sets)
