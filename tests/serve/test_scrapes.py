"""Random faults strike a live fleet, and every scrape between them keeps the laws of counters.

25 seeds of each kind with EMU_SOAK=1.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx
import pytest

from emu.apps.serve.choices import Choice
from emu.apps.serve.endpoint_metrics import EndpointPage
from emu.request import Request
from tests.serve.invariants import check_blocks, check_page, check_server
from tests.serve.live import Live, run, tables
from tests.serve.test_fleet import DECODE_FIRST, endpoints, replayed

COLOCATED: list[dict[str, Any]] = [{"count": 3}]
PAIRS: list[dict[str, Any]] = [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}]
FAULTS = (
    ("replica_crash", 4.0, None),
    ("replica_restart", None, None),
    ("straggler", 2.0, 3.0),
    ("pause", 1.0, None),
    ("transfer_broken", 2.0, 0.5),
)
ROUNDS = 24


class Leaving:
    """When a client may leave: while each of its posts waits for its answer, or has ended.

    httpcore loses sockets when a task is cancelled elsewhere: in connecting, and in closing those
    that an engine left, of which the first await that is cancelled skips the others.
    """

    def __init__(self) -> None:
        self._held = 0
        self._leaver: asyncio.Task[None] | None = None

    def leave(self, task: asyncio.Task[None]) -> None:
        """Now, or as soon as no post holds it."""
        self._leaver = task
        self._go()

    def _go(self) -> None:
        if self._leaver is not None and self._held == 0:
            self._leaver.cancel()
            self._leaver = None

    def hold(self) -> None:
        """Not now."""
        self._held += 1

    def free(self) -> None:
        """The other side of `hold`."""
        self._held -= 1
        self._go()

    async def see(self, event: str, _: object) -> None:
        """What httpx does for a post."""
        if event == "http11.receive_response_headers.started":
            self.free()
        elif event.startswith("http11.receive_response_headers."):
            self.hold()


_LEAVING: ContextVar[Leaving] = ContextVar("_LEAVING")


class Clients:
    """Calls of an outside router, and how many each engine was given."""

    def __init__(self, live: Live, ports: list[httpx.AsyncClient], face: str, seed: str) -> None:
        self._live = live
        self._ports = ports
        self._face = face
        self._rng = random.Random(seed)
        self._room = 0
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """One more call, or pair of calls; some clients leave early."""
        rng = self._rng
        fleet = self._live.server.fleet
        assert fleet is not None
        roles = [endpoint.role for endpoint in fleet.endpoints]
        prompt = f"{rng.randrange(4)} " + "words of a prompt " * rng.randrange(1, 30)
        output = rng.randrange(1, 60)
        first = [i for i, role in enumerate(roles) if role in ("prefill", "colocated")]
        second = [i for i, role in enumerate(roles) if role == "decode"]
        if not first or (not second and "colocated" not in roles):
            return
        one, two = rng.choice(first), rng.choice(second) if second else -1
        if two < 0:
            coming = self._whole(one, prompt, output)
        elif self._face == "sglang":
            coming = self._rooms(one, two, prompt, output)
        else:
            coming = self._by_hand(one, two, prompt, output)
        leaving = _LEAVING.set(Leaving())
        task = asyncio.create_task(coming)
        self.tasks.append(task)
        if rng.random() < 0.15:
            leave = _LEAVING.get().leave
            asyncio.get_running_loop().call_later(rng.random() * 0.05, leave, task)
        _LEAVING.reset(leaving)

    async def _post(self, port: int, path: str, body: dict[str, Any]) -> httpx.Response | None:
        leaving = _LEAVING.get()
        await asyncio.sleep(0)  # a task that was cancelled does not connect
        leaving.hold()
        try:
            return await self._ports[port].post(path, json=body, extensions={"trace": leaving.see})
        except httpx.HTTPError:
            return None
        finally:
            leaving.free()

    async def _whole(self, port: int, prompt: str, output: int) -> None:
        await self._post(port, "/v1/completions", {"prompt": prompt, "max_tokens": output})

    async def _by_hand(self, one: int, two: int, prompt: str, output: int) -> None:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1}
        head = await self._post(
            one, "/v1/completions", {**body, "kv_transfer_params": DECODE_FIRST}
        )
        if head is None or head.status_code != 200 or self._rng.random() < 0.1:
            return
        params = head.json()["kv_transfer_params"]
        body = {"prompt": prompt, "max_tokens": output, "kv_transfer_params": params}
        await self._post(two, "/v1/completions", body)

    async def _rooms(self, one: int, two: int, prompt: str, output: int) -> None:
        self._room += 1
        body = {
            "text": prompt,
            "sampling_params": {"max_new_tokens": output},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_room": self._room,
        }
        halves = [one] if self._rng.random() < 0.1 else [one, two]
        await asyncio.gather(*(self._post(port, "/generate", body) for port in halves))


class Given:
    """Requests that each engine was given: arrivals at its port, and KV that it was to fetch."""

    def __init__(self, live: Live) -> None:
        cluster = live.cluster
        self._live = live
        self.counts = [0] * len(cluster.replicas)
        arrive, adopt, end_fetch = cluster.gateway.arrive, cluster.adopt, cluster.end_fetch
        adopted: list[Choice] = []

        def see_arrive(request: Request) -> None:
            self.counts[request.pin] += 1
            arrive(request)

        def see_adopt(choice: Choice, first: Choice) -> None:
            self.counts[choice.request.decode_pin] += 1
            adopted.append(choice)
            adopt(choice, first)

        def see_end(choice: Choice, replica_id: int) -> None:
            if choice not in adopted:  # its KV was gone when the engine looked at the call
                self.counts[replica_id] += 1
            end_fetch(choice, replica_id)

        patched: Any = cluster
        patched.gateway.arrive, patched.adopt, patched.end_fetch = see_arrive, see_adopt, see_end

    def check(self) -> None:
        """Each page shows them: running, waiting or ended."""
        fleet = self._live.server.fleet
        assert fleet is not None
        for endpoint, given in zip(fleet.endpoints, self.counts, strict=True):
            page = EndpointPage(self._live.service, fleet, endpoint).render().decode()
            check_page(page, accepted=given)


@pytest.mark.parametrize("seed", range(25 if os.environ.get("EMU_SOAK") else 2))
@pytest.mark.parametrize("face", ["vllm", "sglang"])
@pytest.mark.parametrize("replicas", [COLOCATED, PAIRS], ids=["colocated", "pairs"])
def test_every_scrape_keeps_the_laws_whatever_strikes(
    tmp_path: Path, face: str, replicas: list[dict[str, Any]], seed: int
) -> None:
    rng = random.Random(f"{face} {len(replicas)} {seed}")
    struck: list[str] = []

    async def check(live: Live) -> None:
        async with endpoints(live) as ports:
            clients = Clients(live, ports, face, f"{seed}")
            given = Given(live)
            for _ in range(ROUNDS):
                for _ in range(rng.randrange(4)):
                    clients.begin()
                if rng.random() < 0.4:
                    kind, duration_s, magnitude = rng.choice(FAULTS)
                    fault: dict[str, Any] = {"kind": kind}
                    if kind != "transfer_broken":
                        fault["replica"] = rng.randrange(len(ports))
                    if duration_s is not None:
                        fault["duration_s"] = duration_s
                    if magnitude is not None:
                        fault["magnitude"] = magnitude
                    answer = await live.client.post("/emu/faults", json=fault)
                    assert answer.status_code in (200, 400, 409), answer.text
                    struck.append(f"{kind} {answer.status_code}")
                until_ns = live.cluster.kernel.wall_ns() + rng.randrange(10**9)
                while live.cluster.kernel.wall_ns() < until_ns:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                check_blocks(live.cluster)
                given.check()
            await asyncio.gather(*clients.tasks, return_exceptions=True)
            await live.until(lambda: live.cluster.gateway.outstanding == 0)
            check_server(live)
            given.check()
            assert sum(given.counts) > 10  # a seed draws 36 in the mean
            assert not any(one.fetching for one in live.cluster.engines)

    raw = tables(replicas=replicas, nodes=[{"gpus": 1, "nic_gbps": 1.0}] * 4)
    run(tmp_path, raw, check, fleet=True, face=face, kv_lease_s=5.0)
    assert struck
    assert len(replayed(tmp_path)) > 5
