"""Points emulated with what is known without their model or their GPU.

Owns which constants of emu were fitted to measured points, and how they are fitted again: one step
of weighted least squares from the shipped values (`emu/apps/fidelity/fit.py`), for each engine on
its points of other models or GPUs. How TTFT and TPOT depend on a constant is taken from short
emulations with the constant changed. A constant that none of these points shows takes the value
that it would have had without any of them.

With a GPU left out, the kernels measured on it are left out, too: those of its nearest relative of
the same architecture stand in for them, relative to the peaks of both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from emu.apps.fidelity.fit import columns, least_squares
from emu.apps.fidelity.points.cases import (
    HANDOVER,
    RANDOM_TEXT_US,
    SGLANG_HANDOVER_US,
    TOKEN,
    Emulated,
    Job,
    model_of,
)
from emu.catalogue.lookup import lookup_gpu
from emu.catalogue.model import ModelSpec
from emu.engines.registry import find_engine
from emu.latency.coefficients import is_measured

SIGMAS: Final = {"ttft_ms": 0.15, "tpot_ms": 0.05}
"""Relative error of a measured figure: what equal points differ by, and emu's formulas beside the
constants."""
SHARED: Final = {"ttft_ms": 0.1, "tpot_ms": 0.05}
"""The same of all points of a model on a GPU together: kernels, and what is not stated."""
_STEP: Final = 0.25
"""Of a constant, for its finite difference."""
_TOKENS_MAX: Final = 100_000
"""Clients times output tokens up to which a point is fitted to."""
_ALONE: Final = "prefill and decode apart were measured with no other model"
_MEDIAN: Final = "the median of all"
_RELATIVES: Final = (
    ("H100-SXM5-80GB", "H200-SXM-141GB"),
    ("B200-SXM-180GB", "B300-SXM-288GB"),
    ("GB200", "GB300"),
)
"""GPUs of one architecture beside hosts of one kind."""


class Constant(msgspec.Struct, frozen=True):
    """One constant of an engine that measured points have given."""

    name: str
    """A field of `EngineModel`, or a key of a configuration."""
    unseen: float
    """Its value where no point shows it."""
    width: float
    """How far from there it may lie (standard deviation)."""
    shows: Callable[[Job, ModelSpec], bool]
    """Whether a point may depend on it."""


def _always(job: Job, model: ModelSpec) -> bool:
    return True


def _is_random(job: Job, model: ModelSpec) -> bool:
    return job.point.is_random_text


def _is_apart(job: Job, model: ModelSpec) -> bool:
    return len(job.point.servers) > 1


def _is_latent(job: Job, model: ModelSpec) -> bool:
    return model.latent is not None


def _is_generated(job: Job, model: ModelSpec) -> bool:
    return _is_latent(job, model) and lookup_gpu(job.point.gpu).architecture == "blackwell"


def _has_experts(job: Job, model: ModelSpec) -> bool:
    return model.experts is not None


def _has_states(job: Job, model: ModelSpec) -> bool:
    return bool(model.special_layers)


def _has_grace(job: Job, model: ModelSpec) -> bool:
    return job.point.gpu.startswith("GB")


def _is_hopper(job: Job, model: ModelSpec) -> bool:
    return lookup_gpu(job.point.gpu).architecture == "hopper"


_MS: Final = 1e6
_LAYER_NS: Final = 1.3 * _MS
"""Calls of a kind of layer that no point shows: taken to be those of the other kinds, latent
attention and experts (`emu/latency/engine.py`)."""
_CALLS: Final = (
    # A module called eagerly on vLLM takes 80 us (`EngineModel.eager_call_ns`).
    Constant("eager_call_ns", 0.08 * _MS, 0.08 * _MS, _always),
    Constant("eager_latent_ns", _LAYER_NS, 2 * _MS, _is_latent),
    Constant("eager_experts_ns", _LAYER_NS, 2 * _MS, _has_experts),
    Constant("grace_calls", 1.0, 1.0, _has_grace),
)
_TEXT: Final = Constant(TOKEN, 0.5, 10.0, _is_random)
"""A token of natural language takes 0.5 us."""
CONSTANTS: Final[Mapping[str, tuple[Constant, ...]]] = {
    "vllm": (_TEXT,),
    "sglang": (
        *_CALLS,
        Constant("eager_generated_latent_ns", _LAYER_NS, 2 * _MS, _is_generated),
        Constant("eager_state_ns", _LAYER_NS, 4 * _MS, _has_states),
        # vLLM's, whose events and lists are others.
        Constant("output_event_ns", 0.054 * _MS, 0.03 * _MS, _always),
        Constant("host_sequence_ns", 0.008 * _MS, 0.04 * _MS, _always),
        Constant("beside_prompts", 1.0, 3.0, _is_hopper),
        Constant("host_handoff_ns", 0.0, 20 * _MS, _is_apart),
        Constant(HANDOVER, 0.0, 100_000.0, _is_apart),
    ),
    "tensorrt-llm": (*_CALLS, _TEXT),
}
"""By engine. Kernels and the constants that sources state are not among them."""


class Refit(msgspec.Struct, frozen=True):
    """What an engine's constants are without a part of the points."""

    left_out: str
    engine: str
    points: int
    """Points that they were fitted to."""
    constants: dict[str, float]
    kernels: str = ""
    """The GPU whose kernels stand in for those of the one that is left out; empty: none is."""


Run = Callable[[Sequence[Job]], Iterable[Emulated]]


