"""What every endpoint needs: the cluster, the tokenizer, names, limits, output lengths, trends.

Built once at the start. Holds no state of its own but counters of the HTTP layer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.ma  # numpy loads it at the first percentile: 20 ms while answers are due

from emu.apps.serve.intake import Intake, is_loopback
from emu.apps.serve.protocol import Call, FailureSchedule
from emu.apps.serve.script import Tokenizer
from emu.apps.serve.world import LiveCluster
from emu.cluster.plan import Plan
from emu.cluster.prepare import holds_for
from emu.config.schema import Config, LengthsTable, SloTable, SyntheticTable
from emu.log import Format, Level
from emu.replica.states import GPU_ROLE, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.request import Request, Status
from emu.units import NS_PER_MS, NS_PER_S
from emu.workload.synthetic import length_sampler

# --- what the operator's page shows over time, and what it knows of single requests ---------------
# `Trends` takes one point a second of wall time: percentiles of the requests that ended since the
# last point, rates of tokens and of bytes between the replicas, replicas by role. It keeps the last
# `POINTS_MAX` points, so that a page that is opened late shows the past too, and the last
# `REQUESTS_KEPT` requests that ended, for the inspector. All times are emulated.

POINTS_MAX: Final = 600
REQUESTS_KEPT: Final = 512
PAIRS_SHOWN: Final = 64
_PERCENTS: Final = (50, 95)
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
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS_MAX)
        self.ended: deque[Request] = deque(maxlen=REQUESTS_KEPT)
        self._window: list[Request] = []
        self._flows: deque[Counter[tuple[int, int]]] = deque(maxlen=_PAIR_POINTS)
        self._flow_now: Counter[tuple[int, int]] = Counter()
        self._before: dict[str, float] = {"at_s": cluster.kernel.now_ns / NS_PER_S}
        cluster.observers.append(self)

    # --- told by the cluster ------------------------------------------------------------------
    def on_end(self, request: Request) -> None:
        """A request has ended, in whatever way."""
        self.ended.append(request)
        self._window.append(request)

    def on_transfer(
        self, source: ReplicaHandle, destination: ReplicaHandle, size_bytes: int
    ) -> None:
        """KV has gone from one replica to another."""
        self._flow_now[source.replica_id, destination.replica_id] += size_bytes

    # --- once a second ------------------------------------------------------------------------
    def take(self) -> dict[str, Any]:
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
        point: dict[str, Any] = {
            "event": "point",
            "at_s": round(now_s, 3),
            "running": running,
            "waiting": waiting + held,
            "kv_percent": round(100 * used / total, 2) if total else 0.0,
            "roles": dict(sorted(Counter(role_of(r) for r in cluster.replicas).items())),
            "ended": len(window),
            **self._latencies(window),
        }
        span_s = now_s - self._before["at_s"]
        for name, value in {**totals, **moved}.items():
            gained = value - self._before.get(name, 0)
            point[f"{name}_per_s"] = round(gained / span_s, 1) if span_s > 0 else 0.0
        self._before = {"at_s": now_s, **totals, **moved}
        self.points.append(point)
        return point

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

    # --- asked by pages -----------------------------------------------------------------------
    def pairs(self) -> list[list[int]]:
        """[source, destination, bytes] of the last minute, largest first."""
        sums: Counter[tuple[int, int]] = Counter(self._flow_now)
        for flow in self._flows:
            sums.update(flow)
        largest = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:PAIRS_SHOWN]
        return [[source, destination, size] for (source, destination), size in largest]

    def slowest(self, count: int) -> list[dict[str, Any]]:
        """The requests with the longest TTFT among those that ended last."""
        begun = [r for r in self.ended if r.first_token_ns >= 0]
        begun.sort(key=lambda r: (-ttft_ms(r), r.request_id))
        return [described(r) for r in begun[:count]]

    def find(self, request_id: int) -> dict[str, Any] | None:
        """A request that is under way or ended lately."""
        for request in (*self._cluster.under_way(), *self.ended):
            if request.request_id == request_id:
                return described(request)
        return None


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


def described(request: Request) -> dict[str, Any]:
    """What has happened to a request; times are emulated seconds, None = not yet."""

    def at_s(ns: int, delay_ns: int = 0) -> float | None:
        return None if ns < 0 else round((ns + delay_ns) / NS_PER_S, 6)

    return {
        "id": request.request_id,
        "status": request.status.name.lower(),
        "reason": request.reason,
        "tenant": request.tenant,
        "session": request.session_id,
        "priority": request.priority,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.prefix_hit_tokens,
        "generated_tokens": request.generated_tokens,
        "max_output_tokens": request.max_output_tokens,
        "kv_blocks": request.kv_blocks,
        "holder": request.holder_id,
        "replica": request.replica_id,
        "decode_replica": request.decode_replica_id,
        "arrival_s": at_s(request.arrival_ns),
        "first_scheduled_s": at_s(request.first_scheduled_ns),
        "first_token_s": at_s(request.first_token_ns, request.first_out_ns),
        "last_token_s": at_s(request.last_token_ns, request.last_out_ns),
        "migration_ms": round(request.migration_ns / NS_PER_MS, 3),
        "largest_gap_ms": round(request.max_gap_ns / NS_PER_MS, 3),
        "preemptions": request.preemptions,
        "recomputed_tokens": request.recomputed_tokens,
        "migrations": request.migrations,
        "retries": request.retries,
    }


# --- what every endpoint needs --------------------------------------------------------------------
T = TypeVar("T")
ADAPTERS_MAX: Final = 256

S = ReplicaState
_USELESS: Final = frozenset(
    {S.INACTIVE, S.DECODE, S.SHUTTING_COLOCATED, S.SHUTTING_PREFILL, S.SHUTTING_DECODE}
    | {S.SHUTTING_NULL, S.MUTATING_TO_DECODE, S.AUS_DECODE}
)
"""States in which a replica takes no prompts, and from which only a command leads away."""
_BLOCK: Final = 256
_EVENTS_KEPT: Final = 512
_EVENTS_SHOWN: Final = 100
_SPEEDS_KEPT: Final = 10_000


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line of `serve` says."""

    host: str = "127.0.0.1"
    port: int = 8000
    speed: float = 1.0
    api_key: str = ""
    control_token: str = ""
    model_name: str = ""
    model_aliases: tuple[str, ...] = ()
    """Further names under which clients may ask for the model."""
    tokenizer: str = ""
    output_tokens: int = 0
    """Output length when the client gives no limit; 0 = the config's distribution."""
    early_stop: bool = False
    """Answers end by themselves before the client's limit, as drawn from the distribution."""
    max_outstanding: int = 8192
    max_body_mib: float = 16.0
    max_recording_mib: float = 1024.0
    header_timeout_s: float = 10.0
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    strict_pace: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    fleet: bool = False
    """Each replica answers on a port of its own."""
    ports: int = 0
    """The first of these ports; 0 = the port after the server's own."""
    face: str = "vllm"
    kv_lease_s: float = 480.0
    kv_events_port: int | None = None
    wire: str = "vllm-0.19"
    slow_down: str = "off"
    """"auto" lowers the speed while the machine does not keep up."""
    startup_s: float = -1.0
    """Emulated start-up; -1 = loading the weights from host memory."""
    drain_s: float = 30.0
    log_level: Level = "off"
    log_format: Format = "text"


