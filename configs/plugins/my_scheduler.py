"""Shortest job first, as an example of a user's own scheduler.

    [scheduler]
    policy = "./plugins/my_scheduler.py:ShortestFirst"     # relative to the configuration

Among the waiting requests, the one with the fewest prompt tokens is admitted first. Running
requests decode in every iteration; new prompts fill what is left of `max_num_batched_tokens`. When
blocks run out, the request that joined last starts over.
"""

from emu.scheduling.simple import Plan, SimpleScheduler


class ShortestFirst(SimpleScheduler):
    """Whole prompts, shortest first, mixed with decodes."""

    def form_batch(self, plan: Plan, now_ns: int) -> None:
        """Decodes first, then the shortest prompts that fit."""
        for request in list(self.idle):
            while request in self.idle and not self.grow(request, request.reached_tokens):
                self.preempt(self.idle[-1])
            if request in self.idle:
                plan.decode(request)
        budget = self.table.max_num_batched_tokens - len(plan)
        for request in sorted(self.waiting(), key=lambda waiting: waiting.reached_tokens):
            tokens, blocks = request.reached_tokens, self.blocks_for(request)
            if blocks > self.free_blocks or self.running_count >= self.table.max_num_seqs:
                return
            if tokens > budget and plan.chunks:  # a long prompt is the only one of its batch
                return
            self.admit(request, blocks)
            plan.read(request, tokens)
            budget -= tokens

    def leap_limit(self, plan: Plan) -> int:
        """While no request waits, the next iterations decode the same requests."""
        return 1 if self.waiting_count else 1_000_000
