"""A whole `emu serve` in simulation: one seed's cluster, clients, machine and files."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import functools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import anyio

from emu.apps.serve import server as serving
from emu.apps.serve.options import ServeOptions
from emu.apps.serve.server import LiveServer
from emu.config.load import config_from_dict
from emu.kernel.wallclock import WallKernel
from tests.chaos.simulated.clients import Caller, generating
from tests.chaos.simulated.loop import SimLoop

HEALTHY_S: Final = 0.1
"""Wall time in which `/health` answers, at the latest."""
GONE_S: Final = 1.0
"""Wall time after which a client that went away has left nothing behind."""
_PAGES: Final = ("/health", "/health", "/health", "/metrics", "/emu/state")
_CALLERS_MAX: Final = 8


class Drawn:
    """What a seed says."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"server {seed}")
        self.turn_ns = rng.choice((1_000, 20_000, 100_000))
        self.speed = rng.choice((1.0, 20.0, 200.0))
        self.count = rng.randint(1, _CALLERS_MAX)
        self.stands_s = rng.choice((0.0, 0.0, 0.5, 5.0, 30.0))
        self.lengths = (60, 600) if self.stands_s else (1, 5, 60, 300)
        self.look_ns = rng.choice((50_000, 1_000_000) if self.stands_s else (1_000, 1_000_000))
        roles = rng.choice((["colocated"], ["colocated"] * 2, ["prefill", "decode"]))
        self.tables: dict[str, Any] = {
            "seed": seed,
            "nodes": [{"gpu": "A100-SXM4-80GB", "gpus": 8}],
            "replicas": [{"role": role} for role in roles],
            "latency": {"backend": "linear", "base_us": 5000, "per_token_us": 20},
            "scheduler": {
                "num_blocks": rng.choice((60, 2000)),
                "max_num_seqs": rng.choice((2, 64)),
            },
            "workload": {"synthetic": {"requests": 1}},
            "output": {"report": False},
        }


