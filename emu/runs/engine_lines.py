"""What a run says of its engines: their names, and how well they are known, in one line.

The distribution of the engine's constants (posterior of a learned engine, else the prior of
measured runs) is carried through one step: the decodes that run on average, and the same step with
one prompt. Intervals of every figure come from draws (`emu run --draws N`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt
from operator import mul
from typing import TYPE_CHECKING, Final

import msgspec

from emu.catalogue import sizes
from emu.cluster.plan import Plan, ReplicaPlan
from emu.config.schema import Config
from emu.latency.base import BatchShape, LatencyBackend
from emu.report.summary import Summary

if TYPE_CHECKING:
    from emu.latency.engine import EngineModel

_Z90: Final = 1.6449
_STEPS_BEFORE: Final = 1.5
"""Steps that a request waits for before its own, on average."""


def engine_line(plan: Plan, known: str) -> str:
    """The engines by name and version, and how well they are known."""
    labels = ", ".join(dict.fromkeys(replica.engine_label for replica in plan.replicas))
    return f"{labels}; {known}" if known else labels


def served_lines(plan: Plan) -> list[str]:
    """`Qwen/Qwen3-8B, weights bfloat16, KV bfloat16` for each model and pair of types."""
    found = {
        f"{replica.model.name}, weights {sizes.weights_told(replica.model, replica.dtype)}, "
        f"KV {replica.kv_dtype}": None
        for replica in plan.replicas
    }
    return list(found)


class Spread(msgspec.Struct, frozen=True):
    """How far TTFT and TPOT may be off, by arithmetic at the shipped (or learned) constants."""

    halves: dict[str, float]
    """Metric (`ttft`, `tpot`) -> per cent, 90 %; of means."""
    parts: dict[str, dict[str, float]]
    """Metric -> constant of the engine -> its part of the variance; "rest" = what is left with any
    constants."""
    source: str
    """What the distribution of the constants rests on."""


def uncertainty_line(config: Config, plan: Plan, summary: Summary) -> str:
    """`mean TTFT ± 15 %, TPOT ± 6 % (prior of ...)`; empty where there is no engine."""
    if not summary.completed:
        return ""
    shape = typical_of(
        plan,
        in_flight=summary.completed
        * summary.statistic("mean", "e2el")
        / 1000
        / max(summary.duration, 1e-9),
        prompt_tokens=summary.total_input_tokens / summary.completed,
        output_tokens=summary.total_output_tokens / summary.completed,
    )
    return known_line(config, plan, shape)


def known_line(config: Config, plan: Plan, shape: tuple[int, int, int]) -> str:
    """The same for a typical step (see `spread`).

    First tokens are those of replicas that compute prompts, later ones of those that decode: the
    least known of each counts, of all kinds of GPU and engine.
    """
    kinds: dict[tuple[str, str, str], int] = {}
    for at, replica in enumerate(plan.replicas):
        kinds.setdefault((replica.role, replica.gpu.name, replica.engine_label), at)
    found = [(role, spread(config, plan, shape, at)) for (role, _, _), at in kinds.items()]
    known = [(role, one) for role, one in found if one is not None]
    if not known or len(known) < len(found):
        return ""
    sources = dict.fromkeys(part for _, one in known for part in one.source.split("; "))
    halves = [_widest(known, *which) for which in (("ttft", "decode"), ("tpot", "prefill"))]
    return (
        f"mean TTFT ± {halves[0]:.0f} %, TPOT ± {halves[1]:.0f} % "
        f"({'; '.join(sources)}; --draws N for intervals)"
    )


def _widest(known: Sequence[tuple[str, Spread]], metric: str, other_role: str) -> float:
    """The least known of a metric, per cent, of replicas of every role but one."""
    widths = [one.halves[metric] for role, one in known if role != other_role]
    return max(widths or [one.halves[metric] for _, one in known])


def spread(config: Config, plan: Plan, shape: tuple[int, int, int], at: int = 0) -> Spread | None:
    """How well replica `at` is known, at a typical step; None where it has no engine.

    `shape`: (decodes that run on average, their history, new tokens of a prompt).
    """
    from emu.cluster.backends import make_latency
    from emu.config.tables.latency import AstraTable
    from emu.latency.coefficients import is_measured, kernels_of
    from emu.latency.corrected import CorrectedBackend
    from emu.latency.posterior import METRICS, PARAMETERS, known_engine, plain_values_of

    replica = plan.replicas[at]
    latency, bound = replica.latency, replica.bound
    if bound is None:
        return None
    if isinstance(latency, AstraTable) and (latency.binary or latency.replay):
        return None  # a program, or its counts, would be asked for a batch that the run has not
    engine = bound.constants
    known = known_engine(
        engine, bound.learned, replica.gpu.name, replica.model.name, latency.backend
    )
    backend = make_latency(replica.latency_context(config))
    if backend.foreign:
        return None
    if isinstance(backend, CorrectedBackend):
        backend = backend.inner
    engine = msgspec.structs.replace(engine, stream_interval=bound.model.stream_interval)
    here = plain_values_of(engine)
    front_ns = engine.batch_wait_ns + engine.output_ns if replica.front_end else 0
    base = _times(backend, engine, here, shape, front_ns)
    slopes: list[list[float]] = [[], []]
    for index, parameter in enumerate(PARAMETERS):
        moved = here.copy()
        moved[index] += parameter.step
        there = _times(backend, engine, moved, shape, front_ns)
        for slope, after, before in zip(slopes, there, base, strict=True):
            slope.append((log(after) - log(before)) / parameter.step)
    posterior = known.posterior
    kernels, source = 0.0, known.source
    if latency.backend == "roofline" and not is_measured(replica.gpu, bound.engine.name):
        kernels = kernels_of(replica.gpu).spread / 100 / _Z90
        like = replica.gpu.like
        behind = f"its kernels are {like}'s" if like else "no kernel behind its times"
        source += f"; {replica.gpu.name} is unmeasured: {behind}"
    shift = [mean - value for mean, value in zip(posterior.mean, here, strict=True)]
    halves, parts = {}, {}
    for metric, slope in zip(METRICS, slopes, strict=True):
        off = sum(map(mul, slope, shift))
        each = [
            of_one * sum(map(mul, row, slope))
            for of_one, row in zip(slope, posterior.covariance, strict=True)
        ]
        rest = posterior.noise[metric] ** 2 + kernels**2
        halves[metric] = 100 * (abs(off) + _Z90 * sqrt(sum(each) + rest))
        whole = sum(abs(one) for one in each) + rest
        names = [parameter.name for parameter in PARAMETERS]
        parts[metric] = {name: abs(one) / whole for name, one in zip(names, each, strict=True)}
        parts[metric]["rest"] = rest / whole
    return Spread(halves, parts, source)


def typical_of(
    plan: Plan, *, in_flight: float, prompt_tokens: float, output_tokens: float
) -> tuple[int, int, int]:
    """The typical step of a cluster with `in_flight` requests at once (see `spread`)."""
    replicas = len(plan.replicas)
    return typical(plan.replicas[0], in_flight / replicas, prompt_tokens, output_tokens)


def typical(
    replica: ReplicaPlan, in_flight: float, prompt_tokens: float, output_tokens: float
) -> tuple[int, int, int]:
    """The typical step of a replica with `in_flight` requests (see `spread`)."""
    count = max(1, min(replica.scheduler.requests_max, round(in_flight)))
    whole = max(1, round(prompt_tokens))
    return count, round(whole + output_tokens / 2), min(whole, replica.scheduler.tokens_max)


def _times(
    backend: LatencyBackend,
    engine: EngineModel,
    values: list[float],
    shape_of: tuple[int, int, int],
    front_ns: int,
) -> tuple[float, float]:
    """(TTFT, TPOT) of the typical step with these constants, ns."""
    from emu.latency.corrected import CorrectedBackend
    from emu.latency.posterior import with_values

    count, history, prompt = shape_of
    drawn = with_values(engine, values)
    corrected = CorrectedBackend(backend, drawn)
    shape = BatchShape(
        decode_count=count,
        decode_context_sum=count * history,
        decode_context_max=history,
        decode_context_min=history,
        sequences=count,
    )
    step_ns = corrected.iteration_ns(shape)
    shape.prefill_new, shape.prefill_context, shape.sequences = [prompt], [0], count + 1
    own_ns = corrected.iteration_ns(shape)
    if front_ns:
        front_ns += drawn.intake_ns + count * drawn.output_event_ns // (2 * drawn.stream_interval)
    return _STEPS_BEFORE * step_ns + own_ns + front_ns, step_ns
