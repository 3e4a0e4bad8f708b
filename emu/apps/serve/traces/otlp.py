"""Spans to a collector: OTLP over HTTP, protobuf, in batches (extra `traces`).

What cannot be sent is dropped and counted; nothing waits for a collector.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections import deque
from typing import Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from emu.apps.serve.traces.spans import GATEWAY, Span, Value

QUEUE_MAX: Final = 16_384
"""Spans that wait; beyond, new ones are dropped."""
_BATCH: Final = 2048
_PAUSE_S: Final = 0.5
_TIMEOUT_S: Final = 5.0


class Exporter:
    """Sends spans to one collector."""

    def __init__(self, url: str, engine: str) -> None:
        """`url`: of the collector, with or without `/v1/traces`. `engine`: vllm or sglang."""
        base = url.rstrip("/")
        self._url = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
        self._engine = engine
        self._waiting: deque[tuple[Span, int]] = deque()
        self.sent = 0
        self.dropped = 0

    def take(self, spans: list[Span], anchor_ns: int) -> None:
        """Spans, and the Unix time in ns that their emulated time 0 has."""
        for span in spans:
            if len(self._waiting) >= QUEUE_MAX:
                self.dropped += 1
            else:
                self._waiting.append((span, anchor_ns))

    async def run(self) -> None:
        """Send what is there, again and again."""
        while True:
            await asyncio.sleep(_PAUSE_S)
            await self.flush()

    async def flush(self) -> None:
        """Send all that waits."""
        while self._waiting:
            count = min(_BATCH, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(count)]
            data = encode(batch, self._engine)
            if await asyncio.to_thread(self._post, data):
                self.sent += count
            else:
                self.dropped += count

    def _post(self, data: bytes) -> bool:
        headers = {"content-type": "application/x-protobuf"}
        request = urllib.request.Request(self._url, data, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return bool(answer.status < 300)
        except (urllib.error.URLError, OSError, ValueError):
            return False


def encode(batch: list[tuple[Span, int]], engine: str) -> bytes:
    """Spans as a request of the protocol, by the service that each is of."""
    request = ExportTraceServiceRequest()
    scopes: dict[int, trace_pb2.ScopeSpans] = {}
    for span, anchor_ns in batch:
        scope = scopes.get(span.replica)
        if scope is None:
            resource = request.resource_spans.add()
            is_gateway = span.replica == GATEWAY
            service = {"service.name": "emu-gateway" if is_gateway else engine}
            if not is_gateway:
                service["service.instance.id"] = f"replica-{span.replica}"
            resource.resource.attributes.extend(_attributes(dict(service)))
            scope = scopes[span.replica] = resource.scope_spans.add()
            scope.scope.name = "emu.serve"
        _fill(scope.spans.add(), span, anchor_ns)
    return request.SerializeToString()


def _fill(found: trace_pb2.Span, span: Span, anchor_ns: int) -> None:
    found.trace_id, found.span_id = span.trace.trace_id, span.span_id
    found.parent_span_id, found.trace_state = span.parent_id, span.trace.state
    found.name = span.name
    kinds = trace_pb2.Span
    found.kind = kinds.SPAN_KIND_SERVER if span.is_server else kinds.SPAN_KIND_INTERNAL
    found.start_time_unix_nano = anchor_ns + span.begin_ns
    found.end_time_unix_nano = anchor_ns + span.end_ns
    found.attributes.extend(_attributes(span.attributes))
    for mark in span.marks:
        event = found.events.add()
        event.time_unix_nano, event.name = anchor_ns + mark.at_ns, mark.name
        event.attributes.extend(_attributes(mark.attributes))
    if span.problem:
        found.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        found.status.message = span.problem
        found.attributes.extend(_attributes({"error.type": span.problem}))


def _attributes(given: dict[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in given.items()]


def _value(value: Value) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    return AnyValue(array_value=ArrayValue(values=[_value(one) for one in value]))
