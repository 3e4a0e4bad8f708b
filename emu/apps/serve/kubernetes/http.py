"""The API on the server's port: the shell between HTTP, the emulation and the pure core.

The controller looks at the cluster twenty times a second and with each call. What it wants done is
a command or a fault that enters the emulation, and so is part of the recording. Watches are
answers that go on; they end with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from emu.apps.serve.endpoint import Endpoint
from emu.apps.serve.engine_metrics import kv_use
from emu.apps.serve.keys import check_control
from emu.apps.serve.kubernetes.api import Answer, Call, KubernetesApi, Watch, status_of
from emu.apps.serve.kubernetes.controller import Controller
from emu.apps.serve.kubernetes.documents import Document, Refused
from emu.apps.serve.kubernetes.metrics import WINDOW_S, MetricsApi, Reading
from emu.apps.serve.kubernetes.store import Store
from emu.apps.serve.kubernetes.tables import as_table
from emu.apps.serve.kubernetes.view import (
    Action,
    ClusterView,
    EndDrain,
    Facts,
    LoseNode,
    MachineView,
    ReplicaView,
    Stop,
)
from emu.apps.serve.service import Service, command_now, inject_now
from emu.apps.serve.statistics import awaiting_kv
from emu.config.faultkinds import read_fault
from emu.config.tables.faults import NodeCrash
from emu.process.version import __version__
from emu.replica.states import GPU_ROLE, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.units import NS_PER_S

LOOK_S: Final = 0.05
BOOKMARK_S: Final = 30.0
_ROUNDS_MAX: Final = 4
"""Looks in a row: what was done may call for more."""
ROLES: Final = ("colocated", "prefill", "decode")
_METHODS: Final = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_PATHS: Final = ("/api", "/apis", "/openapi/v3", "/healthz", "/livez", "/readyz")
S = ReplicaState


def _phase(state: ReplicaState) -> str:
    if state is S.INACTIVE:
        return "inactive"
    if state is S.FAILED:
        return "failed"
    if state is S.SHUTTING_NULL:
        return "spare"
    if state.value.startswith("shutting"):
        return "draining"
    if state.value.startswith(("loading", "new", "mutating", "aus")):
        return "loading"
    return "serving"


def _role(state: ReplicaState) -> str:
    role = GPU_ROLE[state]
    return state.value.partition("_")[2] if role == "loading" else role if role in ROLES else ""


class Kubernetes:
    """The API of one server."""

    def __init__(self, service: Service, endpoints: list[Endpoint]) -> None:
        self._service = service
        self._ports = {endpoint.replica.replica_id: endpoint.port for endpoint in endpoints}
        plan = service.plan
        configured = {replica.role for replica in plan.replicas} - {"inactive"}
        roles = ("prefill", "decode") if configured & {"prefill", "decode"} else ("colocated",)
        host = service.options.host
        facts = Facts(
            model=service.model,
            host="127.0.0.1" if host in ("0.0.0.0", "", "localhost") else host,
            roles=tuple(r for r in ROLES if r in {*roles, *configured}),
            load_ns=round(service.sleep.from_host_s * NS_PER_S),
            version=__version__,
            session=service.session,
        )
        self._store = Store(service.session)
        self._busy: list[deque[tuple[int, int]]] = [deque() for _ in service.cluster.replicas]
        """(emulated time, busy time) of each replica, ns, over the last seconds."""
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._controller = Controller(self._store, facts, self._view())
        metrics = MetricsApi(self._store, self._reading)
        self._api = KubernetesApi(self._store, self._controller, metrics, f"emu-{__version__}")

    def routes(self) -> list[Route]:
        """All paths of the API."""
        deep = [f"{path}/{{rest:path}}" for path in ("/api/v1", "/apis", "/openapi/v3")]
        return [Route(path, self._handle, methods=_METHODS) for path in (*_PATHS, "/api/v1", *deep)]

    def _view(self) -> ClusterView:
        cluster, plans = self._service.cluster, self._service.plan.replicas
        kernel = cluster.kernel
        in_force = [one.fault for one in cluster.faults.in_force.values()]
        lost = {fault.node for fault in in_force if isinstance(fault, NodeCrash)}
        machines = [
            MachineView(
                gpus=node.gpus,
                gpu=node.gpu if isinstance(node.gpu, str) else node.gpu.name,
                host_memory_gib=node.host_memory_gib,
            )
            for node in self._service.plan.config.nodes
            for _ in range(node.count)
        ]
        machines = [
            msgspec.structs.replace(one, is_lost=True) if index in lost else one
            for index, one in enumerate(machines)
        ]
        replicas = [
            ReplicaView(
                replica_id=replica.replica_id,
                machine=plan.machine,
                gpus=len(plan.gpus),
                port=self._ports.get(replica.replica_id, 0),
                role=_role(replica.state),
                phase=_phase(replica.state),
                life=replica.incarnation,
            )
            for replica, plan in zip(cluster.replicas, plans, strict=True)
        ]
        return ClusterView(
            now_ns=kernel.wall_ns(),
            now_s=kernel.unix_s(),
            machines=tuple(machines),
            replicas=tuple(replicas),
        )

    def _sample(self) -> None:
        """Busy time of the replicas, for shares of the last seconds."""
        for replica, samples in zip(self._service.cluster.replicas, self._busy, strict=True):
            now_ns = self._service.cluster.kernel.now_ns
            if samples and now_ns < samples[-1][0] + NS_PER_S:
                continue
            samples.append((now_ns, replica.view().booked_busy_ns))
            while samples[0][0] < now_ns - WINDOW_S * NS_PER_S:
                samples.popleft()

    def _reading(self, replica_id: int) -> Reading:
        cluster = self._service.cluster
        replica, plan = cluster.replicas[replica_id], self._service.plan.replicas[replica_id]
        view, samples = replica.view(), self._busy[replica_id]
        share = 0.0
        if samples and cluster.kernel.now_ns > samples[0][0]:
            busy_ns = view.booked_busy_ns - samples[0][1]
            share = min(1.0, max(0.0, busy_ns / (cluster.kernel.now_ns - samples[0][0])))
        waiting = view.waiting_count + awaiting_kv(replica, cluster.engines[replica_id])
        kv_bytes = view.blocks_used * plan.scheduler.block_size * plan.kv_bytes_per_token
        return Reading(
            busy_share=share,
            memory_bytes=kv_bytes + sum(plan.memory.physical_weight_bytes),
            gauges={
                "num_requests_waiting": float(waiting),
                "num_requests_running": float(view.running_count),
                "kv_cache_usage_perc": kv_use(replica),
            },
        )

    async def look(self) -> None:
        """Once: what the controller wants done, is done."""
        version = self._store.version
        async with self._lock:
            self._sample()
            for _ in range(_ROUNDS_MAX):
                actions = self._controller.step(self._view())
                if not actions:
                    break
                for action in actions:
                    await self._perform(action)
        if self._store.version != version:
            self._changed.set()
            self._changed = asyncio.Event()

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def _perform(self, action: Action) -> None:
        service = self._service
        if service.cluster.tape.replay.is_full:
            return
        if isinstance(action, LoseNode):
            await self._inject({"kind": "node_crash", "node": action.machine})
        elif isinstance(action, EndDrain):
            await self._inject({"kind": "drain_expired", "replica": action.replica})
        elif isinstance(action, Stop):
            await self._command(action.replica, "deactivate")
        elif await self._command(action.replica, f"to_{action.role}") == "refused":
            self._controller.refused(action.replica)

    async def _command(self, replica_id: int, command: str) -> str:
        service = self._service
        replica: ReplicaHandle = service.cluster.replicas[replica_id]
        return await service.enter(lambda: command_now(service, replica, command))

    async def _inject(self, fault: Document) -> None:
        table = read_fault(fault)
        await self._service.enter(lambda: inject_now(self._service, table))

    async def _handle(self, request: HttpRequest) -> ASGIApp:
        service = self._service
        check_control(service, request)
        call = Call(
            method=request.method,
            path=request.scope["path"],
            query=dict(request.query_params),
            accept=request.headers.get("accept", ""),
            content_type=request.headers.get("content-type", ""),
            body=await request.body(),
        )
        if len(service.models) > 1 and call.path.startswith(("/api/", "/apis/")):
            problem = "this API is there where one model is served"
            return JSONResponse(status_of(Refused(404, problem)), status_code=404)
        await self.look()
        async with self._lock:
            answer = self._api.answer(call)
            if isinstance(answer, Answer):
                for action in answer.actions:
                    await self._perform(action)
        if isinstance(answer, Watch):
            return StreamingResponse(self._watch(answer), media_type="application/json")
        if call.method not in ("GET", "HEAD"):
            await self.look()
        return _response(answer)

    async def _watch(self, watch: Watch) -> AsyncIterator[bytes]:
        """Events, one a line, until the time is over or the server ends."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + watch.timeout_s
        marked_s = loop.time()
        version = watch.version
        for document in watch.first:
            yield self._event("ADDED", document, watch)
        if watch.marks_first:
            yield self._bookmark(watch, version, is_first=True)
        while loop.time() < end_s and not self._service.hub.is_closed:
            changed = self._changed
            try:
                for change in self._store.since(watch.selected.kind, version):
                    seen = change.seen(watch.selected.test)
                    if seen is not None:
                        yield self._event(*seen, watch)
            except Refused as refused:
                line = {"type": "ERROR", "object": status_of(refused)}
                yield msgspec.json.encode(line) + b"\n"
                return
            version = self._store.version
            if watch.bookmarks and loop.time() > marked_s + BOOKMARK_S:
                marked_s = loop.time()
                yield self._bookmark(watch, version)
            left_s = max(0.0, min(end_s - loop.time(), BOOKMARK_S))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)

    def _event(self, kind: str, document: Document, watch: Watch) -> bytes:
        shown: Document = document
        if watch.selected.is_table:
            metadata = document["metadata"]
            assert isinstance(metadata, dict)
            version = str(metadata["resourceVersion"])
            shown = as_table(
                watch.selected.kind, [document], version, self._store.now_s, watch.selected.include
            )
        return msgspec.json.encode({"type": kind, "object": shown}) + b"\n"

    def _bookmark(self, watch: Watch, version: int, *, is_first: bool = False) -> bytes:
        metadata: Document = {"resourceVersion": str(version), "creationTimestamp": None}
        if is_first:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        shown: Document = {
            "kind": watch.selected.kind.kind,
            "apiVersion": watch.selected.kind.api_version,
        }
        line = {"type": "BOOKMARK", "object": {**shown, "metadata": metadata}}
        return msgspec.json.encode(line) + b"\n"


def _response(answer: Answer) -> Response:
    if isinstance(answer.content, str):
        return PlainTextResponse(answer.content, answer.status)
    return Response(
        msgspec.json.encode(answer.content), answer.status, media_type="application/json"
    )
