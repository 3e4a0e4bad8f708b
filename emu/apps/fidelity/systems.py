"""Systems of which only a series over time is known.

    rows = throughput_rows(directory)       # tokens per second, each second
    rows = power_rows(directory)            # watts of the server, each second

A directory holds, for each system, LLMServingSim's cluster file and what was measured:

    A/NAME.json with A/NAME_throughput.tsv            (time_s, throughput)
    A/NAME.json with A/server_power_NAME.tsv          (time_s, power_w)
    workloads/*.jsonl                                 the requests that were sent

The workload of a system is the one that names its model's family (`..._llama.jsonl`), that of a
power series the one that has `pulse` in its name. Nothing is fitted to a system.

Throughput: output tokens over the time to the last second in which the system answers. Energy:
watts summed over the seconds of the series; the emulated run ends near it, and its mean power is
taken for as many seconds.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.backends.llmservingsim.cluster_file import read_cluster_file
from emu.backends.llmservingsim.convert import import_cluster
from emu.config.load import load_config
from emu.errors import InputError
from emu.latency.posterior import Floats
from emu.process.interrupts import scratch
from emu.report.summary import Summary as RunSummary
from emu.runs.runner import execute
from emu.units import NS_PER_S

_THROUGHPUT: Final = "_throughput.tsv"
_POWER: Final = "server_power_"
_PULSE: Final = "pulse"
_SAMPLING: Final = ("latency.sampling=random",)
"""The sums of the series are those of the workloads: their lengths were forced, by sampling
parameters of the client's own, so that the models' generation configs do not apply."""


class SystemRow(msgspec.Struct, frozen=True):
    """One system: a figure that was measured, and the emulated one."""

    name: str
    unit: str
    measured: float
    emulated: float
    series_error: float | None = None
    """Mean absolute difference of the two series, second by second, in per cent of the mean."""

    @property
    def error(self) -> float:
        """(emulated - measured) / measured, per cent."""
        return 100 * (self.emulated / self.measured - 1)


def throughput_rows(directory: Path, overrides: Sequence[str] = ()) -> list[SystemRow]:
    """Mean output tokens per second of every system below a directory, by path."""
    found = []
    for series in sorted(directory.rglob(f"*{_THROUGHPUT}")):
        cluster = series.with_name(series.name.removesuffix(_THROUGHPUT) + ".json")
        workload = _workload(directory, cluster, pulse=False)
        measured = _series(series, "throughput")
        summary, emulated = _run(cluster, workload, overrides)
        last_s = int(np.flatnonzero(measured)[-1])
        tokens = float(emulated.sum())
        found.append(
            SystemRow(
                _name(directory, cluster),
                "tokens/s",
                float(measured.sum()) / last_s,
                tokens / summary.duration,
                _difference(measured, emulated),
            )
        )
    return found


def power_rows(directory: Path, overrides: Sequence[str] = ()) -> list[SystemRow]:
    """Energy of every server below a directory whose power was measured, in kJ, by path."""
    found = []
    for series in sorted(directory.rglob(f"{_POWER}*.tsv")):
        cluster = series.with_name(series.stem.removeprefix(_POWER) + ".json")
        workload = _workload(directory, cluster, pulse=True)
        measured = _series(series, "power_w")
        summary, _ = _run(cluster, workload, overrides)
        if summary.energy_j is None:
            raise InputError(str(cluster), None, "nodes.power", "missing: no energy is modeled")
        watts = sum(summary.energy_j.values()) / summary.duration
        energy_kj = (float(measured.sum()) / 1e3, watts * len(measured) / 1e3)
        found.append(SystemRow(_name(directory, cluster), "kJ", *energy_kj))
    return found


def _name(directory: Path, cluster: Path) -> str:
    return cluster.relative_to(directory).with_suffix("").as_posix()


def _workload(directory: Path, cluster: Path, *, pulse: bool) -> Path:
    """The one file that the system was sent, in `workloads/` beside it or in a parent directory."""
    model = read_cluster_file(cluster, {}).instances[0].model.name.lower()
    places = [place for place in cluster.parents if place.is_relative_to(directory)]
    folder = next((p / "workloads" for p in places if (p / "workloads").is_dir()), directory)
    files = sorted(folder.glob("*.jsonl"))
    if pulse:
        fitting = [path for path in files if _PULSE in path.name]
    else:
        fitting = [path for path in files if path.stem.rpartition("_")[2] in model]
    if len(fitting) != 1:
        have = ", ".join(path.name for path in files) or "nothing"
        problem = f"{len(fitting)} workloads for {model}; there is {have}"
        raise InputError(str(folder), None, "", problem)
    return fitting[0]


def _series(path: Path, column: str) -> Floats:
    """A column, one row a second from 0."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    try:
        seconds = [float(row["time_s"]) for row in rows]
        values = np.array([float(row[column]) for row in rows])
    except (KeyError, TypeError, ValueError):
        raise InputError(str(path), None, column, "expected time_s and numbers") from None
    if seconds != list(range(len(rows))) or not values.any():
        raise InputError(str(path), None, "time_s", "expected every second from 0, not all zero")
    return values


def _run(cluster: Path, workload: Path, overrides: Sequence[str]) -> tuple[RunSummary, Floats]:
    """Emulate: the summary, and output tokens of each second (0 first, as in the measurement)."""
    with scratch("emu-systems-") as place:
        config_path = place / "cluster.toml"
        config_path.write_text(import_cluster(cluster), encoding="utf-8")
        keys = [f"workload.path={workload.resolve()}", f"output.dir={place / 'run'}"]
        keys += [*_SAMPLING, *overrides]
        config = load_config(config_path, overrides=keys)
        summary = execute(config, str(cluster), report=False).summary
        assert summary is not None
        with (place / "run" / "timeseries.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    ends_s = np.array([int(row["time_ns"]) for row in rows]) / NS_PER_S
    rates = np.array([float(row["decode_tokens_per_s"]) for row in rows])
    return summary, rates * np.diff(ends_s, prepend=0.0)


def _difference(measured: Floats, emulated: Floats) -> float:
    length = max(len(measured), len(emulated))
    both = [np.pad(series, (0, length - len(series))) for series in (measured, emulated)]
    return float(100 * np.abs(both[1] - both[0]).mean() / measured.mean())
