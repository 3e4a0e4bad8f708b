"""A small world in which scheduler objects play Vidur's schedules.

Events run strictly by (time, creation number), in the chain that section 2 of the reference
describes: arrival -> global schedule -> replica schedule -> stage arrival -> stage schedule ->
stage end -> batch end. Times are integer nanoseconds; the golden files count microseconds.
"""

from __future__ import annotations

import heapq
import json
from collections import deque

from emu.request import Request
from emu.scheduling.base import ReplicaLimits, members_of
from emu.scheduling.pipeline import Pipeline, discount_bubbles
from emu.scheduling.vidur.faster_transformer import FasterTransformerScheduler
from emu.scheduling.vidur.lightllm import LightLlmScheduler
from emu.scheduling.vidur.orca import OrcaScheduler
from emu.scheduling.vidur.sarathi import SarathiScheduler
from emu.scheduling.vidur.vllm_v0 import VllmV0Scheduler
from tests.scheduling.tables import policy_of, table_for
from tests.shared_data import SHARED

CASES = SHARED / "vidur-cases"
POLICIES = {
    "vllm": VllmV0Scheduler,
    "sarathi": SarathiScheduler,
    "orca": OrcaScheduler,
    "lightllm": LightLlmScheduler,
    "faster_transformer": FasterTransformerScheduler,
}
US = 1000


def load(name):
    return json.loads((CASES / f"{name}.json").read_text())


def schedulers_of(case, faithful=()):
    """The replicas' schedulers with the parameters of a golden file."""
    parameters = case["parameters"]
    given = dict(parameters["scheduler"])
    policy = POLICIES[given.pop("type")]
    block_size, num_blocks = given.pop("block_size"), given.pop("num_blocks")
    table = table_for(
        policy_of(policy),
        num_blocks=num_blocks,
        block_size=block_size,
        max_tokens=parameters["max_tokens"],
        faithful=[name for name in faithful if name != "lor_waiting_only"],
        **given,
    )
    limits = ReplicaLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_tokens=1 << 30,
        pipeline_stages=parameters["num_pipeline_stages"],
        leap=False,
    )
    return [policy(table, limits) for _ in range(parameters["num_replicas"])]


def requests_of(case):
    return [
        Request(
            request_id=row["request"],
            arrival_ns=row["arrived_at_us"] * US,
            prompt_tokens=row["prefill"],
            output_tokens=row["decode"],
            max_output_tokens=row["decode"],
        )
        for row in case["requests"]
    ]


