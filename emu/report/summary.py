"""`summary.json`: the figures of a run, named as vLLM's serving benchmark names them.

    summary = build_summary(log.finish(), gaps.finish(), RunFacts(...), slo)
    write_summary(directory / "summary.json", summary)
    read_summary(directory / "summary.json")        # also of an interrupted run

Everything here follows from the simulated run alone: no wall clock, no host, no paths; the same
config and seed give the same bytes. `RunFacts` is what only the cluster knows. What each figure
means stands in the file itself, under `definitions`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from emu.config.names import read_input
from emu.config.schema import SloTable
from emu.errors import InputError
from emu.process.prepared import prepared
from emu.report.atomic import write_bytes
from emu.report.itl import GapStats
from emu.report.records import RequestStats
from emu.report.sums import ascending, deviation_of, total_of
from emu.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
from emu.report.load_verdict import Load, judge_load
from emu.report.model_figures import ModelFigures, ttft_limits_ns

LEFT_OUT: Final = ("definitions", "partial_reason")
"""Members of a summary that are no figures."""
METRICS: Final = ("ttft", "tpot", "itl", "e2el")
STATISTICS: Final = ("mean", "median", "std", "p90", "p95", "p99", "max")

DEFINITIONS: Final = {
    "ttft": "First token - arrival, of completed requests.",
    "tpot": "(Last - first token) / (output tokens - 1), 0 for one token; of completed requests.",
    "itl": "Every gap between two tokens of a request, pooled over all requests.",
    "e2el": "Last token - arrival, of completed requests.",
    "percentiles": "Linear interpolation between the nearest ranks (numpy). ITL beyond 100,000 "
    "gaps: within 2^-11 of the value; means, deviations and maxima are always exact.",
    "duration": "First arrival to last token, s.",
    "request_throughput": "Completed requests / duration.",
    "output_throughput": "Output tokens of completed requests / duration.",
    "total_token_throughput": "Input and output tokens of completed requests / duration.",
    "request_goodput": "Completed requests that met every objective / duration.",
    "slo": "Part of the requests that met the objective. Requests that were rejected or failed "
    "count as missed, those that their client cancelled do not count.",
    "gpu_seconds": "Simulated time x GPUs that replicas held, by role of the replica; idle = the "
    "part of it in which a serving replica had no batch.",
    "mfu": "Model FLOPs of the requests (2 per parameter and token, and attention; not what was "
    "found in a cache or computed again) / half-precision peak x GPU time: of_busy = in which "
    "something ran, of_held = that replicas held. In 1e12: prompts, and tokens after the first.",
    "cost": "GPU time x nodes.hourly_price; null without prices.",
    "prefix_hit_rate": "Prompt tokens found in a cache / prompt tokens of scheduled requests.",
    "scale_ups": "Orders to put a replica into service: revived, spare reused, or weights loaded; "
    "a load that was given up counts too, what [recovery] brings back does not.",
    "loads": "Replicas whose weights arrived, by the way they came.",
    "host_cache_bytes": "Weights in host memory: mean over the run, most, and bytes of one copy.",
    "models": "With several models: figures of each. A load is a hit where the weights were in the "
    "memory of a GPU or a host, a miss where they came from a disk.",
    "load": "Rule in docs/metrics.md; wait = until first scheduled, plus between replicas.",
}


class RunFacts(msgspec.Struct, kw_only=True):
    """What the cluster tells about a run beside its requests."""

    end_ns: int = 0
    """Simulated time at the end."""
    partial: str = ""
    """Why the run is not complete; empty if it is."""
    gpu_ns: Mapping[str, int] = {}
    """GPUs x ns by role: prefill, decode, colocated, loading, ... Their sum is the total."""
    idle_gpu_ns: int = 0
    peak_flops: tuple[float, float] | None = None
    """What the GPUs could have computed in half precision while they ran something, and while
    replicas held them."""
    bytes_moved: Mapping[str, int] = {}
    """Bytes delivered by kind of flow: kv, weights, ..."""
    scale_ups: int = 0
    scale_downs: int = 0
    loads: Mapping[str, int] = {}
    """Replicas whose weights arrived, by method: nvlink, p2p, chain, tanz, host, disk, delay."""
    host_cache_bytes: Mapping[str, int] = {}
    """mean, max, copy; empty without autoscaling."""
    faults: Mapping[str, int] = {}
    """Faults that struck, by kind."""
    faults_missed: Mapping[str, int] = {}
    """Faults that found nothing to strike (a replica that was not in service), by kind."""
    energy_j: Mapping[str, float] | None = None
    """By part of the machine; None = not modeled."""
    features: Mapping[str, Mapping[str, Any]] = {}
    """Figures of features that replicas have, by their keys in the summary."""
    cost: float | None = None
    """Price of the GPU time; None = no prices given."""
    workload_rows: int = 0
    """Rows that the workload held."""
    rows_skipped: Mapping[str, int] = {}
    rows_clipped: Mapping[str, int] = {}
    digest: str = ""
    """Digest of (time, actor, event), when the kernel keeps one."""


class Slo(msgspec.Struct, kw_only=True):
    """Objectives and the part of the requests that met them; None = no objective."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    ttft_attainment: float | None = None
    tpot_attainment: float | None = None
    e2e_attainment: float | None = None
    joint_attainment: float | None = None
    requests_counted: int
    """Requests that an attainment is a part of."""


