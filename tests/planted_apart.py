"""Twenty more bugs, of parts of the program that the other lists leave out.

Adapters, images and masks in a step, weights that go in stripes and chains, GPUs that models share,
ranks that are lost, several groups of KV, links by the shape of a machine, windows of faults,
arrivals, drafts, layers that are handed over. The list was committed before the
first run and before a look at what the campaign judges of these parts; misses stay in it.
`python -m tests.planted --campaign 300 --list apart` plants each.

As committed the campaign caught four of them within 300 seeds and unit tests ten, together eleven;
the tour, the rules and the tests that followed from the misses have shaped the list since.
"""

from __future__ import annotations

from typing import Final

from tests.planted_worlds import Bug

APART: Final[tuple[Bug, ...]] = (
    # What a step does beside its tokens.
    (
        "lora: the adapter that was used last leaves its slot",
        "features/lora/slots.py",
        "                del self._on_gpu[next(name for name in self._on_gpu if name not in names)]\n",
        "                del self._on_gpu[next(n for n in reversed(self._on_gpu) if n not in names)]\n",
    ),
    (
        "images: the output that was used last leaves the cache",
        "features/images/encoding.py",
        "            image, _ = self._evictable.popitem(last=False)\n",
        "            image, _ = self._evictable.popitem(last=True)\n",
    ),
    (
        "guided decoding: chunks of a prompt wait for a mask, too",
        "features/guided_decoding.py",
        "            if request.computed_tokens >= request.reached_tokens:\n",
        "            if True:\n",
    ),
    (
        "speculation: a tenant's rate holds for all",
        "features/speculation/acceptance.py",
        "            rate = self._tenants.get(request.tenant, -1.0)\n",
        "            rate = next(iter(self._tenants.values()), -1.0)\n",
    ),
    (
        "tensorrt_llm: prompts wait for one step too many",
        "scheduling/tensorrt_llm/scheduler.py",
        "            self._held_back_steps >= settings.batch_wait_timeout_iters\n",
        "            self._held_back_steps > settings.batch_wait_timeout_iters\n",
    ),
    (
        "groups of tokens cost a whole event for each token",
        "latency/front_end.py",
        "        self._event_ns = model.output_event_ns // model.stream_interval\n",
        "        self._event_ns = model.output_event_ns\n",
    ),
    # Weights, GPUs, ranks.
    (
        "the ring of a machine follows a lane 2 MiB behind",
        "autoscale/loader.py",
        "feeder=ring, lag_bytes=STRIPE_BYTES)",
        "feeder=ring, lag_bytes=LANE_CHUNK_BYTES)",
    ),
    (
        "pages are pinned one GPU after the other",
        "autoscale/loader.py",
        "s_to_ns(max(weights.gpu_bytes) / self._pin_bytes_per_s)",
        "s_to_ns(sum(weights.gpu_bytes) / self._pin_bytes_per_s)",
    ),
    (
        "a model is idle since the look before its last request ended",
        "autoscale/scaler.py",
        "        if outstanding or self._was_busy:\n            self._busy_ns = now_ns\n",
        "        if outstanding:\n            self._busy_ns = now_ns\n",
    ),
    (
        "the model with most to do gives way",
        "cluster/gpu_sharing.py",
        "            min(loads, key=lambda load: load[:2])[2].yield_one(name)\n",
        "            max(loads, key=lambda load: load[:2])[2].yield_one(name)\n",
    ),
    (
        "a second rank that is lost does not begin the wait anew",
        "faults/expert_group.py",
        "        detect_ns = 0 if event.is_known else self.plan.detect_ns\n",
        "        detect_ns = 0 if event.is_known or not is_running else self.plan.detect_ns\n",
    ),
    (
        "survivors read lost experts one after the other",
        "faults/rank_loss.py",
        "round(moved / survivors / gbps_to_bytes_per_s(gbps) * NS_PER_S)",
        "round(moved / gbps_to_bytes_per_s(gbps) * NS_PER_S)",
    ),
    (
        "a helper is answered by the younger of two replicas that scale live",
        "replica/live_scaling.py",
        "        if offered is not None and _age(offered) < best:\n",
        "        if offered is not None and _age(offered) > best:\n",
    ),
    # KV and links.
    (
        "several groups: the block that was freed last is evicted",
        "kv/grouped.py",
        "        number, _ = self._free_last.popitem(last=False)\n",
        "        number, _ = self._free_last.popitem(last=True)\n",
    ),
    (
        "each GPU has a PCIe link of its own",
        "network/topology.py",
        "            if slot % node.pcie_shared_by == 0:\n",
        "            if True:\n",
    ),
    (
        "traffic below a leaf goes over its uplink",
        "network/topology.py",
        "        if src_leaf == dst_leaf or not self.leaf_links:\n",
        "        if not self.leaf_links:\n",
    ),
    (
        "the devices of a CXL pool answer one after the other",
        "network/topology.py",
        "round(node.cxl_gbytes_per_s * node.cxl_devices * 1e9)",
        "round(node.cxl_gbytes_per_s * 1e9)",
    ),
    (
        "a fault of a pair strikes all transfers of either end",
        "faults/transfer_faults.py",
        "fault.source in (None, source) and fault.destination in (None, destination)",
        "fault.source in (None, source) or fault.destination in (None, destination)",
    ),
    # Arrivals and figures.
    (
        "between two bursts requests arrive as in one",
        "workload/arrivals.py",
        "            length_s + (rest - in_burst) / table.rate_per_s,\n",
        "            length_s + (rest - in_burst) / table.burst_rate_per_s,\n",
    ),
    (
        "drafts beyond the first that is refused count as accepted",
        "features/speculation/acceptance.py",
        "        counts.accepted_tokens += accepted\n",
        "        counts.accepted_tokens += drafts\n",
    ),
)