class World:
    """Replicas, their pipelines, a router and the event heap."""

    def __init__(
        self, schedulers, *, formula, router="round_robin", chosen=None, lor_waiting=False
    ):
        self.schedulers = schedulers
        self.formula = formula
        self.router, self.chosen, self.lor_waiting = router, chosen, lor_waiting
        self.routed = 0
        self.now = 0
        self.heap, self.seq = [], 0
        self.queue = []
        stages = schedulers[0].limits.pipeline_stages
        self.stages = stages
        self.fifos = [[deque() for _ in range(stages)] for _ in schedulers]
        self.busy = [[False] * stages for _ in schedulers]
        self.pipelines = [Pipeline(stages) for _ in schedulers]
        self.batches, self.restarts, self.failed = [], [], []
        self.replica_of, self.waits, self.left_stage = {}, {}, {}
        self.gaps = []
        self.memory = [[] for _ in schedulers]
        """(time, per cent of blocks used), sampled where the peer does."""
        for scheduler in schedulers:
            self._watch_restarts(scheduler)

    def _watch_restarts(self, scheduler):
        restart = scheduler._restart

        def watched(victim):
            complete = not scheduler.is_prefilling(victim)
            processed = victim.reached_tokens if complete else victim.computed_tokens
            self.restarts.append((self.now // US, victim.request_id, processed, complete))
            restart(victim)

        scheduler._restart = watched

    # --- events -----------------------------------------------------------------------------
    def at(self, time, handler, *args):
        heapq.heappush(self.heap, (time, self.seq, handler, args))
        self.seq += 1

    def run(self, requests, *, fail_stuck=False):
        for request in requests:
            self.at(request.arrival_ns, self.on_arrival, request)
        while True:
            while self.heap:
                self.now, _, handler, args = heapq.heappop(self.heap)
                handler(*args)
                for scheduler in self.schedulers:
                    assert scheduler.recount() == []
            if not fail_stuck:
                return
            dropped = [d for s in self.schedulers for d in s.drop_unschedulable(self.now)]
            if not dropped:
                return
            self.failed += dropped
            for index in range(len(self.schedulers)):
                self.at(self.now, self.on_replica_schedule, index)

    def on_arrival(self, request):
        self.queue.append(request)
        self.at(self.now, self.on_global_schedule)

    def on_global_schedule(self):
        touched = set()
        pending = [
            s.waiting_count if self.lor_waiting else s.waiting_count + s.running_count
            for s in self.schedulers
        ]
        for request in sorted(self.queue, key=lambda r: r.arrival_ns):
            if self.router == "round_robin":
                index = self.routed % len(self.schedulers)
                self.routed += 1
            elif self.router == "random":
                index = self.chosen[request.request_id]
            else:
                index = pending.index(min(pending))
                pending[index] += 1
            self.replica_of[request.request_id] = index
            self.schedulers[index].enqueue(request, self.now)
            touched.add(index)
        self.queue = []
        for index in sorted(touched):
            self.at(self.now, self.on_replica_schedule, index)

    def on_replica_schedule(self, index):
        formed = []
        while (batch := self.schedulers[index].schedule(self.now)) is not None:
            record = {
                "replica": index,
                "formed_at_us": self.now // US,
                "requests": [r.request_id for r in members_of(batch)],
                "tokens": [1] * len(batch.decodes) + [c.new_tokens for c in batch.chunks],
                "stages": [],
            }
            duration = self.duration(batch)
            spans = self.pipelines[index].enter(self.now, [duration] * self.stages)
            self.batches.append(record)
            formed.append((batch, record, spans))
        if formed:
            self._sample_memory(index)
        for item in formed:
            self.at(self.now, self.on_stage_arrival, index, 0, item)

    def _sample_memory(self, index):
        scheduler = self.schedulers[index]
        used = 100 * scheduler.blocks_used / scheduler.blocks_total
        self.memory[index].append((self.now // US, used))

    def duration(self, batch):
        """Context counts the output token whose KV this step writes."""
        tokens = len(batch.decodes) + sum(c.new_tokens for c in batch.chunks)
        context = sum(r.reached_tokens for r in batch.decodes)
        context += sum(c.context_tokens for c in batch.chunks)
        base, per_token, per_context = self.formula
        return (base + per_token * tokens + per_context * context) * US

    def on_stage_arrival(self, index, stage, item):
        self.fifos[index][stage].append(item)
        self.at(self.now, self.on_stage_schedule, index, stage)

    def on_stage_schedule(self, index, stage):
        if self.busy[index][stage] or not self.fifos[index][stage]:
            return
        item = self.fifos[index][stage].popleft()
        batch, record, spans = item
        self.busy[index][stage] = True
        assert spans[stage].start_ns == self.now, "the recurrence of `Pipeline` holds"
        for request in members_of(batch):
            rid = request.request_id
            self.waits[rid] = self.waits.get(rid, 0) + self.now - self.left_stage.get(rid, self.now)
        record["stages"].append([stage, self.now // US, spans[stage].end_ns // US])
        self.at(self.now + self.duration(batch), self.on_stage_end, index, stage, item)

    def on_stage_end(self, index, stage, item):
        self.busy[index][stage] = False
        for request in members_of(item[0]):
            self.left_stage[request.request_id] = self.now
        self.at(self.now, self.on_stage_schedule, index, stage)
        if stage + 1 == self.stages:
            self.at(self.now, self.on_batch_end, index, item)
        else:
            self.at(self.now, self.on_stage_arrival, index, stage + 1, item)

    def on_batch_end(self, index, item):
        batch, _, spans = item
        discount_bubbles(batch, spans)
        step = self.now - batch.formed_ns
        progress = self.schedulers[index].complete(batch, 1, self.now, step)
        self.failed += progress.failed
        self._sample_memory(index)
        self.gaps += progress.gaps_ns + [step] * progress.cohort_size
        self.at(self.now, self.on_replica_schedule, index)


def play(case, faithful=(), *, fail_stuck=False):
    """Run a golden case; returns the world and the requests."""
    formula = case["formula"]
    costs = tuple(formula[k] for k in ("base_us", "per_token_us", "per_context_token_us"))
    chosen = {row["request"]: row["replica"] for row in case["expected"]}
    world = World(
        schedulers_of(case, faithful),
        formula=costs,
        router=case["parameters"]["global_scheduler"],
        chosen=chosen,
        lor_waiting="lor_waiting_only" in faithful,
    )
    requests = requests_of(case)
    world.run(requests, fail_stuck=fail_stuck)
    return world, requests


def outcome_of(world, request):
    """What the golden files expect of a request, from ours (final lengths left out)."""
    done = request.generated_tokens >= request.output_tokens

    def us(ns):
        return None if ns < 0 else ns // US

    return {
        "request": request.request_id,
        "replica": world.replica_of[request.request_id],
        "scheduled_at_us": us(request.first_scheduled_ns),
        "prefill_completed_at_us": us(request.first_token_ns),
        "completed_at_us": us(request.last_token_ns) if done else None,
        "num_restarts": request.preemptions,
        "execution_time_us": request.execution_ns // US,
        "preempted_time_us": world.waits.get(request.request_id, 0) // US,
    }