def without(
    jobs: Sequence[Job], found: Mapping[str, Emulated], by: str, run: Run
) -> tuple[dict[str, Emulated], list[Refit]]:
    """Every point emulated without its `by` (gpu, model), and the constants that it had.

    `found` has the points as emu emulates them, `run` emulates.
    """
    usable = [job for job in jobs if not found[job.point.point_id].refused]
    slopes = _slopes(usable, run)
    parts: defaultdict[tuple[str, str], list[Job]] = defaultdict(list)
    for job in usable:
        parts[job.point.engine, _part_of(job, by)].append(job)
    again: list[Job] = []
    alone: list[Job] = []
    refits = []
    for (engine, part), left in sorted(parts.items()):
        others = [
            job
            for key, jobs in parts.items()
            if key[0] == engine and key[1] != part
            for job in jobs
        ]
        refit = _solved(engine, part, others, found, slopes)
        like = None
        if by == "gpu":
            like = relative(part, engine)
            refit = msgspec.structs.replace(refit, kernels=like or _MEDIAN)
        refits.append(refit)
        is_known = any(len(job.point.servers) > 1 for job in others)
        for job in left:
            if by == "model" and len(job.point.servers) > 1 and not is_known:
                alone.append(job)
                continue
            again.append(msgspec.structs.replace(job, constants=refit.constants, like=like))
    emulated = {one.point_id: one for one in run(again)}
    emulated |= {j.point.point_id: Emulated(j.point.point_id, refused=_ALONE) for j in alone}
    return emulated, refits


def _part_of(job: Job, by: str) -> str:
    """What is left out with a point: its GPU, or all models of its shape."""
    if by == "gpu":
        return job.point.gpu
    model = model_of(job.point, job.configs)
    return f"{model.model_type} of {model.layers} layers, {model.hidden} wide"


def relative(gpu: str, engine: str) -> str:
    """The GPU whose kernels stand in for one that is left out; empty = the median of all."""
    for pair in _RELATIVES:
        if gpu in pair:
            other = pair[pair[0] == gpu]
            return other if is_measured(lookup_gpu(other), engine) else ""
    return ""


def shipped(engine: str) -> dict[str, float]:
    """The values of an engine's constants that emu ships."""
    model = msgspec.structs.asdict(find_engine(engine).model)
    keys = {TOKEN: RANDOM_TEXT_US[engine], HANDOVER: SGLANG_HANDOVER_US}
    return {one.name: float((model | keys)[one.name]) for one in CONSTANTS[engine]}


Slopes = dict[str, dict[str, dict[str, float]]]
"""Point -> constant -> metric -> change of log(figure) for one unit of the constant."""


def _slopes(jobs: Sequence[Job], run: Run) -> Slopes:
    """How the points that are fitted to depend on the constants that they may show."""
    fitted = [
        msgspec.structs.replace(job, is_trial=True)
        for job in jobs
        if job.point.load == "clients"
        and not job.point.is_doubtful
        and job.point.clients * job.point.output_tokens <= _TOKENS_MAX
    ]
    here = {one.point_id: one for one in run(fitted)}
    models = [model_of(job.point, job.configs) for job in fitted]
    values = {engine: shipped(engine) for engine in CONSTANTS}
    found: Slopes = {job.point.point_id: {} for job in fitted}
    for constant in sorted({one for every in CONSTANTS.values() for one in every}, key=_name):
        moved, steps = [], {}
        for job, model in zip(fitted, models, strict=True):
            engine = job.point.engine
            if constant in CONSTANTS[engine] and constant.shows(job, model):
                value = values[engine][constant.name]
                steps[job.point.point_id] = step = _STEP * value
                moved.append(
                    msgspec.structs.replace(job, constants=_typed({constant.name: value + step}))
                )
        for there in run(moved):
            base, step = here[there.point_id], steps[there.point_id]
            found[there.point_id][constant.name] = {
                metric: math.log(there.figures[metric] / base.figures[metric]) / step
                for metric in SIGMAS
            }
    return found


def _name(constant: Constant) -> str:
    return constant.name


def _solved(
    engine: str,
    part: str,
    others: Sequence[Job],
    found: Mapping[str, Emulated],
    slopes: Slopes,
) -> Refit:
    constants = CONSTANTS[engine]
    residuals, rows = [], []
    offsets: list[dict[object, float]] = []
    fitted = [job for job in others if job.point.point_id in slopes]
    for job in fitted:
        name = job.point.point_id
        for metric, sigma in SIGMAS.items():
            measured = job.point.figures[metric]
            if math.isnan(measured):
                continue
            residuals.append(math.log(found[name].figures[metric] / measured) / sigma)
            shared = metric, job.point.model, job.point.gpu
            offsets.append({shared: SHARED[metric] / sigma})
            known = slopes[name]
            rows.append([known.get(one.name, {}).get(metric, 0.0) / sigma for one in constants])
    now = shipped(engine)
    unseen = {one.name: one.unseen for one in constants}
    if not rows:
        return Refit(part, engine, 0, _typed(unseen))
    change, _ = least_squares(
        np.array(residuals),
        np.array(rows),
        columns(offsets),
        np.array(list(now.values())),
        np.array(list(unseen.values())),
        np.array([one.width for one in constants]),
    )
    values = {
        name: value + float(by) for (name, value), by in zip(now.items(), change, strict=True)
    }
    return Refit(part, engine, len(fitted), _typed(values))


def _typed(values: Mapping[str, float]) -> dict[str, float]:
    """Times in ns are whole."""
    return {k: round(v) if k.endswith("_ns") else round(v, 3) for k, v in values.items()}