class GpuSeconds(msgspec.Struct, kw_only=True):
    """GPUs x simulated seconds."""

    total: float
    by_role: dict[str, float]
    loading: float
    idle: float


class Mfu(msgspec.Struct, kw_only=True):
    """Model FLOPs, 1e12, and the part of the peak that they are."""

    prompt_tflop: float
    output_tflop: float
    of_busy: float
    of_held: float


class Summary(msgspec.Struct, kw_only=True):
    """The file. Key order is that of the fields."""

    partial: bool
    partial_reason: str
    completed: int
    failed: int
    rejected: int
    cancelled: int
    reasons: dict[str, int]
    num_prompts: int
    duration: float
    """Seconds from the first arrival to the last token."""
    simulated_s: float
    request_rate: float
    total_input_tokens: int
    total_output_tokens: int
    output_tokens_of_others: int
    """Tokens that clients of requests that did not complete received."""
    request_throughput: float
    output_throughput: float
    """Output tokens of completed requests per second."""
    total_token_throughput: float
    request_goodput: float | None
    mean_ttft_ms: float
    median_ttft_ms: float
    std_ttft_ms: float
    p90_ttft_ms: float
    p95_ttft_ms: float
    p99_ttft_ms: float
    max_ttft_ms: float
    mean_tpot_ms: float
    median_tpot_ms: float
    std_tpot_ms: float
    p90_tpot_ms: float
    p95_tpot_ms: float
    p99_tpot_ms: float
    max_tpot_ms: float
    mean_itl_ms: float
    median_itl_ms: float
    std_itl_ms: float
    p90_itl_ms: float
    p95_itl_ms: float
    p99_itl_ms: float
    max_itl_ms: float
    mean_e2el_ms: float
    median_e2el_ms: float
    std_e2el_ms: float
    p90_e2el_ms: float
    p95_e2el_ms: float
    p99_e2el_ms: float
    max_e2el_ms: float
    itl_samples: int
    slo: Slo
    load: Load
    gpu_seconds: GpuSeconds
    mfu: Mfu | None = None
    cost: float | None
    """In the unit of `nodes.hourly_price`."""
    bytes_moved: dict[str, int]
    kv_bytes_moved: int
    preemptions: int
    recomputed_tokens: int
    migrations: int
    scale_ups: int
    scale_downs: int
    loads: dict[str, int] = {}
    """Replicas whose weights arrived, by method: nvlink, p2p, chain, tanz, host, disk, delay."""
    host_cache_bytes: dict[str, int] = {}
    """Weights in host memory: mean over the run, max, and one copy; empty without autoscaling."""
    faults: dict[str, int]
    faults_missed: dict[str, int]
    prefix_hit_rate: float
    prefix_hit_tokens: dict[str, int]
    """total, and by tier: npu (GPU memory), storage (behind it)."""
    energy_j: dict[str, float] | None
    workload_rows: int
    rows_skipped: dict[str, int]
    rows_clipped: dict[str, int]
    digest: str
    models: dict[str, ModelFigures] | msgspec.UnsetType = msgspec.UNSET
    """By served name, where there are several models."""
    pace: object = msgspec.UNSET
    """Live mode only: whether the machine kept up (docs/live.md)."""
    features: dict[str, Any] = {}
    """Figures of features, by their keys in the file, where each stands for itself."""
    definitions: dict[str, str]

    def statistic(self, statistic: str, metric: str) -> float:
        """`statistic("p99", "ttft")`: ms."""
        value = msgspec.structs.asdict(self)[f"{statistic}_{metric}_ms"]
        assert isinstance(value, float)
        return value


