"""Results of GuideLLM."""

from __future__ import annotations

from typing import Any

from emu.apps.learn.fields import (
    Level,
    Sent,
    cached_of,
    check_times,
    count_of,
    from_first,
    is_finite,
    number_of,
)
from emu.documents import Document
from emu.errors import InputError


def guidellm_levels(source: str, whole: Document) -> list[Level]:
    benchmarks = whole["benchmarks"]
    if not isinstance(benchmarks, list) or not benchmarks:
        raise InputError(source, None, "benchmarks", "expected a list of benchmarks")
    levels = []
    for number, benchmark in enumerate(benchmarks):
        key = f"benchmarks.{number}.requests"
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        if not isinstance(requests, dict) or not isinstance(requests.get("successful"), list):
            raise InputError(source, None, key, "no single requests (successful)")
        sent = [
            _guidellm_request(source, f"{key}.successful.{index}", entry)
            for index, entry in enumerate(requests["successful"])
        ]
        config = benchmark.get("config")
        strategy = config.get("strategy") if isinstance(config, dict) else None
        label = _strategy(strategy) or f"benchmark {number + 1}"
        lost = [requests.get(kind) for kind in ("errored", "incomplete")]
        skipped = sum(len(kind) for kind in lost if isinstance(kind, list))
        level = Level(label=label, tool="guidellm", requests=tuple(sent), skipped=skipped)
        levels.append(from_first(source, level))
    return levels


def _strategy(strategy: Any) -> str:
    if isinstance(strategy, str):
        return strategy
    if not isinstance(strategy, dict):
        return ""
    kind = str(strategy.get("type_") or strategy.get("kind") or strategy.get("type") or "")
    amount = strategy.get("rate") or strategy.get("streams") or strategy.get("max_concurrency")
    return f"{kind} {amount:g}".strip() if is_finite(amount) else kind


def _table(entry: Any, key: str) -> Document:
    found = entry.get(key) if isinstance(entry, dict) else None
    return found if isinstance(found, dict) else {}


def _guidellm_request(source: str, key: str, entry: Any) -> Sent:
    info = entry.get("info") if isinstance(entry, dict) else None
    timings = info.get("timings") if isinstance(info, dict) else None
    given, made = _table(entry, "input_metrics"), _table(entry, "output_metrics")
    begin, first, last = (
        number_of(source, None, timings, name, f"{key}.info.timings.{name}")
        for name in ("request_start", "first_token_iteration", "last_token_iteration")
    )
    check_times(source, None, first - begin, last - begin, f"{key}.info.timings")
    return Sent(
        begin,
        count_of(source, None, given.get("text_tokens"), f"{key}.input_metrics.text_tokens"),
        count_of(source, None, made.get("text_tokens"), f"{key}.output_metrics.text_tokens"),
        first - begin,
        last - begin,
        cached_tokens=cached_of(
            source, None, given.get("cached_tokens"), f"{key}.input_metrics.cached_tokens"
        ),
    )
