"""What vLLM lets an operator do to an engine: sleep, wake up, forget prefixes, adapters.

Emulated cost. Going to sleep ends what is under way (`mode=abort`) or waits for it (`wait`), and
at level 1 copies the weights to host memory over PCIe; waking up copies them back (level 1) or
loads them from the disk (level 2). A call returns when the emulated time has passed. Forgetting
prefixes is a command of the recording (`reset_prefix_cache`), so that a replay forgets them at
the same instant; as in vLLM the answer is 200 whether or not it succeeded, and the body says
which.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import (
    JSONResponse,
    Response,
)

from emu.apps.serve.adapters import AdapterBody, adapter_operations, load_adapter, unload_adapter
from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import decode_body
from emu.apps.serve.operations import TEXT, Access, Operation
from emu.apps.serve.service import Service, command_now
from emu.cluster.commands import RESET
from emu.units import NS_PER_S


class EngineControl:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._changing = asyncio.Lock()

    def operations(self) -> list[Operation]:
        """What needs vLLM's development mode there."""
        control = Access.CONTROL
        bad, sleeping = (400,), "Whether it sleeps"
        return [
            Operation(
                "POST /sleep", self.sleep, "Go to sleep", kind=TEXT, statuses=bad, access=control
            ),
            Operation(
                "POST /wake_up", self.wake_up, "Wake up", kind=TEXT, statuses=bad, access=control
            ),
            Operation("GET /is_sleeping", self.is_sleeping, sleeping, answer="Answer"),
            Operation(
                "POST /reset_prefix_cache",
                self.reset_prefix_cache,
                "Forget cached prefixes",
                answer="Answer",
                statuses=bad,
                access=control,
            ),
            *adapter_operations(self.load_adapter, self.unload_adapter, control),
        ]

    async def sleep(self, request: HttpRequest) -> Response:
        """End or await what is under way, drop the KV, move the weights."""
        service = self._service
        level = request.query_params.get("level", "1")
        mode = request.query_params.get("mode", "abort")
        if level not in ("1", "2"):
            raise ApiError(400, "level is 1 or 2", param="level")
        if mode not in ("abort", "wait"):
            raise ApiError(400, "mode is abort or wait (keep is not emulated)", param="mode")
        async with self._changing:
            if service.sleep.level:
                return Response()
            service.sleep.level = int(level)
            if mode == "abort":
                service.cluster.leave_all()
            while service.cluster.open_choices:  # noqa: ASYNC110 (ends with the last answer)
                await asyncio.sleep(0.005)
            await self._reset()
            if level == "1":
                await self._pass_s(service.sleep.from_host_s)
        return Response()

    async def wake_up(self, request: HttpRequest) -> Response:
        """The weights come back."""
        service = self._service
        if request.query_params.get("tags"):
            raise ApiError(400, "tags are not emulated: everything wakes up", param="tags")
        async with self._changing:
            if service.sleep.level:
                from_host = service.sleep.level == 1
                await self._pass_s(
                    service.sleep.from_host_s if from_host else service.sleep.from_disk_s
                )
                service.sleep.level = 0
        return Response()

    async def is_sleeping(self, request: HttpRequest) -> Response:
        """Whether it sleeps."""
        return JSONResponse({"is_sleeping": self._service.sleep.level > 0})

    async def reset_prefix_cache(self, request: HttpRequest) -> Response:
        """Forget cached prefixes on every replica that has nothing to do."""
        if request.query_params.get("reset_running_requests", "false").lower() == "true":
            raise ApiError(
                400, "running requests are not preempted", param="reset_running_requests"
            )
        done = await self._reset()
        return JSONResponse({"success": all(done), "replicas": sum(done)})

    async def _reset(self) -> list[bool]:
        service = self._service
        replicas = service.cluster.replicas
        return await service.enter(
            lambda: [command_now(service, r, RESET) == "done" for r in replicas]
        )

    async def _pass_s(self, emulated_s: float) -> None:
        """Let emulated time go by."""
        kernel = self._service.cluster.kernel
        end_ns = kernel.wall_ns() + round(emulated_s * NS_PER_S)
        while (left_ns := end_ns - kernel.wall_ns()) > 0:  # noqa: ASYNC110 (the speed may change)
            await asyncio.sleep(min(0.05, left_ns / NS_PER_S / kernel.speed))

    async def load_adapter(self, request: HttpRequest) -> Response:
        """A further name that can be asked for."""
        service = self._service
        if len(service.models) > 1:
            raise ApiError(400, "adapters are for a server of one model", type="InvalidUserInput")
        body = decode_body(await request.body(), AdapterBody)
        everywhere = service.adapters.everywhere
        return load_adapter(service, everywhere, body, everywhere)

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """The name is gone."""
        service = self._service
        body = decode_body(await request.body(), AdapterBody)
        return unload_adapter(service.adapters.everywhere, body)
