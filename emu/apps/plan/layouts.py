"""Which clusters come into question, and what rules some out before a run.

A **layout** is a kind of GPU, tensor- and pipeline-parallel degrees, a precision, limits of a
batch and a mode; a **candidate** is a layout with its numbers of replicas. Two facts rule out
clusters without a run:

- A replica whose weights (and one block of KV) do not fit its GPUs cannot start.
- Prefill takes at least 2 FLOP per parameter and token. An objective on a percentile q of TTFT
  means that a part q of the prompts is through by the last arrival + the limit; those cost at
  least as much as the shortest prompts of that number, and no replica computes faster than its
  GPUs' peak. This gives a least number of replicas. It holds for the roofline backend, whose
  products never beat the peak, and for prompts without shared prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import msgspec

from emu.catalogue import sizes
from emu.catalogue.model import UNITS, ModelSpec
from emu.errors import InputError
from emu.kv.memory import engine_plan
from emu.units import ceil_div

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
from emu.apps.plan.question import GpuKind, Objective, Question

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
