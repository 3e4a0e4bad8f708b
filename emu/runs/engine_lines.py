"""What a run says of its engines: their names, and how well the first one is known, in one line.

The distribution of the engine's constants (posterior of a learned engine, else the prior of
measured runs) is carried through one step: the decodes that run on average, and the same step with
one prompt. Intervals of every figure come from draws (`emu run --draws N`).
"""

from __future__ import annotations

from math import log, sqrt
from operator import mul
from typing import TYPE_CHECKING, Final

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


def engine_line(config: Config, plan: Plan, summary: Summary) -> str:
    """The engines by name and version, and how well the first one is known."""
    labels = ", ".join(dict.fromkeys(replica.engine_label for replica in plan.replicas))
    known = uncertainty_line(config, plan, summary)
    return f"{labels}; {known}" if known else labels


def served_lines(plan: Plan) -> list[str]:
    """`Qwen/Qwen3-8B, weights bfloat16, KV bfloat16` for each model and pair of types."""
    found = {
        f"{replica.model.name}, weights {sizes.weights_told(replica.model, replica.dtype)}, "
        f"KV {replica.kv_dtype}": None
        for replica in plan.replicas
    }
    return list(found)


def uncertainty_line(config: Config, plan: Plan, summary: Summary) -> str:
    """`± 6 % TPOT, ± 15 % TTFT (90 %): prior of ...`; empty where there is no engine."""
    from emu.cluster.backends import make_latency
    from emu.latency.corrected import CorrectedBackend
    from emu.latency.posterior import METRICS, PARAMETERS, known_engine, plain_values_of

    replica = plan.replicas[0]
    latency, bound = replica.latency, replica.bound
    if not summary.completed or bound is None:
        return ""
    engine = bound.constants
    known = known_engine(
        engine, bound.learned, replica.gpu.name, replica.model.name, latency.backend
    )
    backend = make_latency(replica.latency_context(config))
    if backend.foreign:
        return ""
    if isinstance(backend, CorrectedBackend):
        backend = backend.inner
    here = plain_values_of(engine)
    shape = _typical(summary, replica, len(plan.replicas))
    front_ns = engine.batch_wait_ns + engine.output_ns if replica.has_front_end else 0
    base = _times(backend, engine, here, shape, front_ns)
    slopes: list[list[float]] = [[], []]
    for index, parameter in enumerate(PARAMETERS):
        moved = here.copy()
        moved[index] += parameter.step
        there = _times(backend, engine, moved, shape, front_ns)
        for slope, after, before in zip(slopes, there, base, strict=True):
            slope.append((log(after) - log(before)) / parameter.step)
    posterior = known.posterior
    shift = [mean - value for mean, value in zip(posterior.mean, here, strict=True)]
    halves = []
    for metric, slope in zip(METRICS, slopes, strict=True):
        off = sum(map(mul, slope, shift))
        spread = sum(
            of_one * sum(map(mul, row, slope))
            for of_one, row in zip(slope, posterior.covariance, strict=True)
        )
        halves.append(100 * (abs(off) + _Z90 * sqrt(spread + posterior.noise[metric] ** 2)))
    return (
        f"mean TTFT ± {halves[0]:.0f} %, TPOT ± {halves[1]:.0f} % ({known.source}; "
        "--draws N for intervals)"
    )


def _typical(summary: Summary, replica: ReplicaPlan, replicas: int) -> tuple[int, int, int]:
    """(decodes that run on average, their history, new tokens of a prompt)."""
    span_s = max(summary.duration, 1e-9)
    in_flight = summary.completed * summary.statistic("mean", "e2el") / 1000 / span_s / replicas
    count = max(1, min(replica.scheduler.requests_max, round(in_flight)))
    prompt = max(1, round(summary.total_input_tokens / summary.completed))
    output = summary.total_output_tokens / summary.completed
    return count, round(prompt + output / 2), min(prompt, replica.scheduler.tokens_max)


def _times(
    backend: LatencyBackend,
    engine: EngineModel,
    values: list[float],
    typical: tuple[int, int, int],
    front_ns: int,
) -> tuple[float, float]:
    """(TTFT, TPOT) of the typical step with these constants, ns."""
    from emu.latency.corrected import CorrectedBackend
    from emu.latency.posterior import with_values

    count, history, prompt = typical
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
        front_ns += drawn.intake_ns + count * drawn.output_event_ns // 2
    return _STEPS_BEFORE * step_ns + own_ns + front_ns, step_ns
