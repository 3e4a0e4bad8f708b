"""Power of GPUs by load: measured servers beside emu, each load left out of the fit in turn.

    python -m benchmarks.power ../shared/data/silicon/b200-power.csv

Each row is emulated as the board of points does it (`emu/apps/fidelity/points/`), without a fit to
its latencies. Three figures are fitted to the other rows: idle power, what runs whenever an
iteration does, and what grows with the root of the arithmetic. The shipped ones
(`emu/cluster/gpu_power.py`, `idle_w` in `gpus.toml`) are those of all rows.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.apps.fidelity.points.cases import Job, configuration
from emu.apps.fidelity.points.table import Point, read_points
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_gpu
from emu.cluster.gpu_power import ARITHMETIC_PART, RUNNING_PART, running_w
from emu.config.load import config_from_text
from emu.runs.runner import adjust, execute


class Load(msgspec.Struct, frozen=True):
    """One measured load, and what emu says that its GPUs did."""

    name: str
    gpu: GpuSpec
    used: float
    """Part of the GPUs whose power was read that served."""
    watt: float
    """Measured mean over these GPUs."""
    busy: float
    """Part of the time in which iterations ran."""
    utilization: float
    """FLOPs over those of the half-precision peak, while iterations ran."""

    @property
    def terms(self) -> tuple[float, float, float]:
        """Of idle, running and arithmetic power."""
        running = self.used * self.busy
        return 1.0, running, running * sqrt(self.utilization)

    @property
    def shipped_w(self) -> float:
        """What emu says of it as shipped."""
        idle_w = self.gpu.idle_w
        more_w = running_w(self.gpu, self.utilization, idle_w) - idle_w
        return idle_w + self.used * self.busy * more_w


def read_loads(path: Path) -> list[Load]:
    """The rows of a table of power, each emulated. Raises ValueError where a row is no point."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    points, _ = read_points(path)
    return [_load(point, row) for point, row in zip(points, rows, strict=True)]


def _load(point: Point, row: Mapping[str, str]) -> Load:
    with tempfile.TemporaryDirectory(prefix="emu-power-") as name:
        config = config_from_text(configuration(Job(point)), point.point_id)
        execute(adjust(config, seed=None, output=Path(name)), "power", report=False)
        summary = json.loads((Path(name) / "summary.json").read_text(encoding="utf-8"))
    mfu = summary["mfu"]
    return Load(
        name=f"{point.model}, tp {point.gpus}, {point.clients} clients",
        gpu=lookup_gpu(point.gpu),
        used=point.gpus / int(row["power_monitored_gpus"]),
        watt=float(row["mean_power_w_per_monitored_gpu"]),
        busy=mfu["of_held"] / mfu["of_busy"],
        utilization=mfu["of_busy"],
    )


def fitted(loads: Sequence[Load]) -> NDArray[np.float64]:
    """Watt of idle, running and arithmetic, by least squares of relative errors."""
    terms = np.array([load.terms for load in loads])
    watts = np.array([load.watt for load in loads])
    found: NDArray[np.float64] = np.linalg.lstsq(
        terms / watts[:, None], np.ones(len(loads)), rcond=None
    )[0]
    return found


def left_out_errors(loads: Sequence[Load]) -> list[float]:
    """Error of each load when the figures are fitted to the others, per cent."""
    found = []
    for load in loads:
        others = [other for other in loads if other is not load]
        found.append(100 * (float(np.array(load.terms) @ fitted(others)) / load.watt - 1))
    return found


def main(arguments: Sequence[str]) -> None:
    """Print each load, and the figures of all."""
    loads = read_loads(Path(arguments[0]))
    for load, error in zip(loads, left_out_errors(loads), strict=True):
        shipped = 100 * (load.shipped_w / load.watt - 1)
        print(
            f"{load.name:50} {load.watt:6.1f} W, left out {error:+.1f} %, shipped {shipped:+.1f} %,"
            f" busy {load.busy:.3f}, of the peak {load.utilization:.4f}"
        )
    idle_w, running, arithmetic = fitted(loads)
    span_w = loads[0].gpu.tdp_w - idle_w
    print(
        f"idle {idle_w:.1f} W, running {running / span_w:.3f}, arithmetic {arithmetic / span_w:.3f}"
        f" of the span (shipped: {RUNNING_PART}, {ARITHMETIC_PART})"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
