"""The drafter: its layers, how they are priced, and when drafts stop paying."""

from __future__ import annotations

from pathlib import Path

import msgspec

from emu.catalogue.drafts import Draft, eagle_draft, model_draft, mtp_draft
from emu.catalogue.lookup import lookup_model, model_from_file
from emu.catalogue.model import ModelSpec
from emu.config.schema import RooflineTable
from emu.errors import InputError
from emu.features.speculation.keys import KEY, SpeculativeTable
from emu.features.speculation.passes import DraftPricer, RooflinePasses
from emu.latency.added import Pricer
from emu.latency.base import BatchShape, LatencyBackend, Verify
from emu.latency.context import LatencyContext
from emu.latency.make_roofline import make_roofline
from emu.latency.roofline import RooflineBackend


def draft_of(drafts: SpeculativeTable, target: ModelSpec, tp: int, source: str) -> Draft | None:
    """The drafter's layers; None for n-grams, which have none."""
    here = KEY
    own = _own_model(drafts.model, source, f"{here}.model") if drafts.model else None
    if drafts.method == "mtp":
        if not target.mtp_layers:
            problem = f"{target.name} has no layers for multi-token prediction"
            raise InputError(source, None, f"{here}.method", problem)
        return mtp_draft(target, tp)
    if drafts.method == "draft_model":
        assert own is not None
        if own.is_hybrid or own.special_layers:
            problem = f"{own.name} has unlike layers, which emu does not draft with"
            raise InputError(source, None, f"{here}.model", problem)
        if own.vocab != target.vocab:
            problem = f"{own.name} has {own.vocab} tokens, {target.name} has {target.vocab}"
            raise InputError(source, None, f"{here}.model", problem)
        return model_draft(own, drafts.draft_tensor_parallel_size or tp)
    if drafts.method in ("eagle", "eagle3"):
        return eagle_draft(target, own, 3 if drafts.method == "eagle3" else 2, tp)
    return None


def _own_model(name: str, source: str, field: str) -> ModelSpec:
    if name.endswith(".json") or ("/" in name and Path(name).exists()):
        return model_from_file(Path(name))
    return lookup_model(name, source, field)


class DraftPart(msgspec.Struct, frozen=True):
    """How a replica drafts: what its pricer is made from."""

    table: SpeculativeTable
    draft: Draft | None
    """The drafter's layers, if it has any."""

    def pricer(self, context: LatencyContext) -> Pricer:
        """The drafter's passes on such a replica, or what the configuration says of them."""
        engine = context.engine
        if engine is not None and engine.is_corrected:
            problem = f"its corrections know no drafts ({KEY})"
            raise InputError(context.source, None, "engine.learned", problem)
        drafts = self.table
        step_ns = round(drafts.draft_step_us * 1000) if drafts.draft_step_us >= 0 else -1
        passes = None
        if step_ns < 0 and self.draft is None:
            step_ns = 0  # n-grams are looked up beside the GPU's work
        if step_ns < 0 and self.draft is not None:
            passes = RooflinePasses(self.draft, _roofline_of(context, self.draft))
        levels = drafts.num_speculative_tokens
        return DraftPricer(levels, step_ns, passes, drafts.eagle_topk)


def _roofline_of(context: LatencyContext, draft: Draft) -> RooflineBackend:
    """The kernels of a drafter's pass; the engine's part of the step is the target's."""
    table = context.table
    assert isinstance(table, RooflineTable)
    ranks = min(context.expert_parallel, draft.tensor_parallel)
    if draft.expert_parallel and draft.spec.experts is not None:
        ranks = draft.expert_parallel
    alone = msgspec.structs.replace(
        context,
        model=draft.spec,
        tensor_parallel=draft.tensor_parallel,
        pipeline_parallel=1,
        expert_parallel=ranks,
        shared_experts=context.shared_experts if ranks > draft.tensor_parallel else None,
        table=msgspec.structs.replace(table, host_overhead=False),
        engine=None,
        parts=(),
    )
    return make_roofline(alone, table, has_engine=False)


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
