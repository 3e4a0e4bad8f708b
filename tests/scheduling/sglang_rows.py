"""What emu's scheduler does with a case of `sglang_cases`, row by row as SGLang's own."""

from __future__ import annotations

import numpy as np

from emu.config.schema import SglangTable
from emu.request import Prefix, Request
from emu.scheduling.base import Batch, ReplicaLimits
from emu.scheduling.sglang.scheduler import SglangScheduler
from tests.scheduling.sglang_cases import STEP_NS, Case, Row, tokens_of


class Watched(SglangScheduler):
    """Tells each batch as it stands when it has been chosen."""

    row: Row

    def _choose(self, now_ns: int) -> Batch | None:
        batch = super()._choose(now_ns)
        if batch is not None:
            formed = self._formed
            assert formed is not None
            new = {chunk.request.request_id: chunk.new_tokens for chunk in batch.chunks}
            fresh = [one.request.request_id for one, _, _ in formed.prompts]
            prompts = " ".join(f"{rid}:{new[rid]}" for rid in fresh)
            others = [
                one.request.request_id
                for one in formed.members
                if one.request.request_id not in fresh
            ]
            pool = self.pool
            self.row = [
                now_ns, prompts, sorted(others), pool.tokens_free, pool.tree.evictable,
                round(self._ratio, 9),
            ]  # fmt: skip
        return batch


def scheduler_of(case: Case, *, leap: bool = False) -> Watched:
    """The scheduler of a case, as of SGLang 0.5.9."""
    table = SglangTable(
        max_running_requests=case.running,
        chunked_prefill_size=case.chunk,
        max_prefill_tokens=case.prefill,
        schedule_conservativeness=case.conservativeness,
        schedule_policy=case.policy,
        enable_mixed_chunk=case.mixed and case.chunk > 0,
        disable_radix_cache=not case.radix,
        radix_eviction_policy=case.eviction,
        ignore_eos=case.ignore_eos,
        page_overhead="off",
        full_stops_chunks="on",
    )
    limits = ReplicaLimits(
        num_blocks=case.pool // case.page,
        block_size=case.page,
        max_model_tokens=1 << 30,
        prefix_caching=True,
        leap=leap,
    )
    limits.forms_ahead = case.overlap
    return Watched(table, limits)


def rows_of(case: Case) -> list[Row]:
    """The iterations of a case."""
    scheduler = scheduler_of(case)
    requests = [
        Request(
            request_id=index,
            arrival_ns=ask.arrival,
            prompt_tokens=ask.prompt,
            output_tokens=ask.output_max if case.ignore_eos else ask.output,
            max_output_tokens=ask.output_max,
            prefix=Prefix(np.array(tokens_of(index, ask), dtype=np.int64)),
        )
        for index, ask in enumerate(case.asks)
    ]
    rows: list[Row] = []
    now = at = 0
    while True:
        while at < len(requests) and requests[at].arrival_ns <= now:
            scheduler.enqueue(requests[at], requests[at].arrival_ns)
            at += 1
        batch = scheduler.schedule(now)
        if batch is None:
            if at == len(requests):
                return rows
            now = requests[at].arrival_ns
            continue
        rows.append(scheduler.row)
        now += STEP_NS
        while at < len(requests) and requests[at].arrival_ns < now:
            scheduler.enqueue(requests[at], requests[at].arrival_ns)
            at += 1
        scheduler.complete(batch, 1, now, STEP_NS)
        assert scheduler.recount() == []
