"""Measurements of a real server, read from what the tools write.

    measurement = read_measurement(path)

Two formats, recognized by content:

* one JSON object per line, as LLMServingSim's recorder of vLLM writes (`requests.jsonl`):
  request_id, input_toks, output_toks, arrival_time, queued_ts, first_token_ts, last_token_ts, s.
  The clock of `arrival_time` may differ from that of the rest. It anchors TTFT and latency if it
  lies within 100,000 s of the first and the last token; otherwise `queued_ts` does. `input_toks`
  may be lacking: it only tells whether pairs of requests are the same ones.
* one JSON object, the result of `vllm bench serve --save-result`: with `--save-detailed`
  ttfts, itls, output_lens, errors (s); else the summary's figures only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.config.input_files import json_object, read_input
from emu.documents import Document
from emu.errors import InputError, shown
from emu.report.compare import Floats

ANCHOR_LIMIT_S: Final = 100_000.0
TOKENS_MAX: Final = 2**31
"""Of one request."""
_NUMBER_MAX: Final = 1e15
"""Of a time in s: 30 million years, also for clocks that count from 1970."""
_SUMMARY_METRICS: Final = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "E2E": "e2el"}
_SUMMARY_STATISTICS: Final = {
    "mean": "mean",
    "median": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
}


class Measurement(msgspec.Struct):
    """Latencies in ms. Arrays may be empty when only figures are known."""

    request_ids: NDArray[np.int64]
    """Line numbers from `bench-<n>`, or positions; what pairs with a run's request_id."""
    prompt_tokens: NDArray[np.int64]
    """-1 where not recorded."""
    output_tokens: NDArray[np.int64]
    ttft_ms: Floats
    tpot_ms: Floats
    """NaN for requests with one output token: they have no TPOT."""
    e2e_ms: Floats
    itl_ms: Floats
    """All gaps, pooled; empty if not recorded."""
    makespan_s: float
    """First anchor to last token; 0 if not known."""
    figures: dict[tuple[str, str], float]
    """(metric, statistic) -> ms, when there are no single requests."""
    anchor: str
    """arrival_time, queued_ts, mixed, or client."""
    skipped: int
    """Requests that failed, and are left out."""


def read_measurement(path: Path) -> Measurement:
    """Read a file of either format, or the recording in a directory."""
    if path.is_dir():
        places = [path / "requests.jsonl", path / "vllm" / "requests.jsonl"]
        path = next((place for place in places if place.is_file()), places[0])
    data = read_input(path)
    if data.strip() and data.lstrip()[:1] not in b"{[":
        raise InputError(
            str(path),
            None,
            "",
            "expected requests of a real server as lines of JSON, or the result file of a "
            "benchmark (docs/measured.md)",
        )
    try:
        whole = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _read_lines(path, data)
    if isinstance(whole, dict) and "first_token_ts" not in whole:
        return _read_bench(path, whole)
    return _read_lines(path, data)


def _read_lines(path: Path, data: bytes) -> Measurement:
    rows: list[tuple[float, float, float, float]] = []
    lengths: list[tuple[int, int]] = []
    anchors: set[str] = set()
    ends: list[float] = []
    found = list(records(path, data))
    for line, record in found:
        first, last = (
            number_of(path, line, record, key) for key in ("first_token_ts", "last_token_ts")
        )
        tokens = tokens_of(path, line, record.get("output_toks"), "output_toks")
        arrival = record.get("arrival_time")
        near = arrival is not None and all(
            abs(token - number_of(path, line, record, "arrival_time")) <= ANCHOR_LIMIT_S
            for token in (first, last)
        )
        anchor = "arrival_time" if near else "queued_ts"
        anchors.add(anchor)
        start = number_of(path, line, record, anchor)
        if not start <= first <= last:
            raise InputError(
                str(path), line, "first_token_ts", "tokens before the request, or out of order"
            )
        tpot = (last - first) / (tokens - 1) if tokens > 1 else float("nan")
        rows.append((first - start, tpot, last - start, start))
        ends.append(last)
        prompt = tokens_of(path, line, record.get("input_toks", -1), "input_toks")
        lengths.append((prompt, tokens))
    if not rows:
        raise InputError(str(path), None, "", "no measured request")
    table = np.array(rows)
    return Measurement(
        request_ids=np.array(request_ids([record for _, record in found]), dtype=np.int64),
        prompt_tokens=np.array([prompt for prompt, _ in lengths], dtype=np.int64),
        output_tokens=np.array([tokens for _, tokens in lengths], dtype=np.int64),
        ttft_ms=table[:, 0] * 1e3,
        tpot_ms=table[:, 1] * 1e3,
        e2e_ms=table[:, 2] * 1e3,
        itl_ms=np.zeros(0),
        makespan_s=max(ends) - min(row[3] for row in rows),
        figures={},
        anchor=anchors.pop() if len(anchors) == 1 else "mixed",
        skipped=0,
    )


