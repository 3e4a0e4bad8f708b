"""A replica with traffic in and out: stepping against leaping while reservations come and go.

Operations happen at instants inside iterations, as they do in a cluster. What changes the running
set waits for the end of the iteration in flight; reservations and releases act at once on settled
books, and the leap goes on if the scheduler says that it holds.
"""

from __future__ import annotations

from emu.latency.base import next_decode_shape
from emu.request import Request
from tests.scheduling.vllm_world import request_row, shape_row, step_ns

AT_ONCE = ("reserve", "unreserve", "release", "enqueue", "drain")


def inbound(rid, prompt, output, generated, now):
    r = Request(
        request_id=rid,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
    )
    r.generated_tokens = generated
    r.first_token_ns = r.last_token_ns = now
    return r


class Replica:
    def __init__(self, scheduler, operations, leap):
        self.s = scheduler
        self.operations = sorted(operations, key=lambda op: op[0])
        self.leap = leap
        self.log, self.ends = [], []
        self.reserved, self.detached = [], []
        self.at = 0
        self.rid = 1000
        self.leaps = 0

    def apply(self, op, now):
        _, kind, a, b = op
        s = self.s
        if kind == "enqueue":
            s.enqueue(inbound(self.rid, a, b, 0, -1), now)
        elif kind == "reserve":
            r = inbound(self.rid, a, b + 1, 1 + (a * b) % b, now)
            ok = s.reserve([r])
            self.log.append(("reserve", now, ok, s.blocks_used))
            if ok:
                self.reserved.append(r)
        elif kind == "unreserve" and self.reserved:
            s.unreserve([self.reserved.pop(a % len(self.reserved))])
        elif kind == "activate" and self.reserved:
            s.activate([self.reserved.pop(a % len(self.reserved))], now)
        elif kind == "release" and self.detached:
            s.release(self.detached.pop(a % len(self.detached)))
        elif kind == "drain":  # what is held for nothing would starve the last requests
            s.unreserve(self.reserved)
            for r in self.detached:
                s.release(r)
            self.reserved, self.detached = [], []
        elif kind == "adopt" and self.detached:
            s.adopt([self.detached.pop(a % len(self.detached))], now)
        elif kind in ("detach", "cancel"):
            here = list(s.residents())
            if here:
                r = here[a % len(here)]
                if kind == "cancel":
                    s.cancel(r)
                    self.ends.append(request_row(r, "cancelled", now))
                elif r.generated_tokens:
                    s.detach(r)
                    self.detached.append(r)
                    self.log.append(("detached", now, r.computed_tokens, r.kv_blocks))
        self.rid += 1

    def run(self):
        s, now, waiting_ops = self.s, 0, []
        while len(self.log) < 50_000:
            while self.at < len(self.operations) and self.operations[self.at][0] <= now:
                self.apply(self.operations[self.at], now)
                self.at += 1
            batch = s.schedule(now)
            if batch is None:
                s.drop_unschedulable(now)
                if self.at == len(self.operations):
                    break
                now = max(now, self.operations[self.at][0])
                continue
            now = self._execute(batch, now, waiting_ops)
            for op in waiting_ops:
                self.apply(op, now)
            waiting_ops.clear()
        assert s.recount() == []
        assert s.blocks_used == 0
        return self.log, self.ends

    def _execute(self, batch, now, waiting_ops):
        s = self.s
        shape, steps, longest = batch.shape, 0, 0
        started = now
        while True:
            s.settle(batch, steps + 1)
            row = shape_row(next_decode_shape(shape, steps) if steps else shape)
            cost = step_ns(next_decode_shape(shape, steps) if steps else shape)
            self.log.append([now, row, s.blocks_used, s.waiting_count, s.running_count, None])
            self.log[-1][-1] = cost
            end, cut = now + cost, False
            while self.at < len(self.operations) and self.operations[self.at][0] < end:
                op = self.operations[self.at]
                self.at += 1
                if op[1] in AT_ONCE:
                    self.apply(op, op[0])
                    cut = cut or not s.leap_holds(batch)
                else:
                    waiting_ops.append(op)
                    cut = True
            if self.at < len(self.operations) and self.operations[self.at][0] == end:
                cut = True
            steps += 1
            if steps == 1:
                batch.first_end_ns, after_first = end, len(self.log)
            longest = max(longest, cost)
            now = end
            if cut or steps == batch.max_steps:
                break
        self.leaps += steps > 1
        progress = s.complete(batch, steps, now, longest)
        assert s.recount() == []
        for r in progress.finished:
            self.ends.append(request_row(r, "finished", now))
        gaps = sorted(progress.gaps_ns)
        self.log.append(("tokens", now, gaps)) if gaps else None
        if progress.late_gaps_ns:  # stepping, these are told when the first iteration ends
            entry = ("tokens", batch.first_end_ns, sorted(progress.late_gaps_ns))
            self.log.insert(after_first, entry)
        assert now > started
        return now