def served_names(plan: Plan) -> tuple[str, ...]:
    """Names that requests and recordings have for their models; empty with one that has none."""
    return plan.models if len(plan.models) > 1 or plan.config.model.served_name else ()


class OutputLengths:
    """How long answers are: (true length, declared limit), in tokens."""

    def __init__(self, config: Config, source: str, options: ServeOptions) -> None:
        table: LengthsTable = (config.workload.synthetic or SyntheticTable()).output
        if options.output_tokens:
            table = LengthsTable(distribution="fixed", value=options.output_tokens)
        self._sampler = length_sampler(
            table, is_prompt=False, base_dir=Path(), seed=config.seed, config_source=source
        )
        self._longest = table.value if table.distribution == "fixed" else table.max
        self._early_stop = options.early_stop
        self._drawn: list[int] = []

    def draw(self, call: Call, room: int) -> tuple[int, int]:
        """Tokens of the next request. A client's limit is reached unless answers may stop early.

        `room` counts the tokens that still fit.
        """
        length = self._next()
        limit = call.max_tokens
        if limit is not None and (call.ignore_eos or not self._early_stop):
            return limit, limit
        limit = min(room, limit if limit is not None else max(self._longest, call.min_tokens))
        return max(min(length, limit), min(call.min_tokens, limit), 1), limit

    def _next(self) -> int:
        if not self._drawn:
            self._drawn = self._sampler.take(_BLOCK).tolist()
            self._drawn.reverse()
        return int(self._drawn.pop())


