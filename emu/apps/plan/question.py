"""What `emu plan` is asked, and which clusters come into question. Runs nothing.

    gpu_kind("H100=2.5:64")              2.5 per GPU hour, at most 64 of them
    objective("ttft_p95", "500ms")
    lengths("median=1000,sigma=0.8,max=8000", "--prompt-tokens")

Everything wrong is an InputError that names the option.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from emu.apps.sweeps.sweepfile import Condition
from emu.catalogue import sizes
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.lookup import lookup_gpu
from emu.catalogue.model import UNITS, ModelSpec
from emu.config.names import did_you_mean, toml_text
from emu.config.presets import PRESETS, WORKLOADS
from emu.errors import InputError
from emu.kv.memory import engine_plan
from emu.report.atomic import write_text
from emu.units import ceil_div

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SOURCE: Final = "plan"
METRICS: Final[Mapping[str, str]] = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
"""Metric of an option -> its name in summary.json."""
STATISTICS: Final[Mapping[str, str]] = {"p50": "median", "p95": "p95", "p99": "p99"}
OBJECTIVES: Final = tuple(f"{metric}_{at}" for metric in METRICS for at in STATISTICS)
_UNITS_MS: Final[Mapping[str, float]] = {"ms": 1.0, "s": 1000.0}


class GpuKind(msgspec.Struct, frozen=True):
    """A kind of GPU that may be used."""

    spec: GpuSpec
    price: float
    """Of one GPU hour; 1 for every kind if no kind has a price."""
    count_max: int
    """How many there are; 0 = as many as needed."""

    @property
    def name(self) -> str:
        """Its name in the catalogue."""
        return self.spec.name


class Objective(msgspec.Struct, frozen=True):
    """A percentile of a latency and its limit."""

    metric: str
    at: str
    limit_ms: float

    @property
    def figure(self) -> str:
        """Its name in summary.json."""
        return f"{STATISTICS[self.at]}_{METRICS[self.metric]}_ms"

    @property
    def condition(self) -> Condition:
        """What a run's figures must meet."""
        return Condition(self.figure, "<=", self.limit_ms)

    @property
    def label(self) -> str:
        """The reader's name for it, such as TTFT p95."""
        return f"{self.metric.upper()} {self.at}"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    model: str
    hf_config: str
    gpus: tuple[GpuKind, ...]
    has_prices: bool
    workload: dict[str, Any]
    """The table [workload] of a configuration, without the rate of a trace."""
    rate_per_s: float
    """Requests per second; 0 = as the trace has it."""
    objectives: tuple[Objective, ...]
    tensor_parallel: tuple[int, ...]
    pipeline_parallel: tuple[int, ...] = (1,)
    batch_tokens: tuple[int, ...] = (0,)
    """max_num_batched_tokens to try; 0 = as configured."""
    batch_requests: tuple[int, ...] = (0,)
    """max_num_seqs to try; 0 = as configured."""
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    seeds: tuple[int, ...]
    gpus_max: int
    gpus_per_node: int
    settings: dict[str, Any]
    """Overrides of every configuration (dotted keys)."""
    systems: tuple[str, ...] = ("none",)
    """Presets of [autoscale] to try; "none" = a cluster that does not scale."""
    scaling: dict[str, Any] = {}
    """Overrides of every configuration that scales (dotted keys)."""


def wrong(option: str, problem: str) -> InputError:
    """The error about an option."""
    return InputError(SOURCE, None, option, problem)


def gpu_kinds(texts: Sequence[str]) -> tuple[tuple[GpuKind, ...], bool]:
    """The kinds of GPUs, and whether they have prices. Raises InputError."""
    if not texts:
        raise wrong("--gpu", "give at least one kind, such as --gpu H100=2.5 (emu gpus lists them)")
    read = [_gpu_kind(text) for text in texts]
    names = [spec.name for spec, _, _ in read]
    for name in names:
        if names.count(name) > 1:
            raise wrong("--gpu", f"{name} is given more than once")
    priced = [price is not None for _, price, _ in read]
    if any(priced) and not all(priced):
        without = names[priced.index(False)]
        raise wrong("--gpu", f"{without} has no price, others have; prices compare only if all do")
    kinds = tuple(
        GpuKind(spec, 1.0 if price is None else price, count_max) for spec, price, count_max in read
    )
    return kinds, all(priced)


