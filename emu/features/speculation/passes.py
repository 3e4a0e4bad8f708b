"""What the drafter's passes take behind each step. Pure."""

from __future__ import annotations

from typing import ClassVar, final

from emu.catalogue.drafts import Draft
from emu.latency.base import BatchShape, Verify
from emu.latency.roofline import RooflineBackend
from emu.units import NS_PER_S, ceil_div


@final
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


@final
class DraftPricer:
    """Prices the drafter's passes behind each step."""

    component: ClassVar[str] = "draft"

    def __init__(
        self, tokens: int, step_ns: int, passes: RooflinePasses | None = None, topk: int = 1
    ) -> None:
        """`tokens`: drafts of a sequence for each step, levels of a tree. `step_ns`: of all
        drafting in a step; -1 = the passes. `topk`: candidates of each draft."""
        assert passes is not None or step_ns >= 0
        self._tokens = tokens
        self._topk = topk
        self._step_ns = step_ns
        self._passes = passes

    def added_ns(self, shape: BatchShape) -> int:
        """Drafting after a step of this shape; 0 where the shape has no speculation."""
        verify = shape.verify
        if verify is None:
            return 0
        if self._step_ns >= 0 or self._passes is None:
            return self._step_ns if verify.drafting else 0
        total = self._passes.pass_ns(shape)
        if verify.drafting:
            for number in range(1, self._tokens):
                total += self._passes.pass_ns(_one_token_each(verify, number, self._topk))
        return total


def _one_token_each(verify: Verify, number: int, topk: int) -> BatchShape:
    """The drafter's pass `number` (from 0) after the first: a decode of each sequence's `topk`
    candidates."""
    count = verify.drafting * topk
    context = verify.drafting_context_sum * topk + count * number
    mean = context // count
    return BatchShape(
        decode_count=count,
        decode_context_sum=context,
        decode_context_max=mean,
        decode_context_min=mean,
        sequences=count,
    )
