"""The scheduler of the parity driver: emu's, with what the original does to batches in flight.

Owns one habit that shows with pipeline stages only. The original advances a request's computed
tokens when a batch is formed and asks for them when a batch ends. With several batches in flight
the end of an earlier one therefore counts what a later one has still to compute: a prompt is
complete, and its first token there, while its last chunk runs. Source: LLMServingSim 2.0.
"""

from __future__ import annotations

from collections.abc import Iterable

from emu.request import Request
from emu.scheduling.base import Batch, Progress
from emu.scheduling.cohort import RunningRequest
from emu.scheduling.running import RunningSet


class OriginalRunningSet(RunningSet):
    """`RunningSet` whose batches end as in the original."""

    def token_receivers(self, batch: Batch) -> Iterable[Request]:
        """Members of the batch that get an output token at its end."""
        if self.limits.pipeline_stages == 1:
            return super().token_receivers(batch)
        requests = [running.request for running, _, _ in self.records.get(batch.batch_id, ())]
        return [
            request
            for request in requests
            if request.request_id in self.requests
            and request.computed_tokens >= request.reached_tokens
        ]

    def end_record(
        self, running: RunningRequest, new: int, target: int, now_ns: int, progress: Progress
    ) -> bool:
        """The outcome of a member, judged by what it has computed in all batches."""
        if self.limits.pipeline_stages > 1:
            target = running.request.computed_tokens
        return super().end_record(running, new, target, now_ns, progress)
