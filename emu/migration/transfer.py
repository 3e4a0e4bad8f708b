"""What a migration is, and what it needs of the network.

The handoff of a request's KV is explicit: *hold* (the source keeps the blocks), *reserve* (the
destination charges them), *transfer* (bytes on the links), *activate* (the destination decodes),
*release* (the source frees). `MigratingBatch` carries the requests through these steps.
"""

from __future__ import annotations

from typing import final

from emu.request import Request


@final
class MigratingBatch:
    """Requests whose prompts ended in the same iteration, on their way to a decode replica."""

    batch_id: int
    requests: list[Request]
    prefill_ns: int
    """Time that the iteration took (a layer-wise transfer overlaps with it)."""
    queued_ns: int
    started_ns: int
    kv_bytes: int
    attempts: int
    """Transfers of it that have failed."""

    __slots__ = (
        "attempts",
        "batch_id",
        "kv_bytes",
        "prefill_ns",
        "queued_ns",
        "requests",
        "started_ns",
    )

    def __init__(
        self,
        batch_id: int,
        requests: list[Request],
        prefill_ns: int,
        queued_ns: int,
        started_ns: int = -1,
        kv_bytes: int = 0,
    ) -> None:
        self.batch_id = batch_id
        self.requests = requests
        self.prefill_ns = prefill_ns
        self.queued_ns = queued_ns
        self.started_ns = started_ns
        self.kv_bytes = kv_bytes
        self.attempts = 0

    def is_ready(self, now_ns: int) -> bool:
        """It may leave: a decode replica that an outside router names has been named."""
        first = self.requests[0]
        return first.handoff_after_ns < 0 or first.arrival_ns + first.handoff_after_ns <= now_ns


def kv_bytes(
    requests: list[Request], block_size: int, kv_bytes_per_token: int, state_bytes: int = 0
) -> int:
    """KV that moves with these requests, in whole pages, and the states of each (`state_bytes`).

    A loop: mostly there is one request."""
    blocks = 0
    for request in requests:
        blocks += -(-(request.prompt_tokens + (request.generated_tokens or 1)) // block_size)
    return blocks * block_size * kv_bytes_per_token + len(requests) * state_bytes


def kv_blocks(request: Request, block_size: int) -> int:
    """Pages of a request that moves: whole ones of prompt + 1 tokens (BlitzScale 1.4).

    One that had to be computed again moves all that it has reached.
    """
    return -(-(request.prompt_tokens + (request.generated_tokens or 1)) // block_size)


def prompt_tokens(requests: list[Request]) -> int:
    """Sum of prompt tokens. A loop: mostly there is one request."""
    tokens = 0
    for request in requests:
        tokens += request.prompt_tokens
    return tokens
