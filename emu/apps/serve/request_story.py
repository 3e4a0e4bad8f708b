"""What has happened to one request, for the inspector of the live page."""

from __future__ import annotations

from msgspec import Struct

from emu.request import Request
from emu.units import NS_PER_MS, NS_PER_S


class RequestStory(Struct, frozen=True, kw_only=True):
    """Times are emulated seconds, None = not yet."""

    id: int
    status: str
    reason: str
    tenant: str
    session: str
    priority: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_output_tokens: int
    kv_blocks: int
    holder: int
    replica: int
    decode_replica: int
    arrival_s: float | None
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    migration_ms: float
    largest_gap_ms: float
    preemptions: int
    recomputed_tokens: int
    migrations: int
    retries: int


def story_of(request: Request) -> RequestStory:
    """The story so far."""
    return RequestStory(
        id=request.request_id,
        status=request.status.name.lower(),
        reason=request.reason,
        tenant=request.tenant,
        session=request.session_id,
        priority=request.priority,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.prefix_hit_tokens,
        generated_tokens=request.generated_tokens,
        max_output_tokens=request.max_output_tokens,
        kv_blocks=request.kv_blocks,
        holder=request.holder_id,
        replica=request.replica_id,
        decode_replica=request.decode_replica_id,
        arrival_s=_at_s(request.arrival_ns),
        first_scheduled_s=_at_s(request.first_scheduled_ns),
        first_token_s=_at_s(request.first_token_ns, request.first_out_ns),
        last_token_s=_at_s(request.last_token_ns, request.last_out_ns),
        migration_ms=round(request.migration_ns / NS_PER_MS, 3),
        largest_gap_ms=round(request.max_gap_ns / NS_PER_MS, 3),
        preemptions=request.preemptions,
        recomputed_tokens=request.recomputed_tokens,
        migrations=request.migrations,
        retries=request.retries,
    )


def _at_s(ns: int, delay_ns: int = 0) -> float | None:
    return None if ns < 0 else round((ns + delay_ns) / NS_PER_S, 6)
