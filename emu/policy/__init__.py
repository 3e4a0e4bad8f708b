"""What a policy of a user's own sees, and what each kind of it must have.

A class whose constructor has a parameter `context` gets a `Context` (docs/plugins.md).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, final

import msgspec

from emu.errors import PluginError
from emu.request import Prefix, Request
from emu.rng import rng_stream
from emu.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np


# --- views: plain values of one instant; policies of one's own behind emu's calls -----------------
# Oracle boundary: the true length of an answer is not among them before the request has ended.

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

    def __init__(self, made: Any, path: str, look: Look | None) -> None:
        self._made = made
        self._look = look
        self._what = f"router.admission: {path}"

    def refusal(self, request: Request) -> str:
        """Why a request is refused; empty = admitted."""
        reason = self._made.admit(RequestView(request, self._look))
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

    def __init__(self, made: Any, path: str, look: Look | None) -> None:
        self._made = made
        self._look = look
        self._what = f"router.decode_policy: {path}"

    def choose(self, requests: Sequence[Request], candidates: Sequence[ReplicaView]) -> int:
        """Index of a candidate; -1 = wait until something changes."""
        views = [RequestView(request, self._look) for request in requests]
        chosen = self._made.choose(views, list(candidates))
        return index_of(chosen, len(candidates), self._what, may_wait=True)


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


# --- context: the one object that a policy is given; windows over what passed the gateway ---------
#     class Mine:
#         def __init__(self, context: Context) -> None:
#             self.context = context
#
#         def choose(self, request, signals):
#             found = [self.context.prefix_tokens(s.replica_id, request) for s in signals]
#             ...
#
# It looks, and changes nothing. The load of replicas, and for a planner all figures, are as old as
# the configuration says (`router.signal_delay_ms`, `autoscale.metrics_delay_ms`); what passes the
# gateway itself, and what replicas cache (they publish that as events), is known at once.

# --------------------------------------------------------------------------------------------------
# Windows over what has passed the gateway: rates, percentiles, attainment, forecasts.
#
#     books = Books(limits_ms=(500, 50, 0))
#     books.arrived(request)
#     books.ended(ended)
#     books.rates(now_ns, window_s=10).arrivals_per_s
#
# A window of w seconds seen at t is (t - w, t]. All figures are functions of what came before t and
# of t alone, so that late metrics are the same figures of an earlier t.

Forecast = Literal["last", "linear", "holt"]


class Rates(msgspec.Struct, frozen=True, gc=False):
    """What came and went in a window, per second."""

    arrivals_per_s: float
    prompt_tokens_per_s: float
    """Of requests that arrived."""
    mean_prompt_tokens: float
    """0 if none arrived."""
    completions_per_s: float
    output_tokens_per_s: float
    """Of requests that completed."""
    mean_output_tokens: float
    """Of requests that completed; 0 if none did."""
    rejections_per_s: float


class Books:
    """Arrivals and ends, in order of time."""

    def __init__(
        self,
        limits_ms: tuple[float, float, float] = (0.0, 0.0, 0.0),
        growing_ms: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """`limits_ms`: objectives of TTFT, TPOT and E2E; 0 = none. `growing_ms`: a base and what
        each prompt token adds to it, where this objective of TTFT is the longer one."""
        self._limits_ns = tuple(round(limit * 1e6) for limit in limits_ms)
        self._base_ms, self._token_ms = growing_ms
        self._arrival_ns: list[int] = []
        self._prompt_sums: list[int] = [0]
        """Prompt tokens of the first n arrivals."""
        self._ended_ns: list[int] = []
        self._ended: list[Ended] = []
        self.live: dict[int, Request] = {}
        """Requests in the system, by id of the object."""

    def arrived(self, request: Request, now_ns: int) -> None:
        """A request has reached the gateway."""
        self._arrival_ns.append(now_ns)
        self._prompt_sums.append(self._prompt_sums[-1] + request.prompt_tokens)
        self.live[request.row] = request

    def over(self, request: Request, now_ns: int) -> Ended:
        """A request has ended."""
        self.live.pop(request.row, None)
        ended = self._view(request, now_ns)
        self._ended_ns.append(now_ns)
        self._ended.append(ended)
        return ended

    def _view(self, request: Request, now_ns: int) -> Ended:
        is_done = request.status.name == "COMPLETED"
        first, last, tokens = (
            request.first_token_ns,
            request.last_token_ns,
            request.generated_tokens,
        )
        ttft_ns = first - request.arrival_ns if first >= 0 else -1
        tpot_ns = (last - first) // (tokens - 1) if tokens > 1 and first >= 0 else -1
        figures = (ttft_ns, tpot_ns, now_ns - request.arrival_ns)
        limits = self._limits_ns
        if self._token_ms:
            grown_ns = round((self._base_ms + self._token_ms * request.prompt_tokens) * 1e6)
            limits = (max(limits[0], grown_ns), *limits[1:])
        is_met = is_done and all(
            not limit or figure <= limit for figure, limit in zip(figures, limits, strict=True)
        )
        return Ended(
            request_id=request.request_id,
            status=request.status.name.lower(),
            reason=request.reason,
            tenant=request.tenant,
            priority=request.priority,
            prompt_tokens=request.prompt_tokens,
            output_tokens=tokens,
            arrival_ns=request.arrival_ns,
            ended_ns=now_ns,
            ttft_ns=ttft_ns,
            tpot_ns=tpot_ns,
            replica_id=request.replica_id,
            decode_replica_id=request.decode_replica_id,
            is_met=is_met,
        )

    # --- figures ----------------------------------------------------------------------------
    def rates(self, at_ns: int, window_s: float) -> Rates:
        """Rates of the window that ends at `at_ns`; before the start nothing came."""
        low, high = self._span(self._arrival_ns, at_ns, window_s)
        arrivals = high - low
        prompts = self._prompt_sums[high] - self._prompt_sums[low]
        ended = self._ends(at_ns, window_s)
        done = [one for one in ended if one.status == "completed"]
        tokens = sum(one.output_tokens for one in done)
        refused = sum(one.status == "rejected" for one in ended)
        return Rates(
            arrivals_per_s=arrivals / window_s,
            prompt_tokens_per_s=prompts / window_s,
            mean_prompt_tokens=prompts / arrivals if arrivals else 0.0,
            completions_per_s=len(done) / window_s,
            output_tokens_per_s=tokens / window_s,
            mean_output_tokens=tokens / len(done) if done else 0.0,
            rejections_per_s=refused / window_s,
        )

    def ttft_ms(self, percent: float, at_ns: int, window_s: float) -> float | None:
        """Percentile of TTFT over first tokens of the window; None if there was none."""
        since = at_ns - round(window_s * NS_PER_S)
        figures = [
            request.first_token_ns - request.arrival_ns
            for request in self.live.values()
            if since < request.first_token_ns <= at_ns
        ]
        for one in reversed(self._ended):
            if one.ended_ns <= since:
                break  # its first token came before its end
            if one.ttft_ns >= 0 and since < one.arrival_ns + one.ttft_ns <= at_ns:
                figures.append(one.ttft_ns)
        return percentile_ms(figures, percent)

    def itl_ms(self, percent: float, at_ns: int, window_s: float) -> float | None:
        """Percentile over the token gaps of requests that completed in the window.

        Each request stands for its gaps with their mean. None if there were none.
        """
        weighted = [
            (one.tpot_ns, one.output_tokens - 1)
            for one in self._ends(at_ns, window_s)
            if one.status == "completed" and one.tpot_ns >= 0
        ]
        total = sum(count for _, count in weighted)
        wanted, seen = max(1, math.ceil(percent / 100 * total)), 0
        for figure, count in sorted(weighted):
            seen += count
            if seen >= wanted:
                return figure / 1e6
        return None

    def attainment(self, at_ns: int, window_s: float) -> float | None:
        """Part of the requests that ended in the window and met all objectives of [slo].

        Requests that were rejected or failed have not met them; cancelled ones do not count.
        """
        ended = [one for one in self._ends(at_ns, window_s) if one.status != "cancelled"]
        return sum(one.is_met for one in ended) / len(ended) if ended else None

    def forecast(
        self, at_ns: int, horizon_s: float, window_s: float, buckets: int, method: Forecast
    ) -> Rates:
        """Rates expected `horizon_s` from now, from that many windows before `at_ns`.

        last: as in the last window. linear: a straight line through all windows. holt: double
        exponential smoothing (level 0.5, trend 0.3). Lengths are those of the last window that has
        any; no rate is below 0.
        """
        step_ns = round(window_s * NS_PER_S)
        past = [
            self.rates(at_ns - index * step_ns, window_s)
            for index in range(min(buckets, 1 + at_ns // step_ns))
        ][::-1]
        rates = [one.arrivals_per_s for one in past]
        wanted = max(0.0, extrapolated(rates, horizon_s / window_s, method))
        latest = past[-1]
        prompt = next((o.mean_prompt_tokens for o in past[::-1] if o.mean_prompt_tokens), 0.0)
        output = next((o.mean_output_tokens for o in past[::-1] if o.mean_output_tokens), 0.0)
        return msgspec.structs.replace(
            latest,
            arrivals_per_s=wanted,
            prompt_tokens_per_s=wanted * prompt,
            mean_prompt_tokens=prompt,
            mean_output_tokens=output,
        )

    # --- inside -----------------------------------------------------------------------------
    @staticmethod
    def _span(times: list[int], at_ns: int, window_s: float) -> tuple[int, int]:
        since = at_ns - round(window_s * NS_PER_S)
        return bisect_right(times, since), bisect_right(times, at_ns)

    def _ends(self, at_ns: int, window_s: float) -> list[Ended]:
        low, high = self._span(self._ended_ns, at_ns, window_s)
        return self._ended[low:high]


def percentile_ms(figures: Sequence[int], percent: float) -> float | None:
    """The smallest figure that so many per cent do not exceed, in ms."""
    if not figures:
        return None
    ordered = sorted(figures)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] / 1e6


def extrapolated(values: Sequence[float], steps: float, method: Forecast) -> float:
    """The value `steps` steps after the last one."""
    if method == "last" or len(values) < 2:
        return values[-1] if values else 0.0
    return _METHODS[method](values, steps)


def _linear(values: Sequence[float], steps: float) -> float:
    count = len(values)
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((index - middle) ** 2 for index in range(count))
    slope = sum((index - middle) * value for index, value in enumerate(values)) / spread
    return mean + slope * (count - 1 - middle + steps)


def _holt(values: Sequence[float], steps: float) -> float:
    level, trend = values[0], values[1] - values[0]
    for value in values[1:]:
        before = level
        level = 0.5 * value + 0.5 * (level + trend)
        trend = 0.3 * (level - before) + 0.7 * trend
    return level + steps * trend


_METHODS: dict[str, Callable[[Sequence[float], float], float]] = {
    "linear": _linear,
    "holt": _holt,
}


# --- The one object that a policy of a user's own is given ----------------------------------------


class Watched(Protocol):
    """What a context asks of the world."""

    books: Books

    @property
    def now_ns(self) -> int:
        """Simulated time."""
        ...

    def look(self, request: Request) -> None:
        """Bring the counts of a request up to this instant."""
        ...

    def ttft_ms(self, percent: float, at_ns: int, window_s: float) -> float | None:
        """Percentile of TTFT over first tokens of the window; None if there was none."""
        ...

    def replicas(self, delay_ns: int) -> Sequence[ReplicaView]:
        """All replicas, by id; load of `delay_ns` ago."""
        ...

    def prefix_tokens(self, replica_id: int, request: Request) -> int:
        """Prompt tokens that a replica's cache holds."""
        ...

    def transfers(self) -> Sequence[TransferView]:
        """KV that leaves prefill replicas."""
        ...

    def running(self, replica_id: int) -> Sequence[Request]:
        """Requests that run on a replica, in order of admission."""
        ...

    def iteration_ms(self, replica_id: int, shape: tuple[int, int, int]) -> float:
        """Cost of an iteration: prompt tokens, decodes, tokens of context of these together."""
        ...


