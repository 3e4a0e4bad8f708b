"""What measured stages say of an engine's constants: residuals, and slopes by emulation.

Stages near the knee or overloaded are not fitted to. Slopes come from emulations of the first part
of each load; where the stage stands from the whole load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emu.apps.fidelity.board import Row, Task, answers
from emu.apps.fidelity.fit import FITTED, SHOWN, shipped
from emu.apps.fidelity.runs import MeasuredRun
from emu.apps.shared.population import RunEvidence
from emu.engines.registry import engine_text
from emu.latency.posterior import METRICS, PARAMETERS, Floats, values_of, with_values

_LEARNING_PART: Final = 0.12
"""Of each stage's load, for slopes."""
Key = tuple[str, int]
"""Run and number of the stage."""


class Slopes(msgspec.Struct, frozen=True):
    """Change of the logarithm of a stage's TTFT, TPOT and E2E for one unit of each constant."""

    of: dict[Key, Floats]


def slopes_of(runs: Sequence[MeasuredRun], processes: int) -> Slopes:
    """Emulate the first part of every run with each constant changed."""
    with tempfile.TemporaryDirectory(prefix="emu-fit-") as name:
        tasks = []
        for key in range(1 + len(PARAMETERS)):
            for run in runs:
                values = values_of(shipped(run).model)
                if key:
                    values[key - 1] += PARAMETERS[key - 1].step
                setting = setting_of(Path(name), f"{key}-{run.run_id}", run, values)
                tasks.append(Task(run, 1, (setting,), part=_LEARNING_PART, key=key))
        found = {(a.key, a.run_id): a.figures for a in answers(tasks, processes)}
    slopes: dict[Key, Floats] = {}
    for run in runs:
        for index in range(len(run.stages)):
            logs = [
                np.log([found[key, run.run_id][index].of(m) for m in SHOWN])
                for key in range(1 + len(PARAMETERS))
            ]
            columns = [
                (logs[1 + at] - logs[0]) / parameter.step for at, parameter in enumerate(PARAMETERS)
            ]
            slopes[run.run_id, index] = np.stack(columns, axis=1)
    return Slopes(slopes)


def setting_of(place: Path, name: str, run: MeasuredRun, values: Floats) -> str:
    """The override that gives a run its shipped engine with these values."""
    path = place / f"{name}.toml"
    engine = shipped(run)
    path.write_text(engine_text(with_values(engine.model, values), engine.label), encoding="utf-8")
    return f"engine.learned={path}"


def evidence_of(rows: Sequence[Row], slopes: Slopes) -> dict[str, RunEvidence]:
    """Each run's stages that are fitted to."""
    found: dict[str, list[tuple[Row, int]]] = {}
    counts: dict[str, int] = {}
    for row in rows:
        index = counts.get(row.run_id, 0)
        counts[row.run_id] = index + 1
        if row.regime in FITTED and not row.emulated_overloaded:
            found.setdefault(row.run_id, []).append((row, index))
    return {name: evidence_among(stages, slopes) for name, stages in found.items()}


def evidence_among(stages: Sequence[tuple[Row, int]], slopes: Slopes) -> RunEvidence:
    residuals, steep, metrics = [], [], []
    for row, index in stages:
        for number, metric in enumerate(METRICS):
            emulated, measured = row.emulated.of(metric), row.measured.of(metric)
            residuals.append(np.log(measured / emulated))
            steep.append(slopes.of[row.run_id, index][SHOWN.index(metric)])
            metrics.append(number)
    return RunEvidence(np.array(residuals), np.stack(steep), np.array(metrics))