class Seen:
    """What clients and probes saw."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []
        self.pages: list[Caller] = []
        self.problems: list[str] = []
        self.stood_until_s = 0.0
        self.drained_s = float("inf")
        """When the server was told to end: its pages then say so."""


@contextlib.contextmanager
def _made_up(loop: SimLoop) -> Iterator[None]:
    """The server's clocks are the loop's."""
    kernel = functools.partial(
        WallKernel, clock_ns=loop.clock_ns, unix_s=lambda: 1.7e9 + loop.time()
    )
    with (
        mock.patch.object(serving, "WallKernel", kernel),
        mock.patch.object(serving, "time", SimpleNamespace(monotonic=loop.time)),
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def simulate(seed: int, directory: Path) -> tuple[list[str], str]:
    """What is wrong, and a history that a second run of the seed repeats."""
    drawn, seen = Drawn(seed), Seen()
    loop = SimLoop(random.Random(f"loop {seed}"), drawn.look_ns, drawn.turn_ns)
    options = ServeOptions(speed=drawn.speed, startup_s=0.0, port=0, drain_s=60.0)
    server = LiveServer(config_from_dict(drawn.tables), "simulated", options, directory)

    async def main() -> None:
        started = asyncio.Event()
        async with anyio.create_task_group() as group:

            async def run() -> None:
                await server.run(announce=lambda _: started.set(), handle_signals=False)
                group.cancel_scope.cancel()

            group.start_soon(run)
            await started.wait()
            while server.port not in loop._acceptors:  # noqa: ASYNC110 (uvicorn says nothing)
                await asyncio.sleep(0.001)
            try:
                await _traffic(loop, drawn, server, seen)
            finally:
                seen.drained_s = loop.time()
                await server.stop()

    with _made_up(loop):
        try:
            anyio.run(main, backend_options={"loop_factory": lambda: loop})
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            seen.problems.append(f"the server ended: {type(inner).__name__}: {inner}")
    if not seen.problems:
        _judge(drawn, directory, seen)
    told = [(one.kind, one.status, one.began_s, one.ended_s, one.left_s) for one in seen.callers]
    pages = [(one.status, one.began_s, one.ended_s) for one in seen.pages]
    return seen.problems, repr((told, pages, loop.now_ns))


async def _traffic(loop: SimLoop, drawn: Drawn, server: LiveServer, seen: Seen) -> None:
    rng = drawn.rng
    probing = asyncio.create_task(_probe(loop, rng, server, seen))
    for index in range(drawn.count):
        caller = generating(loop, rng, index, drawn.lengths)
        seen.callers.append(caller)
        if loop.connect(server.port, caller) is None:
            seen.problems.append("the port refuses")
            return
        await asyncio.sleep(rng.choice((0.0, 0.001, 0.05, 0.3)) / drawn.speed)
    if drawn.stands_s:
        await asyncio.sleep(rng.choice((0.01, 0.2)) / drawn.speed)
        loop.stand_still(drawn.stands_s)
        seen.stood_until_s = loop.time()
        for caller in seen.callers:
            if caller.kind in ("vanishes", "leaves_early"):
                caller.leave()
    watching = [asyncio.create_task(_watch(one, loop, server, seen)) for one in seen.callers]
    await asyncio.wait([one.over for one in seen.callers], timeout=300)
    for one in seen.callers:
        if not one.over.done():
            seen.problems.append(f"a call that {one.kind} has no end after 300 s")
            one.leave()
    await asyncio.gather(*watching)
    probing.cancel()


async def _probe(loop: SimLoop, rng: random.Random, server: LiveServer, seen: Seen) -> None:
    while True:
        page = Caller(loop, "whole", "GET", rng.choice(_PAGES))
        seen.pages.append(page)
        loop.connect(server.port, page)
        await asyncio.wait([page.over], timeout=60)
        await asyncio.sleep(rng.choice((0.01, 0.05, 0.2)))


async def _watch(caller: Caller, loop: SimLoop, server: LiveServer, seen: Seen) -> None:
    """A client that is gone is gone in the cluster, too."""
    await caller.over
    if caller.left_s < 0:
        return
    while loop.time() < max(caller.left_s, seen.stood_until_s) + GONE_S:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    service = server.service
    assert service is not None
    for choice in service.cluster._choices.values():
        if choice.request.prompt_tokens == caller.prompt_tokens:
            seen.problems.append(f"a client that {caller.kind} is served {GONE_S:g} s later")


def _judge(drawn: Drawn, directory: Path, seen: Seen) -> None:
    """requests.csv says what clients saw, and pages came in time."""
    say = seen.problems.append
    with (directory / "run" / "requests.csv").open(newline="", encoding="utf-8") as file:
        rows: dict[int, dict[str, str]] = {}
        for row in csv.DictReader(file):
            if int(row["prompt_toks"]) in rows:
                say(f"two rows of the call with {row['prompt_tokens']} tokens")
            rows[int(row["prompt_toks"])] = row
    for one in seen.callers:
        row = rows.pop(one.prompt_tokens, {})
        status = row.get("status", "none")
        if one.is_whole and one.status == 200:
            wanted = one.body["max_tokens"]
            if status != "completed" or int(row["output_toks"]) != wanted:
                say(f"an answer that a client has whole is {status}")
            if one.completion_tokens != wanted:
                say(f"a client got {one.completion_tokens} tokens of {wanted}")
        elif one.is_whole:
            if row and one.status != 200:
                say(f"a call that was refused with {one.status} has a row: {status}")
        elif one.left_s < 0 and not (one.kind == "half" and drawn.stands_s):
            say(f"a call that {one.kind} was cut off, and its row is {status}")
        elif status == "completed":
            end_ns = int(row["arrival_ns"]) + int(row["latency_ns"])
            left_s = max(one.left_s, seen.stood_until_s)
            if end_ns / 1e9 / drawn.speed > left_s + GONE_S:
                say(f"a client that {one.kind} is completed long after")
    if rows:
        say(f"{len(rows)} rows belong to no client")
    for page in seen.pages:
        if not 0 <= page.ended_s <= seen.drained_s:
            continue
        took_s = page.ended_s - max(page.began_s, seen.stood_until_s)
        if page.status != 200 or not page.is_whole:
            say(f"a page came with {page.status}")
        elif took_s > HEALTHY_S:
            say(f"a page took {took_s * 1e3:.0f} ms")
    summary = json.loads((directory / "run" / "summary.json").read_text(encoding="utf-8"))
    completed = sum(one.is_whole and one.status == 200 for one in seen.callers)
    if summary["completed"] < completed:
        say(f"{summary['completed']} completed, clients have {completed} answers")