def build_summary(stats: RequestStats, gaps: GapStats, facts: RunFacts, slo: SloTable) -> Summary:
    """All figures of a run."""
    attainment, joint = _attainment(stats, slo)
    load = judge_load(stats)
    return Summary(
        partial=bool(facts.partial),
        partial_reason=facts.partial,
        **stats.by_status,  # type: ignore[arg-type]
        reasons=stats.by_reason,
        num_prompts=stats.requests,
        simulated_s=_rounded(facts.end_ns / NS_PER_S),
        request_rate=load.arrival_rate_per_s,
        total_input_tokens=stats.prompt_tokens,
        total_output_tokens=stats.output_tokens,
        output_tokens_of_others=stats.output_tokens_partial,
        **_throughputs(stats, joint),
        **_latencies("ttft", stats.columns["ttft"]),
        **_latencies("tpot", stats.columns["tpot"]),
        **_gap_latencies(gaps),
        **_latencies("e2el", stats.columns["e2e"]),
        itl_samples=gaps.samples,
        slo=attainment,
        load=load,
        gpu_seconds=_gpu_seconds(facts),
        mfu=_mfu(stats, facts),
        cost=None if facts.cost is None else _rounded(facts.cost),
        bytes_moved=dict(facts.bytes_moved),
        kv_bytes_moved=facts.bytes_moved.get("kv", 0),
        preemptions=stats.preemptions,
        recomputed_tokens=stats.recomputed_tokens,
        migrations=stats.migrations,
        scale_ups=facts.scale_ups,
        scale_downs=facts.scale_downs,
        loads=dict(sorted(facts.loads.items())),
        host_cache_bytes=dict(facts.host_cache_bytes),
        faults=dict(sorted(facts.faults.items())),
        faults_missed=dict(sorted(facts.faults_missed.items())),
        prefix_hit_rate=_rounded(stats.prefix_hit_tokens / max(stats.prefix_prompt_tokens, 1)),
        prefix_hit_tokens={
            "total": stats.prefix_hit_tokens,
            "npu": stats.npu_hit_tokens,
            "storage": stats.storage_hit_tokens,
        },
        energy_j=None
        if facts.energy_j is None
        else {part: _rounded(joule) for part, joule in facts.energy_j.items()},
        workload_rows=facts.workload_rows,
        rows_skipped=dict(sorted(facts.rows_skipped.items())),
        rows_clipped=dict(sorted(facts.rows_clipped.items())),
        digest=facts.digest,
        features={name: dict(figures) for name, figures in facts.features.items()},
        definitions={name: text for name, text in DEFINITIONS.items() if name != "models"},
    )


def _throughputs(stats: RequestStats, joint: int | None) -> dict[str, Any]:
    duration_s = max(stats.last_token_ns - stats.first_arrival_ns, 0) / NS_PER_S

    def per_s(count: int) -> float:
        return _rounded(count / duration_s) if duration_s else 0.0

    return {
        "duration": _rounded(duration_s),
        "request_throughput": per_s(stats.by_status["completed"]),
        "output_throughput": per_s(stats.output_tokens),
        "total_token_throughput": per_s(stats.prompt_tokens + stats.output_tokens),
        "request_goodput": None if joint is None else per_s(joint),
    }


def _gpu_seconds(facts: RunFacts) -> GpuSeconds:
    by_role = {role: _rounded(ns / NS_PER_S) for role, ns in facts.gpu_ns.items()}
    return GpuSeconds(
        total=_rounded(sum(facts.gpu_ns.values()) / NS_PER_S),
        by_role=by_role,
        loading=by_role.get("loading", 0.0),
        idle=_rounded(facts.idle_gpu_ns / NS_PER_S),
    )


def _mfu(stats: RequestStats, facts: RunFacts) -> Mfu | None:
    if facts.peak_flops is None:
        return None
    prompt, output = stats.flops
    busy, held = ((prompt + output) / peak if peak else 0.0 for peak in facts.peak_flops)
    return Mfu(
        prompt_tflop=_rounded(prompt / 1e12),
        output_tflop=_rounded(output / 1e12),
        of_busy=_rounded(busy),
        of_held=_rounded(held),
    )


def write_summary(path: Path, summary: Summary) -> None:
    """Write the file, whole or not at all."""
    text = msgspec.json.encode(plain_summary(summary))
    write_bytes(path, msgspec.json.format(text, indent=2) + b"\n")


def plain_summary(summary: Summary) -> dict[str, Any]:
    """The summary as the file has it: figures of features stand beside all others."""
    plain: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(summary).items():
        plain |= value if name == "features" else {name: value}
    return plain


