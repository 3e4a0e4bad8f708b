"""The logs that are read: how each is recognized, where its requests are, which field is what.

A `LogFormat` is a map of columns with hooks for what differs: where the rows are (`rows`), which of
them can be used and what fields they then have (`usable`), and how their times are told (`times`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from emu.workload.logs.log_record import LogRecord
from emu.workload.logs.log_values import (
    LEAST,
    Fields,
    Skip,
    Wrong,
    as_list,
    as_object,
    as_optional,
    count_of,
    first_of,
    instant,
    lengths,
    milliseconds,
    seconds,
    text_of,
)

Entries = Sequence[tuple[int, object]]
"""(line of the file, JSON value)."""
Rows = Iterator[tuple[int, object]]
"""(place, JSON value) of each request."""
Names = tuple[str, ...]


class Times(NamedTuple):
    """When a request came, and how long it took, in ns; -1 where the log does not tell."""

    arrival_ns: int
    ttft_ns: int = -1
    e2e_ns: int = -1


class LogFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One program's log."""

    name: str
    mark: bytes
    """A regular expression that its text matches, and that of no other log before it."""
    rows: Callable[[Entries], Rows]
    usable: Callable[[Fields], Fields]
    """The fields of a row's request; raises `Skip` for one that failed."""
    prompt: Names
    """Fields with the tokens of the prompt; the first that is there counts."""
    output: Names
    times: Callable[[Fields, int], Times]
    """Of the fields and the output's tokens."""
    texts: Mapping[str, Names] = {}
    """Text fields of a `LogRecord`, and the fields that they come from."""
    numbers: Mapping[str, str] = {}
    """The same of whole numbers, which may be absent."""

    def record(self, row: object) -> LogRecord:
        """The request of a row. Raises `Skip` or `Wrong`."""
        fields = self.usable(as_object(row, "$"))
        prompt, output = (
            fields.get(names[0]) if len(names) == 1 else first_of(fields, *names)
            for names in (self.prompt, self.output)
        )
        tokens = lengths(prompt, output)
        times = self.times(fields, tokens.output_tokens)
        record = LogRecord(
            arrival_ns=times.arrival_ns,
            prompt_tokens=tokens.prompt_tokens,
            output_tokens=tokens.output_tokens,
            line=0,
            ttft_ns=times.ttft_ns,
            e2e_ns=times.e2e_ns,
        )
        if times.e2e_ns >= 0:  # clocks of a proxy may be off by a little
            record.ttft_ns = min(times.ttft_ns, times.e2e_ns)
        for name, names in self.texts.items():
            setattr(record, name, text_of(fields, names))
        for name, field in self.numbers.items():
            if fields.get(field) is not None:
                setattr(record, name, count_of(fields, field, least=LEAST))
        return record


def format_of(head: bytes) -> LogFormat | None:
    """The log format of a text that begins so; None if it is none."""
    text = head.lstrip()[:65_536]
    return next((one for one in LOG_FORMATS if re.search(one.mark, text)), None)


def _objects(entries: Entries, *keys: str) -> Rows:
    """The objects of all lines; of an array its items, of an object what lies below these keys."""
    for line, value in entries:
        if isinstance(value, list):
            yield from ((place, item) for place, item in enumerate(value, start=1))
        elif isinstance(value, dict) and keys and keys[0] in value:
            yield from _objects([(line, value[keys[0]])], *keys[1:])
        else:
            yield line, value


def _flat(entries: Entries) -> Rows:
    return _objects(entries, "data")


def _whole(figure: object) -> int | None:
    """A number of a field that may hold anything."""
    return figure if type(figure) is int else None


