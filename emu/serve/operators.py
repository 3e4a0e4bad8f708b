"""What operators ask of the server: an engine's calls as vLLM has them, Kubernetes' `scale`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from emu.cluster.commands import RESET, TARGETS
from emu.replica.replica import Replica
from emu.replica.states import GPU_ROLE, ReplicaState
from emu.serve.control import check_control, command_now
from emu.serve.house import ADAPTERS_MAX, House
from emu.serve.protocol import NAME_MAX, ApiError, decode_body
from emu.units import NS_PER_S

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
# Adapters are names: they cost no memory and no time here, so none is accepted as if it did. They
# are listed, can be asked for and are counted; `docs/reference/live-api.md` says what is not
# emulated.


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
        body = decode_body(await request.body(), AdapterBody)
        name = body.lora_name
        if not body.lora_path:
            raise ApiError(400, "lora_path is missing", param="lora_path")
        if len(house.models) > 1:
            raise ApiError(400, "adapters are for a server of one model", type="InvalidUserInput")
        if name in house.model_names or (name in house.adapters and not body.load_inplace):
            problem = f"The lora adapter '{name}' has already been loaded."
            raise ApiError(400, problem, type="InvalidUserInput")
        if len(house.adapters) >= ADAPTERS_MAX:
            raise ApiError(400, f"at most {ADAPTERS_MAX} adapters", type="InvalidUserInput")
        house.adapters[name] = body.lora_path
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """The name is gone."""
        house = self._house
        check_control(house, request)
        name = decode_body(await request.body(), AdapterBody).lora_name
        if house.adapters.pop(name, None) is None:
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

    def _serving(self, role: str) -> list[Replica]:
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

    def _free(self) -> list[Replica]:
        taken = set().union(*self._starting.values())
        return [
            r
            for r in self._house.cluster.replicas
            if r.state is ReplicaState.INACTIVE and r.replica_id not in taken
        ]

    async def _start(self, role: str, replica: Replica) -> None:
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
