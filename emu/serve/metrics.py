"""`/metrics`: Prometheus text under vLLM's names, and the emulator's own under `emu:`.

Gauges and counters of engines carry `engine` = replica id; request histograms cover the cluster
(`engine="all"`), so that a scrape of a hundred replicas stays short. Times are emulated seconds:
at `--speed 10` a TTFT of 0.5 s took 0.05 s on the wall. Everything is read at the time of the
scrape; nothing is paid between scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from emu.replica.replica import Replica
from emu.replica.states import ReplicaState
from emu.serve.house import House
from emu.serve.world import Histogram, Statistics
from emu.units import NS_PER_S

_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[Statistics], Histogram]], ...]] = (
    ("time_to_first_token_seconds", "Time to first token.", lambda s: s.ttft),
    ("inter_token_latency_seconds", "Gap between tokens.", lambda s: s.inter_token),
    ("request_time_per_output_token_seconds", "TPOT.", lambda s: s.per_output_token),
    ("e2e_request_latency_seconds", "Arrival to last token.", lambda s: s.e2e),
    ("request_queue_time_seconds", "Arrival to first scheduled.", lambda s: s.queue),
    ("request_prefill_time_seconds", "First scheduled to first token.", lambda s: s.prefill),
    ("request_decode_time_seconds", "First to last token.", lambda s: s.decode),
    ("request_inference_time_seconds", "First scheduled to last token.", lambda s: s.inference),
    ("request_prompt_tokens", "Prompt tokens.", lambda s: s.prompt_tokens),
    ("request_generation_tokens", "Output tokens.", lambda s: s.generation_tokens),
    ("request_max_num_generation_tokens", "Output tokens.", lambda s: s.generation_tokens),
    ("request_num_preemptions", "Preemptions of a request.", lambda s: s.request_preemptions),
    ("request_prefill_kv_computed_tokens", "Prompt minus hits.", lambda s: s.kv_computed_tokens),
    ("request_params_max_tokens", "Limit on output tokens.", lambda s: s.max_tokens),
    ("iteration_tokens_total", "Tokens of an iteration.", lambda s: s.iteration_tokens),
)

_TRANSFERS: Final[tuple[tuple[str, str, Callable[[Statistics], Histogram]], ...]] = (
    ("xfer_time_seconds", "Start of a KV transfer to its last byte.", lambda s: s.transfer),
    ("post_time_seconds", "Handing a KV transfer to the network.", lambda s: s.transfer_post),
    ("bytes_transferred", "Bytes of a KV transfer.", lambda s: s.transfer_bytes),
    ("num_descriptors", "Pieces of a KV transfer.", lambda s: s.transfer_descriptors),
)


class HouseCollector(Collector):
    """Reads the cluster when it is scraped."""

    def __init__(self, house: House) -> None:
        self._house = house

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._engine_gauges()
        yield from self._request_counters()
        for name, text, pick in _HISTOGRAMS:
            yield self._histogram(f"vllm:{name}", text, pick(self._house.cluster.stats))
        if self._house.cluster.watchers:
            yield from self._transfer_families()
        yield from self._cluster_families()
        yield from self._server_families()

    def _engine_gauges(self) -> Iterator[Metric]:
        replicas = self._house.cluster.replicas
        for replica in replicas:
            replica.settle()
        gauges: tuple[tuple[str, str, Callable[[Replica], float]], ...] = (
            ("num_requests_running", "Running requests.", lambda r: r.scheduler.running_count),
            ("num_requests_waiting", "Waiting requests.", lambda r: r.scheduler.waiting_count),
            ("kv_cache_usage_perc", "Part of KV blocks in use.", _kv_use),
            ("engine_sleep_state", "1 if no model is loaded.", lambda r: float(not r.model_loaded)),
        )
        for name, text, read in gauges:
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
            for replica in replicas:
                family.add_metric(self._engine(replica), read(replica))
            yield family
        labels = ["model_name", "engine", "reason"]
        why = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", labels=labels
        )
        for replica in replicas:
            why.add_metric([*self._engine(replica), "capacity"], replica.scheduler.waiting_count)
        yield why
        labels = ["model_name", "engine", "block_size", "num_gpu_blocks"]
        info = GaugeMetricFamily("vllm:cache_config_info", "KV cache.", labels=labels)
        for replica, plan in zip(replicas, self._house.plan.replicas, strict=True):
            blocks = [str(plan.scheduler.block_size), str(plan.num_blocks)]
            info.add_metric([*self._engine(replica), *blocks], 1)
        yield info
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        lora = GaugeMetricFamily("vllm:lora_requests_info", "No adapters.", labels=labels)
        lora.add_metric(["0", "", ""], 1)
        yield lora
        for name, place in (("prompt_tokens", 0), ("generation_tokens", 1)):
            counter = CounterMetricFamily(
                f"vllm:{name}", "Tokens computed.", labels=["model_name", "engine"]
            )
            for replica in replicas:
                counter.add_metric(self._engine(replica), replica.tokens_produced[place])
            yield counter

    def _engine(self, replica: Replica) -> list[str]:
        return [self._house.model, str(replica.replica_id)]

    def _request_counters(self) -> Iterator[Metric]:
        stats = self._house.cluster.stats
        everywhere = [self._house.model, "all"]
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.queried_sum),
            (
                "prefix_cache_hits",
                "Prompt tokens found.",
                stats.cached_sum - stats.external_hit_sum,
            ),
            ("external_prefix_cache_queries", "Not on the GPU.", stats.external_queried_sum),
            ("external_prefix_cache_hits", "Found in lower tiers.", stats.external_hit_sum),
            ("prompt_tokens_cached", "Prompt tokens from the cache.", stats.cached_sum),
            ("num_preemptions", "Preemptions.", stats.preemptions),
        )
        for name, text, value in counters:
            family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
            family.add_metric(everywhere, value)
            yield family
        labels = ["model_name", "engine", "source"]
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by origin.", labels=labels
        )
        computed = stats.prompt_sum - stats.cached_sum
        sources.add_metric([*everywhere, "local_compute"], computed)
        local = stats.cached_sum - stats.external_hit_sum
        sources.add_metric([*everywhere, "local_cache_hit"], local)
        sources.add_metric([*everywhere, "external_kv_transfer"], stats.external_hit_sum)
        yield sources
        labels = ["model_name", "engine", "finished_reason"]
        success = CounterMetricFamily("vllm:request_success", "Ended requests.", labels=labels)
        for reason, count in stats.success.items():
            success.add_metric([*everywhere, reason], count)
        yield success

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name", "engine"])
        reached = 0
        buckets: list[tuple[str, float]] = []
        bounds = [
            f"{bound:g}" if bound != int(bound) else f"{bound:.1f}" for bound in histogram.bounds
        ]
        for bound, count in zip([*bounds, "+Inf"], histogram.counts, strict=True):
            reached += count
            buckets.append((bound, reached))
        family.add_metric([self._house.model, "all"], buckets=buckets, sum_value=histogram.total)
        return family

    def _transfer_families(self) -> Iterator[Metric]:
        """vLLM's connector between prefill and decode (NIXL)."""
        cluster = self._house.cluster
        for name, text, pick in _TRANSFERS:
            yield self._histogram(f"vllm:nixl_{name}", text, pick(cluster.stats))
        counters = (
            ("failed_transfers", "Failed KV transfers.", sum(cluster.network.failures.values())),
            ("failed_notifications", "Ends that a source never heard of.", 0),
            (
                "kv_expired_reqs",
                "Requests whose KV was given up before it was fetched.",
                cluster.tape.lost_counts.get("lease_expired", 0),
            ),
            ("notifications_after_expiry", "Ends of transfers whose KV was given up.", 0),
        )
        for name, text, value in counters:
            family = CounterMetricFamily(
                f"vllm:nixl_num_{name}", text, labels=["model_name", "engine"]
            )
            family.add_metric([self._house.model, "all"], value)
            yield family

    def _cluster_families(self) -> Iterator[Metric]:
        cluster = self._house.cluster
        states = GaugeMetricFamily("emu:replicas", "Replicas in each state.", labels=["state"])
        counts = dict.fromkeys(ReplicaState, 0)
        for replica in cluster.replicas:
            counts[replica.state] += 1
        for state, count in counts.items():
            states.add_metric([state.value], count)
        yield states
        queue = 0 if cluster.gateway.queue is None else len(cluster.gateway.queue)
        yield GaugeMetricFamily(
            "emu:gateway_queue",
            "Requests that no replica holds yet.",
            value=len(cluster.gateway.held) + queue,
        )
        yield GaugeMetricFamily(
            "emu:outstanding_requests", "Requests in the system.", value=cluster.gateway.outstanding
        )
        flows = GaugeMetricFamily("emu:network_flows", "Transfers under way.", labels=["kind"])
        moved = CounterMetricFamily("emu:network_bytes", "Bytes of transfers.", labels=["kind"])
        for kind, number in cluster.network.active.items():
            flows.add_metric([kind], number)
        for kind, size in cluster.network.moved_bytes.items():
            moved.add_metric([kind], size)
        yield flows
        yield moved
        stats = cluster.stats
        yield CounterMetricFamily(
            "emu:migrations", "Moves of ended requests between replicas.", value=stats.migrations
        )
        ended = CounterMetricFamily("emu:requests", "Ended requests.", labels=["status"])
        for status, count in stats.by_status.items():
            ended.add_metric([status], count)
        yield ended
        moves = CounterMetricFamily(
            "emu:transitions", "Changes of replicas' states.", labels=["from", "to"]
        )
        for (before, after), count in cluster.tape.transition_counts.items():
            moves.add_metric([before, after], count)
        yield moves

    def _server_families(self) -> Iterator[Metric]:
        house = self._house
        kernel = house.cluster.kernel
        emulated = GaugeMetricFamily(
            "emu:time_seconds", "Emulated time since the start.", value=kernel.wall_ns() / NS_PER_S
        )
        yield emulated
        gauges = (
            ("speed", "Emulated seconds per second.", house.speed),
            ("ready", "1 after the start-up.", float(house.is_ready)),
            ("open_streams", "Answers under way.", float(house.cluster.open_choices)),
            ("timer_lag_seconds", "Lateness of the last timer.", kernel.lag_ns / NS_PER_S),
            ("timer_lag_max_seconds", "Largest so far.", kernel.lag_max_ns / NS_PER_S),
            ("drift_seconds", "Emulation behind the wall clock.", house.drift_s),
            ("drift_max_seconds", "Largest so far.", house.drift_max_s),
            ("event_loop_lag_seconds", "Wall time: last wake-up too late by.", house.loop_lag_s),
            ("event_loop_lag_max_seconds", "Largest so far.", house.loop_lag_max_s),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"emu:{name}", text, value=value)
        refused = CounterMetricFamily(
            "emu:http_errors", "Answers with an error status.", labels=["status"]
        )
        for status, count in house.http_refused.items():
            refused.add_metric([str(status)], count)
        yield refused
        yield CounterMetricFamily(
            "emu:failures_returned", "Scheduled failures.", value=house.failures_returned
        )
        injected = CounterMetricFamily(
            "emu:faults_injected", "Faults from the control interface.", labels=["kind"]
        )
        for kind, count in house.faults_injected.items():
            injected.add_metric([kind], count)
        yield injected
        struck = CounterMetricFamily("emu:faults", "Faults that struck.", labels=["kind"])
        for kind, count in house.cluster.faults.struck.items():
            struck.add_metric([kind], count)
        yield struck
        commands = CounterMetricFamily(
            "emu:commands", "Commands to replicas.", labels=["command", "outcome"]
        )
        for (command, outcome), count in house.commands_given.items():
            commands.add_metric([command, outcome], count)
        yield commands


def _kv_use(replica: Replica) -> float:
    scheduler = replica.scheduler
    return scheduler.blocks_used / scheduler.blocks_total if scheduler.blocks_total else 0.0


def make_registry(house: House) -> CollectorRegistry:
    """A registry of one house (nothing global)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(HouseCollector(house))
    return registry