def weights_from_host_s(plan: Plan) -> float:
    """Longest time, emulated, in which a replica's weights cross from host memory to its GPUs."""
    longest_s = 0.0
    for replica in plan.replicas:
        if replica.role != "inactive":
            node = replica.node
            gbps = node.pcie_gbps if node.pcie_gbps > 0 else replica.gpu.pcie_gbps
            weights = max(replica.memory.physical_weight_bytes)
            longest_s = max(longest_s, weights * 8 / (gbps * 1e9))
    return longest_s


def weights_from_disk_s(plan: Plan) -> float:
    """The same from the disk."""
    return max(
        (
            max(replica.memory.physical_weight_bytes) * 8 / (replica.node.ssd_gbps * 1e9)
            for replica in plan.replicas
            if replica.role != "inactive"
        ),
        default=0.0,
    )


class EventHub:
    """Hands events to all listeners; a listener that is slow loses the oldest ones."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.recent: deque[bytes] = deque(maxlen=_EVENTS_SHOWN)
        """The last events, for listeners that come late; no snapshots."""
        self.is_closed = False

    def publish(self, event: dict[str, Any]) -> None:
        """Give an event to all present listeners."""
        data = msgspec.json.encode(event)
        if event["event"] != "state":
            self.recent.append(data)
        for listener in self.listeners:
            listener.items.append(data)
            listener.changed.set()

    def close(self) -> None:
        """No more events: listeners end."""
        self.is_closed = True
        for listener in self.listeners:
            listener.changed.set()


class Listener:
    """One open event stream."""

    def __init__(self) -> None:
        self.items: deque[bytes] = deque(maxlen=_EVENTS_KEPT)
        self.changed = asyncio.Event()


class House:
    """Shared by all endpoints of one server."""

    def __init__(
        self,
        cluster: LiveCluster,
        plan: Plan,
        tokenizer: Tokenizer,
        options: ServeOptions,
        *,
        startup_ns: int,
    ) -> None:
        self.cluster = cluster
        self.plan = plan
        self.tokenizer = tokenizer
        self.options = options
        self.intake = Intake(cluster.kernel)
        self.speed_changes: list[tuple[float, float]] = []
        """(emulated time, s; speed from then on)."""
        default = plan.default_model
        one = options.model_name or next(iter(served_names(plan)), plan.replicas[0].model.name)
        self.models = plan.models if len(plan.models) > 1 else (one,)
        """What clients ask for, by the index that replicas and requests have."""
        self.model = self.models[default]
        """What a call that names none gets."""
        parts = plan.replicas_of_models.values()
        self.plans = [part[0] for part in parts]
        """A replica of each model."""
        self.holds = [holds_for(msgspec.structs.replace(plan, replicas=tuple(p))) for p in parts]
        """For each model: why no replica could ever serve so many tokens, or empty."""
        self.longest = [max(r.max_model_tokens for r in part) for part in parts]
        self.max_model_tokens = self.longest[default]
        self.lengths = OutputLengths(plan.config, plan.source, options)
        self.failures = FailureSchedule([], seed=plan.config.seed)
        self.failures_returned = 0
        self.piece_bytes = [json.dumps(piece)[1:-1].encode() for piece in tokenizer.pieces]
        self.session = secrets.token_hex(6)
        """Of the ids of answers: no two servers give the same."""
        self.control_token = options.control_token
        if not self.control_token and not is_loopback(options.host):
            self.control_token = secrets.token_urlsafe(16)
        self.startup_ns = startup_ns
        self.is_draining = False
        self.sleep_level = 0
        """As vLLM counts: 1 = weights in host memory, 2 = weights gone, 0 = awake."""
        self.weights_to_host_s = weights_from_host_s(plan)
        self.weights_disk_s = weights_from_disk_s(plan)
        others = [name for i, name in enumerate(self.models) if i != default]
        self.model_names = (self.model, *others, *options.model_aliases)
        self.scripted: dict[str, float] = {}
        """Gauges of engines that show a given figure instead of their own, without `vllm:`."""
        self.adapters: dict[str, str] = {}
        """Names of LoRA adapters that are loaded everywhere, and where they came from."""
        self.adapter_ids: dict[str, int] = {}
        """Numbers that KV events have for adapters, in order of their first load."""
        self.http_refused: dict[int, int] = {}
        """Answers with an error status, by status."""
        self.faults_injected: dict[str, int] = {}
        self.commands_given: dict[tuple[str, str], int] = {}
        self.loop_lag_s = 0.0
        self.loop_lag_max_s = 0.0
        self.drift_s = 0.0
        self.drift_max_s = 0.0
        self.hub = EventHub()
        self.trends = Trends(cluster, plan.config.slo)
        self._calls = 0

    @property
    def speed(self) -> float:
        """Emulated seconds per second, now."""
        return self.cluster.kernel.speed

    def set_speed(self, speed: float, why: str) -> None:
        """Change it from now on, and say so."""
        kernel = self.cluster.kernel
        before = kernel.speed
        kernel.set_speed(speed)
        at_s = kernel.wall_ns() / NS_PER_S
        if len(self.speed_changes) < _SPEEDS_KEPT:
            self.speed_changes.append((at_s, speed))
        text = f"{before:.4g} to {speed:.4g}: {why}"
        self.hub.publish({"event": "speed", "at_s": at_s, "speed": speed, "why": why})
        kernel.enter(lambda: self.cluster.note("speed", "server", text))

    async def enter(self, call: Callable[[], T]) -> T:
        """The result of something that happens in the emulation now."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def happen() -> None:
            value = call()
            if not result.cancelled():
                result.set_result(value)

        self.cluster.kernel.enter(happen)
        return await result

    def next_call(self) -> int:
        """Counts calls."""
        self._calls += 1
        return self._calls

    @property
    def is_ready(self) -> bool:
        """The emulated start-up is over, and the server is not on its way out."""
        kernel = self.cluster.kernel
        return kernel.wall_ns() >= self.startup_ns and not self.is_draining

    def has_adapters(self, model: int) -> bool:
        """Adapters of a model have slots, loads and KV of their own (`scheduler.enable_lora`)."""
        name = self.plan.models[model]
        return all(r.slots("adapter") for r in self.plan.replicas if r.served == name)

    def index_of(self, name: str) -> int:
        """Which model a call asks for; adapters and aliases are the default model's."""
        if name in self.models:
            return self.models.index(name)
        return self.plan.default_model

    def serves(self, model: int = -1) -> bool:
        """Some replica takes prompts, or will without anyone's doing (a fault heals, a planner).

        `model`: an index; -1 = any.
        """
        if self.plan.config.autoscale is not None:
            return True
        replicas = self.cluster.replicas
        return any(r.state not in _USELESS and model in (-1, r.model) for r in replicas)

    @property
    def startup_left_s(self) -> float:
        """Wall time until the start-up ends."""
        left_ns = self.startup_ns - self.cluster.kernel.wall_ns()
        return max(0.0, left_ns / NS_PER_S / self.speed)
