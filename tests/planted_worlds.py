"""Sixty bugs of the kinds that a campaign must find: timing, policy, sizes, strength, bytes, figures.

Written from the references, before it was looked which checks find them. `python -m tests.planted
--campaign 300` plants each and runs the campaign, then the unit tests of its package.

With 300 seeds the campaign alone catches 55 of 60, 43 of them within 25 seeds. Unit tests catch the
other five: `tests/faults` that delays of a link add up; `tests/migration` that both halves of a
batch are the first; `tests/autoscale` that rejection locks every replica, that it opens one again
without a wake-up, and that host copies expire at once.
"""

from __future__ import annotations

from typing import Final

Bug = tuple[str, str, str, str]
"""(name, file below emu/, text, what stands there instead)."""

BUGS: Final[tuple[Bug, ...]] = (
    # --- timing of iterations -------------------------------------------------------------------
    (
        "linear: context of prompts costs nothing",
        "latency/linear.py",
        "sum(shape.prefill_new)\n        count",
        "sum(shape.prefill_new[:1])\n        count",
    ),
    (
        "linear: rounded down",
        "latency/linear.py",
        "return max(1, (cost_ps + _HALF_NS_PS) // 1000)",
        "return max(1, cost_ps // 1000)",
    ),
    (
        "linear: the base counts once for all stages",
        "latency/linear.py",
        "return (self._one_stage_ns(shape),) * self.stages",
        "return (self._one_stage_ns(shape),) * (self.stages - 1) + (1,)",
    ),
    (
        "a straggler's factor is added, not multiplied",
        "faults/replica_faults.py",
        "SlowdownSet(factor=replica.slowdown * fault.factor)",
        "SlowdownSet(factor=replica.slowdown + fault.factor)",
    ),
    (
        "a straggler is half as slow",
        "replica/pace.py",
        "return cost_ns if self.slowdown == 1.0 else int(cost_ns * self.slowdown)",
        "return int(cost_ns * (1 + self.slowdown) / 2)",
    ),
    (
        "a straggler stays slow after its end",
        "faults/replica_faults.py",
        "        slowdown = replica.slowdown / fault.factor\n",
        "        slowdown = replica.slowdown\n",
    ),
    (
        "stages ignore stragglers",
        "replica/pace.py",
        "        if self.slowdown != 1.0:\n            costs_ns = tuple(",
        "        if False:\n            costs_ns = tuple(",
    ),
    (
        "a pause is not added to the iteration in flight",
        "replica/flight/step.py",
        "        self.due_ns = self._end_ns + self.books.clock.now_ns - since_ns\n",
        "        self.due_ns = self._end_ns\n",
    ),
    (
        "a pause ends twice as late",
        "faults/injector.py",
        "            self.later(s_to_ns(duration_s), partial(self._over, number))",
        "            self.later(2 * s_to_ns(duration_s), partial(self._over, number))",
    ),
    (
        "layers of live scaling cost a little more",
        "replica/live_scaling.py",
        "    task.upto_ns = pace.latency.iteration_ns(_cut(task.batch.shape, 0, layer + 1))",
        "    task.upto_ns = pace.latency.iteration_ns(_cut(task.batch.shape, 0, layer + 2))",
    ),
    (
        "a helper runs all layers",
        "replica/live_scaling.py",
        "_cut(shape, start, layers - start)",
        "_cut(shape, 0, layers)",
    ),
    # --- links ----------------------------------------------------------------------------------
    (
        "a degraded link carries the square of its factor",
        "faults/link_faults.py",
        "            rate *= factor\n",
        "            rate *= factor * factor\n",
    ),
    (
        "healed links keep their factor",
        "faults/link_faults.py",
        "            self._factors[link].remove(factor)\n            self._apply(link)\n",
        "            self._factors[link].remove(factor)\n",
    ),
    (
        "a link's delay counts once, however many there are",
        "faults/link_faults.py",
        "sum(delays)",
        "max(delays, default=0)",
    ),
    (
        "nics of machines are bits, not bytes",
        "units.py",
        "    return gbps * 1e9 / 8",
        "    return gbps * 1e9 / 10",
    ),
    (
        "latency of a path is left out",
        "network/topology.py",
        "        return max([self.links[index].latency_ns for index in path], default=0)",
        "        return 0",
    ),
    (
        "a link goes down once only",
        "faults/network_faults.py",
        "        if left:\n            strike.later(period_ns, lambda: down(left))\n",
        "",
    ),
    (
        "a link is down for twice as long",
        "faults/network_faults.py",
        "            strike.later(period_ns, lambda: up(left - 1))",
        "            strike.later(2 * period_ns, lambda: up(left - 1))",
    ),
    (
        "a partition is never joined",
        "faults/network_faults.py",
        "        strike.links.cut(pair, False)\n",
        "        pass\n",
    ),
    # --- bytes ----------------------------------------------------------------------------------
    (
        "KV of the first output token does not move",
        "migration/transfer.py",
        "        blocks += -(-(request.prompt_tokens + (request.generated_tokens or 1)) // block_size)",
        "        blocks += -(-request.prompt_tokens // block_size)",
    ),
    (
        "partial blocks do not move",
        "migration/transfer.py",
        "    return blocks * block_size * kv_bytes_per_token",
        "    return max(0, blocks - 1) * block_size * kv_bytes_per_token",
    ),
    (
        "overlap hides all of the transfer",
        "network/carrier.py",
        "            if hidden > size_bytes - last_bytes:\n                hidden = size_bytes - last_bytes\n",
        "            if hidden > size_bytes:\n                hidden = size_bytes\n",
    ),
    (
        "what was overlapped is not counted",
        "network/carrier.py",
        "            self.moved_bytes[kind] += hidden\n",
        "",
    ),
    (
        "stopped transfers count whole",
        "network/carrier.py",
        "        self.moved_bytes[kind] += moved\n",
        "        self.moved_bytes[kind] += transfer.size_bytes\n",
    ),
    (
        "both halves of a batch are the first",
        "migration/outbound.py",
        "        half.kv_bytes -= half.kv_bytes * split.start_layer // split.layers\n",
        "        half.kv_bytes = half.kv_bytes * split.start_layer // split.layers\n",
    ),
    # --- policies of schedulers -----------------------------------------------------------------
    (
        "vllm: the budget is one short",
        "scheduling/vllm.py",
        "            new = min(new, self._threshold, forming.budget)\n",
        "            new = min(new, self._threshold, max(1, forming.budget - 1))\n",
    ),
    (
        "vllm: a place too many",
        "scheduling/vllm.py",
        "        return len(running.requests) + len(running.leaving) >= self.max_num_seqs",
        "        return len(running.requests) + len(running.leaving) > self.max_num_seqs",
    ),
    (
        "fcfs: a batch may exceed its budget by one prompt",
        "scheduling/fcfs.py",
        "                or tokens > prefill_budget\n",
        "                or tokens - request.reached_tokens > prefill_budget\n",
    ),
    (
        "sarathi: decodes do not count in the budget",
        "scheduling/vidur/sarathi.py",
        "        budget = self.chunk_size - len(plan.decodes)\n",
        "        budget = self.chunk_size + len(plan.decodes)\n",
    ),
    (
        "orca: a member too many",
        "scheduling/vidur/orca.py",
        "            if len(plan) >= self.batch_size_cap:\n",
        "            if len(plan) > self.batch_size_cap:\n",
    ),
    (
        "prefix hits end inside a block",
        "scheduling/vllm.py",
        "                request.computed_tokens = hit.tokens\n",
        "                request.computed_tokens = hit.tokens - 1\n",
    ),
    # --- planners -------------------------------------------------------------------------------
    (
        "blitz: up to the top of the interval",
        "autoscale/demand.py",
        "        change = (interval.low + interval.high + 1) // 2 - count\n",
        "        change = interval.high - count\n",
    ),
    (
        "blitz: bounds of decode swapped",
        "autoscale/demand.py",
        "    low = max(_ceil(counts.blocks_used, table.decode_upper * blocks), kv_min)\n",
        "    low = max(_ceil(counts.blocks_used, table.decode_lower * blocks), kv_min)\n",
    ),
    (
        "blitz: queued tokens count half",
        "autoscale/demand.py",
        "    low = max(_ceil(counts.queued_tokens, table.prefill_upper_s * prefill_rate), kv_min)\n",
        "    low = max(_ceil(counts.queued_tokens, 2 * table.prefill_upper_s * prefill_rate), kv_min)\n",
    ),
    (
        "hpa: floor instead of ceiling",
        "autoscale/hpa.py",
        "    return math.ceil(load / target - 1e-9)",
        "    return math.floor(load / target - 1e-9)",
    ),
    (
        "hpa: tolerance of a half",
        "autoscale/hpa.py",
        "_TOLERANCE: Final = 0.1",
        "_TOLERANCE: Final = 0.5",
    ),
    (
        "hpa: loading replicas are ordered twice",
        "autoscale/hpa.py",
        "        ratio = load / (total * target)\n",
        "        ratio = load / (ready * target)\n",
    ),
    (
        "hpa: goes up by the highest recommendation",
        "autoscale/hpa.py",
        "self._lowest = Window(s_to_ns(table.scale_up_stabilization_s), highest=False)",
        "self._lowest = Window(s_to_ns(table.scale_up_stabilization_s), highest=True)",
    ),
    # --- rejection, wake-ups --------------------------------------------------------------------
    (
        "rejection locks every replica",
        "autoscale/kv_reject.py",
        "        hot.remove(spared)\n",
        "        pass\n",
    ),
    (
        "opened again without a wake-up",
        "autoscale/kv_reject.py",
        "                self._on_capacity(replica)\n",
        "",
    ),
    (
        "a rejected replica is never opened",
        "autoscale/kv_reject.py",
        "            if replica.replica_id not in hot:\n                self.locked",
        "            if not hot:\n                self.locked",
    ),
    (
        "freed blocks wake no replica",
        "replica/books.py",
        "        if progress.finished or progress.failed:\n"
        "            out.append(FreeCapacity())\n",
        "",
    ),
    # --- time to live, recovery, clients --------------------------------------------------------
    (
        "host copies never expire",
        "autoscale/host_cache.py",
        "now_ns - self._touched_ns[machine] < self._ttl_ns",
        "now_ns - self._touched_ns[machine] < 1 << 62",
    ),
    (
        "host copies expire at once",
        "autoscale/host_cache.py",
        "        if self._users[machine]:\n            return True\n",
        "",
    ),
    (
        "spares never expire",
        "autoscale/draft.py",
        "self.snapshot.now_ns - view.shut_ns < ttl_ns",
        "self.snapshot.now_ns - view.shut_ns < 1 << 62",
    ),
    (
        "back-off does not double",
        "cluster/gateway.py",
        "self._recovery.client_backoff_ms * 2**request.retries",
        "self._recovery.client_backoff_ms",
    ),
    (
        "back-off grows too fast",
        "cluster/gateway.py",
        "self._recovery.client_backoff_ms * 2**request.retries",
        "self._recovery.client_backoff_ms * 4**request.retries",
    ),
    (
        "clients ask once too often",
        "cluster/gateway.py",
        "request.retries < self._recovery.client_retries",
        "request.retries <= self._recovery.client_retries",
    ),
    (
        "a restart takes twice as long",
        "faults/recovery.py",
        "            back_ns = s_to_ns(self.table.restart_s)\n",
        "            back_ns = 2 * s_to_ns(self.table.restart_s)\n",
    ),
    (
        "a cold start is left out",
        "autoscale/scaler.py",
        "        cold_ns = s_to_ns(self.table.cold_start_s) if load.method in _LOCAL else 0\n",
        "        cold_ns = 0\n",
    ),
    (
        "a load's deadline is ten times as long",
        "autoscale/scaler.py",
        "                world.kernel.now_ns + self._deadline_ns,\n",
        "                world.kernel.now_ns + 10 * self._deadline_ns,\n",
    ),
    # --- figures --------------------------------------------------------------------------------
    (
        "p95 is p90",
        "report/summary.py",
        "        _percentile(values_ns, 95),\n",
        "        _percentile(values_ns, 90),\n",
    ),
    (
        "TPOT divides by all tokens",
        "report/records.py",
        "(last_ns - first_ns) // (tokens - 1) if tokens > 1 else 0",
        "(last_ns - first_ns) // tokens if tokens > 1 else 0",
    ),
    (
        "cancelled requests count in attainment",
        "report/summary.py",
        '    counted = stats.requests - stats.by_status["cancelled"]\n',
        "    counted = stats.requests\n",
    ),
    (
        "goodput needs one objective only",
        "report/summary.py",
        "        joint &= met\n",
        "        joint |= met\n",
    ),
    (
        "ITL: p99 is p95",
        "report/summary.py",
        "        gaps.percentile_ns(99),\n",
        "        gaps.percentile_ns(95),\n",
    ),
    (
        "GPU time of one GPU of each replica",
        "cluster/audit.py",
        "            gpu_ns[role] = gpu_ns.get(role, 0) + spent_ns * len(replica.gpus)\n",
        "            gpu_ns[role] = gpu_ns.get(role, 0) + spent_ns\n",
    ),
    (
        "hits of the GPU pool count twice",
        "report/records.py",
        "                hits[1] += request.npu_hit_tokens\n",
        "                hits[1] += request.prefix_hit_tokens\n",
    ),
    (
        "recomputed tokens forget the hit",
        "scheduling/vllm.py",
        "            request.recomputed_tokens += request.reached_tokens - hit.tokens\n",
        "            request.recomputed_tokens += request.reached_tokens\n",
    ),
    (
        "time between replicas counts from the transfer",
        "migration/outbound.py",
        "    waited_ns = outbound.now_ns - batch.queued_ns\n",
        "    waited_ns = outbound.now_ns - batch.started_ns\n",
    ),
)
