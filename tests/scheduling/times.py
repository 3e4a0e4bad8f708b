"""Where a request's time went, from the stamps that a scheduler leaves on it.

Definitions as in Vidur's request metrics, repaired: lengths are the client's, not those of the
last restart, and per-token figures divide by the number of gaps. Valid for completed requests.
"""

from __future__ import annotations

import msgspec

from emu.request import Request


class RequestTimes(msgspec.Struct, frozen=True):
    """Times in nanoseconds; per-token figures in nanoseconds per token."""

    e2e_ns: int
    scheduling_delay_ns: int
    """Arrival to first batch."""
    stage_wait_ns: int
    """First batch to that batch's start on the first pipeline stage, which earlier ones held."""
    execution_ns: int
    """On stages: the full duration of each batch that it was a member of."""
    preempted_ns: int
    """Between its first stage's start and its end, but on no stage: other batches, evictions, and
    the wait between the stages of a pipeline. The four times add up to `e2e_ns`."""
    ttft_ns: int
    prefill_ns: int
    """First batch to first token."""
    prefill_ns_per_token: float
    decode_ns_per_token: float
    """Mean gap between output tokens; 0 for a single token."""
    restarts: int
    prompt_to_output: float


def request_times(request: Request) -> RequestTimes:
    """The record of a completed request."""
    assert request.first_scheduled_ns >= 0, "the request was never scheduled"
    gaps = request.generated_tokens - 1
    decode_ns = request.last_token_ns - request.first_token_ns
    prefill_ns = request.first_token_ns - request.first_scheduled_ns
    in_service_ns = request.last_token_ns - request.first_scheduled_ns
    return RequestTimes(
        e2e_ns=request.last_token_ns - request.arrival_ns,
        scheduling_delay_ns=request.first_scheduled_ns - request.arrival_ns,
        stage_wait_ns=request.stage_wait_ns,
        execution_ns=request.execution_ns,
        preempted_ns=in_service_ns - request.stage_wait_ns - request.execution_ns,
        ttft_ns=request.first_token_ns - request.arrival_ns,
        prefill_ns=prefill_ns,
        prefill_ns_per_token=prefill_ns / request.prompt_tokens,
        decode_ns_per_token=decode_ns / gaps if gaps else 0.0,
        restarts=request.preemptions,
        prompt_to_output=request.prompt_tokens / request.generated_tokens,
    )
