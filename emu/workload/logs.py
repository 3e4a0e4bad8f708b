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

import datetime
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from emu.config.names import read_input
from emu.errors import InputError
from emu.units import NS_PER_MS, NS_PER_S
from emu.workload.chunks import CHUNK_BYTES, TextFile, exact_decimal
from emu.workload.items import Block, Line, Notes

Fields = Mapping[str, Any]


class LogRecord(msgspec.Struct, kw_only=True):
    """One request of a log. Times in ns; -1 where the log does not tell."""

    arrival_ns: int
    """On the log's own clock."""
    prompt_tokens: int
    output_tokens: int
    line: int
    """Where it stands: a line of the file, or its place in an array (from 1)."""
    ttft_ns: int = -1
    e2e_ns: int = -1
    """From arrival to the last token."""
    max_output_tokens: int = 0
    """0 = not told."""
    cached_tokens: int = -1
    server: str = ""
    """The server of the request: the address or the name of a replica."""
    decode_server: str = ""
    request_id: str = ""
    session: str = ""
    tenant: str = ""
    model: str = ""
    priority: int = 0


class Log(msgspec.Struct):
    """A log that has been read."""

    format: str
    records: list[LogRecord]
    """In the order of arrival."""
    skipped: dict[str, int]
    """Requests left out, by reason."""

    @property
    def servers(self) -> list[str]:
        """Names of those that served, sorted: numbers by value."""
        names = {one.server for one in self.records} | {one.decode_server for one in self.records}
        return sorted(names - {""}, key=natural)


def natural(name: str) -> tuple[Any, ...]:
    """Sort key under which replica-2 comes before replica-10."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


_LEAST: Final = -(2**63)
_MOST: Final = 2**62
"""The least integer that OTLP has, and the most of a count, or of ns, that a run can have."""
_DIGITS_MAX: Final = 20
_SHOWN_CHARS: Final = 60


class _Skip(Exception):
    """A request that is left out, and why."""


class _Wrong(Exception):
    """A field that is missing or is not what it should be."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


# --- reading --------------------------------------------------------------------------------------
def read_log(path: Path, source: str = "", format: str = "auto") -> Log:
    """Read a log. Raises InputError for what is none, or for the first line that is wrong."""
    source = source or str(path)
    data = read_input(path).removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise InputError(source, 1, "$", "the file is empty")
    entries = _entries(data, source)
    name = _recognised(entries, data, source) if format == "auto" else format
    rows, convert = _READERS[name]
    found: list[LogRecord] = []
    skipped: dict[str, int] = {}
    place: int | None = None
    try:
        for place, row in rows(entries):
            try:
                record = convert(row)
            except _Skip as skip:
                skipped[str(skip)] = skipped.get(str(skip), 0) + 1
            else:
                record.line = place
                found.append(record)
            place = None  # what comes next may fail before its place is known
    except _Wrong as wrong:
        raise InputError(source, place, wrong.field, str(wrong)) from None
    if not found:
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no request"
        raise InputError(source, None, "$", f"no request of it can be used ({why})")
    found.sort(key=lambda one: (one.arrival_ns, one.line))
    return Log(name, found, skipped)


def recognise_log(head: bytes) -> str:
    """Name of the log format of a text that begins so; empty if it is none."""
    text = head.lstrip()
    for name, mark in _MARKS.items():
        if re.search(mark, text[:65_536]):
            return name
    return ""


_MARKS: Final[Mapping[str, bytes]] = {
    "otel": rb'"resourceSpans"',
    "aiperf": rb'"request_start_ns"|"benchmark_phase"',
    "inference-perf": rb'"output_token_times"|"response_metrics"',
    "guidellm": rb'"guidellm_version"|"first_token_iteration"',
    "vllm-bench": rb'"ttfts"\s*:|"start_times"\s*:',
    "litellm": rb'"completionStartTime"|"startTime"\s*:[^}]*"endTime"',
    "gateway": rb'"upstream_host"|"x-envoy-upstream-service-time"|"response_code"',
}


