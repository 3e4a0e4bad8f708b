"""Measured load levels: read from result files of load generators, and written as a workload.

    levels = read_benchmarks(path)

The format is recognized by content:

    vllm            `vllm bench serve --save-result --save-detailed`, also several (--append-result)
    sglang          `sglang.bench_serving --output-file F --output-details`, one line a run
    guidellm        `benchmarks.json`, one level for each benchmark
    aiperf          `profile_export.jsonl`
    inference-perf  `per_request_lifecycle_metrics.json`
    observe         `requests.jsonl` of `emu observe` and of LLMServingSim's recorder

Times become seconds from the first request of the level. A start that a tool does not write is
rebuilt from what it does: all at once, a closed loop of so many clients, or (`is_drawn`) a rate
without recorded gaps. Failed requests, warm-up and cancelled ones are left out and counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from emu.apps.learn.fields import Level
from emu.apps.learn.readers.aiperf import aiperf_levels
from emu.apps.learn.readers.bench import bench_levels
from emu.apps.learn.readers.guidellm import guidellm_levels
from emu.apps.learn.readers.inference_perf import inference_perf_levels
from emu.apps.learn.readers.observed import observe_levels
from emu.config.input_files import read_input
from emu.documents import Document
from emu.errors import InputError


def read_benchmarks(path: Path) -> list[Level]:
    """All levels of a file, in its order. Raises InputError."""
    data = read_input(path)
    source = str(path)
    if not data.strip():
        raise InputError(source, None, "", "the file is empty")
    try:
        whole = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _of_lines(source, data, str(error))
    if isinstance(whole, list):
        return [inference_perf_levels(source, whole)]
    if not isinstance(whole, dict):
        raise InputError(source, None, "", f"expected an object or a list, {_KNOWN}")
    if "benchmarks" in whole:
        return guidellm_levels(source, whole)
    if "ttfts" in whole or "mean_ttft_ms" in whole:
        return [bench_levels(source, None, whole)]
    return _of_lines(source, data, f"an object of no known format; {_KNOWN}")


_KNOWN: Final = (
    "known are vllm bench serve --save-detailed, sglang bench_serving --output-details, GuideLLM, "
    "AIPerf, inference-perf and emu observe"
)


def _of_lines(source: str, data: bytes, problem: str) -> list[Level]:
    """A file of one object a line."""
    rows: list[tuple[int, Document]] = []
    for line, text in enumerate(data.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            row = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            known = "" if rows else f"; {_KNOWN}"
            raise InputError(source, line, "", f"not valid JSON: {error}{known}") from None
        if not isinstance(row, dict):
            raise InputError(source, line, "", "expected a JSON object")
        rows.append((line, row))
    first = rows[0][1]
    if "ttfts" in first or "mean_ttft_ms" in first:
        return [bench_levels(source, line, row) for line, row in rows]
    if "metadata" in first and ("metrics" in first or "error" in first):
        return [aiperf_levels(source, rows)]
    if "first_token_ts" in first:
        return observe_levels(source, rows)
    raise InputError(source, rows[0][0], "", problem if len(rows) > 1 else _KNOWN)
