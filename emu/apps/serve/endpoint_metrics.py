"""`/metrics` of one endpoint: an engine's own page, under vLLM's or SGLang's names.

Routers scrape each endpoint many times a second, so the page holds this replica's series and
nothing of the cluster; the label `engine` is "0" on every page, as of an engine that is alone.
SGLang's front end counts tokens and requests when a request ends, under the model's label alone;
its scheduler's gauges have the ranks.
"""

from __future__ import annotations

from emu.apps.serve.endpoint import Endpoint
from emu.apps.serve.engine_metrics import adapter_family, engine_families, kv_use, transfer_families
from emu.apps.serve.fleet import Fleet
from emu.apps.serve.prometheus import Page, labels_text
from emu.apps.serve.request_metrics import request_families
from emu.apps.serve.service import Service
from emu.apps.serve.statistics import awaiting_kv


class EndpointPage:
    """Reads one replica when it is scraped."""

    def __init__(self, service: Service, fleet: Fleet, endpoint: Endpoint) -> None:
        self._service = service
        self._fleet = fleet
        self._endpoint = endpoint
        self._page = Page()

    def render(self) -> bytes:
        """All families of the face."""
        if self._fleet.face == "sglang":
            self._sglang()
        else:
            self._vllm()
        return self._page.take()

    def _vllm(self) -> None:
        service, endpoint, page = self._service, self._endpoint, self._page
        stats = service.cluster.engines[endpoint.replica.replica_id]
        one = [(endpoint.replica, endpoint.plan, stats)]
        engine_families(
            page, service.models, one, name="0", scripted=service.scripted, wire=service.wire
        )
        label = labels_text({"model_name": service.model, "engine": "0"})
        request_families(page, [(label, stats)], service.wire)
        adapter_family(page, service, endpoint.replica.replica_id)
        if service.cluster.watchers:
            transfer_families(page, label, stats, service)

    def _sglang(self) -> None:
        service, endpoint, page = self._service, self._endpoint, self._page
        replica, plan = endpoint.replica, endpoint.plan
        view = replica.view()
        stats = service.cluster.engines[replica.replica_id]
        role = endpoint.role
        label = labels_text(
            {
                "model_name": service.model,
                "engine_type": role if role in ("prefill", "decode") else "unified",
                "tp_rank": "0",
                "pp_rank": "0",
                "moe_ep_rank": "0",
            }
        )
        front = labels_text({"model_name": service.model})
        size = plan.scheduler.block_size
        watcher = service.cluster.watchers.get(replica.replica_id)
        inflight = view.unfinished_migrations if watcher is not None else 0
        gauges = (
            ("num_running_reqs", "Running requests.", view.running_count),
            ("num_queue_reqs", "Waiting requests.", view.waiting_count),
            ("num_used_tokens", "Tokens with KV.", view.blocks_used * size),
            ("token_usage", "Part of the KV in use.", kv_use(replica)),
            ("max_total_num_tokens", "Room for KV.", plan.num_blocks * size),
            ("cache_hit_rate", "Found part of the last prompts.", stats.prefill_hit_share),
            ("num_prefill_prealloc_queue_reqs", "Not begun.", 0),
            ("num_prefill_inflight_queue_reqs", "KV on its way.", inflight),
            ("num_decode_prealloc_queue_reqs", "Not begun.", 0),
            ("num_decode_transfer_queue_reqs", "KV on its way.", awaiting_kv(replica, stats)),
        )
        for name, text, value in gauges:
            page.gauge(f"sglang:{name}", text, [(label, float(value))])
        info = f'page_size="{size}",num_pages="{plan.num_blocks}"'
        page.gauge("sglang:cache_config_info", "KV cache.", [(info, 1.0)])
        counters = (
            ("prompt_tokens", "Prompt tokens.", stats.prompt_tokens.total),
            ("generation_tokens", "Output tokens.", stats.generation_tokens.total),
            ("num_requests", "Requests.", sum(stats.by_status.values())),
            ("num_aborted_requests", "Aborted requests.", stats.success["abort"]),
        )
        for name, text, count in counters:
            page.counter(f"sglang:{name}", text, [(front, float(count))])
        source = f'cache_source="total",{front}'
        cached = [(source, float(stats.cached_ended_sum))]
        page.counter("sglang:cached_tokens", "Prompt tokens from the cache.", cached)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "TTFT.", stats.ttft),
            ("inter_token_latency_seconds", "ITL.", stats.inter_token),
            ("e2e_request_latency_seconds", "E2E.", stats.e2e),
        ):
            page.histogram(f"sglang:{name}", text, [(front, histogram)])
        page.histogram("sglang:queue_time_seconds", "Waiting.", [(label, stats.queue)])
