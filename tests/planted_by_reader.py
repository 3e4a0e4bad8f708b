"""Sixty more bugs, planted by a reader of docs and core that had not looked at the campaign.

Of the kinds that reviewers plant: the wrong end of a queue, a block too many, a clock that starts at
the wrong time, a stale signal, the wrong member of a group, a figure counted twice. Misses stay.
`python -m tests.planted --campaign 300 --list reader` plants each.

The campaign as it was found 7 of 60 within 25 seeds. With the rules and worlds that this list asked
for it finds at least 49 within 300: 41, and eight more with the rules of caches, drafts and moves.
Not found so far: fair share that charges a token (vllm), the shortest prefix first (lpm), outputs
owed again, a prefix that another computes, where a shutting replica's requests go, which copy or
pair scaling avoids, padding and waits of waves, ranks of experts, windows of the roofline.
"""

from __future__ import annotations

from typing import Final

from tests.planted_worlds import Bug

READER: Final[tuple[Bug, ...]] = (
    # Queues and admission.
    (
        "a request that comes late, but arrived early, waits behind all",
        "scheduling/queues.py",
        "            if arrival_order(last) > arrival_order(request):\n",
        "            if False:\n",
    ),
    (
        "a preempted request waits behind all",
        "scheduling/queues.py",
        "        self._requests.move_to_end(request.request_id, last=False)\n",
        "",
    ),
    (
        "the least urgent priority goes first",
        "scheduling/queues.py",
        "            urgency = request.priority\n",
        "            urgency = -request.priority\n",
    ),
    (
        "of equal priorities the youngest goes first",
        "scheduling/queues.py",
        "        return urgency, request.arrival_ns, request.request_id\n",
        "        return urgency, -request.arrival_ns, request.request_id\n",
    ),
    (
        "requests without a deadline go first",
        "scheduling/queues.py",
        "if request.deadline_ns >= 0 else _NO_DEADLINE",
        "if request.deadline_ns >= 0 else 0",
    ),
    (
        "a tenant that was away is owed its whole absence",
        "scheduling/queues.py",
        "max(self._served.get(tenant, 0), floor)",
        "self._served.get(tenant, 0)",
    ),
    (
        "vllm: first pieces may be longer than the threshold",
        "scheduling/vllm.py",
        "        new = min(reached - had, self._threshold)\n",
        "        new = reached - had\n",
    ),
    (
        "vllm: reserve_full_sequence reserves the first piece",
        "scheduling/vllm.py",
        "        wanted = reached if self.settings.reserve_full_sequence else had + new\n",
        "        wanted = had + new\n",
    ),
    (
        "vllm: requests are admitted in an iteration that preempted one",
        "scheduling/vllm.py",
        "        if self._queue.count and not (has_evicted and (running.requests or running.records))"
        ":\n",
        "        if self._queue.count:\n",
    ),
    (
        "the request admitted first is preempted",
        "scheduling/running.py",
        "        return self.requests[next(reversed(self.requests))]\n",
        "        return self.requests[next(iter(self.requests))]\n",
    ),
    (
        "vllm: fair share charges one token a request",
        "scheduling/vllm.py",
        "            self._queue.charge(request.tenant, request.prompt_tokens)\n",
        "            self._queue.charge(request.tenant, 1)\n",
    ),
    (
        "ahead: requests are seen by the batch that has been formed",
        "scheduling/vllm.py",
        "            self._see(self.running.last_start_ns)  # the last batch started: this one was "
        "formed\n",
        "            self._see(now_ns)\n",
    ),
    (
        "sglang: the request with most outputs is retracted first",
        "scheduling/sglang/retraction.py",
        "    return seat.made, -seat.prompt_tokens\n",
        "    return -seat.made, -seat.prompt_tokens\n",
    ),
    (
        "sglang: lof takes the shortest output first",
        "scheduling/sglang/orders.py",
        "    return -request.max_output_tokens\n",
        "    return request.max_output_tokens\n",
    ),
    (
        "sglang: lpm takes the shortest cached prefix first",
        "scheduling/sglang/orders.py",
        "else -node.end\n",
        "else node.end\n",
    ),
    (
        "sglang: running requests owe their whole output again",
        "scheduling/sglang/admission.py",
        "            owed += min(one.output_max - one.made, OUTPUT_MAX)\n",
        "            owed += min(one.output_max, OUTPUT_MAX)\n",
    ),
    (
        "sglang: the part of outputs that counts never falls",
        "scheduling/sglang/scheduler.py",
        "            if self._fits(batch):\n"
        "                self._ratio = max(self._ratio - self._decay, self._least_ratio)\n",
        "            if self._fits(batch):\n                pass\n",
    ),
    (
        "sglang: decodes of a mixed batch do not count in the chunk",
        "scheduling/sglang/admission.py",
        "        self.chunk_left = rules.chunk_tokens - decodes\n",
        "        self.chunk_left = rules.chunk_tokens\n",
    ),
    (
        "tensorrt_llm: the request that came first is paused",
        "scheduling/tensorrt_llm/scheduler.py",
        "        return max(self.running.requests.values(), key=_arrival)\n",
        "        return min(self.running.requests.values(), key=_arrival)\n",
    ),
    (
        "tensorrt_llm: no eviction is guaranteed for one token of output",
        "scheduling/tensorrt_llm/capacity.py",
        "    output = 1 if hands_off else request.max_output_tokens\n",
        "    output = 1\n",
    ),
    (
        "tensorrt_llm: pieces end inside a block",
        "scheduling/tensorrt_llm/chunks.py",
        "else budget_tokens - budget_tokens % unit_tokens\n",
        "else budget_tokens\n",
    ),
    (
        "tensorrt_llm: a request does not wait for a prefix that another computes",
        "scheduling/tensorrt_llm/capacity.py",
        "        if key in self._keys:\n            return True\n",
        "        if key in self._keys:\n            return False\n",
    ),
    # KV.
    (
        "the head of a sequence is evicted before its tail",
        "kv/blocks.py",
        "            parts.reverse()\n",
        "",
    ),
    (
        "a whole prompt may be found",
        "kv/blocks.py",
        "        usable_tokens = request.prompt_tokens + request.generated_tokens - 1\n"
        "        runs: list[Run] = []\n"
        "        found = self._index.find(chain, usable_tokens",
        "        usable_tokens = request.prompt_tokens + request.generated_tokens - 1\n"
        "        runs: list[Run] = []\n"
        "        found = self._index.find(chain, (usable_tokens + 1)",
    ),
    (
        "lower tiers evict what was written last",
        "kv/tiers.py",
        "            _, freed = self._chunks.popitem(last=False)\n",
        "            _, freed = self._chunks.popitem(last=True)\n",
    ),
    (
        "a recall brings one chunk, however many there are",
        "kv/blocks.py",
        "                recall_bytes = count * tier.chunk_bytes\n",
        "                recall_bytes = tier.chunk_bytes\n",
    ),
    (
        "KV of sessions is kept for ever",
        "kv/free_list.py",
        "        while self._expiries and self._expiries[0][0] <= now_ns:\n",
        "        while False:\n",
    ),
    # Migration.
    (
        "a lease begins with the batch that came last",
        "migration/outbound.py",
        "max(self.now_ns, min(since_ns) + self.lease_ns)",
        "max(self.now_ns, max(since_ns) + self.lease_ns)",
    ),
    (
        "a batch whose transfer failed goes to the end of the queue",
        "migration/outbound.py",
        "            self.queue.appendleft(batch)\n            self.arm_lease()\n",
        "            self.queue.append(batch)\n            self.arm_lease()\n",
    ),
    (
        "the first token goes with the KV, and its time does not",
        "migration/outbound.py",
        "            if outbound.kv.has_first_token:\n"
        "                request.take_first_token(outbound.now_ns)\n",
        "",
    ),
    (
        "a connector's cost of blocks is that of one block",
        "migration/outbound.py",
        "            setup_ns += kv.connector_block_ns * blocks\n",
        "            setup_ns += kv.connector_block_ns\n",
    ),
    (
        "the request admitted first is moved",
        "migration/live.py",
        "        for request in reversed(source.view().residents()):\n",
        "        for request in list(source.view().residents()):\n",
    ),
    (
        "a replica that shuts moves its requests to the fullest one",
        "migration/live.py",
        "            target = min(open_, key=",
        "            target = max(open_, key=",
    ),
    (
        "every transfer hides behind its iteration",
        "migration/outbound.py",
        "        overlapped_ns = batch.prefill_ns if kv.layerwise else 0\n",
        "        overlapped_ns = batch.prefill_ns\n",
    ),
    # Gateway, routing, sessions.
    (
        "router signals are half as old",
        "cluster/dispatch.py",
        "            late = view.late(self.kernel.now_ns - self._delay_ns)\n",
        "            late = view.late(self.kernel.now_ns - self._delay_ns // 2)\n",
    ),
    (
        "load counts a waiting request as one",
        "routing/policies.py",
        "WAITING_WEIGHT = 4\n",
        "WAITING_WEIGHT = 1\n",
    ),
    (
        "prefix-aware takes the shortest match",
        "routing/policies.py",
        "            key = (matched / request.prompt_tokens - loads",
        "            key = (-matched / request.prompt_tokens - loads",
    ),
    (
        "a client that asks again waits for ever",
        "cluster/gateway.py",
        "            cancel_after_ns=request.cancel_after_ns,\n",
        "            cancel_after_ns=-1,\n",
    ),
    (
        "a request that is asked again keeps its first deadline",
        "cluster/gateway.py",
        "deadline_ns=deadline_ns + at_ns - request.arrival_ns if deadline_ns >= 0 else -1",
        "deadline_ns=deadline_ns",
    ),
    (
        "one request fewer may be outstanding",
        "cluster/gateway.py",
        "        if limit and self.outstanding > limit:\n",
        "        if limit and self.outstanding >= limit:\n",
    ),
    (
        "held requests are routed youngest first",
        "cluster/gateway.py",
        "            self.route(self.held.popleft())\n",
        "            self.route(self.held.pop())\n",
    ),
    (
        "a turn waits for the tool of the turn that ended last only",
        "workload/session.py",
        "            self.ready_ns[follower] = max(self.ready_ns[follower], at_ns)\n",
        "            self.ready_ns[follower] = at_ns\n",
    ),
    # Autoscaling.
    (
        "hpa: down as soon as up",
        "autoscale/hpa.py",
        "s_to_ns(table.scale_down_stabilization_s)",
        "s_to_ns(table.scale_up_stabilization_s)",
    ),
    (
        "blitz: blocks of live replicas count as tokens",
        "autoscale/demand.py",
        "        snapshot.waiting_tokens + snapshot.block_tokens * live,\n",
        "        snapshot.waiting_tokens + live,\n",
    ),
    (
        "the fullest of shutting decode replicas comes back first",
        "autoscale/draft.py",
        "            self.actions.append(Revive(self.shutting_decode.pop(0).replica_id))\n",
        "            self.actions.append(Revive(self.shutting_decode.pop().replica_id))\n",
    ),
    (
        "host memory gives up the copy that was used last",
        "autoscale/host_cache.py",
        "        return [cache for _, _, cache in sorted(held, key=lambda entry: entry[:2])]\n",
        "        return [cache for _, _, cache in sorted(held, key=lambda e: (-e[0], e[1]))]\n",
    ),
    (
        "pairs whose load was given up are tried again at once",
        "autoscale/scaler.py",
        "for pair, until_ns in self._avoided.items() if until_ns > now_ns)",
        "for pair, until_ns in self._avoided.items() if until_ns < now_ns)",
    ),
    # Waves and expert groups.
    (
        "a wave is padded to its smallest batch",
        "replica/wave.py",
        "            entry.shape.padded_tokens = max(sizes)\n",
        "            entry.shape.padded_tokens = min(sizes)\n",
    ),
    (
        "members wait for the first member's attention",
        "replica/wave.py",
        "    return [max(attention_ns) - own_ns for own_ns in attention_ns]\n",
        "    return [max(0, attention_ns[0] - own_ns) for own_ns in attention_ns]\n",
    ),
    (
        "the experts of the member behind the lost one are read again",
        "faults/rank_loss.py",
        "        firsts = (self._members[member] * each for member in sorted(lost))\n",
        "        firsts = ((self._members[member] + 1) * each for member in sorted(lost))\n",
    ),
    # Time.
    (
        "jitter: pauses come on top of the mean",
        "latency/jitter.py",
        "        added_ns = np.full(_BLOCK, -self._mean_ns, dtype=np.int64)\n",
        "        added_ns = np.full(_BLOCK, 0, dtype=np.int64)\n",
    ),
    (
        "jitter: a pause falls on the last stage",
        "latency/jitter.py",
        "        spread[0] += taken - sum(spread)\n",
        "        spread[-1] += taken - sum(spread)\n",
    ),
    (
        "front end: a prompt's tokens cost nothing",
        "latency/front_end.py",
        "        ready_ns = free_ns + wait_ns + prompt_tokens * token_ns\n",
        "        ready_ns = free_ns + wait_ns\n",
    ),
    (
        "front end: a token stands at the end of its step's events",
        "latency/front_end.py",
        "wait_ns, rest_ns = start_ns - end_ns, work_ns // 2 + self._output_ns\n",
        "wait_ns, rest_ns = start_ns - end_ns, work_ns + self._output_ns\n",
    ),
    (
        "roofline: a window does not bound what a decode reads",
        "latency/roofline.py",
        "            seen = min(seen, count * self.spec.window)\n",
        "",
    ),
    (
        "speculation: the first draft of a step is always accepted",
        "features/speculation/acceptance.py",
        "            if numbers[position - first + index] >= limit:\n",
        "            if index and numbers[position - first + index] >= limit:\n",
    ),
    # Figures.
    (
        "throughput counts from the start of the run",
        "report/summary.py",
        "    duration_s = max(stats.last_token_ns - stats.first_arrival_ns, 0) / NS_PER_S\n",
        "    duration_s = max(stats.last_token_ns, 0) / NS_PER_S\n",
    ),
    (
        "the last quarter of waits is the last half",
        "report/load_verdict.py",
        "mean_of(waits[-max(count // 4, 1) :])",
        "mean_of(waits[-max(count // 2, 1) :])",
    ),
    (
        "idle GPU time forgets that a replica has several GPUs",
        "cluster/audit.py",
        "busy_ns * len(replica.gpus))",
        "busy_ns)",
    ),
    (
        "the timeseries counts completions since the start",
        "report/timeseries.py",
        "{sample.completed - before.completed}",
        "{sample.completed}",
    ),
)
