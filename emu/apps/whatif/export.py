"""`emu export`: a run of emu as a log that a real system would have left.

Completed requests only, as spans and spend logs have them. Times are Unix times from the start of
the run, exact to the ns in `otel` and `aiperf`, to the us elsewhere, as those systems write them.
Replicas are called replica-0, replica-1, ...
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from emu.api import Rows, load
from emu.apps.whatif.options import ExportFormat, ExportOptions
from emu.documents import Document
from emu.errors import InputError
from emu.report.atomic import write_text
from emu.units import NS_PER_S

_MS: Final = 1e6


def export_command(options: ExportOptions) -> int:
    """Write the log, say how long it is."""
    count = export_run(options.run, options.output, options.to)
    if not options.quiet:
        print(f"{options.output}: {count:,} requests")
    return 0


def export_run(directory: Path, output: Path, format: ExportFormat) -> int:
    """Write the log of a run that has ended; how many requests it has. Raises InputError."""
    result = load(directory)
    rows = result.requests
    done = rows[rows["status"] == "completed"]
    if not len(done):
        raise InputError(str(directory), None, "requests.csv", "has no completed request")
    start_ns = _start_ns(directory)
    write_text(output, _WRITERS[format](done, start_ns))
    return len(done)


def _start_ns(directory: Path) -> int:
    """When the run began, Unix ns; 0 if it does not tell."""
    try:
        content = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        return round(float(content["started_at_unix_s"]) * 1000) * 1_000_000
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _facts(rows: Rows, start_ns: int) -> Iterator[Document]:
    """What all formats tell of a request."""
    for row in rows:
        yield {
            "id": int(row["request_id"]),
            "start": start_ns + int(row["arrival_ns"]),
            "ttft": int(row["ttft_ns"]),
            "latency": int(row["latency_ns"]),
            "prompt": int(row["prompt_toks"]),
            "output": int(row["output_toks"]),
            "cached": int(row["prefix_hit_len"]),
            "server": f"replica-{int(row['instance_id'])}",
            "decode": f"replica-{int(row['decode_instance_id'])}",
            "tenant": str(row["tenant"]),
            "session": str(row["session_id"]),
            "priority": int(row["priority"]),
        }


def _otel(rows: Rows, start_ns: int) -> str:
    spans = []
    for one in _facts(rows, start_ns):
        words = {
            "gen_ai.request.id": f"emu-{one['id']}",
            "server.address": one["server"],
            "emu.decode_server": one["decode"],
            "enduser.id": one["tenant"],
            "gen_ai.conversation.id": one["session"],
        }
        counts = {
            "gen_ai.usage.prompt_tokens": one["prompt"],
            "gen_ai.usage.completion_tokens": one["output"],
            "gen_ai.usage.cache_read.input_tokens": one["cached"],
            "gen_ai.request.priority": one["priority"],
        }
        figures = {
            "gen_ai.latency.time_to_first_token": one["ttft"] / NS_PER_S,
            "gen_ai.latency.e2e": one["latency"] / NS_PER_S,
        }
        attributes = [
            *({"key": k, "value": {"stringValue": v}} for k, v in words.items() if v),
            *({"key": k, "value": {"intValue": str(v)}} for k, v in counts.items()),
            *({"key": k, "value": {"doubleValue": v}} for k, v in figures.items()),
        ]
        spans.append(
            {
                "traceId": f"{one['id'] + 1:032x}",
                "spanId": f"{one['id'] + 1:016x}",
                "name": "llm_request",
                "kind": 2,
                "startTimeUnixNano": str(one["start"]),
                "endTimeUnixNano": str(one["start"] + one["latency"]),
                "attributes": attributes,
            }
        )
    scope = {"scope": {"name": "emu"}, "spans": spans}
    return json.dumps({"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [scope]}]})


def _litellm(rows: Rows, start_ns: int) -> str:
    lines = []
    for one in _facts(rows, start_ns):
        begin = one["start"]
        lines.append(
            {
                "request_id": f"emu-{one['id']}",
                "call_type": "acompletion",
                "api_base": f"http://{one['server']}:8000/v1",
                "prompt_tokens": one["prompt"],
                "completion_tokens": one["output"],
                "total_tokens": one["prompt"] + one["output"],
                "startTime": _date(begin),
                "completionStartTime": _date(begin + one["ttft"]),
                "endTime": _date(begin + one["latency"]),
                "cache_hit": "False",
                "end_user": one["tenant"],
                "session_id": one["session"],
                "status": "success",
            }
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def _gateway(rows: Rows, start_ns: int) -> str:
    lines = [
        {
            "start_time": _date(one["start"]),
            "method": "POST",
            "path": "/v1/completions",
            "response_code": 200,
            "response_duration": one["ttft"] / _MS,
            "duration": one["latency"] / _MS,
            "upstream_host": f"{one['server']}:8000",
            "x-request-id": f"emu-{one['id']}",
            "llm_input_token": one["prompt"],
            "llm_output_token": one["output"],
        }
        for one in _facts(rows, start_ns)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _aiperf(rows: Rows, start_ns: int) -> str:
    lines = []
    for one in _facts(rows, start_ns):
        figures = {
            "input_sequence_length": (one["prompt"], "tokens"),
            "output_sequence_length": (one["output"], "tokens"),
            "time_to_first_token": (one["ttft"] / _MS, "ms"),
            "request_latency": (one["latency"] / _MS, "ms"),
        }
        lines.append(
            {
                "metadata": {
                    "x_request_id": f"emu-{one['id']}",
                    "conversation_id": one["session"],
                    "turn_index": 0,
                    "request_start_ns": one["start"],
                    "request_end_ns": one["start"] + one["latency"],
                    "benchmark_phase": "profiling",
                    "was_cancelled": False,
                },
                "metrics": {k: {"value": v, "unit": unit} for k, (v, unit) in figures.items()},
            }
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def _date(at_ns: int) -> str:
    """Unix ns as a date in UTC, to the us."""
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    at = epoch + datetime.timedelta(microseconds=round(at_ns / 1000))
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


_WRITERS: Final[dict[str, Callable[[Rows, int], str]]] = {
    "otel": _otel,
    "litellm": _litellm,
    "gateway": _gateway,
    "aiperf": _aiperf,
}
