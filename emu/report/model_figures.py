"""Figures of each of several models: `models` in the summary.

    log = ModelLog(["chat", "code"])
    log.terminal(request)       # once, when its status is terminal
    figures = log.finish(facts, objectives)

Keeps three numbers of each completed request. Percentiles are those of the summary.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from emu.config.schema import SloTable
from emu.request import Request, Status
from emu.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


_COMPLETED: Final = Status.COMPLETED
FAR: Final = ("disk",)
"""Ways of a load that found the weights in no memory."""


class ModelFacts(msgspec.Struct, kw_only=True):
    """What only the cluster knows of one model."""

    gpu_ns: int = 0
    """GPUs x ns that its replicas held."""
    loading_gpu_ns: int = 0
    """The part of it in which weights arrived."""
    scale_ups: int = 0
    scale_downs: int = 0
    loads: Mapping[str, int] = {}
    host_copy_bytes: int = 0
    host_bytes_mean: int = 0
    host_evictions: int = 0


class ModelFigures(msgspec.Struct, kw_only=True):
    """One model."""

    completed: int
    failed: int
    rejected: int
    cancelled: int
    input_tokens: int
    output_tokens: int
    mean_ttft_ms: float
    median_ttft_ms: float
    p95_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    p95_tpot_ms: float
    p99_tpot_ms: float
    mean_e2el_ms: float
    p99_e2el_ms: float
    slo_attainment: float | None
    """Part of the requests that met all its objectives; None without objectives."""
    gpu_seconds: float
    loading_gpu_seconds: float
    scale_ups: int
    scale_downs: int
    loads: dict[str, int]
    """Replicas whose weights arrived, by method."""
    load_hits: int
    """Loads that found the weights in the memory of a GPU or a host."""
    load_misses: int
    """Loads from a disk."""
    load_hit_rate: float | None
    """Hits / loads; None without loads."""
    host_copy_bytes: int
    host_bytes_mean: int
    """Host memory that its copies took, mean over the run."""
    host_evictions: int
    """Copies that left a full memory."""


class _Model:
    def __init__(self) -> None:
        self.by_status = dict.fromkeys(("completed", "cancelled", "rejected", "failed"), 0)
        self.input_tokens = self.output_tokens = 0
        self.prompt = array("q")
        self.ttft = array("q")
        self.tpot = array("q")
        self.e2e = array("q")


class ModelLog:
    """Collects what `requests.csv` says, model by model."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._models = [_Model() for _ in names]

    def terminal(self, request: Request) -> None:
        """A request has ended. Those of a model that is not served belong to none."""
        if request.model < 0:
            return
        model = self._models[request.model]
        model.by_status[request.status.name.lower()] += 1
        if request.status is not _COMPLETED:
            return
        first_ns = request.first_token_ns + request.first_out_ns
        last_ns = request.last_token_ns + request.last_out_ns
        tokens = request.generated_tokens
        model.input_tokens += request.prompt_tokens
        model.output_tokens += tokens
        model.prompt.append(request.prompt_tokens)
        model.ttft.append(first_ns - request.arrival_ns)
        model.tpot.append((last_ns - first_ns) // (tokens - 1) if tokens > 1 else 0)
        model.e2e.append(last_ns - request.arrival_ns)

    def finish(
        self, facts: Sequence[ModelFacts], objectives: Sequence[SloTable]
    ) -> dict[str, ModelFigures]:
        """Figures by name. `facts` and `objectives` stand in the order of the names."""
        return {
            name: _figures(model, fact, slo)
            for name, model, fact, slo in zip(
                self.names, self._models, facts, objectives, strict=True
            )
        }


def ttft_limits_ns(slo: SloTable, prompt_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Objectives of TTFT that grow with the prompt, one for each request."""
    import numpy as np

    grown_ms = slo.ttft_base_ms + slo.ttft_ms_per_token * prompt_tokens
    limits: NDArray[np.float64] = np.maximum(slo.ttft_ms, grown_ms) * NS_PER_MS
    return limits


def _figures(model: _Model, facts: ModelFacts, slo: SloTable) -> ModelFigures:
    import numpy as np

    ttft, tpot, e2e = (
        np.frombuffer(a, dtype=np.int64) for a in (model.ttft, model.tpot, model.e2e)
    )
    met = np.ones(len(ttft), dtype=bool)
    limits = [(ttft, slo.ttft_ms), (tpot, slo.tpot_ms), (e2e, slo.e2e_ms)]
    if slo.ttft_ms_per_token:
        met &= ttft <= ttft_limits_ns(slo, np.frombuffer(model.prompt, dtype=np.int64))
        limits = limits[1:]
    for values, limit_ms in limits:
        if limit_ms:
            met &= values <= limit_ms * NS_PER_MS
    has_any = bool(slo.ttft_ms_per_token) or any(limit for _, limit in limits)
    counted = sum(model.by_status.values()) - model.by_status["cancelled"]
    attainment = int(met.sum()) / counted if counted else 0.0
    misses = sum(facts.loads.get(method, 0) for method in FAR)
    loads = sum(facts.loads.values())
    return ModelFigures(
        **model.by_status,
        input_tokens=model.input_tokens,
        output_tokens=model.output_tokens,
        mean_ttft_ms=_mean(ttft),
        median_ttft_ms=_percentile_ms(ttft, 50),
        p95_ttft_ms=_percentile_ms(ttft, 95),
        p99_ttft_ms=_percentile_ms(ttft, 99),
        mean_tpot_ms=_mean(tpot),
        p95_tpot_ms=_percentile_ms(tpot, 95),
        p99_tpot_ms=_percentile_ms(tpot, 99),
        mean_e2el_ms=_mean(e2e),
        p99_e2el_ms=_percentile_ms(e2e, 99),
        slo_attainment=round(attainment, 6) if has_any else None,
        gpu_seconds=round(facts.gpu_ns / NS_PER_S, 6),
        loading_gpu_seconds=round(facts.loading_gpu_ns / NS_PER_S, 6),
        scale_ups=facts.scale_ups,
        scale_downs=facts.scale_downs,
        loads=dict(sorted(facts.loads.items())),
        load_hits=loads - misses,
        load_misses=misses,
        load_hit_rate=round((loads - misses) / loads, 6) if loads else None,
        host_copy_bytes=facts.host_copy_bytes,
        host_bytes_mean=facts.host_bytes_mean,
        host_evictions=facts.host_evictions,
    )


def _mean(values: np.ndarray) -> float:
    return round(int(values.sum()) / len(values) / NS_PER_MS, 6) if len(values) else 0.0


def _percentile_ms(values: np.ndarray, percent: int) -> float:
    import numpy as np

    if not len(values):
        return 0.0
    ascending = np.sort(values)
    rank = percent / 100 * (len(ascending) - 1)
    low, high = int(ascending[int(rank)]), int(ascending[min(int(rank) + 1, len(ascending) - 1)])
    return round((low + (high - low) * (rank - int(rank))) / NS_PER_MS, 6)
