"""A fleet: each replica is an endpoint, outside routers decide, and the recording knows it."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from emu.config.load import load_config
from emu.runs.runner import execute
from tests.patience import PATIENCE_S
from tests.serve.live import PREFILL_DECODE, Live, events, run, tables

DECODE_FIRST = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPT = "one long prompt " * 30


@asynccontextmanager
async def endpoints(live: Live) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client for each port."""
    fleet = live.server.fleet
    assert fleet is not None
    clients = [
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{e.port}", timeout=PATIENCE_S)
        for e in fleet.endpoints
    ]
    try:
        yield clients
    finally:
        for client in clients:
            await client.aclose()


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": PROMPT, **body})


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    """Sample of /metrics -> value, labels but `source` left out."""
    found = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            source = sample.labels.get("source", "")
            found[f"{sample.name} {source}".strip()] = sample.value
    return found


COSTS: list[dict[str, Any]] = [
    {},
    {"latency": {"backend": "roofline"}, "network": {"first_token": "decode"}},
]
"""Without an engine's front end, and with the front ends of both sides."""


def replayed(directory: Path) -> list[dict[str, str]]:
    """The rows of the run, which are those of its replay."""
    execute(load_config(directory / "replay.toml"), "replay", report=False)
    files = [directory / name / "requests.csv" for name in ("run", "replay")]
    assert files[0].read_bytes() == files[1].read_bytes()
    with files[0].open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_replica_answers_on_its_own_port(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as clients:
            for index, count in ((2, 3), (0, 1)):
                for _ in range(count):
                    answer = await complete(clients[index], max_tokens=4)
                    assert answer.status_code == 200
            for client, count in zip(clients, (1, 0, 3), strict=True):
                assert (await client.get("/health")).status_code == 200
                page = await figures(client)
                assert page["vllm:e2e_request_latency_seconds_count"] == count
                assert page["vllm:prompt_tokens_total"] == count * len(PROMPT)
                text = (await client.get("/metrics")).text
                assert 'engine="0"' in text
                assert 'engine="1"' not in text
                assert "emu:" not in text
            info = (await clients[0].get("/server_info?config_format=json")).json()
            assert info["vllm_config"]["cache_config"] == {"block_size": 16, "num_gpu_blocks": 2000}
            assert (await clients[0].get("/get_load")).json() == {"load": 0}
            refused = await complete(clients[0], kv_transfer_params=DECODE_FIRST)
            assert refused.status_code == 400

    run(tmp_path, tables(replicas=[{"count": 3}]), check, fleet=True)
    assert [row["instance_id"] for row in replayed(tmp_path)] == ["2", "2", "2", "0"]


@pytest.mark.parametrize("given", COSTS)
def test_prefill_and_decode_compute_a_prompt_once(tmp_path: Path, given: dict[str, Any]) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (first, _, third, _):
            answers = []
            for stream in (False, True):
                asked = {"max_tokens": 1, "kv_transfer_params": DECODE_FIRST}
                head = (await complete(first, **asked)).json()
                assert head["usage"]["completion_tokens"] == 1
                params = head["kv_transfer_params"]
                assert params["remote_request_id"] == head["id"]
                wrong = await complete(third, prompt="other", kv_transfer_params=params)
                assert wrong.status_code == 400
                answer = await complete(
                    third, max_tokens=9, kv_transfer_params=params, stream=stream
                )
                assert answer.status_code == 200, answer.text
                answers.append(answer)
                again = await complete(third, max_tokens=9, kv_transfer_params=params)
                assert again.status_code == 500  # the KV has been fetched
            assert answers[0].json()["usage"]["completion_tokens"] == 9
            assert len(answers[0].json()["choices"][0]["text"]) == 9
            assert len(events(answers[1].text)) == 10
            computed, received = await figures(first), await figures(third)
            by_source = "vllm:prompt_tokens_by_source_total"
            cached = (len(PROMPT) - 1) // 16 * 16
            assert computed[f"{by_source} local_compute"] == 2 * len(PROMPT) - cached
            assert received[f"{by_source} local_compute"] == 2
            assert received[f"{by_source} external_kv_transfer"] == 2 * len(PROMPT)
            assert received["vllm:nixl_bytes_transferred_count"] == 2
            assert received["vllm:time_to_first_token_seconds_count"] == 2

    replicas = [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}]
    run(tmp_path, tables(replicas=replicas, **given), check, fleet=True)
    rows = replayed(tmp_path)
    assert [(r["instance_id"], r["decode_instance_id"]) for r in rows] == [("0", "2")] * 2
    assert [(r["decode_toks"], r["migrations"], r["status"]) for r in rows] == [
        ("10", "1", "completed")
    ] * 2


