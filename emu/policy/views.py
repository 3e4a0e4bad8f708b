"""What a policy of a user's own sees: plain values of one instant.

Oracle boundary: the true length of an answer is not among them before the request has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import msgspec

from emu.request import Prefix, Request

_HIDDEN: Final = frozenset({"output_tokens", "total_tokens", "cancel_after_ns"})


def request_of(view: RequestView) -> Request:
    """What the view shows, for emu itself."""
    return view._request


Look = Callable[[Request], None]
"""Brings the counts of a request up to this instant, wherever it is."""


@final
class RequestView:
    """A request as a control plane knows it: exact at each read, also when it is kept."""

    __slots__ = ("_look", "_request")

    def __init__(self, request: Request, look: Look | None = None) -> None:
        """`look`: what is asked before a count that grows while the request runs."""
        self._request = request
        self._look = look

    @property
    def request_id(self) -> int:
        """Its id in the workload."""
        return self._request.request_id

    @property
    def arrival_ns(self) -> int:
        """When it reached the gateway, simulated time."""
        return self._request.arrival_ns

    @property
    def prompt_tokens(self) -> int:
        """Length of its prompt."""
        return self._request.prompt_tokens

    @property
    def max_output_tokens(self) -> int:
        """The limit that its client has declared."""
        return self._request.max_output_tokens

    @property
    def prefix(self) -> Prefix | None:
        """Token ids or hashes of its prompt, if the workload has them."""
        return self._request.prefix

    @property
    def session_id(self) -> str:
        """Its session; empty = none."""
        return self._request.session_id

    @property
    def tenant(self) -> str:
        """Its tenant; empty = none."""
        return self._request.tenant

    @property
    def priority(self) -> int:
        """Smaller is more urgent, as in vLLM."""
        return self._request.priority

    @property
    def deadline_ns(self) -> int:
        """When it must be answered; -1 = no deadline."""
        return self._request.deadline_ns

    @property
    def generated_tokens(self) -> int:
        """Output tokens that have passed the gateway so far."""
        if self._look is not None:
            self._look(self._request)
        return self._request.generated_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV exists where it is."""
        if self._look is not None:
            self._look(self._request)
        return self._request.computed_tokens

    @property
    def preemptions(self) -> int:
        """How often it has lost its KV to others."""
        return self._request.preemptions

    @property
    def retries(self) -> int:
        """How often it has started again."""
        return self._request.retries

    def __getattr__(self, name: str) -> object:
        """Anything else is not for a policy to know."""
        if name in _HIDDEN:
            raise AttributeError(f"{name} is not known before a request has ended")
        raise AttributeError(f"a request has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        """Two views of one request are equal."""
        return isinstance(other, RequestView) and other._request is self._request

    def __hash__(self) -> int:
        """The hash is the request's, the same in every run."""
        return hash((self._request.request_id, self._request.retries))

    def __repr__(self) -> str:
        """What one looks at first."""
        request = self._request
        return f"<request {request.request_id}: {request.prompt_tokens} prompt tokens>"


class ReplicaView(msgspec.Struct, frozen=True, gc=False):
    """A replica as the control plane sees it. Load may be late, states never are."""

    replica_id: int
    state: str
    """Such as colocated, prefill, decode, inactive, loading_decode (docs/lab/states.md)."""
    machine: int
    gpus: int
    waiting: int
    running: int
    waiting_tokens: int
    """Prompt tokens of waiting requests."""
    blocks_used: int
    """KV blocks that are not free."""
    blocks_total: int
    max_num_seqs: int

    @property
    def kv_use(self) -> float:
        """Part of the KV blocks in use."""
        return self.blocks_used / max(1, self.blocks_total)

    @property
    def is_serving(self) -> bool:
        """It may be given work in its role."""
        return self.state in ("colocated", "prefill", "decode")


class TransferView(msgspec.Struct, frozen=True, gc=False):
    """KV of a batch of requests that leaves a prefill replica."""

    source: int
    destination: int
    """-1 = it waits for one."""
    requests: int
    prompt_tokens: int
    queued_ns: int


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A request that has ended. Times are the engine's, in ns; -1 = none."""

    request_id: int
    status: str
    """completed, cancelled, rejected or failed."""
    reason: str
    tenant: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    """Tokens that it received."""
    arrival_ns: int
    ended_ns: int
    ttft_ns: int
    tpot_ns: int
    """Mean time between its tokens; -1 with fewer than two."""
    replica_id: int
    """Of the first token."""
    decode_replica_id: int
    """Of the last token."""
    is_met: bool
    """It has completed within all objectives of [slo]."""
