"""The control interface `/emu/...`, and what operators ask: what the cluster does and is told.

Reads: `state` (one snapshot), `history` (a point a second), `events` (server-sent events:
snapshots, points and whatever happens), `requests` (the slowest, or one), `scenario` (the
configuration with all that was done to the cluster), the live page. Writes: `faults`, `scale`,
`commands`, `failures`; each takes effect at the instant it enters, and is written into the
recording, so that a replay does the same.

On a loopback address every client may use it; elsewhere every call needs the control token, as
`Authorization: Bearer`, `X-Emu-Token` or `?token=`. Writes must be JSON by content type; that no
page of another site gets here is what `emu.apps.serve.intake` sees to.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Collection
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from emu.apps.serve.house import ADAPTERS_MAX, REQUESTS_KEPT, House, Listener, described
from emu.apps.serve.protocol import (
    NAME_MAX,
    ApiError,
    FailureRule,
    FailureSchedule,
    decode_body,
    whole,
)
from emu.cluster.commands import RESET, SET_LATENCY, TARGETS
from emu.config.faultkinds import FAULT_KINDS, read_fault
from emu.config.schema import CommandTable
from emu.errors import InputError
from emu.process.prepared import prepared
from emu.replica.states import GPU_ROLE, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.report.page.pages import live_page
from emu.units import NS_PER_S

# --- the control interface ------------------------------------------------------------------------
RULES_MAX: Final = 64
SCRIPTED: Final = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class ScaleBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """So many replicas shall have this role."""

    role: Literal["prefill", "decode", "colocated"]
    replicas: Annotated[int, Meta(ge=0, le=1_000_000)]


class CommandBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """One command to one replica, now."""

    replica: Annotated[int, Meta(ge=0)]
    command: str


class KnobsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What can be turned while the server runs; what is left out stays."""

    speed: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    latency_factors: dict[str, Annotated[float, Meta(ge=0.01, le=1e4)]] | None = None
    """Iterations take so many times longer: of "all", of a role, of the group "replicas.N" of the
    configuration, or of a replica by its id; later keys count."""
    scripted_metrics: dict[str, float] | None = None
    """Gauges that show these figures instead of their own; {} = none."""


class FailuresBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The rules that replace those in force."""

    rules: Annotated[list[FailureRule], Meta(max_length=RULES_MAX)]


def snapshot(house: House) -> dict[str, Any]:
    """The cluster as it is now."""
    cluster = house.cluster
    kernel = cluster.kernel
    replicas = []
    prefill_tokens = decode_tokens = 0
    for replica in cluster.replicas:
        view = replica.view()
        prefill, decode = view.tokens_produced
        prefill_tokens += prefill
        decode_tokens += decode
        replicas.append(
            {
                "id": replica.replica_id,
                "state": replica.state.value,
                "gpus": len(replica.gpus),
                "machine": replica.machine,
                "running": view.running_count,
                "waiting": view.waiting_count,
                "blocks_used": view.blocks_used,
                "blocks_total": view.blocks_total,
                "slowdown": replica.slowdown,
                "commands": [c for c, state in TARGETS if state is replica.state],
            }
        )
    gateway = cluster.gateway
    return {
        "event": "state",
        "at_s": kernel.wall_ns() / NS_PER_S,
        "speed": house.speed,
        "model": ", ".join(house.models) if len(house.models) > 1 else house.model,
        "is_ready": house.is_ready,
        "startup_left_s": round(house.startup_left_s, 3),
        "is_draining": house.is_draining,
        "outstanding": gateway.outstanding,
        "held": len(gateway.held) + sum(map(len, gateway.queues)),
        "replicas": replicas,
        "flows": cluster.network.active,
        "moved_bytes": cluster.network.moved_bytes,
        "prefill_tokens": prefill_tokens,
        "decode_tokens": decode_tokens,
        "ended": cluster.stats.by_status,
        "latencies": _latencies(house),
        "planner": _planner(house),
        "pairs": house.trends.pairs(),
        "pace": {
            "verdict": cluster.pace.verdict,
            "requests": cluster.pace.requests,
            "late": cluster.pace.late,
            "worst_s": round(cluster.pace.worst_s, 4),
            "first_late_s": round(cluster.pace.first_late_s, 3),
            "is_late_now": cluster.pace.late_since_s >= 0,
        },
        "drift_s": round(house.drift_s, 6),
        "loop_lag_s": round(house.loop_lag_s, 6),
        "failures_returned": house.failures_returned,
        "faults": sum(cluster.faults.struck.values()),
        "faults_in_force": [
            {
                "number": number,
                "kind": one.fault.kind,
                "target": one.target,
                "at_s": one.since_ns / NS_PER_S,
                "until_s": one.until_s,
            }
            for number, one in cluster.faults.in_force.items()
        ],
    }


def _planner(house: House) -> dict[str, Any] | None:
    """What the planner saw and wanted last; None without autoscaling."""
    scaler = house.cluster.scalers[0]
    table = house.plan.config.autoscale
    if table is None or not scaler.is_active:
        return None
    requests, tokens, outstanding = house.cluster.pools[0].waiting()
    demand = scaler.last_demand
    return {
        "name": table.preset or table.planner,
        "looks": scaler.ticks,
        "scale_ups": scaler.scale_ups,
        "scale_downs": scaler.scale_downs,
        "waiting_requests": requests,
        "waiting_tokens": tokens,
        "outstanding": outstanding,
        "tokens_in_migration": house.cluster.tokens_in_migration,
        "looked_s": round(scaler.looked_ns / NS_PER_S, 3),
        "wanted": {
            "prefill": demand.prefill,
            "decode": demand.decode,
            "colocated": demand.colocated,
            **demand.figures,
        },
    }


def _latencies(house: House) -> dict[str, dict[str, float]]:
    """Percentiles of the last completed requests, ms."""
    recent = house.cluster.stats.recent
    if not recent:
        return {}
    table = np.percentile(np.array(recent) * 1e3, [50, 90, 99], axis=0)
    return {
        name: {
            f"p{q}": round(float(value), 3) for q, value in zip((50, 90, 99), column, strict=True)
        }
        for name, column in zip(("ttft_ms", "tpot_ms", "e2e_ms"), table.T, strict=True)
    }


def check_control(house: House, request: HttpRequest) -> None:
    """Raises ApiError without the token, where one is needed."""
    token = house.control_token
    if not token:
        return
    given = request.headers.get("x-emu-token") or request.query_params.get("token") or ""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if not given and scheme.lower() == "bearer":
        given = value
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise ApiError(401, "the control token is missing or wrong")


_ROLES: Final = ("colocated", "prefill", "decode")


# --- writes -------------------------------------------------------------------------------------
def command_now(
    house: House, replica: ReplicaHandle, command: str, factor: float | None = None
) -> str:
    """Issue a command now, inside the emulation, and write it down: "done" or "refused"."""
    cluster = house.cluster
    now_s = cluster.kernel.now_ns / NS_PER_S
    given = {"at_s": now_s, "replica": replica.replica_id, "command": command, "factor": factor}
    table = msgspec.convert(given, prepared(CommandTable))
    steps_alone = not house.plan.replicas[replica.replica_id].data_parallel_group
    if steps_alone or not table.is_of_roles:
        is_done = cluster.commander.issue(replica, table)
    else:
        is_done = cluster.commander.refuse(replica, table, "steps together with others")
    outcome = "done" if is_done else "refused"
    count = house.commands_given.get((command, outcome), 0)
    house.commands_given[command, outcome] = count + 1
    if is_done:
        cluster.tape.replay.add(table)
        if factor is None:
            cluster.note("command", f"replica {replica.replica_id}", command)
    return outcome


class Control:
    """The endpoints over one house."""

    def __init__(self, house: House) -> None:
        self._house = house
        recorder = house.cluster.tape
        recorder.on_event = house.hub.publish

    def routes(self) -> list[Route]:
        """Everything under `/emu`."""
        return [
            Route("/", self._guard(self.page)),
            Route("/emu", self._guard(self.page)),
            Route("/emu/state", self._guard(self.state)),
            Route("/emu/events", self._guard(self.events)),
            Route("/emu/history", self._guard(self.history)),
            Route("/emu/requests", self._guard(self.requests)),
            Route("/emu/requests/{number:int}", self._guard(self.request)),
            Route("/emu/scenario", self._guard(self.scenario)),
            Route("/emu/faults", self._guard(self.faults), methods=["POST"]),
            Route("/emu/faults/{number:int}", self._guard(self.undo), methods=["DELETE"]),
            Route("/emu/scale", self._guard(self.scale), methods=["POST"]),
            Route("/emu/commands", self._guard(self.commands), methods=["POST"]),
            Route("/emu/knobs", self._guard(self.knobs), methods=["GET", "POST"]),
            Route("/emu/failures", self._guard(self.failures), methods=["GET", "POST"]),
        ]

    def _guard(self, endpoint: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
        async def guarded(request: HttpRequest) -> Response:
            if request.method == "POST":
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise ApiError(400, "control calls need content-type: application/json")
            check_control(self._house, request)
            response: Response = await endpoint(request)
            return response

        return guarded

    def _check_room(self) -> None:
        if self._house.cluster.tape.replay.is_full:
            raise ApiError(429, "the recording holds no more commands and faults")

    async def page(self, request: HttpRequest) -> Response:
        """The live page."""
        slo = self._house.plan.config.slo
        facts = {
            "faults": _fault_forms(),
            "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "e2e_ms": slo.e2e_ms},
            "replicas": len(self._house.cluster.replicas),
            "is_disaggregated": bool(self._house.cluster.watchers),
        }
        return HTMLResponse(live_page(facts))

    async def state(self, request: HttpRequest) -> Response:
        """One snapshot."""
        return JSONResponse(snapshot(self._house))

    async def history(self, request: HttpRequest) -> Response:
        """A point for each second, the oldest first."""
        return JSONResponse({"points": list(self._house.trends.points)})

    async def requests(self, request: HttpRequest) -> Response:
        """The requests with the longest TTFT among those that ended last, and what is under way."""
        count = request.query_params.get("count", "12")
        if not (count.isascii() and count.isdigit() and 1 <= int(count) <= REQUESTS_KEPT):
            raise ApiError(400, f"count is 1 to {REQUESTS_KEPT}", param="count")
        trends = self._house.trends
        oldest = self._house.cluster.under_way()[: int(count)]
        return JSONResponse(
            {
                "slowest": trends.slowest(int(count)),
                "under_way": [described(one) for one in oldest],
            }
        )

    async def request(self, request: HttpRequest) -> Response:
        """One request."""
        number = request.path_params["number"]
        found = self._house.trends.find(number)
        if found is None:
            problem = f"request {number} is not under way, nor among the last {REQUESTS_KEPT}"
            raise ApiError(404, problem, param="number")
        return JSONResponse(found)

    async def scenario(self, request: HttpRequest) -> Response:
        """The configuration with every command and fault so far, as a cluster file."""
        text = self._house.cluster.tape.replay.scenario()
        headers = {"content-disposition": 'attachment; filename="scenario.toml"'}
        return Response(text, media_type="application/toml", headers=headers)

    async def events(self, request: HttpRequest) -> Response:
        """A snapshot, what happened last, then snapshots and events as they happen."""
        hub = self._house.hub
        listener = Listener()
        hub.listeners.append(listener)
        listener.items.append(msgspec.json.encode(snapshot(self._house)))
        listener.items.extend(hub.recent)
        listener.changed.set()

        async def stream() -> AsyncIterator[bytes]:
            try:
                while not hub.is_closed:
                    await listener.changed.wait()
                    listener.changed.clear()
                    while listener.items:
                        yield b"data: " + listener.items.popleft() + b"\n\n"
            finally:
                hub.listeners.remove(listener)

        return StreamingResponse(
            stream(), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def commands(self, request: HttpRequest) -> Response:
        """One command to one replica."""
        body = decode_body(await request.body(), CommandBody)
        self._check_room()
        known = {RESET, *(name for name, _ in TARGETS)}
        if body.command not in known:
            raise ApiError(400, f"commands are {', '.join(sorted(known))}", param="command")
        house = self._house
        replicas = house.cluster.replicas
        is_planned = len(house.models) > 1 and house.plan.config.autoscale is not None
        if is_planned and body.command != RESET:
            raise ApiError(409, "models that share GPUs are loaded by the planner alone")
        if body.replica >= len(replicas):
            problem = f"there is no replica {body.replica}, the last one is {len(replicas) - 1}"
            raise ApiError(404, problem, param="replica")
        outcome = await house.enter(
            lambda: command_now(house, replicas[body.replica], body.command)
        )
        if outcome == "refused":
            raise ApiError(409, self._house.cluster.commander.refused[-1].partition(": ")[2])
        return JSONResponse({"replica": body.replica, "command": body.command, "outcome": outcome})

    async def scale(self, request: HttpRequest) -> Response:
        """Give so many replicas a role, by commands: idle ones first, highest ids leave first."""
        body = decode_body(await request.body(), ScaleBody)
        self._check_room()
        if len(self._house.models) > 1:
            raise ApiError(409, "roles can be scaled where one model is served")
        done = await self._house.enter(lambda: self._scale(body))
        if done is None:
            problem = f"there are not {body.replicas} replicas that can be {body.role} now"
            raise ApiError(409, problem, param="replicas")
        serving = sum(
            GPU_ROLE[r.state] == body.role and not r.state.value.startswith("shutting")
            for r in self._house.cluster.replicas
        )
        return JSONResponse({"role": body.role, "replicas": serving, "commands": done})

    def _scale(self, body: ScaleBody) -> list[dict[str, Any]] | None:
        """What was commanded; None, and nothing is, if there are not so many replicas."""
        cluster = self._house.cluster
        serving = [
            r
            for r in cluster.replicas
            if GPU_ROLE[r.state] == body.role and not r.state.value.startswith("shutting")
        ]
        command, candidates = f"to_{body.role}", []
        if len(serving) < body.replicas:
            ready = [r for r in cluster.replicas if r not in serving]
            # A draining or warm replica still has its weights; a prefill replica that serves is
            # not taken away for decoding.
            candidates = [
                r for r in ready if (command, r.state) in TARGETS and r.state.value != "prefill"
            ]
            if len(serving) + len(candidates) < body.replicas:
                return None
            candidates.sort(key=lambda r: (r.state.value == "inactive", r.replica_id))
            candidates = candidates[: body.replicas - len(serving)]
        elif len(serving) > body.replicas:
            command = "deactivate"
            candidates = [r for r in reversed(serving) if (command, r.state) in TARGETS]
            candidates = candidates[: len(serving) - body.replicas]
        return [
            {
                "replica": r.replica_id,
                "command": command,
                "outcome": command_now(self._house, r, command),
            }
            for r in candidates
        ]

    async def faults(self, request: HttpRequest) -> Response:
        """Inject a fault now: a table of `[[faults]]` without `at_s`."""
        house = self._house
        cluster = house.cluster
        raw = decode_body(await request.body(), dict[str, Any])
        if "at_s" in raw:
            raise ApiError(400, "at_s: a fault from here strikes now, leave it out", param="at_s")
        self._check_room()
        try:
            fault = read_fault({k: whole(v) for k, v in raw.items()})
        except (msgspec.ValidationError, InputError) as error:
            raise ApiError(400, str(error)) from None

        def strike() -> str:
            table = msgspec.structs.replace(fault, at_s=cluster.kernel.now_ns / NS_PER_S)
            try:
                cluster.inject(table)
            except InputError as error:
                return str(error)
            house.faults_injected[fault.kind] = house.faults_injected.get(fault.kind, 0) + 1
            cluster.tape.replay.add(table)
            return ""

        problem = await house.enter(strike)
        if problem:
            raise ApiError(400, problem)
        return JSONResponse({"kind": fault.kind, "outcome": "injected"})

    async def undo(self, request: HttpRequest) -> Response:
        """End a fault that is in force; the recording gets the duration that it had."""
        cluster = self._house.cluster
        number = request.path_params["number"]

        def end() -> str:
            if number not in cluster.faults.in_force:
                return ""
            asked, lasted = cluster.faults.undo(number)
            cluster.tape.replay.amend(asked, lasted)
            return asked.kind

        kind = await self._house.enter(end)
        if not kind:
            raise ApiError(404, f"no fault {number} is in force", param="number")
        return JSONResponse({"kind": kind, "outcome": "over"})

    async def knobs(self, request: HttpRequest) -> Response:
        """Speed and scripted metrics: read them, or turn them."""
        house = self._house
        if request.method == "POST":
            body = decode_body(await request.body(), KnobsBody)
            for name, value in (body.scripted_metrics or {}).items():
                if name not in SCRIPTED:
                    problem = f"metrics that can be scripted are {', '.join(SCRIPTED)}"
                    raise ApiError(400, problem, param="scripted_metrics")
                if not 0 <= value <= (1 if name == "kv_cache_usage_perc" else 1e9):
                    raise ApiError(400, f"{name} is out of range", param="scripted_metrics")
            if body.latency_factors:
                self._check_room()
                await self._set_latency(body.latency_factors)
            if body.scripted_metrics is not None:
                house.scripted = body.scripted_metrics
            if body.speed is not None and body.speed != house.speed:
                house.set_speed(body.speed, "asked for")
        factors = house.cluster.commander.latency_factors
        turned = {str(k): factor for k, factor in sorted(factors.items()) if factor != 1.0}
        return JSONResponse(
            {
                "speed": house.speed,
                "latency_factors": turned,
                "scripted_metrics": house.scripted,
            }
        )

    async def _set_latency(self, factors: dict[str, float]) -> None:
        """Raises ApiError for a key that names nothing; then nothing is changed."""
        house = self._house
        replicas, plans = house.cluster.replicas, house.plan.replicas
        for key in factors:
            group = key.removeprefix("replicas.")
            is_group = group != key and any(group == str(plan.group) for plan in plans)
            is_replica = any(key == str(replica.replica_id) for replica in replicas)
            if not (key in ("all", *_ROLES) or is_group or is_replica):
                known = f"all, {', '.join(_ROLES)}, replicas.N and ids of replicas"
                problem = f"latency_factors has the keys {known}, not {key!r}"
                raise ApiError(400, problem, param="latency_factors")

        def turn() -> None:
            wanted: dict[int, float] = {}
            for key, factor in factors.items():
                for replica, plan in zip(replicas, plans, strict=True):
                    names = ("all", GPU_ROLE[replica.state], f"replicas.{plan.group}")
                    if key in (*names, str(replica.replica_id)):
                        wanted[replica.replica_id] = factor
            turned = house.cluster.commander.latency_factors
            for replica_id, factor in sorted(wanted.items()):
                if turned.get(replica_id, 1.0) != factor:
                    command_now(house, replicas[replica_id], SET_LATENCY, factor)
            for key, factor in factors.items():  # a line for a knob, not for each replica
                target = f"replica {key}" if key.isdigit() else key
                house.cluster.note("command", target, f"{SET_LATENCY} {factor:g}")

        await house.enter(turn)

    async def failures(self, request: HttpRequest) -> Response:
        """The failure schedule of the HTTP layer: read it, or replace it."""
        house = self._house
        if request.method == "POST":
            body = decode_body(await request.body(), FailuresBody)
            if FailureRule() in body.rules:  # a slip of the pen, with which no call would pass
                index = body.rules.index(FailureRule())
                problem = (
                    f"rules[{index}] is empty and would fail every call; say which calls fail, "
                    "or with which status"
                )
                raise ApiError(400, problem, param=f"rules[{index}]")
            house.failures = FailureSchedule(body.rules, seed=house.plan.config.seed)
        rules = msgspec.to_builtins(house.failures.rules)
        return JSONResponse({"rules": rules, "returned": house.failures_returned})


def _fault_forms() -> list[dict[str, Any]]:
    """The kinds of faults that the page can inject, and the keys that it fills in."""
    forms = []
    for name, kind in FAULT_KINDS.items():
        keys = [group[0] for group in kind.one_of]
        if "request" in keys or "stage" in keys:
            continue
        if kind.takes_duration:
            keys.append("duration_s")
        if kind.size and not kind.may_magnitude:
            keys.append(kind.size)
        forms.append({"kind": name, "text": kind.text, "keys": keys, "size": kind.size})
    return forms


# --- operators: an engine's calls as vLLM has them, Kubernetes' `scale` ---------------------------
# --------------------------------------------------------------------------------------------------
# What vLLM lets an operator do to an engine: sleep, wake up, forget prefixes, adapters.
#
# Emulated cost. Going to sleep ends what is under way (`mode=abort`) or waits for it (`wait`), and
# at level 1 copies the weights to host memory over PCIe; waking up copies them back (level 1) or
# loads them from the disk (level 2). A call returns when the emulated time has passed. Forgetting
# prefixes is a command of the recording (`reset_prefix_cache`), so that a replay forgets them at
# the same instant; as in vLLM the answer is 200 whether or not it succeeded, and the body says
# which.
#
# Adapters of a configuration with `scheduler.enable_lora` have slots and KV of their own, and the
# first step that runs one loads it. Without that they are names on the server's own port, which
# cost no memory and no time, and the ports of a fleet have none.


class AdapterBody(Struct, kw_only=True):
    """`/v1/load_lora_adapter`, `/v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
    lora_path: Annotated[str, Meta(max_length=4096)] = ""
    load_inplace: bool | None = False


class EngineControl:
    """The endpoints over one house."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._changing = asyncio.Lock()

    def routes(self) -> list[Route]:
        """What needs vLLM's development mode there."""
        return [
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake_up, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
        ]

    async def sleep(self, request: HttpRequest) -> Response:
        """End or await what is under way, drop the KV, move the weights."""
        house = self._house
        check_control(house, request)
        level = request.query_params.get("level", "1")
        mode = request.query_params.get("mode", "abort")
        if level not in ("1", "2"):
            raise ApiError(400, "level is 1 or 2", param="level")
        if mode not in ("abort", "wait"):
            raise ApiError(400, "mode is abort or wait (keep is not emulated)", param="mode")
        async with self._changing:
            if house.sleep_level:
                return Response()
            house.sleep_level = int(level)
            if mode == "abort":
                house.cluster.leave_all()
            while house.cluster.open_choices:  # noqa: ASYNC110 (ends with the last answer)
                await asyncio.sleep(0.005)
            await self._reset()
            if level == "1":
                await self._pass_s(house.weights_to_host_s)
        return Response()

    async def wake_up(self, request: HttpRequest) -> Response:
        """The weights come back."""
        house = self._house
        check_control(house, request)
        if request.query_params.get("tags"):
            raise ApiError(400, "tags are not emulated: everything wakes up", param="tags")
        async with self._changing:
            if house.sleep_level:
                from_host = house.sleep_level == 1
                await self._pass_s(house.weights_to_host_s if from_host else house.weights_disk_s)
                house.sleep_level = 0
        return Response()

    async def is_sleeping(self, request: HttpRequest) -> Response:
        """Whether it sleeps."""
        return JSONResponse({"is_sleeping": self._house.sleep_level > 0})

    async def reset_prefix_cache(self, request: HttpRequest) -> Response:
        """Forget cached prefixes on every replica that has nothing to do."""
        check_control(self._house, request)
        if request.query_params.get("reset_running_requests", "false").lower() == "true":
            raise ApiError(
                400, "running requests are not preempted", param="reset_running_requests"
            )
        done = await self._reset()
        return JSONResponse({"success": all(done), "replicas": sum(done)})

    async def _reset(self) -> list[bool]:
        house = self._house
        replicas = house.cluster.replicas
        return await house.enter(lambda: [command_now(house, r, RESET) == "done" for r in replicas])

    async def _pass_s(self, emulated_s: float) -> None:
        """Let emulated time go by."""
        kernel = self._house.cluster.kernel
        end_ns = kernel.wall_ns() + round(emulated_s * NS_PER_S)
        while (left_ns := end_ns - kernel.wall_ns()) > 0:  # noqa: ASYNC110 (the speed may change)
            await asyncio.sleep(min(0.05, left_ns / NS_PER_S / kernel.speed))

    # --- adapters -----------------------------------------------------------------------------
    async def load_adapter(self, request: HttpRequest) -> Response:
        """A further name that can be asked for."""
        house = self._house
        check_control(house, request)
        if len(house.models) > 1:
            raise ApiError(400, "adapters are for a server of one model", type="InvalidUserInput")
        body = decode_body(await request.body(), AdapterBody)
        return load_adapter(house, house.adapters, body, house.adapters)

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """The name is gone."""
        house = self._house
        check_control(house, request)
        return unload_adapter(house.adapters, decode_body(await request.body(), AdapterBody))


def load_adapter(
    house: House, adapters: dict[str, str], body: AdapterBody, known: Collection[str]
) -> Response:
    """Add an adapter to those of the server or of a port, where `known` ones are there already.

    Raises ApiError, in vLLM's words.
    """
    name = body.lora_name
    if not body.lora_path:
        raise ApiError(400, "lora_path is missing", param="lora_path")
    if name in house.model_names or (name in known and not body.load_inplace):
        problem = f"The lora adapter '{name}' has already been loaded."
        raise ApiError(400, problem, type="InvalidUserInput")
    if len(adapters) >= ADAPTERS_MAX and name not in adapters:
        raise ApiError(400, f"at most {ADAPTERS_MAX} adapters", type="InvalidUserInput")
    adapters[name] = body.lora_path
    house.adapter_ids.setdefault(name, len(house.adapter_ids) + 1)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def unload_adapter(adapters: dict[str, str], body: AdapterBody) -> Response:
    """Take it away; requests that have begun with it go on. Raises ApiError."""
    name = body.lora_name
    if adapters.pop(name, None) is None:
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.", type="NotFoundError")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


# --------------------------------------------------------------------------------------------------
# Kubernetes' `scale` sub-resource for the roles of the cluster: what an outside autoscaler writes.
#
#     GET, PUT, PATCH /apis/apps/v1/namespaces/NS/deployments/ROLE/scale
#
# ROLE is colocated, prefill or decode; any namespace will do. `spec.replicas` is what was asked
# for, `status.replicas` what serves: a replica that is added first loads its weights from host
# memory, in emulated time. Asking for more than there are GPUs for is 403, as a quota says it, a
# stale `resourceVersion` 409, a negative number 422.

ROLES: Final = ("colocated", "prefill", "decode")
_REASONS: Final = {400: "BadRequest", 403: "Forbidden", 404: "NotFound", 409: "Conflict"}
SCALE_PATH: Final = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"


class _Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Scale:
    """The endpoints over one house."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._wanted: dict[str, int] = {}
        self._version = 1
        self._starting: dict[str, set[int]] = {role: set() for role in ROLES}
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        """The one path."""
        return [Route(SCALE_PATH, self.scale, methods=["GET", "PUT", "PATCH"])]

    async def scale(self, request: HttpRequest) -> Response:
        """Read or write."""
        check_control(self._house, request)
        name = request.path_params["name"]
        try:
            if name not in ROLES:
                raise _Refused(404, f'deployments.apps "{name}" not found')
            if len(self._house.models) > 1:
                raise _Refused(404, "roles can be scaled where one model is served")
            if request.method != "GET":
                await self._write(name, await request.body())
        except _Refused as refused:
            reason = _REASONS.get(refused.code, "Invalid")
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
            body |= {"message": str(refused), "reason": reason}
            return JSONResponse({**body, "code": refused.code}, status_code=refused.code)
        return JSONResponse(self._answer(name, request.path_params["namespace"]))

    def _answer(self, role: str, namespace: str) -> dict[str, Any]:
        existing = len(self._serving(role))
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {
                "name": role,
                "namespace": namespace,
                "resourceVersion": str(self._version),
            },
            "spec": {"replicas": self._wanted.get(role, existing)},
            "status": {"replicas": existing, "selector": f"app={role}"},
        }

    def _serving(self, role: str) -> list[ReplicaHandle]:
        return [
            r
            for r in self._house.cluster.replicas
            if GPU_ROLE[r.state] == role and not r.state.value.startswith("shutting")
        ]

    async def _write(self, role: str, data: bytes) -> None:
        try:
            body = msgspec.json.decode(data)
            wanted = body["spec"]["replicas"]
            version = body.get("metadata", {}).get("resourceVersion")
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            raise _Refused(400, "the body is not a Scale with spec.replicas") from None
        if isinstance(wanted, bool) or not isinstance(wanted, int):
            raise _Refused(400, "spec.replicas is a whole number")
        if wanted < 0:
            raise _Refused(422, f'Scale "{role}" is invalid: spec.replicas: {wanted} is below 0')
        if version not in (None, "", str(self._version)):
            raise _Refused(409, "the object has been modified; apply your changes to the latest")
        serving, starting = self._serving(role), self._starting[role]
        missing = wanted - len(serving) - len(starting)
        free = self._free()
        if missing > len(free):
            most = len(serving) + len(starting) + len(free)
            problem = f"exceeded quota: there are GPUs for {most} {role} replicas, not {wanted}"
            raise _Refused(403, problem)
        self._wanted[role] = wanted
        self._version += 1
        for replica in free[: max(0, missing)]:
            starting.add(replica.replica_id)
            task = asyncio.create_task(self._start(role, replica))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if missing < 0:
            await self._remove(role, -missing)

    def _free(self) -> list[ReplicaHandle]:
        taken = set().union(*self._starting.values())
        return [
            r
            for r in self._house.cluster.replicas
            if r.state is ReplicaState.INACTIVE and r.replica_id not in taken
        ]

    async def _start(self, role: str, replica: ReplicaHandle) -> None:
        """The weights arrive, then it serves (unless it is no longer wanted)."""
        house = self._house
        kernel = house.cluster.kernel
        end_ns = kernel.wall_ns() + round(house.weights_to_host_s * NS_PER_S)
        starting = self._starting[role]
        while (left_ns := end_ns - kernel.wall_ns()) > 0:  # noqa: ASYNC110 (the speed may change)
            await asyncio.sleep(min(0.05, left_ns / NS_PER_S / kernel.speed))
        if replica.replica_id in starting:
            starting.discard(replica.replica_id)
            await house.enter(lambda: command_now(house, replica, f"to_{role}"))

    async def _remove(self, role: str, count: int) -> None:
        """Those that start first, then the highest ids."""
        starting, house = self._starting[role], self._house
        for replica_id in sorted(starting, reverse=True)[:count]:
            starting.discard(replica_id)
            count -= 1
        leaving = [r for r in reversed(self._serving(role)) if ("deactivate", r.state) in TARGETS]
        for replica in leaving[:count]:
            await house.enter(lambda r=replica: command_now(house, r, "deactivate"))  # type: ignore[misc]