def test_what_a_role_cannot_serve_is_refused(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        fetch = {
            "do_remote_prefill": True,
            "remote_engine_id": "no",
            "remote_request_id": "no",
            "remote_block_ids": [[1]],
            "remote_host": "here",
            "remote_port": 1,
        }
        async with endpoints(live) as (first, second):
            for client, body, status in (
                (first, {}, 400),
                (second, {}, 400),
                (second, {"kv_transfer_params": DECODE_FIRST}, 400),
                (first, {"kv_transfer_params": fetch}, 400),
                (first, {"kv_transfer_params": DECODE_FIRST, "stream": True}, 400),
                (first, {"kv_transfer_params": DECODE_FIRST, "n": 2}, 400),
                (second, {"kv_transfer_params": fetch}, 500),
                (second, {"kv_transfer_params": {**fetch, "remote_host": None}}, 400),
                (second, {"kv_transfer_params": {**fetch, "remote_block_ids": []}}, 400),
            ):
                answer = await complete(client, **body)
                assert answer.status_code == status, (body, answer.text)

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, fleet=True)


def test_kv_that_nobody_fetches_is_given_up(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (first, second):
            head = await complete(first, max_tokens=1, kv_transfer_params=DECODE_FIRST)
            assert live.blocks_used() > 0
            await live.until(lambda: live.cluster.gateway.outstanding == 0)
            assert live.blocks_used() == 0
            expired = "vllm:nixl_num_kv_expired_reqs_total"
            assert (await figures(first))[expired] == 1
            assert (await figures(second))[expired] == 0
            params = head.json()["kv_transfer_params"]
            assert (await complete(second, kv_transfer_params=params)).status_code == 500

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, fleet=True, kv_lease_s=1.0)
    assert [row["status"] for row in replayed(tmp_path)] == ["cancelled"]


@pytest.mark.parametrize("given", COSTS)
def test_sglang_halves_meet_by_room_in_either_order(tmp_path: Path, given: dict[str, Any]) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as pair:
            for room, order in ((11, (0, 1)), (12, (1, 0))):
                body = {
                    "text": PROMPT,
                    "sampling_params": {"max_new_tokens": 6},
                    "bootstrap_host": "127.0.0.1",
                    "bootstrap_port": 8998,
                    "bootstrap_room": room,
                }
                calls = []
                for index in order:
                    calls.append(asyncio.create_task(pair[index].post("/generate", json=body)))
                    await asyncio.sleep(0)
                answers = [await call for call in calls]
                assert [a.status_code for a in answers] == [200, 200], answers[0].text
                decoded = answers[order.index(1)].json()
                assert decoded["meta_info"]["completion_tokens"] == 6
                assert decoded["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
                assert len(decoded["text"]) == 6
                prefilled = answers[order.index(0)].json()
                assert prefilled["meta_info"]["completion_tokens"] == 1
            info = (await pair[1].get("/get_server_info")).json()
            assert info["disaggregation_mode"] == "decode"
            load = (await pair[1].get("/get_load")).json()
            assert load[0]["num_reqs"] == 0
            page = await figures(pair[1])
            assert page["sglang:num_running_reqs"] == 0
            assert page["sglang:generation_tokens_total"] == 12

    run(tmp_path, tables(replicas=PREFILL_DECODE, **given), check, fleet=True, face="sglang")
    assert [row["migrations"] for row in replayed(tmp_path)] == ["1", "1"]


def test_a_half_does_not_wait_for_a_prefill_engine_that_has_died(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (first, second):
            port = first.base_url.port
            half = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "max_tokens": 5}
            kernel = live.cluster.kernel
            waiting = [
                asyncio.create_task(complete(second, **half, bootstrap_room=room))
                for room in (1, 2)
            ]
            fleet = live.server.fleet
            assert fleet is not None
            rooms = fleet.handoffs._rooms
            await live.until(lambda: len(rooms) == 2)
            waiting[1].cancel()  # its client leaves
            await asyncio.gather(waiting[1], return_exceptions=True)
            await live.until(lambda: list(rooms) == [1])
            begin_ns = kernel.wall_ns()
            crash = {"kind": "replica_crash", "replica": 0, "duration_s": 3.0}
            assert (await live.client.post("/emu/faults", json=crash)).status_code == 200
            answer = await waiting[0]
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "kv_transfer_failed"
            assert 10 <= (kernel.wall_ns() - begin_ns) / 1e9 < 300
            assert not rooms

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, fleet=True, face="sglang", speed=1000)


