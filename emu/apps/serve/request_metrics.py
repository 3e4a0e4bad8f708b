"""Families of `/metrics` that vLLM has of requests: of one engine, or of all of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from emu.apps.serve.prometheus import Page
from emu.apps.serve.statistics import Histogram, Statistics
from emu.apps.serve.wire import Wire

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
    ("request_params_n", "Answers that were asked for.", lambda s: s.params_n),
    ("request_params_max_tokens", "Limit on output tokens.", lambda s: s.max_tokens),
    ("iteration_tokens_total", "Tokens of an iteration.", lambda s: s.iteration_tokens),
)


def request_families(page: Page, rows: Sequence[tuple[str, Statistics]], wire: Wire) -> None:
    """What vLLM says of requests: of one engine, or of all of each model; (labels, figures)."""
    absent = set()
    if not wire.counts_recomputed:
        absent.add("prompt_tokens_recomputed")
    if not wire.shows_preemptions:
        absent.add("request_num_preemptions")
    for name, text, count in _COUNTERS:
        if name in absent:
            continue
        page.counter(f"vllm:{name}", text, [(label, count(stats)) for label, stats in rows])
    page.counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by origin.",
        [
            (f'{label},source="{source}"', count)
            for label, stats in rows
            for source, count in _sources(stats).items()
        ],
    )
    ended = []
    for label, stats in rows:
        engine, _, model = label.partition(",")
        ended += [
            (f'{engine},finished_reason="{reason}",{model}', count)
            for reason, count in stats.success.items()
        ]
    page.counter("vllm:request_success", "Ended requests.", ended)
    for name, text, pick in _HISTOGRAMS:
        if name in absent:
            continue
        page.histogram(f"vllm:{name}", text, [(label, pick(stats)) for label, stats in rows])


def _sources(stats: Statistics) -> dict[str, int]:
    """Prompt tokens by origin, as vLLM counts them.

    The sum is `prompt_tokens` plus `prompt_tokens_recomputed`: the last token of a prompt that was
    cached is both found and computed.
    """
    external = stats.from_tiers_sum + stats.transferred_sum
    cached = _cached_tokens(stats)
    return {
        "local_compute": stats.prompt_sum - cached,
        "local_cache_hit": cached + stats.recomputed - external,
        "external_kv_transfer": external,
    }


def _cached_tokens(stats: Statistics) -> int:
    """Prompt tokens that were not computed here."""
    return stats.cached_sum + stats.transferred_sum - stats.fetched


_COUNTERS: Final[tuple[tuple[str, str, Callable[[Statistics], int]], ...]] = (
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.queried_sum),
    ("prefix_cache_hits", "Prompt tokens found.", lambda s: s.hit_sum),
    ("external_prefix_cache_queries", "Not on the GPU.", lambda s: s.external_queried_sum),
    (
        "external_prefix_cache_hits",
        "Found in lower tiers, or had from another engine.",
        lambda s: s.external_hit_sum,
    ),
    ("prompt_tokens_cached", "Prompt tokens that were not computed.", _cached_tokens),
    ("prompt_tokens_recomputed", "Prompts computed for one token.", lambda s: s.recomputed),
    ("num_preemptions", "Preemptions.", lambda s: s.preemptions),
)