def _gpu_kind(text: str) -> tuple[GpuSpec, float | None, int]:
    """NAME, NAME=PRICE, NAME:COUNT or NAME=PRICE:COUNT."""
    rest, colon, count_text = text.partition(":")
    name, equals, price_text = rest.partition("=")
    spec = lookup_gpu(name.strip(), SOURCE, "--gpu")
    price = _positive(price_text, "--gpu", f"price of {text!r}") if equals else None
    if not colon:
        return spec, price, 0
    if not (count_text.isascii() and count_text.isdigit() and int(count_text) > 0):
        raise wrong("--gpu", f"number of GPUs of {text!r}: expected a whole number from 1")
    return spec, price, int(count_text)


def objective(name: str, text: str | float) -> Objective:
    """`ttft_p95`, `500ms` -> an objective; a bare number is refused. Raises InputError."""
    if name not in OBJECTIVES:
        raise wrong(name, f"no such objective{did_you_mean(name, OBJECTIVES)}")
    option = f"--{name.replace('_', '-')}"
    given = str(text).strip()
    unit = "ms" if given.endswith("ms") else "s" if given.endswith("s") else ""
    if not unit:
        raise wrong(option, f"{given!r} needs a unit: 500ms or 0.5s")
    value = _positive(given.removesuffix(unit), option, f"duration {given!r}")
    metric, _, at = name.partition("_")
    return Objective(metric, at, value * _UNITS_MS[unit])


def _positive(text: str, option: str, what: str) -> float:
    try:
        value = float(text) if text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise wrong(option, f"{what}: expected a positive number")
    return value


def lengths(text: str | int, option: str) -> dict[str, Any]:
    """A distribution of lengths: `512`, `100-2000` (uniform), or keys of a table of lengths."""
    given = str(text).strip()
    if given.isascii() and given.isdigit():
        return {"distribution": "fixed", "value": int(given), "max": max(int(given), 1)}
    low, dash, high = given.partition("-")
    if dash and low.isdigit() and high.isdigit():
        return {"distribution": "uniform", "min": int(low), "max": int(high)}
    table: dict[str, Any] = {}
    for part in given.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key:
            problem = f"{given!r}: expected 512, 100-2000 or median=1000,sigma=0.8,max=8000"
            raise wrong(option, problem)
        table[key] = _number_or_word(value)
    return table


