"""Calls that fail as networks make them fail, and faults that wait for the first call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from emu.apps.serve.failures import Asked, FailureRule, FailureSchedule
from tests.serve.live import Live, run, tables
from tests.serve.test_fleet import complete, endpoints


async def rules(live: Live, *given: dict[str, Any]) -> None:
    answer = await live.client.post("/emu/failures", json={"rules": list(given)})
    assert answer.status_code == 200, answer.text


def test_rules_know_time_port_and_queue() -> None:
    schedule = FailureSchedule(
        [
            FailureRule(from_s=10.0, for_s=5.0, status=500),
            FailureRule(replica=2, mode="reset"),
            FailureRule(queue_above=3, status=429),
        ],
        seed=0,
    )

    def fails(**more: Any) -> tuple[str, int] | None:
        found = schedule.judge(Asked(path="/v1/completions", **more))
        return None if found is None else (found.mode, found.status)

    assert [fails(since_first_s=s) for s in (9.9, 10.0, 14.9, 15.0)] == [
        None,
        ("status", 500),
        ("status", 500),
        None,
    ]
    assert fails(replica=2) == ("reset", 503)
    assert [fails(waiting=n) for n in (3, 4)] == [None, ("status", 429)]


def test_a_connection_is_reset_before_and_within_an_answer(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        await rules(live, {"mode": "reset", "first": 1})
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await live.complete(max_tokens=4)
        await rules(live, {"mode": "reset", "first": 1, "after_tokens": 3})
        text = ""
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            body = {"prompt": "hello", "max_tokens": 50, "stream": True}
            async with live.client.stream("POST", "/v1/completions", json=body) as answer:
                async for piece in answer.aiter_text():
                    text += piece
        assert text.count("data: ") == 3
        assert "error" not in text
        assert (await live.complete(max_tokens=4)).status_code == 200
        await live.until(lambda: live.cluster.open_choices == 0)

    run(tmp_path, tables(), check)


def test_a_silent_connection_stays_open_until_its_client_leaves(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        await rules(live, {"mode": "silent", "first": 1})
        with pytest.raises(httpx.ReadTimeout):
            await live.client.post("/v1/completions", json={"prompt": "x"}, timeout=0.3)
        await rules(live, {"mode": "silent", "after_tokens": 2})
        body = {"prompt": "hello", "max_tokens": 50, "stream": True}
        text = ""
        with pytest.raises(httpx.ReadTimeout):
            async with live.client.stream(
                "POST", "/v1/completions", json=body, timeout=0.3
            ) as answer:
                async for piece in answer.aiter_text():
                    text += piece
        assert text.count("data: ") == 2
        await live.until(lambda: live.cluster.open_choices == 0)

    run(tmp_path, tables(), check)


def test_a_slow_answer_is_whole_and_no_lateness(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        await rules(live, {"mode": "slow", "delay_ms": 20})
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        answer = await live.complete(max_tokens=5, stream=True)
        assert answer.text.endswith("[DONE]\n\n")
        assert loop.time() - begin_s >= 0.02

    run(tmp_path, tables(), check)


def test_a_lost_answer_may_be_reset_and_one_port_alone_fails(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (first, second):
            await rules(live, {"replica": 1, "status": 500})
            assert (await complete(first, max_tokens=2)).status_code == 200
            assert (await complete(second, max_tokens=2)).status_code == 500
            task = asyncio.create_task(complete(first, max_tokens=400, stream=True))
            await live.until(lambda: any(c.sent > 3 for c in live.cluster._choices.values()))
            fault = {"kind": "replica_crash", "replica": 0, "duration_s": 1.0}
            assert (await live.client.post("/emu/faults", json=fault)).status_code == 200
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                await task

    run(tmp_path, tables(replicas=[{"count": 2}]), check, fleet=True, lost="reset")


def test_faults_wait_for_the_first_call(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        await live.clock.sleep(0.2)  # ten emulated seconds
        assert live.cluster.faults.struck == {}
        first_ns = live.cluster.kernel.wall_ns()
        assert (await live.complete(max_tokens=2)).status_code == 200
        await live.until(lambda: bool(live.cluster.faults.struck))
        struck_ns = live.cluster.kernel.wall_ns() - first_ns
        assert 3 <= struck_ns / 1e9 < 5
        await live.until(lambda: live.cluster.replicas[1].state.value == "inactive")

    raw = tables(
        replicas=[{"count": 2}],
        faults=[{"kind": "straggler", "at_s": 3.0, "replica": 0, "factor": 2.0}],
        commands=[{"at_s": 4.0, "replica": 1, "command": "deactivate"}],
    )
    run(tmp_path, raw, check, faults_from="first-request")
    text = (tmp_path / "replay.toml").read_text()
    assert "straggler" in text
    assert "deactivate" in text


def test_a_port_s_metrics_may_be_stale(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (first, second):
            knobs = {"stale_metrics_s": {"0": 3600}}
            assert (await live.client.post("/emu/knobs", json=knobs)).status_code == 200
            before = [(await port.get("/metrics")).text for port in (first, second)]
            for port in (first, second):
                await complete(port, max_tokens=3)
            after = [(await port.get("/metrics")).text for port in (first, second)]
            assert (before[0] == after[0], before[1] == after[1]) == (True, False)
            wrong = await live.client.post("/emu/knobs", json={"stale_metrics_s": {"9": 1}})
            assert wrong.status_code == 400

    run(tmp_path, tables(replicas=[{"count": 2}]), check, fleet=True)