def _spans(entries: Entries) -> Rows:
    """Every span of OTLP/JSON, with the attributes of its resource."""
    for line, value in entries:
        place = 0
        groups = value.get("resourceSpans") if isinstance(value, dict) else None
        for resource in as_list(groups, "resourceSpans"):
            of_resource = as_object(resource, "resourceSpans")
            shared = _attributes(as_optional(of_resource.get("resource"), "resource"))
            older = of_resource.get("instrumentationLibrarySpans")
            for scope in as_list(of_resource.get("scopeSpans", older), "scopeSpans"):
                for span in as_list(as_object(scope, "scopeSpans").get("spans"), "spans"):
                    place += 1
                    fields = {**as_object(span, "spans"), "_resource": shared}
                    yield (line if len(entries) > 1 else place), fields


def _attributes(holder: Fields) -> dict[str, object]:
    found: dict[str, object] = {}
    for one in as_list(holder.get("attributes"), "attributes"):
        attribute = as_object(one, "attributes")
        key = str(attribute.get("key", ""))
        for name, inner in as_optional(attribute.get("value"), key).items():
            found[key] = count_of({key: inner}, key, least=LEAST) if name == "intValue" else inner
    return found


_OTEL_PROMPT: Final = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OTEL_OUTPUT: Final = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")


def _otel(span: Fields) -> Fields:
    found = _attributes(span)
    if first_of(found, *_OTEL_PROMPT) is None and first_of(found, *_OTEL_OUTPUT) is None:
        raise Skip("spans without GenAI usage")
    if found.get("error.type") or as_optional(span.get("status"), "status").get("code") == 2:
        raise Skip("failed")
    shared = as_object(span["_resource"], "resource")
    server = text_of(found, ("server.address", "k8s.pod.name", "net.peer.name"))
    server = server or text_of(shared, ("k8s.pod.name", "service.instance.id", "host.name"))
    port = found.get("server.port")
    found["_server"] = f"{server}:{port}" if port and server else server
    times = ("startTimeUnixNano", "endTimeUnixNano")
    return found | {name: span.get(name) for name in times}


def _otel_times(found: Fields, output_tokens: int) -> Times:
    start = count_of(found, "startTimeUnixNano")
    end = count_of(found, "endTimeUnixNano")
    ttft = first_of(
        found,
        "gen_ai.latency.time_to_first_token",
        "gen_ai.response.time_to_first_chunk",
        "gen_ai.server.time_to_first_token",
    )
    e2e = found.get("gen_ai.latency.e2e")
    return Times(
        start,
        -1 if ttft is None else seconds(ttft, "time_to_first_token"),
        end - start if e2e is None else seconds(e2e, "gen_ai.latency.e2e"),
    )


def _litellm(row: Fields) -> Fields:
    """A spend log or a logging payload."""
    if str(row.get("status", "success")).lower() not in ("success", "completed"):
        raise Skip("failed")
    if str(row.get("cache_hit", "False")).lower() == "true":
        raise Skip("answered from LiteLLM's own cache")
    parameters = row.get("model_parameters")
    limit = parameters.get("max_tokens") if isinstance(parameters, dict) else None
    return {**row, "_limit": _whole(limit)}


def _litellm_times(row: Fields, output_tokens: int) -> Times:
    start = instant(row.get("startTime"), "startTime")
    took_ns = instant(row.get("endTime"), "endTime") - start
    first = row.get("completionStartTime")
    ttft = -1 if first in (None, "") else instant(first, "completionStartTime") - start
    # Without streaming LiteLLM writes the end as the start of the completion.
    is_whole = ttft >= took_ns > 0 and output_tokens > 1
    return Times(start, -1 if is_whole else ttft, took_ns)


def _gateway(row: Fields) -> Fields:
    """An access log of Envoy, as in llm-d."""
    status = first_of(row, "response_code", "status")
    if status is not None and str(status) != "200":
        raise Skip("failed")
    return row


def _gateway_times(row: Fields, output_tokens: int) -> Times:
    first = first_of(row, "time_to_first_token_ms", "response_duration")
    return Times(
        instant(first_of(row, "start_time", "timestamp"), "start_time"),
        -1 if first is None else milliseconds(first, "response_duration"),
        milliseconds(row.get("duration"), "duration"),
    )


