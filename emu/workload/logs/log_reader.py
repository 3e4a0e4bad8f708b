"""Logs and results of real servers: what was asked, when, and how long it took.

    log = read_log(Path("spans.json"))
    log.records[0].prompt_tokens, log.records[0].ttft_ns

Read are OpenTelemetry spans (OTLP as JSON: vLLM's `llm_request`, or spans with GenAI attributes),
LiteLLM's spend logs and logging payloads, access logs of a gateway in front of vLLM as JSON lines
(Envoy, as in llm-d), AIPerf's `profile_export.jsonl`, inference-perf's per-request metrics,
GuideLLM's `benchmarks.json` and the detailed results of `vllm bench serve`. Which one it is, is
seen from the content. What a request's line lacks is -1; requests that failed, or whose lengths are
not told, are left out and counted.

An access log of vLLM itself has neither times nor lengths, and results of sglang's benchmark no
times: these are refused with that reason. docs/logs.md has the fields of each.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from emu.config.input_files import read_input
from emu.errors import InputError
from emu.workload.logs.log_formats import LOG_FORMATS, Entries, LogFormat, format_of
from emu.workload.logs.log_record import Log, LogRecord
from emu.workload.logs.log_values import Skip, Wrong


def read_log(path: Path, source: str = "", format: str = "auto") -> Log:
    """Read a log. Raises InputError for what is none, or for the first line that is wrong."""
    source = source or str(path)
    data = read_input(path).removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise InputError(source, 1, "$", "the file is empty")
    entries = _entries(data, source)
    log = _recognised(entries, data, source) if format == "auto" else log_format(format)
    found: list[LogRecord] = []
    skipped: dict[str, int] = {}
    place: int | None = None
    try:
        for place, row in log.rows(entries):
            try:
                record = log.record(row)
            except Skip as skip:
                skipped[str(skip)] = skipped.get(str(skip), 0) + 1
            else:
                record.line = place
                found.append(record)
            place = None  # what comes next may fail before its place is known
    except Wrong as wrong:
        raise InputError(source, place, wrong.field, str(wrong)) from None
    if not found:
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no request"
        raise InputError(source, None, "$", f"no request of it can be used ({why})")
    found.sort(key=lambda one: (one.arrival_ns, one.line))
    return Log(log.name, found, skipped)


def log_format(name: str) -> LogFormat:
    """The log format of a name that is known."""
    return next(one for one in LOG_FORMATS if one.name == name)


def _recognised(entries: Entries, data: bytes, source: str) -> LogFormat:
    found = format_of(data)
    if found is not None:
        return found
    if not entries and re.search(rb'"(GET|POST) /\S* HTTP/', data):
        problem = (
            "is an access log without times, lengths or latencies (vLLM writes only "
            "client, path and status); export spans instead: vllm serve --otlp-traces-endpoint"
        )
        raise InputError(source, 1, "$", problem)
    if b'"dataset_name"' in data and b'"ttfts"' in data:
        raise InputError(source, 1, "$", "has no start times: it cannot be replayed")
    known = ", ".join(one.name for one in LOG_FORMATS)
    raise InputError(source, 1, "$", f"is no log that is read; there are {known} (docs/logs.md)")


def _entries(data: bytes, source: str) -> list[tuple[int, object]]:
    """(line, value): one whole JSON value, or one in each line. Empty for what is no JSON."""
    if data.lstrip()[:1] not in (b"{", b"["):
        return []
    try:
        return [(1, msgspec.json.decode(data))]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        whole = error
    found = []
    for line, text in enumerate(data.split(b"\n"), start=1):
        if text.strip():
            try:
                found.append((line, msgspec.json.decode(text)))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                problem = whole if line == 1 and b"\n{" not in data else error
                raise InputError(source, line, "$", f"not valid JSON: {problem}") from None
    return found
