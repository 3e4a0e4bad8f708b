"""What holds on every scrape of an engine's page, whatever the engine has gone through."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from emu.apps.serve.endpoint_metrics import EndpointPage
from emu.apps.serve.metrics import MetricsPage
from emu.apps.serve.world import LiveCluster

if TYPE_CHECKING:
    from tests.serve.live import Live

Samples = dict[tuple[str, str], dict[str, float]]
"""(name, engine) -> the labels that tell one family's samples apart -> value."""


def read_page(text: str) -> Samples:
    """The samples of a page, by family and engine."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            engine = f"{labels.pop('model_name', '')} {labels.pop('engine', '')}"
            for name in ("engine_type", "tp_rank", "pp_rank", "moe_ep_rank"):
                labels.pop(name, None)
            which = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found.setdefault((sample.name, engine), {})[which] = sample.value
    return found


def check_page(text: str, *, accepted: int | None = None) -> Samples:
    """Laws of one page; `accepted`: requests that the one engine of this page has been given."""
    samples = read_page(text)
    for (name, engine), values in samples.items():
        for which, value in values.items():
            place = f"{name}{{{which}}} of {engine}"
            assert math.isfinite(value), place
            if name.startswith(("vllm:", "sglang:")):
                assert value >= 0, f"{place} = {value}"
            if name in (
                "vllm:kv_cache_usage_perc", "sglang:token_usage", "sglang:cache_hit_rate",
            ):  # fmt: skip
                assert value <= 1, f"{place} = {value}"
    for engine in sorted({engine for _, engine in samples}):
        for prefix in ("vllm:prefix_cache", "vllm:external_prefix_cache"):
            hits = samples.get((f"{prefix}_hits_total", engine), {}).get("", 0.0)
            queries = samples.get((f"{prefix}_queries_total", engine), {}).get("", 0.0)
            assert hits <= queries, f"{prefix} of {engine}: {hits} hits of {queries}"
        _check_prompts(samples, engine)
        _check_histograms(samples, engine)
    if accepted is not None:
        counted = of_engine(samples)
        assert counted == accepted, f"{counted} requests on the page, {accepted} given"
    return samples


def _check_prompts(samples: Samples, engine: str) -> None:
    """Each prompt token has one source; vLLM counts the last of a cached prompt twice."""
    sources = samples.get(("vllm:prompt_tokens_by_source_total", engine))
    if not sources or ("vllm:prompt_tokens_recomputed_total", engine) not in samples:
        return  # from 0.20 on vLLM does not say what it counts twice
    again = samples["vllm:prompt_tokens_recomputed_total", engine][""]
    cached = samples["vllm:prompt_tokens_cached_total", engine][""]
    total = samples["vllm:prompt_tokens_total", engine][""] if _has(samples, engine) else None
    if total is not None:
        assert sum(sources.values()) - again == total, (sources, again, total)
        assert cached <= total
    computed = sources["source=local_compute"]
    assert sum(sources.values()) - computed - again == cached, (sources, again, cached)


def _has(samples: Samples, engine: str) -> bool:
    return ("vllm:prompt_tokens_total", engine) in samples


def _check_histograms(samples: Samples, engine: str) -> None:
    """Buckets grow up to the count."""
    for name, of in samples:
        if of != engine or not name.endswith("_bucket"):
            continue
        bounds: dict[float, float] = {}
        for which, value in samples[name, engine].items():
            bounds[float(which.removeprefix("le="))] = value
        values = [bounds[bound] for bound in sorted(bounds)]
        assert values == sorted(values), name
        count = samples[name.removesuffix("_bucket") + "_count", engine][""]
        assert values[-1] == count, name


def of_engine(samples: Samples) -> float:
    """Requests on a page of one engine: running, waiting and ended."""

    def total(*names: str) -> float:
        return sum(sum(values.values()) for (name, _), values in samples.items() if name in names)

    return total(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:request_success_total",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:num_decode_transfer_queue_reqs",
        "sglang:num_requests_total",
    )


def check_blocks(cluster: LiveCluster) -> None:
    """KV blocks that are free and those in use are all there are."""
    for replica in cluster.replicas:
        replica.settle()
        scheduler = replica.scheduler
        free = scheduler.ledger.pool.blocks_free
        assert scheduler.blocks_used + free == scheduler.blocks_total, replica.replica_id
        assert 0 <= scheduler.blocks_used <= scheduler.blocks_total


def check_server(live: Live) -> None:
    """Every page of a server as it is now; not by its ports, some of which may be closed."""
    check_blocks(live.cluster)
    assert check_page(MetricsPage(live.service).render().decode())
    fleet = live.server.fleet
    if fleet is None:
        return
    for endpoint in fleet.endpoints:
        check_page(EndpointPage(live.service, fleet, endpoint).render().decode())