def _number_or_word(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def traffic(
    *,
    workload: str,
    rate: float,
    prompt_tokens: str | int,
    output_tokens: str | int,
    preset: str,
    requests: int,
) -> dict[str, Any]:
    """The table [workload]. Raises InputError for what does not go together."""
    if rate and not (math.isfinite(rate) and rate > 0):
        raise wrong("--rate", f"must be positive, not {rate:g}")
    given = [
        name
        for name, value in (
            ("--preset", preset),
            ("--prompt-tokens", prompt_tokens),
            ("--output-tokens", output_tokens),
        )
        if value
    ]
    if workload:
        if given:
            raise wrong(given[0], "a --workload file has its own lengths")
        return {"path": workload, **({"limit": requests} if requests else {})}
    if not rate:
        raise wrong("--rate", "give requests per second, or a --workload file that has them")
    service: Mapping[str, Any]
    if preset and len(given) > 1:
        raise wrong(given[1], "a --preset has its own lengths")
    if preset:
        if preset not in WORKLOADS:
            names = ", ".join(sorted(WORKLOADS))
            raise wrong("--preset", f"unknown preset {preset!r}; there are {names}")
        service = WORKLOADS[preset]
    elif len(given) == 2:
        service = {
            "prompt": lengths(prompt_tokens, "--prompt-tokens"),
            "output": lengths(output_tokens, "--output-tokens"),
        }
    else:
        problem = "give --workload FILE, --preset, or both --prompt-tokens and --output-tokens"
        raise wrong("--prompt-tokens", problem)
    synthetic = {
        "requests": requests or 2000,
        "arrivals": {"rate_per_s": float(rate)},
        **{key: dict(part) if isinstance(part, Mapping) else part for key, part in service.items()},
    }
    return {"synthetic": synthetic}


# --------------------------------------------------------------------------------------------------
# A configuration from a few words: what `emu run` does without a file.

GPUS_PER_NODE = 8


def plain_config(
    output: Path,
    *,
    model: str,
    gpu: Sequence[str],
    replicas: int,
    tensor_parallel: int,
    workload: str,
    rate: float,
    prompt_tokens: str,
    output_tokens: str,
    preset: str,
    requests: int,
) -> Path:
    """Write `OUTPUT.toml`, a configuration of colocated replicas; its path. Raises InputError."""
    if not model:
        raise InputError("run", None, "--model", "give a configuration file, or a model")
    kinds, has_prices = gpu_kinds(gpu)
    if len(kinds) != 1:
        raise InputError("run", None, "--gpu", "a run has one kind; emu plan compares them")
    table = traffic(
        workload=workload,
        rate=rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        preset=preset,
        requests=requests,
    )
    if workload:
        path = Path(workload).resolve()
        table["path"] = str(path)
        if rate:
            table["rate_per_s"] = float(rate)
    machines = ceil_div(max(1, replicas), max(1, GPUS_PER_NODE // tensor_parallel))
    node: dict[str, Any] = {"gpu": kinds[0].name, "gpus": GPUS_PER_NODE, "count": machines}
    if has_prices:
        node["hourly_price"] = kinds[0].price
    tables = {
        "model": {"name": model},
        "nodes": [node],
        "replicas": [{"count": max(1, replicas), "tensor_parallel": tensor_parallel}],
        "workload": table,
        "output": {"dir": str(output.resolve())},
    }
    path = output.with_name(f"{output.name}.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, f"# Written by emu run.\n{toml_text(tables)}")
    return path


# --- layouts: which clusters come into question, and what rules some out before a run -------------
# A **layout** is a kind of GPU, tensor- and pipeline-parallel degrees, a precision, limits of a
# batch and a mode; a **candidate** is a layout with its numbers of replicas. Two facts rule out
# clusters without a run:
#
# - A replica whose weights (and one block of KV) do not fit its GPUs cannot start.
# - Prefill takes at least 2 FLOP per parameter and token. An objective on a percentile q of TTFT
#   means that a part q of the prompts is through by the last arrival + the limit; those cost at
#   least as much as the shortest prompts of that number, and no replica computes faster than its
#   GPUs' peak. This gives a least number of replicas. It holds for the roofline backend, whose
#   products never beat the peak, and for prompts without shared prefixes.

MODES: Final = ("colocated", "disaggregated")
_FLOP_PER_PARAMETER: Final = 2


class Layout(msgspec.Struct, frozen=True):
    """Everything about a cluster but how many replicas it has."""

    gpu: GpuKind
    tensor_parallel: int
    dtype: str
    mode: str
    replicas_min: int
    """Fewer (of those that prefill) cannot meet the objectives."""
    pipeline_parallel: int = 1
    batch_tokens: int = 0
    """max_num_batched_tokens; 0 = as configured."""
    batch_requests: int = 0
    """max_num_seqs; 0 = as configured."""

    @property
    def replica_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def price(self) -> float:
        """Price of one replica per hour."""
        return self.replica_gpus * self.gpu.price

    @property
    def shape(self) -> str:
        """TP 4, PP 2, fp8, 8192 tokens, 64 requests; what is as usual is not said."""
        words = [f"TP {self.tensor_parallel}"]
        words += [f"PP {self.pipeline_parallel}"] if self.pipeline_parallel > 1 else []
        words += [self.dtype] if self.dtype != "auto" else []
        words += [f"{self.batch_tokens} tokens"] if self.batch_tokens else []
        words += [f"{self.batch_requests} requests"] if self.batch_requests else []
        return ", ".join(words)

    @property
    def label(self) -> str:
        """H100 TP 4 colocated."""
        return f"{self.gpu.name} {self.shape.replace(',', '')} {self.mode}"

    @property
    def limits(self) -> dict[str, int]:
        """Keys of [scheduler] that bound a batch."""
        given = {
            "max_num_batched_tokens": self.batch_tokens,
            "max_num_seqs": self.batch_requests,
        }
        return {key: value for key, value in given.items() if value}


class Scaling(msgspec.Struct, frozen=True):
    """How a cluster scales."""

    system: str
    """Preset of [autoscale]."""
    replicas_max: int
    """Of all roles together."""


class Candidate(msgspec.Struct, frozen=True):
    """A cluster: colocated replicas, or prefill and decode replicas."""

    layout: Layout
    prefill: int
    """Colocated replicas where the layout is colocated; the least number where it scales."""
    decode: int
    scaling: Scaling | None = None

    @property
    def replicas(self) -> int:
        """All replicas, also those that are not always there."""
        return self.scaling.replicas_max if self.scaling else self.prefill + self.decode

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.replicas * self.layout.replica_gpus

    @property
    def cost(self) -> float:
        """Per hour; GPUs where they have no price. One that scales costs no less than this."""
        replicas = self.prefill + self.decode
        return replicas * self.layout.replica_gpus * self.layout.gpu.price

    @property
    def label(self) -> str:
        """20 x H100: 4P+1D, TP 4; 2 to 8 x H100: 2 to 8 colocated by hpa, TP 1."""
        layout = self.layout
        if self.scaling is not None:
            most, least = self.scaling.replicas_max, self.prefill + self.decode
            gpus = f"{least * layout.replica_gpus} to {self.gpus} x {layout.gpu.name}"
            least_text = f"{self.prefill}P+{self.decode}D" if self.decode else f"{self.prefill}"
            kind = "replicas" if self.decode else "colocated"
            return f"{gpus}: {least_text} to {most} {kind} by {self.scaling.system}, {layout.shape}"
        split = f"{self.prefill}P+{self.decode}D" if self.decode else f"{self.prefill} colocated"
        return f"{self.gpus} x {layout.gpu.name}: {split}, {layout.shape}"

    def values(self, gpus_per_node: int) -> dict[str, Any]:
        """The keys of a configuration that make this cluster."""
        layout = self.layout
        shape = {"tensor_parallel": layout.tensor_parallel}
        if layout.pipeline_parallel > 1:
            shape["pipeline_parallel"] = layout.pipeline_parallel
        replicas: list[dict[str, Any]] = [{"role": "colocated", "count": self.prefill, **shape}]
        if self.decode:
            replicas = [
                {"role": "prefill", "count": self.prefill, **shape},
                {"role": "decode", "count": self.decode, **shape},
            ]
        if self.scaling is not None:
            spare = self.replicas - self.prefill - self.decode
            replicas.append({"role": "inactive", "count": spare, **shape})
        # A replica of several machines takes whole ones; a smaller one never lies across two.
        each = layout.replica_gpus
        machines = ceil_div(self.replicas, max(1, gpus_per_node // each))
        if each > gpus_per_node:
            machines = self.replicas * ceil_div(each, gpus_per_node)
        return {
            **{f"scheduler.{key}": value for key, value in layout.limits.items()},
            "model.dtype": layout.dtype,
            "nodes.0.gpu": layout.gpu.name,
            "nodes.0.gpus": gpus_per_node,
            "nodes.0.count": machines,
            "replicas": replicas,
            **self._scaling_values(),
        }

    @property
    def bounds(self) -> dict[str, int]:
        """The least and largest numbers of replicas, as keys of [autoscale]."""
        if self.scaling is None:
            return {}
        most = self.scaling.replicas_max
        if not self.decode:
            return {"min_replicas": self.prefill, "max_replicas": most}
        return {
            "min_prefill": self.prefill,
            "max_prefill": most - self.decode,
            "min_decode": self.decode,
            "max_decode": most - self.prefill,
        }

    def _scaling_values(self) -> dict[str, Any]:
        if self.scaling is None:
            return {}
        given = {"preset": self.scaling.system, **self.bounds}
        return {f"autoscale.{key}": value for key, value in given.items()}


class Prompts(msgspec.Struct, frozen=True):
    """What the bound on throughput needs to know of the traffic."""

    tokens: npt.NDArray[np.int64]
    """Lengths of all prompts, ascending."""
    span_s: float
    """From the first arrival to the last."""
    is_shared: bool
    """Some have prefixes in common: then there is no bound."""


def layouts_of(
    question: Question, model: ModelSpec, prompts: Prompts, *, is_roofline: bool, utilization: float
) -> tuple[list[Layout], list[tuple[str, str]]]:
    """Layouts that can run, and (label, reason) of those that cannot."""
    found: list[Layout] = []
    refused: list[tuple[str, str]] = []
    batches = list(product(question.batch_tokens, question.batch_requests))
    for gpu, degrees, dtype in product(
        question.gpus,
        product(question.tensor_parallel, question.pipeline_parallel),
        question.dtypes,
    ):
        reason = _obstacle(question, model, gpu, degrees, dtype, utilization)
        least = 1
        if is_roofline and not reason:
            gpus = degrees[0] * degrees[1]
            least = replicas_min(model, gpu, gpus, prompts, question.objectives)
        for mode in question.modes:
            for tokens, requests in batches[: 1 if reason else None]:
                layout = Layout(gpu, degrees[0], dtype, mode, least, degrees[1], tokens, requests)
                if reason:
                    refused.append((layout.label, reason))
                else:
                    found.append(layout)
    # Colocated first: their search is short, and its answer bounds the search over splits.
    found.sort(key=lambda layout: (MODES.index(layout.mode), layout.price * layout.replicas_min))
    return found, refused


def _obstacle(
    question: Question,
    model: ModelSpec,
    gpu: GpuKind,
    degrees: tuple[int, int],
    dtype: str,
    utilization: float,
) -> str:
    """Why such a replica cannot start; empty if it can. `degrees`: tensor and pipeline."""
    tensor_parallel, pipeline_parallel = degrees
    if pipeline_parallel > model.layers:
        return f"{model.layers} layers make no {pipeline_parallel} stages"
    if pipeline_parallel > 1 and model.special_layers:
        return "emu does not split unlike layers over stages"
    if model.heads % tensor_parallel:
        return f"{model.heads} attention heads cannot be shared by {tensor_parallel} GPUs"
    if tensor_parallel > question.gpus_per_node:
        return f"a machine has {question.gpus_per_node} GPUs"
    if gpu.count_max and tensor_parallel * pipeline_parallel > gpu.count_max:
        return f"there are {gpu.count_max} GPUs"
    try:
        engine_plan(
            model,
            gpu.spec.memory_gib,
            tp=tensor_parallel,
            pp=pipeline_parallel,
            dtype=dtype,
            utilization=utilization,
        )
    except InputError as error:
        return error.problem
    return ""


def replicas_min(
    model: ModelSpec,
    gpu: GpuKind,
    gpus: int,
    prompts: Prompts,
    objectives: Sequence[Objective],
) -> int:
    """The least number of replicas of so many GPUs that can compute the prompts in time (see the
    module)."""
    least = 1
    if prompts.is_shared:
        return least
    tables = sizes.embedding_params(model) + sizes.head_params(model)
    per_token = _FLOP_PER_PARAMETER * (sizes.active_parameter_count(model) - tables)
    peak = gpus * max(gpu.spec.peak_flops(dtype) for dtype in UNITS)
    for objective in objectives:
        if objective.metric != "ttft":
            continue
        counted = math.floor(len(prompts.tokens) * int(objective.at[1:]) / 100)
        flop = float(prompts.tokens[:counted].sum()) * per_token
        seconds = prompts.span_s + objective.limit_ms / 1000
        least = max(least, math.ceil(flop / (peak * seconds) * (1 - 1e-9)))
    return least


# --------------------------------------------------------------------------------------------------
# Clusters that scale: which bounds come into question beside a static cluster. Pure.
#
# A static cluster that meets the objectives with N colocated replicas is tried with at least 1, a
# quarter, half, three quarters and all but one of N, and at most N, 1.5 N and 2 N. One of P prefill
# and D decode replicas is tried from one of each and from half of each, with P + D and 1.5 (P + D)
# replicas in all. What such a cluster costs is the GPU time of its run: a figure, not a sum.
#
# Its planner never goes below the least number, so a cluster whose least number alone costs as
# much as the best known need not be run.

NOT_SCALED: Final = "none"
SPAN: Final = 2.0
"""Static clusters that cost up to so many times the best are a start for clusters that scale."""
SYSTEMS: Final[Mapping[str, str]] = {
    name: "colocated" if values.get("planner") == "hpa" else "disaggregated"
    for name, values in PRESETS.items()
    if values.get("executor") != "none"
}
"""Preset of [autoscale] -> the mode whose replicas it scales; static ones are left out."""


def scaled(static: Candidate, system: str, replicas_max: int) -> list[Candidate]:
    """The clusters that scale by a preset, from a static one; at most so many replicas."""
    layout, prefill, decode = static.layout, static.prefill, static.decode
    found: dict[Candidate, None] = {}
    if layout.mode != SYSTEMS[system]:
        return []
    if not decode:
        lows = {1, ceil_div(prefill, 4), ceil_div(prefill, 2), ceil_div(3 * prefill, 4)}
        for low in sorted(lows | {max(1, prefill - 1)}):
            for high in (prefill, ceil_div(3 * prefill, 2), 2 * prefill):
                scaling = Scaling(system, min(high, replicas_max))
                if low < scaling.replicas_max:
                    found[Candidate(layout, low, 0, scaling)] = None
        return list(found)
    whole = prefill + decode
    for least in ((1, 1), (ceil_div(prefill, 2), ceil_div(decode, 2))):
        for high in (whole, ceil_div(3 * whole, 2)):
            scaling = Scaling(system, min(high, replicas_max))
            if sum(least) < scaling.replicas_max:
                found[Candidate(layout, *least, scaling)] = None
    return list(found)
