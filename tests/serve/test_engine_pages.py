"""Names, types, labels and bounds of engines' pages, beside those of the engines themselves.

The lists are facts of vLLM 0.19 (`v1/metrics/loggers.py`), of what changed by 0.20 and 0.33, and of
SGLang 0.5.9 (`srt/metrics/collector.py`), written down from these and not from emu.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.live import PREFILL_DECODE, Live, run, tables
from tests.serve.test_fleet import complete, endpoints

Family = tuple[str, frozenset[str], tuple[float, ...]]
"""Type, labels, bounds."""
BOTH = frozenset({"model_name", "engine"})
B1 = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
B2 = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
B3 = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP = (1, *(2**power for power in range(3, 15)))
TRANSFER = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
S1 = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)


def gauge(*labels: str) -> Family:
    return "gauge", frozenset(labels), ()


def counter(*labels: str) -> Family:
    return "counter", frozenset(labels), ()


def histogram(bounds: tuple[float, ...] = (), *labels: str) -> Family:
    return "histogram", frozenset(labels), bounds


VLLM: dict[str, Family] = {
    **{
        f"vllm:{name}": gauge(*BOTH)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    },
    "vllm:engine_sleep_state": gauge(*BOTH, "sleep_state"),
    "vllm:cache_config_info": gauge(*BOTH, "block_size", "num_gpu_blocks"),
    **{
        f"vllm:{name}": counter(*BOTH)
        for name in (
            "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries",
            "external_prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached",
            "prompt_tokens_recomputed", "generation_tokens", "num_preemptions",
        )
    },
    "vllm:prompt_tokens_by_source": counter(*BOTH, "source"),
    "vllm:request_success": counter(*BOTH, "finished_reason"),
    **{
        f"vllm:{name}": histogram((), *BOTH)  # bounds 1-2-5 up to the model's length
        for name in (
            "request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens",
            "request_max_num_generation_tokens", "request_prefill_kv_computed_tokens",
        )
    },
    "vllm:request_params_n": histogram((1, 2, 5, 10, 20), *BOTH),
    "vllm:iteration_tokens_total": histogram(STEP, *BOTH),
    "vllm:time_to_first_token_seconds": histogram(B1, *BOTH),
    "vllm:inter_token_latency_seconds": histogram(B2, *BOTH),
    "vllm:request_time_per_output_token_seconds": histogram(B2, *BOTH),
    "vllm:e2e_request_latency_seconds": histogram(B3, *BOTH),
    **{
        f"vllm:request_{name}_time_seconds": histogram(B3, *BOTH)
        for name in ("queue", "inference", "prefill", "decode")
    },
}  # fmt: skip
NIXL: dict[str, Family] = {
    "vllm:nixl_xfer_time_seconds": histogram(TRANSFER, *BOTH),
    "vllm:nixl_post_time_seconds": histogram((0.001, *TRANSFER), *BOTH),
    "vllm:nixl_bytes_transferred": histogram(tuple(2**p for p in range(11, 35, 2)), *BOTH),
    "vllm:nixl_num_descriptors": histogram((), *BOTH),
    **{
        f"vllm:nixl_num_{name}": counter(*BOTH)
        for name in ("failed_transfers", "failed_notifications", "kv_expired_reqs")
    },
}
REASONS = {"vllm:num_requests_waiting_by_reason": gauge(*BOTH, "reason")}
RANKS = frozenset({"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"})
SGLANG: dict[str, Family] = {
    **{
        f"sglang:{name}": gauge(*RANKS)
        for name in (
            "num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage",
            "max_total_num_tokens", "cache_hit_rate", "num_prefill_prealloc_queue_reqs",
            "num_prefill_inflight_queue_reqs", "num_decode_prealloc_queue_reqs",
            "num_decode_transfer_queue_reqs",
        )
    },
    "sglang:cache_config_info": gauge("page_size", "num_pages"),
    **{
        f"sglang:{name}": counter("model_name")
        for name in (
            "prompt_tokens", "generation_tokens", "num_requests", "num_aborted_requests",
        )
    },
    "sglang:cached_tokens": counter("model_name", "cache_source"),
    "sglang:time_to_first_token_seconds": histogram(S1, "model_name"),
    "sglang:e2e_request_latency_seconds": histogram((*S1, 600, 1200, 1800, 2400), "model_name"),
    "sglang:inter_token_latency_seconds": histogram(
        (
            0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08,
            0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8,
        ),
        "model_name",
    ),
    "sglang:queue_time_seconds": histogram(
        (
            0, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, *range(30, 100, 10),
            *range(100, 1000, 100), *range(1000, 2000, 200), 2000, 2500, 3000,
        ),
        *RANKS,
    ),
}  # fmt: skip
OWN = {"vllm:nixl_num_notifications_after_expiry"}
"""Of later versions, without harm on a page of an earlier one."""


def families(text: str) -> dict[str, Family]:
    """What a page has."""
    found: dict[str, Family] = {}
    for family in text_string_to_metric_families(text):
        labels = frozenset(key for s in family.samples for key in s.labels) - {"le"}
        edges = {s.labels["le"] for s in family.samples if "le" in s.labels} - {"+Inf"}
        found[family.name] = (family.type, labels, tuple(sorted(map(float, edges))))
    return found


def differences(found: dict[str, Family], expected: dict[str, Family]) -> list[str]:
    wrong = [f"absent: {name}" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"not the engine's: {name}" for name in sorted(found.keys() - expected.keys() - OWN)]
    for name in sorted(expected.keys() & found.keys()):
        kind, labels, bounds = expected[name]
        if found[name][:2] != (kind, labels):
            wrong.append(f"{name}: {found[name][:2]}, not {(kind, labels)}")
        if bounds and found[name][2] != tuple(map(float, bounds)):
            wrong.append(f"{name}: bounds {found[name][2]}")
    return wrong


@pytest.mark.parametrize(
    ("options", "replicas", "expected"),
    [
        ({}, [{}], VLLM),
        ({}, PREFILL_DECODE, VLLM | NIXL),
        (
            {"wire": "vllm-0.20"},
            [{}],
            {n: f for n, f in VLLM.items() if "recomputed" not in n} | REASONS,
        ),
        ({"face": "sglang"}, [{}], SGLANG),
    ],
    ids=["vllm-0.19", "vllm-0.19 with NIXL", "vllm-0.20", "sglang-0.5.9"],
)
def test_a_page_is_the_engine_s(
    tmp_path: Path,
    options: dict[str, str],
    replicas: list[dict[str, str]],
    expected: dict[str, Family],
) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as ports:
            await complete(ports[0], max_tokens=3)
            for port in ports:
                page = families((await port.get("/metrics")).text)
                assert differences(page, expected) == []

    run(tmp_path, tables(replicas=replicas), check, fleet=True, **options)
