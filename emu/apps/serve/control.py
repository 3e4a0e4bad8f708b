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

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import decode_body, whole
from emu.apps.serve.event_hub import Listener
from emu.apps.serve.failures import FailureRule, FailureSchedule
from emu.apps.serve.operations import EVENTS, JSON, Access, Handler, Operation
from emu.apps.serve.request_story import story_of
from emu.apps.serve.service import KvNoise, Service, command_now, inject_now
from emu.apps.serve.snapshot import snapshot
from emu.apps.serve.trends import REQUESTS_KEPT
from emu.cluster.commands import RESET, SET_LATENCY, TARGETS
from emu.config.faultkinds import FAULT_KINDS, read_fault
from emu.errors import InputError
from emu.replica.states import GPU_ROLE
from emu.report.page.pages import live_page

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
    stale_metrics_s: dict[str, Annotated[float, Meta(ge=0, le=86_400)]] | None = None
    """For so long the page of a replica's port stays as it is; keys are ids, or "all"."""
    kv_noise: KvNoise | None = None
    """What happens to KV events on their way."""


class FailuresBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The rules that replace those in force."""

    rules: Annotated[list[FailureRule], Meta(max_length=RULES_MAX)]


_ROLES: Final = ("colocated", "prefill", "decode")


class Control:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        recorder = service.cluster.tape
        recorder.on_event = service.hub.publish

    def operations(self) -> list[Operation]:
        """Everything under `/emu`."""
        return [*self._reads(), *self._writes()]

    def _reads(self) -> list[Operation]:
        def row(
            path: str,
            handler: Handler,
            summary: str,
            answer: str = "",
            kind: str = JSON,
            statuses: tuple[int, ...] = (),
        ) -> Operation:
            call, control = f"GET {path}", Access.CONTROL
            return Operation(
                call, handler, summary, None, answer, kind, statuses=statuses, access=control
            )

        toml = "application/toml"
        return [
            *(row(path, self.page, "The live page", kind="text/html") for path in ("/", "/emu")),
            row("/emu/state", self.state, "A snapshot", "State"),
            row("/emu/events", self.events, "Snapshots and events", kind=EVENTS),
            row("/emu/history", self.history, "Points over time", "Points"),
            row("/emu/requests", self.requests, "Slowest requests", "Requests", statuses=(400,)),
            row("/emu/requests/{number:int}", self.request, "One request", "Request", JSON, (404,)),
            row("/emu/scenario", self.scenario, "The session as a cluster file", kind=toml),
            row("/emu/knobs", self.knobs, "Knobs", "Answer"),
            row("/emu/failures", self.failures, "Failure schedule in force", "Failures"),
        ]

    def _writes(self) -> list[Operation]:
        def row(
            path: str,
            handler: Handler,
            summary: str,
            body: type | str,
            answer: str,
            statuses: tuple[int, ...] = (400, 404, 409),
        ) -> Operation:
            call, access = f"POST {path}", Access.CONTROL_JSON
            return Operation(call, handler, summary, body, answer, statuses=statuses, access=access)

        return [
            row("/emu/faults", self.faults, "Inject", "FaultBody", "Outcome"),
            Operation(
                "DELETE /emu/faults/{number:int}",
                self.undo,
                "End a fault",
                answer="Outcome",
                statuses=(404,),
                access=Access.CONTROL,
            ),
            row("/emu/commands", self.commands, "Command", CommandBody, "Outcome"),
            row("/emu/scale", self.scale, "Scale a role", ScaleBody, "Scaled"),
            row("/emu/knobs", self.turn_knobs, "Turn them", KnobsBody, "Answer", (400,)),
            row("/emu/failures", self.fail, "Replace it", FailuresBody, "Failures", (400,)),
        ]

    def _check_room(self) -> None:
        if self._service.cluster.tape.replay.is_full:
            raise ApiError(429, "the recording holds no more commands and faults")

    async def page(self, request: HttpRequest) -> Response:
        """The live page."""
        slo = self._service.plan.config.slo
        facts = {
            "faults": _fault_forms(),
            "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "e2e_ms": slo.e2e_ms},
            "replicas": len(self._service.cluster.replicas),
            "ports": self._service.ports,
            "is_disaggregated": bool(self._service.cluster.watchers),
        }
        return HTMLResponse(live_page(facts))

    async def state(self, request: HttpRequest) -> Response:
        """One snapshot."""
        return _json(snapshot(self._service))

    async def history(self, request: HttpRequest) -> Response:
        """A point for each second, and for each half minute before; the oldest first."""
        return JSONResponse({"points": self._service.trends.history()})

    async def requests(self, request: HttpRequest) -> Response:
        """The requests with the longest TTFT among those that ended last, and what is under way."""
        count = request.query_params.get("count", "12")
        if not (count.isascii() and count.isdigit() and 1 <= int(count) <= REQUESTS_KEPT):
            raise ApiError(400, f"count is 1 to {REQUESTS_KEPT}", param="count")
        trends = self._service.trends
        oldest = self._service.cluster.under_way()[: int(count)]
        under_way = [story_of(one) for one in oldest]
        return _json({"slowest": trends.slowest(int(count)), "under_way": under_way})

    async def request(self, request: HttpRequest) -> Response:
        """One request."""
        number = request.path_params["number"]
        found = self._service.trends.find(number)
        if found is None:
            problem = f"request {number} is not under way, nor among the last {REQUESTS_KEPT}"
            raise ApiError(404, problem, param="number")
        return _json(found)

    async def scenario(self, request: HttpRequest) -> Response:
        """The configuration with every command and fault so far, as a cluster file."""
        text = self._service.cluster.tape.replay.scenario()
        headers = {"content-disposition": 'attachment; filename="scenario.toml"'}
        return Response(text, media_type="application/toml", headers=headers)

    async def events(self, request: HttpRequest) -> Response:
        """A snapshot, what happened last, then snapshots and events as they happen."""
        hub = self._service.hub
        listener = Listener()
        hub.listeners.append(listener)
        listener.items.append(msgspec.json.encode(snapshot(self._service)))
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
        service = self._service
        replicas = service.cluster.replicas
        is_planned = len(service.models) > 1 and service.plan.config.autoscale is not None
        if is_planned and body.command != RESET:
            raise ApiError(409, "models that share GPUs are loaded by the planner alone")
        if body.replica >= len(replicas):
            problem = f"there is no replica {body.replica}, the last one is {len(replicas) - 1}"
            raise ApiError(404, problem, param="replica")
        outcome = await service.enter(
            lambda: command_now(service, replicas[body.replica], body.command)
        )
        if outcome == "refused":
            raise ApiError(409, self._service.cluster.commander.refused[-1].partition(": ")[2])
        return JSONResponse({"replica": body.replica, "command": body.command, "outcome": outcome})

    async def scale(self, request: HttpRequest) -> Response:
        """Give so many replicas a role, by commands: idle ones first, highest ids leave first."""
        body = decode_body(await request.body(), ScaleBody)
        self._check_room()
        if len(self._service.models) > 1:
            raise ApiError(409, "roles can be scaled where one model is served")
        done = await self._service.enter(lambda: self._scale(body))
        if done is None:
            problem = f"there are not {body.replicas} replicas that can be {body.role} now"
            raise ApiError(409, problem, param="replicas")
        serving = sum(
            GPU_ROLE[r.state] == body.role and not r.state.value.startswith("shutting")
            for r in self._service.cluster.replicas
        )
        return JSONResponse({"role": body.role, "replicas": serving, "commands": done})

    def _scale(self, body: ScaleBody) -> list[dict[str, object]] | None:
        """What was commanded; None, and nothing is, if there are not so many replicas."""
        cluster = self._service.cluster
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
                "outcome": command_now(self._service, r, command),
            }
            for r in candidates
        ]

    async def faults(self, request: HttpRequest) -> Response:
        """Inject a fault now: a table of `[[faults]]` without `at_s`."""
        service = self._service
        raw = decode_body(await request.body(), dict[str, object])
        if "at_s" in raw:
            raise ApiError(400, "at_s: a fault from here strikes now, leave it out", param="at_s")
        self._check_room()
        try:
            fault = read_fault({k: whole(v) for k, v in raw.items()})
        except (msgspec.ValidationError, InputError) as error:
            raise ApiError(400, str(error)) from None

        problem = await service.enter(lambda: inject_now(service, fault))
        if problem:
            raise ApiError(400, problem)
        return JSONResponse({"kind": fault.kind, "outcome": "injected"})

    async def undo(self, request: HttpRequest) -> Response:
        """End a fault that is in force; the recording gets the duration that it had."""
        cluster = self._service.cluster
        number = request.path_params["number"]

        def end() -> str:
            if number not in cluster.faults.in_force:
                return ""
            asked, lasted = cluster.faults.undo(number)
            cluster.tape.replay.amend(asked, lasted)
            return asked.kind

        kind = await self._service.enter(end)
        if not kind:
            raise ApiError(404, f"no fault {number} is in force", param="number")
        return JSONResponse({"kind": kind, "outcome": "over"})

    async def knobs(self, request: HttpRequest) -> Response:
        """Speed, latency factors and scripted metrics."""
        service = self._service
        factors = service.cluster.commander.latency_factors
        turned = {str(k): factor for k, factor in sorted(factors.items()) if factor != 1.0}
        return JSONResponse(
            {
                "speed": service.speed,
                "latency_factors": turned,
                "scripted_metrics": service.scripted,
                "stale_metrics_s": service.stale_metrics_s,
                "kv_noise": msgspec.to_builtins(service.kv_noise),
            }
        )

    async def turn_knobs(self, request: HttpRequest) -> Response:
        """Turn them."""
        service = self._service
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
            service.scripted = body.scripted_metrics
        if body.stale_metrics_s is not None:
            known = {"all", *(str(r.replica_id) for r in service.cluster.replicas)}
            unknown = [key for key in body.stale_metrics_s if key not in known]
            if unknown:
                problem = f"there is no replica {unknown[0]!r}"
                raise ApiError(400, problem, param="stale_metrics_s")
            service.stale_metrics_s = body.stale_metrics_s
        if body.kv_noise is not None:
            service.kv_noise = body.kv_noise
        if body.speed is not None and body.speed != service.speed:
            service.set_speed(body.speed, "asked for")
        return await self.knobs(request)

    async def _set_latency(self, factors: dict[str, float]) -> None:
        """Raises ApiError for a key that names nothing; then nothing is changed."""
        service = self._service
        replicas, plans = service.cluster.replicas, service.plan.replicas
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
            turned = service.cluster.commander.latency_factors
            for replica_id, factor in sorted(wanted.items()):
                if turned.get(replica_id, 1.0) != factor:
                    command_now(service, replicas[replica_id], SET_LATENCY, factor)
            for key, factor in factors.items():  # a line for a knob, not for each replica
                target = f"replica {key}" if key.isdigit() else key
                service.cluster.note("command", target, f"{SET_LATENCY} {factor:g}")

        await service.enter(turn)

    async def failures(self, request: HttpRequest) -> Response:
        """The failure schedule of the HTTP layer."""
        rules = msgspec.to_builtins(self._service.failures.rules)
        return JSONResponse({"rules": rules, "returned": self._service.counts.failures_returned})

    async def fail(self, request: HttpRequest) -> Response:
        """Replace it."""
        body = decode_body(await request.body(), FailuresBody)
        if FailureRule() in body.rules:  # a slip of the pen, with which no call would pass
            index = body.rules.index(FailureRule())
            problem = (
                f"rules[{index}] is empty and would fail every call; say which calls fail, "
                "or with which status"
            )
            raise ApiError(400, problem, param=f"rules[{index}]")
        seed = self._service.plan.config.seed
        self._service.failures = FailureSchedule(body.rules, seed=seed)
        return await self.failures(request)


def _json(content: object) -> Response:
    """An answer of structs."""
    return Response(msgspec.json.encode(content), media_type=JSON)


def _fault_forms() -> list[dict[str, Sequence[str]]]:
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
