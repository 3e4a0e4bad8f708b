"""The runs of a study: which there are, and what came of each. Failing is a result.

A cell is a system, a workload and a seed. Cells run in any order and any process; each leaves its
directory in `runs/`, and a file in `points/`, so that a study that was interrupted goes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from emu.apps.shared.points import (
    Base,
    Point,
    PointResult,
    Task,
    point_pool,
    point_results,
    point_store,
)
from emu.apps.shared.watching import Watch
from emu.config.schema import Config
from emu.documents import DocumentView
from emu.errors import InputError
from emu.runs.keys import Keys

Overrides = DocumentView


class System(msgspec.Struct, frozen=True):
    """What a name of a study stands for: a configuration, and what is overridden in it."""

    name: str
    base: Path
    overrides: Overrides


class Cell(msgspec.Struct, frozen=True):
    """One run, and what came of it."""

    system: str
    workload: str
    seed: int
    directory: Path
    result: PointResult

    @property
    def is_completed(self) -> bool:
        """Whether it has figures."""
        return self.result.status == "completed"


class _Planned(msgspec.Struct, frozen=True):
    """A cell that is to be run."""

    system: str
    workload: str
    seed: int
    directory: Path
    key: str


def run_cells(
    systems: Sequence[System],
    workloads: Mapping[str, Overrides],
    seeds: int | Sequence[int],
    directory: Path,
    *,
    jobs: int,
    ray: str | None,
    watch: Watch,
) -> list[Cell]:
    """Run what was not run before; the cells in their order.

    `seeds`: a number counts from each configuration's own seed. Raises InputError for keys that a
    system and a workload both set.
    """
    place = directory if ray is None else directory.resolve()
    results: dict[str, PointResult] = {}
    tasks: dict[str, Task] = {}
    planned: list[_Planned] = []
    known = Keys()
    bases = {one.base: Base(one.base) for one in systems}
    for one in systems:
        for workload, more in workloads.items():
            both = sorted(set(one.overrides) & set(more))
            if both:
                problem = f"the system {one.name} sets it as well"
                raise InputError("study", None, f"workloads.{workload}.{both[0]}", problem)
            configs = _configs(bases[one.base], {**one.overrides, **more}, seeds)
            for seed, config in configs.items():
                name = ".".join(filter(None, (slug(one.name), slug(workload), f"seed-{seed}")))
                target = place / "runs" / name
                if isinstance(config, InputError):
                    key = f"invalid {name}"
                    results[key] = PointResult(key, "invalid", str(config), {})
                else:
                    key = known.key(config, name)
                    output = msgspec.structs.replace(config.output, report=False)
                    config = msgspec.structs.replace(config, output=output)
                    tasks[key] = Task(key, config, bases[one.base].source, str(target))
                planned.append(_Planned(one.name, workload, seed, target, key))
    store = point_store(place)
    for key, task in tasks.items():
        if not (Path(task.keep_in) / "summary.json").exists():
            store.drop(key)
    watch(len(results), len(planned), "")
    with point_pool(jobs, ray) as pool:
        for result in point_results(tasks, store, pool):
            results[result.key] = result
            watch(len(results), len(planned), "")
    return [
        Cell(one.system, one.workload, one.seed, one.directory, results[one.key]) for one in planned
    ]


def _configs(
    base: Base, values: DocumentView, seeds: int | Sequence[int]
) -> dict[int, Config | InputError]:
    """The configuration of each seed, or why there is none."""
    try:
        config = base.config({}, Point(dict(values)))
    except InputError as error:
        return dict.fromkeys(range(seeds) if isinstance(seeds, int) else seeds, error)
    chosen = range(config.seed, config.seed + seeds) if isinstance(seeds, int) else seeds
    return {seed: msgspec.structs.replace(config, seed=seed) for seed in chosen}


def slug(name: str) -> str:
    """A name as part of the name of a directory."""
    return re.sub(r"[^\w+-]+", "-", name).strip("-")
