"""What drafts add to an iteration, on top of any backend. Pure."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.catalogue.sizes import Draft
from emu.latency.base import BatchShape, LatencyBackend, Verify, stepped_decode_run
from emu.latency.roofline import RooflineBackend
from emu.units import NS_PER_S, ceil_div

# --------------------------------------------------------------------------------------------------
# Speculative decoding: the target's step, then the drafter's passes.
#
# The target's backend costs the verification itself (`BatchShape.verify`). A drafter of layers
# passes first over all tokens of the step, because it keeps KV of its own for every token, and then
# k - 1 times over one token of each sequence that gets drafts, each pass with its rows of logits.
# N-grams are looked up on the host and cost what the configuration says. Launch gaps between passes
# are not modeled.


class DraftPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed about drafting on one kind of replica."""

    tokens: int
    """Drafts of a sequence for each step."""
    step_ns: int
    """Of all drafting in a step; -1 = the passes of `passes`."""


class SpeculativeBackend:
    """Implements `LatencyBackend` for a replica that speculates, on one stage."""

    foreign = False
    monotone_decode = False

    def __init__(
        self, inner: LatencyBackend, plan: DraftPlan, passes: RooflinePasses | None = None
    ) -> None:
        """`passes` None: drafting costs `plan.step_ns`."""
        assert passes is not None or plan.step_ns >= 0
        self.inner = inner
        self.name = inner.name
        self.plan = plan
        self.first_use_ns = getattr(inner, "first_use_ns", ())
        self._passes = passes

    def draft_ns(self, shape: BatchShape) -> int:
        """Drafting after a step of this shape; 0 where the shape has no speculation."""
        verify = shape.verify
        if verify is None:
            return 0
        if self.plan.step_ns >= 0 or self._passes is None:
            return self.plan.step_ns if verify.drafting else 0
        total = self._passes.pass_ns(shape)
        if verify.drafting:
            for number in range(1, self.plan.tokens):
                total += self._passes.pass_ns(_one_token_each(verify, number))
        return total

    def iteration_ns(self, shape: BatchShape) -> int:
        """Verification, and drafting for the next step."""
        return self.inner.iteration_ns(shape) + self.draft_ns(shape)

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """The one stage."""
        return (self.iteration_ns(shape),)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Successive iterations without drafts, one by one."""
        return stepped_decode_run(self, shape, steps)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The target's components, and `draft`."""
        return {**self.inner.components_ns(shape), "draft": self.draft_ns(shape)}


def _one_token_each(verify: Verify, number: int) -> BatchShape:
    """The drafter's pass `number` (from 0) after the first: a decode of each sequence."""
    count = verify.drafting
    context = verify.drafting_context_sum + count * number
    mean = context // count
    return BatchShape(
        decode_count=count,
        decode_context_sum=context,
        decode_context_max=mean,
        decode_context_min=mean,
        sequences=count,
    )


def uniform_step(count: int, context_tokens: int, drafts: int) -> BatchShape:
    """A step of `count` equal sequences; `drafts` 0 = plain decoding."""
    shape = BatchShape(sequences=count)
    if not drafts:
        shape.decode_count = count
        shape.decode_context_sum = count * context_tokens
        shape.decode_context_max = shape.decode_context_min = context_tokens
        return shape
    tokens = count * (1 + drafts)
    context = count * context_tokens
    shape.verify = Verify(count, tokens, context, count, context + tokens)
    return shape


def stops_paying_at(
    plain: LatencyBackend,
    speculative: LatencyBackend,
    drafts: int,
    tokens_per_step: float,
    context_tokens: int,
    batch_max: int,
) -> int:
    """The smallest batch in which decoding with drafts brings fewer tokens a second; 0 = none.

    `tokens_per_step`: mean tokens of a sequence in a step. Batches up to `batch_max` are looked at.
    """
    for count in range(1, batch_max + 1):
        plain_ns = plain.iteration_ns(uniform_step(count, context_tokens, 0))
        with_drafts_ns = speculative.iteration_ns(uniform_step(count, context_tokens, drafts))
        if with_drafts_ns > tokens_per_step * plain_ns:
            return count
    return 0


class RooflinePasses:
    """A drafter's pass by the roofline: its layers, the projection in front of them, its logits."""

    def __init__(self, draft: Draft, backend: RooflineBackend) -> None:
        """`backend`: the drafter's layers as a model of their own, kernels alone."""
        self._backend = backend
        hidden = draft.spec.hidden
        self._inputs = ceil_div(draft.input_params, hidden * draft.tensor_parallel)
        self._hidden = hidden

    def pass_ns(self, shape: BatchShape) -> int:
        """One pass over the tokens of a batch; logits of the last token of each sequence only."""
        own = BatchShape(
            shape.prefill_new,
            shape.prefill_context,
            shape.decode_count,
            shape.decode_context_sum,
            shape.decode_context_max,
            shape.decode_context_min,
            shape.sequences,
        )
        verify = own.verify = shape.verify
        if verify is not None:  # unlike the target, it needs no logits of the drafts
            own.sequences -= verify.tokens - verify.count
        total = self._backend.iteration_ns(own)
        if self._inputs:
            costs = self._backend.costs
            tokens = max(1, shape.new_tokens)
            seconds = costs.ops.gemm_s(tokens, self._inputs, self._hidden, costs.plain)
            total += round(seconds * NS_PER_S)
        return total
