"""Drives one scheduler as a replica does: ops arrive in the middle of iterations and of leaps."""

from __future__ import annotations

import heapq
from collections import Counter

import numpy as np

from emu.latency.base import next_decode_shape
from emu.request import Request
from emu.scheduling.base import ReplicaLimits, members_of
from tests.scheduling.tables import policy_of, table_for


def make(cls, *, num_blocks, block_size=4, stages=1, leap=True, preemptions_max=0, **table):
    limits = ReplicaLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_tokens=1 << 20,
        pipeline_stages=stages,
        leap=leap,
        preemptions_max=preemptions_max,
    )
    table.setdefault("max_tokens", 64)
    return cls(table_for(policy_of(cls), **table), limits)


def request(request_id, prompt, output, *, at=0, limit=None, **more):
    return Request(
        request_id=request_id,
        arrival_ns=at,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output if limit is None else limit,
        **more,
    )


def cost_ns(shape):
    """Multiples of 1000, so that ops at odd times never tie with an end."""
    context = shape.decode_context_sum + sum(shape.prefill_context)
    return 1000 * (20 + 3 * shape.new_tokens + context)


class Drive:
    """One replica; `ops` are (time, name, argument) in order of time."""

    def __init__(self, scheduler, ops, *, check=None, use_holds=False, use_split=False):
        self.scheduler = scheduler
        self.ops = list(ops)
        self.check = check or (lambda scheduler, batch: None)
        self.use_holds, self.use_split = use_holds, use_split
        self.now = 0
        self.gaps = Counter()
        self.finished, self.failed, self.cancelled = [], [], []
        self.prefill_tokens = self.decode_tokens = 0
        self.iterations = self.calls = self.read_outs = 0
        self.seen = []
        self.reserved = {}
        self.cancels = []

    # --- ops --------------------------------------------------------------------------------
    def apply(self, name, argument):
        """What takes effect at once; the caller has settled the books."""
        scheduler = self.scheduler
        if name == "enqueue":
            # Even numbers are judged at the gate, odd ones by the queue.
            reason = "" if argument.request_id % 2 else scheduler.can_ever_hold(argument)
            if reason:
                self.failed.append((argument, reason))
            else:
                scheduler.enqueue(argument, self.now)
        elif name == "cancel":
            self.cancels.append(argument)
        elif name == "reserve":
            if scheduler.reserve([argument]):
                self.reserved[argument.request_id] = argument
        elif name == "unreserve" and self.reserved.pop(argument.request_id, None):
            scheduler.unreserve([argument])
        elif name == "activate" and self.reserved.pop(argument.request_id, None):
            self.cancels.append((argument,))  # at the boundary, like a migrated batch
        self.look()

    def look(self):
        s = self.scheduler
        assert s.recount() == []
        residents = [
            (r.request_id, r.generated_tokens, r.computed_tokens, r.kv_blocks)
            for r in s.residents()
        ]
        self.seen.append(
            (self.now, s.blocks_used, s.running_count, s.waiting_count, s.waiting_tokens, residents)
        )

    def at_boundary(self):
        for item in self.cancels:
            if isinstance(item, tuple):
                self.scheduler.activate(list(item), self.now)
            elif self.scheduler.cancel(item):
                self.cancelled.append(item)
        self.cancels = []

    # --- the loop ---------------------------------------------------------------------------
    def run(self):
        return self._run_stages() if self.scheduler.limits.pipeline_stages > 1 else self._run_one()

    def _run_one(self):
        scheduler = self.scheduler
        while True:
            self.at_boundary()
            batch = scheduler.schedule(self.now)
            if batch is None:
                dropped = scheduler.drop_unschedulable(self.now)
                self.failed += dropped
                if dropped:
                    continue
                if not self.ops:
                    return self
                # Iterations start and end at tens, ops come at ones: no ties.
                self.now = self.ops[0][0] // 10 * 10 + 10
                while self.ops and self.ops[0][0] < self.now:
                    _, name, argument = self.ops.pop(0)
                    self.apply(name, argument)
                continue
            self._formed(batch)
            self._execute(batch)

    def _formed(self, batch):
        self.calls += 1
        self.read_outs += len(list(self.scheduler.token_receivers(batch))) - len(batch.decodes)
        self.check(self.scheduler, batch)

    def _execute(self, batch):
        scheduler = self.scheduler
        start = self.now
        steps = batch.max_steps
        ends = start + np.cumsum(
            [
                cost_ns(next_decode_shape(batch.shape, i)) if i else cost_ns(batch.shape)
                for i in range(steps)
            ]
        )
        while self.ops and self.ops[0][0] < ends[steps - 1]:
            self.now, name, argument = self.ops.pop(0)
            done = int(ends.searchsorted(self.now))
            scheduler.settle(batch, done + 1)
            self.apply(name, argument)
            holds = (
                self.use_holds
                and not self.cancels
                and batch.max_steps > 1
                and scheduler.leap_holds(batch)
            )
            if not holds:
                steps = min(steps, done + 1)
        self.iterations += steps
        durations = np.diff(ends[:steps], prepend=start)
        if self.use_split and steps > 1:
            self._account(
                scheduler.split(batch, steps - 1, int(ends[steps - 2]), int(durations[:-1].max())),
                durations[:-1],
            )
            durations = durations[-1:]
        self.now = int(ends[steps - 1])
        progress = scheduler.complete(batch, len(durations), self.now, int(durations.max()))
        self._account(progress, durations)
        assert scheduler.recount() == []

    def _account(self, progress, durations):
        for duration in durations:
            self.gaps[int(duration)] += progress.cohort_size
        for gap in progress.gaps_ns:
            self.gaps[gap] += 1
        self.prefill_tokens += progress.prefill_tokens
        self.decode_tokens += progress.decode_tokens
        self.finished += progress.finished
        self.failed += progress.failed
        if progress.failed:
            self.seen.append(("failed", self.now))

    def _run_stages(self):
        """S equal stages: a batch occupies each for its cost; ends are in order."""
        scheduler = self.scheduler
        stages = scheduler.limits.pipeline_stages
        free = [0] * stages
        flying = []
        while True:
            self.at_boundary()
            while (batch := scheduler.schedule(self.now)) is not None:
                assert batch.max_steps == 1
                self._formed(batch)
                at = self.now
                for stage in range(stages):
                    at = free[stage] = max(at, free[stage]) + cost_ns(batch.shape)
                heapq.heappush(flying, (at, batch.batch_id, batch))
            assert len(flying) <= stages
            members = [r.request_id for _, _, b in flying for r in members_of(b)]
            assert len(members) == len(set(members)), "a request is in two batches"
            if self.ops and (not flying or self.ops[0][0] < flying[0][0]):
                self.now, name, argument = self.ops.pop(0)
                self.apply(name, argument)
                continue
            if not flying:
                dropped = scheduler.drop_unschedulable(self.now)
                self.failed += dropped
                if dropped:
                    continue
                return self
            self.now, _, batch = heapq.heappop(flying)
            step = self.now - batch.formed_ns
            self._account(scheduler.complete(batch, 1, self.now, step), np.array([step]))
            self.iterations += 1
            assert scheduler.recount() == []