@final
class Context:
    """Time, chance, and what the control plane sees."""

    def __init__(
        self,
        watched: Watched,
        *,
        key: str,
        seed: int,
        delay_ns: int,
        is_late: bool,
        objectives_ms: tuple[float, float, float] = (0.0, 0.0, 0.0),
        replica_id: int = -1,
    ) -> None:
        """`delay_ns`: age of the load. `is_late`: figures of the gateway are as old, too."""
        name = f"plugin.{key}" if replica_id < 0 else f"plugin.{key}.{replica_id}"
        self._watched = watched
        self._delay_ns = delay_ns
        self._figures_delay_ns = delay_ns if is_late else 0
        self._key = key
        self._stream = (seed, name)
        self._rng: np.random.Generator | None = None
        self.objectives_ms = objectives_ms
        """TTFT, TPOT and E2E of [slo]; 0 = none."""
        self.replica_id = replica_id
        """Whose scheduler or eviction it is; -1 = of no replica in particular."""

    @property
    def now_ns(self) -> int:
        """Simulated time, ns since the start."""
        return self._watched.now_ns

    @property
    def now_s(self) -> float:
        """Simulated time, seconds since the start."""
        return self._watched.now_ns / 1e9

    @property
    def rng(self) -> np.random.Generator:
        """A random stream of this policy's own: the same draws in every run of one seed."""
        if self._rng is None:
            self._rng = rng_stream(*self._stream)
        return self._rng

    # --- the cluster --------------------------------------------------------------------------
    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """All replicas, by id, inactive ones too."""
        return self._watched.replicas(self._delay_ns)

    @property
    def transfers(self) -> Sequence[TransferView]:
        """KV on its way from prefill replicas, and KV that waits for a destination."""
        return self._watched.transfers()

    def prefix_tokens(self, replica_id: int, request: RequestView) -> int:
        """Prompt tokens of the request that the replica's prefix cache holds."""
        return self._watched.prefix_tokens(replica_id, request_of(request))

    def running(self, replica_id: int) -> list[RequestView]:
        """Requests that run on a replica now, in order of admission."""
        watched = self._watched
        return [RequestView(request, watched.look) for request in watched.running(replica_id)]

    def iteration_ms(
        self,
        replica_id: int = 0,
        *,
        prompt_tokens: int = 0,
        decodes: int = 0,
        context_tokens: int = 0,
    ) -> float:
        """What a profile of the replica says: an iteration that reads one prompt of so many tokens
        and decodes so many requests, which have `context_tokens` together."""
        return self._watched.iteration_ms(replica_id, (prompt_tokens, decodes, context_tokens))

    # --- figures of a window --------------------------------------------------------------------
    @property
    def _seen_ns(self) -> int:
        return max(0, self._watched.now_ns - self._figures_delay_ns)

    def rates(self, window_s: float = 10.0) -> Rates:
        """Arrivals, completions and their tokens, per second."""
        return self._watched.books.rates(self._seen_ns, window_s)

    def ttft_ms(self, percent: float = 95.0, window_s: float = 10.0) -> float | None:
        """Percentile of the time to first token, over first tokens of the window."""
        return self._watched.ttft_ms(percent, self._seen_ns, window_s)

    def itl_ms(self, percent: float = 95.0, window_s: float = 10.0) -> float | None:
        """Percentile of the time between tokens, of requests that completed in the window."""
        return self._watched.books.itl_ms(percent, self._seen_ns, window_s)

    def attainment(self, window_s: float = 10.0) -> float | None:
        """Part of the requests that ended in the window and met all objectives of [slo]."""
        return self._watched.books.attainment(self._seen_ns, window_s)

    def forecast(
        self,
        horizon_s: float,
        *,
        window_s: float = 10.0,
        buckets: int = 6,
        method: Forecast = "holt",
    ) -> Rates:
        """Rates expected in `horizon_s` seconds."""
        books = self._watched.books
        return books.forecast(self._seen_ns, horizon_s, window_s, buckets, method)