def _aiperf(row: Fields) -> Fields:
    about = as_object(row.get("metadata"), "metadata")
    if about.get("benchmark_phase") not in (None, "profiling"):
        raise Skip("of the warm-up")
    if row.get("error") or about.get("was_cancelled"):
        raise Skip("failed")
    figures = as_optional(row.get("metrics"), "metrics")
    values = {
        name: value.get("value") if isinstance(value, dict) else value
        for name, value in figures.items()
    }
    return values | about


def _aiperf_times(found: Fields, output_tokens: int) -> Times:
    start = count_of(found, "request_start_ns")
    end = count_of(found, "request_end_ns")
    ttft, latency = found.get("time_to_first_token"), found.get("request_latency")
    return Times(
        start,
        -1 if ttft is None else milliseconds(ttft, "time_to_first_token"),
        end - start if latency is None else milliseconds(latency, "request_latency"),
    )


def _inference_perf(row: Fields) -> Fields:
    about = as_object(row.get("info"), "info")
    if row.get("error"):
        raise Skip("failed")
    asked = as_optional(about.get("request_metrics"), "request_metrics")
    text = as_optional(asked.get("text"), "request_metrics.text")
    answered = as_optional(about.get("response_metrics"), "response_metrics") or about
    return {
        "_prompt": first_of(text, "input_tokens") or about.get("input_tokens"),
        "_output": answered.get("output_tokens"),
        "_token_times": answered.get("output_token_times"),
        "start_time": row.get("start_time"),
        "end_time": row.get("end_time"),
        "lora_adapter": about.get("lora_adapter"),
    }


def _inference_perf_times(found: Fields, output_tokens: int) -> Times:
    start = seconds(found["start_time"], "start_time")
    times = as_list(found["_token_times"], "output_token_times")
    first = seconds(times[0], "output_token_times") - start if times else -1
    last = seconds(times[-1] if times else found["end_time"], "end_time") - start
    return Times(start, first, last)


def _guidellm_rows(entries: Entries) -> Rows:
    """Requests of all benchmarks of a file."""
    place = 0
    for _, value in entries:
        whole = value.get("benchmarks") if isinstance(value, dict) else None
        for benchmark in as_list(whole, "benchmarks"):
            of_one = as_object(benchmark, "benchmarks")
            requests = as_optional(of_one.get("requests"), "requests")
            for kind in ("successful", "errored", "incomplete"):
                for one in as_list(requests.get(kind), kind):
                    place += 1
                    yield place, {**as_object(one, kind), "_kind": kind}


def _guidellm(row: Fields) -> Fields:
    if row["_kind"] != "successful":
        raise Skip("failed")
    times = as_object(as_object(row.get("info"), "info").get("timings"), "info.timings")
    asked = as_optional(row.get("input_metrics"), "input_metrics")
    answered = as_optional(row.get("output_metrics"), "output_metrics")
    return times | {
        "_prompt": asked.get("text_tokens"),
        "_output": answered.get("text_tokens"),
        "_cached": _whole(asked.get("cached_tokens")),
        "request_id": row.get("request_id"),
    }


def _guidellm_times(found: Fields, output_tokens: int) -> Times:
    start = seconds(found.get("request_start"), "request_start")
    first, last = (
        seconds(found.get(name), name) - start
        for name in ("first_token_iteration", "last_token_iteration")
    )
    return Times(start, first, last)


def _bench_rows(entries: Entries) -> Rows:
    """Requests of results of `vllm bench serve`: parallel arrays become objects."""
    place = 0
    for _, result in entries:
        starts = result.get("start_times") if isinstance(result, dict) else None
        if not isinstance(result, dict) or not isinstance(starts, list):
            yield 1, {"start": None}
            return
        names = ("input_lens", "output_lens", "ttfts", "itls", "errors")
        columns = {name: as_list(result.get(name), name) for name in names}
        for index, start in enumerate(starts):
            place += 1
            values = {
                name: column[index] if index < len(column) else None
                for name, column in columns.items()
            }
            yield place, {"start": start, **values}


