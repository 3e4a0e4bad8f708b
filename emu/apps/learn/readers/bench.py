"""Results of `vllm bench serve --save-detailed` and SGLang's `bench_serving --output-details`."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from emu.apps.learn.fields import Level, Sent, check_times, count_of, from_first, number_of
from emu.documents import Document
from emu.errors import InputError
from emu.rng import rng_stream


def _label(result: Document) -> str:
    """The load of a run in words."""
    rate, clients = result.get("request_rate"), result.get("max_concurrency")
    label = f"{rate}/s" if isinstance(rate, (int, float)) and np.isfinite(rate) else "at once"
    if not clients:
        return label
    return f"{clients} clients" if label == "at once" else f"{label}, {clients} clients"


def bench_levels(source: str, line: int | None, result: Document) -> Level:
    is_sglang = "dataset_name" in result or "server_info" in result
    flag = "--output-details" if is_sglang else "--save-detailed"
    if "ttfts" not in result:
        problem = f"no single requests; run the benchmark with {flag}"
        raise InputError(source, line, "ttfts", problem)
    count = len(_list(source, line, result, "ttfts", None))
    if not count:
        raise InputError(source, line, "ttfts", "no requests")
    columns = {
        key: _list(source, line, result, key, count)
        for key in ("ttfts", "itls", "input_lens", "output_lens")
    }
    errors = [""] * count
    if result.get("errors"):
        errors = _list(source, line, result, "errors", count)
    starts = result.get("start_times")
    has_starts = isinstance(starts, list) and len(starts) == count
    rows: list[tuple[int, float, float, int, int]] = []
    for index in range(count):
        gaps = columns["itls"][index]
        if not isinstance(gaps, list) or not all(isinstance(gap, (int, float)) for gap in gaps):
            raise InputError(source, line, f"itls.{index}", "expected a list of numbers")
        if errors[index] or not columns["ttfts"][index]:
            continue
        ttft_s = number_of(source, line, {"": columns["ttfts"][index]}, "", f"ttfts.{index}")
        prompt = count_of(source, line, columns["input_lens"][index], f"input_lens.{index}")
        output = count_of(source, line, columns["output_lens"][index], f"output_lens.{index}")
        e2e_s = ttft_s + float(sum(gaps))
        check_times(source, line, ttft_s, e2e_s, f"ttfts.{index}")
        rows.append((index, ttft_s, e2e_s, prompt, output))
    if has_starts:
        begun = [
            number_of(source, line, {"": starts[row[0]]}, "", f"start_times.{row[0]}")  # type: ignore[index]
            for row in rows
        ]
    else:
        begun = _starts(source, line, result, [row[2] for row in rows])
    sent = tuple(
        Sent(start_s, prompt, output, ttft_s, e2e_s)
        for start_s, (_, ttft_s, e2e_s, prompt, output) in zip(begun, rows, strict=True)
    )
    level = Level(
        label=_label(result),
        tool="sglang" if is_sglang else "vllm",
        requests=sent,
        skipped=count - len(rows),
        is_drawn=not has_starts and _rate(result) is not None,
        model=str(result.get("model_id") or _served(result)),
        date=_date(str(result.get("date") or "")),
    )
    return from_first(source, level)


def _served(result: Document) -> str:
    info = result.get("server_info")
    return str(info.get("model_path") or "") if isinstance(info, dict) else ""


def _list(
    source: str, line: int | None, result: Document, key: str, count: int | None
) -> list[Any]:
    value = result.get(key)
    if not isinstance(value, list) or (count is not None and len(value) != count):
        problem = "missing" if value is None else "expected a list with one entry a request"
        raise InputError(source, line, key, problem)
    return value


def _rate(result: Document) -> float | None:
    """The rate that the tool was given, at which starts are drawn; None = all at once."""
    rate = result.get("request_rate")
    if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not np.isfinite(rate):
        return None
    return float(rate)


def _starts(
    source: str, line: int | None, result: Document, spent_s: Sequence[float]
) -> list[float]:
    """Starts that the tool did not write."""
    clients = result.get("max_concurrency")
    limit = len(spent_s)
    if isinstance(clients, (int, float)) and 1 <= clients < limit:
        limit = int(clients)
    if result.get("request_rate") == "trace":
        problem = "a replayed trace without start times cannot be rebuilt"
        raise InputError(source, line, "request_rate", problem)
    due, rate = np.zeros(len(spent_s)), _rate(result)
    if rate is not None and rate > 0:
        gaps = rng_stream(0, "learn.starts").exponential(1.0 / rate, len(spent_s))
        due = np.cumsum(gaps)
    free = [0.0] * limit
    begun = []
    for due_s, each_s in zip(due.tolist(), spent_s, strict=True):
        start_s = max(due_s, heapq.heappop(free))
        begun.append(start_s)
        heapq.heappush(free, start_s + each_s)
    return begun


def _date(text: str) -> str:
    """`20261122-071729` as `2026-11-22`; what already looks like a date; else nothing."""
    found = re.match(r"(\d{4})-?(\d\d)-?(\d\d)", text)
    return "-".join(found.groups()) if found else ""
