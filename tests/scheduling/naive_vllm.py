"""LLMServingSim sections 5 and 6 as plain lists: the independent model that the scheduler must match.

Nothing here is shared with the code under test: every running request is visited at every
iteration, blocks are numbers in lists, keys are tuples of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Seq:
    rid: int
    arrival: int
    prompt: int
    output: int
    tokens: list | None
    computed: int = 0
    generated: int = 0
    blocks: list = field(default_factory=list)
    last: int = -1
    first: int = -1
    max_gap: int = 0
    preemptions: int = 0
    recomputed: int = 0
    hit: int = -1
    prefill_scheduled: int = -1
    epoch: int = 0  # grows when it is preempted: results of batches in flight are dropped

    @property
    def reached(self):
        return self.prompt + self.generated


class NaiveVllm:
    def __init__(self, table, limits):
        self.t = table
        self.bs = limits.block_size
        self.caching = limits.prefix_caching
        self.free = list(range(limits.num_blocks))
        self.total = limits.num_blocks
        self.refs = [0] * limits.num_blocks
        self.key_of = [None] * limits.num_blocks
        self.index = {}
        self.running, self.waiting, self.flights = [], [], []

    # pool
    def key(self, s, i):
        if s.tokens is None or (i + 1) * self.bs > len(s.tokens):
            return None
        return tuple(s.tokens[: (i + 1) * self.bs])

    def pop(self):
        b = self.free.pop(0)
        k = self.key_of[b]
        if k is not None:
            self.key_of[b] = None
            if self.index.get(k) == b:
                del self.index[k]
        self.refs[b] = 1
        return b

    def lookup(self, s):
        hits = []
        if self.caching:
            for i in range((s.reached - 1) // self.bs):
                k = self.key(s, i)
                if k is None or k not in self.index:
                    break
                hits.append(self.index[k])
        return hits

    def need(self, s, target, hits):
        fresh = max(0, -(-target // self.bs) - len(s.blocks) - len(hits))
        return fresh + sum(self.refs[b] == 0 for b in hits)

    def allocate(self, s, target, hits=()):
        if self.need(s, target, hits) > len(self.free):
            return False
        for b in hits:
            if self.refs[b] == 0:
                self.free.remove(b)
            self.refs[b] += 1
        s.blocks += hits
        while len(s.blocks) < -(-target // self.bs):
            s.blocks.append(self.pop())
        if self.caching:
            for i in range(
                max(s.computed // self.bs, len(hits)), min(target, s.reached) // self.bs
            ):
                k = self.key(s, i)
                if k is not None:
                    self.key_of[s.blocks[i]] = k
                    self.index[k] = s.blocks[i]
        return True

    def release(self, s):
        for b in reversed(s.blocks):
            self.refs[b] -= 1
            if self.refs[b] == 0:
                self.free.append(b)
        s.blocks = []

    # scheduler
    def enqueue(self, s):
        at = len(self.waiting)
        while at and (self.waiting[at - 1].arrival, self.waiting[at - 1].rid) > (s.arrival, s.rid):
            at -= 1
        self.waiting.insert(at, s)

    def cancel(self, rid):
        for place in (self.waiting, self.running):
            for s in place:
                if s.rid == rid:
                    place.remove(s)
                    self.release(s)
                    return s
        return None

    def schedule(self, now):
        budget = self.t.tokens_max
        cap = self.t.long_prefill_token_threshold or 10**9
        items, preempted, stopped = [], [], False
        for s in list(self.running):
            if stopped or budget <= 0:
                break
            if s not in self.running:
                continue
            new = min(s.reached - s.computed, cap, budget)
            if new <= 0:
                continue  # its token is still in an earlier batch in flight
            while not self.allocate(s, s.computed + new):
                victim = self.running.pop()
                self.release(victim)
                victim.computed = 0
                victim.epoch += 1
                victim.preemptions += 1
                self.waiting.insert(0, victim)
                preempted.append(victim.rid)
                if victim is s:
                    stopped = True
                    break
            else:
                items.append((s, new, s.computed))
                budget -= new
        # An engine that had to preempt all requests would schedule again at once.
        if not preempted or not (self.running or self.flights):
            self._admit(items, budget, cap)
        for s, new, had in items:
            s.computed = had + new
            if s.generated == 0 and s.computed >= s.prompt:
                s.prefill_scheduled = now
        if items:
            self.flights.append([(s, had + new, s.epoch) for s, new, had in items])
        return items, preempted

    def _admit(self, items, budget, cap):
        at = 0
        while at < len(self.waiting) and budget > 0 and len(self.running) < self.t.requests_max:
            s = self.waiting[at]
            hits = self.lookup(s)
            had = len(hits) * self.bs
            new = min(s.reached - had, cap)
            fits = self.t.chunked_prefill or new <= budget
            new = min(new, budget)
            if fits and self.t.reserve_full_sequence:
                fits = self.need(s, s.reached, hits) <= len(self.free)
            if not fits or not self.allocate(s, had + new, hits):
                if self.t.skip_blocked:
                    at += 1
                    continue
                break
            self.waiting.pop(at)
            if s.preemptions:
                s.recomputed += s.reached - had
            if s.hit < 0:
                s.hit = had
            s.computed = had
            self.running.append(s)
            items.append((s, new, had))
            budget -= new

    def complete(self, now):
        finished, gaps = [], []
        for s, target, epoch in self.flights.pop(0):
            if s not in self.running or s.epoch != epoch or target < s.reached:
                continue
            s.generated += 1
            if s.first < 0:
                s.first = now
            else:
                gaps.append(now - s.last)
                s.max_gap = max(s.max_gap, now - s.last)
            s.last = now
            if s.generated == s.output:
                finished.append(s)
        for s in finished:
            self.running.remove(s)
            self.release(s)
        return finished, gaps
