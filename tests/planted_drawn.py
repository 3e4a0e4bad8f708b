"""Twenty-three more bugs, of places that were drawn.

`random.Random(47)` drew lines over all statements of scheduling, replica, migration, autoscale, kv,
routing, network, latency, faults, cluster and report; each bug stands in the function that has the
drawn line, or beside it, and is of the kinds that people make (a forgotten factor, the wrong one of
two alike, off by one, a stale value, a count that is not kept). The list was committed before the
first run. Misses stay in it. `python -m tests.planted --campaign 300 --list drawn` plants each. (A
twenty-fourth stood in it, a count of live moves that is not kept; nothing read the count, so it is
gone from the program.)
"""

from __future__ import annotations

from typing import Final

from tests.planted_worlds import Bug

DRAWN: Final[tuple[Bug, ...]] = (
    (
        "delays of the links of a path do not add up",
        "network/flows.py",
        "            at_ns += sum([link.extra_latency_ns for link in links])\n",
        "            at_ns += max([link.extra_latency_ns for link in links])\n",
    ),
    (
        "simple schedulers charge a tenant the prompt again, not the output",
        "scheduling/simple.py",
        "                self.ledger.queue.charge(request.tenant, request.generated_tokens)\n"
        "            self._retire(progress.finished)\n",
        "                self.ledger.queue.charge(request.tenant, request.prompt_tokens)\n"
        "            self._retire(progress.finished)\n",
    ),
    (
        "experts of a rank are counted by its tensor ranks",
        "latency/offload/weights.py",
        "        routed = experts.count // ep * matrices * hidden * experts.ffn\n",
        "        routed = experts.count // tp * matrices * hidden * experts.ffn\n",
    ),
    (
        "between two points of a profile the distance is taken from zero",
        "latency/profile/tables.py",
        "    return y0 + (x - x0) / (xs[i] - x0) * (ys[i] - y0)\n",
        "    return y0 + (x - x0) / xs[i] * (ys[i] - y0)\n",
    ),
    (
        "what is known of one engine is said of all runs",
        "report/compare.py",
        "        known if len(names) == whole else",
        "        known if len(runs) == 1 else",
    ),
    (
        "a partition of one way cuts the other as well",
        "network/flows.py",
        "            if transfer.pair != pair:\n                continue\n            self._unfold",
        "            if transfer.pair not in (pair, pair[::-1]):\n"
        "                continue\n"
        "            self._unfold",
    ),
    (
        "a crashed replica still counts as a user of its machine's copy",
        "autoscale/scaler.py",
        "        if after in (S.INACTIVE, S.FAILED):\n            self._yielded",
        "        if after is S.INACTIVE:\n            self._yielded",
    ),
    (
        "paced clients send as soon as they can",
        "cluster/cluster.py",
        "            is_paced=self.config.workload.max_in_flight > 0,\n",
        "            is_paced=self.config.workload.concurrency > 0,\n",
    ),
    (
        "core attention of layers without experts is that of those with",
        "latency/experts/overlap.py",
        "        return whole_ns * (self._layers - self._moe_layers) // self._layers\n",
        "        return whole_ns * self._moe_layers // self._layers\n",
    ),
    (
        "a rank has the tokens of one member only",
        "latency/experts/routed.py",
        "        of_rank = tokens * self._members / self._ranks\n",
        "        of_rank = tokens / self._ranks\n",
    ),
    (
        "of several models the first one's arithmetic is counted for all",
        "report/records.py",
        "        self._is_plain = len(models) == 1 and models[0].sees_all\n",
        "        self._is_plain = bool(models) and models[0].sees_all\n",
    ),
    (
        "sglang: a prompt may fill the limit of inputs to its last token",
        "scheduling/sglang/admission.py",
        "        if is_bound and whole >= self.input_left and self.taken:\n            return OTHER\n"
        "        # What",
        "        if is_bound and whole > self.input_left and self.taken:\n            return OTHER\n"
        "        # What",
    ),
    (
        "values of attention are left out where they are projected",
        "latency/mixed_roofline.py",
        "            width += kv_heads * (part.head_dim + part.value_dim)\n",
        "            width += kv_heads * part.head_dim\n",
    ),
    (
        "batches that leave a pipeline together go round in a leap",
        "scheduling/rotation.py",
        "        return all(ends[i] < ends[i + 1] for i in range(len(ends) - 1))\n",
        "        return all(ends[i] <= ends[i + 1] for i in range(len(ends) - 1))\n",
    ),
    (
        "vllm: blocks that a preempted request was to get are still wanted",
        "scheduling/vllm.py",
        "                _, new = plan.pop()\n"
        "                need -= pool.need(last.request, last.request.computed_tokens + new)\n",
        "                plan.pop()\n",
    ),
    (
        "routers see the last block of a prompt, which is always computed",
        "kv/blocks.py",
        "        limit = (request.prompt_tokens - 1) // self.block_size\n",
        "        limit = request.prompt_tokens // self.block_size\n",
    ),
    (
        "the first of two partitions that ends joins the pair",
        "faults/link_faults.py",
        "        if count == int(is_cut):\n",
        "        if count == 1 or not is_cut:\n",
    ),
    (
        "a replica over several machines is at home where its last GPU is",
        "cluster/plan.py",
        "        machine = machines.of(gpus[0])\n",
        "        machine = machines.of(gpus[-1])\n",
    ),
    (
        "fcfs: the budget of a batch forgets outputs that are computed again",
        "scheduling/fcfs.py",
        "            tokens += request.reached_tokens\n            reserved =",
        "            tokens += request.prompt_tokens\n            reserved =",
    ),
    (
        "a replica with the adapter has a place as long as few run there",
        "routing/policies.py",
        "            has_place = signal.waiting + signal.running < signal.max_num_seqs\n",
        "            has_place = signal.running < signal.max_num_seqs\n",
    ),
    (
        "each half of a batch has the sequences of the whole",
        "latency/offload/interleaving.py",
        "        half.sequences = decodes + len(half.prefill_new)\n",
        "        half.sequences = count + len(half.prefill_new)\n",
    ),
    (
        "replicas load where the weights are not",
        "autoscale/blitz_plan.py",
        "            self.free.sort(key=lambda v: v.machine not in cached)\n",
        "            self.free.sort(key=lambda v: v.machine in cached)\n",
    ),
    (
        "a copy lives on from its load, not from its last use",
        "autoscale/host_cache.py",
        "            if not self._counts_from_load:\n                self._touched_ns",
        "            if self._counts_from_load:\n                self._touched_ns",
    ),
)
