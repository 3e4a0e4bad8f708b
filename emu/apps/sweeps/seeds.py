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
from emu.apps.shared.conditions import figures_of
from emu.config.load import load_config
from emu.config.schema import Config
from emu.errors import InputError
from emu.process.console import open_console
from emu.process.pool import pool_of
from emu.process.prepared import prepared
from emu.report.atomic import write_text
from emu.report.compare import percent_of, run_names
from emu.report.drawn import SHOWN
from emu.report.intervals import Mean, mean_of
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
    names = [
        name
        for name, value in found[0].items()
        if name != "seed" and all(is_number(one.get(name)) for one in found)
    ]
    figures = {}
    for name in names:
        values = [float(one[name]) for one in found]
        mean = mean_of(values)
        figures[name] = Figure(mean.mean, mean.half, values)
    result = Seeds(seeds, figures)
    write_text(top / SEEDS_FILE, json_text(result))
    store.remove()
    return result


def _lost(task: SeedTask) -> str:
    return f"its seed was {task.config.seed}"


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