SLOW: dict[str, Any] = {"nodes": [{"gpus": 1, "nic_gbps": 0.02}] * 2}
"""Machines between which KV takes its time."""


def sglang_body(room: int, port: int | None = None) -> dict[str, Any]:
    return {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": 6},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": room,
    }


def seconds(live: Live) -> float:
    """Emulated time."""
    return live.cluster.kernel.wall_ns() / 1e9


@pytest.mark.parametrize("face", ["sglang", "vllm"])
def test_kv_for_a_decode_engine_that_dies_is_given_up(tmp_path: Path, face: str) -> None:
    """By SGLang at once, by vLLM at the end of the lease; the answer ends at once in both."""

    async def check(live: Live) -> None:
        async with endpoints(live) as (first, second):
            if face == "sglang":
                body = sglang_body(1)
                head = asyncio.create_task(first.post("/generate", json=body))
                tail = asyncio.create_task(second.post("/generate", json=body))
            else:
                head = asyncio.create_task(
                    complete(first, max_tokens=1, kv_transfer_params=DECODE_FIRST)
                )
                params = (await head).json()["kv_transfer_params"]
                tail = asyncio.create_task(complete(second, kv_transfer_params=params))
            await live.until(lambda: live.cluster.engines[1].fetching == 1)
            assert (await head).status_code == 200
            begin_s = seconds(live)
            crash = {"kind": "replica_crash", "replica": 1, "duration_s": 400.0}
            assert (await live.client.post("/emu/faults", json=crash)).status_code == 200
            answer = await tail
            assert answer.status_code == 503
            assert seconds(live) < begin_s + 20
            assert (live.blocks_used() > 0) == (face == "vllm")
            await live.until(lambda: live.blocks_used() == 0)
            assert (seconds(live) > begin_s + 60) == (face == "vllm")
            assert live.cluster.engines[1].fetching == 0
            assert live.cluster.gateway.outstanding == 0

    raw = tables(replicas=PREFILL_DECODE, **SLOW)
    run(tmp_path, raw, check, fleet=True, face=face, speed=10, kv_lease_s=100.0)
    assert [row["status"] for row in replayed(tmp_path)] == ["cancelled"]


def test_a_decode_half_hears_of_a_prefill_whose_client_left_before_it_arrived(
    tmp_path: Path,
) -> None:
    """Such a request never is in the cluster, so that nothing there would ever end it."""

    async def check(live: Live) -> None:
        fleet = live.server.fleet
        assert fleet is not None
        rooms = fleet.handoffs._rooms
        async with endpoints(live) as (first, second):
            still_read = live.service.intake.begin(0)  # a call before it, which holds the time
            head = asyncio.create_task(first.post("/generate", json=sglang_body(1)))
            await live.until(lambda: any(room.prefill.done() for room in rooms.values()))
            parked = rooms[1].prefill.result()
            tail = asyncio.create_task(second.post("/generate", json=sglang_body(1)))
            await live.until(lambda: parked.is_taken)
            head.cancel()
            await asyncio.gather(head, return_exceptions=True)
            await live.until(lambda: parked.choice.exchange.has_left)
            live.service.intake.end(still_read)
            answer = await tail
            assert answer.status_code == 408
            assert live.cluster.engines[1].fetching == 0
            assert live.cluster.engines[1].success["error"] == 1

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, fleet=True, face="sglang")