def read_summary(path: Path) -> Summary:
    """Read a file of this kind. Tables that are not known are figures of features."""
    try:
        plain = msgspec.json.decode(read_input(path))
        if not isinstance(plain, dict):
            raise InputError(str(path), None, "", "not a summary of emu: expected an object")
        known = Summary.__struct_fields__
        plain["features"] = {
            name: value
            for name, value in plain.items()
            if name not in known and isinstance(value, dict)
        }
        return msgspec.convert(plain, prepared(Summary))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), None, "", f"not a summary of emu: {error}") from None


def _rounded(value: float) -> float:
    """Six digits behind the point: a millisecond figure keeps its nanoseconds."""
    return round(value, 6)


def _latencies(metric: str, column_ns: array[int]) -> dict[str, Any]:
    if len(column_ns) == 0:
        return {f"{statistic}_{metric}_ms": 0.0 for statistic in STATISTICS}
    values_ns = ascending(column_ns)
    del column_ns  # of millions of requests: one copy is enough
    # Integer sum: the mean must not depend on the order of completions.
    figures = (
        total_of(values_ns) / len(values_ns),
        _percentile(values_ns, 50),
        deviation_of(values_ns),
        _percentile(values_ns, 90),
        _percentile(values_ns, 95),
        _percentile(values_ns, 99),
        int(values_ns[-1]),
    )
    return {
        f"{statistic}_{metric}_ms": _rounded(figure / NS_PER_MS)
        for statistic, figure in zip(STATISTICS, figures, strict=True)
    }


def _percentile(ascending: Sequence[int], percent: int) -> float:
    """Equals `np.percentile` to the bit, without its second sort and its masked arrays."""
    rank = percent / 100 * (len(ascending) - 1)
    below = int(rank)
    low = int(ascending[below])
    high = int(ascending[min(below + 1, len(ascending) - 1)])
    part = rank - below
    if part >= 0.5:  # numpy interpolates from the nearer side
        return high - (high - low) * (1 - part)
    return low + (high - low) * part


def _gap_latencies(gaps: GapStats) -> dict[str, Any]:
    figures = (
        gaps.mean_ns,
        gaps.percentile_ns(50),
        gaps.std_ns,
        gaps.percentile_ns(90),
        gaps.percentile_ns(95),
        gaps.percentile_ns(99),
        gaps.max_ns,
    )
    return {
        f"{statistic}_itl_ms": _rounded(figure / NS_PER_MS)
        for statistic, figure in zip(STATISTICS, figures, strict=True)
    }


def _attainment(stats: RequestStats, slo: SloTable) -> tuple[Slo, int | None]:
    """Attainments, and how many requests met every objective (None without objectives)."""
    counted = stats.requests - stats.by_status["cancelled"]
    limits = {
        "ttft": slo.ttft_ms or slo.ttft_ms_per_token,
        "tpot": slo.tpot_ms,
        "e2e": slo.e2e_ms,
    }
    if not any(limits.values()):
        return Slo(requests_counted=counted), None
    import numpy as np

    joint = np.ones(stats.by_status["completed"], dtype=bool)
    parts: dict[str, float | None] = {}
    for name, limit_ms in limits.items():
        if not limit_ms:
            parts[name] = None
            continue
        if name == "ttft" and slo.ttft_ms_per_token:
            met = _column(stats, name) <= ttft_limits_ns(slo, _column(stats, "prompt"))
        else:
            met = _column(stats, name) <= limit_ms * NS_PER_MS
        joint &= met
        parts[name] = _rounded(int(met.sum()) / counted) if counted else 0.0
    met_all = int(joint.sum())
    result = Slo(
        ttft_ms=slo.ttft_ms or None,
        tpot_ms=slo.tpot_ms or None,
        e2e_ms=slo.e2e_ms or None,
        ttft_attainment=parts["ttft"],
        tpot_attainment=parts["tpot"],
        e2e_attainment=parts["e2e"],
        joint_attainment=_rounded(met_all / counted) if counted else 0.0,
        requests_counted=counted,
    )
    return result, met_all


def _column(stats: RequestStats, name: str) -> NDArray[np.int64]:
    import numpy as np

    return np.frombuffer(stats.columns[name], dtype=np.int64)


def figures_of(summary: Summary) -> dict[str, Any]:
    """All figures of a summary by dotted name."""
    figures: dict[str, Any] = {}
    for name, value in plain_summary(summary).items():
        if name in LEFT_OUT:
            continue
        if isinstance(value, dict):
            figures.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            figures[name] = value
    return {
        name: value
        for name, value in figures.items()
        if value is None or isinstance(value, (int, float, str))
    }
