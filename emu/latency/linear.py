"""The linear backend: a cost from explicit coefficients. For teaching and for golden vectors.

Each stage of an iteration takes

    base + per_token x (tokens computed now) + per_context x (tokens that existed before)

summed over the whole batch (the formula of the reference schedules made with Vidur), to the
nearest nanosecond. With `prefill_tokens_per_s` a batch without decodes takes tokens / rate
instead, on each stage. A batch that runs a part of the layers takes that part of the time.

Coefficients are kept as whole picoseconds, so that every sum is an exact integer and stepping
and leaping agree to the nanosecond.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from emu.latency.base import BatchShape

_PS_PER_US = 1_000_000
_HALF_NS_PS = 500


class LinearBackend:
    """Implements `LatencyBackend`. Coefficients in microseconds, rounded to a picosecond."""

    name = "linear"
    foreign = False
    monotone_decode = True

    def __init__(
        self,
        base_us: float,
        per_token_us: float,
        per_context_token_us: float,
        prefill_tokens_per_s: float = 0.0,
        *,
        stages: int = 1,
        layers: int = 1,
    ) -> None:
        """`stages` pipeline stages, each of which costs the formula; `layers` of the model."""
        self.base_ps = round(base_us * _PS_PER_US)
        self.token_ps = round(per_token_us * _PS_PER_US)
        self.context_ps = round(per_context_token_us * _PS_PER_US)
        self.prefill_token_ps = round(1e12 / prefill_tokens_per_s) if prefill_tokens_per_s else 0
        self.stages = stages
        self.layers = layers

    def _parts_ps(self, shape: BatchShape) -> tuple[int, int, int]:
        """Base, prefill part and decode part of one stage's cost."""
        new = sum(shape.prefill_new)
        count, context = shape.decode_count, shape.decode_context_sum
        if shape.verify is not None:
            count += shape.verify.tokens
            context += shape.verify.context_sum
        if self.prefill_token_ps and not count:
            return 0, new * self.prefill_token_ps, 0
        prefill = new * self.token_ps + sum(shape.prefill_context) * self.context_ps
        decode = count * self.token_ps + context * self.context_ps
        return self.base_ps, prefill, decode

    def _one_stage_ns(self, shape: BatchShape) -> int:
        cost_ps = sum(self._parts_ps(shape))
        if shape.layers >= 0:
            cost_ps = cost_ps * shape.layers // self.layers
        return max(1, (cost_ps + _HALF_NS_PS) // 1000)

    def iteration_ns(self, shape: BatchShape) -> int:
        """Duration of one iteration over all stages."""
        return self.stages * self._one_stage_ns(shape)

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """The same duration on every stage."""
        return (self._one_stage_ns(shape),) * self.stages

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Cumulative ends of successive decode iterations, equal to stepping."""
        first_ps = sum(self._parts_ps(shape))
        costs = np.arange(steps, dtype=np.int64)
        costs *= shape.decode_count * self.context_ps
        costs += first_ps
        if shape.layers >= 0:
            costs *= shape.layers
            costs //= self.layers
        costs += _HALF_NS_PS
        costs //= 1000
        np.maximum(costs, 1, out=costs)
        costs *= self.stages
        ends: NDArray[np.int64] = np.cumsum(costs, out=costs)
        return ends

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """Base as CPU overhead, the rest by phase of its tokens."""
        total = self.iteration_ns(shape)
        parts = self._parts_ps(shape)
        whole = max(1, sum(parts))
        prefill = total * parts[1] // whole
        decode = total * parts[2] // whole
        return {
            "attention_prefill": prefill,
            "attention_decode": decode,
            "cpu_overhead": total - prefill - decode,
        }