def _recognised(entries: Sequence[tuple[int, Any]], data: bytes, source: str) -> str:
    name = recognise_log(data)
    if name:
        return name
    if not entries and re.search(rb'"(GET|POST) /\S* HTTP/', data):
        problem = (
            "is an access log without times, lengths or latencies (vLLM writes only "
            "client, path and status); export spans instead: vllm serve --otlp-traces-endpoint"
        )
        raise InputError(source, 1, "$", problem)
    if b'"dataset_name"' in data and b'"ttfts"' in data:
        raise InputError(source, 1, "$", "has no start times: it cannot be replayed")
    known = ", ".join(_MARKS)
    raise InputError(source, 1, "$", f"is no log that is read; there are {known} (docs/logs.md)")


def _entries(data: bytes, source: str) -> list[tuple[int, Any]]:
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


def _objects(entries: Sequence[tuple[int, Any]], *keys: str) -> Iterator[tuple[int, Fields]]:
    """The objects of all lines; of an array its items, of an object what lies below these keys."""
    for line, value in entries:
        if isinstance(value, list):
            yield from ((place, item) for place, item in enumerate(value, start=1))
        elif isinstance(value, dict) and keys and keys[0] in value:
            yield from _objects([(line, value[keys[0]])], *keys[1:])
        else:
            yield line, value


def _flat(entries: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Fields]]:
    return _objects(entries, "data")


# --- values ---------------------------------------------------------------------------------------
def _object(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(field, "must be an object")
    return value


def _list(value: object, field: str) -> list[Any]:
    """An array; one that is absent is empty."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Wrong(field, "must be an array")
    return value


def _optional(value: object, field: str) -> dict[str, Any]:
    """An object; one that is absent is empty."""
    return {} if value is None else _object(value, field)


def _count(row: Fields, field: str, *, least: int = 0) -> int:
    """A whole number that is there."""
    value = _number(row.get(field))
    if type(value) is not int or not least <= value <= _MOST:
        raise _Wrong(field, "missing" if value is None else _no_count(value, least))
    return value


def _number(value: object) -> object:
    """The integer that a value stands for, else the value."""
    if isinstance(value, str) and len(value) <= _DIGITS_MAX:
        return int(value) if value.removeprefix("-").isdecimal() else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _no_count(value: object, least: int) -> str:
    if type(value) is int and value > _MOST:
        return f"is too large: {_short(value)}"
    return f"must be a whole number >= {least}, not {_short(value)}"


def _bounded(time_ns: int, field: str, value: object) -> int:
    """A time in ns that a run can have."""
    if abs(time_ns) > _MOST:
        raise _Wrong(field, f"is too large: {_short(value)}")
    return time_ns


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _first(row: Fields, *fields: str) -> Any:
    """The first of these fields that is there."""
    for field in fields:
        value = row.get(field)
        if value is not None and value != "":
            return value
    return None


def _seconds(value: object, field: str) -> int:
    """Seconds as ns, exactly as they are written."""
    return _scaled(value, field, NS_PER_S, 9)


def _milliseconds(value: object, field: str) -> int:
    return _scaled(value, field, NS_PER_MS, 6)


def _scaled(value: object, field: str, unit: int, digits: int) -> int:
    problem = "missing" if value is None else f"must be a number, not {_short(value)}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _Wrong(field, problem)
    exact: int | None
    if isinstance(value, int):
        exact = value * unit
    else:
        exact = exact_decimal(value if isinstance(value, str) else repr(value), digits)
    if exact is None:
        try:
            exact = round(float(value) * unit)
        except (ValueError, OverflowError):
            raise _Wrong(field, problem) from None
    return _bounded(exact, field, value)


def _instant(value: object, field: str) -> int:
    """Unix seconds, or an ISO 8601 date with up to nine digits of a second, as Unix ns."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _seconds(value, field)
    if not isinstance(value, str):
        raise _Wrong(field, "missing" if value is None else f"must be a time, not {_short(value)}")
    match = re.fullmatch(r"(.*?:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?", value.strip())
    try:
        if match is None:
            raise ValueError
        zone = (match.group(3) or "Z").replace("Z", "+00:00")
        whole = datetime.datetime.fromisoformat(match.group(1) + zone)
    except ValueError:
        raise _Wrong(field, f"must be a time, not {_short(value)}") from None
    fraction = (match.group(2) or ".0")[1:10].ljust(9, "0")
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    time_ns = (whole - epoch) // datetime.timedelta(seconds=1) * NS_PER_S + int(fraction)
    return _bounded(time_ns, field, value)


def _lengths(prompt: object, output: object) -> tuple[int, int]:
    """Tokens of prompt and output; a request without one of them is left out."""
    found = []
    for value, name in ((prompt, "prompt"), (output, "output")):
        value = _number(value)
        if value is None:
            raise _Skip(f"without tokens of the {name}")
        if type(value) is not int or not 0 <= value <= _MOST:
            raise _Wrong(f"{name} tokens", _no_count(value, 0))
        if value == 0:
            raise _Skip(f"with an empty {name}")
        found.append(value)
    return found[0], found[1]


def _order(record: LogRecord) -> LogRecord:
    """The first token lies between arrival and end. Clocks of a proxy may be off by a little."""
    if record.e2e_ns >= 0 and record.ttft_ns > record.e2e_ns:
        record.ttft_ns = record.e2e_ns
    return record


# --- OpenTelemetry -------------------------------------------------------------------------------
def _spans(entries: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Fields]]:
    """Every span of OTLP/JSON, with the attributes of its resource."""
    for line, value in entries:
        place = 0
        groups = value.get("resourceSpans") if isinstance(value, dict) else None
        for resource in _list(groups, "resourceSpans"):
            of_resource = _object(resource, "resourceSpans")
            shared = _attributes(_optional(of_resource.get("resource"), "resource"))
            older = of_resource.get("instrumentationLibrarySpans")
            for scope in _list(of_resource.get("scopeSpans", older), "scopeSpans"):
                for span in _list(_object(scope, "scopeSpans").get("spans"), "spans"):
                    _object(span, "spans")
                    place += 1
                    yield (line if len(entries) > 1 else place), {**span, "_resource": shared}


