"""Fairness by virtual token count (Sheng et al., OSDI 2024): the tenant served least goes first.

    [scheduler]
    policy = "./vtc.py:VirtualTokenCount"

Every tenant has a counter: +1 for a prompt token at admission, +2 for an output token. The waiting
tenant with the lowest counter is admitted next. A tenant that comes back from idleness is lifted to
the lowest counter of those that wait, so that nothing is saved up.

The bound (theorem 4.4): while two tenants both have requests waiting, what they were served differs
by no more than 2 x max(1 x longest prompt, 2 x tokens of a full batch). A test checks it at every
step, with `counters`.
"""

from emu.config.schema import SchedulerTable
from emu.request import Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.simple import Plan, SimpleScheduler

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2


class VirtualTokenCount(SimpleScheduler):
    """Whole prompts beside decodes, admitted in the order of the counters."""

    def __init__(self, table: SchedulerTable, limits: ReplicaLimits) -> None:
        super().__init__(table, limits)
        self.counters: dict[str, int] = {}

    def enqueue(self, request: Request, now_ns: int) -> None:
        """A tenant without waiting requests is lifted to the least of those that have some."""
        waiting = {other.tenant for other in self.waiting()}
        if request.tenant not in waiting:
            floor = min((self.counters[tenant] for tenant in waiting), default=0)
            self.counters[request.tenant] = max(self.counters.get(request.tenant, 0), floor)
        super().enqueue(request, now_ns)

    def form_batch(self, plan: Plan, now_ns: int) -> None:
        """Decodes first, then prompts of the least served tenants."""
        for request in list(self.idle):
            while request in self.idle and not self.grow(request, request.reached_tokens):
                self.preempt(self.idle[-1])
            if request in self.idle:
                plan.decode(request)
                self.counters[request.tenant] += OUTPUT_WEIGHT
        budget = self.table.max_num_batched_tokens - len(plan)
        while self.running_count < self.table.max_num_seqs:
            heads: dict[str, Request] = {}
            for request in self.waiting():
                heads.setdefault(request.tenant, request)
            if not heads:
                return
            tenant = min(heads, key=lambda name: (self.counters[name], heads[name].arrival_ns))
            request = heads[tenant]
            tokens, blocks = request.reached_tokens, self.blocks_for(request)
            if blocks > self.free_blocks or (tokens > budget and plan.chunks):
                return
            self.admit(request, blocks)
            plan.read(request, tokens)
            self.counters[tenant] += PROMPT_WEIGHT * tokens + OUTPUT_WEIGHT
            budget -= tokens
