"""A real server driven with a workload: requests leave at their arrival times.

Turns of a session leave after the one before. Prompts are token ids, so that lengths are exact
without a tokenizer; ids come from the workload where it has them, else they are drawn per request,
so that no two prompts share a prefix.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import anyio
import msgspec
import numpy as np
from anyio.abc import TaskGroup

from emu.apps.observe.options import DriveOptions
from emu.apps.shared.client import Client, StreamCall
from emu.request import Request
from emu.rng import rng_stream
from emu.units import NS_PER_S
from emu.workload.opened import Workload

_LATE_S: Final = 0.05


class Observed(msgspec.Struct):
    """One request as its client saw it. Seconds since the start, emulated."""

    request: Request
    sent_s: float
    token_s: list[float]
    error: str
    cached_tokens: int = 0


class Observer:
    """Drives one server with one workload."""

    def __init__(
        self, client: Client, model: str, workload: Workload, options: DriveOptions
    ) -> None:
        self._client = client
        self._model = model
        self._workload = workload
        self._options = options
        self._start_s = 0.0
        self.seen: list[Observed] = []
        self.late = 0
        """Requests that left more than 50 ms after their time: this machine was too busy."""
        self._gate = anyio.CapacityLimiter(options.concurrency or 1_000_000)

    async def run(self) -> None:
        """Run until the last answer has ended."""
        self._start_s = time.monotonic()
        async with anyio.create_task_group() as group:
            for request in self._workload.releases():
                await self._until(request.arrival_ns)
                group.start_soon(self._play, group, request)
        self.seen.sort(key=lambda seen: seen.request.request_id)

    async def _until(self, at_ns: int) -> None:
        due_s = self._start_s + at_ns / NS_PER_S / self._options.speed
        left_s = due_s - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
        elif left_s < -_LATE_S:
            self.late += 1

    async def _later(self, group: TaskGroup, request: Request) -> None:
        await self._until(request.arrival_ns)
        await self._play(group, request)

    async def _play(self, group: TaskGroup, request: Request) -> None:
        """A request, and the turns of its session that wait for it."""
        async with self._gate:
            seen = await self._one(request)
        self.seen.append(seen)
        now_ns = int((time.monotonic() - self._start_s) * self._options.speed * NS_PER_S)
        following = self._workload.end_turn(request, now_ns, completed=not seen.error)
        for turn in following.arriving:
            group.start_soon(self._later, group, turn)

    async def _one(self, request: Request) -> Observed:
        body = {
            "model": self._model,
            "prompt": self._prompt(request),
            "max_tokens": request.output_tokens,
            "min_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timeout_s = self._options.timeout_s
        if request.cancel_after_ns >= 0:
            timeout_s = request.cancel_after_ns / NS_PER_S / self._options.speed
        sent_s = time.monotonic()
        call: StreamCall | None = None
        error = ""
        try:
            call = await self._client.post("/v1/completions", body)
            sent_s = call.sent_s
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(call.ended)
        except TimeoutError:
            error = "left" if request.cancel_after_ns >= 0 else "timeout"
            if call is not None:
                call.abort()
        except OSError as failed:
            error = str(failed) or type(failed).__name__
        speed = self._options.speed
        if call is None:
            return Observed(request, (sent_s - self._start_s) * speed, [], error)
        error = error or call.error or _verdict(call, request)
        usage = call.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        return Observed(
            request,
            (sent_s - self._start_s) * speed,
            [(at_s - self._start_s) * speed for at_s in call.token_s],
            error,
            int(details.get("cached_tokens") or 0),
        )

    def _prompt(self, request: Request) -> str | list[int]:
        count = request.prompt_tokens
        prefix = request.prefix
        vocab = 26 if self._options.text else self._options.vocab_size
        if prefix is not None and prefix.token_ids is not None:
            ids = prefix.token_ids[:count] % vocab
        else:
            rng = rng_stream(self._options.seed, f"observe.{request.request_id}")
            ids = rng.integers(0, vocab, count)
        if self._options.text:
            return bytes((ids + 97).astype(np.uint8)).decode()
        numbers: list[int] = ids.tolist()
        return numbers


def _verdict(call: StreamCall, request: Request) -> str:
    """Why a call does not count as completed; empty if it does."""
    if call.status != 200:
        return f"HTTP {call.status}: {call.body[:200].decode('utf-8', 'replace')}"
    if not call.is_done:
        return "the stream broke off"
    if len(call.token_s) != request.output_tokens:
        return f"{len(call.token_s)} chunks instead of {request.output_tokens} tokens"
    return ""
