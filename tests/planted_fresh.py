"""Sixty bugs, planted by a reader that was given docs and code, but not the campaign.

Nothing under `emu/apps/chaos`, no test of the campaign and no other list of bugs was read for them
(how a feature draws its part of a world stands in its own module and was in view). None stands where
a bug of another list does: that was compared by a program, and those that did were replaced unseen.
Places are spread over the packages that decide behavior, about by their lines: three engines, KV,
pipelines, ranks, experts, live scaling, live mode, and the figures that are published. Each is a
slip of one place that a maintainer might make. The list was committed before the first run. Misses
stay in it. `python -m tests.planted --campaign 300 --list fresh` plants each.

The campaign as it was (1a70ff0f) caught 18 of 60 within 300 seeds (`FIRST`). Rules and worlds that
followed caught 13 more (`SINCE`), and 17 with a second model of costs, batches of more schedulers
and a second tour (`LATER`). Run whole at ba301e5d it caught 46. With a third tour and rules of room,
refusals, spares and helpers eight more are caught, each at a seed that was tried (`CORNERS`), and
the three whose seeds the tour took were caught again at others: 54 in all. Nearest unit tests catch
the other six. The list has shaped the campaign; seeds of `FIRST` and `SINCE` that are stops of a
tour have other worlds now.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tests.planted_worlds import Bug

_ORDERS: Final[tuple[Bug, ...]] = (
    (
        "a tenant that comes back starts behind the most served one, not beside the least",
        "scheduling/queues.py",
        "floor = min((self._served[other] for other in self._tenants), default=0)",
        "floor = max((self._served[other] for other in self._tenants), default=0)",
    ),
    (
        "tokens that wait do not include those of requests not looked at yet",
        "scheduling/looking.py",
        "        return self._queue.prompt_tokens + self._unseen.prompt_tokens\n",
        "        return self._queue.prompt_tokens\n",
    ),
    (
        "sequences that have ended meanwhile cost a step one token, without their drafts",
        "scheduling/vllm.py",
        "            verify.tokens += 1 + verifying.drafting.tokens\n",
        "            verify.tokens += 1\n",
    ),
    (
        "a retracted request is counted with the output that it has made already",
        "scheduling/sglang/admission.py",
        "        left = request.max_output_tokens - request.generated_tokens\n",
        "        left = request.max_output_tokens\n",
    ),
    (
        "the part of outputs that admission counts does not start anew after a rest",
        "scheduling/sglang/scheduler.py",
        "        if batch is None:  # it is idle, and looks again\n"
        "            self._ratio = self._first_ratio\n",
        "        if batch is None:  # it is idle, and looks again\n",
    ),
    (
        "contexts that advance in turn leave the last unit of the budget unused",
        "scheduling/tensorrt_llm/chunks.py",
        "            if 0 < more <= budget_tokens:\n",
        "            if 0 < more < budget_tokens:\n",
    ),
    (
        "the padding of a batch of prompts leaves out what the new prompt adds to the others",
        "scheduling/vidur/vllm_v0.py",
        "            padded = (len(plan.chunks) + 1) * max(longest, tokens)\n",
        "            padded = len(plan.chunks) * longest + tokens\n",
    ),
    (
        "a rotation that is planned again begins with costs of the first rotation",
        "scheduling/rotation.py",
        "                first = firsts[stage] + (turn.rounds + before) * growth\n",
        "                first = firsts[stage] + before * growth\n",
    ),
    (
        "of the time on no stage only that before the first is taken off what ran",
        "scheduling/pipeline.py",
        "        request.execution_ns -= wait_ns\n",
        "        request.execution_ns -= queued_ns\n",
    ),
    (
        "a step that brings several tokens counts one gap too many",
        "scheduling/verifying.py",
        "            progress.gaps_ns.extend([0] * (tokens - 1))\n",
        "            progress.gaps_ns.extend([0] * tokens)\n",
    ),
)
_MEMORY: Final[tuple[Bug, ...]] = (
    (
        "of kept blocks those of the most urgent priority are taken first",
        "kv/free_list.py",
        "            self._order = sorted(self._kept, reverse=True)\n",
        "            self._order = sorted(self._kept)\n",
    ),
    (
        "a window that begins inside a block is admitted with a block too few",
        "kv/groups.py",
        "            return min(whole, ceil_div(reach, self.block_tokens) + 1)\n",
        "            return min(whole, ceil_div(reach, self.block_tokens))\n",
    ),
    (
        "a single chunk of a lower tier is no hit",
        "kv/blocks.py",
        "            if count and gained >= chunk:\n",
        "            if count and gained > chunk:\n",
    ),
    (
        "a recall brings the blocks of a hybrid model up without its states",
        "kv/grouped.py",
        "                recalled = found * tier.chunk_bytes + self._state_bytes\n",
        "                recalled = found * tier.chunk_bytes\n",
    ),
)
_REPLICAS: Final[tuple[Bug, ...]] = (
    (
        "of several recalls of a batch from one tier only the last one moves",
        "replica/tier_traffic.py",
        "            by_tier[tier] = by_tier.get(tier, 0) + size_bytes\n",
        "            by_tier[tier] = size_bytes\n",
    ),
    (
        "experts are placed anew only where a whole interval lies between two waves",
        "replica/wave.py",
        "        is_due = before_ns // self.interval_ns < now_ns // self.interval_ns\n",
        "        is_due = now_ns - before_ns >= self.interval_ns\n",
    ),
    (
        "all tokens of a wave, not the largest batch, are held against the largest graph",
        "replica/wave.py",
        "        is_large = 0 < self.padded_tokens_max < max(sizes)\n",
        "        is_large = 0 < self.padded_tokens_max < sum(sizes)\n",
    ),
    (
        "after a pause the stages are free when they would have been without it",
        "replica/flight/staged.py",
        "        free_ns = self.pipeline.free_ns\n"
        "        free_ns[:] = [at_ns + longer_ns if at_ns > since_ns else at_ns"
        " for at_ns in free_ns]\n",
        "",
    ),
    (
        "a rest that has ended counts as standby to its end",
        "replica/counters.py",
        "        self._standby_ns += min(now_ns - self.rest_since_ns, self.standby_limit_ns)\n",
        "        self._standby_ns += now_ns - self.rest_since_ns\n",
    ),
    (
        "the helper that asked last is the first to get a batch",
        "replica/relay_board.py",
        "        self._parked.append(old_id)\n",
        "        self._parked.appendleft(old_id)\n",
    ),
)
_COSTS: Final[tuple[Bug, ...]] = (
    (
        "a batch of four runs in the graph of eight",
        "latency/engine.py",
        "    elif tokens > 4:\n",
        "    elif tokens >= 4:\n",
    ),
    (
        "an all-gather moves the part of one rank only",
        "latency/kernels/machine.py",
        "        return 0.5e-6 * fixed_us + share * ranks * size_bytes / rate\n",
        "        return 0.5e-6 * fixed_us + share * size_bytes / rate\n",
    ),
    (
        "experts that replicas share compute the tokens of one of them",
        "latency/layer_costs.py",
        "            tokens * max(1, self.ep // self.tp),\n",
        "            tokens,\n",
    ),
    (
        "the last layer of halves that take turns is followed by one more, not by the head",
        "latency/offload/interleaving.py",
        "            now_ns += half.after if layer == layers - 1 else half.enter\n",
        "            now_ns += half.after if layer == layers else half.enter\n",
    ),
    (
        "where nothing is overlapped, penalties cost no time of the host",
        "latency/engine_steps.py",
        "        return launches_ns, exposed_ns + host_ns\n",
        "        return launches_ns, host_ns\n",
    ),
    (
        "every further slot goes to the most loaded expert, however many copies it has",
        "latency/experts/placement.py",
        "        heapq.heapreplace(most, (-loads[one] / copies[one], one))\n",
        "        heapq.heapreplace(most, (-loads[one], one))\n",
    ),
    (
        "states are read and written for each token of a prompt, not for each prompt",
        "latency/mixed_roofline.py",
        "                seconds += count * self._state_traffic_s(kind, len(new))\n",
        "                seconds += count * self._state_traffic_s(kind, sum(new))\n",
    ),
    (
        "verifying costs a token for each sequence, whatever its drafts",
        "latency/linear.py",
        "            count += shape.verify.tokens\n",
        "            count += shape.verify.count\n",
    ),
    (
        "what is kept for communicators does not grow with the ranks",
        "engines/tensorrt_llm.py",
        "(rule.parallel_bytes * tp // 2 if tp > 1 else 0)",
        "(rule.parallel_bytes if tp > 1 else 0)",
    ),
)
_WORKLOADS: Final[tuple[Bug, ...]] = (
    (
        "gaps of gamma arrivals have the variation's root",
        "workload/arrivals.py",
        "        shape = 1 / table.cv**2\n",
        "        shape = 1 / table.cv\n",
    ),
    (
        "the rate between bursts counts for the bursts too",
        "workload/arrivals.py",
        "    in_period = in_burst + table.rate_per_s * (every_s - length_s)\n",
        "    in_period = in_burst + table.rate_per_s * every_s\n",
    ),
    (
        "a file that is scaled to a rate has one gap more than it has",
        "workload/opened.py",
        "    return (facts.lines - 1) / span_s / asked.table.rate_per_s\n",
        "    return facts.lines / span_s / asked.table.rate_per_s\n",
    ),
    (
        "the block that a prompt has begun is not known by its id",
        "workload/formats/mooncake.py",
        "(blocks := -(-row.input_length // BLOCK_TOKENS))",
        "(blocks := row.input_length // BLOCK_TOKENS)",
    ),
)
_FEATURES: Final[tuple[Bug, ...]] = (
    (
        "rates by position are taken for chances of a draft whose predecessors were accepted",
        "features/speculation/acceptance.py",
        "            rates.append(rate / before if before else 0.0)\n            before = rate\n",
        "            rates.append(rate / before if before else 0.0)\n",
    ),
    (
        "the drafter passes once more than it has drafts to make",
        "features/speculation/passes.py",
        "            for number in range(1, self._tokens):\n",
        "            for number in range(self._tokens):\n",
    ),
    (
        "an adapter that is used again keeps its place among those to leave the GPU",
        "features/lora/slots.py",
        "            self._on_gpu.pop(adapter, None)\n            self._on_gpu[adapter] = None\n",
        "            self._on_gpu[adapter] = None\n",
    ),
    (
        "an image that another request has sent is ready before it is encoded",
        "features/images/fleet.py",
        "                ready_ns = max(ready_ns, kept[0])\n",
        "",
    ),
)
_MOVES: Final[tuple[Bug, ...]] = (
    (
        "links of the wrong leaf: out by the receiver's, in by the sender's",
        "network/topology.py",
        "        up, down = self.leaf_links[src_leaf][0], self.leaf_links[dst_leaf][1]\n",
        "        up, down = self.leaf_links[dst_leaf][0], self.leaf_links[src_leaf][1]\n",
    ),
    (
        "what the division into chunks leaves over is not sent",
        "network/chunks.py",
        "    return [chunk] * ceil_div(size_bytes, chunk)\n",
        "    return [chunk] * splits\n",
    ),
    (
        "the pause after a refusal grows by as much each time and does not double",
        "migration/outbound.py",
        "            self.out.append(Pause(RETRY_NS << min(attempts, 10)))\n",
        "            self.out.append(Pause(RETRY_NS * min(attempts, 10)))\n",
    ),
    (
        "a move that rebalances does not count what it takes at the other replica",
        "migration/live.py",
        "    return (other.blocks_used + needed) / other.blocks_total < one.blocks_used / one.blocks_total\n",
        "    return other.blocks_used / other.blocks_total < one.blocks_used / one.blocks_total\n",
    ),
    (
        "a connector is not paid for the block that a request has begun",
        "migration/transfer.py",
        "    return -(-(request.prompt_tokens + (request.generated_tokens or 1)) // block_size)\n",
        "    return (request.prompt_tokens + (request.generated_tokens or 1)) // block_size\n",
    ),
    (
        "two blocks are still too many to stop a request that moves",
        "migration/live_move.py",
        "            if self._blocks_left(self.tokens) > STOP_BLOCKS:\n",
        "            if self._blocks_left(self.tokens) >= STOP_BLOCKS:\n",
    ),
    (
        "a colocated replica with a long queue is taken for an idle one",
        "autoscale/local_plans.py",
        "    views = sorted(snapshot.replicas, key=lambda v: (v.running + v.waiting, v.replica_id))\n",
        "    views = sorted(snapshot.replicas, key=lambda v: (v.running, v.replica_id))\n",
    ),
    (
        "spares expire only once the newest one's time is up",
        "autoscale/draft.py",
        "        return min(free, key=_shut_since) if free else None\n",
        "        return max(free, key=_shut_since) if free else None\n",
    ),
    (
        "late metrics are the newest sample there is",
        "autoscale/sight.py",
        "        return with_load(now, samples[0][1])\n",
        "        return with_load(now, samples[-1][1])\n",
    ),
    (
        "loads are scaled by all replicas' together, so that prefixes nearly always win",
        "routing/policies.py",
        "        scale = 1 + max(loads)\n",
        "        scale = 1 + sum(loads)\n",
    ),
    (
        "an overload adds so many copies of an arrival, and does not come to so many",
        "faults/client_faults.py",
        "    copies = max(1, round(fault.factor)) - 1\n",
        "    copies = max(1, round(fault.factor))\n",
    ),
    (
        "the end of one straggler ends all that slows the replica down",
        "faults/replica_faults.py",
        "        replica.actor.tell(SlowdownSet(factor=factor))\n",
        "        replica.actor.tell(SlowdownSet(factor=1.0))\n",
    ),
    (
        "a request starts again once more than it may",
        "faults/recovery.py",
        "request.retries >= table.max_retries",
        "request.retries > table.max_retries",
    ),
)
_FIGURES: Final[tuple[Bug, ...]] = (
    (
        "the wait of a request leaves out its time between replicas",
        "report/records.py",
        "        wait_ns = queue_ns + request.migration_ns\n",
        "        wait_ns = queue_ns\n",
    ),
    (
        "the rate of arrivals has one gap more than there are",
        "report/load_verdict.py",
        "        arrival_rate_per_s=_rate(stats.requests - 1, arrival_span_ns),\n",
        "        arrival_rate_per_s=_rate(stats.requests, arrival_span_ns),\n",
    ),
    (
        "prompts of which nothing was found are no part of the hit rate",
        "report/records.py",
        "            hits[3] += request.prompt_tokens\n            if request.prefix_hit_tokens:\n",
        "            if request.prefix_hit_tokens:\n                hits[3] += request.prompt_tokens\n",
    ),
    (
        "a model's objective of TTFT that grows with the prompt holds beside the plain one",
        "report/model_figures.py",
        "        limits = limits[1:]\n",
        "",
    ),
    (
        "one GPU of a replica is on standby",
        "cluster/energy.py",
        "        gpu += standby_w * standby_ns / NS_PER_S * len(replica.gpus)\n",
        "        gpu += standby_w * standby_ns / NS_PER_S\n",
    ),
    (
        "a deadline of the closed loop stays where the workload had it",
        "cluster/gateway.py",
        "            if request.deadline_ns >= 0:\n"
        "                request.deadline_ns += at_ns - request.arrival_ns\n",
        "",
    ),
    (
        "states take their ratio of all that is free, not of what KV takes",
        "cluster/state_slots.py",
        "            count = int((free_bytes - beside) * ratio / (1 + ratio)) // each\n",
        "            count = int((free_bytes - beside) * ratio) // each\n",
    ),
    (
        "spares leave in order of their ids, not of the time since they shut",
        "cluster/gpu_sharing.py",
        "in sorted(spares, key=lambda spare: spare[:2])[:replicas]:\n",
        "in sorted(spares, key=lambda spare: spare[1])[:replicas]:\n",
    ),
    (
        "a call is stamped when it is read, not when its bytes came",
        "apps/serve/intake.py",
        "        ticket = Ticket(self.kernel.wall_ns(age_ns))\n",
        "        ticket = Ticket(self.kernel.wall_ns())\n",
    ),
    (
        "an engine's queue time begins at the door, with the front end in it",
        "apps/serve/statistics.py",
        "        self.queue.add((times.scheduled_ns - times.queued_ns) / NS_PER_S)\n",
        "        self.queue.add((times.scheduled_ns - times.came_ns) / NS_PER_S)\n",
    ),
)
FRESH: Final[tuple[Bug, ...]] = (
    *_ORDERS,
    *_MEMORY,
    *_REPLICAS,
    *_COSTS,
    *_WORKLOADS,
    *_FEATURES,
    *_MOVES,
    *_FIGURES,
)
FIRST: Final[Mapping[str, int]] = MappingProxyType(
    {
        "a tenant that comes back starts behind the most served one, not beside the least": 70,
        "tokens that wait do not include those of requests not looked at yet": 222,
        "contexts that advance in turn leave the last unit of the budget unused": 60,
        "a rotation that is planned again begins with costs of the first rotation": 198,
        "of the time on no stage only that before the first is taken off what ran": 285,
        "of kept blocks those of the most urgent priority are taken first": 101,
        "a single chunk of a lower tier is no hit": 44,
        "after a pause the stages are free when they would have been without it": 231,
        "an adapter that is used again keeps its place among those to leave the GPU": 214,
        "a move that rebalances does not count what it takes at the other replica": 64,
        "a connector is not paid for the block that a request has begun": 146,
        "spares expire only once the newest one's time is up": 113,
        "loads are scaled by all replicas' together, so that prefixes nearly always win": 178,
        "the wait of a request leaves out its time between replicas": 194,
        "the rate of arrivals has one gap more than there are": 150,
        "prompts of which nothing was found are no part of the hit rate": 38,
        "one GPU of a replica is on standby": 47,
        "a deadline of the closed loop stays where the workload had it": 56,
    }
)
"""The seed at which the campaign caught a bug when the list was new; it tries the cheapest that enter it first."""
SINCE: Final[Mapping[str, int]] = MappingProxyType(
    {
        "verifying costs a token for each sequence, whatever its drafts": 35,
        "sequences that have ended meanwhile cost a step one token, without their drafts": 228,
        "gaps of gamma arrivals have the variation's root": 162,
        "a file that is scaled to a rate has one gap more than it has": 214,
        "an overload adds so many copies of an arrival, and does not come to so many": 76,
        "the end of one straggler ends all that slows the replica down": 106,
        "a request starts again once more than it may": 4,
        "links of the wrong leaf: out by the receiver's, in by the sender's": 42,
        "a step that brings several tokens counts one gap too many": 2,
        "of several recalls of a batch from one tier only the last one moves": 109,
        "a rest that has ended counts as standby to its end": 0,
        "a model's objective of TTFT that grows with the prompt holds beside the plain one": 98,
        "rates by position are taken for chances of a draft whose predecessors were accepted": 218,
    }
)
"""The same of bugs that it caught with the rules and worlds that followed from the list."""
LATER: Final[Mapping[str, int]] = MappingProxyType(
    {
        "a retracted request is counted with the output that it has made already": 236,
        "the part of outputs that admission counts does not start anew after a rest": 60,
        "the padding of a batch of prompts leaves out what the new prompt adds to the others": 52,
        "a recall brings the blocks of a hybrid model up without its states": 84,
        "experts are placed anew only where a whole interval lies between two waves": 50,
        "a batch of four runs in the graph of eight": 36,
        "an all-gather moves the part of one rank only": 4,
        "experts that replicas share compute the tokens of one of them": 44,
        "where nothing is overlapped, penalties cost no time of the host": 4,
        "states are read and written for each token of a prompt, not for each prompt": 20,
        "the rate between bursts counts for the bursts too": 54,
        "the drafter passes once more than it has drafts to make": 36,
        "an image that another request has sent is ready before it is encoded": 118,
        "what the division into chunks leaves over is not sent": 28,
        "two blocks are still too many to stop a request that moves": 76,
        "a colocated replica with a long queue is taken for an idle one": 68,
        "late metrics are the newest sample there is": 23,
    }
)
"""The same of bugs that it caught with costs, batches and queues restated whole."""
CORNERS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "a single chunk of a lower tier is no hit": 72,
        "the helper that asked last is the first to get a batch": 144,
        "what is kept for communicators does not grow with the ranks": 104,
        "the block that a prompt has begun is not known by its id": 88,
        "the pause after a refusal grows by as much each time and does not double": 40,
        "loads are scaled by all replicas' together, so that prefixes nearly always win": 168,
        "states take their ratio of all that is free, not of what KV takes": 16,
        "spares leave in order of their ids, not of the time since they shut": 224,
    }
)
"""The same of bugs that it catches with the third tour."""
