"""A machine that cannot keep up: clients that have gone are gone, and new ones are told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.serve.live import Live, run, tables

FAR_S = 600.0
"""Emulated seconds by which the emulation falls behind: fifteen times the longest answer here."""
LONG = {"prompt": "hello", "max_tokens": 8000, "stream": True}


def fall_behind(live: Live) -> None:
    """The machine stood still: emulated time is due that nothing has gone through."""
    live.clock.now_ns += round(FAR_S * 1e9 / live.service.speed)


async def begin(live: Live) -> httpx.Response:
    """An answer of 40 emulated seconds, of which some tokens have come."""
    request = live.client.build_request("POST", "/v1/completions", json=LONG)
    before = live.cluster.stats.generated_sum
    stream = await live.client.send(request, stream=True)
    await live.until(lambda: live.cluster.stats.generated_sum > before + 5)
    return stream


def test_who_has_left_is_cancelled_before_what_is_due_is_computed(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        stream = await begin(live)
        fall_behind(live)
        await stream.aclose()
        await live.until(lambda: live.cluster.gateway.outstanding == 0)
        assert live.cluster.stats.by_status == {"cancelled": 1}
        assert live.cluster.stats.generated_sum < 1000

    run(tmp_path, tables(), check)


def test_a_call_whose_client_left_before_it_arrived_never_does(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        first = await begin(live)
        fall_behind(live)
        body = {"prompt": "hello", "max_tokens": 10}
        request = live.client.build_request("POST", "/v1/completions", json=body)
        with_it = live.client.send(request)
        task = asyncio.create_task(with_it)
        await live.until(lambda: live.cluster.open_choices == 2)
        task.cancel()
        await live.until(lambda: live.cluster.open_choices == 1)
        assert live.cluster.stats.by_status == {}
        await first.aclose()
        await live.until(lambda: live.cluster.gateway.outstanding == 0)
        assert live.cluster.stats.by_status == {"cancelled": 1}

    run(tmp_path, tables(), check, max_lag_s=0.0)


def test_new_calls_are_refused_while_the_emulation_is_far_behind(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        stream = await begin(live)
        fall_behind(live)
        refused = await live.complete(max_tokens=1)
        assert refused.status_code == 503
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("emulator_overloaded", "emulator_behind")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (await live.client.get("/health")).status_code == 200
        page = (await live.client.get("/metrics")).text
        assert "emu:calls_shed_total 1.0" in page
        assert live.cluster.stats.by_status == {}
        await stream.aclose()
        await live.until(lambda: live.cluster.gateway.outstanding == 0)
        assert (await live.complete(max_tokens=1)).status_code == 200

    run(tmp_path, tables(), check)


def test_without_a_bound_every_call_is_taken(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        stream = await begin(live)
        fall_behind(live)
        late = asyncio.create_task(live.complete(max_tokens=1))
        await live.until(lambda: live.cluster.open_choices == 2)
        await stream.aclose()
        assert (await late).status_code == 200

    run(tmp_path, tables(), check, max_lag_s=0.0)
