"""From what happened to a request to the spans of its trace. Pure; times are emulated ns.

    chat MODEL                  the gateway: the call as its client sees it
      llm_request               each engine that had it, also one that died with it
        queue, prefill, decode
      kv_transfer               from the prefill engine to the decode engine

On a port of a fleet the engine's `llm_request` is the top. Names of attributes are those of the
semantic conventions for generative AI (1.41) and of vLLM's own spans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from emu.apps.serve.traces.context import Ids, TraceContext
from emu.request import Request, Status
from emu.units import NS_PER_S

Value = str | int | float | bool | list[str]
GATEWAY: Final = -1


class Mark(Struct, frozen=True):
    """Something that happened at an instant of a span."""

    at_ns: int
    name: str
    attributes: dict[str, Value] = {}


class Span(Struct, kw_only=True):
    """A span; `replica` says whose it is, GATEWAY is the gateway's."""

    name: str
    trace: TraceContext
    span_id: bytes
    parent_id: bytes
    begin_ns: int
    end_ns: int
    replica: int = GATEWAY
    is_server: bool = False
    attributes: dict[str, Value] = {}
    marks: tuple[Mark, ...] = ()
    problem: str = ""
    """Why it failed; empty = it did not."""


class Transfer(Struct, frozen=True, kw_only=True):
    """KV that went from one engine to another."""

    source: int
    destination: int
    begin_ns: int
    end_ns: int
    kv_bytes: int


class Leg(Struct, frozen=True, kw_only=True):
    """One attempt to serve a request, from its begin to its end or loss; -1 = it came not so far.

    `replica` began it; `holder` had it in the end.
    """

    replica: int
    holder: int
    begin_ns: int
    queued_ns: int
    scheduled_ns: int
    first_ns: int
    last_ns: int
    tokens: int
    problem: str = ""


class CallFacts(Struct, frozen=True, kw_only=True):
    """What a call says of itself."""

    operation: str
    """chat, text_completion or embeddings."""
    model: str
    max_tokens: int | None
    is_streamed: bool
    answer_id: str
    session_id: str


class Journey(Struct, kw_only=True):
    """What happened to a request so far."""

    transfers: list[Transfer] = []
    legs: list[Leg] = []
    """Those that were lost."""
    marks: list[Mark] = []


class Half(Struct, frozen=True, kw_only=True):
    """When one engine of a pair of ports had the request, ns; -1 = it did not come so far."""

    replica: int
    came_ns: int
    scheduled_ns: int
    first_ns: int
    last_ns: int
    tokens: int
    problem: str = ""


def spans_of_call(
    trace: TraceContext,
    facts: CallFacts,
    request: Request,
    journey: Journey,
    finish: str,
    now_ns: int,
    ids: Ids,
) -> list[Span]:
    """Spans of a request that came to the gateway and has ended, now."""
    is_whole = request.status is Status.COMPLETED
    problem = "" if is_whole else request.reason or request.status.name.lower()
    last_ns = request.last_token_ns + request.last_out_ns if is_whole else now_ns
    part = Part(f"{facts.operation} {facts.model}", request.arrival_ns, last_ns)
    root = _server(trace, part, ids)
    root.attributes = _call_attributes(facts, request, finish)
    root.marks, root.problem = tuple(journey.marks), problem
    spans = [root]
    spans += [_transfer(root, move, ids) for move in journey.transfers]
    begun_ns = max([request.arrival_ns, *(leg.last_ns for leg in journey.legs)])
    for leg in (*journey.legs, leg_of(request, begun_ns, last_ns, problem)):
        spans += _leg(root, leg, request, journey, ids)
    return spans


def leg_of(request: Request, begin_ns: int, end_ns: int, problem: str) -> Leg:
    """What a request shows of the attempt that ends now."""

    def within(at_ns: int) -> int:
        return at_ns if begin_ns <= at_ns <= end_ns else -1

    return Leg(
        replica=request.replica_id,
        holder=request.holder_id,
        begin_ns=begin_ns,
        queued_ns=within(request.queued_ns),
        scheduled_ns=within(request.first_scheduled_ns),
        first_ns=within(request.first_token_ns),
        last_ns=end_ns,
        tokens=request.generated_tokens,
        problem=problem,
    )


def _leg(root: Span, leg: Leg, request: Request, journey: Journey, ids: Ids) -> Iterator[Span]:
    """The engines of an attempt: one, or a prefill and a decode engine."""
    if leg.replica < 0 or (leg.scheduled_ns < 0 and leg.begin_ns == leg.last_ns):
        return
    moves = [m for m in journey.transfers if leg.begin_ns <= m.begin_ns < leg.last_ns]
    move = moves[-1] if moves else None
    prefilled_ns = leg.last_ns
    if move is not None:  # what is tried again has had its first token before
        prefilled_ns = leg.first_ns if leg.first_ns >= 0 else move.begin_ns
    half = Half(
        replica=leg.replica,
        came_ns=max(leg.begin_ns, leg.queued_ns),
        scheduled_ns=leg.scheduled_ns,
        first_ns=leg.first_ns,
        last_ns=prefilled_ns,
        tokens=leg.tokens if move is None else 1,
        problem=leg.problem if move is None else "",
    )
    yield from _half(root, half, request, ids)
    if move is not None:
        half = Half(
            replica=move.destination,
            came_ns=move.end_ns,
            scheduled_ns=move.end_ns,
            first_ns=move.end_ns,
            last_ns=max(move.end_ns, leg.last_ns),
            tokens=max(0, leg.tokens - 1),
            problem=leg.problem,
        )
        yield from _half(root, half, request, ids)


