"""What a drafter takes behind a step, and what the step itself takes with drafts in it.

Restates docs/lab/speculation.md for chains of drafts and trees in vLLM's scheduler, formed one step
after the other: a step verifies all drafts at once; then the drafter passes over all tokens of the
step, and once more over one token of each candidate for every further draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from emu.apps.chaos.truth.made_times import made_of
from emu.apps.chaos.truth.step_times import StepTimes, is_restated
from emu.apps.chaos.truth.steps import Step
from emu.apps.chaos.truth.tape import keys_of
from emu.catalogue.drafts import Draft
from emu.cluster.plan import Plan, ReplicaPlan
from emu.config.schema import Config, VllmTable
from emu.documents import DocumentView
from emu.latency.context import LatencyContext


class DrafterTimes:
    """Drafts of one kind of replica, whose steps are `target`."""

    def __init__(self, context: LatencyContext, asked: DocumentView, draft: Draft | None) -> None:
        """`asked`: what the configuration says of drafts."""
        self._target = made_of(context)
        self._step_us, self._topk = asked["draft_step_us"], asked["eagle_topk"]
        self._levels, self._draft = asked["num_speculative_tokens"], draft
        self._passes: StepTimes | None = None
        if draft is not None and self._step_us < 0:
            self._passes = made_of(_alone(context, draft))

    def stages(self, step: Step, drafting: int, seen: int) -> list[float]:
        """The step and the drafts behind it, ns.

        `drafting`: sequences that get drafts, which will have `seen` tokens by then.
        """
        found = self._target.stages(step)
        if self._passes is not None:
            found[-1] += self._pass(step._replace(drafts=0))
            count = drafting * self._topk
            read = seen * self._topk
            for _ in range(self._levels - 1 if drafting else 0):
                read += count
                found[-1] += self._pass(Step((), count, read + count, count, 0, count))
        elif drafting and self._step_us > 0:
            found[-1] += round(1000 * self._step_us)
        return found

    def _pass(self, step: Step) -> float:
        """Its layers, what leads into them, and a row of logits for each sequence."""
        passes, draft = self._passes, self._draft
        assert passes is not None and draft is not None
        total = sum(passes.stages(step))
        columns = -(-draft.input_params // (draft.spec.hidden * draft.tensor_parallel))
        if columns:
            tokens = max(1, step.queries + sum(new for _, new in step.prompts))
            total += passes.leads_in(tokens, columns)
        return total


def _alone(context: LatencyContext, draft: Draft) -> LatencyContext:
    """The drafter on the target's GPUs: its kernels, without an engine around them."""
    return msgspec.structs.replace(
        context,
        model=draft.spec,
        tensor_parallel=draft.tensor_parallel,
        pipeline_parallel=1,
        expert_parallel=min(context.expert_parallel, draft.tensor_parallel),
        engine=None,
        parts=(),
    )


def _drafter_of(replica: ReplicaPlan, context: LatencyContext) -> DrafterTimes | None:
    """The drafts of a replica that has nothing else besides; None where not all is restated."""
    asked, draft = keys_of(replica.scheduler).get("speculative_config"), replica.draft
    if asked is None or len(context.parts) != 1 or not is_restated(context):
        return None
    if not isinstance(replica.scheduler, VllmTable):
        return None
    is_odd = draft is not None and (draft.expert_parallel or draft.spec.experts)
    if is_odd or (draft is not None and not is_restated(_alone(context, draft))):
        return None
    return DrafterTimes(context, keys_of(asked), draft)


def step_with_drafts(
    members: Sequence[Sequence[int]],
    verified: Sequence[int],
    reached: Callable[[int], int],
) -> tuple[Step, int, int]:
    """The step, the sequences that get drafts behind it, and the tokens that these have.

    `verified`: sequences, their tokens, and what they had before. `reached`: prompt and outputs of
    a row so far.
    """
    count, tokens, context = verified
    prompts, decodes, seen = [], 0, 0
    for row, before, new in members:
        if new == 1:
            decodes += 1
            seen += before + 1
        elif before + 1 < reached(row):
            prompts.append((before, new))
    drafting = [before + new for row, before, new in members if before + new >= reached(row)]
    step = Step(
        tuple(prompts),
        decodes + count,
        seen + context + tokens,
        len(members),
        0,
        decodes + tokens,
        count,
        tokens - count,
    )
    return step, len(drafting), sum(drafting)


def drafters_of(config: Config, plan: Plan) -> dict[int, DrafterTimes]:
    """Drafts by replica, where all is restated."""
    found = {one.replica_id: _drafter_of(one, one.latency_context(config)) for one in plan.replicas}
    return {replica: times for replica, times in found.items() if times is not None}
