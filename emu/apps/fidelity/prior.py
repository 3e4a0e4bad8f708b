"""What measured runs say of an engine that is not known: priors, by GPU and by model.

priors        how runs differ from the shipped engine, by GPU (emu/latency/prior.toml)
guesses       what a run is taken for before it is measured: from the other runs
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from emu.apps.fidelity.runs import MeasuredRun
from emu.apps.shared.population import Population, RunEvidence, population
from emu.apps.shared.posteriorfile import posterior_text
from emu.errors import InputError
from emu.latency.posterior import METRICS, NAMES, Floats, Posterior

RUNS_MIN: Final = 4
"""Runs on a GPU from which it has a prior of its own."""
_PARTS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


class Guess(msgspec.Struct, frozen=True):
    """What is expected of a run that was not seen, as distances from its shipped engine."""

    shift: Floats
    covariance: Floats
    noise: Floats


def guess(
    runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence], gpu: str, model: str
) -> Guess:
    """What these runs say of another run of a model on a GPU.

    Of a model that is not among them only as much of the shift is taken as carries over between
    their models; the rest widens the spread. A GPU with too few runs gets a generic guess: no
    shift, and a spread as wide as the shift and the spread of the GPU with most runs.
    """
    groups = by_gpu(runs, evidence)
    if not groups:
        raise InputError("fidelity", None, "--learn", f"needs {RUNS_MIN} runs on one GPU")
    mine = groups.get(gpu)
    if mine is None:
        return generic(_population(max(groups.values(), key=len), evidence))
    if any(run.model == model for run in mine):
        return _guess(_population(mine, evidence))
    return other(mine, evidence)


def _guess(found: Population) -> Guess:
    return Guess(found.shift, found.covariance, found.noise)


def generic(found: Population) -> Guess:
    """The shift for a GPU that was not measured."""
    return Guess(np.zeros(len(NAMES)), np.diag(found.spread**2 + found.shift**2), found.noise)


def other(runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence]) -> Guess:
    """The shift for a model that was not measured on a GPU where others were."""
    found = _population(runs, evidence)
    part = carried_part(runs, evidence)
    rest = (1 - part) * found.shift
    return Guess(part * found.shift, found.covariance + np.outer(rest, rest), found.noise)


def carried_part(runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence]) -> float:
    """The part of a shift that helps models which it was not found with, by leaving each out.

    0 if no part of it does, or there is but one model.
    """
    models = list(dict.fromkeys(run.model for run in runs))
    if len(models) < 2:
        return 0.0
    shifts = {
        model: _population([run for run in runs if run.model != model], evidence)
        for model in models
    }
    off = {}
    for part in _PARTS:
        each = []
        for model, found in shifts.items():
            mine = [evidence[run.run_id] for run in runs if run.model == model]
            each.append(
                statistics.fmean(
                    float(
                        np.mean(
                            np.abs(e.residuals - part * e.slopes @ found.shift)
                            / found.noise[e.metrics]
                        )
                    )
                    for e in mine
                )
            )
        off[part] = statistics.fmean(each)
    return min(_PARTS, key=lambda part: off[part])


def _population(runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence]) -> Population:
    return population([evidence[run.run_id] for run in runs])


def by_gpu(
    runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence]
) -> dict[str, list[MeasuredRun]]:
    """Runs that say something, of GPUs that have enough of them."""
    groups: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        if run.run_id in evidence:
            groups.setdefault(run.gpu, []).append(run)
    return {gpu: those for gpu, those in groups.items() if len(those) >= RUNS_MIN}


def prior_text(runs: Sequence[MeasuredRun], evidence: Mapping[str, RunEvidence]) -> str:
    """The file of priors (emu/latency/prior.toml)."""
    groups = by_gpu(runs, evidence)
    if not groups:
        raise InputError("fidelity", None, "--prior", f"needs {RUNS_MIN} runs on one GPU")
    largest = _population(max(groups.values(), key=len), evidence)
    lines = [
        "# How measured runs differ from the shipped engine (`emu fidelity DIR --prior FILE`).",
        f"runs = {len(evidence)}\n",
        posterior_text(_posterior(generic(largest)), "generic"),
    ]
    for gpu, those in groups.items():
        models = json.dumps(sorted({run.model for run in those}))
        lines.append(f'[[gpus]]\ngpu = "{gpu}"\nruns = {len(those)}\nmodels = {models}\n')
        found = _posterior(_guess(_population(those, evidence)))
        lines.append(posterior_text(found, "gpus.posterior"))
        lines.append(posterior_text(_posterior(other(those, evidence)), "gpus.other"))
    return "\n".join(lines)


def _posterior(found: Guess) -> Posterior:
    noise = {metric: float(found.noise[index]) for index, metric in enumerate(METRICS)}
    return Posterior(list(NAMES), found.shift.tolist(), found.covariance.tolist(), noise)
