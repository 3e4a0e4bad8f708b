"""Power of a GPU by its load: what it draws at rest, while iterations run, and for its arithmetic.

While iterations run, a GPU draws its idle power, a part of the span up to its limit for running at
all (launches, memory, links), and a part that grows with the root of the arithmetic done, as a part
of the dense half-precision peak: clocks and voltage fall as a chip gets busier. So a step of
decodes draws about half of the limit and a long prompt all of it. Both parts are fitted to eight
B200 under nine loads of two models (`python -m benchmarks.power`, which leaves out each in turn);
other GPUs are taken to draw the same parts of their own limit. Pure.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Final

from emu.catalogue.flops import ModelFlops, model_flops
from emu.units import NS_PER_S

if TYPE_CHECKING:
    from emu.catalogue.gpu import GpuSpec
    from emu.catalogue.model import ModelSpec
    from emu.replica.counters import Counters

RUNNING_PART: Final = 0.269
"""Of the span between idle power and limit: drawn whenever an iteration runs."""
ARITHMETIC_PART: Final = 0.984
"""Of the same span: times the root of FLOPs done over those of the half-precision peak."""
MEASURED: Final = ("B200-SXM-180GB",)
"""GPUs whose power stands behind the two parts."""


def running_w(gpu: GpuSpec, utilization: float, idle_w: float) -> float:
    """Draw of one GPU while iterations run that do this part of its half-precision peak."""
    span_w = max(0.0, gpu.tdp_w - idle_w)
    return idle_w + span_w * min(1.0, RUNNING_PART + ARITHMETIC_PART * sqrt(utilization))


def flops_run(spec: ModelSpec, counters: Counters) -> int:
    """FLOPs of what a metered replica has computed, on all its GPUs together."""
    flops = model_flops(spec)
    tokens = counters.prompts_run + counters.decodes_run
    seen = counters.prompt_pairs_run + counters.decode_context_run + counters.decodes_run
    return flops.token * tokens + flops.output * counters.decodes_run + _pairs(flops, tokens, seen)


def _pairs(flops: ModelFlops, tokens: int, seen: int) -> int:
    """Attention of so many tokens that see so much together; no layer sees beyond its window."""
    total = 0
    for window, chunk, each in flops.pairs:
        reach = window or chunk
        total += each * (min(seen, tokens * reach) if reach else seen)
    return total


def running_j(
    gpu: GpuSpec, spec: ModelSpec, counters: Counters, busy_ns: int, idle_w: float
) -> float:
    """Energy of a replica's GPUs above idle power. `busy_ns`: summed over them."""
    if not busy_ns:
        return 0.0
    busy_s = busy_ns / NS_PER_S
    utilization = flops_run(spec, counters) / (gpu.peak_flops("bfloat16") * busy_s)
    return (running_w(gpu, utilization, idle_w) - idle_w) * busy_s