def test_a_prefill_half_without_the_other_is_given_up_after_300_s(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (first, _):
            assert (await first.post("/generate", json=sglang_body(1))).status_code == 200
            assert live.blocks_used() > 0
            await live.until(lambda: live.blocks_used() == 0)
            assert 300 <= seconds(live) < 400

    raw = tables(replicas=PREFILL_DECODE)
    run(tmp_path, raw, check, fleet=True, face="sglang", speed=500, kv_lease_s=4800.0)
    replayed(tmp_path)


def test_a_decode_half_ends_when_its_own_engine_dies(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (_, second):
            waiting = asyncio.create_task(second.post("/generate", json=sglang_body(1)))
            fleet = live.server.fleet
            assert fleet is not None
            await live.until(lambda: bool(fleet.handoffs._rooms))
            begin_s = seconds(live)
            crash = {"kind": "replica_crash", "replica": 1, "duration_s": 400.0}
            assert (await live.client.post("/emu/faults", json=crash)).status_code == 200
            assert (await waiting).status_code == 503
            assert seconds(live) < begin_s + 100
            assert not fleet.handoffs._rooms

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, fleet=True, face="sglang")


def test_a_crash_closes_the_port_and_fails_its_requests(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (first, second):
            lost = asyncio.create_task(complete(first, max_tokens=300))
            await live.until(lambda: live.cluster.stats.generated_sum > 5)
            fault = {"kind": "replica_crash", "replica": 0, "duration_s": 5.0}
            assert (await live.client.post("/emu/faults", json=fault)).status_code == 200
            assert (await lost).status_code == 503
            assert (await complete(second, max_tokens=3)).status_code == 200

            ports = live.server.ports
            assert ports is not None
            await live.until(lambda: ports.closed[0] > 0)
            while (await _health(first)) != 200:  # noqa: ASYNC110 (it restarts)
                await asyncio.sleep(0.01)
            assert (await complete(first, max_tokens=3)).status_code == 200

    run(tmp_path, tables(replicas=[{"count": 2}]), check, fleet=True)
    assert [row["status"] for row in replayed(tmp_path)] == ["failed", "completed", "completed"]


def test_the_port_of_a_replica_that_is_gone_refuses(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        assert live.server.fleet is not None
        port = live.server.fleet.endpoints[1].port
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)

    run(tmp_path, tables(replicas=[{}, {"role": "inactive"}]), check, fleet=True)


def test_an_outside_autoscaler_adds_and_removes_replicas(tmp_path: Path) -> None:
    path = "/apis/apps/v1/namespaces/default/deployments/colocated/scale"

    async def check(live: Live) -> None:
        client = live.client
        first = (await client.get(path)).json()
        assert (first["spec"]["replicas"], first["status"]["replicas"]) == (1, 1)
        answer = await client.patch(path, json={"spec": {"replicas": 3}})
        assert answer.status_code == 200
        assert answer.json()["spec"]["replicas"] == 3
        status = (await client.get(path.removesuffix("/scale"))).json()["status"]
        assert (status["replicas"], status["readyReplicas"]) == (3, 1)  # weights take their time
        waited_ns = live.cluster.kernel.wall_ns()
        while status["readyReplicas"] < 3:
            status = (await client.get(path.removesuffix("/scale"))).json()["status"]
        waited_ns = live.cluster.kernel.wall_ns() - waited_ns
        assert waited_ns / 1e9 > 0.5 * live.service.sleep.from_host_s
        async with endpoints(live) as clients:
            while (await _health(clients[2])) != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await complete(clients[2], max_tokens=2)).status_code == 200
        beyond = await client.patch(path, json={"spec": {"replicas": 4}})
        assert beyond.status_code == 403
        assert beyond.json()["reason"] == "Forbidden"
        stale = {"metadata": {"resourceVersion": "1"}, "spec": {"replicas": 2}}
        assert (await client.put(path, json=stale)).status_code == 409
        assert (await client.patch(path, json={"spec": {"replicas": -1}})).status_code == 422
        assert (await client.put(path, json={"spec": {}})).status_code == 400
        other = path.replace("colocated", "nothing")
        assert (await client.get(other)).status_code == 404
        assert (await client.patch(path, json={"spec": {"replicas": 1}})).status_code == 200
        assert (await client.get(path)).json()["status"]["replicas"] == 1

    raw = tables(replicas=[{}, {"role": "inactive", "count": 2}])
    run(tmp_path, raw, check, fleet=True)
    rows = replayed(tmp_path)
    assert [row["instance_id"] for row in rows] == ["2"]


async def _health(client: httpx.AsyncClient) -> int:
    try:
        return (await client.get("/health")).status_code
    except httpx.HTTPError:
        return 0
