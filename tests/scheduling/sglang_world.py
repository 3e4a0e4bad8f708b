"""Random programs for SGLang's scheduler, stepped and leapt, with everything that can be observed.

A program is a list of requests (arrival, lengths, tokens, cancellation) and cut points at which
leaps are interrupted for no reason.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from emu.config.schema import SglangTable
from emu.latency.base import next_decode_shape
from emu.request import Prefix, Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.sglang.scheduler import SglangScheduler
from tests.scheduling.vllm_world import shape_row, step_ns


@dataclass
class Spec:
    arrival: int
    prompt: int
    output: int
    output_max: int
    family: int  # requests of one family have equal tokens up to `shared`
    shared: int
    cancel_at: int = -1


@dataclass
class Program:
    table: SglangTable
    num_blocks: int
    page: int
    ahead: bool
    has_tokens: bool
    specs: list[Spec]
    cuts: list[int] = field(default_factory=list)

    def requests(self) -> list[Request]:
        return [
            Request(
                request_id=rid,
                arrival_ns=s.arrival,
                prompt_tokens=s.prompt,
                output_tokens=s.output,
                max_output_tokens=s.output_max,
                prefix=Prefix(np.array(tokens_of(rid, s), dtype=np.int64))
                if self.has_tokens
                else None,
            )
            for rid, s in enumerate(self.specs)
        ]

    def scheduler(self, *, leap: bool) -> SglangScheduler:
        limits = ReplicaLimits(
            num_blocks=self.num_blocks,
            block_size=self.page,
            max_model_tokens=10**6,
            prefix_caching=True,
            leap=leap,
        )
        limits.forms_ahead = self.ahead
        return SglangScheduler(self.table, limits)


def tokens_of(rid: int, spec: Spec) -> list[int]:
    own = 1_000_000 * (rid + 1)
    return [
        spec.family * 10_000 + p if p < spec.shared else own + p
        for p in range(spec.prompt + spec.output)
    ]


def random_program(seed: int) -> Program:
    rng = random.Random(seed)
    page = rng.choice((1, 1, 16, 64))
    tokens = rng.choice((256, 600, 1024, 4096))
    chunk = rng.choice((-1, 64, 128, 512, 2048))
    radix_off = rng.random() < 0.2
    table = SglangTable(
        max_running_requests=rng.choice((2, 4, 8, 64)),
        chunked_prefill_size=chunk,
        max_prefill_tokens=rng.choice((128, 16_384)),
        schedule_conservativeness=rng.choice((0.02, 0.05, 0.3, 1.0, 1.5)),
        schedule_policy=rng.choice(("fcfs", "fcfs", "lpm", "dfs-weight", "lof", "random")),
        enable_mixed_chunk=rng.random() < 0.25,
        disable_radix_cache=radix_off,
        radix_eviction_policy=rng.choice(("lru", "lru", "fifo", "mru", "filo", "priority")),
        ignore_eos=rng.random() < 0.5,
        page_overhead=rng.choice(("on", "off")),
        full_stops_chunks=rng.choice(("on", "off")),
    )
    looks = random.Random(f"looks {seed}")  # of its own, so that other programs stay
    if table.page_overhead == "on" and random.Random(f"overhead {seed}").random() < 0.3:
        table = replace(table, page_overhead="taken")
    if looks.random() < 0.3:
        table = replace(table, scheduler_recv_interval=looks.choice((2, 7, 30)))
    span = rng.choice((1, 20_000, 200_000))
    is_tight = rng.random() < 0.3
    """Short prompts and long outputs without room reserved for them."""
    if is_tight:
        table = replace(table, schedule_conservativeness=0.02, max_running_requests=64)
        span = 1
    specs = []
    for _ in range(rng.randint(1, 24)):
        prompt = rng.randint(1, rng.choice((8, 60, tokens // 3)))
        most = rng.randint(1, rng.choice((4, 40, tokens // 2)))
        if is_tight:
            prompt, most = rng.randint(1, 20), rng.randint(tokens // 8, tokens // 3)
        specs.append(
            Spec(
                arrival=rng.randrange(span),
                prompt=prompt,
                output=rng.choice((most, rng.randint(1, most))),
                output_max=most,
                family=rng.randrange(3),
                shared=rng.choice((0, 40, 1000)),
                cancel_at=rng.randrange(2 * span) if rng.random() < 0.1 else -1,
            )
        )
    return Program(
        table,
        max(1, tokens // page),
        page,
        ahead=rng.random() < 0.6,
        has_tokens=rng.random() < 0.7,
        specs=sorted(specs, key=lambda one: one.arrival),
        cuts=[rng.randrange(4 * span + 1) for _ in range(rng.randrange(4))],
    )


def run(program: Program, *, leap: bool, max_iterations: int = 50_000):
    """(log of iterations, ends of requests, leaps, retractions)."""
    scheduler = program.scheduler(leap=leap)
    requests = program.requests()
    log, ends, leaps, retracted = [], [], 0, 0
    events = [(s.arrival, 0, rid) for rid, s in enumerate(program.specs)]
    events += [(s.cancel_at, 1, rid) for rid, s in enumerate(program.specs) if s.cancel_at >= 0]
    events.sort()
    points = sorted({e[0] for e in events} | set(program.cuts))
    now = at = 0

    def happen(until: int) -> None:
        nonlocal at
        while at < len(events) and events[at][0] <= until:
            when, kind, rid = events[at]
            at += 1
            if kind == 0:
                scheduler.enqueue(requests[rid], when)
            elif scheduler.cancel(requests[rid]):
                ends.append((rid, "cancelled", until))

    while len(log) < max_iterations:
        happen(now)
        batch = scheduler.schedule(now)
        assert scheduler.recount() == []
        if batch is None:
            dropped = scheduler.drop_unschedulable(now)
            ends += [(r.request_id, "hopeless", now) for r, _ in dropped]
            if dropped:
                continue
            if at == len(events):
                break
            now = max(now, events[at][0])
            continue
        assert leap or batch.max_steps == 1
        durations, start = [], now
        place = bisect_right(points, now)
        point = points[place] if place < len(points) else None
        for step in range(batch.max_steps):
            shape = next_decode_shape(batch.shape, step) if step else batch.shape
            scheduler.settle(batch, step + 1)
            assert scheduler.recount() == []
            preempted = tuple(r.request_id for r in batch.preempted) if step == 0 else ()
            log.append(
                (start, shape_row(shape), preempted, scheduler.blocks_used,
                 scheduler.running_count, scheduler.pool.evictable_blocks)
            )  # fmt: skip
            retracted += len(preempted)
            durations.append(step_ns(shape))
            start += durations[-1]
            if point is not None and start >= point:
                break
        leaps += len(durations) > 1
        if len(durations) > 1:
            batch.first_end_ns = now + durations[0]
            batch.last_start_ns = start - durations[-1]
        now = start
        # What comes while the last step runs is here before it ends.
        last_start = start - durations[-1]
        while at < len(events) and events[at][0] < now and events[at][1] == 0:
            assert events[at][0] >= last_start
            happen(events[at][0])
        progress = scheduler.complete(batch, len(durations), now, max(durations))
        ends += [
            (r.request_id, "finished", now, r.first_token_ns, r.max_gap_ns, r.preemptions,
             r.recomputed_tokens, r.prefix_hit_tokens, r.prefill_scheduled_ns)
            for r in progress.finished
        ]  # fmt: skip
        ends += [(r.request_id, "failed", now) for r, _ in progress.failed]
        assert scheduler.recount() == []
    assert scheduler.schedule(now) is None
    assert scheduler.blocks_used == 0
    assert scheduler.waiting_count == scheduler.running_count == scheduler.waiting_tokens == 0
    assert len(ends) == len(requests)
    return log, ends, leaps, retracted
