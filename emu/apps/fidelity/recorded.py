"""Runs that vLLM's own clock recorded (`requests.jsonl`, `meta.json`).

Times begin where the engine took a request from its inbox and end in the engine, so that the front
end is left out of them. Lengths, arrivals and settings come from the record (`measured_run.py`);
token ids from its dataset, where it lies in a parent directory. No constant is fitted to these
runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from emu.apps.fidelity.measured_run import case_config
from emu.apps.fidelity.record import read_case
from emu.apps.fidelity.runs import OVERLOADED_MS, Case, Figures, MeasuredRun, Stage, Unread
from emu.catalogue.lookup import lookup_model
from emu.config.load import config_from_text
from emu.errors import InputError
from emu.report.measured import run_values
from emu.report.measurement import Measurement, read_measurement
from emu.report.rundata import read_run

RECORDED: Final = "recorded"


def find_recorded(directory: Path) -> list[MeasuredRun | Unread]:
    """The one run of this directory, if it is such a record."""
    if not (directory / "requests.jsonl").is_file() or not (directory / "meta.json").is_file():
        return []
    try:
        return [_recorded(directory)]
    except InputError as error:
        return [Unread(directory.name, str(error))]


def _recorded(directory: Path) -> MeasuredRun:
    case = read_case(directory)
    text, _ = case_config(case, _profiles(directory))
    config = config_from_text(text.partition("[workload]")[0] + _NO_WORKLOAD, str(directory))
    node = config.nodes[0]
    model = lookup_model(config.model.name)
    measurement = read_measurement(case.requests)
    return MeasuredRun(
        reader=RECORDED,
        run_id=directory.name,
        engine=f"vLLM {case.meta.get('vllm_version', '')}".strip(),
        gpu=node.gpu if isinstance(node.gpu, str) else node.gpu.name,
        model=model.name,
        model_class="dense" if model.experts is None else "moe",
        tensor_parallel=config.replicas[0].tensor_parallel,
        stages=(
            Stage(
                label="whole",
                requests=len(measurement.request_ids),
                measured=_figures_of(measurement.ttft_ms, measurement.tpot_ms, measurement.e2e_ms),
                is_overloaded=bool(np.mean(measurement.ttft_ms) > OVERLOADED_MS),
                is_compared=True,
                regime="mixed",
            ),
        ),
        in_fit=False,
        details=str(directory),
    )


_NO_WORKLOAD: Final = "\n[workload.synthetic]\nrequests = 1\n"


def _profiles(directory: Path) -> Path | None:
    """Profile bundles beside the data, if they are there."""
    for folder in directory.resolve().parents:
        if (folder / "profiles").is_dir():
            return folder / "profiles"
    return None


def build_recorded(run: MeasuredRun, seed: int, part: float) -> Case:
    """The record's configuration and workload; arrivals are known, so the seed is without effect
    and the run is always whole."""
    directory = Path(run.details)
    text, workload = case_config(read_case(directory), _profiles(directory))
    text += '[output]\ndir = "run"\nreport = false\ntimeseries_interval_ms = 0\n'
    return Case(text, workload, (workload.count("\n"),))


def recorded_figures(run: MeasuredRun, directory: Path, case: Case) -> list[Figures]:
    """Figures of the whole run, from where the record's times begin."""
    measurement: Measurement = read_measurement(read_case(Path(run.details)).requests)
    values = run_values(read_run(directory), measurement)
    if not len(values["TTFT"]):
        raise InputError(run.run_id, None, "", "the emulated run completed no request")
    return [_figures_of(values["TTFT"], values["TPOT"], values["E2E"])]


def _figures_of(ttft: np.ndarray, tpot: np.ndarray, e2e: np.ndarray) -> Figures:
    return Figures(
        float(np.mean(ttft)),
        float(np.nanmean(tpot)),
        float(np.mean(e2e)),
        float(np.percentile(ttft, 99)),
        float(np.percentile(e2e, 99)),
    )
