"""The running set of a scheduler whose steps verify drafts, and so bring several tokens.

A decode that has drafts computes 1 + d tokens. What is accepted of them is known at the end of
its step (`Drafting`): the leading run and one token more, which is the recovered or the bonus
token. Rejected tokens are taken off the computed ones, their slots stay with the request and are
written again. There is no cohort, because members advance by different numbers of tokens.

Where batches are formed ahead, the engine does not know at that time whether accepted drafts have
ended an output: such a request takes part in one batch more, for nothing (`overruns`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from emu.latency.base import BatchShape
from emu.request import Request
from emu.scheduling.base import Batch, Progress, ReplicaLimits, add_chunk
from emu.scheduling.cohort import RunningRequest
from emu.scheduling.ledger import Ledger
from emu.scheduling.parts import Drafting, Part
from emu.scheduling.running import RunningSet


def drafting_of(parts: Sequence[Part]) -> Drafting | None:
    """The feature whose drafts decodes verify, if a replica has one."""
    return next((part for part in parts if isinstance(part, Drafting)), None)


def add_verified(shape: BatchShape, new_tokens: int, context_tokens: int) -> None:
    """One more decode with so many new tokens, its drafts among them."""
    verify = shape.verify
    if verify is None or new_tokens == 1:
        add_chunk(shape, new_tokens, context_tokens)
        return
    verify.count += 1
    verify.tokens += new_tokens
    verify.context_sum += context_tokens


@final
class VerifyingSet(RunningSet):
    """Admitted requests whose steps verify drafts."""

    def __init__(
        self,
        ledger: Ledger,
        limits: ReplicaLimits,
        drafting: Drafting,
        *,
        frees_late: bool = False,
    ) -> None:
        super().__init__(ledger, limits, frees_late=frees_late)
        self.drafting = drafting
        self.overruns: list[int] = []
        """Context of requests whose output ended sooner than the batch after it was formed."""

    def admit(self, request: Request) -> RunningRequest:
        """The request runs from now on; blocks of its computed tokens can be found already."""
        running = super().admit(request)
        running.indexed_tokens = request.computed_tokens
        return running

    def token_receivers(self, batch: Batch) -> Iterable[Request]:
        """Members that get output tokens at the end of the batch, once for each token."""
        receivers: list[Request] = []
        for running, _, target in self.records.get(batch.batch_id, ()):
            request = running.request
            drafts = target - request.reached_tokens
            if running.is_alive and drafts >= 0:
                tokens = 1 + (self.drafting.accepted(request, drafts) if drafts else 0)
                left = request.output_tokens - request.generated_tokens
                receivers += [request] * min(tokens, left)
        return receivers

    def end_record(
        self, running: RunningRequest, new: int, target: int, now_ns: int, progress: Progress
    ) -> bool:
        """The outcome of a member's step. True if its output is complete."""
        request = running.request
        reached = request.prompt_tokens + request.generated_tokens
        drafts = target - reached
        if drafts <= 0:
            is_over = super().end_record(running, new, target, now_ns, progress)
            if drafts == 0 and not is_over:
                running.drafts = self.drafting.proposed(request)
            return is_over
        running.pending -= new
        accepted = self.drafting.accepted(request, drafts)
        self.drafting.count(drafts, accepted, target - new)
        tokens = min(1 + accepted, request.output_tokens - request.generated_tokens)
        request.computed_tokens = reached + tokens - 1
        request.generated_tokens += tokens
        progress.decode_tokens += tokens
        gap_ns = now_ns - request.last_token_ns
        progress.gaps_ns.append(gap_ns)
        if tokens > 1:
            progress.gaps_ns.extend([0] * (tokens - 1))
        if gap_ns > request.max_gap_ns:
            request.max_gap_ns = gap_ns
        request.last_token_ns = now_ns
        if request.generated_tokens < request.output_tokens:
            running.drafts = self.drafting.proposed(request)
            return False
        if self.frees_late and tokens > 1:
            self.overruns.append(request.computed_tokens)
        return True
