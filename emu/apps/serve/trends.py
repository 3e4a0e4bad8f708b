"""What the operator's page shows over time, and the requests that ended last.

`Trends` takes one point a second of wall time: percentiles of the requests that ended since the
last point, rates of tokens and of bytes between the replicas, replicas by role. It keeps the last
`POINTS_MAX` points, and one for each `MERGED` of the twelve hours before, so that a page that is
opened late shows the past too; and the last `REQUESTS_KEPT` requests that ended, for the inspector.
All times are emulated.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.ma  # numpy loads it at the first percentile: 20 ms while answers are due

from emu.apps.serve.request_story import RequestStory, story_of
from emu.apps.serve.world import LiveCluster
from emu.config.schema import SloTable
from emu.replica.states import GPU_ROLE
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status
from emu.units import NS_PER_MS, NS_PER_S

POINTS_MAX: Final = 600
MERGED: Final = 30
_OLDER_MAX: Final = 12 * 3600 // MERGED
REQUESTS_KEPT: Final = 512
PAIRS_SHOWN: Final = 64
_PERCENTS: Final = (50, 95, 99)
_PAIR_POINTS: Final = 60
"""Points over which the flow between two replicas is counted."""


def role_of(replica: ReplicaHandle) -> str:
    """prefill, decode, colocated, loading, draining, failed or inactive."""
    state = replica.state.value
    for word, role in (("shutting", "draining"), ("loading", "loading")):
        if state.startswith(word):
            return role
    return GPU_ROLE[replica.state] or state


class Trends:
    """Points over time, the flow between replicas, and the requests that ended last."""

    def __init__(self, cluster: LiveCluster, slo: SloTable) -> None:
        self._cluster = cluster
        self._slo = slo
        self.points: deque[dict[str, object]] = deque(maxlen=POINTS_MAX)
        self._leaving: list[dict[str, object]] = []
        self._older: deque[dict[str, object]] = deque(maxlen=_OLDER_MAX)
        self.ended: deque[Request] = deque(maxlen=REQUESTS_KEPT)
        self._window: list[Request] = []
        self._flows: deque[Counter[tuple[int, int]]] = deque(maxlen=_PAIR_POINTS)
        self._flow_now: Counter[tuple[int, int]] = Counter()
        self._before: dict[str, float] = {"at_s": cluster.kernel.now_ns / NS_PER_S}
        cluster.observers.append(self)

    def on_end(self, request: Request) -> None:
        """A request has ended, in whatever way."""
        self.ended.append(request)
        self._window.append(request)

    def on_transfer(
        self, source: ReplicaHandle, destination: ReplicaHandle, size_bytes: int
    ) -> None:
        """KV has gone from one replica to another."""
        self._flow_now[source.replica_id, destination.replica_id] += size_bytes

    def take(self) -> dict[str, object]:
        """The next point; kept, and returned for the pages that are open."""
        cluster = self._cluster
        now_s = cluster.kernel.wall_ns() / NS_PER_S
        window, self._window = self._window, []
        self._flows.append(self._flow_now)
        self._flow_now = Counter()
        totals = {"prefill_tokens": 0, "decode_tokens": 0}
        running = waiting = used = total = 0
        for replica in cluster.replicas:
            view = replica.view()
            prefill, decode = view.tokens_produced
            totals["prefill_tokens"] += prefill
            totals["decode_tokens"] += decode
            running += view.running_count
            waiting += view.waiting_count
            used += view.blocks_used
            total += view.blocks_total
        gateway = cluster.gateway
        held = len(gateway.held) + sum(map(len, gateway.queues))
        moved = {f"{kind}_bytes": n for kind, n in cluster.network.moved_bytes.items()}
        point: dict[str, object] = {
            "event": "point",
            "at_s": round(now_s, 3),
            "running": running,
            "waiting": waiting + held,
            "kv_percent": round(100 * used / total, 2) if total else 0.0,
            "roles": dict(sorted(Counter(role_of(r) for r in cluster.replicas).items())),
            "ended": len(window),
            **self._latencies(window),
            **self._seen(),
        }
        span_s = now_s - self._before["at_s"]
        for name, value in {**totals, **moved}.items():
            gained = value - self._before.get(name, 0)
            point[f"{name}_per_s"] = round(gained / span_s, 1) if span_s > 0 else 0.0
        self._before = {"at_s": now_s, **totals, **moved}
        self.keep(point)
        return point

    def history(self) -> list[dict[str, object]]:
        """All points, the oldest first."""
        return [*self._older, *self._leaving, *self.points]

    def keep(self, point: dict[str, object]) -> None:
        """The newest point; what is old is thinned."""
        if len(self.points) == POINTS_MAX:
            self._leaving.append(self.points[0])
        self.points.append(point)
        if len(self._leaving) == MERGED:
            self._older.append(merged(self._leaving))
            self._leaving.clear()

    def _seen(self) -> dict[str, float | None]:
        """TTFT as clients saw it, in emulated ms: the lateness of this machine is in it."""
        pace = self._cluster.pace
        seen, pace.seen_s = pace.seen_s, []
        found: dict[str, float | None] = {"seen_ttft_p50_ms": None, "seen_ttft_p99_ms": None}
        if seen:
            at_ms = [1e3 * client_s for _, client_s in seen]
            for q, value in zip((50, 99), np.percentile(at_ms, (50, 99)), strict=True):
                found[f"seen_ttft_p{q}_ms"] = float(f"{value:.5g}")
        return found

    def _latencies(self, window: Sequence[Request]) -> dict[str, float | None]:
        """Percentiles in ms, and the part that met the objectives."""
        done = [r for r in window if r.status is Status.COMPLETED]
        found: dict[str, float | None] = {
            f"{name}_p{q}_ms": None for name in ("ttft", "tpot", "e2e") for q in _PERCENTS
        }
        for name, values in (
            ("ttft", [ttft_ms(r) for r in done]),
            ("tpot", [tpot_ms(r) for r in done if r.generated_tokens > 1]),
            ("e2e", [e2e_ms(r) for r in done]),
        ):
            if values:
                for q, value in zip(_PERCENTS, np.percentile(values, _PERCENTS), strict=True):
                    found[f"{name}_p{q}_ms"] = float(f"{value:.5g}")
        counted = [r for r in window if r.status is not Status.CANCELLED]
        has_objectives = any(msgspec.structs.astuple(self._slo))
        met = 100 * sum(map(self._is_met, counted)) / len(counted) if counted else None
        found["met_percent"] = met if has_objectives else None
        return found

    def _is_met(self, request: Request) -> bool:
        slo = self._slo
        limit_ms = slo.ttft_limit_ms(request.prompt_tokens)
        return request.status is Status.COMPLETED and not (
            (limit_ms and ttft_ms(request) > limit_ms)
            or (slo.tpot_ms and request.generated_tokens > 1 and tpot_ms(request) > slo.tpot_ms)
            or (slo.e2e_ms and e2e_ms(request) > slo.e2e_ms)
        )

    def pairs(self) -> list[list[int]]:
        """[source, destination, bytes] of the last minute, largest first."""
        sums: Counter[tuple[int, int]] = Counter(self._flow_now)
        for flow in self._flows:
            sums.update(flow)
        largest = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:PAIRS_SHOWN]
        return [[source, destination, size] for (source, destination), size in largest]

    def slowest(self, count: int) -> list[RequestStory]:
        """The requests with the longest TTFT among those that ended last."""
        begun = [r for r in self.ended if r.first_token_ns >= 0]
        begun.sort(key=lambda r: (-ttft_ms(r), r.request_id))
        return [story_of(r) for r in begun[:count]]

    def find(self, request_id: int) -> RequestStory | None:
        """A request that is under way or ended lately."""
        for request in (*self._cluster.under_way(), *self.ended):
            if request.request_id == request_id:
                return story_of(request)
        return None


def merged(points: Sequence[dict[str, object]]) -> dict[str, object]:
    """One point for several: the worst p95 and p99, the sum of what ended, otherwise means.

    The share that met the objectives is weighted by what ended; time and roles are the last ones.
    """
    found = dict(points[-1])
    for key in sorted(found.keys() - {"event", "at_s", "roles"}):
        values = [value for point in points if isinstance(value := point[key], float | int)]
        if not values:
            found[key] = None
        elif key == "ended":
            found[key] = sum(values)
        elif key.endswith(("p95_ms", "p99_ms")):
            found[key] = max(values)
        elif key == "met_percent":
            ended = [n for p in points if p[key] is not None and isinstance(n := p["ended"], int)]
            found[key] = float(np.average(values, weights=ended))
        else:
            found[key] = round(sum(values) / len(values), 3)
    return found


def ttft_ms(request: Request) -> float:
    """Arrival to first token at the client, ms."""
    return (request.first_token_ns + request.first_out_ns - request.arrival_ns) / NS_PER_MS


def e2e_ms(request: Request) -> float:
    """Arrival to last token at the client, ms."""
    return (request.last_token_ns + request.last_out_ns - request.arrival_ns) / NS_PER_MS


def tpot_ms(request: Request) -> float:
    """Mean gap between the tokens of a completed request, ms."""
    gaps = max(1, request.generated_tokens - 1)
    return (e2e_ms(request) - ttft_ms(request)) / gaps
