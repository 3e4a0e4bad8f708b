"""LoRA adapters on the ports of a fleet: each engine loads its own, with slots and loads."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import numpy as np

from emu.apps.serve.cache_salt import salted_prefix
from emu.apps.serve.kv_events import Ledger
from emu.apps.serve.wire import wire_of
from emu.features.lora.slots import Adapters
from emu.kv.blocks import BlockPool
from emu.request import Request
from tests.serve.live import Live, run, tables
from tests.serve.test_fleet import complete, endpoints, replayed

LORA = {"num_blocks": 2000, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}


def named(name: str) -> dict[str, str]:
    return {"lora_name": name, "lora_path": f"/adapters/{name}"}


async def info(client: httpx.AsyncClient) -> tuple[str, str, str]:
    """(slots, running, waiting) of `vllm:lora_requests_info`; empty texts if it is absent."""
    page = (await client.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("vllm:lora_requests_info{")]
    if not lines:
        return "", "", ""
    (line,) = lines
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    assert set(labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    return labels["max_lora"], labels["running_lora_adapters"], labels["waiting_lora_adapters"]


def test_each_port_loads_adapters_of_its_own(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (one, other):
            path = "/v1/load_lora_adapter"
            assert await info(one) == ("2", "", "")
            assert (await complete(one, model="a", max_tokens=2)).status_code == 404
            loaded = await one.post(path, json=named("a"))
            assert loaded.text == "Success: LoRA adapter 'a' added successfully."
            assert (await one.post(path, json=named("a"))).status_code == 400
            assert (await complete(other, model="a", max_tokens=2)).status_code == 404
            cards = (await one.get("/v1/models")).json()["data"]
            assert [card["parent"] for card in cards] == [None, live.service.model]
            spent = []
            for _ in range(2):
                before = live.cluster.engines[0].ttft.total
                answer = (await complete(one, model="a", max_tokens=2)).json()
                assert answer["model"] == "a"
                spent.append(live.cluster.engines[0].ttft.total - before)
            (slots,) = live.cluster.replicas[0].scheduler.parts
            assert isinstance(slots, Adapters)
            assert (slots.cold_loads, slots.hits > 0) == (1, True)
            assert spent[0] > spent[1], "the first step loads it"
            plain = (await complete(one, max_tokens=2)).json()["usage"]
            assert plain["prompt_tokens_details"]["cached_tokens"] == 0, "KV of its own"
            task = asyncio.create_task(complete(one, model="a", max_tokens=200))
            await live.until(lambda: live.cluster.engines[0].generated_sum > 20)
            assert await info(one) == ("2", "a", "")
            assert await info(other) == ("2", "", "")
            await task
            assert (await one.post("/v1/unload_lora_adapter", json=named("a"))).status_code == 200
            assert (await one.post("/v1/unload_lora_adapter", json=named("a"))).status_code == 404
            assert (await complete(one, model="a", max_tokens=2)).status_code == 404

    run(tmp_path, tables(replicas=[{"count": 2}], scheduler=LORA), check, fleet=True)
    replayed(tmp_path)
    lines = (tmp_path / "workload.jsonl").read_text().splitlines()
    assert ['"adapter":"a"' in line for line in lines] == [True, True, False, True]


def test_an_adapter_without_a_slot_waits(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (one,):
            for name in "abc":
                assert (
                    await live.client.post("/v1/load_lora_adapter", json=named(name))
                ).is_success
            assert (await one.post("/v1/load_lora_adapter", json=named("a"))).status_code == 400
            assert (await one.post("/v1/unload_lora_adapter", json=named("a"))).status_code == 400
            tasks = [
                asyncio.create_task(complete(one, model=name, max_tokens=300)) for name in "abc"
            ]
            await live.until(lambda: live.cluster.engines[0].generated_sum > 20)
            slots, running, waiting = await info(one)
            assert slots == "2"
            assert sorted([*running.split(","), waiting]) == ["a", "b", "c"]
            answers = await asyncio.gather(*tasks)
            assert [answer.status_code for answer in answers] == [200] * 3

    run(tmp_path, tables(scheduler=LORA), check, fleet=True)
    replayed(tmp_path)


def test_ports_without_lora_refuse_adapters(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with endpoints(live) as (one,):
            refused = await one.post("/v1/load_lora_adapter", json=named("a"))
            assert refused.status_code == 400
            assert "enable_lora" in refused.json()["error"]["message"]
            assert await info(one) == ("", "", "")

    run(tmp_path, tables(), check, fleet=True)


def test_kv_events_name_the_adapter() -> None:
    wire = wire_of("vllm-0.19")
    pool = BlockPool(40, 4)
    ledger = Ledger(wire, 4, lambda: None, lambda _: "salt", {"a": 3})
    pool.watcher = ledger
    ids = np.arange(9, dtype=np.int64)
    request = Request(
        request_id=0,
        arrival_ns=0,
        prompt_tokens=8,
        output_tokens=1,
        max_output_tokens=1,
        prefix=salted_prefix(ids[:8], ids[8:], "salt"),
    )
    request.adapter = "a"
    pool.grow(request, 0, 9, pool.lookup(request))
    (event,) = ledger.take()
    assert event[5:] == [3, "GPU", "a", [["a", "salt"], ["a"]]]