def _bench(row: Fields) -> Fields:
    if row["start"] is None:
        raise Wrong("start_times", "missing; vllm bench serve writes them with --save-detailed")
    if row.get("errors"):
        raise Skip("failed")
    return row


def _bench_times(row: Fields, output_tokens: int) -> Times:
    ttft = seconds(row.get("ttfts"), "ttfts")
    gaps = row.get("itls") or []
    if not isinstance(gaps, list):
        raise Wrong("itls", "must be an array")
    e2e = ttft + sum(seconds(gap, "itls") for gap in gaps)
    return Times(seconds(row["start"], "start_times"), ttft, e2e)


LOG_FORMATS: Final = (
    LogFormat(
        name="otel",
        mark=rb'"resourceSpans"',
        rows=_spans,
        usable=_otel,
        prompt=_OTEL_PROMPT,
        output=_OTEL_OUTPUT,
        times=_otel_times,
        texts={
            "server": ("_server",),
            "decode_server": ("emu.decode_server",),
            "request_id": ("gen_ai.request.id", "gen_ai.response.id"),
            "session": ("gen_ai.conversation.id",),
            "tenant": ("enduser.id", "user.id"),
            "model": ("gen_ai.request.model", "gen_ai.response.model"),
        },
        numbers={
            "max_output_tokens": "gen_ai.request.max_tokens",
            "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
            "priority": "gen_ai.request.priority",
        },
    ),
    LogFormat(
        name="aiperf",
        mark=rb'"request_start_ns"|"benchmark_phase"',
        rows=_flat,
        usable=_aiperf,
        prompt=("input_sequence_length",),
        output=("output_sequence_length",),
        times=_aiperf_times,
        texts={"request_id": ("x_request_id",), "session": ("conversation_id",)},
    ),
    LogFormat(
        name="inference-perf",
        mark=rb'"output_token_times"|"response_metrics"',
        rows=_flat,
        usable=_inference_perf,
        prompt=("_prompt",),
        output=("_output",),
        times=_inference_perf_times,
        texts={"tenant": ("lora_adapter",)},
    ),
    LogFormat(
        name="guidellm",
        mark=rb'"guidellm_version"|"first_token_iteration"',
        rows=_guidellm_rows,
        usable=_guidellm,
        prompt=("_prompt",),
        output=("_output",),
        times=_guidellm_times,
        texts={"request_id": ("request_id",)},
        numbers={"cached_tokens": "_cached"},
    ),
    LogFormat(
        name="vllm-bench",
        mark=rb'"ttfts"\s*:|"start_times"\s*:',
        rows=_bench_rows,
        usable=_bench,
        prompt=("input_lens",),
        output=("output_lens",),
        times=_bench_times,
    ),
    LogFormat(
        name="litellm",
        mark=rb'"completionStartTime"|"startTime"\s*:[^}]*"endTime"',
        rows=_flat,
        usable=_litellm,
        prompt=("prompt_tokens",),
        output=("completion_tokens",),
        times=_litellm_times,
        texts={
            "server": ("api_base",),
            "request_id": ("request_id", "id"),
            "session": ("session_id", "trace_id"),
            "tenant": ("end_user",),
            "model": ("model_group", "model"),
        },
        numbers={"max_output_tokens": "_limit"},
    ),
    LogFormat(
        name="gateway",
        mark=rb'"upstream_host"|"x-envoy-upstream-service-time"|"response_code"',
        rows=_flat,
        usable=_gateway,
        prompt=(
            *("llm_input_token", "input_tokens", "prompt_tokens"),
            "gen_ai.usage.input_tokens",
        ),
        output=(
            *("llm_output_token", "output_tokens", "completion_tokens"),
            "gen_ai.usage.output_tokens",
        ),
        times=_gateway_times,
        texts={
            "server": ("upstream_host", "x-gateway-destination-endpoint"),
            "request_id": ("x-request-id", "request_id"),
            "tenant": ("x-user-id", "fairness_id", "x-gateway-inference-fairness-id"),
            "model": ("model", "x-model", "model_name"),
        },
    ),
)
"""In the order in which they are tried."""
