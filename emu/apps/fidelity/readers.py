"""Every kind of measured run, by the name of its reader."""

from __future__ import annotations

from typing import Final

from emu.apps.fidelity.inferenceperf import (
    INFERENCE_PERF,
    build_inference_perf,
    find_inference_perf,
    inference_perf_figures,
)
from emu.apps.fidelity.recorded import RECORDED, build_recorded, find_recorded, recorded_figures
from emu.apps.fidelity.runs import Reader

READERS: Final = (
    Reader(INFERENCE_PERF, find_inference_perf, build_inference_perf, inference_perf_figures),
    Reader(RECORDED, find_recorded, build_recorded, recorded_figures),
)
