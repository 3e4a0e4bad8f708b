"""Random programs for schedulers, and three ways to run them: stepping, leaping, the naive model.

A program is a list of requests (arrival, lengths, tokens, cancellation) and cut points at which
leaps are interrupted for no reason. Running it gives a log of everything that can be observed:
for each iteration its start, shape, books, and the gaps of its tokens; for each request its end.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from emu.config.schema import SchedulerTable
from emu.latency.base import BatchShape, next_decode_shape
from emu.request import Prefix, Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.vllm import VllmScheduler
from tests.scheduling.naive_vllm import NaiveVllm, Seq


@dataclass
class Spec:
    arrival: int
    prompt: int
    output: int
    family: int  # requests of one family have equal tokens as far as both go
    shared: int  # ... up to this position; later ones are their own
    cancel_at: int = -1
    priority: int = 0
    deadline: int = -1
    tenant: str = ""


@dataclass
class Program:
    table: SchedulerTable
    num_blocks: int
    block_size: int
    caching: bool
    specs: list
    cuts: list = field(default_factory=list)

    def limits(self, leap, stages=1):
        return ReplicaLimits(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_tokens=10**6,
            prefix_caching=self.caching,
            leap=leap,
            pipeline_stages=stages,
        )

    def tokens(self, rid):
        spec = self.specs[rid]
        own = 1_000_000 * (rid + 1)
        return [
            spec.family * 10_000 + p if p < spec.shared else own + p
            for p in range(spec.prompt + spec.output)
        ]


def step_ns(shape) -> int:
    """Any deterministic cost; it depends on everything that the shape holds."""
    return (
        1_000
        + 7 * sum(shape.prefill_new)
        + 3 * sum(shape.prefill_context)
        + 11 * shape.decode_count
        + shape.decode_context_sum
        + shape.decode_context_max
        - shape.decode_context_min
    )


def shape_row(shape):
    return (
        tuple(shape.prefill_new),
        tuple(shape.prefill_context),
        shape.decode_count,
        shape.decode_context_sum,
        shape.decode_context_max,
        shape.decode_context_min,
        shape.sequences,
    )


def request_row(r, why, now):
    return (
        now, r.request_id, why, r.computed_tokens, r.generated_tokens, r.first_token_ns,
        r.last_token_ns, r.max_gap_ns, r.preemptions, r.recomputed_tokens,
        max(r.prefix_hit_tokens, 0), r.prefill_scheduled_ns,
    )  # fmt: skip


def _events(program):
    events = [(s.arrival, 0, rid) for rid, s in enumerate(program.specs)]
    events += [(s.cancel_at, 1, rid) for rid, s in enumerate(program.specs) if s.cancel_at >= 0]
    return sorted(events)


def make_requests(program):
    return [
        Request(
            request_id=rid,
            arrival_ns=s.arrival,
            prompt_tokens=s.prompt,
            output_tokens=s.output,
            max_output_tokens=s.output,
            prefix=Prefix(np.array(program.tokens(rid), dtype=np.int64))
            if program.caching
            else None,
            priority=s.priority,
            deadline_ns=s.deadline,
            tenant=s.tenant,
        )
        for rid, s in enumerate(program.specs)
    ]


def run_scheduler(program, *, leap, check_books=True, max_iterations=100_000, walks=False):
    """The log of a VllmScheduler that steps or leaps."""
    scheduler = VllmScheduler(program.table, program.limits(leap), walks=walks)
    requests = make_requests(program)
    log, ends, leaps = [], [], 0
    events = _events(program)
    points = sorted({e[0] for e in events} | set(program.cuts))
    now = at = 0
    while len(log) < max_iterations:
        while at < len(events) and events[at][0] <= now:
            _, kind, rid = events[at]
            at += 1
            if kind == 0:
                scheduler.enqueue(requests[rid], now)
            elif scheduler.cancel(requests[rid]):
                ends.append(request_row(requests[rid], "cancelled", now))
        batch = scheduler.schedule(now)
        if check_books:
            assert scheduler.recount() == []
        if batch is None:
            for request, _ in scheduler.drop_unschedulable(now):
                ends.append(request_row(request, "hopeless", now))
            if at == len(events):
                break
            now = max(now, events[at][0])
            continue
        if not leap:
            assert batch.max_steps == 1
        durations = []
        t = now
        # The leap is cut at the end of the first iteration that ends at or after a point.
        point = (
            points[bisect_right(points, now)] if bisect_right(points, now) < len(points) else None
        )
        for step in range(batch.max_steps):
            shape = next_decode_shape(batch.shape, step) if step else batch.shape
            scheduler.settle(batch, step + 1)
            if check_books:
                assert scheduler.recount() == []
            preempted = tuple(r.request_id for r in batch.preempted) if step == 0 else ()
            cost = step_ns(shape)
            log.append(
                [t, shape_row(shape), preempted, scheduler.blocks_used, scheduler.waiting_count,
                 scheduler.running_count, None]
            )  # fmt: skip
            durations.append(cost)
            t += cost
            if point is not None and t >= point:
                break
        steps = len(durations)
        leaps += steps > 1
        now = t
        progress = scheduler.complete(batch, steps, now, max(durations))
        for offset in range(steps):
            row = log[len(log) - steps + offset]
            gaps = [durations[offset]] * progress.cohort_size
            row[-1] = sorted(gaps + (progress.gaps_ns if offset == steps - 1 else []))
        ends += [request_row(r, "finished", now) for r in progress.finished]
        ends += [request_row(r, "failed", now) for r, _ in progress.failed]
        if check_books:
            assert scheduler.recount() == []
    assert scheduler.blocks_used == 0
    assert scheduler.waiting_count == scheduler.running_count == scheduler.waiting_tokens == 0
    return log, ends, leaps


def naive_row(s, why, now):
    """As `request_row`."""
    return (
        now, s.rid, why, s.computed, s.generated, s.first, s.last, s.max_gap, s.preemptions,
        s.recomputed, max(s.hit, 0), s.prefill_scheduled,
    )  # fmt: skip


def naive_shape(items):
    """As `shape_row`, and the cost of the iteration."""
    chunks = [(new, had) for _, new, had in items if new > 1]
    contexts = [had for _, new, had in items if new == 1]
    shape = BatchShape(
        [new for new, _ in chunks],
        [had for _, had in chunks],
        len(contexts),
        sum(contexts),
        max(contexts, default=0),
        min(contexts, default=0),
        len(items),
    )
    return shape_row(shape), step_ns(shape)


def run_naive(program, max_iterations=100_000):
    """The same log from the naive model."""
    model = NaiveVllm(program.table, program.limits(False))
    seqs = [
        Seq(rid, s.arrival, s.prompt, s.output, program.tokens(rid) if program.caching else None)
        for rid, s in enumerate(program.specs)
    ]
    log, ends = [], []
    events = _events(program)
    now = at = 0

    while len(log) < max_iterations:
        while at < len(events) and events[at][0] <= now:
            _, kind, rid = events[at]
            at += 1
            if kind == 0:
                model.enqueue(seqs[rid])
            elif model.cancel(rid):
                ends.append(naive_row(seqs[rid], "cancelled", now))
        items, preempted = model.schedule(now)
        if not items:
            while model.waiting and not model.running:
                ends.append(naive_row(model.waiting.pop(0), "hopeless", now))
                if model.schedule(now)[0]:
                    raise AssertionError("the programs have no mix of hopeless and possible heads")
            if at == len(events):
                break
            now = max(now, events[at][0])
            continue
        shape, cost = naive_shape(items)
        entry = [now, shape, tuple(preempted), model.total - len(model.free), len(model.waiting), len(model.running)]  # fmt: skip
        now += cost
        finished, gaps = model.complete(now)
        log.append([*entry, sorted(gaps)])
        ends += [naive_row(s, "finished", now) for s in finished]
    assert len(model.free) == model.total
    return log, ends


class _Pipeline:
    """Batches leave a pipeline in order, each a fixed part of its cost after the one before."""

    def __init__(self):
        self.flights = []
        self.last_end = 0

    def push(self, now, batch, cost):
        self.last_end = max(now + cost, self.last_end + cost // 2)
        self.flights.append((self.last_end, batch))

    def next_end(self):
        return self.flights[0][0] if self.flights else 1 << 62


def run_pipeline(program, stages):
    """Log of a VllmScheduler with several batches in flight."""
    scheduler = VllmScheduler(program.table, program.limits(True, stages))
    requests = make_requests(program)
    events, log, ends, pipe = _events(program), [], [], _Pipeline()
    now = at = 0
    while True:
        while at < len(events) and events[at][0] <= now:
            _, kind, rid = events[at]
            at += 1
            if kind == 0:
                scheduler.enqueue(requests[rid], now)
            elif scheduler.cancel(requests[rid]):
                ends.append((now, rid, "cancelled"))
        while (batch := scheduler.schedule(now)) is not None:
            assert scheduler.recount() == []
            log.append((now, shape_row(batch.shape), scheduler.blocks_used))
            pipe.push(now, batch, step_ns(batch.shape))
        if not pipe.flights and at == len(events):
            scheduler.drop_unschedulable(now)
            break
        now = min(pipe.next_end(), events[at][0] if at < len(events) else 1 << 62)
        if pipe.next_end() == now:
            _, batch = pipe.flights.pop(0)
            progress = scheduler.complete(batch, 1, now, now - batch.formed_ns)
            log.append((now, sorted(progress.gaps_ns)))
            ends += [request_row(r, "finished", now) for r in progress.finished]
    assert scheduler.blocks_used == scheduler.waiting_count == scheduler.running_count == 0
    return log, ends


def run_naive_pipeline(program, stages):
    """The same log from the naive model."""
    model = NaiveVllm(program.table, program.limits(False))
    seqs = [
        Seq(rid, s.arrival, s.prompt, s.output, program.tokens(rid) if program.caching else None)
        for rid, s in enumerate(program.specs)
    ]
    events, log, ends, pipe = _events(program), [], [], _Pipeline()
    now = at = 0
    while True:
        while at < len(events) and events[at][0] <= now:
            _, kind, rid = events[at]
            at += 1
            if kind == 0:
                model.enqueue(seqs[rid])
            elif model.cancel(rid):
                ends.append((now, rid, "cancelled"))
        while len(pipe.flights) < stages:
            items, _ = model.schedule(now)
            if not items:
                break
            shape, cost = naive_shape(items)
            log.append((now, shape, model.total - len(model.free)))
            pipe.push(now, None, cost)
        if not pipe.flights and at == len(events):
            break
        now = min(pipe.next_end(), events[at][0] if at < len(events) else 1 << 62)
        if pipe.next_end() == now:
            pipe.flights.pop(0)
            finished, gaps = model.complete(now)
            log.append((now, sorted(gaps)))
            ends += [naive_row(s, "finished", now) for s in finished]
    return log, ends
