"""Which clusters come into question, and what rules some out before a run.

A **layout** is a kind of GPU (or one for prefill and one for decode), tensor- and
pipeline-parallel degrees, a precision, limits of a batch and a mode; a **candidate** is a layout
with its numbers of replicas. Three facts rule out clusters without a run:

- A replica whose weights (and one block of KV) do not fit its GPUs cannot start.
- A request alone on a replica bounds TTFT, TPOT and E2E from below (`pace.py`).
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
from typing import Final, Protocol

import msgspec

from emu.apps.plan.pace import Loads, Pace
from emu.apps.plan.question import GpuKind, Objective, Question
from emu.catalogue import sizes
from emu.catalogue.model import UNITS, ModelSpec
from emu.documents import Document, DocumentView
from emu.errors import InputError
from emu.kv.memory import Demand, engine_plan
from emu.units import ceil_div

MODES: Final = ("colocated", "disaggregated")
_FLOP_PER_PARAMETER: Final = 2
Values = Document
"""Dotted keys of a configuration."""


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
    decode_gpu: GpuKind | None = None
    """Of decode replicas, where they have another kind of GPU."""
    guess: tuple[int, int] = (1, 1)
    """Replicas that prefill and that decode, by arithmetic: where the search begins."""

    @property
    def gpus(self) -> tuple[GpuKind, ...]:
        """Kinds of GPUs: of prefill (or colocated) replicas, and of decode where it is another."""
        return (self.gpu,) if self.decode_gpu is None else (self.gpu, self.decode_gpu)

    @property
    def kinds(self) -> str:
        """`H100`, or `H100 + L40S`: prefill, then decode."""
        return " + ".join(kind.name for kind in self.gpus)

    @property
    def replica_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def prices(self) -> tuple[float, float]:
        """Prices of one replica per hour: one that prefills (or does both), one that decodes."""
        return self.replica_gpus * self.gpu.price, self.replica_gpus * self.gpus[-1].price

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
        return f"{self.kinds} {self.shape.replace(',', '')} {self.mode}"

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
    machines_min: int = 1
    """Replicas lie on so many machines at least, of each kind of GPU."""

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
        first, second = self.layout.prices
        return self.prefill * first + self.decode * second

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
        return f"{self.gpus_told}: {split}, {layout.shape}"

    def has_as_much_as(self, other: Candidate) -> bool:
        """Whether it is of the same layout, with as many replicas of each role or more."""
        return (
            self.layout == other.layout
            and self.scaling == other.scaling
            and self.prefill >= other.prefill
            and self.decode >= other.decode
        )

    @property
    def gpus_told(self) -> str:
        """`20 x H100`, or `8 x H100 + 4 x L40S`."""
        layout = self.layout
        if layout.decode_gpu is None:
            return f"{self.gpus} x {layout.gpu.name}"
        each = layout.replica_gpus
        return f"{self.prefill * each} x {layout.gpu.name} + {self.decode * each} x " + (
            layout.decode_gpu.name
        )

    def gpus_of(self, kind: GpuKind) -> int:
        """GPUs of a kind."""
        layout = self.layout
        if layout.decode_gpu is None:
            return self.gpus if kind == layout.gpu else 0
        return layout.replica_gpus * (
            self.prefill * (kind == layout.gpu) + self.decode * (kind == layout.decode_gpu)
        )

    def machines(self, gpus_per_node: int) -> list[int]:
        """Machines of each kind of GPU.

        A replica of several machines takes whole ones; a smaller one never lies across two.
        """
        each = self.layout.replica_gpus
        counts = [self.replicas]
        if self.layout.decode_gpu is not None:
            counts = [self.prefill, self.decode]
        if each > gpus_per_node:
            return [count * ceil_div(each, gpus_per_node) for count in counts]
        return [
            max(ceil_div(count, max(1, gpus_per_node // each)), min(self.machines_min, count))
            for count in counts
        ]

    def values(self, gpus_per_node: int, settings: DocumentView | None = None) -> Values:
        """The keys of a configuration that make this cluster.

        `settings`: overrides of every configuration; those of machines hold for both kinds of a
        cluster that mixes them.
        """
        layout = self.layout
        shape: Document = {"tensor_parallel": layout.tensor_parallel, "place": "spread"}
        if layout.pipeline_parallel > 1:
            shape["pipeline_parallel"] = layout.pipeline_parallel
        replicas: list[Document] = [{"role": "colocated", "count": self.prefill, **shape}]
        if self.decode:
            replicas = [
                {"role": "prefill", "count": self.prefill, **shape},
                {"role": "decode", "count": self.decode, **shape},
            ]
        if self.scaling is not None:
            spare = self.replicas - self.prefill - self.decode
            replicas.append({"role": "inactive", "count": spare, **shape})
        machines = self.machines(gpus_per_node)
        nodes: Document = {
            "nodes.0.gpu": layout.gpu.name,
            "nodes.0.gpus": gpus_per_node,
            "nodes.0.count": machines[0],
        }
        if layout.decode_gpu is not None:
            own = {
                key.removeprefix("nodes.0."): value
                for key, value in (settings or {}).items()
                if key.startswith("nodes.0.")
            }
            nodes = {
                "nodes": [
                    {**own, "gpu": kind.name, "gpus": gpus_per_node, "count": count}
                    for kind, count in zip(layout.gpus, machines, strict=True)
                ]
            }
            for table, kind in zip(replicas, layout.gpus, strict=True):
                table["gpu"] = kind.name
        return {
            **{f"scheduler.{key}": value for key, value in layout.limits.items()},
            "model.dtype": layout.dtype,
            **nodes,
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

    def _scaling_values(self) -> Document:
        if self.scaling is None:
            return {}
        given = {"preset": self.scaling.system, **self.bounds}
        return {f"autoscale.{key}": value for key, value in given.items()}


def layouts_of(
    question: Question, model: ModelSpec, loads: Loads, paces: PaceOf, *, utilization: float
) -> tuple[list[Layout], list[tuple[str, str]]]:
    """Layouts that can run, and (label, reason) of those that cannot.

    `paces` gives the pace of a layout's replicas on one of its kinds of GPUs; None: not known.
    """
    found: list[Layout] = []
    refused: list[tuple[str, str]] = []
    batches = list(product(question.batch_tokens, question.batch_requests))
    for gpu, degrees, dtype in product(
        question.gpus,
        product(question.tensor_parallel, question.pipeline_parallel),
        question.dtypes,
    ):
        demand = Demand(tp=degrees[0], pp=degrees[1], dtype=dtype, utilization=utilization)
        others: list[GpuKind | None] = [None]
        if question.mixes:
            others += [other for other in question.gpus if other != gpu]
        for mode, other in product(question.modes, others):
            if other is not None and mode != MODES[1]:
                continue
            kinds = (gpu,) if other is None else (gpu, other)
            problems = [obstacle(question, model, kind, demand) for kind in kinds]
            reason = next((problem for problem in problems if problem), "")
            for tokens, requests in batches[: 1 if reason else None]:
                plain = Layout(gpu, degrees[0], dtype, mode, 1, degrees[1], tokens, requests, other)
                layout, why = (plain, reason) if reason else _paced(plain, question, loads, paces)
                if why:
                    refused.append((layout.label, why))
                else:
                    found.append(layout)
    # The cheapest by arithmetic first: its answer bounds the search over the others.
    found.sort(key=lambda layout: (guessed_cost(layout), MODES.index(layout.mode)))
    return found, refused


LOW: Final = 0.8
HIGH: Final = 1.5
"""Where clusters that meet lie, as parts of what arithmetic says."""


def guessed_cost(layout: Layout) -> float:
    """Per hour, by arithmetic."""
    first, second = layout.prices
    return layout.guess[0] * first + (layout.guess[1] * second if layout.mode == MODES[1] else 0)


def least_cost(layout: Layout) -> float:
    """Per hour, of the fewest replicas that meet by arithmetic: a part LOW of the guess."""
    counts = [max(1, math.floor(LOW * count)) if count else 0 for count in layout.guess]
    return sum(count * price for count, price in zip(counts, layout.prices, strict=True))


def _paced(layout: Layout, question: Question, loads: Loads, paces: PaceOf) -> tuple[Layout, str]:
    """The layout with what arithmetic says of it, and why it cannot meet the objectives."""
    both = [paces(layout, kind) for kind in layout.gpus]
    if both[0] is None or both[-1] is None:
        return layout, ""
    why = too_slow(layout, question.objectives, loads, paces)
    if why:
        return layout, why
    least = replicas_min(layout, paces.model, loads, question.objectives) if paces.model else 1
    if layout.mode == MODES[0]:
        guess = (math.ceil(both[0].colocated(question.objectives, loads)), 0)
    else:
        prefill = both[0].split(question.objectives, loads)[0]
        decode = both[-1].split(question.objectives, loads)[1]
        guess = (math.ceil(prefill), max(1, math.ceil(decode)))
    guess = (max(guess[0], least), guess[1])
    return msgspec.structs.replace(layout, replicas_min=least, guess=guess), ""


def too_slow(layout: Layout, objectives: Sequence[Objective], loads: Loads, paces: PaceOf) -> str:
    """Why a request alone on a layout's replicas misses an objective; empty if it does not."""
    first, last = (paces(layout, layout.gpus[at]) for at in (0, -1))
    if first is None or last is None:
        return ""
    firsts = [one for one in objectives if one.metric != "tpot"]
    steps = [one for one in objectives if one.metric != "ttft"]
    return first.obstacle(firsts, loads) or last.obstacle(steps, loads)


