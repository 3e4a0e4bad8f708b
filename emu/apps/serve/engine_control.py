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
from starlette.routing import Route

from emu.apps.serve.adapters import AdapterBody, load_adapter, unload_adapter
from emu.apps.serve.api_errors import ApiError
from emu.apps.serve.bodies import decode_body
from emu.apps.serve.keys import check_control
from emu.apps.serve.service import House, command_now
from emu.cluster.commands import RESET
from emu.units import NS_PER_S


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