def spans_of_half(
    trace: TraceContext,
    facts: CallFacts,
    request: Request,
    half: Half,
    journey: Journey,
    finish: str,
    ids: Ids,
) -> list[Span]:
    """Spans of a call to a port of a fleet: the engine's own."""
    top = _engine(trace, half, ids)
    top.end_ns = max(half.last_ns, half.came_ns)
    top.attributes |= _call_attributes(facts, request, finish, half.tokens)
    top.marks = tuple(journey.marks)
    moves = [m for m in journey.transfers if m.destination == half.replica]
    spans = [top, *_stages(top, half, request, ids)]
    spans += [_transfer(top, move, ids) for move in moves if half.came_ns <= move.end_ns]
    return spans


def _call_attributes(
    facts: CallFacts, request: Request, finish: str, tokens: int = -1
) -> dict[str, Value]:
    """Attributes of the conventions for generative AI."""
    found: dict[str, Value] = {
        "gen_ai.operation.name": facts.operation,
        "gen_ai.provider.name": "emu",
        "gen_ai.request.model": facts.model,
        "gen_ai.request.stream": facts.is_streamed,
        "gen_ai.response.model": facts.model,
        "gen_ai.response.id": facts.answer_id,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.generated_tokens if tokens < 0 else tokens,
        "gen_ai.usage.cache_read.input_tokens": request.prefix_hit_tokens,
        "emu.request_id": request.request_id,
    }
    if facts.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = facts.max_tokens
    if facts.session_id:
        found["gen_ai.conversation.id"] = facts.session_id
    if request.status is Status.COMPLETED:
        found["gen_ai.response.finish_reasons"] = [finish]
    if request.first_token_ns >= 0 and facts.is_streamed:
        first_ns = request.first_token_ns + request.first_out_ns - request.arrival_ns
        found["gen_ai.response.time_to_first_chunk"] = first_ns / NS_PER_S
    return found


def _engine(trace: TraceContext, half: Half, ids: Ids) -> Span:
    """The time that a request spent in an engine."""
    span = _server(trace, Part("llm_request", half.came_ns, half.last_ns), ids)
    span.replica, span.problem = half.replica, half.problem
    return span


def _half(root: Span, half: Half, request: Request, ids: Ids) -> Iterator[Span]:
    top = _engine(replace(root.trace, parent_id=root.span_id), half, ids)
    yield top
    yield from _stages(top, half, request, ids)


def _stages(top: Span, half: Half, request: Request, ids: Ids) -> Iterator[Span]:
    """Queue, prefill and decode of one engine, and its latencies as vLLM names them."""
    came, scheduled, first, last = half.came_ns, half.scheduled_ns, half.first_ns, half.last_ns
    top.attributes |= {
        "gen_ai.request.id": str(request.request_id),
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.completion_tokens": half.tokens,
    }
    for latency, part in (
        ("time_in_queue", Part("queue", came, scheduled)),
        ("time_in_model_prefill", Part("prefill", scheduled, first)),
        ("time_in_model_decode", Part("decode", first, last)),
    ):
        if part.begin_ns < 0 or part.end_ns < part.begin_ns:
            continue
        top.attributes[f"gen_ai.latency.{latency}"] = (part.end_ns - part.begin_ns) / NS_PER_S
        if part.end_ns > part.begin_ns:
            yield _child(top, part, ids)
    if first >= came:
        top.attributes["gen_ai.latency.time_to_first_token"] = (first - came) / NS_PER_S
    if last >= came:
        top.attributes["gen_ai.latency.e2e"] = (last - came) / NS_PER_S


class Part(NamedTuple):
    """What took a part of a span's time."""

    name: str
    begin_ns: int
    end_ns: int


def _server(trace: TraceContext, part: Part, ids: Ids) -> Span:
    """The top of what the gateway, or an engine, did for its caller."""
    return Span(
        name=part.name,
        trace=trace,
        span_id=ids.span(),
        parent_id=trace.parent_id,
        begin_ns=part.begin_ns,
        end_ns=part.end_ns,
        is_server=True,
    )


def _child(top: Span, part: Part, ids: Ids) -> Span:
    return Span(
        name=part.name,
        trace=top.trace,
        span_id=ids.span(),
        parent_id=top.span_id,
        begin_ns=part.begin_ns,
        end_ns=part.end_ns,
        replica=top.replica,
    )


def _transfer(root: Span, move: Transfer, ids: Ids) -> Span:
    span = _child(root, Part("kv_transfer", move.begin_ns, move.end_ns), ids)
    span.attributes = {
        "emu.kv.source": move.source,
        "emu.kv.destination": move.destination,
        "emu.kv.bytes": move.kv_bytes,
    }
    return span
