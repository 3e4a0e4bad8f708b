"""Kubernetes' `scale` sub-resource for the roles of the cluster: what an outside autoscaler writes.

    GET, PUT, PATCH /apis/apps/v1/namespaces/NS/deployments/ROLE/scale

ROLE is colocated, prefill or decode; any namespace will do. `spec.replicas` is what was asked
for, `status.replicas` what serves: a replica that is added first loads its weights from host
memory, in emulated time. Asking for more than there are GPUs for is 403, as a quota says it, a
stale `resourceVersion` 409, a negative number 422.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import (
    JSONResponse,
    Response,
)

from emu.apps.serve.operations import Access, Operation
from emu.apps.serve.service import Service, command_now
from emu.cluster.commands import TARGETS
from emu.replica.states import GPU_ROLE, ReplicaState
from emu.replica.view import ReplicaHandle
from emu.units import NS_PER_S

ROLES: Final = ("colocated", "prefill", "decode")
_REASONS: Final = {400: "BadRequest", 403: "Forbidden", 404: "NotFound", 409: "Conflict"}
SCALE_PATH: Final = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"


class _Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Scale:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._wanted: dict[str, int] = {}
        self._version = 1
        self._starting: dict[str, set[int]] = {role: set() for role in ROLES}
        self._tasks: set[asyncio.Task[None]] = set()

    def operations(self) -> list[Operation]:
        """The methods of the one path."""
        examples = {"namespace": "default", "name": "decode"}
        written = (400, 403, 404, 409, 422)
        return [
            Operation(
                f"{method} {SCALE_PATH}",
                self.scale,
                summary,
                body,
                "Scale",
                kubernetes_statuses=written if body else (404,),
                access=Access.CONTROL,
                examples=examples,
            )
            for method, summary, body in (
                ("GET", "Replicas of a role", None),
                ("PUT", "Scale a role", "Scale"),
                ("PATCH", "Scale a role", "Scale"),
            )
        ]

    async def scale(self, request: HttpRequest) -> Response:
        """Read or write."""
        name = request.path_params["name"]
        try:
            if name not in ROLES:
                raise _Refused(404, f'deployments.apps "{name}" not found')
            if len(self._service.models) > 1:
                raise _Refused(404, "roles can be scaled where one model is served")
            if request.method != "GET":
                await self._write(name, await request.body())
        except _Refused as refused:
            reason = _REASONS.get(refused.code, "Invalid")
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
            body |= {"message": str(refused), "reason": reason}
            return JSONResponse({**body, "code": refused.code}, status_code=refused.code)
        return JSONResponse(self._answer(name, request.path_params["namespace"]))

    def _answer(self, role: str, namespace: str) -> dict[str, object]:
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
            for r in self._service.cluster.replicas
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
            for r in self._service.cluster.replicas
            if r.state is ReplicaState.INACTIVE and r.replica_id not in taken
        ]

    async def _start(self, role: str, replica: ReplicaHandle) -> None:
        """The weights arrive, then it serves (unless it is no longer wanted)."""
        service = self._service
        kernel = service.cluster.kernel
        end_ns = kernel.wall_ns() + round(service.weights_to_host_s * NS_PER_S)
        starting = self._starting[role]
        while (left_ns := end_ns - kernel.wall_ns()) > 0:  # noqa: ASYNC110 (the speed may change)
            await asyncio.sleep(min(0.05, left_ns / NS_PER_S / kernel.speed))
        if replica.replica_id in starting:
            starting.discard(replica.replica_id)
            await service.enter(lambda: command_now(service, replica, f"to_{role}"))

    async def _remove(self, role: str, count: int) -> None:
        """Those that start first, then the highest ids."""
        starting, service = self._starting[role], self._service
        for replica_id in sorted(starting, reverse=True)[:count]:
            starting.discard(replica_id)
            count -= 1
        leaving = [r for r in reversed(self._serving(role)) if ("deactivate", r.state) in TARGETS]
        for replica in leaving[:count]:
            await service.enter(lambda r=replica: command_now(service, r, "deactivate"))  # type: ignore[misc]
