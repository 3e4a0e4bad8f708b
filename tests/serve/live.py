"""Live servers for tests: in this process, on a free loopback port.

Their time is not the wall's. It goes on by a millisecond with each turn of the event loop, so that
a test sees every stage of a request however slow or busy the machine is, and waits for none.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from emu.apps.serve.options import ServeOptions
from emu.apps.serve.server import LiveServer
from emu.apps.serve.world import LiveCluster
from emu.config.load import config_from_dict
from emu.kernel.wallclock import WallKernel
from emu.request import Request, Status
from tests.patience import PATIENCE_S
from tests.serve.invariants import check_server

LINEAR = {"backend": "linear", "base_us": 5000, "per_token_us": 20, "per_context_token_us": 0.5}
PREFILL_DECODE: list[dict[str, Any]] = [{"role": "prefill"}, {"role": "decode"}]


class Turns:
    """A clock that counts turns of the event loop as milliseconds of emulated time.

    For eyes outside, `turn_ms` of it pass in a turn that lasts as long as `speed` says, or longer.
    """

    def __init__(self, speed: float, turn_ms: int = 0) -> None:
        self.turn_ns = int((turn_ms or 1) * 1e6 / speed)
        self.pause_s = self.turn_ns / 1e9 if turn_ms else 0.0
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        """For clients that measure."""
        return self.now_ns / 1e9

    async def sleep(self, duration_s: float) -> None:
        """For clients that wait."""
        end_s = self.monotonic() + duration_s
        while self.monotonic() < end_s:  # noqa: ASYNC110 (each turn is a moment)
            await asyncio.sleep(0)

    async def go(self, server: LiveServer) -> None:
        """Let time pass."""
        while True:
            self.now_ns += self.turn_ns
            kernel = server.service.cluster.kernel if server.service is not None else None
            if kernel is not None and kernel._running == 0:
                kernel._advance()
            await asyncio.sleep(self.pause_s)


class Live:
    """A server that runs."""

    def __init__(self, server: LiveServer, client: httpx.AsyncClient, clock: Turns) -> None:
        assert server.service is not None
        self.server = server
        self.client = client
        self.clock = clock
        self.service = server.service
        self.cluster: LiveCluster = server.service.cluster
        self.directory = server.directory

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that happens in the emulation."""
        with anyio.fail_after(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 (there is nothing to wait on: it looks inside)
                await asyncio.sleep(0)

    def only_request(self) -> Request | None:
        """The one request that is under way."""
        choices = list(self.cluster._choices.values())
        return choices[0].request if len(choices) == 1 else None

    def status(self) -> Status | None:
        """Where the one request is."""
        request = self.only_request()
        return None if request is None else request.status

    def blocks_used(self) -> int:
        """Of all replicas."""
        for replica in self.cluster.replicas:
            replica.settle()
        return sum(r.scheduler.blocks_used for r in self.cluster.replicas)

    async def complete(self, **body: Any) -> httpx.Response:
        """POST /v1/completions."""
        return await self.client.post("/v1/completions", json={"prompt": "hello", **body})


def tables(**given: Any) -> dict[str, Any]:
    """A small cluster."""
    raw: dict[str, Any] = {
        "replicas": [{}],
        "latency": LINEAR,
        "scheduler": {"num_blocks": 2000},
        "workload": {"synthetic": {"requests": 1}},
        "output": {"report": False},
    }
    raw.update(given)
    return raw


@contextlib.asynccontextmanager
async def live(
    directory: Path, raw: dict[str, Any], *, turn_ms: int = 0, **options: Any
) -> AsyncIterator[Live]:
    """A server; drained and finished at the end, which checks the books."""
    settings = {"speed": 50.0, "startup_s": 0.0, "port": 0, "drain_s": PATIENCE_S, **options}
    config = config_from_dict(raw)
    server = LiveServer(config, "test", ServeOptions(**settings), directory)
    started = asyncio.Event()
    clock = Turns(settings["speed"], turn_ms)
    async with anyio.create_task_group() as group:

        async def run() -> None:
            with pytest.MonkeyPatch.context() as patch:
                kernel = functools.partial(WallKernel, clock_ns=clock)
                patch.setattr("emu.apps.serve.server.WallKernel", kernel)
                group.start_soon(clock.go, server)
                await server.run(announce=lambda _: started.set(), handle_signals=False)
            group.cancel_scope.cancel()

        group.start_soon(run)
        await started.wait()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=PATIENCE_S, limits=limits
        ) as client:
            try:
                yield Live(server, client, clock)
            finally:  # a check that fails ends its server, too
                with anyio.move_on_after(PATIENCE_S, shield=True):
                    await server.stop()


def run(
    directory: Path, raw: dict[str, Any], check: Callable[[Live], Awaitable[None]], **options: Any
) -> None:
    """Run a check against a server of its own, whose pages keep their laws at its end."""

    async def main() -> None:
        with anyio.fail_after(PATIENCE_S):
            async with live(directory, raw, **options) as server:
                await check(server)
                if server.cluster.error is None:
                    check_server(server)

    anyio.run(main, backend_options={"use_uvloop": True})


def events(text: str) -> list[Any]:
    """The `data:` events of a stream; `[DONE]` as a string."""
    found = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            content = block[6:]
            found.append(content if content == "[DONE]" else msgspec.json.decode(content))
    return found
