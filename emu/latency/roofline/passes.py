"""A drafter's pass by the roofline: its layers, the projection in front of them, its logits."""

from __future__ import annotations

from emu.catalogue.draft import Draft
from emu.latency.base import BatchShape
from emu.latency.roofline.backend import RooflineBackend
from emu.units import NS_PER_S, ceil_div


class RooflinePasses:
    """Implements `DraftPasses`."""

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
