"""What a policy sees of requests, replicas and transfers: plain values of one instant.

Oracle boundary: the true length of an answer is not among them before the request has ended.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, final

import msgspec

from emu.errors import PluginError
from emu.request import Prefix, Request

_HIDDEN: Final = frozenset({"output_tokens", "total_tokens", "cancel_after_ns"})


def request_of(view: RequestView) -> Request:
    """What the view shows, for emu itself."""
    return view._request


@final
class RequestView:
    """A request as a control plane knows it."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

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
        return self._request.generated_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV exists where it is."""
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
    """Such as colocated, prefill, decode, inactive, loading_decode (docs/states.md)."""
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


# --------------------------------------------------------------------------------------------------
# Policies of a user's own behind the calls of emu: requests become views, answers are checked.
#
# An answer that is none is a PluginError; an exception in a policy passes, and `blamed` names it.

REASON_CHARS_MAX = 200


def index_of(chosen: Any, count: int, what: str, *, may_wait: bool = False) -> int:
    """A choice among so many as an index; -1 = to wait, where it may."""
    try:
        index = operator.index(chosen)
    except TypeError:
        index = -2
    if isinstance(chosen, bool) or not (0 <= index < count or (may_wait and index == -1)):
        wanted = f"an index from 0 to {count - 1}" + (", or -1 to wait" if may_wait else "")
        raise PluginError(f"{what} chose {shown(chosen)} of {count}; expected {wanted}")
    return index


def shown(value: object) -> str:
    """A value in few characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


class OwnAdmission:
    """An admission policy: admits, or says why not."""

    def __init__(self, made: Any, path: str) -> None:
        self._made = made
        self._what = f"router.admission: {path}"

    def refusal(self, request: Request) -> str:
        """Why a request is refused; empty = admitted."""
        reason = self._made.admit(RequestView(request))
        if reason is None or reason is True or reason == "":
            return ""
        if reason is False:
            return "refused"
        if not isinstance(reason, str):
            problem = f"answered {shown(reason)}; expected '' to admit, or a reason"
            raise PluginError(f"{self._what} {problem}")
        return " ".join(reason.split())[:REASON_CHARS_MAX] or "refused"


class OwnPlacement:
    """A policy for where KV goes."""

    def __init__(self, made: Any, path: str) -> None:
        self._made = made
        self._what = f"router.decode_policy: {path}"

    def choose(self, requests: Sequence[Request], candidates: Sequence[ReplicaView]) -> int:
        """Index of a candidate; -1 = wait until something changes."""
        views = [RequestView(request) for request in requests]
        chosen = self._made.choose(views, list(candidates))
        return index_of(chosen, len(candidates), self._what, may_wait=True)


class OwnEviction:
    """A policy that says which request loses its KV blocks."""

    def __init__(self, made: Any, path: str) -> None:
        self._made = made
        self._what = f"scheduler.eviction: {path}"

    def choose(self, needy: Request, candidates: Sequence[Request]) -> int:
        """Index of the victim among the candidates."""
        views = [RequestView(request) for request in candidates]
        return index_of(self._made.choose(RequestView(needy), views), len(candidates), self._what)


class OwnMigration:
    """A policy for which running request moves where."""

    def __init__(self, made: Any, path: str) -> None:
        self._made = made
        self._what = f"migration.policy: {path}"

    def choose(self, decoding: Sequence[ReplicaView]) -> tuple[int, int, int | None] | None:
        """(source, destination, request id or None for the last admitted), or None for no move."""
        if len(decoding) < 2:
            return None
        found = self._made.choose(list(decoding))
        if found is None:
            return None
        known = {view.replica_id for view in decoding}
        wanted = "None or (source id, destination id[, request id])"
        if not isinstance(found, tuple) or len(found) not in (2, 3):
            raise PluginError(f"{self._what} answered {shown(found)}; expected {wanted}")
        source, destination, *rest = found
        if source not in known or destination not in known or source == destination:
            ids = ", ".join(map(str, sorted(known)))
            problem = f"moves from {shown(source)} to {shown(destination)}; these decode: {ids}"
            raise PluginError(f"{self._what} {problem}")
        if rest and rest[0] is not None and not isinstance(rest[0], int):
            raise PluginError(f"{self._what} answered {shown(found)}; expected {wanted}")
        return int(source), int(destination), rest[0] if rest else None
