"""Power of GPUs by load: measured servers beside emu, each load left out of the fit in turn.

    python -m benchmarks.power ../shared/data/silicon/b200-power.csv

Each row is emulated as it was driven (clients in a closed loop, mean lengths as recorded), without
a fit to its latencies. Three figures are fitted to the other rows: idle power, what runs whenever
an iteration does, and what grows with the root of the arithmetic. The shipped ones
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
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_gpu
from emu.cluster.gpu_power import ARITHMETIC_PART, RUNNING_PART, running_w
from emu.config.load import config_from_dict
from emu.documents import Document
from emu.runs.runner import adjust, execute

_ROUNDS: Final = 4
_SHAPE: Final = Path(__file__).parents[1] / "tests" / "catalogue" / "configs" / "DeepSeek-V3.json"
_STORED: Final = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*"]}
"""How NVIDIA stores DeepSeek-R1-0528-FP4, which has DeepSeek-V3's shape."""


_SCRIPTS: Final[Mapping[str, Document]] = {
    "sglang": {
        "engine": {"name": "sglang", "version": "0.5.9"},
        "scheduler": {
            "policy": "sglang",
            "disable_radix_cache": True,
            "chunked_prefill_size": 16_384,
            "mem_fraction_static": 0.85,
            "max_running_requests": 256,
            "scheduler_recv_interval": 30,
        },
    },
    "vllm": {"engine": {"name": "vllm"}},
}
"""How InferenceX's scripts of that time start these servers: SGLang looks for new requests after 30
decodes only, so that prompts, whose kernels its host calls one by one, come many at a time."""


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
    """The rows of a table of power, each emulated."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_load(row) for row in csv.DictReader(file)]


def _load(row: Mapping[str, str]) -> Load:
    with tempfile.TemporaryDirectory(prefix="emu-power-") as name:
        config = config_from_dict(_tables(row, Path(name)))
        execute(adjust(config, seed=None, output=Path(name)), "power", report=False)
        summary = json.loads((Path(name) / "summary.json").read_text(encoding="utf-8"))
    mfu = summary["mfu"]
    return Load(
        name=f"{row['model']}, tp {row['tp']}, {row['load_value']} clients",
        gpu=lookup_gpu(row["gpu"]),
        used=int(row["tp"]) / int(row["power_monitored_gpus"]),
        watt=float(row["mean_power_w_per_monitored_gpu"]),
        busy=mfu["of_held"] / mfu["of_busy"],
        utilization=mfu["of_busy"],
    )


def _tables(row: Mapping[str, str], place: Path) -> Document:
    """The server and its load. Outputs ended by themselves: lengths are even up to twice the
    recorded mean."""
    clients, tp = int(row["load_value"]), int(row["tp"])
    requests_per_s = float(row["requests_per_s"])
    output = float(row["output_tokens_per_s_per_gpu"]) * tp / requests_per_s
    prompt = float(row["total_tokens_per_s"]) / requests_per_s - output
    model: Document = {"name": row["model"]}
    if "DeepSeek-R1" in row["model"]:
        shape = json.loads(_SHAPE.read_text(encoding="utf-8"))
        (place / "config.json").write_text(json.dumps(shape | {"quantization_config": _STORED}))
        model["hf_config"] = str(place / "config.json")
    return {
        "model": model | {"kv_cache_dtype": "fp8"},
        "nodes": [{"gpu": row["gpu"], "gpus": int(row["power_monitored_gpus"])}],
        "replicas": [{"tensor_parallel": tp, **_SCRIPTS.get(row["engine"], {})}],
        "workload": {
            "concurrency": clients,
            "synthetic": {
                "requests": _ROUNDS * clients,
                "prompt": _even(prompt),
                "output": _even(output),
            },
        },
    }


def _even(mean: float) -> Document:
    return {"distribution": "uniform", "min": 1, "max": round(2 * mean - 1)}


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
