"""Results of AIPerf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from emu.apps.learn.fields import Level, Sent, check_times, count_of, from_first, number_of
from emu.documents import Document
from emu.errors import InputError, shown


def aiperf_levels(source: str, rows: Sequence[tuple[int, Document]]) -> Level:
    sent = []
    skipped = 0
    for line, row in rows:
        about = row.get("metadata")
        if not isinstance(about, dict):
            raise InputError(source, line, "metadata", "missing")
        is_warm_up = about.get("benchmark_phase") not in (None, "profiling")
        if is_warm_up or about.get("was_cancelled") or row.get("error"):
            skipped += 1
            continue
        metrics = row.get("metrics")
        prompt = _aiperf_metric(source, line, metrics, "input_sequence_length", 1.0)
        output = _aiperf_metric(source, line, metrics, "output_sequence_length", 1.0)
        ttft_s = _aiperf_metric(source, line, metrics, "time_to_first_token", 1e-3)
        e2e_s = _aiperf_metric(source, line, metrics, "request_latency", 1e-3)
        check_times(source, line, ttft_s, e2e_s, "metrics.time_to_first_token")
        begin_ns = number_of(source, line, about, "request_start_ns", "metadata.request_start_ns")
        sent.append(
            Sent(
                begin_ns / 1e9,
                count_of(source, line, prompt, "metrics.input_sequence_length"),
                count_of(source, line, output, "metrics.output_sequence_length"),
                ttft_s,
                e2e_s,
            )
        )
    level = Level(label="profile", tool="aiperf", requests=tuple(sent), skipped=skipped)
    return from_first(source, level)


_TO_BASE: Final = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def _aiperf_metric(source: str, line: int, metrics: Any, name: str, default: float) -> float:
    """A metric in s (times) or as it is (counts: `default` 1)."""
    field = f"metrics.{name}"
    metric = metrics.get(name) if isinstance(metrics, dict) else None
    value = number_of(source, line, metric, "value", field)
    if default == 1.0:
        return value
    unit = metric.get("unit", "ms") if isinstance(metric, dict) else "ms"
    if not isinstance(unit, str) or unit not in _TO_BASE:
        raise InputError(source, line, f"{field}.unit", f"unknown unit of time {shown(unit)}")
    return value * _TO_BASE[unit]