def _attributes(holder: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in _list(holder.get("attributes"), "attributes"):
        key = str(_object(one, "attributes").get("key", ""))
        for name, inner in _optional(one.get("value"), key).items():
            found[key] = _count({key: inner}, key, least=_LEAST) if name == "intValue" else inner
    return found


def _whole(found: Fields, field: str, absent: int) -> int:
    """A whole number; one that is absent, or null, is `absent`."""
    return absent if found.get(field) is None else _count(found, field, least=_LEAST)


def _otel(span: Fields) -> LogRecord:
    found = _attributes(span)
    prompt = _first(found, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
    output = _first(found, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
    if prompt is None and output is None:
        raise _Skip("spans without GenAI usage")
    if found.get("error.type") or _optional(span.get("status"), "status").get("code") == 2:
        raise _Skip("failed")
    tokens = _lengths(prompt, output)
    start = _count(span, "startTimeUnixNano")
    end = _count(span, "endTimeUnixNano")
    ttft = _first(
        found,
        "gen_ai.latency.time_to_first_token",
        "gen_ai.response.time_to_first_chunk",
        "gen_ai.server.time_to_first_token",
    )
    e2e = found.get("gen_ai.latency.e2e")
    shared = span["_resource"]
    server = _first(found, "server.address", "k8s.pod.name", "net.peer.name")
    server = server or _first(shared, "k8s.pod.name", "service.instance.id", "host.name") or ""
    port = found.get("server.port")
    return _order(
        LogRecord(
            arrival_ns=start,
            prompt_tokens=tokens[0],
            output_tokens=tokens[1],
            line=0,
            ttft_ns=-1 if ttft is None else _seconds(ttft, "time_to_first_token"),
            e2e_ns=end - start if e2e is None else _seconds(e2e, "gen_ai.latency.e2e"),
            max_output_tokens=_whole(found, "gen_ai.request.max_tokens", 0),
            cached_tokens=_whole(found, "gen_ai.usage.cache_read.input_tokens", -1),
            server=f"{server}:{port}" if port and server else str(server),
            decode_server=str(found.get("emu.decode_server", "")),
            request_id=str(_first(found, "gen_ai.request.id", "gen_ai.response.id") or ""),
            session=str(found.get("gen_ai.conversation.id", "")),
            tenant=str(_first(found, "enduser.id", "user.id") or ""),
            model=str(_first(found, "gen_ai.request.model", "gen_ai.response.model") or ""),
            priority=_whole(found, "gen_ai.request.priority", 0),
        )
    )


# --- LiteLLM --------------------------------------------------------------------------------------
def _litellm(row: Fields) -> LogRecord:
    _object(row, "$")
    if str(row.get("status", "success")).lower() not in ("success", "completed"):
        raise _Skip("failed")
    if str(row.get("cache_hit", "False")).lower() == "true":
        raise _Skip("answered from LiteLLM's own cache")
    tokens = _lengths(row.get("prompt_tokens"), row.get("completion_tokens"))
    start = _instant(row.get("startTime"), "startTime")
    end = _instant(row.get("endTime"), "endTime")
    first = row.get("completionStartTime")
    ttft = -1 if first in (None, "") else _instant(first, "completionStartTime") - start
    parameters = row.get("model_parameters")
    limit = parameters.get("max_tokens") if isinstance(parameters, dict) else None
    return _order(
        LogRecord(
            arrival_ns=start,
            prompt_tokens=tokens[0],
            output_tokens=tokens[1],
            line=0,
            # Without streaming LiteLLM writes the end as the start of the completion.
            ttft_ns=-1 if ttft >= end - start > 0 and tokens[1] > 1 else ttft,
            e2e_ns=end - start,
            max_output_tokens=limit if type(limit) is int else 0,
            server=str(row.get("api_base") or ""),
            request_id=str(_first(row, "request_id", "id") or ""),
            session=str(_first(row, "session_id", "trace_id") or ""),
            tenant=str(row.get("end_user") or ""),
            model=str(_first(row, "model_group", "model") or ""),
        )
    )


# --- a gateway's access log -----------------------------------------------------------------------
_PROMPT: Final = (
    *("llm_input_token", "input_tokens", "prompt_tokens"),
    "gen_ai.usage.input_tokens",
)
_OUTPUT: Final = (
    *("llm_output_token", "output_tokens", "completion_tokens"),
    "gen_ai.usage.output_tokens",
)
_TENANT: Final = ("x-user-id", "fairness_id", "x-gateway-inference-fairness-id")


def _gateway(row: Fields) -> LogRecord:
    _object(row, "$")
    status = _first(row, "response_code", "status")
    if status is not None and str(status) != "200":
        raise _Skip("failed")
    prompt = _first(
        row, "llm_input_token", "input_tokens", "prompt_tokens", "gen_ai.usage.input_tokens"
    )
    output = _first(row, *_OUTPUT)
    tokens = _lengths(prompt, output)
    first = _first(row, "time_to_first_token_ms", "response_duration")
    return _order(
        LogRecord(
            arrival_ns=_instant(_first(row, "start_time", "timestamp"), "start_time"),
            prompt_tokens=tokens[0],
            output_tokens=tokens[1],
            line=0,
            ttft_ns=-1 if first is None else _milliseconds(first, "response_duration"),
            e2e_ns=_milliseconds(row.get("duration"), "duration"),
            server=str(_first(row, "upstream_host", "x-gateway-destination-endpoint") or ""),
            request_id=str(_first(row, "x-request-id", "request_id") or ""),
            tenant=str(
                _first(row, "x-user-id", "fairness_id", "x-gateway-inference-fairness-id") or ""
            ),
            model=str(_first(row, "model", "x-model", "model_name") or ""),
        )
    )


# --- benchmarks -----------------------------------------------------------------------------------
def _aiperf(row: Fields) -> LogRecord:
    about = _object(_object(row, "$").get("metadata"), "metadata")
    figures = _optional(row.get("metrics"), "metrics")
    if about.get("benchmark_phase") not in (None, "profiling"):
        raise _Skip("of the warm-up")
    if row.get("error") or about.get("was_cancelled"):
        raise _Skip("failed")

    def figure(name: str) -> Any:
        value = figures.get(name)
        return value.get("value") if isinstance(value, dict) else value

    tokens = _lengths(figure("input_sequence_length"), figure("output_sequence_length"))
    start = _count(about, "request_start_ns")
    ttft, latency = figure("time_to_first_token"), figure("request_latency")
    end = _count(about, "request_end_ns") - start
    return _order(
        LogRecord(
            arrival_ns=start,
            prompt_tokens=tokens[0],
            output_tokens=tokens[1],
            line=0,
            ttft_ns=-1 if ttft is None else _milliseconds(ttft, "time_to_first_token"),
            e2e_ns=end if latency is None else _milliseconds(latency, "request_latency"),
            request_id=str(about.get("x_request_id") or ""),
            session=str(about.get("conversation_id") or ""),
        )
    )


def _inference_perf(row: Fields) -> LogRecord:
    about = _object(_object(row, "$").get("info"), "info")
    if row.get("error"):
        raise _Skip("failed")
    asked = _optional(about.get("request_metrics"), "request_metrics")
    text = _optional(asked.get("text"), "request_metrics.text")
    prompt = _first(text, "input_tokens") or about.get("input_tokens")
    answered = _optional(about.get("response_metrics"), "response_metrics") or about
    tokens = _lengths(prompt, answered.get("output_tokens"))
    start = _seconds(row.get("start_time"), "start_time")
    times = _list(answered.get("output_token_times"), "output_token_times")
    first = _seconds(times[0], "output_token_times") - start if times else -1
    last = _seconds(times[-1] if times else row.get("end_time"), "end_time") - start
    return _order(
        LogRecord(
            arrival_ns=start,
            prompt_tokens=tokens[0],
            output_tokens=tokens[1],
            line=0,
            ttft_ns=first,
            e2e_ns=last,
            tenant=str(about.get("lora_adapter") or ""),
        )
    )


def _guidellm_rows(entries: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Fields]]:
    """Requests of all benchmarks of a file."""
    place = 0
    for _, value in entries:
        whole = value.get("benchmarks") if isinstance(value, dict) else None
        for benchmark in _list(whole, "benchmarks"):
            of_one = _object(benchmark, "benchmarks")
            requests = _optional(of_one.get("requests"), "requests")
            for kind in ("successful", "errored", "incomplete"):
                for one in _list(requests.get(kind), kind):
                    place += 1
                    yield place, {**_object(one, kind), "_kind": kind}


def _guidellm(row: Fields) -> LogRecord:
    if row["_kind"] != "successful":
        raise _Skip("failed")
    times = _object(_object(row.get("info"), "info").get("timings"), "info.timings")
    asked = _optional(row.get("input_metrics"), "input_metrics")
    answered = _optional(row.get("output_metrics"), "output_metrics")
    tokens = _lengths(asked.get("text_tokens"), answered.get("text_tokens"))
    start = _seconds(times.get("request_start"), "request_start")
    first, last = (
        _seconds(times.get(name), name) - start
        for name in ("first_token_iteration", "last_token_iteration")
    )
    cached = asked.get("cached_tokens")
    return _order(
        LogRecord(
            arrival_ns=start,
            prompt_tokens=tokens[0],
            output_tokens=tokens[1],
            line=0,
            ttft_ns=first,
            e2e_ns=last,
            cached_tokens=cached if type(cached) is int else -1,
            request_id=str(row.get("request_id") or ""),
        )
    )


def _bench_rows(entries: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Fields]]:
    """Requests of results of `vllm bench serve`: parallel arrays become objects."""
    place = 0
    for _, result in entries:
        starts = result.get("start_times") if isinstance(result, dict) else None
        if not isinstance(starts, list):
            yield 1, {"start": None}
            return
        names = ("input_lens", "output_lens", "ttfts", "itls", "errors")
        columns = {name: _list(result.get(name), name) for name in names}
        for index, start in enumerate(starts):
            place += 1
            values = {
                name: column[index] if index < len(column) else None
                for name, column in columns.items()
            }
            yield place, {"start": start, **values}


def _bench(row: Fields) -> LogRecord:
    if row["start"] is None:
        raise _Wrong("start_times", "missing; vllm bench serve writes them with --save-detailed")
    if row.get("errors"):
        raise _Skip("failed")
    tokens = _lengths(row.get("input_lens"), row.get("output_lens"))
    ttft = _seconds(row.get("ttfts"), "ttfts")
    gaps = row.get("itls") or []
    if not isinstance(gaps, list):
        raise _Wrong("itls", "must be an array")
    return LogRecord(
        arrival_ns=_seconds(row["start"], "start_times"),
        prompt_tokens=tokens[0],
        output_tokens=tokens[1],
        line=0,
        ttft_ns=ttft,
        e2e_ns=ttft + sum(_seconds(gap, "itls") for gap in gaps),
    )


_Rows = Callable[[Sequence[tuple[int, Any]]], Iterator[tuple[int, Fields]]]
_READERS: Final[dict[str, tuple[_Rows, Callable[[Fields], LogRecord]]]] = {
    "otel": (_spans, _otel),
    "litellm": (_flat, _litellm),
    "gateway": (_flat, _gateway),
    "aiperf": (_flat, _aiperf),
    "inference-perf": (_flat, _inference_perf),
    "guidellm": (_guidellm_rows, _guidellm),
    "vllm-bench": (_bench_rows, _bench),
}


# --------------------------------------------------------------------------------------------------
# A log of a real server as a source of requests: arrivals, lengths, limits, tenants, priorities.
#
# Latencies of the log are not used here: `emu whatif` and `emu compare --measured` read them.


class LogSource:
    """The requests of a log, in order of arrival."""

    is_absolute = True
    has_arrivals = True
    prompt_field = "prompt tokens"

    def __init__(self, file: TextFile, format: str) -> None:
        self._file = file
        self.name = format
        self._log: Log | None = None

    @property
    def is_small(self) -> bool:
        """One block may be kept between the passes."""
        return self._file.size_bytes <= CHUNK_BYTES

    def blocks(self, notes: Notes) -> Iterator[Block]:
        """All requests; what is left out is counted."""
        if self._log is None:
            self._log = read_log(self._file.path, self._file.source, self.name)
        for reason, count in self._log.skipped.items():
            notes.skip(f"requests {reason}", count)
        yield block_of(self._log.records)

    def rows_at(self, offsets: Any) -> Iterator[Block]:
        """Never asked for: they are in order of arrival."""
        raise AssertionError("requests of a log are in order of arrival")


def line_of(record: LogRecord) -> Line:
    """A request as a line of emu's own format, without a place to be served."""
    return Line(
        arrival_time_ns=record.arrival_ns,
        input_toks=record.prompt_tokens,
        output_toks=record.output_tokens,
        max_output_toks=max(record.max_output_tokens, record.output_tokens)
        if record.max_output_tokens
        else 0,
        tenant=record.tenant,
        priority=record.priority,
    )


def block_of(records: list[LogRecord]) -> Block:
    """Requests as columns."""
    count = len(records)

    def column(values: Iterator[int]) -> Any:
        return np.fromiter(values, np.int64, count)

    is_plain = not any(r.tenant or r.priority or r.max_output_tokens for r in records)
    return Block(
        column(record.arrival_ns for record in records),
        column(record.prompt_tokens for record in records),
        column(record.output_tokens for record in records),
        column(record.line for record in records),
        np.arange(count, dtype=np.int64),
        None if is_plain else [line_of(record) for record in records],
    )
