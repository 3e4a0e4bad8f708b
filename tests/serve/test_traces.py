"""Traces at a receiver that reads them with OpenTelemetry's own messages."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from emu.apps.serve.options import ServeOptions
from emu.apps.serve.server import LiveServer
from emu.apps.serve.traces.context import Ids, read_context
from emu.config.load import config_from_dict
from emu.errors import InputError
from tests.serve.live import PREFILL_DECODE, Live, run, tables
from tests.serve.test_fleet import DECODE_FIRST, PROMPT, complete, endpoints

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


class Received:
    """Spans, with the service that each is of."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    def take(self, data: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(data)
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            service = " ".join(names.values())
            for scope in resource.scope_spans:
                self.spans += [(service, span) for span in scope.spans]

    def tree(self, trace: str = TRACE) -> list[tuple[str, str, str]]:
        """(service, name, name of the parent) of a trace's spans, in order of their begin."""
        spans = [(s, x) for s, x in self.spans if x.trace_id.hex() == trace]
        names = {span.span_id: span.name for _, span in spans}
        spans.sort(key=lambda pair: (pair[1].start_time_unix_nano, -pair[1].end_time_unix_nano))
        return [(s, x.name, names.get(x.parent_span_id, x.parent_span_id.hex())) for s, x in spans]


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, Received]]:
    """A receiver of OTLP over HTTP, and its address."""
    received = Received()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        found[one.key] = getattr(one.value, kind)
    return found


def test_a_request_of_two_engines_and_its_fault_are_one_tree(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        body = {"prompt": PROMPT, "max_tokens": 300, "stream": True}

        async def ask() -> None:
            await live.client.post("/v1/completions", json=body, headers=HEADERS)

        task = asyncio.create_task(ask())
        await live.until(lambda: any(c.produced > 20 for c in live.cluster._choices.values()))
        fault = {"kind": "replica_crash", "replica": 1, "duration_s": 0.2}
        assert (await live.client.post("/emu/faults", json=fault)).status_code == 200
        await task

    with collector() as (url, received):
        run(tmp_path, tables(replicas=PREFILL_DECODE), check, otlp=url)
    tree = received.tree()
    assert tree[0] == ("emu-gateway", "text_completion meta-llama/Llama-3.1-8B", PARENT)
    root = next(s for _, s in received.spans if s.name.startswith("text_completion"))
    found = attributes(root)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert found["gen_ai.request.stream"] is True
    assert root.kind == Span.SPAN_KIND_SERVER
    assert root.trace_state == "vendor=1"
    assert "replica_crash" in [event.name for event in root.events]
    names = {(service, name) for service, name, _ in tree}
    assert {("vllm replica-0", "llm_request"), ("emu-gateway", "kv_transfer")} <= names
    engines = [s for _, s in received.spans if s.name == "llm_request"]
    assert len(engines) == 4  # prefill and decode, and both again
    assert [name for _, name, _ in tree].count("kv_transfer") == 2
    lost = [s for _, s in received.spans if s.status.code == Status.STATUS_CODE_ERROR]
    assert "replica_lost" in [attributes(span)["error.type"] for span in lost]
    for _, span in received.spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano


def test_ports_of_a_fleet_continue_the_router_s_trace(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (first, second):
            for client in (first, second):
                client.headers.update(HEADERS)
            head = await complete(first, max_tokens=1, kv_transfer_params=DECODE_FIRST)
            params = head.json()["kv_transfer_params"]
            await complete(second, max_tokens=6, kv_transfer_params=params)
            first.headers["traceparent"] = HEADERS["traceparent"][:-1] + "0"
            await complete(first, max_tokens=1, kv_transfer_params=DECODE_FIRST)

    with collector() as (url, received):
        run(tmp_path, tables(replicas=PREFILL_DECODE), check, otlp=url, fleet=True)
    assert sorted(received.tree()) == sorted(
        [
            ("vllm replica-0", "llm_request", PARENT),
            ("vllm replica-0", "prefill", "llm_request"),
            ("vllm replica-1", "llm_request", PARENT),
            ("vllm replica-1", "kv_transfer", "llm_request"),
            ("vllm replica-1", "queue", "llm_request"),
            ("vllm replica-1", "prefill", "llm_request"),
            ("vllm replica-1", "decode", "llm_request"),
        ]
    )
    engine = [s for _, s in received.spans if s.name == "llm_request"][-1]
    found = attributes(engine)
    assert found["gen_ai.usage.completion_tokens"] == 6
    assert found["gen_ai.response.finish_reasons"].values[0].string_value == "length"
    whole_s = (engine.end_time_unix_nano - engine.start_time_unix_nano) / 1e9
    assert found["gen_ai.latency.e2e"] == pytest.approx(whole_s, abs=1e-6)


@pytest.mark.parametrize(
    ("header", "is_kept", "is_sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True, True),
        (f"00-{TRACE}-{PARENT}-00", True, False),
        (f"cc-{TRACE}-{PARENT}-01-more", True, True),
        (f"00-{TRACE}-{PARENT}-01-more", False, True),
        (f"ff-{TRACE}-{PARENT}-01", False, True),
        (f"00-{'0' * 32}-{PARENT}-01", False, True),
        ("nonsense", False, True),
        ("", False, True),
    ],
)
def test_a_parent_that_is_not_valid_begins_a_trace(
    header: str, is_kept: bool, is_sampled: bool
) -> None:
    context = read_context({"traceparent": header}, Ids("s"))
    assert (context.trace_id.hex() == TRACE) is is_kept
    assert context.is_sampled is is_sampled
    assert len(context.trace_id) == 16


def test_a_collector_that_is_no_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--otlp"):
        LiveServer(config_from_dict(tables()), "test", ServeOptions(otlp="4318"), tmp_path)