def records(path: Path, data: bytes) -> Iterator[tuple[int, Document]]:
    """(line, record) of each line that is not empty; InputError at one that is no record."""
    for line, text in enumerate(data.split(b"\n"), start=1):
        if text.strip():
            yield line, json_object(path, line, text)


def number_of(path: Path, line: int | None, record: Document, key: str) -> float:
    """A number of a record that was read. Raises InputError with its place."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        problem = "missing" if value is None else f"expected a number, got {shown(value)}"
        raise InputError(str(path), line, key, problem)
    if not abs(value) <= _NUMBER_MAX:
        raise InputError(str(path), line, key, f"out of range: {shown(value)}")
    return float(value)


def tokens_of(path: Path, line: int | None, value: Any, key: str) -> int:
    """A count of tokens, -1 where it is not known. Raises InputError with its place."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not -1 <= value <= TOKENS_MAX:
        problem = "missing" if value is None else f"expected a number, got {shown(value)}"
        raise InputError(str(path), line, key, problem)
    return int(value)


def request_ids(found: Sequence[Document]) -> list[int]:
    """`bench-17` -> 17 if all records have a number of their own, else their positions."""
    tails = [str(record.get("request_id", "")).rpartition("-")[2] for record in found]
    if all(tail.isascii() and tail.isdigit() and len(tail) < 19 for tail in tails):
        ids = [int(tail) for tail in tails]
        if len(set(ids)) == len(ids):
            return ids
    return list(range(len(found)))


def _read_bench(path: Path, result: Document) -> Measurement:
    if "ttfts" not in result:
        return _bench_figures(path, result)
    lists: dict[str, list[Any]] = {}
    for key in ("ttfts", "itls", "output_lens"):
        value = result.get(key)
        if not isinstance(value, list) or len(value) != len(lists.get("ttfts", value)):
            raise InputError(str(path), None, key, "expected an array with one entry per request")
        lists[key] = value
    errors = result.get("errors") or [""] * len(lists["ttfts"])
    if not isinstance(errors, list):
        raise InputError(str(path), None, "errors", "expected an array")
    rows = []
    gaps: list[float] = []
    for index, (ttft, itls, tokens, error) in enumerate(
        zip(lists["ttfts"], lists["itls"], lists["output_lens"], errors, strict=False)
    ):
        if error or not tokens:
            continue
        try:
            spent = float(sum(itls))
            tpot = spent / (tokens - 1) if tokens > 1 else float("nan")
            if not abs(ttft + spent) <= _NUMBER_MAX:
                raise InputError(str(path), None, f"itls.{index}", "times out of range")
            rows.append((index, ttft * 1e3, tpot * 1e3, (ttft + spent) * 1e3))
            gaps.extend(gap * 1e3 for gap in itls)
        except (TypeError, OverflowError):
            raise InputError(str(path), None, f"itls.{index}", "expected numbers") from None
    if not rows:
        raise InputError(str(path), None, "", "no measured request")
    table = np.array(rows)
    ids = table[:, 0].astype(np.int64)
    prompts = result.get("input_lens")
    if not isinstance(prompts, list) or len(prompts) != len(lists["ttfts"]):
        prompts = [-1] * len(lists["ttfts"])
    return Measurement(
        request_ids=ids,
        prompt_tokens=_lengths(path, "input_lens", prompts)[ids],
        output_tokens=_lengths(path, "output_lens", lists["output_lens"])[ids],
        ttft_ms=table[:, 1],
        tpot_ms=table[:, 2],
        e2e_ms=table[:, 3],
        itl_ms=np.array(gaps),
        makespan_s=_makespan_s(path, result),
        figures={},
        anchor="client",
        skipped=len(lists["ttfts"]) - len(rows),
    )


def _lengths(path: Path, key: str, values: list[Any]) -> NDArray[np.int64]:
    read = [tokens_of(path, None, n, f"{key}.{index}") for index, n in enumerate(values)]
    return np.array(read, dtype=np.int64)


def _makespan_s(path: Path, result: Document) -> float:
    is_said = isinstance(result.get("duration"), (int, float))
    return number_of(path, None, result, "duration") if is_said else 0.0


def _bench_figures(path: Path, result: Document) -> Measurement:
    figures = {
        (metric, label): number_of(path, None, result, f"{statistic}_{key}_ms")
        for metric, key in _SUMMARY_METRICS.items()
        for statistic, label in _SUMMARY_STATISTICS.items()
        if isinstance(result.get(f"{statistic}_{key}_ms"), (int, float))
    }
    if not figures:
        problem = "neither measured requests nor a result of vllm bench serve"
        raise InputError(str(path), None, "", problem)
    empty = np.zeros(0)
    failed = result.get("failed")
    none = np.zeros(0, dtype=np.int64)
    return Measurement(
        request_ids=none,
        prompt_tokens=none,
        output_tokens=none,
        ttft_ms=empty,
        tpot_ms=empty,
        e2e_ms=empty,
        itl_ms=empty,
        makespan_s=_makespan_s(path, result),
        figures=figures,
        anchor="client",
        skipped=failed if isinstance(failed, int) else 0,
    )