class PaceOf(Protocol):
    """What arithmetic says of a layout's replicas."""

    model: ModelSpec | None
    """Where products never beat the GPU's peak (the roofline backend): the model."""

    def __call__(self, layout: Layout, kind: GpuKind) -> Pace | None: ...


def obstacle(question: Question, model: ModelSpec, gpu: GpuKind, demand: Demand) -> str:
    """Why such a replica cannot start; empty if it can."""
    tensor_parallel, pipeline_parallel = demand.tp, demand.pp
    if pipeline_parallel > model.layers:
        return f"{model.layers} layers make no {pipeline_parallel} stages"
    if model.heads % tensor_parallel:
        return f"{model.heads} attention heads cannot be shared by {tensor_parallel} GPUs"
    if tensor_parallel > question.gpus_per_node:
        return f"a machine has {question.gpus_per_node} GPUs"
    if tensor_parallel * pipeline_parallel > question.gpus_max:
        return f"a replica needs more GPUs than --max-gpus {question.gpus_max}"
    if gpu.count_max and tensor_parallel * pipeline_parallel > gpu.count_max:
        return f"there are {gpu.count_max} GPUs"
    try:
        engine_plan(model, gpu.spec.memory_gib, demand)
    except InputError as error:
        return error.problem
    return ""


def replicas_min(
    layout: Layout, model: ModelSpec, loads: Loads, objectives: Sequence[Objective]
) -> int:
    """The least number of replicas that can compute the prompts in time (see the module)."""
    least = 1
    if loads.is_shared:
        return least
    tables = sizes.embedding_params(model) + sizes.head_params(model)
    per_token = _FLOP_PER_PARAMETER * (sizes.active_parameter_count(model) - tables)
    peak = layout.replica_gpus * max(layout.gpu.spec.peak_flops(dtype) for dtype in UNITS)
    for objective in objectives:
        if objective.metric != "ttft":
            continue
        counted = math.floor(len(loads.prompts) * int(objective.at[1:]) / 100)
        flop = float(loads.prompts[:counted].sum()) * per_token
        seconds = loads.span_s + objective.limit_ms / 1000
        least = max(least, math.ceil(flop / (peak * seconds) * (1 - 1e-9)))
    return least
